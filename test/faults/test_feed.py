"""`make fuzz-requests` finds nothing, and finds an injected error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from effort import examples
from faults import bodies, feed, scenes
from faults.inprocess import InProcess
from faults.wire import Call

pytestmark = pytest.mark.full


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["faults", *words])
    return feed.main()


@pytest.mark.parametrize("server", feed.SERVERS)
def test_odd_bodies_cost_nobody_else(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "summary.json"
    count = examples(300)
    assert run(monkeypatch, "--seed", "7", "--server", server, "--bodies", str(count), "--json", str(out)) == 0
    summary = json.loads(out.read_text())
    assert summary["bodies"] == count and {"200", "400"} <= summary["statuses"].keys()


def lose_a_token(server: InProcess, calls: list[Call]) -> list[int]:
    """`feed.play` with a corrupted expectation for one neighbour."""
    scenes.alone(server, 0).last["output_ids"][-1] ^= 1
    return feed.play(server, calls)


def test_a_neighbour_that_suffers_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(feed, "play", lose_a_token)
    assert run(monkeypatch, "--seed", "7", "--server", "plain", "--only", "5") == 1
    said = capsys.readouterr().out
    assert "FAILED with --seed 7 --server plain --only 5" in said and "neighbour 0" in said
    assert bodies.call(7, 5).path in said
