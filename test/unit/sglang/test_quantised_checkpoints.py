"""SGLang's layers filled by quantised checkpoints, and checkpoints that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import packings
import pytest
import torch
from refusals import one_sentence
from sglang.srt.layers import linear
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.start import served_models
from fluxion_sglang.sglang.weights import served_formats
from fluxion_sglang.sglang.weights.methods import parts_of
from fluxion_sglang.sglang.weights.quantised_checkpoints import CONFIGS, CheckpointMethod

IN, HEADS, KV_HEADS, HEAD = 256, 4, 2, 32
OUT = HEADS * HEAD
Packer = Callable[[packings.Grid], dict[str, torch.Tensor]]

AUTO_AWQ = packings.auto_round_config(4, 64, symmetric=False, packing_format="auto_round:auto_awq")
STATIC = {"desc_act": True, "static_groups": True}
KINDS: dict[str, tuple[dict[str, Any], Packer, int, int, bool]] = {
    "gptq": (packings.gptq_config(4, 64), packings.gptq, 4, 64, True),
    "gptq, zeros": (packings.gptq_config(4, 32, False), packings.gptq, 4, 32, False),
    "gptq, 8 bits": (packings.gptq_config(8, 128), packings.gptq, 8, 128, True),
    "gptq, channels": (packings.gptq_config(4, -1), packings.gptq, 4, -1, True),
    "gptq, static groups": (packings.gptq_config(4, 64, **STATIC), packings.gptq, 4, 64, True),
    "gptq v2": (packings.gptq_config(4, 64, format="gptq_v2"), lambda grid: packings.gptq(grid, v2=True), 4, 64, True),
    "auto-round": (packings.auto_round_config(4, 128), packings.gptq, 4, 128, True),
    "auto-round, awq": (AUTO_AWQ, packings.awq, 4, 64, False),
    "awq": (packings.awq_config(64), packings.awq, 4, 64, False),
    "awq, channels": (packings.awq_config(-1), packings.awq, 4, -1, False),
    "w4a16": (packings.compressed_config(4, 32), packings.pack_quantised, 4, 32, True),
    "w4a16, zeros": (packings.compressed_config(4, 64, False), packings.pack_quantised, 4, 64, False),
    "w8a16": (packings.compressed_config(8, -1), packings.pack_quantised, 8, -1, True),
    "w8a8": (packings.compressed_config(8, -1, form="int-quantized"), packings.int_quantised, 8, -1, True),
}


def config_of(quantisation: dict[str, Any]) -> Any:
    served_formats.check(quantisation, {})
    return CONFIGS[quantisation["quant_method"]].from_config(copy.deepcopy(quantisation))


def grid(kind: str, outputs: int, seed: int = 0, inputs: int = IN) -> tuple[packings.Grid, dict[str, torch.Tensor]]:
    _, pack, bits, group, symmetric = KINDS[kind]
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    found = packings.rounded(weight, bits, group, symmetric)
    return found, pack(found)


def load(layer: nn.Module, packed: dict[str, torch.Tensor], *shard: Any) -> None:
    parameters = dict(layer.named_parameters())
    for name, tensor in packed.items():
        parameters[name].weight_loader(parameters[name], tensor, *shard)


def finish(layer: nn.Module) -> None:
    method: Any = layer.quant_method
    assert isinstance(method, CheckpointMethod)
    method.process_weights_after_loading(layer)


def check(layer: nn.Module, want: torch.Tensor, x_of: int = IN) -> None:
    assert {name for name, _ in layer.named_parameters()} - {"bias"} == {"packed"}
    x = torch.randn(3, x_of)
    out = layer.quant_method.apply(layer, x)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(out, F.linear(x, want), rtol=1e-5, atol=1e-4)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def be(rank: int, size: int) -> None:
        monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: group)
        monkeypatch.setattr(linear, "get_group_rank_size", lambda _: (rank, size))

    return be


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_each_format(kind: str) -> None:
    layer = ReplicatedLinear(IN, OUT, False, params_dtype=torch.float32, quant_config=config_of(KINDS[kind][0]))
    want, packed = grid(kind, OUT)
    load(layer, packed)
    finish(layer)
    check(layer, want.wide())
    assert [part.format.bits for part in parts_of(layer)] == [KINDS[kind][2]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_layers_become_one_and_are_cut(kind: str, size: int, ranks: Callable[[int, int], None]) -> None:
    config, outputs = KINDS[kind][0], {"q": OUT, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    parts = {name: grid(kind, outputs[name], seed) for seed, name in enumerate(outputs)}
    for rank in range(size):
        ranks(rank, size)
        given: Any = {"bias": False, "params_dtype": torch.float32, "quant_config": config_of(config)}
        qkv = QKVParallelLinear(IN, HEAD, HEADS, KV_HEADS, prefix="layers.0.qkv_proj", **given)
        merged = MergedColumnParallelLinear(IN, [OUT, OUT], prefix="layers.0.gate_up_proj", **given)
        for name, (_, packed) in parts.items():
            load(qkv, packed, name)
        for shard in (0, 1):
            load(merged, parts["q"][1], shard)
        finish(qkv)
        finish(merged)
        wide = {name: found.wide().chunk(size)[rank] for name, (found, _) in parts.items()}
        check(qkv, torch.cat(list(wide.values())))
        check(merged, torch.cat([wide["q"], wide["q"]]))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_cut_between_groups(kind: str, ranks: Callable[[int, int], None]) -> None:
    want, packed = grid(kind, OUT)
    for rank in range(2):
        ranks(rank, 2)
        given: Any = {"bias": False, "params_dtype": torch.float32, "quant_config": config_of(KINDS[kind][0])}
        if kind == "awq, channels":
            with pytest.raises(ConfigError, match="use a smaller --tp-size than 2") as caught:
                RowParallelLinear(IN, OUT, **given)
            one_sentence(str(caught.value))
            return
        layer = RowParallelLinear(IN, OUT, **given)
        load(layer, packed)
        finish(layer)
        check(layer, want.wide().chunk(2, 1)[rank], IN // 2)


def test_what_ranks_would_cut_is_refused(ranks: Callable[[int, int], None]) -> None:
    ranks(0, 4)
    with pytest.raises(ConfigError, match="64 on each of 4 ranks, not whole groups of 128; use a smaller") as one:
        RowParallelLinear(IN, OUT, params_dtype=torch.float32, quant_config=config_of(packings.gptq_config(4, 128)))
    given: Any = {"params_dtype": torch.float32, "quant_config": config_of(packings.awq_config(128))}
    with pytest.raises(ConfigError, match="4 and 8 outputs on each of 4 ranks, and 8 of them share") as other:
        MergedColumnParallelLinear(IN, [16, 32], **given)
    for caught in (one, other):
        one_sentence(str(caught.value))


def test_one_scale_of_a_whole_layer(ranks: Callable[[int, int], None]) -> None:
    ranks(0, 1)
    config = packings.compressed_config(8, -1, form="int-quantized")
    scheme = config["config_groups"]["group_0"]
    scheme["weights"]["strategy"] = "tensor"
    scheme["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    layer = MergedColumnParallelLinear(
        IN, [32, 64], bias=False, params_dtype=torch.float32, quant_config=config_of(config)
    )
    weights = [torch.randint(-128, 128, (size, IN), dtype=torch.int8) for size in (32, 64)]
    for shard, weight in enumerate(weights):
        scale = torch.tensor([0.5 + shard])
        load(layer, {"weight": weight, "weight_scale": scale, "input_scale": scale}, shard)
    finish(layer)
    check(layer, torch.cat([weights[0] * 0.5, weights[1] * 1.5]))


def test_scales_are_not_rounded_to_the_models_type() -> None:
    given: Any = {"params_dtype": torch.bfloat16, "quant_config": config_of(KINDS["gptq"][0])}
    layer = ReplicatedLinear(IN, OUT, False, **given)
    want, packed = grid("gptq", OUT)
    load(layer, packed)
    finish(layer)
    (part,) = parts_of(layer)
    assert torch.equal(part.wide(slice(0, OUT), torch.float32), want.wide())
    assert layer(torch.randn(2, IN).bfloat16())[0].dtype is torch.bfloat16


def test_weights_are_updated() -> None:
    layer = ReplicatedLinear(IN, OUT, False, params_dtype=torch.float32, quant_config=config_of(KINDS["awq"][0]))
    (first, packed), (second, other) = grid("awq", OUT), grid("awq", OUT, seed=1)
    load(layer, packed)
    finish(layer)
    method: Any = layer.quant_method
    for _ in range(2):
        method.restore_weights_before_loading(layer)
    x = torch.randn(2, IN)
    torch.testing.assert_close(layer(x)[0], F.linear(x, first.wide()), rtol=1e-5, atol=1e-4)
    finish(layer)
    check(layer, first.wide())  # only other layers got new weights
    method.restore_weights_before_loading(layer)
    load(layer, other)
    finish(layer)
    finish(layer)
    check(layer, second.wide())


def test_layers_that_are_not_quantised_are_sglangs() -> None:
    compressed = packings.compressed_config(4, 32) | {"ignore": ["lm_head", "re:.*plain"]}
    for config in (
        packings.gptq_config(4, 32, dynamic={"-:.*plain": {}}),
        packings.awq_config(32, modules_to_not_convert=["plain"]),
        packings.auto_round_config(4, 32, extra_config={"layers.0.plain": {"bits": 16}}),
        compressed,
    ):
        given: Any = {"params_dtype": torch.bfloat16, "quant_config": config_of(config)}
        plain = ReplicatedLinear(IN, OUT, prefix="layers.0.plain", **given)
        assert type(plain.quant_method) is UnquantizedLinearMethod
        assert isinstance(ReplicatedLinear(IN, OUT, prefix="layers.0.other", **given).quant_method, CheckpointMethod)
        with pytest.raises(ConfigError, match="quantised experts have no kernels yet"):
            given["quant_config"].get_quant_method(FusedMoE.__new__(FusedMoE), "layers.0.experts")


def ignoring(*names: str) -> list[dict[str, Any]]:
    """Checkpoints that exclude these modules from quantisation, in each format's notation."""
    paths = [f"layers.0.{name}" for name in names]
    return [
        packings.gptq_config(4, 32, dynamic={rf"-:.*\.{name}$": {} for name in names}),
        packings.awq_config(32, modules_to_not_convert=paths),
        packings.auto_round_config(4, 32, extra_config={path: {"bits": 16} for path in paths}),
        packings.compressed_config(4, 32) | {"ignore": paths},
    ]


