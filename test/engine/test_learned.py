"""The default policy through the server: the bundled predictor, full attention without one, and policies of
requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server import Server

from fluxion_sglang.commands.needle import needle_prompt, score

pytestmark = pytest.mark.full


class TestDefault:
    """The bare flag on a model whose folder has a predictor."""

    @pytest.fixture(scope="class")
    def server(self, logs: Path) -> Iterator[Server]:
        # With an audit, so that requests may use yardsticks.
        config = f'{{"host_tokens": 40000, "audit": "{logs / "learned.npy"}"}}'
        with Server("--chunked-prefill-size", "1024", fluxion=config, log=logs / "learned.log") as server:
            yield server
            server.assert_clean()

    def test_answers_and_fraction_read(self, server: Server) -> None:
        assert "Fluxion: policy fluxion, tau" in server.log_path.read_text()
        right, share = server.answered(needle_prompt(6000, 8, seed=5), cached=5900)
        assert right >= 7, f"{right} of 8 answers right"
        assert 0 < share < 0.4

    def test_policies_run_side_by_side(self, server: Server) -> None:
        """One batch with every learned or measured policy, over one document."""
        document = needle_prompt(3000, 6, seed=9)
        specs = ["full", "anchor", "anchor:0.02", "labels:0.05", "score95", "output10", "labels:output10", None]

        def right_under(case: tuple[int, str | None]) -> bool:
            number, spec = case
            question = document.questions[number % 6]
            got = server.generate(document.token_ids(number % 6), len(question.answer_ids), spec)
            assert len(got.tokens) == len(question.answer_ids)
            return score(question.answer_ids, got.tokens)

        with ThreadPoolExecutor(len(specs)) as pool:
            right = list(pool.map(right_under, enumerate(specs)))
        # An anchor decides for a whole answer by one query; the quality benchmark measures how well.
        found = dict(zip(specs, right, strict=True))
        assert found["full"] and found["labels:0.05"] and found[None], found

    def test_a_long_answer_and_a_second_turn(self, server: Server) -> None:
        """Decoding moves the window over hundreds of tokens; the next turn has a new anchor."""
        document = needle_prompt(2500, 4, seed=2)
        first = document.token_ids(0)
        told = server.generate(first, 400)
        assert len(told.tokens) == 400
        question = document.questions[1]
        turn = [*first, *told.tokens, *question.token_ids]
        assert len(server.generate(turn, len(question.answer_ids)).tokens) == len(question.answer_ids)

    def test_a_tau_that_was_not_trained_is_refused(self, server: Server) -> None:
        got = server.generate([1, *range(420, 480)], 4, "fluxion:0.07")
        assert "has no tau 0.07, only 0.05, 0.10, 0.20; choose one" in str(got.raw)


def test_a_predictor_that_does_not_fit_is_passed_over(logs: Path) -> None:
    config = '{"host_tokens": 20000, "window": 512}'
    document = needle_prompt(3000, 2, seed=3)
    with Server(fluxion=config, log=logs / "other-window.log") as server:
        question = document.questions[0]
        got = server.generate(document.token_ids(0), len(question.answer_ids))
        assert len(got.tokens) == len(question.answer_ids)
        text = server.log_path.read_text()
        assert "Fluxion: policy full" in text and "set window to 256 or train a predictor with 512" in text
        server.assert_clean()
