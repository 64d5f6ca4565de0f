"""Write a model of transformers to a GGUF file as llama.cpp's converter does, and return the weights of such a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

WORDS = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names of models whose names in transformers differ."""


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of the converter."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def mixed(name: str) -> Type:
    """Types of weights by their names in the file: several types, also within one layer of SGLang."""
    parts = {"attn_v": Type.Q8_0, "attn_k": Type.Q5_0, "attn_output": Type.Q5_1, "ffn_down": Type.F16}
    parts |= {"ffn_gate_inp": Type.F32, "ffn_gate_exps": Type.Q8_0, "ffn_up_exps": Type.Q5_0}
    parts |= {"ffn_up": Type.Q4_1, "token_embd": Type.Q8_0, "output": Type.Q4_1}
    return parts.get(name.split(".")[-2], Type.Q4_0)


def _matrices(name: str, weight: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Tensors of a weight in the file, by names without the suffix; gates and ups of experts are two tensors."""
    if name.endswith("experts.gate_up_proj"):
        return [
            (name.replace("gate_up", kind), np.ascontiguousarray(half))
            for kind, half in zip(("gate", "up"), np.split(weight, 2, 1), strict=True)
        ]
    return [(name.removesuffix(".weight").removesuffix(".bias"), weight)]


def write(model: Any, file: Path, types: Callable[[str], Type] = mixed, **values: Any) -> Any:
    """Write a model of transformers, and return one with the weights of the file.

    Args:
        types: of matrices, by their names in the file. values: further header entries, by key.
    """
    config, state = model.config, model.state_dict()
    word = WORDS.get(config.model_type, config.model_type)
    (kind,) = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == word]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, word)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    positions = config.rope_parameters
    writer.add_rope_freq_base(positions.get("full_attention", positions)["rope_theta"])
    if word == "llama":
        writer.add_rope_dimension_count(head_size)
    if word == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if word == "qwen3moe":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in values.items():
        {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    _add_tokenizer(writer, config.vocab_size)
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        back = []
        for stem, matrix in _matrices(name, weight.float().numpy()):
            suffix = "bias" if name.endswith(".bias") else "weight"
            ours, rows = f"{names.get_name(stem)}.{suffix}", matrix
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            if word == "llama" and (count := heads.get(stem.split(".")[-1])):
                rows = _permuted(rows, count)
            if word == "gemma3" and stem.endswith("norm"):
                rows = rows + 1
            chosen = types(ours) if rows.ndim > 1 else Type.F32
            stored = rows.astype(np.float16) if chosen is Type.F16 else gguf.quants.quantize(rows, chosen)
            writer.add_tensor(ours, stored, raw_dtype=chosen)
            row_by_row = gguf.quants.quantize(matrix, chosen)
            back.append(gguf.quants.dequantize(row_by_row, chosen) if rows.ndim > 1 else matrix)
        state[name] = torch.from_numpy(np.concatenate(back, 1) if len(back) > 1 else back[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin = transformers.AutoModelForCausalLM.from_config(config).float()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    twin.load_state_dict(state)
    return twin.eval()


def _add_tokenizer(writer: gguf.GGUFWriter, count: int) -> None:
    """A tokenizer of bytes with one merge."""
    letters = [chr(code) if chr(code).isprintable() and code != 32 else chr(code + 256) for code in range(33, 127)]
    tokens = ["<unk>", "<s>", "</s>", "Ġ", *letters, "ab"]
    tokens += [f"[{index}]" for index in range(len(tokens), count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if index < 3 else gguf.TokenType.NORMAL for index in range(count)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
