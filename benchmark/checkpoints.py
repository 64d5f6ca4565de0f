"""Checkpoints with random weights that every implementation of the race can load, written once into a cache folder.

A folder holds safetensors and a configuration in Hugging Face's format, the same weights as GGUF, and a tokenizer that
maps the word "17" to token 17. Implementations that take no token ids thus get the same prompt.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

CUTS: dict[str, dict[str, Any]] = {
    "llama-111m": {},
    "qwen3-0.6b": {},
    "llama-3.1-8b": {"num_hidden_layers": 2, "vocab_size": 32000},
    "qwen3-4b": {"num_hidden_layers": 3, "vocab_size": 32000},
}
"""Models, with their differences from the configuration in benchmark/models: fewer layers and words. All lose scaled
RoPE."""

_FORMAT = 4
"""Increase it when the written files change."""
_STD, _SHARP = 0.02, 0.05
"""Standard deviation of all weights, and of q_proj and k_proj: with small ones, attention is almost uniform and hides a
wrong RoPE."""
_SPECIAL = ("<unk>", "<s>", "</s>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def config(name: str) -> dict[str, Any]:
    """A model's config.json for the race. RoPE's base stands under both names that implementations read."""
    found = {**json.loads((common.MODELS / name / "config.json").read_text()), **CUTS[name]}
    theta = found["rope_parameters"]["rope_theta"]
    return {**found, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "rope_theta": theta}


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor; tensors with one dimension are weights of norms."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{at}.self_attn.{name}.weight", (rows, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, q)
        if config["model_type"] == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", (dim,)
            yield f"{at}.self_attn.k_norm.weight", (dim,)
        for name in ("gate_proj", "up_proj"):
            yield f"{at}.mlp.{name}.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def weights(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in bfloat16, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes(config):
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
        else:
            std = _SHARP if name.endswith(("q_proj.weight", "k_proj.weight")) else _STD
            yield name, torch.empty(shape).normal_(0, std, generator=generator).to(torch.bfloat16)


_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{layer}{_GGUF[parts[-2]]}.weight"


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in llama.cpp's order for Llama.

    Hugging Face rotates row i of a head with row i + D/2, llama.cpp row 2i with row 2i + 1.
    """
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: str) -> None:
    """Write the checkpoint for llama.cpp: matrices in f16 or bf16, norms in f32, no vocabulary."""
    import gguf

    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if dtype == "f16" else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        of = name.split(".")[-2]
        if kind == "llama" and of in heads:
            tensor = paired(tensor, heads[of])
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor.float().numpy())
        elif dtype == "f16":
            writer.add_tensor(gguf_name(name), tensor.half().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # As in Llama's tokenizer: a word begins with U+2581, which stands for the space before it.
    words = {word: i for i, word in enumerate(_SPECIAL)}
    words |= {f"\u2581{i}": i for i in range(len(words), vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_SPECIAL[0]))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "model_max_length": 131072,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))


def made(name: str, cache: Path) -> Path:
    """The folder of a checkpoint, written first if it does not exist."""
    from safetensors.torch import save_file

    facts = config(name)
    key = hashlib.sha256(json.dumps([_FORMAT, facts], sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / f"{name}-{key}"
    if folder.is_dir():
        return folder
    half = cache / f"{folder.name}.half-written"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    tensors = dict(weights(facts))
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("f16", "bf16"):
        write_gguf(half / f"{dtype}.gguf", facts, tensors, dtype)
    write_tokenizer(half, facts["vocab_size"])
    (half / "config.json").write_text(json.dumps(facts, indent=2))
    (half / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 2}))
    half.rename(folder)
    return folder


def parameters(config: dict[str, Any]) -> int:
    return sum(math.prod(shape) for _, shape in shapes(config))


def kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of a token's keys and values with 16 bits per element."""
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
