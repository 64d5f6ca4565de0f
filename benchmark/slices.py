"""Time of a decode step and a prompt of large models, measured on a few of their layers.

    python benchmark/slices.py             # about ten minutes on two cores
    python benchmark/slices.py --quick     # one small shape

Two models with 1 and 3 layers have random weights in the shapes of a published model. Half the difference of their
times is the time of a layer; the rest of the first one's time lies outside the layers (logits, SGLang). `whole_ms` is
the step of the whole model by this arithmetic, for one request with 512 tokens of context. Results go to slices.json in
benchmark/results/<machine>; docs/models.md shows them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import common

PROMPT, TOKENS = 512, 24
LAYERS = (1, 3)
INT8 = ("--quantization", "fluxion-int8")
_LATENCY = r"{}\.?\s*(?:median )?latency:\s*([\d.]+) s"


class Shape(NamedTuple):
    """A published model.

    Attributes:
        model: its name. layers: of the whole model. config: of its language model.
        words: for the command line. weights: their format with these words.
    """

    model: str
    layers: int
    config: dict[str, Any]
    words: tuple[str, ...] = ()
    weights: str = "bfloat16"


def _config(
    kind: str, cls: str, hidden: int, inner: int, heads: int, kv: int, head: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "architectures": [cls], "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "vocab_size": words,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more,
    }  # fmt: skip


QWEN3_VL = _config("qwen3", "Qwen3ForCausalLM", 4096, 12288, 32, 8, 128, 151936)
QWEN3_MOE = _config(
    "qwen3_moe", "Qwen3MoeForCausalLM", 2048, 6144, 32, 4, 128, 151936,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, norm_topk_prob=True,
    mlp_only_layers=[],
)  # fmt: skip
GPT_OSS = _config(
    "gpt_oss", "GptOssForCausalLM", 2880, 2880, 64, 8, 64, 201088,
    num_local_experts=32, num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0, attention_bias=True,
)  # fmt: skip
SHAPES = (
    Shape("Qwen3-VL-8B", 36, QWEN3_VL),
    Shape("Qwen3-30B-A3B", 48, QWEN3_MOE),
    Shape("gpt-oss-20b", 24, GPT_OSS, INT8, "8 bits, as its MXFP4"),
)
QUICK = Shape("small", 4, _config("qwen3", "Qwen3ForCausalLM", 256, 512, 4, 2, 64, 16384))


def measure(shape: Shape, layers: int) -> tuple[float, float]:
    """Milliseconds of a decode step and of the prompt, for a model with `layers` layers."""
    config = shape.config | {"num_hidden_layers": layers}
    if shape.config is GPT_OSS:
        turns = ("sliding_attention", "full_attention")
        config["layer_types"] = [turns[i % 2] for i in range(layers)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "fluxion_sglang.bench_one_batch", "--model-path", folder, "--device", "cpu"]
        command += ["--load-format", "dummy", "--enable-fluxion", "--batch-size", "1", "--input-len", str(PROMPT)]
        command += ["--output-len", str(TOKENS), "--skip-tokenizer-init", "--max-total-tokens", "4096", *shape.words]
        command += ["--tokenizer-path", str(common.NEEDLE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [re.findall(_LATENCY.format(what), done.stdout + done.stderr) for what in ("Decode", "Prefill")]
    if not all(found):
        raise SystemExit(f"{shape.model} with {layers} layers did not run:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return 1e3 * float(found[0][-1]), 1e3 * float(found[1][-1])


def row(shape: Shape) -> dict[str, Any]:
    (one, prompt_one), (three, prompt_three) = (measure(shape, layers) for layers in LAYERS)
    layer, prompt_layer = ((b - a) / (LAYERS[1] - LAYERS[0]) for a, b in ((one, three), (prompt_one, prompt_three)))
    whole = one + layer * (shape.layers - 1)
    prompt = prompt_one + prompt_layer * (shape.layers - 1)
    found = {
        "model": shape.model, "layers": shape.layers, "weights": shape.weights, "one_ms": one, "three_ms": three,
        "layer_ms": layer, "whole_ms": whole, "prompt_tokens_per_s": 1e3 * PROMPT / prompt,
    }  # fmt: skip
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}, flush=True)
    return found


def main() -> None:
    args = common.arguments(__doc__, "one small shape").parse_args()
    rows = [row(shape) for shape in ((QUICK,) if args.quick else SHAPES)]
    common.publish(args, "slices", rows, prompt=PROMPT)


if __name__ == "__main__":
    main()
