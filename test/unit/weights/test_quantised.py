"""Quantised weights: formats and packing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import few, seeds
from quantised_world import drawn, formats

from fluxion_sglang.weights.quantised import PANEL, Format, Quantised, pack, slices, unpack


@few
@given(form=formats, outputs=st.integers(1, 50), blocks=st.integers(1, 9), seed=seeds)
def test_what_is_packed_comes_back(form: Format, outputs: int, blocks: int, seed: int) -> None:
    weight = drawn(form, outputs, 32 * blocks, seed)
    back = unpack(pack(weight), form, outputs, 32 * blocks)
    assert torch.equal(back.integers, weight.integers) and torch.equal(back.scales, weight.scales)
    assert (back.minima is None) == (weight.minima is None)
    if weight.minima is not None and back.minima is not None:
        assert torch.equal(back.minima, weight.minima)


def test_a_place_in_a_panel() -> None:
    """As in csrc/kernels/table.h: headers of one or two groups, and the integers of a block."""
    four, eight = drawn(Format(4, 32, True), 20, 64, 1), drawn(Format(8, 32, False), 16, 96, 2)
    block = pack(four)[0, 64 + 256 + 64 :].view(torch.int16).view(4, 16, 2)  # the second block
    assert int(block[1, 5, 1]) >> 8 & 15 == four.integers[5, 32 + 8 * 1 + 2 * 2 + 1]
    packed = pack(eight)[0]
    assert torch.equal(packed[:64].view(torch.float16).view(2, 16).T.float(), eight.scales[:, :2])
    assert packed.view(torch.int8)[64 + 512 :][:512].view(8, 16, 2, 2)[3, 7, 1, 1] == eight.integers[7, 32 + 15]
    assert packed.numel() == 2 * 64 + 3 * 512, "the last head has room for two groups, too"


def test_weights_stand_for_numbers() -> None:
    nibbles, scales = torch.tensor([[0, 15] * 16], dtype=torch.uint8), torch.tensor([[2.0]])
    assert Quantised(nibbles, scales, None, Format(4, 32, False)).wide()[0, :2].tolist() == [-16.0, 14.0]
    lowered = Quantised(nibbles, scales, torch.tensor([[-1.0]]), Format(4, 32, True))
    assert lowered.wide()[0, :2].tolist() == [-1.0, 29.0]
    signed = Quantised(torch.tensor([[-128, 5] * 16], dtype=torch.int8), scales, None, Format(8, 32, False))
    assert signed.wide()[0, :2].tolist() == [-256.0, 10.0]


def test_slices_are_whole_panels() -> None:
    found = list(slices(100, 64, most=40 * 64))
    assert [(s.start, s.stop) for s in found] == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert [s.stop for s in slices(20, 1 << 20, most=1)] == [PANEL, 20]


def test_what_has_no_kernels_is_refused() -> None:
    for bits, group, minima in ((3, 32, False), (4, 48, True), (4, 16, False), (8, 16, True), (8, 0, False)):
        with pytest.raises(ValueError, match=f"weights of {bits} bits|a group has {group} inputs"):
            Format(bits, group, minima)
    form, scales = Format(8, 32, False), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"integers of 8 bits are torch.int8, and these are torch.uint8"):
        Quantised(torch.zeros(2, 64, dtype=torch.uint8), scales, None, form)
    with pytest.raises(ValueError, match="a weight has 48 inputs"):
        Quantised(torch.zeros(2, 48, dtype=torch.int8), scales, None, form)
    for parts in ((scales, scales), (scales[:, :1], None), (scales.double(), None)):
        with pytest.raises(ValueError, match=r"scales, and minima if the format has them, are float32 \[2, 2\]"):
            Quantised(torch.zeros(2, 64, dtype=torch.int8), *parts, form)
    with pytest.raises(ValueError, match="above 65504"):
        pack(Quantised(torch.zeros(2, 64, dtype=torch.int8), scales * 1e5, None, form))
