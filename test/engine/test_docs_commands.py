"""Commands and programs of the pages that need a server run unchanged, except for the server's address."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import requests
from page_commands import Block, blocks, lines
from places import NEEDLE
from server import PATIENCE_S, Server

from fluxion_sglang.commands.needle import needle_prompt

pytestmark = pytest.mark.full

ADDRESS = "localhost:30000"
PROMPT = needle_prompt(1024, 4, seed=3).text(0)
"""Replaces the "..." of the pages."""

CURL = [line for block in blocks("sh") for line in lines(block) if ADDRESS in line]
CLIENTS = [block for block in blocks("python") if ADDRESS in block.text]
ENGINES = [block for block in blocks("python") if "sglang.Engine(" in block.text]
REQUESTS = [block for block in blocks("json") if "sampling_params" in block.text]


def name(block: Block) -> str:
    return block.page


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    with Server("--enable-cache-report", log=logs / "docs.log") as running:
        running.generate(needle_prompt(1024, 4, seed=3).token_ids(0), 2)  # so that counters are not zero
        yield running
        running.assert_clean()


def with_prompt(text: str) -> str:
    return text.replace('"..."', json.dumps(PROMPT))


def run_program(text: str, folder: Path, **environment: str) -> str:
    script = folder / "program.py"
    script.write_text(text)
    done = forked.run(str(script), **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_pages_have_what_runs_here() -> None:
    assert CURL and CLIENTS and ENGINES and REQUESTS


@pytest.mark.parametrize("line", CURL)
def test_curl_commands(server: Server, line: str) -> None:
    line = line.replace(ADDRESS, server.url.removeprefix("http://")).replace("curl -s ", "curl -s --fail-with-body ")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "the command prints nothing"
    if "/metrics" not in line:
        reply = json.loads(done.stdout)
        assert reply.get("text") is not None or reply["choices"][0]["text"] is not None, reply


@pytest.mark.parametrize("block", REQUESTS, ids=name)
def test_request_bodies(server: Server, block: Block) -> None:
    reply = requests.post(server.url + "/generate", json=json.loads(with_prompt(block.text)), timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    assert reply.json()["meta_info"]["finish_reason"]["type"] in ("stop", "length"), reply.text


@pytest.mark.full
@pytest.mark.parametrize("block", CLIENTS, ids=name)
def test_client_programs(server: Server, block: Block, tmp_path: Path) -> None:
    text = with_prompt(block.text).replace(ADDRESS, server.url.removeprefix("http://"))
    assert run_program(text, tmp_path).strip(), "the program prints nothing"


@pytest.mark.full
@pytest.mark.parametrize("block", ENGINES, ids=name)
def test_engine_programs(block: Block, tmp_path: Path) -> None:
    """Programs run with sizes for a small machine, which the pages leave to the reader."""
    text = with_prompt(block.text)
    text = re.sub(r'model_path="[^"]+"', f"model_path={NEEDLE!r}", text)
    sizes = 'device="cpu", max_running_requests=4, max_total_tokens=20000, log_level="error", '
    text = text.replace("sglang.Engine(", f"sglang.Engine({sizes}")
    assert run_program(text, tmp_path).strip(), "the program prints nothing"


def test_a_wrong_policy_is_answered_as_the_security_page_says(server: Server) -> None:
    """Status 400, the legal specs, and at most 60 characters of what was sent."""
    body = {"text": PROMPT, "sampling_params": {"custom_params": {"fluxion_policy": "x" * 500}}}
    reply = requests.post(server.url + "/generate", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 400 and '"full"' in reply.json()["error"]["message"], reply.text
    assert "x" * 60 in reply.text and "x" * 61 not in reply.text


def test_salts_keep_prefixes_apart(server: Server) -> None:
    """Security page: prompts with different `cache_salt` share nothing; with the same salt they do."""

    def cached(salt: str) -> int:
        body = {"model": "default", "prompt": PROMPT + " w1", "max_tokens": 2, "cache_salt": salt}
        reply = requests.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        details = reply.json()["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens", 0))

    assert cached("one user") == 0
    assert cached("another user") == 0
    assert cached("one user") > 0