@pytest.mark.parametrize("index", range(4))
def test_merged_layers_go_by_the_names_of_their_parts(index: int, ranks: Callable[[int, int], None]) -> None:
    ranks(0, 1)

    def made(*names: str) -> nn.Module:
        config = config_of(ignoring(*names)[index])
        given: Any = {"params_dtype": torch.bfloat16, "quant_config": config}
        return QKVParallelLinear(IN, HEAD, HEADS, KV_HEADS, prefix="layers.0.qkv_proj", **given)

    for names in (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)):
        plain = made(*names)
        assert type(plain.quant_method) is UnquantizedLinearMethod and plain.scheme is None
    assert isinstance(made("gate_proj", "up_proj").quant_method, CheckpointMethod)
    with pytest.raises(ConfigError, match=r"quantises the parts of .*qkv_proj in different ways") as caught:
        made("k_proj")
    one_sentence(str(caught.value))


def test_what_is_found_when_weights_are_loaded() -> None:
    config = config_of(packings.gptq_config(4, 32))
    layer = ReplicatedLinear(IN, OUT, params_dtype=torch.float32, quant_config=config)
    with pytest.raises(ConfigError, match="lacks scales or has some") as lacks:
        finish(layer)
    packed = packings.gptq(packings.rounded(torch.randn(OUT, IN), 4, 32, True))
    load(layer, packed | {"g_idx": packed["g_idx"].flip(0)})
    with pytest.raises(ConfigError, match=r"orders inputs by activation \(g_idx\)") as order:
        finish(layer)
    for caught in (lacks, order):
        one_sentence(str(caught.value))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_one_of_its_tensors_is_refused(kind: str, ranks: Callable[[int, int], None]) -> None:
    ranks(0, 1)
    given: Any = {"bias": False, "params_dtype": torch.float32, "quant_config": config_of(KINDS[kind][0])}
    want, packed = grid(kind, OUT)
    for name in packed:
        layer = MergedColumnParallelLinear(IN, [OUT, OUT], **given)
        load(layer, packed, 0)
        load(layer, {other: tensor for other, tensor in packed.items() if other != name}, 1)
        if name in ("g_idx", "weight_shape"):
            finish(layer)
            check(layer, torch.cat([want.wide()] * 2))
            continue
        with pytest.raises(ConfigError, match=rf"lacks its {name};|lacks scales or") as told:
            finish(layer)
        one_sentence(str(told.value))


