"""Conditions of a server's first day: a proxy in the environment, `sglang serve`, an API key, the profiler; and a start
that the scheduler's process refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from places import NEEDLE
from server import PATIENCE_S, START_TIMEOUT_S, await_health

from fluxion_sglang import cli
from fluxion_sglang.commands.serving import free_port

pytestmark = pytest.mark.full

KEY = "the key"
SERVE = [sys.executable, "-W", "ignore", "-c", "from sglang.cli.main import main; main()", "serve", NEEDLE]
SMALL = ["--device", "cpu", "--max-running-requests", "4", "--mem-fraction-static", "0.4", "--enable-fluxion"]
BROKEN = "http://127.0.0.1:1"
"""A proxy that does not answer."""


@pytest.fixture(scope="module")
def url(logs: Path) -> Iterator[str]:
    """A server that warms itself up, which is the default."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", logs / "first_day.log"
    command = [*SERVE, *SMALL, "--port", str(port), "--api-key", KEY, "--enable-metrics"]
    command += ["--context-length", "512", "--fluxion-config", '{"host_tokens": 8192}']
    changes = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY"), BROKEN)
    changes["SGLANG_TORCH_PROFILER_DIR"] = str(logs / "profiles")
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **changes}, start_new_session=True
        )
        try:
            await_health(url, process, log)
            yield url
            said = log.read_text()
            assert "The server is fired up and ready to roll!" in said and "warmup error" not in said
            assert said.count("the server asks itself without a proxy") == 1
            assert process.poll() is None, said[-4000:]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_ask_with_its_key(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", BROKEN)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = tmp_path / "file.txt"
    file.write_text("k1 v1 ; k2 v2 ;")
    assert cli.main(["ask", str(file), "Q k1 k2", "--url", url, "--max-tokens", "4"]) == 2
    assert "refuses requests without a key; pass its key with --api-key" in capsys.readouterr().err
    assert cli.main(["ask", str(file), "Q k1 k2", "--url", url, "--max-tokens", "4", "--api-key", KEY]) == 0
    assert capsys.readouterr().out.strip()


def post(url: str, body: dict[str, Any] | None = None) -> requests.Response:
    reply = requests.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply


def test_the_profiler(url: str, logs: Path) -> None:
    post(url + "/start_profile")
    post(url + "/generate", {"text": "k1 v1", "sampling_params": {"max_new_tokens": 2}})
    post(url + "/stop_profile")
    assert list((logs / "profiles").glob("*.trace.json.gz"))


def test_what_the_scheduler_refuses_is_one_line(tmp_path: Path) -> None:
    """The predictor names other weights, so it is refused after the weights are loaded."""
    shutil.copytree(Path(NEEDLE) / "fluxion", tmp_path / "predictor")
    file = tmp_path / "predictor" / "predictor.json"
    document = json.loads(file.read_text())
    document["model"]["weights"] = "another"
    file.write_text(json.dumps(document))
    config = json.dumps({"predictor": str(tmp_path / "predictor"), "host_tokens": 8192})
    command = [*SERVE, *SMALL, "--port", str(free_port()), "--fluxion-config", config]
    run = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert run.returncode == 1
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "was trained for another model" in errors[0], run.stderr[-4000:]
    assert "Traceback" not in run.stderr
