"""Linear layers of SGLang under --quantization fluxion-int8."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import dtypes, few, seeds
from refusals import one_sentence
from sglang.srt.layers import linear
from sglang.srt.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.config import ConfigError
from fluxion_sglang.native import NativeLayers, Workers
from fluxion_sglang.sglang.compat import INT8_WEIGHTS
from fluxion_sglang.sglang.start import served_models
from fluxion_sglang.sglang.steps import layers
from fluxion_sglang.sglang.weights.methods import parts_of, wide_slices
from fluxion_sglang.sglang.weights.rounding import FORMAT, RoundingConfig, RoundingMethod, rounded

NATIVE = NativeLayers(Workers(2))
IN, OUT = 128, 90


def loaded(size: int = IN, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> ReplicatedLinear:
    torch.manual_seed(size)
    made = ReplicatedLinear(size, OUT, bias=bias, params_dtype=dtype, quant_config=RoundingConfig(), prefix="layer")
    load(made, torch.randn(OUT, size).to(dtype))
    return made


def load(layer: nn.Module, weight: torch.Tensor) -> None:
    method = layer.quant_method
    assert isinstance(method, RoundingMethod)
    layer.weight.weight_loader(layer.weight, weight)
    method.process_weights_after_loading(layer)


def wide(layer: nn.Module) -> torch.Tensor:
    return torch.cat([rows for part in parts_of(layer) for rows in wide_slices(None, part, torch.float32)])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 96, 97, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_number_of_rows(native: bool, rows: int, dtype: torch.dtype) -> None:
    layer = loaded(dtype=dtype)
    if native:
        assert layers.install(nn.Sequential(layer), layers.Contained(NATIVE)) == 1
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows)).to(dtype)
    out, _ = layer(x)
    want = F.linear(x.float(), wide(layer))
    assert layer.weight.dtype is torch.uint8
    tolerance = 3e-2 if dtype is torch.bfloat16 else 2e-4
    torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=tolerance * math.sqrt(IN))


def test_inputs_that_are_no_multiple_of_a_group_stay_as_they_are() -> None:
    layer = loaded(size=80)
    assert layer.weight.dtype is torch.bfloat16
    x = torch.randn(3, 80).bfloat16()
    assert torch.equal(layer(x)[0], F.linear(x, layer.weight))


def test_weights_are_updated_and_rounded_again() -> None:
    layer = loaded()
    before, new = wide(layer), torch.randn(OUT, IN).bfloat16()
    with pytest.raises(ValueError, match="begin the update of weights before new ones are loaded"):
        layer.weight.weight_loader(layer.weight, new)
    method: Any = layer.quant_method
    for _ in range(2):  # a failed update is rolled back: restored again
        method.restore_weights_before_loading(layer)
    assert layer.weight.dtype is torch.bfloat16 and torch.equal(layer.weight, before.bfloat16())
    x = torch.randn(2, IN).bfloat16()
    assert torch.equal(layer(x)[0], F.linear(x, before.bfloat16())), "between, the layer still answers"
    load(layer, new)
    assert layer.weight.dtype is torch.uint8 and (wide(layer) - new.float()).abs().max() < 0.02


def test_a_head_has_a_rounded_copy_that_is_as_new_as_the_weight() -> None:
    model, head, weight = nn.Module(), nn.Module(), torch.randn(OUT, IN).bfloat16()
    head.quant_method = UnquantizedEmbeddingMethod()
    head.weight = nn.Parameter(weight.clone(), requires_grad=False)
    head.weight.weight_loader = lambda parameter, new: parameter.data.copy_(new)  # type: ignore[attr-defined]
    model.layer, model.lm_head = loaded(), head
    assert layers.install(model, layers.Contained(NATIVE)) == 2
    method, x = head.quant_method, torch.randn(2, IN).bfloat16()

    def error(weight: torch.Tensor) -> torch.Tensor:
        return (method.apply(head, x).float() - F.linear(x, weight).float()).abs().max()

    assert head.packed.dtype is torch.uint8 and 0 < error(weight) < 0.5
    many = torch.randn(200, IN).bfloat16()
    assert torch.equal(method.apply(head, many), F.linear(many, head.weight))
    new = torch.randn(OUT, IN).bfloat16()
    head.weight.weight_loader(head.weight, new)
    assert torch.equal(method.apply(head, x), F.linear(x, head.weight)), "the copy is old, and gone"
    method.process_weights_after_loading(head)
    assert 0 < error(new) < 0.5


def test_parts_of_a_merged_layer_are_loaded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: group)
    monkeypatch.setattr(linear, "get_group_rank_size", lambda _: (0, 1))
    given: Any = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": RoundingConfig()}
    merged = MergedColumnParallelLinear(IN, [64, 32], **given)
    parts = torch.randn(64, IN).bfloat16(), torch.randn(32, IN).bfloat16()
    for shard, part in enumerate(parts):
        merged.weight.weight_loader(merged.weight, part, shard)
    method: Any = merged.quant_method
    method.process_weights_after_loading(merged)
    assert (wide(merged) - torch.cat(parts).float()).abs().max() < 0.03


def test_what_cannot_be_is_refused() -> None:
    layer = ReplicatedLinear(IN, OUT, bias=False, params_dtype=torch.bfloat16, quant_config=RoundingConfig())
    weight = torch.randn(OUT, IN).bfloat16()
    for value, says in ((math.nan, "some are not finite"), (1e7, "a scale of the weights is .* above 65504")):
        weight[3, 4] = value
        with pytest.raises(ConfigError, match=f"because {says}") as told:
            load(layer, weight)
        one_sentence(str(told.value))
    with pytest.raises(ConfigError, match=f"--quantization {INT8_WEIGHTS} is for the CPU, and .* device is cuda"):
        served_models.check_quantised(SimpleNamespace(device="cuda", quantization=INT8_WEIGHTS))


# --- Rounding ---


@few
@given(n=st.integers(1, 5), groups=st.integers(1, 4), power=st.integers(-8, 20), seed=seeds)
@dtypes
def test_weights_are_rounded_to_the_nearest(dtype: torch.dtype, n: int, groups: int, power: int, seed: int) -> None:
    w = torch.randn(n, groups * FORMAT.group, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    found = rounded(w.to(dtype))
    step = found.scales.double().repeat_interleave(FORMAT.group, 1)
    assert ((found.wide().double() - w.to(dtype).double()).abs() <= step / 2 * (1 + 1e-6)).all()
    largest = found.integers.abs().unflatten(1, (-1, FORMAT.group)).amax(-1)
    assert ((largest >= 126) & (largest <= 127)).all(), "a scale is not larger than it has to be"


def test_nothing_tiny_and_what_is_not_finite() -> None:
    w = torch.zeros(3, FORMAT.group)
    w[1, 5], w[2, 0] = 1e-38, -3.0
    found = rounded(w)
    assert not found.integers[:2].any() and float(found.scales[0, 0]) == 0
    assert found.integers[2, 0] == -127 and not found.integers[2, 1:].any()
    w[0, 1] = math.inf
    with pytest.raises(ValueError, match=r"because some are not finite; leave that option out"):
        rounded(w)
