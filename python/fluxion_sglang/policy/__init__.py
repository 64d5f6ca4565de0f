"""Sparse attention policies. `parse_spec` turns a spec string into a policy; `base.py` defines the interface."""

from fluxion_sglang.policy.base import Context, DecodeStep, LayerPlan, Needs, Observed, Policy
from fluxion_sglang.policy.specs import AUTO, BARE, LONGEST, check_spec, examples, legal, parse_spec

__all__ = [
    "AUTO",
    "BARE",
    "LONGEST",
    "Context",
    "DecodeStep",
    "LayerPlan",
    "Needs",
    "Observed",
    "Policy",
    "check_spec",
    "examples",
    "legal",
    "parse_spec",
]
