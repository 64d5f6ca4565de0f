"""MXFP4: decoded as in transformers, and refused if a part is missing or does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import one_sentence
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.weights import served_formats
from fluxion_sglang.sglang.weights.experts import formats_of
from fluxion_sglang.sglang.weights.mxfp4 import Mxfp4CpuConfig, Mxfp4ExpertsMethod
from fluxion_sglang.weights.checkpoints import MXFP4, mxfp4
from fluxion_sglang.weights.quantised import unpack

EXPERTS, HIDDEN, INNER = 3, 64, 32


def drawn(experts: int, outputs: int, inputs: int, low: int = 110, high: int = 140) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(outputs)
    shape = (experts, outputs, inputs // 32, 16)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(low, high, shape[:-1], generator=generator, dtype=torch.uint8)


def expected(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)


def test_all_numbers_and_common_scales_are_exact() -> None:
    blocks, scales = drawn(1, 48, 512, 104, 144)
    blocks[0, 0].copy_(torch.arange(256, dtype=torch.uint8).view(16, 16))
    found = mxfp4(blocks[0].flatten(1), scales[0])
    assert torch.equal(found.wide(), expected(blocks, scales)[0])


def test_tiny_scales_round_to_multiples_of_the_least_float16() -> None:
    blocks, scales = drawn(1, 16, 64, 0, 104)
    found = mxfp4(blocks[0].flatten(1), scales[0]).wide()
    assert (found - expected(blocks, scales)[0]).abs().max() <= 2.0**-25


@pytest.mark.parametrize("scale", [144, 254, 255])
def test_large_scales_are_refused(scale: int) -> None:
    blocks, scales = drawn(1, 16, 64)
    scales[0, 3, 1] = scale
    with pytest.raises(ValueError, match="a scale of the weights is above 65504 or not a number"):
        mxfp4(blocks[0].flatten(1), scales[0])


def empty() -> Any:
    layer: Any = nn.Module()
    layer.moe_runner_config = SimpleNamespace(
        apply_router_weight_on_input=False, no_combine=False, swiglu_limit=None, gemm1_alpha=1.7, gemm1_clamp_limit=7.0,
        is_gated=True, activation="silu", gate_up_interleaved=True, gemm1_beta=None,
    )  # fmt: skip
    layer.use_triton_kernels, layer.moe_ep_size, layer.with_bias = False, 1, True
    Mxfp4ExpertsMethod(False).create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16, with_bias=True)
    return layer


def load(layer: Any, name: str, loaded: torch.Tensor) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, loaded, weight_name=name, shard_id=None, expert_id=None)


def test_a_layer_packs_a_weight_when_both_of_its_parts_are_there() -> None:
    layer = empty()
    want = {}
    for name, size in (("w13_weight", (2 * INNER, HIDDEN)), ("w2_weight", (HIDDEN, INNER))):
        blocks, scales = drawn(EXPERTS, *size)
        want[name] = expected(blocks, scales)
        load(layer, f"{name}_scale", scales)
        assert formats_of(layer) is None
        load(layer, name, blocks.flatten(2))
        load(layer, f"{name}_bias", torch.ones(EXPERTS, size[0]))
    assert formats_of(layer) == (MXFP4, MXFP4) and not hasattr(layer, "w2_weight_scale")
    for name, weights in want.items():
        held = getattr(layer, name)
        for expert, weight in zip(held, weights, strict=True):
            assert torch.equal(unpack(expert, MXFP4, *weight.shape).wide(), weight)
    Mxfp4ExpertsMethod(False).process_weights_after_loading(layer)
    with pytest.raises(ValueError, match="cannot be updated while the server runs"):
        load(layer, "w2_weight", blocks.flatten(2))


def test_what_does_not_fit_is_refused() -> None:
    layer, (blocks, scales) = empty(), drawn(EXPERTS, HIDDEN, INNER)
    with pytest.raises(ConfigError, match="a layer lacks the weights of its experts") as caught:
        Mxfp4ExpertsMethod(False).process_weights_after_loading(layer)
    one_sentence(str(caught.value))
    with pytest.raises(
        ConfigError, match="it has a tensor of 3 x 64 x 1 x 15 where its configuration says 3 x 64 x 16"
    ):
        load(layer, "w2_weight", blocks[..., 1:])
    with pytest.raises(ConfigError, match="it has biases of 3 x 2 for 3 x 64"):
        load(layer, "w2_weight_bias", torch.ones(3, 2))
    load(layer, "w2_weight_scale", scales.fill_(255))
    with pytest.raises(ConfigError, match="above 65504 or not a number"):
        load(layer, "w2_weight", blocks.flatten(2))
    with pytest.raises(ConfigError, match="use a smaller --tp-size"):
        Mxfp4ExpertsMethod(False).create_weights(layer, EXPERTS, HIDDEN, 48, torch.bfloat16)
    layer.moe_ep_size = 2
    with pytest.raises(ValueError, match="leave --moe-runner-backend and --ep-size out"):
        Mxfp4ExpertsMethod(False).create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16)


def test_it_is_gpt_oss_alone() -> None:
    quantisation = {"quant_method": "mxfp4"}
    served_formats.check(quantisation, {"model_type": "gpt_oss", "num_local_experts": 32})
    with pytest.raises(ConfigError, match="weights in MXFP4 are served for gpt-oss alone") as caught:
        served_formats.check(quantisation, {"model_type": "llama"})
    one_sentence(str(caught.value))
    assert Mxfp4CpuConfig.from_config(quantisation).get_name() == "mxfp4"
