"""What Fluxion is measured against and by: rival policies, yardsticks, ablations, other orders of tasks.

It is a package like those of others: it comes in through entry points (`pyproject.toml`), and its kinds of tasks are in
a native library of its own (`csrc/lab`). Nothing of `fluxion_sglang` imports it.
"""
