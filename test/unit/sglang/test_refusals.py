"""A scheduler's refusal reaches the launcher as its sentence; other errors do not."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import utils

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.start import refusals

SENTENCE = "the pool does not fit; free memory."
CONTEXT = multiprocessing.get_context("fork")  # SGLang is imported already


def refuse() -> None:
    raise ConfigError(SENTENCE)


def scheduler(ready: Connection, outcome: str) -> None:
    """A process of a server: create the scheduler, report readiness, and serve."""

    def make(_: object) -> None:
        if outcome == "refuses":
            refuse()
        if outcome == "fails":
            raise RuntimeError("no weights")
        if outcome == "waits":
            time.sleep(600)

    lengths = {"max_req_len": 99, "max_req_input_len": 94, "max_total_num_tokens": 100}
    refusals.make_scheduler(make, SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False), **lengths))
    ready.send({"status": "ready"})
    time.sleep(600)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Start schedulers with these outcomes, and wait for them like SGLang's launcher."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv(refusals._VARIABLE, "")
    monkeypatch.setattr(refusals, "_ends", None)

    def start(*outcomes: str) -> Any:
        refusals.listen()
        readers, processes = [], []
        for outcome in outcomes:
            reader, writer = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=scheduler, args=(writer, outcome), daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)

        def end(*_: object, **__: object) -> None:
            for process in processes:
                process.kill()

        monkeypatch.setattr(utils, "kill_process_tree", end)
        try:
            return refusals.wait_for_schedulers(lambda r, p: [reader.recv() for reader in r], readers, processes)
        finally:
            end()
            for process in processes:
                process.join(60)

    return start


def test_schedulers_that_are_ready(launcher: Callable[..., Any]) -> None:
    assert launcher("is ready", "is ready") == [{"status": "ready"}] * 2


@pytest.mark.parametrize("outcomes", [("refuses",), ("waits", "refuses"), ("refuses", "refuses")])
def test_a_refusal_of_any_rank_is_raised(
    outcomes: tuple[str, ...], launcher: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        launcher(*outcomes)
    assert str(caught.value) == SENTENCE
    sys.excepthook(ConfigError, caught.value, None)
    assert capsys.readouterr().err == f"error: {SENTENCE}\n"


def test_an_error_of_another_kind_goes_the_way_of_sglang(launcher: Callable[..., Any]) -> None:
    with pytest.raises(EOFError):
        launcher("fails")


def test_a_scheduler_in_this_process_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(refusals._VARIABLE, str(tmp_path / "sent"))
    with pytest.raises(ConfigError, match="free memory"):
        refusals.make_scheduler(refuse)
    assert not os.path.exists(tmp_path / "sent")


def test_without_a_launcher_that_hears_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a launcher")
    monkeypatch.setattr(refusals.time, "sleep", lambda _: pytest.fail("it waits to be ended"))
    monkeypatch.setenv(refusals._VARIABLE, "/proc/1/fd/999")
    with pytest.raises(ConfigError, match="free memory"):
        refusals.make_scheduler(refuse)
    monkeypatch.delenv(refusals._VARIABLE)
    with pytest.raises(ConfigError, match="free memory"):
        refusals.make_scheduler(refuse)
