"""A server with a GGUF file answers as transformers does with the weights of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import forked
import gguf_files
import httpx
import pytest
import tiny_model
import torch
import transformers
from server import Server

FLAGS = ("--chunked-prefill-size", "256", "--skip-tokenizer-init")
QUESTIONS = [(cases.prompt(length, seed), 24) for length, seed in ((7, 1), (60, 2), (300, 3), (700, 4))]


@pytest.fixture(scope="module")
def file(logs: Path) -> Path:
    return logs / "tiny.gguf"


@pytest.fixture(scope="module")
def want(file: Path, logs: Path) -> list[list[int]]:
    """Greedy tokens of transformers; writes the file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model.build(logs / "tiny-model-gguf"))
    return greedy(gguf_files.write(model, file))


def greedy(model: Any) -> list[list[int]]:
    answers = []
    for ids, count in QUESTIONS:
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)
        answers.append(out[0, len(ids) :].tolist())
    return answers


class TestAServer:
    @pytest.fixture(scope="class")
    def server(self, want: list[list[int]], file: Path, logs: Path) -> Iterator[Server]:
        config = '{"policy": "full", "host_tokens": 32768}'
        env = {"XDG_CACHE_HOME": str(logs / "cache")}
        with Server(*FLAGS, model=str(file), fluxion=config, env=env, log=logs / "gguf.log") as server:
            yield server
            server.assert_clean()

    def test_its_tokens_are_those_of_the_files_weights(self, server: Server, want: list[list[int]]) -> None:
        """In float32, in sequence and together."""
        assert [server.generate(ids, count).tokens for ids, count in QUESTIONS] == want
        server.flush()
        assert [done.tokens for done in server.generate_many(QUESTIONS)] == want

    def test_an_update_of_weights_is_refused(self, server: Server, logs: Path, want: list[list[int]]) -> None:
        for format_ in ("auto", "gguf"):
            asked = {"model_path": str(logs / "tiny-model-gguf"), "load_format": format_}
            told = httpx.post(server.url + "/update_weights_from_disk", json=asked, timeout=120)
            assert "of a GGUF file, which cannot be updated while the server runs" in told.json()["message"]
        ids, count = QUESTIONS[0]
        assert server.generate(ids, count).tokens == want[0]


def test_experts_are_those_of_the_file_and_steps_are_replayed(logs: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=32000, max_position_embeddings=32768, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in filter(lambda weight: weight.dim() > 1, model.parameters()):
            weight.normal_(0, 0.12)
    want = greedy(gguf_files.write(model, logs / "experts.gguf"))
    log, env = logs / "gguf-experts.log", {"XDG_CACHE_HOME": str(logs / "cache")}
    with Server(*FLAGS, model=str(logs / "experts.gguf"), fluxion='{"policy": "full"}', env=env, log=log) as server:
        assert [server.generate(ids, count).tokens for ids, count in QUESTIONS] == want
        server.flush()
        assert [done.tokens for done in server.generate_many(QUESTIONS)] == want
        server.assert_clean()
    assert "run without" not in log.read_text()


def test_a_refusal_is_one_sentence(file: Path, want: list[list[int]]) -> None:
    command = ["-m", "sglang.launch_server", "--model-path", str(file), "--device", "cpu"]
    done = forked.run(*command, "--enable-fluxion", "--tp-size", "2")
    assert done.returncode != 0 and "its blocks cannot be divided among ranks" in done.stderr
    assert "Traceback" not in done.stderr
