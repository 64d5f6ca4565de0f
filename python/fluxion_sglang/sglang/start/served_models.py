"""Tables of the models that --enable-fluxion serves, and of refusals, one sentence each. docs/models.md shows them.

A refusal is checked as soon as its input is known: the model's configuration when it has been read, the attention
layers when they have been built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.device import maker_of
from fluxion_sglang.sglang import compat
from fluxion_sglang.sglang.start.validation import Refusal
from fluxion_sglang.sglang.weights import served_formats

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.radix_attention import RadixAttention

_OTHER_MODEL = "serve it without --enable-fluxion"


class Family(NamedTuple):
    """Tested models of one or more SGLang classes.

    Attributes:
        name: common names. classes: SGLang's classes. tests: names in test/models/zoo.py.
        member: an example, with its number of layers with KV, KV heads and head dimension; "": none is named.
        note: remarks for users.
    """

    name: str
    classes: tuple[str, ...]
    tests: tuple[str, ...]
    member: str = ""
    shape: tuple[int, int, int] = (0, 0, 0)
    note: str = ""


_VISION = "the language model of a vision-language checkpoint: text alone"
SERVED = (
    Family(
        "Llama 2 to 3.3, SmolLM 1 and 2, Yi",
        ("LlamaForCausalLM",),
        ("llama", "llama-3-positions", "llama-a-head-a-head", "llama-16-heads-to-one"),
        "Llama-3.1-8B",
        (32, 8, 128),
    ),
    Family(
        "Mistral 7B, Nemo, Small 3",
        ("MistralForCausalLM",),
        ("mistral", "mistral-window"),
        "Mistral Small 3",
        (40, 8, 128),
    ),
    Family(
        "Mistral Small 3.1, 3.2; Pixtral",
        ("MistralForCausalLM",),
        ("mistral3",),
        "Mistral Small 3.2",
        (40, 8, 128),
        _VISION,
    ),
    Family("Ministral 3", ("Ministral3ForCausalLM",), ("ministral3",), "", (0, 0, 0), _VISION),
    Family("Qwen 2, 2.5", ("Qwen2ForCausalLM",), ("qwen2", "qwen2-window"), "Qwen2.5-7B", (28, 4, 128)),
    Family("Qwen 3", ("Qwen3ForCausalLM",), ("qwen3",), "Qwen3-8B", (36, 8, 128)),
    Family("Qwen 2-VL, 2.5-VL", ("Qwen2ForCausalLM",), ("qwen2.5-vl",), "Qwen2.5-VL-7B", (28, 4, 128), _VISION),
    Family("Qwen 3-VL", ("Qwen3ForCausalLM",), ("qwen3-vl",), "Qwen3-VL-8B", (36, 8, 128), _VISION),
    Family(
        "Qwen 1.5-MoE, 2-MoE", ("Qwen2MoeForCausalLM",), ("qwen2-moe",), "Qwen1.5-MoE-A2.7B", (24, 16, 128), "experts"
    ),
    Family("Qwen 3 with experts", ("Qwen3MoeForCausalLM",), ("qwen3-moe",), "Qwen3-30B-A3B", (48, 4, 128), "experts"),
    Family(
        "Qwen 3-VL with experts",
        ("Qwen3MoeForCausalLM",),
        ("qwen3-vl-moe",),
        "Qwen3-VL-30B-A3B",
        (48, 4, 128),
        f"experts; {_VISION}",
    ),
    Family(
        "Qwen 3.5, 3.6",
        ("Qwen3_5ForCausalLM",),
        ("qwen3.5",),
        "Qwen3.5-9B",
        (8, 4, 256),
        f"a state a request in three of four layers (hybrid); needs a CPU as the device; {_VISION}",
    ),
    Family(
        "Qwen 3.5, 3.6 with experts",
        ("Qwen3_5MoeForCausalLM",),
        ("qwen3.5-moe",),
        "Qwen3.5-35B-A3B",
        (10, 2, 256),
        f"experts; as Qwen 3.5; {_VISION}",
    ),
    Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        ("gpt-oss",),
        "gpt-oss-20b",
        (24, 8, 64),
        "experts, sliding windows, attention sinks; needs a CPU as the device; MXFP4 becomes 8 bits, which is exact",
    ),
    Family("Gemma", ("GemmaForCausalLM",), ("gemma",)),
    Family(
        "Gemma 2",
        ("Gemma2ForCausalLM",),
        ("gemma2",),
        "Gemma 2 9B",
        (42, 8, 256),
        "sliding windows, capped logits; needs a CPU as the device",
    ),
    Family(
        "Gemma 3",
        ("Gemma3ForCausalLM",),
        ("gemma3",),
        "Gemma 3 270M",
        (18, 1, 256),
        "sliding windows; needs a CPU as the device",
    ),
    Family(
        "Gemma 3, 4B and larger",
        ("Gemma3ForCausalLM",),
        ("gemma3-vl",),
        "Gemma 3 12B",
        (48, 8, 256),
        f"sliding windows; needs a CPU as the device; {_VISION}",
    ),
    Family("GLM-4", ("Glm4ForCausalLM",), ("glm4",), "GLM-4-9B-0414", (40, 2, 128)),
    Family("GLM-4.1V", ("Glm4ForCausalLM",), ("glm4v",), "GLM-4.1V-9B", (40, 2, 128), _VISION),
    Family(
        "GLM-4.5 to 4.7 (not Flash)", ("Glm4MoeForCausalLM",), ("glm4-moe",), "GLM-4.5-Air", (46, 8, 128), "experts"
    ),
    Family("GLM-4.5V, 4.6V", ("Glm4MoeForCausalLM",), ("glm4v-moe",), "GLM-4.5V", (46, 8, 128), f"experts; {_VISION}"),
    Family("MiniMax-M2", ("MiniMaxM2ForCausalLM",), ("minimax-m2",), "MiniMax-M2", (62, 8, 128), "experts"),
    Family("Mixtral", ("MixtralForCausalLM",), ("mixtral",), "Mixtral 8x7B", (32, 8, 128), "experts"),
    Family("OLMoE", ("OlmoeForCausalLM",), ("olmoe",), "OLMoE-1B-7B", (16, 16, 128), "experts"),
    Family(
        "OLMo 2, 3",
        ("Olmo2ForCausalLM",),
        ("olmo2", "olmo3"),
        "OLMo 2 7B",
        (32, 32, 128),
        "OLMo 3 has sliding windows and needs a CPU as the device",
    ),
    Family("Phi-3, Phi-4", ("Phi3ForCausalLM",), ("phi3",), "Phi-4", (40, 10, 128)),
    Family(
        "Granite 3, Granite SWA",
        ("GraniteForCausalLM", "GraniteSWAForCausalLM"),
        ("granite", "granite-sinks"),
        "Granite 3.3 8B",
        (40, 8, 128),
        "Granite SWA has sliding windows and attention sinks, and needs a CPU as the device",
    ),
    Family("Command R, Aya 23", ("CohereForCausalLM",), ("cohere",)),
    Family(
        "Command R7B, Command A",
        ("Cohere2ForCausalLM",),
        ("cohere2",),
        "Command R7B",
        (32, 8, 128),
        "sliding windows, in SGLang a token longer than in transformers; needs a CPU as the device",
    ),
    Family(
        "Command A Vision, Aya Vision",
        ("Cohere2ForCausalLM",),
        ("cohere2-vision",),
        "",
        (0, 0, 0),
        f"as Command A: sliding windows; needs a CPU as the device; {_VISION}",
    ),
    Family(
        "InternVL 3",
        ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        ("internvl",),
        "",
        (0, 0, 0),
        f"checkpoints in transformers' format; {_VISION}",
    ),
    Family("SmolVLM, Idefics 3, LLaVA", ("LlamaForCausalLM",), ("smolvlm",), "", (0, 0, 0), _VISION),
    Family("StarCoder 2", ("Starcoder2ForCausalLM",), ("starcoder2",), "StarCoder2-7B", (32, 4, 128)),
    Family("StableLM", ("StableLmForCausalLM",), ("stablelm",)),
    Family("GPT-2, OPT", ("GPT2LMHeadModel", "OPTForCausalLM"), ("gpt2", "opt")),
)
"""Small random-weight models of these families give the same tokens as plain SGLang or transformers (test/models)."""

# Limits of the kernels.
HEAD_DIMS = range(32, 257, 16)
LARGEST_GROUP = 16


def _first(table: Sequence[Refusal], source: str, subject: Any, *args: Any) -> tuple[str, str] | None:
    """The reason of the first refusal of `subject`, and what to do instead.

    Raises:
        CompatError: the table reads an attribute that this SGLang lacks; `source` names its owner.
    """
    try:
        for refusal in table:
            if refusal.refused(subject, *args):
                return refusal.why.format(subject), refusal.instead or _OTHER_MODEL
    except AttributeError as error:
        raise compat.missing(f"{source} attribute {error.name!r}") from None
    return None


def _is_latent(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch != AttentionArch.MHA


_WITH_STATES = frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"})


def has_states(model: ModelConfig) -> bool:
    """Whether some layers keep a state per request (gated delta rule) for which Fluxion has kernels."""
    return not _WITH_STATES.isdisjoint(model.hf_config.architectures or ())


def attention_layers(model: ModelConfig) -> Sequence[int]:
    """The indices of the model's layers with KV."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    hybrid = mambaish_config(model)
    return range(model.num_attention_layers) if hybrid is None else hybrid.full_attention_layer_ids


