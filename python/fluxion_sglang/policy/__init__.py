"""What to read. `parse_spec` turns the spec string of `--fluxion-config`, the CLI and the benchmarks into a policy."""

from __future__ import annotations

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy.base import DecodeStep, LayerPlan, Policy
from fluxion_sglang.policy.fixed import FixedPolicy

__all__ = ["DecodeStep", "LayerPlan", "Policy", "parse_spec", "FixedPolicy"]

_LEGAL = '"full" or "fixed:BLK:BUDGET" (BLK 16, 32, 64 or 128 tokens; BUDGET a fraction in (0, 1], as in fixed:16:0.05)'


def parse_spec(spec: str) -> Policy:
    """Build the policy that `spec` names.

    Raises:
        ValueError: one sentence naming the legal specs.
    """
    name, *args = spec.split(":")
    if name == "full" and not args:
        # Everything is the whole middle at any block size; the executors skip the scan at budget 1.
        return FixedPolicy(BLOCKS[0], 1.0)
    if name == "fixed" and len(args) == 2:
        try:
            blk, budget = int(args[0]), float(args[1])
        except ValueError:
            blk, budget = 0, 0.0
        if blk in BLOCKS and 0.0 < budget <= 1.0:
            return FixedPolicy(blk, budget)
    raise ValueError(f"policy {spec!r} is not one that this version knows; use {_LEGAL}.")
