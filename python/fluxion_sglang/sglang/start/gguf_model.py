"""Prepares a model in one GGUF file: checks that it is served, and makes configuration and tokenizer for SGLang.

SGLang lets transformers make both from the file in each process. That takes minutes for a large vocabulary, and loses
settings that llama.cpp derives from the architecture's name. Here both are made once, in a cache folder with a link to
the GGUF file. A file of the same name beside the GGUF file takes precedence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fluxion_sglang.config import ConfigError
from fluxion_sglang.weights import ggml
from fluxion_sglang.weights.ggml import Header

logger = logging.getLogger(__name__)

EMBEDDING, HEAD, ROUTER = "token_embd.weight", "output.weight", "ffn_gate_inp.weight"
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_HEAD_NORMS = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_AFTER = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_ROUTED = {name: ours for name, ours in _LAYER.items() if not ours.startswith("mlp.")} | {
    # The experts are one tensor in the file, mapped to SGLang's name of the first expert's weight.
    ROUTER: "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.0.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.0.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.0.down_proj.weight",
}
_ARCHITECTURES = {
    # By general.architecture: SGLang's class, transformers' model_type, and the tensors of a layer.
    "llama": ("LlamaForCausalLM", "llama", _LAYER),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _LAYER | _BIASES),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _LAYER | _HEAD_NORMS),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _ROUTED | _HEAD_NORMS),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _LAYER | _HEAD_NORMS | _AFTER),
}
SERVED = "llama (Mistral's models as well), qwen2, qwen3, qwen3moe and gemma3"
_MIXTURE = "qwen3moe"
_NORM, _ROPE = "output_norm.weight", "rope_freqs.weight"
_INSTEAD = "give another GGUF file of it, or the model in bfloat16"


def names_of(header: Header) -> dict[str, str]:
    """SGLang's names of a served model's tensors, by their names in the file; the head only if there is one."""
    *_, layer = _ARCHITECTURES[header.architecture]
    names = {EMBEDDING: "model.embed_tokens.weight", _NORM: "model.norm.weight"}
    if HEAD in header.tensors:
        names[HEAD] = "lm_head.weight"
    for index in range(header.value("block_count", 0)):
        names |= {f"blk.{index}.{name}": f"model.layers.{index}.{ours}" for name, ours in layer.items()}
    return names


def is_tied(header: Header) -> bool:
    """Whether the embedding also makes the logits."""
    return HEAD not in header.tensors


def load(header: Header, name: str) -> torch.Tensor:
    """A tensor, or its blocks, in the layout of SGLang's model. It undoes changes by llama.cpp's converter, which
    reorders the rows of queries and keys of a llama, and adds 1 to the weights of Gemma's norms.

    Returns:
        [outputs, inputs], or [outputs, bytes] of blocks. Outputs of experts are concatenated.
    """
    stored = header.read(name)
    if stored.dim() == 3:
        stored = stored.flatten(0, 1)
    kind = name.rsplit(".", 2)[-2]
    if header.architecture == "llama" and kind in ("attn_q", "attn_k"):
        heads = header.value("attention.head_count" if kind == "attn_q" else "attention.head_count_kv")
        return stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    if header.architecture == "gemma3" and kind.endswith("norm"):
        return stored.float() - 1
    return stored


# --- Refusals ---


def check(path: Path, args: Any = None) -> Header:
    """Return the header of a file that is served. Raises ConfigError for others.

    Args:
        args: SGLang's resolving view; None: do not check options.
    """
    try:
        header = ggml.read_header(path)
        if (why := _unserved(header, args)) is None:
            header.expect(*header.tensors)
    except ggml.GGUFError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(
            f"--enable-fluxion cannot serve {path.name}, because it cannot be read ({error.strerror}); give a file "
            "that this user may read."
        ) from None
    if why is not None:
        raise ConfigError(f"--enable-fluxion cannot serve {path.name} on a CPU, because {why[0]}; {why[1]}.")
    return header


def _unserved(header: Header, args: Any) -> tuple[str, str] | None:
    architecture = header.architecture
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", header.path.name) or header.values.get("split.count", 0) not in (0, 1):
        return "it is a part of a split file", "join the parts with llama.cpp's llama-gguf-split --merge"
    if architecture != _MIXTURE and (header.value("expert_count", 0) or "moe" in architecture):
        return f"its model ({architecture}) has experts, which are served from GGUF files of {_MIXTURE} alone", (
            "give the model in bfloat16"
        )
    if architecture not in _ARCHITECTURES:
        return (
            f"its architecture is {architecture}, and only {SERVED} are served from GGUF files",
            "give the model in bfloat16",
        )
    if args is not None and args.tp_size > 1:
        return "its blocks cannot be divided among ranks", (
            "leave --tp-size out (one process uses all cores), or give the model in bfloat16"
        )
    if args is not None and args.quantization not in (None, "gguf"):
        return f"its weights are quantised already and --quantization is {args.quantization}", "leave that option out"
    if others := {tensor.kind for tensor in header.tensors.values()} - {*ggml.KINDS, *ggml.DENSE}:
        return f"it has weights of the type {_type_names(others)}, and only {ggml.SERVED} are served", _INSTEAD
    for name, tensor in header.tensors.items():
        if (kind := ggml.KINDS.get(tensor.kind)) and (len(tensor.shape) < 2 or tensor.shape[-1] % kind.inputs):
            return f"{name} has {tensor.shape[-1]} inputs, which is no multiple of {kind.inputs}", _INSTEAD
    return _other_tensors(header) or _other_values(header) or _other_shapes(header) or _other_experts(header)


def _type_names(kinds: set[int]) -> str:
    from gguf import GGMLQuantizationType

    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    return " and ".join(known.get(kind, f"number {kind}") for kind in sorted(kinds))


def _other_tensors(header: Header) -> tuple[str, str] | None:
    if type(layers := header.value("block_count")) is not int:
        return "it does not say how many layers it has", _INSTEAD
    if layers > len(header.tensors):
        return f"it says that it has {layers} layers, and has {len(header.tensors)} tensors", _INSTEAD
    names, found = names_of(header).keys(), header.tensors.keys()
    if missing := names - found:
        return f"it has no {min(missing)}", _INSTEAD
    if more := found - names - {_ROPE}:
        return f"it has {min(more)}, which a {header.architecture} model does not", _INSTEAD
    return None


def _other_values(header: Header) -> tuple[str, str] | None:
    gemma = header.architecture == "gemma3"
    scaled = header.value("rope.scaling.type") == "linear"
    needed = [*_numbers(header).values(), *["attention.sliding_window"] * gemma, *["rope.scaling.factor"] * scaled]
    for key in (*needed, *_OPTIONAL):
        if not (_is_size(found := header.value(key)) or (found is None and key not in needed)) and not (
            key in _REAL and isinstance(found, float) and 0 < found < math.inf
        ):
            return f"it has no number {header.architecture}.{key} above 0", "give the model in bfloat16"
    for key in ("bos", "eos", "eot", "padding"):
        if type(header.values.get(f"tokenizer.ggml.{key}_token_id", 0)) is not int:
            return f"its tokenizer.ggml.{key}_token_id is no token", _INSTEAD
    if _rope(header) is None and not (header.path.parent / "config.json").is_file():
        return "it scales positions in a way that this version does not know", "put the model's config.json beside it"
    return None


def _is_size(found: Any) -> bool:
    return type(found) is int and found > 0


_OPTIONAL = (
    *("attention.key_length", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"),
    "attention.sliding_window_pattern",
)
_REAL = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor")
"""Keys with real values; the others are positive integers."""


def _other_shapes(header: Header) -> tuple[str, str] | None:
    """Check the shapes of all tensors, because a layer with wrong inputs would fail only at the first request."""
    config = config_of(header)
    size, hidden, inner = config["head_dim"], config["hidden_size"], config["intermediate_size"]
    queries, keys = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    parts = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output.weight": (config["vocab_size"], hidden),
        **{f"attn_{part}.weight": (outputs, hidden) for part, outputs in parts.items()},
        **{f"attn_{part}.bias": (outputs,) for part, outputs in parts.items()},
        "attn_output.weight": (hidden, queries),
        "attn_q_norm.weight": (size,),
        "attn_k_norm.weight": (size,),
        **{f"ffn_{part}.weight": (inner, hidden) for part in ("gate", "up")},
        "ffn_down.weight": (hidden, inner),
    }
    if header.architecture == _MIXTURE:
        experts, inner = config["num_experts"], config["moe_intermediate_size"]
        shapes |= {
            ROUTER: (experts, hidden),
            **{f"ffn_{part}_exps.weight": (experts, inner, hidden) for part in ("gate", "up")},
            "ffn_down_exps.weight": (experts, hidden, inner),
        }
    for name in names_of(header):
        found, want = header.tensors[name].shape, shapes.get(re.sub(r"^blk\.\d+\.", "", name), (hidden,))
        if found != want:
            return f"its {name} is {_size(found)} and its header says that it is {_size(want)}", _INSTEAD
    return None


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _other_experts(header: Header) -> tuple[str, str] | None:
    for name in filter(lambda name: name.endswith(".ffn_gate_exps.weight"), header.tensors):
        kinds = [header.tensors[each].kind for each in (name, name.replace("_gate_", "_up_"))]
        first, second = (ggml.KINDS.get(kind) for kind in kinds)
        if first and second and first.format != second.format:
            layer = name.removesuffix(".ffn_gate_exps.weight")
            return f"experts have one type for gate and up, and those of {layer} have {_type_names({*kinds})}", _INSTEAD
    return None


# --- The configuration ---


_NUMBERS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_TOKENS = {"bos_token_id": "bos", "pad_token_id": "padding"}


def _numbers(header: Header) -> dict[str, str]:
    return _NUMBERS | _EXPERTS if header.architecture == _MIXTURE else _NUMBERS


def config_of(header: Header) -> dict[str, Any]:
    """The model's configuration in transformers' form."""
    class_name, model_type, _ = _ARCHITECTURES[header.architecture]
    config = {name: header.value(key) for name, key in _numbers(header).items()}
    heads, size = config["hidden_size"] // config["num_attention_heads"], _head_size(header)
    config |= {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "head_dim": size,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": is_tied(header),
        "rope_parameters": _rope(header),
    }
    tokens = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    ends = [header.values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    config |= {name: token for name, token in tokens.items() if token is not None}
    config["eos_token_id"] = sorted({token for token in ends if token is not None}) or None
    if header.architecture == _MIXTURE:  # as in llama.cpp: weights of the selected experts are normalized to 1
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if header.architecture == "gemma3":
        layers, window = config["num_hidden_layers"], header.value("attention.sliding_window_pattern", 6)
        kinds = ["full_attention" if (index + 1) % window == 0 else "sliding_attention" for index in range(layers)]
        config |= {
            "sliding_window": header.value("attention.sliding_window"),
            "layer_types": kinds,
            "query_pre_attn_scalar": heads if layers == 62 else size,  # as in llama.cpp: only the 27B differs
        }
    return config


def _head_size(header: Header) -> int:
    each = header.value("embedding_length") // header.value("attention.head_count")
    return int(header.value("attention.key_length", header.value("rope.dimension_count", each)))


def _rope(header: Header) -> dict[str, Any] | None:
    """The model's rope_parameters; None if the file scales positions in an unknown way."""
    theta = header.value("rope.freq_base", 10000.0)
    scaling: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = header.value("rope.scaling.type", "none")
    if _ROPE in header.tensors:
        found = _llama3(header, theta)
        if found is None or kind != "none":
            return None
        scaling |= found
    elif kind == "linear":
        scaling |= {"rope_type": "linear", "factor": header.value("rope.scaling.factor")}
    elif kind != "none":
        return None
    if header.architecture != "gemma3":
        return scaling
    local = {"rope_type": "default", "rope_theta": header.value("rope.freq_base_swa", 10000.0)}
    return {"full_attention": scaling, "sliding_attention": local}


