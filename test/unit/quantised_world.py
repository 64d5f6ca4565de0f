"""Quantised weights for tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fluxion_sglang.weights.quantised import Format, Quantised

FORMATS = [Format(4, group, minima) for group in (32, 64, 96, 128) for minima in (False, True)]
FORMATS += [Format(8, group, minima) for group in (32, 128) for minima in (False, True)] + [Format(8, 16, False)]
formats = st.sampled_from(FORMATS)


def drawn(form: Format, outputs: int, inputs: int, seed: int) -> Quantised:
    """Random integers, with scales and minima that float16 represents exactly."""
    generator = torch.Generator().manual_seed(seed)
    least, most, dtype = (0, 16, torch.uint8) if form.bits == 4 else (-128, 128, torch.int8)
    integers = torch.randint(least, most, (outputs, inputs), generator=generator).to(dtype)
    shape = outputs, form.groups(inputs)
    scales = torch.rand(shape, generator=generator).half().float()
    minima = torch.randn(shape, generator=generator).half().float() if form.minima else None
    return Quantised(integers, scales, minima, form)
