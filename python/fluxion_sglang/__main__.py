"""`python -m fluxion_sglang`: the `fluxion` command."""

import sys

from fluxion_sglang.cli import main

sys.exit(main())
