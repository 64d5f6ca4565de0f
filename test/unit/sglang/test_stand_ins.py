"""PyTorch replacements of SGLang's GPU kernels, against formulas in float64."""

from __future__ import annotations

import importlib
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fluxion_sglang.sglang.compat import CompatError
from fluxion_sglang.sglang.steps import stand_ins


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    limit = 1e-5 if got.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)


def test_softcap(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 50) * 20).to(dtype)
    want = 5 * torch.tanh(logits.double() / 5)
    stand_ins.softcap(logits, 5.0)
    torch.testing.assert_close(logits.double(), want, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_gate_sigmoid_mul_add(dtype: torch.dtype) -> None:
    x, weight, shared, out = (torch.randn(*size).to(dtype) for size in ((4, 32), (32,), (4, 32), (4, 32)))
    want = out.double() + torch.sigmoid(x.double() @ weight.double())[:, None] * shared.double()
    stand_ins.gate_sigmoid_mul_add(x, weight, shared, out)
    close(out, want)


def test_clamped_swiglu(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64) * 5).to(dtype)
    gate, up = x[:, ::2].double().clamp(max=2.0), x[:, 1::2].double().clamp(-2.0, 2.0)
    close(stand_ins.clamped_swiglu(x, 1.7, 2.0), gate * torch.sigmoid(1.7 * gate) * (up + 1))


def test_rms_apply_over_ranks(dtype: torch.dtype) -> None:
    """Two ranks with half of the heads each, and sums over both."""
    q, k = torch.randn(3, 64).to(dtype), torch.randn(3, 32).to(dtype)
    weights = torch.rand(64).to(dtype), torch.rand(32).to(dtype)
    halves = [[part.chunk(2, -1)[rank] for part in (q, k, *weights)] for rank in range(2)]
    sums = sum(stand_ins.sums_of_squares(*half[:2]) for half in halves)
    assert isinstance(sums, torch.Tensor)
    found = [stand_ins.rms_apply(*half, sums, 2, 1e-6) for half in halves]
    for x, weight, parts in zip((q, k), weights, zip(*found, strict=True), strict=True):
        close(torch.cat(parts, -1), F.rms_norm(x.double(), [x.shape[1]], weight.double(), 1e-6))


def test_split_projections(dtype: torch.dtype) -> None:
    qkvz, ba = torch.randn(3, 2 * 2 * 16 + 2 * 4 * 8).to(dtype), torch.randn(3, 8).to(dtype)
    mixed, z, b, a = stand_ins.split_projections(qkvz, ba, 2, 4, 16, 8)
    assert torch.equal(torch.cat([mixed, z.flatten(1)], 1), qkvz) and torch.equal(torch.cat([b, a], 1), ba)
    assert mixed.shape == (3, 96) and z.shape == (3, 4, 8) and a.is_contiguous() and b.is_contiguous()


def test_sigmoid_mul(dtype: torch.dtype) -> None:
    x, gate = torch.randn(3, 64).to(dtype), torch.randn(3, 4, 32).to(dtype)[..., :16]
    want = x.double() * torch.sigmoid(gate.double()).flatten(1)
    made = stand_ins.sigmoid_mul(x, gate)
    close(made, want)
    assert made is not x and stand_ins.sigmoid_mul(x, gate, inplace=True) is x and torch.equal(x, made)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_norm_then_gate(dtype: torch.dtype, activation: str) -> None:
    x, z, weight = torch.randn(3, 64).to(dtype), torch.randn(3, 64).to(dtype), torch.rand(64).to(dtype)
    module = SimpleNamespace(eps=1e-6, weight=weight, activation=activation)
    plain = F.rms_norm(x.double(), [64], weight.double(), 1e-6)
    gate = torch.sigmoid(z.double()) * (z.double() if activation == "swish" else 1)
    close(stand_ins.norm_then_gate(module, x, z), plain * gate)
    close(stand_ins.norm_then_gate(module, x), plain)


def test_they_take_the_place_of_those_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for need in stand_ins._FUNCTIONS:
        importlib.import_module(need.module)
    stand_ins.install()
    for need, function in stand_ins._FUNCTIONS.items():
        assert reduce(getattr, need.name.split("."), importlib.import_module(need.module)) is function
    stand_ins.install()
    module = importlib.import_module("sglang.srt.models.minimax_m2")
    monkeypatch.setattr(module, "rms_sumsq_serial", lambda x: x)
    with pytest.raises(CompatError, match=r"takes \(x\) and not \(x1, x2\)"):
        stand_ins.install()
