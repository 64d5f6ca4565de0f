"""--quantization fluxion-int8: a server answers like one whose checkpoint has the rounded weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import cases
import forked
import httpx
import pytest
import tiny_model
from safetensors.torch import load_file, save_file
from server import Server

from fluxion_sglang.sglang.compat import INT8_WEIGHTS
from fluxion_sglang.sglang.weights.rounding import rounded

FLAGS = ("--chunked-prefill-size", "256", "--skip-tokenizer-init")
QUESTIONS = [(cases.prompt(length, seed), 24) for length, seed in ((7, 1), (60, 2), (300, 3), (700, 4), (700, 5))]


@pytest.fixture(scope="module")
def model(logs: Path) -> str:
    return tiny_model.build(logs / "tiny-model-int8")


@pytest.fixture(scope="module")
def twin(model: str, logs: Path) -> str:
    """The checkpoint with weights after rounding to 8 bits, and an untied head."""
    folder = logs / "tiny-model-rounded"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for name, weight in weights.items():
        if "_proj" in name or name == "lm_head.weight":
            weights[name] = rounded(weight).wide()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


class TestAServer:
    @pytest.fixture(scope="class")
    def server(self, model: str, logs: Path) -> Iterator[Server]:
        config = json.dumps({"policy": "full", "host_tokens": 32768})
        flags = (*FLAGS, "--quantization", INT8_WEIGHTS)
        with Server(*flags, model=model, fluxion=config, log=logs / "int8-weights.log") as server:
            yield server
            server.assert_clean()

    def test_its_tokens_are_those_of_rounded_weights(self, server: Server, twin: str, logs: Path) -> None:
        """In float32: in sequence, together, and with prefixes from the cache."""
        with Server(*FLAGS, model=twin, fluxion="", log=logs / "int8-weights-twin.log") as other:
            want = [other.generate(ids, count).tokens for ids, count in QUESTIONS]
        assert [server.generate(ids, count).tokens for ids, count in QUESTIONS] == want
        server.flush()
        assert [done.tokens for done in server.generate_many(QUESTIONS)] == want
        again = server.generate_many(QUESTIONS)
        assert [done.tokens for done in again] == want and max(done.cached for done in again) > 600

    def test_decode_steps_are_replayed(self, server: Server) -> None:
        server.generate(cases.prompt(40, 8), 12)
        assert "run without" not in server.log() and "14 linear layers run on the native workers" not in server.log()

    def test_other_weights_are_rounded_as_well(self, server: Server, model: str, twin: str) -> None:
        before = server.generate(*QUESTIONS[2]).tokens
        for path in (twin, model):
            told = httpx.post(server.url + "/update_weights_from_disk", json={"model_path": path}, timeout=120)
            assert told.json()["success"], told.text
            after = server.generate(*QUESTIONS[2]).tokens
        assert after == before, "the first weights again"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--quantization", INT8_WEIGHTS], f"--quantization {INT8_WEIGHTS} has no effect without --enable-fluxion"),
        (["--quantization", "awq", "--enable-fluxion"], f"with --quantization {INT8_WEIGHTS} for weights of 8 bits."),
    ],
)
def test_refusals_are_one_sentence(model: str, flags: list[str], says: str) -> None:
    done = forked.run("-m", "sglang.launch_server", "--model-path", model, "--device", "cpu", *flags)
    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr
