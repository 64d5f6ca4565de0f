"""Every policy on a device as on the CPU: two servers of the bundled model with the flag, one of them on the simulated
device, get the same requests.

Greedy tokens in float32 are equal. Plans use the device's features of the residents and differ at most by its rounding.
The audits of both servers hold, for every decode step, the tokens read and each head's error. The host pools hold three
of the prompts, and a request is retracted in every third step with more than one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cases
import numpy as np
import pytest
from server import Completion, Server

from fluxion_sglang.commands.needle import needle_prompt, score
from fluxion_sglang.policy import examples
from fluxion_sglang.scoring import audit_file as audit

pytestmark = pytest.mark.full

CHUNK, POOL, NEW = 512, 5600, 12
OPTIONS = {"host_tokens": POOL, "sketches": True}
DOCUMENT = needle_prompt(1500, 4, seed=5)
PROMPTS = [DOCUMENT.token_ids(i) for i in range(4)]
specs = pytest.mark.parametrize("spec", [None, *examples()])


def ask(server: Server, ids: list[int], spec: str | None, new: int = NEW) -> Completion:
    return server.generate(ids, new, spec)


@dataclass
class Audited:
    """A server, and its audit so far."""

    server: Server
    log: Path
    offset: int = 0

    def ask(self, ids: list[int], spec: str | None) -> tuple[Completion, np.ndarray]:
        """An answer, and the audit records of its steps, by length and then layer."""
        got = ask(self.server, ids, spec)
        arrays, self.offset = audit.read(self.log, self.offset)
        records = np.concatenate(arrays)
        # SGLang may run one step too many, and discards its token.
        records = records[records["length"] < len(ids) + NEW]
        return got, records[np.lexsort((records["layer"], records["length"]))]

    def skip(self) -> None:
        """Skip the records so far."""
        self.offset = audit.read(self.log, self.offset)[1]


@pytest.fixture(scope="module")
def both(logs: Path) -> Iterator[list[Audited]]:
    """A server on the CPU and one on the device."""
    with ExitStack() as stack:
        servers = []
        for name, env in (("cpu", {}), ("device", {"FLUXION_DEVICE": "sim"})):
            log = logs / f"policies-{name}.npy"
            servers.append(
                Audited(
                    Server(
                        "--chunked-prefill-size", str(CHUNK),
                        fluxion=json.dumps({**OPTIONS, "audit": str(log)}),
                        env={"SGLANG_TEST_RETRACT": "1", **env}, log=logs / f"policies-{name}.log",
                    ),
                    log,
                )
            )  # fmt: skip
            stack.callback(servers[-1].server.stop)
        for one in servers:
            one.server.wait()
        yield servers
        for one in servers:
            one.server.assert_clean()


def check_alike(got: tuple[Completion, np.ndarray], want: tuple[Completion, np.ndarray], spec: str | None) -> None:
    """Tokens are equal. At most two of a request's 44 records differ, because rounding can move a budget past a block
    boundary or swap two tokens."""
    assert got[0].tokens == want[0].tokens and len(want[0].tokens) == NEW
    assert got[0].cached == want[0].cached
    records, others = got[1], want[1]
    for name in ("policy", "layer", "length", "middle", "kv_bytes"):
        assert (records[name] == others[name]).all(), name
    assert set(records["policy"]) == {(spec or "fluxion").encode()}
    same = (records["tile_bytes"] == others["tile_bytes"]) & (records["metadata_bytes"] == others["metadata_bytes"])
    assert (~same).sum() <= 2
    assert np.abs(records["error"] - others["error"])[same].max() < 1e-4
    if spec == "full":
        assert (records["error"] == 0).all()


def test_the_flag_alone_chooses_the_predictor(both: list[Audited]) -> None:
    for one in both:
        assert "Fluxion: policy fluxion, tau" in one.server.log()
    assert re.search(r"Fluxion: passes run on .*simulated", both[1].server.log())


@specs
def test_prefill_radix_hit_and_appended_turn(both: list[Audited], spec: str | None) -> None:
    first, other = PROMPTS[:2]
    for one in both:
        one.server.flush()
        one.skip()
    want, got = (one.ask(first, spec) for one in both)
    check_alike(got, want, spec)
    assert got[0].cached == 0
    # Another question about the document, which is in the tree.
    want, got = (one.ask(other, spec) for one in both)
    check_alike(got, want, spec)
    assert got[0].cached >= 1400
    # The next turn, which reuses the tree.
    turn = first + want[0].tokens + cases.filler(200, 9)
    want, got = (one.ask(turn, spec) for one in both)
    check_alike(got, want, spec)
    assert got[0].cached >= 1400


def test_fluxion_answers_and_reads_little(both: list[Audited]) -> None:
    """More questions in a batch, mixed with other policies, retracted and evicted; then each alone."""
    device, asked = both[1], [None, "full", "fluxion", "fixed:16:0.10", "anchor", "lfps", "hgca", "psa"]
    others = [cases.prompt(1200, 90 + i) for i in range(4)]
    before = len(device.server.log())
    with ThreadPoolExecutor(len(asked)) as pool:
        prompts = [*PROMPTS, *others]
        got = list(pool.map(lambda pair: ask(device.server, *pair), zip(prompts, asked, strict=True)))
    assert all(len(answer.tokens) == NEW for answer in got), got
    assert re.search(r"Testing retraction|Retract requests", device.server.log()[before:]), "nothing was retracted"
    device.skip()
    for prompt, question in zip(PROMPTS, DOCUMENT.questions, strict=True):
        alone, records = device.ask(prompt, None)
        assert score(question.answer_ids, alone.tokens[: len(question.answer_ids)])
        assert 0 < records["tile_bytes"].sum() < 0.4 * records["kv_bytes"].sum()
        cpu, _ = both[0].ask(prompt, None)
        assert alone.tokens == cpu.tokens


def test_something_was_evicted(both: list[Audited]) -> None:
    assert sum(value for name, value in both[1].server.metrics().items() if "evicted_tokens_total" in name) > 0


class TestTensorParallel:
    """Two ranks, each with its own windows, mailbox, layer server and host pool."""

    @pytest.fixture(scope="class")
    def server(self, logs: Path) -> Iterator[Server]:
        with Server(
            "--tp", "2", "--chunked-prefill-size", str(CHUNK),
            fluxion=json.dumps({**OPTIONS, "workers": 1}),
            env={"FLUXION_DEVICE": "sim", "SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_TEST_RETRACT": "1"},
            log=logs / "policies-tp2.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_each_rank_has_a_device(self, server: Server) -> None:
        assert len(re.findall(r"TP[01]\] Fluxion: passes run on .*simulated", server.log())) == 2
        assert len(re.findall("Fluxion: policy fluxion, tau", server.log())) == 2

    @pytest.mark.parametrize("spec", [None, "full", "psa"])
    def test_answers(self, server: Server, spec: str | None) -> None:
        server.flush()
        for i, (prompt, question) in enumerate(zip(PROMPTS, DOCUMENT.questions, strict=True)):
            got = ask(server, prompt, spec, len(question.answer_ids))
            assert score(question.answer_ids, got.tokens)
            assert (got.cached >= 1400) == (i > 0)

    def test_a_batch_under_pressure(self, server: Server) -> None:
        asked: list[str | None] = [None, "full", "streaming", "anchor"]
        others = [cases.prompt(1200, 90 + i) for i in range(4)]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda pair: ask(server, *pair), zip([*PROMPTS, *others], asked * 2, strict=True)))
        assert all(len(answer.tokens) == NEW for answer in got), got
        assert re.search(r"Testing retraction|Retract requests", server.log()), "nothing was retracted"
        for prompt, question in zip(PROMPTS, DOCUMENT.questions, strict=True):
            assert score(question.answer_ids, ask(server, prompt, None, len(question.answer_ids)).tokens)
