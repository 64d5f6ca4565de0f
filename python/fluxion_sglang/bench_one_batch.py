"""`python -m fluxion_sglang.bench_one_batch`: SGLang's one-batch benchmark under a stable name.

It equals `python -m sglang.benchmark.one_batch`, which also takes --enable-fluxion, with one difference. That benchmark
runs the model in its own process, so this module must set the OpenMP wait policy before torch is imported.
"""

from __future__ import annotations

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()
    from sglang.benchmark.one_batch import cli_main

    cli_main()