@pytest.mark.parametrize("kind", ["gptq", "awq", "w4a16", "w8a8"])
def test_tensors_that_do_not_fit_are_refused(kind: str, ranks: Callable[[int, int], None]) -> None:
    ranks(0, 1)
    given: Any = {"bias": False, "params_dtype": torch.float32, "quant_config": config_of(KINDS[kind][0])}
    alone = ReplicatedLinear(IN, OUT, **given)
    merged = MergedColumnParallelLinear(IN, [OUT, OUT], **given)
    for outputs, inputs in ((OUT, 2 * IN), (OUT, IN // 2), (OUT // 2, IN), (2 * OUT, IN)):
        _, packed = grid(kind, outputs, inputs=inputs)
        for layer, shard in ((alone, ()), (merged, (1,)))[: 2 if outputs == OUT else 1]:  # SGLang cuts or pads shards
            with pytest.raises(ConfigError, match=r"it has a tensor of [\dx ]+ for a layer that, by its") as told:
                load(layer, packed, *shard)
            one_sentence(str(told.value))


def compressed(bits: int = 4, group: int = 32, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    config = packings.compressed_config(bits, group, form=form)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def activated(config: dict[str, Any], **activations: Any) -> dict[str, Any]:
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"} | activations
    return config


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (packings.gptq_config(3, 128), "have 3 bits and the kernels take 4 or 8"),
        (packings.gptq_config(2, 128), "have 2 bits"),
        (packings.gptq_config(4, 128, dynamic=["+:.*down.*"]), "its quantization_config is damaged"),
        (packings.auto_round_config(4, 32, extra_config={"a": {"bits": None}}), "its quantization_config is damaged"),
        (packings.awq_config(None), "None inputs share a scale"),  # type: ignore[arg-type]
        (packings.gptq_config(4, 128, dynamic={"+:.*down.*": {"bits": 2}}), "have 2 bits"),
        (packings.gptq_config(4, 100), "100 inputs share a scale (group_size)"),
        (packings.gptq_config(4, 128, desc_act=True), "orders inputs by activation (desc_act)"),
        (packings.gptq_config(4, 128, checkpoint_format="marlin"), "packed for other kernels (marlin)"),
        (packings.gptq_config(4, 128, is_marlin_format=True), "packed for other kernels (marlin)"),
        (packings.auto_round_config(4, 128, packing_format="auto_round:auto_round"), "packing_format is auto_round"),
        (packings.auto_round_config(4, 32, data_type="mx_fp"), "are no integers (data_type mx_fp)"),
        (packings.auto_round_config(4, 32, extra_config={"a": {"bits": 3}}), "have 3 bits"),
        (packings.awq_config(64, bits=8), "have 8 bits and the kernels take 4;"),
        (packings.awq_config(16), "16 inputs share a scale"),
        (packings.awq_config(64, version="gemv"), "packed for AWQ's gemv kernel"),
        (packings.awq_config(64, zero_point=False), "have no zeros (zero_point)"),
        (compressed(bits=3), "have 3 bits"),
        (compressed(group=16), "16 inputs share a scale"),
        (compressed(form="marlin-24"), "its format is marlin-24"),
        (compressed(form="float-quantized", type="float"), "its format is float-quantized"),
        (compressed(form="nvfp4-pack-quantized"), "its format is nvfp4-pack-quantized"),
        (compressed(type="float"), "are no integers (float of 4 bits)"),
        (compressed(actorder="group"), "orders inputs by activation (actorder)"),
        (compressed(8, -1, "int-quantized", strategy="block"), "a scale by block"),
        (compressed(8, -1, "int-quantized", symmetric=False), "have zeros (symmetric)"),
        (activated(compressed()), "activations are quantised (int of 8 bits with weights of 4)"),
        (activated(compressed(8, -1, "int-quantized"), type="float"), "activations are quantised (float of 8 bits"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "are sparse (sparse-24-bitmask)"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "has scales for a KV cache"),
    ],
)
def test_refusals_are_one_sentence(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        served_formats.check(config, {})
    one_sentence(str(caught.value))
    assert says in str(caught.value)


def test_quantised_experts_are_refused() -> None:
    for model in ({"num_experts": 8}, {"text_config": {"num_local_experts": 8}}):
        with pytest.raises(ConfigError, match="quantised experts have no kernels yet") as caught:
            served_formats.check(packings.gptq_config(4, 128), model)
        one_sentence(str(caught.value))


def test_orders_that_groups_do_not_see_are_served() -> None:
    for config in (
        packings.gptq_config(4, -1, desc_act=True),
        packings.gptq_config(4, 128, desc_act=True, static_groups=True),
        compressed(actorder="weight"),
    ):
        served_formats.check(config, {"num_experts": 0})


@pytest.mark.parametrize("name", [name for name in served_formats.NAMES if name != "mxfp4"])
def test_checkpoints_are_read_before_anything_is_loaded(name: str, tmp_path: Any, server_args: Any) -> None:
    import json
    from pathlib import Path

    from places import NEEDLE

    config = json.loads((Path(NEEDLE) / "config.json").read_text()) | {"dtype": "float16"}
    kind = next(config for config, *_ in KINDS.values() if config["quant_method"] == name)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": kind}))
    view = SimpleNamespace(device="cpu", quantization=None, load_format="auto", model_path=str(tmp_path), revision=None)
    assert served_models.check_quantised(view)
    view.quantization = name
    assert served_models.check_quantised(view)
    view.quantization = "fluxion-int8"
    with pytest.raises(ConfigError, match=rf"weights are quantised already \({name}\); leave that") as caught:
        served_models.check_quantised(view)
    one_sentence(str(caught.value))
    args = server_args(model_path=str(tmp_path), device="cpu", enable_fluxion=True)
    args.resolve_once()
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    assert resolved_view(args).dtype == "bfloat16"
    assert model_config_of(args).dtype is torch.bfloat16 and model_config_of(args).quantization == name
    args = server_args(model_path=str(tmp_path), device="cpu", enable_fluxion=True, dtype="float16")
    with pytest.raises(ConfigError, match=r"does not work with --dtype float16, .* use --dtype bfloat16 or"):
        args.resolve_once()