def _llama3(header: Header, theta: float) -> dict[str, Any] | None:
    """Llama 3's scaling, derived from the file's frequency divisors; None if they belong to another scaling."""
    stored = header.tensors[_ROPE]
    if stored.kind not in ggml.DENSE or stored.shape != (_head_size(header) // 2,) or stored.shape == (0,):
        return None
    factors = header.read(_ROPE).double()
    found = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = round(float(factors.max()), 4)
    waves = 2 * math.pi * theta ** (torch.arange(len(factors)).double() / len(factors))
    smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
    if not torch.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        return None
    return {"rope_type": "llama3", "factor": factor, **found}


# --- The folder ---


def prepared(header: Header, tokenizer: bool) -> Path:
    """A link to the file in a cache folder, which also has the other files that SGLang reads.

    Args:
        tokenizer: whether to make a tokenizer as well.

    Raises:
        ConfigError: the folder cannot be written, or transformers cannot make the tokenizer.
    """
    real = header.path.resolve()
    about = real.stat()
    key = hashlib.sha256(f"{_VERSION} {header.path.absolute()} {real} {about.st_size} {about.st_mtime_ns}".encode())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home, as in some containers
        raise ConfigError(
            f"--enable-fluxion cannot serve {header.path.name}, because its configuration needs a folder and this user "
            "has no home; set XDG_CACHE_HOME to a folder that can be written."
        ) from None
    folder = cache / "fluxion" / "gguf" / key.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _link(real, folder / real.name)
        for name in _BESIDE:
            if (beside := header.path.parent / name).is_file():
                _link(beside.resolve(), folder / name)
        if not (folder / "config.json").exists():
            _write(folder, lambda new: (new / "config.json").write_text(json.dumps(config_of(header), indent=2) + "\n"))
        if tokenizer and not (folder / "tokenizer_config.json").exists():
            logger.info("Fluxion makes the tokenizer of %s, once; a large vocabulary takes minutes", real.name)
            _write(folder, lambda new: _save_tokenizer(header, new))
    except OSError as error:
        raise ConfigError(
            f"--enable-fluxion cannot serve {header.path.name}, because its configuration needs a folder and "
            f"{folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can."
        ) from None
    return folder / real.name


_VERSION = 1  # version of the folder's contents
_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
"""Files that SGLang reads from the folder of a GGUF file."""


def _link(target: Path, link: Path) -> None:
    """Create a link to the target, replacing an existing file or link."""
    if not (link.is_symlink() and link.readlink() == target):
        with TemporaryDirectory(dir=link.parent) as new:  # atomic, because another server may do the same
            (Path(new) / link.name).symlink_to(target)
            os.replace(Path(new) / link.name, link)


def _write(folder: Path, write: Callable[[Path], object]) -> None:
    """Write files that appear in the folder when they are complete. tokenizer_config.json appears last, because
    `prepared` tests for it."""
    with TemporaryDirectory(dir=folder) as new:
        write(Path(new))
        for file in sorted(Path(new).iterdir(), key=lambda file: file.name == "tokenizer_config.json"):
            os.replace(file, folder / file.name)


def _save_tokenizer(header: Header, folder: Path) -> None:
    from transformers import AutoTokenizer

    with TemporaryDirectory(dir=folder.parent) as alone:  # transformers would prefer other files of the folder
        _link(header.path.resolve(), Path(alone) / "model.gguf")
        try:
            made = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
        except Exception as error:  # converters raise any exception
            said = " ".join(str(error).split())
            raise ConfigError(
                f"transformers cannot make a tokenizer from {header.path.name} ({type(error).__name__}: {said}); "
                "put the model's tokenizer_config.json and tokenizer.json beside it."
            ) from None
        _put_bos(made, bool(header.values.get("tokenizer.ggml.add_bos_token", False)))
        made.save_pretrained(folder)


def _put_bos(tokenizer: Any, wanted: bool) -> None:
    """Make the tokenizer begin each text with the bos token, if the file says so."""
    from tokenizers.processors import TemplateProcessing

    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if wanted and number is not None and tokenizer.encode("a")[0] != number:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
