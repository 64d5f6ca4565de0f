"""The language model of a vision-language checkpoint: its weights and their names; and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import NEEDLE
from refusals import one_sentence

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.start import language_model

VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 32,
    "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *("model.language_model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"),
        *("model.layers.0.mlp.up_proj.weight", "model.text_model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_weights_get_the_names_of_the_model_alone(name: str) -> None:
    others = [
        "model.visual.blocks.0.mlp.up_proj.weight",
        "vision_tower.layers.0.norm.weight",
        "visual.merger.norm.bias",
    ]
    others += ["model.multi_modal_projector.linear_1.weight", "model.vision_tower.head.weight", "model.connector.proj"]
    weights = [(each, torch.zeros(2, 2)) for each in (*others, name, "language_model.lm_head.weight", "lm_head.weight")]
    weights.append((name.partition("layers")[0] + "embed_tokens.weight", torch.zeros(2, 2)))
    found = [each for each, _ in language_model.renamed(weights, 2)]
    assert found == [
        *("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "lm_head.weight", "model.embed_tokens.weight"),
    ]


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="its weights have names that Fluxion does not know") as caught:
        list(language_model.renamed([("layers.0.attention.wq.weight", torch.zeros(2, 2))], 2))
    one_sentence(str(caught.value))
    scales = "model.language_model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    with pytest.raises(ConfigError, match="its experts have scales") as caught:
        list(language_model.renamed([(scales, torch.zeros(2, 2, 2))], 2))
    one_sentence(str(caught.value))


@pytest.mark.parametrize("older", [False, True])
def test_experts_in_one_tensor_become_weights_of_each(older: bool) -> None:
    gate_up, down = torch.randn(3, 8, 6), torch.randn(3, 6, 4)  # hidden 6, inner 4
    name = "model.language_model.layers.1.mlp.experts."
    stored = {name + "gate_up_proj": gate_up, name + "down_proj": down}
    weights = [(key, value.transpose(1, 2) if older else value) for key, value in stored.items()]
    weights.append(("model.language_model.embed_tokens.weight", torch.zeros(2, 6)))
    found = dict(language_model.renamed(weights, 6))
    assert len(found) == 10
    for expert in range(3):
        of = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(found[f"{of}.gate_proj.weight"], gate_up[expert, :4])
        assert torch.equal(found[f"{of}.up_proj.weight"], gate_up[expert, 4:])
        assert torch.equal(found[f"{of}.down_proj.weight"], down[expert])


def written(folder: Path, **options: Any) -> Path:
    config = {"vision_config": VISION, "text_config": TEXT, **options}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parsed(folder: Path) -> Any:
    return language_model.ConfigParser().parse(str(folder), trust_remote_code=False)


def test_positions_have_one_part(tmp_path: Path) -> None:
    rope = {"type": "mrope", "mrope_section": [8, 4, 4], "rope_theta": 10000.0}
    written(
        tmp_path, model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=TEXT | {"rope_scaling": rope},
    )  # fmt: skip
    found = parsed(tmp_path)
    assert found.architectures == ["Qwen2ForCausalLM"]
    assert found.rope_parameters["rope_type"] == "default" and "mrope_section" not in found.rope_parameters
    assert not hasattr(found, "vision_config")


@pytest.mark.parametrize("head", ["", "language_model.lm_head.weight", "lm_head.qweight"])
def test_the_file_says_whether_the_embedding_makes_the_logits(tmp_path: Path, head: str) -> None:
    written(tmp_path, model_type="mistral3", architectures=["Mistral3ForConditionalGeneration"])
    names = ["language_model.model.embed_tokens.weight", *([head] if head else [])]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    assert parsed(tmp_path).tie_word_embeddings is not bool(head)


def test_layers_and_ends_are_named_as_in_the_language_model(tmp_path: Path) -> None:
    named = {
        "block_name_to_quantize": "model.language_model.layers,language_model.model.layers",
        "ignore": ["re:vision_tower.*", "language_model.lm_head"],
        "extra_config": {"model.language_model.layers.0.mlp.up_proj": {"bits": 8}},
    }
    written(
        tmp_path, model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], eos_token_id=[1, 106],
        quantization_config={"quant_method": "auto-round", "bits": 4, **named},
    )  # fmt: skip
    found = parsed(tmp_path)
    assert found.eos_token_id == [1, 106]
    assert found.quantization_config["block_name_to_quantize"] == "model.layers,model.layers"
    assert found.quantization_config["ignore"] == ["re:vision_tower.*", "lm_head"]
    assert found.quantization_config["extra_config"] == {"model.layers.0.mlp.up_proj": {"bits": 8}}


def test_overrides_are_those_of_the_language_model() -> None:
    given = '{"text_config": {"max_position_embeddings": 4096}, "vision_config": {}}'
    assert json.loads(language_model.overrides(given)) == {"max_position_embeddings": 4096, "vision_config": {}}
    assert language_model.overrides("{}") == "{}"


@pytest.mark.parametrize("name", ["mistral", "runai_streamer", "bitsandbytes"])
def test_other_formats_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"does not work with --load-format {name}") as caught:
        language_model.check_load_format(name)
    one_sentence(str(caught.value))


@pytest.mark.parametrize("model", [None, SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=2))])
def test_adapters_keep_their_names(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(
        runtime_context, "get_model", lambda: SimpleNamespace(model_config_parser=language_model.PARSER)
    )
    adapter = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    vision = "base_model.model.vision_tower.layers.0.mlp.up_proj.lora_A.weight"
    names = [vision, adapter] if model is None else ["model.language_model.embed_tokens.weight", "visual.norm.weight"]
    weights = [(name, torch.zeros(2, 2)) for name in names]
    found = language_model.get_weights_iterator(lambda *_: weights, None, SimpleNamespace(model_config=model))
    assert [name for name, _ in found] == ([adapter] if model is None else ["model.embed_tokens.weight"])


def test_a_language_model_without_a_class_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "gemma2", **TEXT}
    written(tmp_path, model_type="llava", architectures=["LlavaForConditionalGeneration"], text_config=text)
    with pytest.raises(ConfigError, match=r"how to load its language model \(gemma2\) alone") as caught:
        parsed(tmp_path)
    one_sentence(str(caught.value))


@pytest.mark.parametrize("asks", [False, True])
def test_it_is_chosen_by_the_configuration(tmp_path: Path, asks: bool, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of

    written(tmp_path, model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"])
    args = server_args(model_path=str(tmp_path), device="cpu", enable_fluxion=True, enable_multimodal=asks or None)
    if asks:
        with pytest.raises(ConfigError, match="leave --enable-multimodal out") as caught:
            args.resolve_once()
        one_sentence(str(caught.value))
        return
    args.resolve_once()
    model = model_config_of(args)
    assert model.hf_config.architectures == ["Gemma3ForCausalLM"] and not model.is_multimodal


def test_other_models_are_read_as_ever(server_args: Any) -> None:
    args = server_args(model_path=NEEDLE, device="cpu", enable_fluxion=True)
    args.resolve_once()
    assert args.model_config_parser == "auto"
