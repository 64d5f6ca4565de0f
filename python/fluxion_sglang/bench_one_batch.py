"""`python -m fluxion_sglang.bench_one_batch`: SGLang's one-batch benchmark, under a name that does not move.

The same as `python -m sglang.benchmark.one_batch`, which takes --enable-fluxion as well.
"""

from __future__ import annotations

from sglang.benchmark.one_batch import cli_main

if __name__ == "__main__":
    cli_main()
