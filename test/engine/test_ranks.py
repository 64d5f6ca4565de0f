"""A model divided among processes answers as in one: tensor, pipeline and data parallelism, two nodes on loopback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cases
import pytest
import requests
from places import NEEDLE
from policy_example import search_path
from safetensors.torch import load_file, save_file
from server import LEAK_WORDS, PLUGINS, Completion, Server, free_port
from test_exact import ALL, Reference, assert_same, check_group

pytestmark = pytest.mark.full

WAYS = {
    "tp2": ("--tp", "2"), "pp2": ("--pp-size", "2"), "dp2": ("--dp-size", "2"),
    "tp2-pp2": ("--tp", "2", "--pp-size", "2"), "tp2-dp2": ("--tp", "2", "--dp-size", "2"),
    "two-nodes": ("--tp", "2", "--nnodes", "2"),
}  # fmt: skip
"""Server flags for the ranks, by name."""

LEARNED = cases.prompt(3000, 31), 24
"""The prompt for the predictor, and the number of tokens of its answer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with an untied head: SGLang cannot divide a model with tied embeddings into pipeline stages."""
    folder = tmp_path_factory.mktemp("untied") / "needle"
    shutil.copytree(NEEDLE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, weights)
    return str(folder)


@contextmanager
def serving(way: str, model: str, logs: Path, fluxion: str, **env: str) -> Iterator[Server]:
    """The server that answers; a second node, if any, runs beside it."""
    flags, address = WAYS[way], f"127.0.0.1:{free_port()}"
    nodes: list[Server] = []
    with ExitStack() as stack:
        for node in range(2 if "--nnodes" in flags else 1):
            words = (*flags, "--node-rank", str(node), "--dist-init-addr", address) if "--nnodes" in flags else flags
            folder = logs / f"{way}-{node}"  # each node has its own temporary files, like separate machines
            folder.mkdir()
            server = Server(
                "--chunked-prefill-size", "1024", "--mem-fraction-static", "0.7", *words,
                model=model, fluxion=fluxion, log=folder / "log",
                env={"TMPDIR": str(folder), "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1", **env},
            )  # fmt: skip
            stack.callback(server.stop)
            nodes.append(server)
        yield nodes[0].wait()
        nodes[0].assert_idle()
        assert all(node.process.poll() is None for node in nodes)
        if not env:
            assert not any(LEAK_WORDS.search(node.log()) for node in nodes)


@pytest.fixture(scope="module")
def learned(model: str, logs: Path) -> Completion:
    """Answer of a single process under the bundled predictor."""
    with Server("--chunked-prefill-size", "1024", model=model, log=logs / "one-process.log") as server:
        return server.generate(*LEARNED, "fluxion")


@pytest.mark.parametrize("way", WAYS, scope="class")
class TestRanks:
    """The default policy of the bundled model; every process has the predictor of its own layers and heads."""

    @pytest.fixture(scope="class")
    def server(self, way: str, reference: Reference, model: str, logs: Path) -> Iterator[Server]:
        with serving(way, model, logs, '{"host_tokens": 30000, "workers": 1, "prefill_pass_ms": 50}') as server:
            yield server

    @pytest.mark.parametrize("length", [50, 300, 2000, 5000])
    def test_lengths(self, server: Server, reference: Reference, length: int) -> None:
        assert_same(server.generate(*ALL[f"length-{length}"], "full"), reference[f"length-{length}"])

    def test_requests_together(self, server: Server, reference: Reference) -> None:
        names = [name for name in ALL if name.startswith("family-")]
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(lambda name: server.generate(*ALL[name], "full"), names))
        for name, got in zip(names, found, strict=True):
            assert_same(got, reference[name])

    def test_a_long_prompt_beside_others(self, server: Server, way: str, reference: Reference) -> None:
        """A clock determines the size of its passes, and the clocks of ranks differ."""
        server.flush()
        names = ["length-5000", "length-50", "length-300", "length-2000"]
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(lambda name: server.generate(*ALL[name], "full"), names))
        for name, got in zip(names, found, strict=True):
            assert_same(got, reference[name])

    def test_the_predictor_decides(self, server: Server, way: str, learned: Completion) -> None:
        assert "Fluxion: policy fluxion, tau" in server.log()
        before = server.metrics()
        got = server.generate(*LEARNED, "fluxion")
        after = server.metrics()
        names = ("fluxion_read_tokens_total", "fluxion_middle_tokens_total")
        read, middle = (after[name] - before[name] for name in names)
        assert 0 < read / middle < 0.4
        if "--tp" not in WAYS[way]:  # a rank with some of the heads knows the greatest output of these alone
            assert_same(got, learned)
            assert got.logprobs != server.generate(*LEARNED, "full").logprobs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_that_fails_on_one_rank_ends_on_both(rank: int, reference: Reference, logs: Path) -> None:
    """The 26th decode step fails on one rank: its request gets an error, its tokens are dropped, the server
    continues."""
    config = {"policy": f"faulty:26:{rank}", "host_tokens": 20000, "workers": 1}
    (logs / f"rank{rank}").mkdir()
    with serving("tp2", NEEDLE, logs / f"rank{rank}", json.dumps(config), PYTHONPATH=search_path(PLUGINS)) as server:
        ids, new = ALL["length-2000"]
        failed = server.generate(ids, new)
        assert f"injected fault (rank {rank})" in str(failed.finish), failed.finish
        conversation = ids + reference["length-2000"].tokens
        assert server.generate(conversation, 1).cached <= len(ids), "something of the failed pass is in the tree"
        for _ in range(2):
            assert_same(server.generate(ids, new), reference["length-2000"])
        check_group(server, reference, "family")
        log = server.log()
        assert len(re.findall("Fluxion: the pass failed, and", log)) == 1 == log.count("pass failed on another rank")


def test_a_request_that_ends_the_loop_of_both_ranks_ends_alone(reference: Reference, logs: Path) -> None:
    """Its decode steps raise in SGLang's scheduler, where the traceback names no request; it runs beside others."""
    config = json.dumps({"host_tokens": 20000, "workers": 1})
    env = {"PYTHONPATH": search_path(PLUGINS), "FAULT_RANKS": "0,1"}
    (logs / "both").mkdir()
    with serving("tp2", NEEDLE, logs / "both", config, **env) as server, ThreadPoolExecutor(4) as pool:
        ids, new = ALL["length-2000"]
        beside = [pool.submit(server.generate, ids, new) for _ in range(2)]
        guilty = pool.submit(server.generate, ids[:50], new, rid="guilty")
        assert "injected fault" in str(guilty.result().finish)
        for answer in beside:
            assert_same(answer.result(), reference["length-2000"])
        assert "is ended, and the others are computed again" in server.log()


def test_a_rank_that_fails_alone_ends_the_server(logs: Path) -> None:
    """The other rank waits in a collective that never completes."""
    config = json.dumps({"host_tokens": 20000, "workers": 1})
    env = {"PYTHONPATH": search_path(PLUGINS), "FAULT_RANKS": "1"}
    (logs / "alone").mkdir()
    with pytest.raises((requests.RequestException, AssertionError)):  # noqa: SIM117
        with serving("tp2", NEEDLE, logs / "alone", config, **env) as server:
            server.generate([1, 2, 3], 5, rid="guilty")
    assert server.process.wait(timeout=120) != 0
    assert "another rank did not fail" in server.log()
