"""Calibration: what is decoded of held-out sequences, what counts, and which tau becomes the default."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from places import NEEDLE

from fluxion_sglang.scoring.audit_file import record_dtype
from fluxion_sglang.scoring.kl import Distribution
from fluxion_sglang.scoring.serve import Reply, Request, RequestFailed
from fluxion_sglang.training.dataset import TokenSequence
from fluxion_sglang.training.tau import FORCED, NAME, ends, measure, outcome, verdict

PREDICTOR = Path(NEEDLE) / "fluxion"
VOCABULARY = 16


class FakeServer:
    """Serves forced requests: `full` is certain of every target, other policies of token 0; a head's error is in
    `errors`."""

    def __init__(self, errors: dict[str, float]) -> None:
        self.errors = errors
        self.requests: list[Request] = []
        self.records: list[NDArray[Any]] = []

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        (request,) = requests
        self.requests.append(request)
        assert request.max_new_tokens == len(request.forced)
        exact = request.policy == "full"
        steps = []
        for target in request.forced:
            odds = np.zeros(VOCABULARY)
            odds[target if exact else 0] = 3.0
            steps.append(Distribution(np.arange(VOCABULARY), odds - np.log(np.exp(odds).sum())))
            record = np.zeros(1, record_dtype(2))
            record["policy"], record["kv_bytes"] = request.policy.encode(), 1000
            record["tile_bytes"], record["metadata_bytes"] = (900, 100) if exact else (200, 50)
            record["error"] = [0.0, self.errors[request.policy]]
            if len(steps) > 1:  # the first token comes from the prefill
                self.records.append(record)
        return [Reply(list(request.forced), steps, [0.0] * len(steps))]

    def audited(self) -> list[NDArray[Any]]:
        found, self.records = self.records, []
        return found


def sequence(length: int, answer: int, token: int) -> TokenSequence:
    return TokenSequence((1,) * (length - max(answer, 1)) + (token,) * max(answer, 1), answer)


def test_ends_are_answers_and_the_last_tokens_of_texts() -> None:
    given = [sequence(400, n, 2) for n in (0, 1, 2, 30)] + [sequence(9, 0, 2), sequence(10_000, 0, 2)]
    assert ends(given) == [(given[0], 50), (given[2], 2), (given[3], 30), (given[5], FORCED)]


def test_an_end_stays_with_its_sequence() -> None:
    """A skipped sequence does not shift the others: here the text is no answer, and the answer is one."""
    short, answer, text = sequence(400, 1, 3), sequence(400, 5, 4), TokenSequence((0,) * 80)
    server: Any = FakeServer({"full": 0.0, "fluxion:0.1": 0.2, "fluxion:0.3": 0.2})
    full, tight, loose = measure(server, ends([short, answer, text]), [0.1, 0.3])
    asked = [(len(request.prompt), request.forced) for request in server.requests]
    assert asked == [(395, answer.tokens[-5:])] * 3 + [(70, text.tokens[-10:])] * 3
    assert full["right"] == 1.0
    assert tight["right"] == loose["right"] == 0.0, "of the answer alone: that of the text would be right"
    assert (full["read"], tight["read"]) == (1.0, 0.25)
    assert full["kl"] == 0.0 < tight["kl"] == loose["kl"]
    assert tight["error_mean"] == pytest.approx(0.1)
    assert (full["beyond"], tight["beyond"], loose["beyond"]) == (None, 0.5, 0.0)


@pytest.mark.parametrize("kept", [0, 0.5])
def test_an_audit_that_was_cut_short_is_an_error(kept: float) -> None:
    """For instance when the temporary folder is full: the numbers would cover only some of the steps."""

    class Short(FakeServer):
        def audited(self) -> list[NDArray[Any]]:
            found = super().audited()
            return found[: int(len(found) * kept)]

    server: Any = Short({"full": 0.0, "fluxion:0.1": 0.05})
    with pytest.raises(RequestFailed, match="audit is not whole"):
        measure(server, ends([sequence(400, 8, 2)]), [0.1])


def test_texts_alone_have_no_answers() -> None:
    server: Any = FakeServer({"full": 0.0, "fluxion:0.1": 0.2})
    assert [row["right"] for row in measure(server, ends([sequence(400, 0, 2)]), [0.1])] == [None, None]


def row(tau: float | None, kl: float, right: float | None) -> dict[str, Any]:
    return {"tau": tau, "kl": kl, "right": right}


ROWS = [row(None, 0.0, 0.9), row(0.1, 0.001, 0.9), row(0.2, 0.005, 0.9), row(0.3, 0.008, 0.8), row(0.4, 0.02, 0.9)]
TEXTS = [row(None, 0.0, None), row(0.1, 0.0, None), row(0.5, 0.0, None)]


@pytest.mark.parametrize(
    ("rows", "kl", "accuracy", "tau"),
    [(ROWS, 0.01, 0.005, 0.2), (ROWS, 0.01, 0.2, 0.3), (ROWS, 0.5, 0.2, 0.4), (TEXTS, 0.01, 0.0, 0.5)],
)
def test_the_largest_tau_within_the_targets_is_the_default(
    rows: list[dict[str, Any]], kl: float, accuracy: float, tau: float
) -> None:
    found = outcome(rows, kl, accuracy)
    assert found == {"tau": tau, "met": True, "kl": kl, "accuracy": accuracy, "rows": rows}
    assert (
        verdict(found) == f"tau {tau:g} is the default, the largest that keeps --kl {kl:g} and --accuracy {accuracy:g}."
    )


@pytest.mark.parametrize(("kl", "accuracy"), [(1e-6, 0.0), (1e-6, 0.5)])
def test_that_no_tau_keeps_the_targets_is_said(kl: float, accuracy: float) -> None:
    found = outcome(ROWS, kl, accuracy)
    assert found["tau"] == 0.1 and found["met"] is False
    assert verdict(found) == (
        f"No tau keeps --kl 1e-06 and --accuracy {accuracy:g}; 0.1, the smallest, is the default: use more data, "
        "smaller --taus, or serve full."
    )


def test_a_file_without_a_verdict_is_readable() -> None:
    assert verdict({"tau": 0.1, "rows": ROWS}) == "tau 0.1 is the default."


def test_the_bundled_predictor_keeps_the_targets() -> None:
    found = json.loads((PREDICTOR / NAME).read_text())
    assert found == outcome(found["rows"], found["kl"], found["accuracy"]) and found["met"]
    default = json.loads((PREDICTOR / "predictor.json").read_text())["calibrated"]
    assert float(default) == found["tau"]
