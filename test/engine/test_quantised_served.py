"""Quantised checkpoints: a server answers like one whose checkpoint holds the dequantised weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cases
import forked
import httpx
import packings
import pytest
import tiny_model
import torch
from safetensors.torch import load_file, save_file
from server import Server

FLAGS = ("--chunked-prefill-size", "256", "--skip-tokenizer-init")
QUESTIONS = [(cases.prompt(length, seed), 24) for length, seed in ((7, 1), (60, 2), (300, 3), (700, 4), (700, 5))]
FULL = json.dumps({"policy": "full", "host_tokens": 32768})

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (packings.gptq_config(4, 64, lm_head=True), packings.gptq),
    "auto-round": (packings.auto_round_config(4, 64), packings.gptq),
    "awq": (packings.awq_config(64), packings.awq),
    "w4a16": (packings.compressed_config(4, 64), packings.pack_quantised),
    "w8a8": (packings.compressed_config(8, -1, form="int-quantized"), packings.int_quantised),
}


@pytest.fixture(scope="module")
def model(logs: Path) -> str:
    """The model with an untied head."""
    folder = Path(tiny_model.build(logs / "tiny-model-quantised", kv_heads=2))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config = json.loads((folder / "config.json").read_text())
    return write(folder, weights, config | {"tie_word_embeddings": False})


def write(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def grids(model: str, kind: str) -> dict[str, packings.Grid]:
    """The weights of the model that this format quantises."""
    bits, group = (8, -1) if kind == "w8a8" else (4, 64)
    return {
        name: packings.rounded(weight, bits, group, symmetric=True)
        for name, weight in load_file(Path(model) / "model.safetensors").items()
        if "_proj" in name or (name == "lm_head.weight" and KINDS[kind][0].get("lm_head"))
    }


def checkpoint(model: str, kind: str, folder: Path, plain: bool = False) -> str:
    """The model in a format, or with the dequantised weights."""
    shutil.copytree(model, folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    quantisation, pack = KINDS[kind]
    for name, grid in grids(model, kind).items():
        del weights[name]
        parts = {"weight": grid.wide()} if plain else pack(grid)
        weights |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    return write(folder, weights, config if plain else config | {"quantization_config": quantisation})


@pytest.fixture(scope="module")
def answers(model: str, logs: Path) -> Callable[[str], list[list[int]]]:
    @cache
    def of(kind: str) -> list[list[int]]:
        path = checkpoint(model, kind, logs / f"{kind}-plain", plain=True)
        with Server(*FLAGS, model=path, fluxion=FULL, log=logs / f"{kind}-plain.log") as server:
            return [server.generate(ids, count).tokens for ids, count in QUESTIONS]

    # Three formats represent the same weights.
    return lambda kind: of("awq" if kind in ("auto-round", "w4a16") else kind)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_weights(
    kind: str, model: str, answers: Callable[[str], list[list[int]]], logs: Path
) -> None:
    """In float32: in sequence, together, and after an update with the same weights."""
    path, want = checkpoint(model, kind, logs / kind), answers(kind)
    with Server(*FLAGS, model=path, fluxion=FULL, log=logs / f"{kind}.log") as server:
        assert [server.generate(ids, count).tokens for ids, count in QUESTIONS] == want
        told = httpx.post(server.url + "/update_weights_from_disk", json={"model_path": path}, timeout=300)
        assert told.json()["success"], told.text
        assert [done.tokens for done in server.generate_many(QUESTIONS)] == want
        server.assert_clean()


def test_ranks_have_parts_of_it(model: str, answers: Callable[[str], list[list[int]]], logs: Path) -> None:
    path, want = checkpoint(model, "awq", logs / "awq-ranks"), answers("awq")
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(*FLAGS, "--tp-size", "2", model=path, fluxion=FULL, env=env, log=logs / "awq-ranks.log") as server:
        assert [server.generate(ids, count).tokens for ids, count in QUESTIONS] == want


def test_a_refusal_is_one_sentence(logs: Path) -> None:
    model = tiny_model.build(logs / "tiny-model-ranks", kv_heads=4)
    path = checkpoint(model, "w4a16", logs / "w4a16-ranks")
    command = ["-m", "sglang.launch_server", "--model-path", path, "--device", "cpu"]
    command += ["--enable-fluxion", "--tp-size", "4", "--skip-tokenizer-init"]
    done = forked.run(*command, SGLANG_CPU_OMP_THREADS_BIND="0|1|0|1")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert (
        "128 inputs has 32 on each of 4 ranks, not whole groups of 64; use a smaller --tp-size than 4." in done.stderr
    )
