"""Refusals of models and of attention layers by --enable-fluxion."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import NEEDLE
from refusals import one_sentence

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.device import maker
from fluxion_sglang.sglang.compat import CompatError
from fluxion_sglang.sglang.start import served_models


def test_layers_that_scale_differently_are_refused_on_a_device() -> None:
    nothing: Any = None
    made = maker.Simulated().make
    with pytest.raises(ConfigError, match=r"scale scores differently \(0.125, 0.25\)"):
        made(
            nothing, nothing, nothing, q_heads=1, scales=[0.125, 0.125, 0.25], max_requests=1, max_tokens=1,
            config=FluxionConfig(),
        )  # fmt: skip


@pytest.fixture(scope="module")
def needle() -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    return ModelConfig.from_server_args(ServerArgs(model_path=NEEDLE))


ARGS = SimpleNamespace(kv_cache_dtype="auto", tp_size=1, device="cpu")


def changed(model: Any, **changes: Any) -> Any:
    """A copy of the configuration; keys with prefix text_ or hf_ change the Hugging Face one."""
    model = copy.copy(model)
    model.hf_config = model.hf_text_config = copy.deepcopy(model.hf_config)
    for key, value in changes.items():
        prefix, _, rest = key.partition("__")
        setattr(model.hf_config if prefix == "hf" else model, rest or key, value)
    return model


@pytest.mark.parametrize(
    ("options", "written", "method"),
    [
        ({}, {"quantization_config": {"quant_method": "quark"}}, "quark"),
        ({"quantization": "awq"}, {}, "awq"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({}, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({}, {"compression_config": {"quant_method": "mxfp8"}}, "mxfp8"),
        ({"quantization": "fp8"}, {}, "fp8"),
        ({"load_format": "gguf"}, {}, "gguf"),
        ({"load_format": "bitsandbytes"}, {}, "bitsandbytes"),
    ],
)
def test_quantised_weights_are_refused_before_anything_is_loaded(
    options: dict[str, str], written: dict[str, Any], method: str, server_args: Any, tmp_path: Path
) -> None:
    config = json.loads((Path(NEEDLE) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | written))
    args = server_args(model_path=str(tmp_path), device="cpu", enable_fluxion=True, **options)
    with pytest.raises(ConfigError) as caught:
        args.resolve_once()
    one_sentence(str(caught.value))
    assert f"its weights are quantised ({method})" in str(caught.value)


def test_quantised_weights_beside_a_gpu_are_those_of_sglang() -> None:
    args = SimpleNamespace(device="cuda", quantization=None, load_format="gguf", model_path="model.gguf")
    served_models.check_quantised(args)
    args.device = "cpu"
    with pytest.raises(ConfigError, match=r"its weights are quantised \(gguf\)"):
        served_models.check_quantised(args)


def test_the_model_of_the_demo_is_accepted(needle: Any) -> None:
    served_models.check_model(needle, ARGS)


def test_a_record_is_read_through_its_decisions(needle: Any, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    args = server_args(model_path=NEEDLE)
    served_models.check_model(needle, resolving_view(args))
    declare_resolution(args, "test", tp_size=3)  # 8 // 3 = 2 query heads and 1 KV head a rank
    served_models.check_model(needle, resolving_view(args))
    declare_resolution(args, "test", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        served_models.check_model(changed(needle, dtype=torch.float32), resolving_view(args))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_multimodal": True}, "it takes images, video or sound"),
        ({"is_audio_model": True}, "it takes images, video or sound"),
        ({"is_hybrid_swa": True}, "sliding-window layers need a KV pool of their own"),
        ({"is_local_attention_model": True}, "chunked-attention"),
        ({"attention_chunk_size": 8192}, "chunked-attention"),
        ({"hf__layer_types": ["full_attention", "chunked_attention"]}, "chunked-attention"),
        (
            {"hf__architectures": ["GptOssForCausalLM"], "hf__dtype": torch.bfloat16, "dtype": torch.float32},
            "it would run in torch.float32 and SGLang computes its routers in torch.bfloat16",
        ),
        ({"use_alibi": True}, "ALiBi"),
        ({"dtype": torch.float16}, "add --dtype bfloat16 or --dtype float32"),
        ({"v_head_dim": 32}, "keys have 64 elements and its values 32"),
        ({"head_dim": 72, "v_head_dim": 72}, "head dimension is 72"),
        ({"head_dim": 16, "v_head_dim": 16}, "multiples of 16 from 32 to 256"),
        ({"head_dim": 272, "v_head_dim": 272}, "head dimension is 272"),
        ({"num_attention_heads": 34}, "34 query heads"),  # groups of 17
        ({"num_attention_heads": 5}, "5 query heads"),  # 2.5 query heads a KV head
        ({"hf__architectures": ["MiniMaxM3SparseForCausalLM"]}, "sparse index"),
    ],
)
def test_a_model_out_of_reach_is_refused(needle: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        served_models.check_model(changed(needle, **changes), ARGS)
    message = str(caught.value)
    one_sentence(message)
    assert words in message
    assert "(LlamaForCausalLM)" in message or any(name in message for name in ("MiniMax", "GptOss"))


def test_latent_attention_is_refused(needle: Any) -> None:
    from sglang.srt.configs.model_config import AttentionArch

    with pytest.raises(ConfigError, match="its attention is MLA"):
        served_models.check_model(changed(needle, attention_arch=AttentionArch.MLA), ARGS)


def test_linear_hybrids_are_refused(needle: Any) -> None:
    from sglang.srt.configs.falcon_h1 import FalconH1Config

    model = changed(needle)
    model.hf_config = FalconH1Config()
    with pytest.raises(ConfigError, match="linear-attention or state-space"):
        served_models.check_model(model, ARGS)


@pytest.mark.parametrize(
    "changes",
    [{"speculative_algorithm": "NGRAM"}, {"disaggregation_mode": "prefill"}, {"pp_size": 2}, {"enable_lora": True}],
)
def test_what_states_do_not_go_with_is_refused(needle: Any, changes: dict[str, Any]) -> None:
    model = changed(needle, hf__architectures=["Qwen3_5ForCausalLM"])
    usual: dict[str, Any] = {
        **vars(ARGS), "speculative_algorithm": None, "disaggregation_mode": "null", "pp_size": 1, "enable_lora": False,
        "lora_paths": None,
    }  # fmt: skip
    served_models.check_model(model, SimpleNamespace(**usual))
    with pytest.raises(ConfigError, match="which does not go with speculative decoding") as caught:
        served_models.check_model(model, SimpleNamespace(**{**usual, **changes}))
    one_sentence(str(caught.value))
    with pytest.raises(ConfigError, match="disk does not work with this model"):
        served_models.check_stored(model, FluxionConfig(disk="/tmp/kv"))


def test_a_kv_cache_of_another_type_is_refused(needle: Any) -> None:
    args = SimpleNamespace(kv_cache_dtype="bf16", tp_size=1)
    served_models.check_model(needle, args)
    with pytest.raises(ConfigError, match="--kv-cache-dtype auto"):
        served_models.check_model(changed(needle, dtype=torch.float32), args)


def test_half_precision_by_default_is_refused_with_what_to_add(server_args: Any) -> None:
    override = '{"dtype": "float16"}'
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True, json_model_override_args=override)
    with pytest.raises(ConfigError, match="add --dtype bfloat16"):
        args.resolve_once()


def test_a_renamed_attribute_of_the_model_is_a_failure(needle: Any) -> None:
    model = changed(needle)
    del model.has_attention_sinks
    with pytest.raises(CompatError, match="'has_attention_sinks'"):
        served_models.check_model(model, ARGS)


def layer(index: int = 0, **changes: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    shape: dict[str, Any] = {"num_heads": 8, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2}
    return RadixAttention(**{**shape, "layer_id": index, **changes})


def test_attention_layers_are_found_in_order() -> None:
    model = torch.nn.Sequential(layer(3), torch.nn.Linear(2, 2), torch.nn.Sequential(layer(4)))
    assert [found.layer_id for found in served_models.check_attention_layers(model)] == [3, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_cross_attention": True}, "attends across"),
        ({"logit_cap": -1.0}, "caps attention logits at -1.0"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({"v_head_dim": 32}, "keys of 64 elements and values of 32"),
        ({"head_dim": 24}, "head dimension of 24"),
        ({"num_heads": 5}, "5 query heads for 2 KV heads"),
        ({"num_heads": 34}, "34 query heads for 2 KV heads"),
    ],
)
def test_a_layer_out_of_reach_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        served_models.check_attention_layers(torch.nn.Sequential(layer(0), layer(1, **changes)))
    one_sentence(str(caught.value))
    assert words in str(caught.value)
    assert "layer 1" in str(caught.value)


def test_later_tokens_and_scaled_positions_are_refused() -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    with pytest.raises(ConfigError, match="attends to later tokens"):
        served_models.check_attention_layers(torch.nn.Sequential(layer(attn_type=AttentionType.ENCODER_ONLY)))
    scaled = layer()
    scaled.xai_temperature_len = 1024
    with pytest.raises(ConfigError, match="by position"):
        served_models.check_attention_layers(torch.nn.Sequential(scaled))


def test_layers_of_different_shape_or_with_one_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ in heads"):
        served_models.check_attention_layers(torch.nn.Sequential(layer(0), layer(1, num_heads=4)))
    with pytest.raises(ConfigError, match="share one KV cache"):
        served_models.check_attention_layers(torch.nn.Sequential(layer(0), layer(0)))
    with pytest.raises(ConfigError, match="no attention"):
        served_models.check_attention_layers(torch.nn.Linear(2, 2))


def test_a_renamed_attribute_of_a_layer_is_a_failure() -> None:
    renamed = layer()
    del renamed.logit_cap
    with pytest.raises(CompatError, match="'logit_cap'"):
        served_models.check_attention_layers(torch.nn.Sequential(renamed))


def test_windows_and_sinks_are_served_on_a_cpu_alone(needle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = changed(needle, hf__layer_types=["full_attention", "sliding_attention"])
    served_models.check_model(windowed, ARGS)
    served_models.check_model(changed(needle, has_attention_sinks=True), ARGS)
    model = torch.nn.Sequential(layer(0), layer(1, sliding_window_size=511))
    assert [served_models.window_of(found) for found in served_models.check_attention_layers(model)] == [None, 512]
    with pytest.raises(
        ConfigError, match="attention layer 1 has a sliding window or capped logits, which Fluxion serves only"
    ):
        served_models.check_attention_layers(model, beside_device=True)
    capped = changed(needle, hf__attn_logit_softcapping=50.0)
    served_models.check_model(capped, ARGS)
    served_models.check_attention_layers(torch.nn.Sequential(layer(0, logit_cap=50.0)))
    with pytest.raises(ConfigError, match="attention layer 0 has a sliding window or capped logits"):
        served_models.check_attention_layers(torch.nn.Sequential(layer(0, logit_cap=50.0)), beside_device=True)
    monkeypatch.setenv("FLUXION_DEVICE", "sim")
    for model_config in (windowed, capped, changed(needle, has_attention_sinks=True)):
        with pytest.raises(ConfigError, match="only where the CPU is the device") as caught:
            served_models.check_model(model_config, ARGS)
        one_sentence(str(caught.value))


def test_nothing_is_recorded_of_layers_that_have_more_than_softmax(needle: Any) -> None:
    layers = [layer(0), layer(1)]
    recorded = FluxionConfig(record="/tmp/somewhere")
    served_models.check_recorded(recorded, layers, needle)
    with_sinks, windowed = changed(needle, has_attention_sinks=True), [layer(0, sliding_window_size=7)]
    served_models.check_recorded(FluxionConfig(), windowed, with_sinks)
    for refused in ((layers, with_sinks), (windowed, needle)):
        with pytest.raises(ConfigError, match="samples are measured without them; leave record out"):
            served_models.check_recorded(recorded, *refused)


def test_drafts_fit_into_windows() -> None:
    served_models.check_windows(None, [layer(sliding_window_size=3)])
    served_models.check_windows(12, [layer(), layer(1, sliding_window_size=11)])
    with pytest.raises(ConfigError, match="have a window of 11 tokens"):
        served_models.check_windows(12, [layer(), layer(1, sliding_window_size=10)])
