"""LoRA on a CPU: a batch with two adapters and the base model equals transformers with merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from safetensors.torch import save_file
from test_models import CONVERSATIONS, GREEDY, OPTIONS, PROMPTS, answers

pytestmark = pytest.mark.full

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16


def adapter(model: torch.nn.Module, folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a random adapter in PEFT's format; return its addition to each weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in model.named_parameters():
        if not name.endswith(tuple(f"{target}.weight" for target in TARGETS)):
            continue
        a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
        b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
        of = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{of}.lora_A.weight": a, f"{of}.lora_B.weight": b}
        added[name] = ALPHA / RANK * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return added


def test_two_adapters_and_the_base_in_one_batch(tmp_path: Path) -> None:
    folder = zoo.build("llama", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    added = {name: adapter(model, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))}
    asked = [
        {"input_ids": ids, "sampling_params": GREEDY, "lora_path": path}
        for ids, path in zip(PROMPTS, ("one", None, "two"), strict=True)
    ]
    options = {**OPTIONS, "model_path": folder, "enable_fluxion": True, "max_loras_per_batch": 3}
    paths = {name: str(tmp_path / name) for name in added}
    _, found = answers({**options, "enable_lora": True, "lora_paths": paths}, [asked, asked[::-1], CONVERSATIONS[0]])
    wanted = []
    for ids, path in zip(PROMPTS, ("one", None, "two"), strict=True):
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, delta in added.get(path or "", {}).items():
                weights[name] += delta
            tokens = torch.tensor([ids])
            out = model.generate(tokens, max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0)
            for name, delta in added.get(path or "", {}).items():
                weights[name] -= delta
        wanted.append(out[0, len(ids) :].tolist())
    assert [one["ids"] for one in found[:3]] == wanted
    assert [one["ids"] for one in found[3:6]] == wanted[::-1], "with prefixes of other adapters cached"
    assert found[7]["ids"] == wanted[1], "the base"
    assert wanted[0] != found[6]["ids"] and wanted[2] != found[8]["ids"], (
        "an adapter that changes nothing shows nothing"
    )
