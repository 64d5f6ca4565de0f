"""Fixtures of the end-to-end tests: plain SGLang's answers, and a directory for server logs."""

from __future__ import annotations

from pathlib import Path

import cases
import pytest
from server import Completion, Server


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server-logs")


@pytest.fixture(scope="session")
def reference(logs: Path) -> dict[str, Completion]:
    """Greedy tokens of plain SGLang (torch_native, float32, the flag absent) for every case, and the second turn."""
    answers = {}
    with Server("--chunked-prefill-size", "-1", fluxion=None, log=logs / "reference.log") as server:
        for name, (ids, new) in cases.all_cases().items():
            answers[name] = server.generate(ids, new)
            assert len(answers[name].tokens) == new, name
        first = cases.all_cases()["length-2000"][0]
        turn = cases.second_turn(first, answers["length-2000"].tokens)
        answers["second-turn"] = server.generate(turn, cases.TURN_NEW)
        server.assert_clean()
    return answers
