"""`python -m faults`: see `feed`."""

import sys

from faults.feed import main

if __name__ == "__main__":
    sys.exit(main())
