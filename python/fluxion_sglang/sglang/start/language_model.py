"""Loads the language model of a vision-language checkpoint, without the vision tower.

SGLang's classes for such checkpoints build the vision tower and use positions with three components. Here SGLang reads
only the language model's configuration, through `ConfigParser` and SGLang's registry of parsers, and loads that model's
own class. A hook in the loader renames the weights and skips those of the vision tower. In a text the three components
of a position are equal, so M-RoPE equals RoPE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from sglang.srt.configs.model_config_parser_registry import ModelConfigParserBase, register_model_config_parser
from transformers import PretrainedConfig

from fluxion_sglang.config import ConfigError

PARSER: Final = "fluxion-language-model"
"""The name of `ConfigParser`, for SGLang's --model-config-parser."""

WHOLE_TYPES: Final = (
    *("aya_vision", "cohere2_vision", "gemma3", "glm4v", "glm4v_moe", "idefics3", "internvl", "llava", "llava_next"),
    *("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
"""`model_type` of vision-language checkpoints."""

CLASSES: Final = {
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
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""SGLang's class by the `model_type` of the language model."""


def is_checkpoint(configuration: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a checkpoint that `ConfigParser` reads."""
    return configuration.get("model_type") in WHOLE_TYPES


@cache
def register() -> None:
    """Register the parser with SGLang in this process."""
    register_model_config_parser(PARSER)(ConfigParser)


class ConfigParser(ModelConfigParserBase):
    """Reads a checkpoint's configuration as that of its language model."""

    def parse(
        self, model: Any, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> PretrainedConfig:
        from sglang.srt.utils.hf_transformers.config import HfModelConfigParser

        text = _language_model(HfModelConfigParser().parse(model, trust_remote_code, revision, **kwargs))
        if (names := _weight_names(model, revision)) is not None:
            # The default of transformers' class may differ from the checkpoint; the names of the weights are reliable.
            text.tie_word_embeddings = not any("lm_head." in name for name in names)
        return text


def _language_model(whole: Any) -> Any:
    """The configuration of the language model. Raises ConfigError."""
    from sglang.srt.utils.hf_transformers_utils import get_hf_text_config

    text = get_hf_text_config(whole)
    if text.model_type not in CLASSES:
        raise ConfigError(
            f"--enable-fluxion cannot serve this model ({', '.join(whole.architectures or [])}), because Fluxion does "
            f"not know how to load its language model ({text.model_type}) alone; serve it without --enable-fluxion."
        )
    text.architectures = [CLASSES[text.model_type]]
    for name in ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"):
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    if (quantisation := getattr(whole, "quantization_config", None)) is not None:
        text.quantization_config = _renamed_layers(quantisation)
    if isinstance(rope := text.rope_parameters, dict) and "mrope_section" in rope:
        kept = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        text.rope_parameters = kept | {key: "default" for key in ("rope_type", "type") if kept.get(key) == "mrope"}
    if text.model_type == "ministral3":
        text.original_max_position_embeddings = text.rope_parameters["original_max_position_embeddings"]
    if text.model_type == "qwen3_vl_moe_text":
        text.norm_topk_prob = True  # transformers' router always does
    return text


def _renamed_layers(quantisation: Any) -> Any:
    """The quantization_config with layer names of the language model, in its lists and keys."""
    if isinstance(quantisation, str):
        return _LAYER.sub("model.", quantisation).replace("language_model.lm_head", "lm_head")
    if isinstance(quantisation, list):
        return [_renamed_layers(each) for each in quantisation]
    if isinstance(quantisation, dict):
        return {_renamed_layers(key): _renamed_layers(value) for key, value in quantisation.items()}
    return quantisation


def _weight_names(model: Any, revision: str | None) -> Iterable[str] | None:
    """The names of the checkpoint's weights; None without safetensors. A single file is downloaded for them."""
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
    if (file := found("model.safetensors")) is None:
        return None
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def check_load_format(name: str) -> None:
    """Refuse load formats that bypass the hook below or use other names. Raises ConfigError."""
    if name not in ("auto", "safetensors", "fastsafetensors", "pt", "layered", "dummy"):
        raise ConfigError(
            f"--enable-fluxion does not work with --load-format {name} here, because it serves the language model of "
            "this vision-language checkpoint, whose weights it renames while safetensors are loaded; leave it out."
        )


def overrides(given: str) -> str:
    """Convert SGLang's --json-model-override-args for the whole checkpoint to those for its language model."""
    values = json.loads(given)
    return json.dumps(values | values.pop("text_config")) if isinstance(values.get("text_config"), dict) else given


# --- weights ---

_PREFIX = r"(?:model\.language_model|language_model\.model|model\.text_model)\."
_LAYER = re.compile(_PREFIX)
_NAME = re.compile(
    rf"(?:{_PREFIX}|model\.)(?P<layer>(?:layers|embed_tokens|norm)\..*)|(?:language_model\.)?(?P<head>lm_head\..*)"
)
_FUSED_EXPERTS = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<what>gate_up_proj|down_proj)(?P<more>.*)")
_VISION = re.compile(r"visual|vision|multi_modal_projector|connector")
"""Matches names in adapters (LoRA) of parts that are not loaded."""


def get_weights_iterator(original: Callable[..., Any], loader: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND DefaultModelLoader._get_weights_iterator: yield the language model's weights under the names of its
    class."""
    from sglang.srt.runtime_context import get_model

    weights = original(loader, source, *args, **kwargs)
    if get_model().model_config_parser != PARSER:
        return weights
    if source.model_config is None:  # an adapter: SGLang reads only the layer's number in its names
        return ((name, weight) for name, weight in weights if not _VISION.search(name))
    return renamed(weights, source.model_config.hf_text_config.hidden_size)


def renamed(weights: Iterable[tuple[str, torch.Tensor]], hidden: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the language model's weights of a vision-language checkpoint.

    A file may have one tensor for all experts of a layer; it is split into a weight [outputs, inputs] for each expert.
    The tensor is [experts, outputs, inputs], or [experts, inputs, outputs] in older files. They are distinguished by
    the dimensions, as in transformers.

    Args:
        hidden: elements of a hidden state.

    Raises:
        ConfigError: there is no embedding among them, or experts have scales.
    """
    embedding = False
    for name, weight in weights:
        if (found := _NAME.fullmatch(name)) is None:
            continue
        ours = found["head"] or f"model.{found['layer']}"
        embedding |= ours.startswith("model.embed_tokens.")
        if (fused := _FUSED_EXPERTS.fullmatch(ours)) is None:
            yield ours, weight
            continue
        if fused["more"]:
            raise _unserved(f"its experts have scales ({name}), and these are not divided between experts")
        gates = fused["what"] == "gate_up_proj"
        if weight.shape[2 if gates else 1] != hidden:
            weight = weight.transpose(1, 2)
        for expert, whole in enumerate(weight):
            names = ("gate_proj", "up_proj") if gates else ("down_proj",)
            for part, each in zip(names, whole.chunk(len(names)), strict=True):
                yield f"{fused['experts']}.{expert}.{part}.weight", each
    if not embedding:
        raise _unserved("its weights have names that Fluxion does not know")


def _unserved(why: str) -> ConfigError:
    return ConfigError(
        f"--enable-fluxion cannot serve this vision-language checkpoint, because {why}; give the model in bfloat16, in "
        "the format of transformers."
    )