def _is_linear(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None and not has_states(model)


def _needs_more_than_states(model: ModelConfig, args: Any) -> bool:
    """Whether the model has layers with states and an option does not support them."""
    return has_states(model) and (
        args.speculative_algorithm is not None
        or args.disaggregation_mode != "null"
        or args.pp_size > 1
        or bool(args.enable_lora or args.lora_paths)
    )


def _has_sparse_index(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.model_config import is_minimax_sparse

    return bool(is_minimax_sparse(model.hf_config))


def _layer_types(model: ModelConfig) -> set[str]:
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def _has_chunked_layers(model: ModelConfig, args: Any) -> bool:
    chunked = "chunked_attention" in _layer_types(model)
    return bool(model.is_local_attention_model or model.attention_chunk_size or chunked)


def _has_pools_by_layer(model: ModelConfig, args: Any) -> bool:
    return bool(model.is_hybrid_swa)  # this model ignores the option that our resolution sets


def is_gpt_oss(model: ModelConfig) -> bool:
    return "GptOssForCausalLM" in (model.hf_config.architectures or ())


def _caps_logits(model: ModelConfig) -> bool:
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def _varies_beside_device(model: ModelConfig, args: Any) -> bool:
    varies = model.has_attention_sinks or "sliding_attention" in _layer_types(model) or _caps_logits(model)
    return varies and maker_of(args.device) is not None


def _whole_groups(q_heads: int, kv_heads: int) -> bool:
    return q_heads % kv_heads == 0 and q_heads // kv_heads <= LARGEST_GROUP


def _groups_of_a_rank(model: ModelConfig, args: Any) -> bool:
    # Attention data parallelism makes smaller groups at most.
    return _whole_groups(model.get_num_attention_heads(args.tp_size), model.get_num_kv_heads(args.tp_size))


MODELS = (
    Refusal(lambda m, _: m.is_encoder_decoder, "it is an encoder-decoder, which attends across"),
    Refusal(
        lambda m, _: m.is_multimodal or m.is_audio_model,
        "it takes images, video or sound, and Fluxion does not know how to load its language model alone",
    ),
    Refusal(
        _is_linear,
        "it has linear-attention or state-space layers, and neither Fluxion nor SGLang's packages on PyPI have kernels "
        "for them on a CPU",
    ),
    Refusal(
        lambda m, args: has_states(m) and maker_of(args.device) is not None,
        "some of its layers keep a state a request (gated delta rule), which Fluxion serves only where the CPU is the "
        "device",
        "hide the accelerator and add --device cpu, or " + _OTHER_MODEL,
    ),
    Refusal(
        _needs_more_than_states,
        "some of its layers keep a state a request (gated delta rule), which does not go with speculative decoding, "
        "--disaggregation-mode, --pp-size or adapters yet",
        "leave these options out, or " + _OTHER_MODEL,
    ),
    Refusal(_is_latent, "its attention is {0.attention_arch.name} and not multi-head (it stores no key per KV head)"),
    Refusal(_has_sparse_index, "it brings a sparse index of its own"),
    Refusal(_has_chunked_layers, "it has chunked-attention layers, whose masks the kernels do not have"),
    Refusal(_has_pools_by_layer, "its sliding-window layers need a KV pool of their own"),
    Refusal(
        _varies_beside_device,
        "it has sliding windows, learned attention sinks or capped logits, which Fluxion serves only where the CPU is "
        "the device",
        "hide the accelerator and add --device cpu, or " + _OTHER_MODEL,
    ),
    Refusal(
        lambda m, _: bool(getattr(m, "use_alibi", False)),
        "it adds position biases (ALiBi) to attention logits, which the kernels do not",
    ),
    Refusal(
        lambda m, _: m.dtype not in (torch.bfloat16, torch.float32),
        "it would run in {0.dtype} and the kernels compute in bfloat16 and float32",
        "add --dtype bfloat16 or --dtype float32",
    ),
    Refusal(
        lambda m, _: is_gpt_oss(m) and m.dtype != getattr(m.hf_config, "dtype", m.dtype),
        "it would run in {0.dtype} and SGLang computes its routers in {0.hf_config.dtype}",
        "leave --dtype out",
    ),
    Refusal(
        lambda m, args: args.kv_cache_dtype in ("bf16", "bfloat16") and m.dtype != torch.bfloat16,
        "it runs in {0.dtype} and --kv-cache-dtype asks for another type",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        lambda m, _: m.v_head_dim != m.head_dim,
        "its keys have {0.head_dim} elements and its values {0.v_head_dim}, and tiles hold both in one size",
    ),
    Refusal(
        lambda m, _: m.head_dim not in HEAD_DIMS,
        f"its head dimension is {{0.head_dim}} and the kernels take multiples of {HEAD_DIMS.step} "
        f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}",
    ),
    Refusal(
        lambda m, args: not _groups_of_a_rank(m, args),
        f"its {{0.num_attention_heads}} query heads do not form whole groups of at most {LARGEST_GROUP} a KV head",
        "use another --tp-size or " + _OTHER_MODEL,
    ),
)


def check_model(model: ModelConfig, args: Any) -> None:
    """Refuse models that Fluxion cannot serve.

    Args:
        model: SGLang's configuration of the model.
        args: SGLang's resolving view.

    Raises:
        ConfigError: the first reason.
        CompatError: an attribute that the table reads does not exist in this SGLang.
    """
    if (found := _first(MODELS, "ModelConfig's or ServerArgs'", model, args)) is not None:
        names = ", ".join(model.hf_config.architectures or ["unknown"])
        raise ConfigError(f"--enable-fluxion cannot serve this model ({names}), because {found[0]}; {found[1]}.")


def check_quantised(args: Any) -> bool:
    """Refuse quantised weights that Fluxion does not load, if the CPU is the device. SGLang has no CPU kernels for
    them, and fails in many ways, sometimes after loading. Raises ConfigError.

    Args:
        args: SGLang's resolving view, before it has read the model's configuration.

    Returns:
        Whether the checkpoint is quantised and loaded by Fluxion.
    """
    ours = args.quantization == compat.INT8_WEIGHTS
    if ours and args.device != "cpu":
        raise ConfigError(
            f"--quantization {compat.INT8_WEIGHTS} is for the CPU, and this server's device is {args.device}; leave it "
            "out, or give the model in a format that SGLang serves there."
        )
    if args.device != "cpu" or (method := _quantised(args)) is None:
        if ours:
            from fluxion_sglang.sglang.weights import rounding

            rounding.register()
        return False
    found = configuration(args) if method in served_formats.NAMES else {}
    quantisation = _quantisation(found)
    if (name := quantisation.get("quant_method")) in served_formats.NAMES:
        if args.quantization not in (None, name):
            raise ConfigError(
                f"--enable-fluxion does not work with --quantization {args.quantization} here, because the "
                f"checkpoint's weights are quantised already ({name}); leave that option out."
            )
        served_formats.check(quantisation, found)
        from fluxion_sglang.sglang.weights import quantised_checkpoints

        quantised_checkpoints.register()
        return True
    raise ConfigError(
        f"--enable-fluxion cannot serve this model on a CPU, because its weights are quantised ({method}), and SGLang "
        f"computes with such weights on GPUs alone; give the model in {served_formats.FORMATS}, or in bfloat16 or "
        f"float32, with --quantization {compat.INT8_WEIGHTS} for weights of 8 bits."
    )


def _quantised(args: Any) -> str | None:
    """The quantisation method of the checkpoint according to an option or its files; None: none is named."""
    if args.quantization not in (None, "unquant", compat.INT8_WEIGHTS):
        return str(args.quantization)
    if args.load_format in ("gguf", "bitsandbytes"):
        return str(args.load_format)
    found = _quantisation(configuration(args))
    return None if not found else str(found.get("quant_method", "by a method of its own"))


def configuration(args: Any) -> dict[str, Any]:
    """The checkpoint's config.json; {} if it cannot be read, which SGLang reports."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(args.model_path, revision=args.revision)
    except (OSError, ValueError):
        return {}
    return dict(config)


def _quantisation(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("quantization_config") or config.get("compression_config") or {}


def check_stored(model: ModelConfig, config: FluxionConfig) -> None:
    """Refuse int8 KV for a model that is not in bfloat16, and KV in files for a model with states. Raises
    ConfigError."""
    if config.disk is not None and has_states(model):
        raise ConfigError(
            "disk does not work with this model, because some of its layers keep a state a request and files have KV "
            "alone; leave disk out."
        )
    if config.int8 and model.dtype != torch.bfloat16:
        raise ConfigError(
            f"kv_dtype int8 does not work with a model in {model.dtype}, because what is stored reads as bfloat16; "
            "add --dtype bfloat16 or leave kv_dtype out."
        )


LAYERS = (
    Refusal(lambda layer: layer.is_cross_attention, "attends across to an encoder"),
    Refusal(lambda layer: layer.attn_type.value != "decoder", "attends to later tokens ({0.attn_type.value})"),
    Refusal(lambda layer: layer.logit_cap < 0, "caps attention logits at {0.logit_cap}"),
    Refusal(lambda layer: layer.xai_temperature_len > 0, "scales attention logits by position"),
    Refusal(lambda layer: layer.pos_encoding_mode != "NONE", "encodes positions in attention ({0.pos_encoding_mode})"),
    Refusal(
        lambda layer: layer.v_head_dim != layer.qk_head_dim,
        "has keys of {0.qk_head_dim} elements and values of {0.v_head_dim}",
    ),
    Refusal(lambda layer: layer.qk_head_dim not in HEAD_DIMS, "has a head dimension of {0.qk_head_dim}"),
    Refusal(
        lambda layer: not _whole_groups(layer.tp_q_head_num, layer.tp_k_head_num),
        "has {0.tp_q_head_num} query heads for {0.tp_k_head_num} KV heads, no whole groups of at most "
        f"{LARGEST_GROUP}",
    ),
)


def window_of(layer: RadixAttention) -> int | None:
    """Tokens that a token attends to in a sliding-window layer, itself included; None: all up to its own."""
    size = layer.sliding_window_size
    # SGLang's number excludes the token itself; -1 means no window.
    return None if size is None or size < 0 else int(size) + 1


def check_recorded(config: FluxionConfig, layers: Sequence[RadixAttention], model: ModelConfig) -> None:
    """Refuse to record training samples for a predictor if they would be measured without part of the softmax.

    Raises:
        ConfigError: one sentence.
    """
    if config.record is not None and (
        model.has_attention_sinks or any(window_of(layer) or layer.logit_cap for layer in layers)
    ):
        raise ConfigError(
            "record does not work with this model, because it has sliding windows, learned attention sinks or capped "
            "logits, and samples are measured without them; leave record out."
        )


def check_windows(draft: int | None, layers: Sequence[RadixAttention]) -> None:
    """Refuse drafts that are longer than a layer's window. Raises ConfigError.

    Args:
        draft: tokens of a draft; None: there are no drafts.
    """
    least = min((window for layer in layers if (window := window_of(layer)) is not None), default=None)
    if draft is not None and least is not None and draft > least:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {draft}, but layers of this model have a window of {least} tokens, "
            "and a draft must fit into it; use a smaller number."
        )


def check_attention_layers(model: Any, beside_device: bool = False) -> Sequence[RadixAttention]:
    """Return all attention layers; refuse properties that the model's configuration does not show.

    Args:
        model: torch.nn.Module with at least one RadixAttention.
        beside_device: the model runs on a device with memory of its own.

    Raises:
        ConfigError: the first reason.
        CompatError: the table reads an attribute that this SGLang lacks.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        raise _unserved("it has no attention")
    for layer in layers:
        if (found := _first(LAYERS, "RadixAttention's", layer)) is not None:
            raise _unserved(f"its attention layer {layer.layer_id} {found[0]}, which the kernels do not support")
        if beside_device and (window_of(layer) is not None or layer.logit_cap):
            raise _unserved(
                f"its attention layer {layer.layer_id} has a sliding window or capped logits, which Fluxion serves "
                "only where the CPU is the device"
            )
    shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim) for layer in layers}
    if len(shapes) > 1:
        listed = ", ".join(f"{q} query and {k} KV heads of {d}" for q, k, d in sorted(shapes))
        raise _unserved(f"its attention layers differ in heads or head dimension ({listed})")
    if len({layer.layer_id for layer in layers}) < len(layers):
        raise _unserved("some of its layers share one KV cache")
    return layers


def _unserved(why: str) -> ConfigError:
    return ConfigError(f"--enable-fluxion cannot serve this model, because {why}; {_OTHER_MODEL}.")
