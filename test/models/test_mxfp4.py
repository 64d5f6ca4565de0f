"""gpt-oss as published, with experts in MXFP4: log-probabilities equal those of transformers' dequantised model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from test_models import CONVERSATIONS, OPTIONS, Answers, answers

pytestmark = pytest.mark.full

QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def checkpoint(folder: Path) -> str:
    """gpt-oss with random experts in MXFP4."""
    path = Path(zoo.build("gpt-oss", folder))
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, weight in load_file(path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            weights[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32, 16)
        weights[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(122, 125, shape[:-1], generator=generator, dtype=torch.uint8)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISATION}))
    return str(path)


def expected(folder: str, found: Answers) -> list[list[float]]:
    """Log-probabilities of the answers' tokens, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    model, result = model.float().eval(), []
    for asked, one in zip([request for requests in CONVERSATIONS for request in requests], found, strict=True):
        ids, new = torch.tensor([asked["input_ids"] + one["ids"]]), torch.tensor(one["ids"])
        with torch.no_grad():
            logits = model(ids, logits_to_keep=len(new) + 1).logits[0, :-1]
        result.append(logits.log_softmax(-1).gather(1, new[:, None]).flatten().tolist())
    return result


def test_mxfp4(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    backend, found = answers({**OPTIONS, "model_path": folder, "enable_fluxion": True}, CONVERSATIONS)
    assert backend == "fluxion"
    for one, want in zip(found, expected(folder, found), strict=True):
        # 8-bit kernels round their inputs to 16 bits.
        assert (torch.tensor(one["logprobs"]) - torch.tensor(want)).abs().max() < 5e-3
        assert len(set(one["ids"])) > 4, "an answer that repeats itself shows little"
