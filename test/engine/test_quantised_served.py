"""Quantised checkpoints: a server answers as one whose checkpoint has the weights that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cases
import httpx
import packings
import pytest
import tiny_model
from safetensors.torch import load_file, save_file
from server import Server

FLAGS = ("--chunked-prefill-size", "256", "--skip-tokenizer-init")
QUESTIONS = [(cases.prompt(length, seed), 24) for length, seed in ((7, 1), (60, 2), (300, 3), (700, 4), (700, 5))]
FULL = json.dumps({"policy": "full", "host_tokens": 32768})

# Of one model each, so that all have one twin: 4 bits without zeros.
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (packings.gptq_config(4, 64, lm_head=True), packings.gptq),
    "auto-round": (packings.auto_round_config(4, 64), packings.gptq),
    "awq": (packings.awq_config(64), packings.awq),
    "w4a16": (packings.compressed_config(4, 64), packings.pack_quantised),
    "w8a8": (packings.compressed_config(8, -1, form="int-quantized"), packings.int_quantised),
}


@pytest.fixture(scope="module")
def model(logs: Path) -> str:
    return tiny_model.build(logs / "tiny-model-quantised", kv_heads=2)


def write(model: str, folder: Path, kind: str) -> tuple[str, str]:
    """The checkpoint in a format, and its twin of plain weights; both have heads of their own."""
    config, pack = KINDS[kind]
    bits, group = (8, -1) if kind == "w8a8" else (4, 64)
    weights = load_file(Path(model) / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    packed, plain = {}, {}
    for name, weight in weights.items():
        if "_proj" in name or (name == "lm_head.weight" and config.get("lm_head")):
            grid = packings.rounded(weight, bits, group, symmetric=True)
            plain[name] = grid.wide()
            packed |= {name.replace("weight", part): tensor for part, tensor in pack(grid).items()}
        else:
            plain[name] = packed[name] = weight
    paths = []
    for where, tensors, more in ((kind, packed, {"quantization_config": config}), (f"{kind}-twin", plain, {})):
        shutil.copytree(model, folder / where)
        found = json.loads((folder / where / "config.json").read_text())
        (folder / where / "config.json").write_text(json.dumps(found | {"tie_word_embeddings": False} | more))
        save_file(tensors, folder / where / "model.safetensors", metadata={"format": "pt"})
        paths.append(str(folder / where))
    return paths[0], paths[1]


@pytest.mark.parametrize("kind", KINDS)
class TestAServer:
    @pytest.fixture(scope="class")
    def paths(self, model: str, logs: Path) -> dict[str, tuple[str, str]]:
        return {kind: write(model, logs, kind) for kind in KINDS}

    def test_its_tokens_are_those_of_plain_weights(
        self, kind: str, paths: dict[str, tuple[str, str]], logs: Path
    ) -> None:
        """In float32: one after the other, together, and after an update with the same weights."""
        path, twin = paths[kind]
        with Server(*FLAGS, model=twin, fluxion=FULL, log=logs / f"{kind}-twin.log") as other:
            want = [other.generate(ids, count).tokens for ids, count in QUESTIONS]
        with Server(*FLAGS, model=path, fluxion=FULL, log=logs / f"{kind}.log") as server:
            assert [server.generate(ids, count).tokens for ids, count in QUESTIONS] == want
            told = httpx.post(server.url + "/update_weights_from_disk", json={"model_path": path}, timeout=300)
            assert told.json()["success"], told.text
            assert [done.tokens for done in server.generate_many(QUESTIONS)] == want
            server.assert_clean()
