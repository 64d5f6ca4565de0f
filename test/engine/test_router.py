"""SGLang's router in front of two servers: it finds the one that has a prompt's beginning, and lives on with one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from server import PATIENCE_S, Server, await_health, free_port
from test_disk_served import settled

from fluxion_sglang.commands.needle import NeedlePrompt, needle_prompt, score

pytestmark = pytest.mark.full

ROUTER = "sglang-router==0.3.2"
DOCUMENTS, QUESTIONS, TOKENS = 6, 4, 2000


@dataclass
class Deployment:
    """A router and what is behind it. url: the router's."""

    kind: str
    url: str
    servers: list[Server]
    log: Path

    def ask(self, document: NeedlePrompt, question: int) -> dict[str, Any]:
        new = len(document.questions[question].answer_ids)
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"text": document.text(question), "sampling_params": params}
        reply = requests.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, (reply.text, self.log.read_text()[-4000:])
        return reply.json()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def documents() -> list[NeedlePrompt]:
    return [needle_prompt(TOKENS, QUESTIONS, seed=800 + i) for i in range(DOCUMENTS)]


@pytest.fixture(params=["plain", "flag", "files"], scope="module")
def deployment(request: pytest.FixtureRequest, logs: Path) -> Iterator[Deployment]:
    """Two servers: plain SGLang's, with the flag, and with the flag and a folder for the KV of both."""
    kind, folder = request.param, logs / f"router-{request.param}"
    folder.mkdir()
    config = {"host_tokens": 30000, "workers": 1} | ({"disk": str(folder / "pages")} if kind == "files" else {})
    with ExitStack() as stack:
        servers = []
        for i in range(2):
            fluxion = None if kind == "plain" else json.dumps(config)
            servers.append(stack.enter_context(Server(fluxion=fluxion, log=folder / f"server{i}.log")))
        log = folder / "router.log"
        url = f"http://127.0.0.1:{(port := free_port())}"
        # Its version of FastAPI and ours need not agree, so it has an environment of its own.
        router = [
            str(Path(sys.executable).with_name("uv")), "run", "--no-project", "--with", ROUTER,
            "python", "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(free_port()), "--policy", "cache_aware",
            "--worker-urls", *(server.url for server in servers),
            "--health-check-interval-secs", "2", "--health-check-timeout-secs", "60",
        ]  # fmt: skip
        with log.open("w") as out:
            process = subprocess.Popen(router, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        stack.callback(lambda: os.killpg(process.pid, signal.SIGKILL))
        await_health(url, process, log)
        yield Deployment(kind, url, servers, log)


def test_a_prompt_goes_to_who_has_its_beginning(deployment: Deployment, documents: list[NeedlePrompt]) -> None:
    """With the flag as without: only the first question about a document is prefilled."""
    cached, right = [], 0
    for number in range(QUESTIONS):
        for document in documents:
            got = deployment.ask(document, number)
            right += score(document.questions[number].answer_ids, got["output_ids"])
            cached.append(got["meta_info"]["cached_tokens"])
    assert max(cached[:DOCUMENTS]) < TOKENS / 2 and min(cached[DOCUMENTS:]) > TOKENS * 0.95, cached
    assert right >= DOCUMENTS * QUESTIONS * 0.8, right
    for server in deployment.servers:
        prefilled = [value for name, value in server.metrics().items() if name.startswith("sglang:prompt_tokens_total")]
        assert sum(prefilled) > TOKENS, "one of the two had nothing to do"


def test_a_server_is_lost(deployment: Deployment, documents: list[NeedlePrompt]) -> None:
    """While requests run: those that it had are asked of the other, and so is what comes later. If the two share files,
    the other reads what the lost one has computed."""
    lost, other = deployment.servers
    if deployment.kind == "files":
        settled(deployment.log.parent / "pages")
    with ThreadPoolExecutor(DOCUMENTS) as pool:
        running = [pool.submit(deployment.ask, document, 0) for document in documents]
        os.killpg(lost.process.pid, signal.SIGKILL)
        during = [future.result() for future in running]
    after = [deployment.ask(document, 1) for document in documents]
    for number, answers in enumerate((during, after)):
        right = [
            score(document.questions[number].answer_ids, got["output_ids"])
            for document, got in zip(documents, answers, strict=True)
        ]
        assert sum(right) >= DOCUMENTS - 1, right
    cached = [got["meta_info"]["cached_tokens"] for got in (*during, *after)]
    assert (min(cached) > TOKENS * 0.95) == (deployment.kind == "files"), cached
    other.assert_idle()
