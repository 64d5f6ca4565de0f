"""Small random models of the served families; they test attention, not knowledge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS_OF_32 = {"head_dim": 32, "hidden_size": 256}
EXPERTS = {**HEADS_OF_32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GLM_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip

STATES: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
"""Three layers of the gated delta rule for each layer of full attention."""


def _of(name: str, **options: Any) -> Callable[[], transformers.PretrainedConfig]:
    """The configuration class of `name`, with COMMON and then `options`."""
    return lambda: getattr(transformers, name)(**{**COMMON, **HEADS_OF_32, **options})


FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _of("LlamaConfig"),
    "llama-3-positions": _of("LlamaConfig", rope_scaling=LLAMA3_ROPE, rope_parameters=LLAMA3_ROPE),
    "llama-a-head-a-head": _of("LlamaConfig", num_key_value_heads=8),
    "llama-16-heads-to-one": _of("LlamaConfig", num_attention_heads=16, num_key_value_heads=1, hidden_size=512),
    "mistral": _of("MistralConfig", sliding_window=None),
    "qwen2": _of("Qwen2Config"),
    "qwen3": _of("Qwen3Config"),
    "gemma": _of("GemmaConfig", head_dim=256),
    "phi3": _of("Phi3Config"),
    "glm4": _of("Glm4Config"),
    "granite": _of("GraniteConfig"),
    "olmo2": _of("Olmo2Config"),
    "cohere": _of("CohereConfig"),
    "starcoder2": _of("Starcoder2Config", sliding_window=None),
    "stablelm": _of("StableLmConfig"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=256, n_layer=2, n_head=8, n_positions=8192, bos_token_id=1, eos_token_id=2
    ),
    "opt": _of("OPTConfig", ffn_dim=256, word_embed_proj_dim=256, num_key_value_heads=8),
    "mixtral": _of("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3-moe": _of("Qwen3MoeConfig", **EXPERTS),
    "olmoe": _of("OlmoeConfig", **EXPERTS, num_key_value_heads=8),
}

# Layers with a window alternate with full ones. Windows are shorter and longer than Fluxion's residents, and no
# multiples of a page.
BY_TURNS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES |= {
    "gemma3": _of(
        "Gemma3TextConfig", **BY_TURNS, sliding_window=100, query_pre_attn_scalar=32, tie_word_embeddings=True
    ),
    "cohere2": _of("Cohere2Config", **BY_TURNS, sliding_window=700),
    "olmo3": _of("Olmo3Config", **BY_TURNS, sliding_window=333),
    # SGLang's models of these two ignore the window, with and without the flag.
    "mistral-window": _of("MistralConfig", sliding_window=200),
    "qwen2-window": _of("Qwen2Config", use_sliding_window=True, sliding_window=200, max_window_layers=1),
}

# --- Vision-language checkpoints ---

VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 256,
}  # fmt: skip
"""A vision tower, with the field names of all families."""


def _with_vision(name: str, text: dict[str, Any], vision: dict[str, Any] | None = None, **options: Any) -> Any:
    """A vision-language configuration; `text` comes after COMMON."""

    def config() -> transformers.PretrainedConfig:
        text_config = {**COMMON, **HEADS_OF_32, **text}
        tied = text_config["tie_word_embeddings"]
        return getattr(transformers, name)(
            text_config=text_config,
            vision_config={**VISION, **(vision or {})},
            **{
                "tie_word_embeddings": tied,
                **{key: COMMON[key] for key in ("bos_token_id", "eos_token_id")},
                **options,
            },
        )

    return config


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary embedding with positions in three sections."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


VISION_LANGUAGE: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3-vl": _with_vision(
        "Qwen3VLConfig", _sections(8, 4, 4, mrope_interleaved=True), {"deepstack_visual_indexes": [0]}
    ),
    "qwen3-vl-moe": _with_vision(
        "Qwen3VLMoeConfig",
        {**EXPERTS, **_sections(8, 4, 4, mrope_interleaved=True)},
        {"deepstack_visual_indexes": [0]},
    ),
    "qwen2.5-vl": _with_vision("Qwen2_5_VLConfig", _sections(8, 4, 4), {"hidden_act": "silu"}),
    "gemma3-vl": _with_vision(
        "Gemma3Config",
        {**BY_TURNS, "sliding_window": 100, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        mm_tokens_per_image=1,
    ),
    "mistral3": _with_vision("Mistral3Config", {"model_type": "mistral", "sliding_window": None}),
    "glm4v": _with_vision("Glm4vConfig", _sections(2, 3, 3, partial_rotary_factor=0.5)),
    "glm4v-moe": _with_vision(
        "Glm4vMoeConfig",
        {**GLM_EXPERTS, **_sections(2, 3, 3, partial_rotary_factor=0.5)},
    ),
    "qwen3.5": _with_vision("Qwen3_5Config", {**STATES, **_sections(2, 1, 1, mrope_interleaved=True)}),
    "qwen3.5-moe": _with_vision(
        "Qwen3_5MoeConfig",
        {
            **STATES, **EXPERTS, **_sections(2, 1, 1, mrope_interleaved=True), "shared_expert_intermediate_size": 96,
        },
    ),
    "internvl": _with_vision("InternVLConfig", {"model_type": "qwen2"}),
    "smolvlm": _with_vision("SmolVLMConfig", {"model_type": "llama"}),
    "cohere2-vision": _with_vision(
        "Cohere2VisionConfig",
        # SGLang's Cohere 2 has windows one token longer than transformers', so prompts are shorter than the window.
        {"model_type": "cohere2", **BY_TURNS, "sliding_window": 8192, "tie_word_embeddings": True},
    ),
    "ministral3": _with_vision(
        "Mistral3Config",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
                "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
}  # fmt: skip
"""Vision-language models whose language model alone is served. Plain SGLang serves few of them on a CPU."""

BY_TRANSFORMERS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    # SGLang's CPU attention ignores the cap of its logits.
    "gemma2": _of(
        "Gemma2Config",
        hidden_act="gelu_pytorch_tanh",  # SGLang reads this field; transformers only has hidden_activation
        **BY_TURNS,
        sliding_window=100,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        tie_word_embeddings=True,
    ),
    "glm4-moe": _of("Glm4MoeConfig", **GLM_EXPERTS),
    "granite-sinks": _of(
        "GraniteSWAConfig", **BY_TURNS, sliding_window=150, rope_theta=10000.0, layer_rope_theta=[10000.0, 10000.0]
    ),
    # SGLang has parts of these only as GPU kernels.
    "minimax-m2": _of(
        "MiniMaxM2Config",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        scoring_func="sigmoid",
        use_qk_norm=True,
        qk_norm_type="per_layer",
        rotary_dim=16,
        use_routing_bias=True,
    ),
    "qwen2-moe": _of("Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=96, norm_topk_prob=True),
    "gpt-oss": _of(
        "GptOssConfig",
        **BY_TURNS,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        sliding_window=100,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
"""Families whose attention plain SGLang lacks on a CPU; transformers is the reference."""

WIDE = {"llama-wide": _of("LlamaConfig", hidden_size=4160, intermediate_size=512)}
"""Enough inputs that weights are packed."""

EMBEDDINGS = {"olmo2": 1.0, "gemma2": 0.001, "gemma3": 0.001, "gemma3-vl": 0.001}
"""Standard deviation of the embedding, for families with a norm after attention. With tied embeddings, large ones make
a model repeat its last token. Otherwise small ones are negligible beside the output of attention."""


def auto_class(family: str) -> Any:
    """The auto class of transformers for the family."""
    name = "AutoModelForImageTextToText" if family in VISION_LANGUAGE else "AutoModelForCausalLM"
    return getattr(transformers, name)


def build(family: str, folder: Path) -> str:
    """Write a model of the family to `folder`, float32, weights from seed 0, and return its path."""
    torch.manual_seed(0)
    config = (FAMILIES | BY_TRANSFORMERS | VISION_LANGUAGE | WIDE)[family]()
    model = auto_class(family).from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Default initialisation makes attention uniform; biases of 0 and norms of 1 would hide a lost one.
            if weight.dim() > 1:
                weight.normal_(0, EMBEDDINGS.get(family, 0.12) if "embed" in name else 0.12)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
            if name.endswith("sinks"):
                weight.copy_((weight * 20).bfloat16())  # as SGLang keeps them; large enough to matter
            assert torch.isfinite(weight).all(), name
    model.save_pretrained(folder)
    if family.startswith("qwen3.5"):  # published files have it; transformers does not write it
        file = folder / "config.json"
        written = json.loads(file.read_text())
        written["text_config"]["full_attention_interval"] = 4
        file.write_text(json.dumps(written))
    save_tokenizer(folder)
    return str(folder)


def save_tokenizer(folder: Path) -> None:
    """A byte tokenizer, for features that need text, such as grammars."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
