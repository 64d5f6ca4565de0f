"""Research code to compare Fluxion with: rival policies, yardsticks, ablations, other task schedulers.

It is a package like those of third parties: entry points register it (`pyproject.toml`), and its kinds of tasks are in
its own native library (`csrc/lab`). `fluxion_sglang` never imports it.
"""
