"""Sparse decode through the server: right answers, little read, shared documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sglang as sgl
from server import Server

from fluxion_sglang.commands.needle import needle_prompt, score

pytestmark = pytest.mark.full

HOST_TOKENS = 10_000
DOCUMENT = 6_000


class TestFixed:
    """fixed(16, 0.25): enough for the bundled model at 4K with block ranking, and well below full attention."""

    spec = "fixed:16:0.25"
    least, most = 0.25, 0.75  # own choice is a quarter; the union of four heads is at most three more

    @pytest.fixture(scope="class")
    def server(self, request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
        spec = request.cls.spec
        config, log = f'{{"policy": "{spec}", "host_tokens": {HOST_TOKENS}}}', logs / f"{spec.partition(':')[0]}.log"
        with Server("--chunked-prefill-size", "2048", fluxion=config, dtype="bfloat16", log=log) as server:
            yield server
            server.assert_clean()

    def test_answers_and_fraction_read(self, server: Server) -> None:
        right, share = server.answered(needle_prompt(4096, 8, seed=5), cached=4000)
        assert right >= 7, f"{right} of 8 answers right"
        assert self.least <= share <= self.most

    def test_fork_shares_the_document(self, server: Server) -> None:
        """Four branches over one document run together in a pool that could not hold it twice."""
        document = needle_prompt(DOCUMENT, 4, seed=11)

        @sgl.function
        def program(s: sgl.ProgramState, text: str, questions: list[str]) -> None:
            # Generate one word first, so that the document is in the tree when the branches ask for it.
            s += text + " "
            s += sgl.gen("word", max_tokens=1, temperature=0, ignore_eos=True)
            branches = s.fork(len(questions))
            for branch, question in zip(branches, questions, strict=True):
                branch += " " + question
                branch += sgl.gen("answer", max_tokens=120, temperature=0, ignore_eos=True)
            s["answers"] = [branch["answer"] for branch in branches]

        assert 2 * DOCUMENT > HOST_TOKENS
        server.flush()
        before = len(server.log())
        state = program.run(
            text=" ".join(document.text(0).split()[: len(document.document)]),
            questions=[q.text for q in document.questions],
            backend=sgl.RuntimeEndpoint(server.url),
        )
        right = sum(score(q.answer, a) for q, a in zip(document.questions, state["answers"], strict=True))
        assert right >= 3, state["answers"]
        steps = [
            (int(running), int(used))
            for running, used in re.findall(r"Decode batch, #running-req: (\d+), #token: (\d+)", server.log()[before:])
        ]
        running, used = max(steps)
        assert running == len(document.questions), f"branches never ran together: {steps}"
        assert DOCUMENT <= used <= DOCUMENT + 4 * 200, "pages in use: the document once, and the branches' own tails"


class TestSketch(TestFixed):
    """sketch: as many right answers, with chunked prefill and shared pages, and few reads."""

    spec, least, most = "sketch", 0.01, 0.3

    def test_requests_have_shares_of_their_own(self, server: Server) -> None:
        """Requests of one batch with different shares, and exact ones; a tiny share answers as full attention does."""
        ids = needle_prompt(4096, 1, seed=6).token_ids(0)
        specs = ["sketch:0.000001", "full", "sketch:0.5", None]
        with ThreadPoolExecutor(len(specs)) as pool:
            got = list(pool.map(lambda spec: server.generate(ids, 12, spec), specs))
        assert got[0].tokens == got[1].tokens


def test_a_sparse_prefill_answers(logs: Path) -> None:
    config = f'{{"policy": "full", "prefill_budget": 0.15, "host_tokens": {HOST_TOKENS}}}'
    with Server("--chunked-prefill-size", "2048", fluxion=config, dtype="bfloat16", log=logs / "prefill.log") as server:
        right = 0
        for seed in range(4):
            document = needle_prompt(8192, 1, seed=seed)
            question = document.questions[0]
            right += score(question.answer_ids, server.generate(document.token_ids(0), len(question.answer_ids)).tokens)
        assert right >= 3, f"{right} of 4 answers right"
        server.assert_clean()
