"""Vision-language checkpoints, of which Fluxion serves the language model alone.

SGLang's classes for such checkpoints build the vision tower and number positions in three parts. Here SGLang reads the
configuration of the language model, and loads that model's own class: `ConfigParser` gives the configuration
(SGLang's registry of parsers), and a hook in the loader renames the weights and leaves the vision tower's out. M-RoPE
equals RoPE where a prompt is text: the three parts of a position are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from sglang.srt.configs.model_config_parser_registry import ModelConfigParserBase, register_model_config_parser
from transformers import PretrainedConfig

from fluxion_sglang.config import ConfigError

PARSER: Final = "fluxion-language-model"
"""The name of `ConfigParser`, for SGLang's --model-config-parser."""

CHECKPOINTS: Final = frozenset(
    {
        *(
            "aya_vision",
            "cohere2_vision",
            "gemma3",
            "glm4v",
            "glm4v_moe",
            "idefics3",
            "internvl",
            "llava",
            "llava_next",
        ),
        *("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    }
)
"""`model_type` of the checkpoints."""

MODELS: Final = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""SGLang's class by the `model_type` of the language model."""


def is_checkpoint(configuration: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of a checkpoint that `ConfigParser` reads."""
    return configuration.get("model_type") in CHECKPOINTS


def register() -> None:
    """Let SGLang find the parser, in this process."""
    from sglang.srt.configs import model_config_parser_registry as registry

    if registry._MODEL_CONFIG_PARSER_REGISTRY.get(PARSER) is not ConfigParser:
        register_model_config_parser(PARSER)(ConfigParser)


class ConfigParser(ModelConfigParserBase):
    """Reads a checkpoint's configuration as that of its language model."""

    def parse(
        self, model: Any, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> PretrainedConfig:
        from sglang.srt.utils.hf_transformers.config import HfModelConfigParser

        text = _language_model(HfModelConfigParser().parse(model, trust_remote_code, revision, **kwargs))
        if (names := _weight_names(model, revision)) is not None:
            # The defaults of transformers' configurations say nothing about the file.
            text.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in names)
        return text


def _language_model(whole: Any) -> Any:
    """The configuration of the language model. Raises ConfigError."""
    from sglang.srt.utils.hf_transformers_utils import get_hf_text_config

    text = get_hf_text_config(whole)
    if text.model_type not in MODELS:
        raise ConfigError(
            f"--enable-fluxion cannot serve this model ({', '.join(whole.architectures or [])}), because its language "
            f"model ({text.model_type}) has no class of its own in SGLang; serve it without --enable-fluxion."
        )
    text.architectures = [MODELS[text.model_type]]
    for name in ("tie_word_embeddings", "quantization_config"):
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    if isinstance(rope := text.rope_parameters, dict) and "mrope_section" in rope:
        kept = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        text.rope_parameters = kept | {key: "default" for key in ("rope_type", "type") if kept.get(key) == "mrope"}
    if text.model_type == "ministral3":
        text.original_max_position_embeddings = text.rope_parameters["original_max_position_embeddings"]
    if text.model_type == "qwen3_vl_moe_text":
        text.norm_topk_prob = True  # transformers' router always does
    return text


def _weight_names(model: Any, revision: str | None) -> Iterable[str] | None:
    """The names of the checkpoint's weights; None: they are not known before the weights are downloaded."""
    from transformers.utils import cached_file

    def found(name: str) -> str | None:
        return cached_file(
            model,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )

    if (index := found("model.safetensors.index.json")) is not None:
        return json.loads(Path(index).read_text())["weight_map"]
    if not Path(model).is_dir() or (file := found("model.safetensors")) is None:
        return None
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


# --- Weights ---

_NAME = re.compile(
    r"(?:model\.language_model|language_model\.model|model\.text_model|model)\.(?P<layer>(?:layers|embed_tokens|norm)\..*)"
    r"|(?:language_model\.)?(?P<head>lm_head\..*)"
)
_FUSED_EXPERTS = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<what>gate_up_proj|down_proj)")


def get_weights_iterator(original: Callable[..., Any], loader: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND DefaultModelLoader._get_weights_iterator: the language model's weights, by the names that its class has
    for them."""
    from sglang.srt.runtime_context import get_model

    weights = original(loader, source, *args, **kwargs)
    if get_model().model_config_parser != PARSER or source.model_config is None:
        return weights
    return renamed(weights, source.model_config.hf_text_config.hidden_size)


def renamed(weights: Iterable[tuple[str, torch.Tensor]], hidden: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The language model's weights of a vision-language checkpoint.

    A tensor of all experts becomes a weight [outputs, inputs] of each. It is [experts, outputs, inputs], or
    [experts, inputs, outputs] in older files; transformers tells them apart by the dimensions, too.

    Args:
        hidden: elements of a hidden state.
    """
    for name, weight in weights:
        if (found := _NAME.fullmatch(name)) is None:
            continue
        ours = found["head"] or f"model.{found['layer']}"
        if (fused := _FUSED_EXPERTS.fullmatch(ours)) is None:
            yield ours, weight
            continue
        gates = fused["what"] == "gate_up_proj"
        if weight.shape[2 if gates else 1] != hidden:
            weight = weight.transpose(1, 2)
        for expert, whole in enumerate(weight):
            names = ("gate_proj", "up_proj") if gates else ("down_proj",)
            for part, each in zip(names, whole.chunk(len(names)), strict=True):
                yield f"{fused['experts']}.{expert}.{part}.weight", each
