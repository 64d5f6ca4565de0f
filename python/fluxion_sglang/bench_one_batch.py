"""`python -m fluxion_sglang.bench_one_batch`: SGLang's one-batch benchmark, under a name that does not move.

The same as `python -m sglang.benchmark.one_batch`, which takes --enable-fluxion as well, but for one thing: that one
runs the model in its own process, so here is the last moment to keep its OpenMP threads quiet.
"""

from __future__ import annotations

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()
    from sglang.benchmark.one_batch import cli_main

    cli_main()
