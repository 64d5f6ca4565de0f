"""SGLang's router in front of two servers: it finds the server with a prompt's prefix, and survives the loss of one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from server import PATIENCE_S, Server, await_health, free_port
from test_disk_served import settled

from fluxion_sglang.commands.needle import NeedlePrompt, needle_prompt, score

pytestmark = pytest.mark.full

DOCUMENTS, QUESTIONS, TOKENS = 6, 4, 2000
LONG = 600
"""Tokens of an answer that takes seconds."""


@dataclass
class Deployment:
    """A router and its servers. url: the router's."""

    url: str
    servers: list[Server]
    log: Path

    def await_servers(self) -> None:
        """Block until the router has found the servers; it reports healthy earlier."""
        deadline = time.monotonic() + PATIENCE_S
        while requests.get(self.url + "/workers", timeout=PATIENCE_S).json()["total"] < len(self.servers):
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def ask(self, document: NeedlePrompt, question: int, new: int | None = None, **params: Any) -> Any:
        """new: tokens of the answer; by default the length of the right one."""
        new = new or len(document.questions[question].answer_ids)
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **params}
        body = {"text": document.text(question), "sampling_params": params}
        reply = requests.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, (reply.text, self.log.read_text()[-4000:])
        return reply.json()

    def streams_to_its_end(self, document: NeedlePrompt, question: int, new: int) -> bool:
        """Whether the stream of an answer is complete."""
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"text": document.text(question), "sampling_params": params, "stream": True}
        last = ""
        with (
            contextlib.suppress(requests.exceptions.ChunkedEncodingError),
            requests.post(self.url + "/generate", json=body, timeout=PATIENCE_S, stream=True) as reply,
        ):
            assert reply.status_code == 200
            for line in reply.iter_lines(decode_unicode=True):
                last = line or last
        return last == "data: [DONE]"


def right(document: NeedlePrompt, question: int, answer: Any) -> bool:
    expected = document.questions[question].answer_ids
    return score(expected, answer["output_ids"][: len(expected)])


@contextmanager
def deployed(folder: Path, router: list[str], fluxion: dict[str, Any] | None) -> Iterator[Deployment]:
    """Two servers behind a router. fluxion: their options; None: plain SGLang."""
    folder.mkdir()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                Server(
                    fluxion=None if fluxion is None else json.dumps(fluxion | {"host_tokens": 30000, "workers": 1}),
                    log=folder / f"server{i}.log",
                )
            )
            for i in range(2)
        ]
        log = folder / "router.log"
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [
            *router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
            "--policy", "cache_aware", "--worker-urls", *(server.url for server in servers),
            "--health-check-interval-secs", "2", "--health-check-timeout-secs", "60",
        ]  # fmt: skip
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        stack.callback(lambda: os.killpg(process.pid, signal.SIGKILL))
        await_health(url, process, log)
        deployment = Deployment(url, servers, log)
        deployment.await_servers()
        yield deployment


@pytest.fixture(scope="module")
def documents() -> list[NeedlePrompt]:
    return [needle_prompt(TOKENS, QUESTIONS, seed=800 + i) for i in range(DOCUMENTS)]


@pytest.mark.parametrize("flag", [False, True], ids=["plain", "flag"])
def test_prompts_go_to_who_has_their_beginning_and_a_server_may_go(
    flag: bool, documents: list[NeedlePrompt], router: list[str], logs: Path
) -> None:
    """With and without the flag, only the first question about a document is prefilled."""
    folder = logs / ("router-flag" if flag else "router-plain")
    with deployed(folder, router, {} if flag else None) as deployment:
        # Send the first ones at once: the router gives a new prompt to the less busy server.
        with ThreadPoolExecutor(DOCUMENTS) as pool:
            answers = [list(pool.map(lambda document: deployment.ask(document, 0), documents))]
        answers += [[deployment.ask(document, number) for document in documents] for number in range(1, QUESTIONS)]
        cached = [[got["meta_info"]["cached_tokens"] for got in of_all] for of_all in answers]
        assert max(cached[0]) < TOKENS / 2 and min(min(later) for later in cached[1:]) > TOKENS * 0.95, cached
        correct = sum(
            right(document, number, got)
            for number, of_all in enumerate(answers)
            for document, got in zip(documents, of_all, strict=True)
        )
        assert correct >= DOCUMENTS * QUESTIONS * 0.8, correct
        for server in deployment.servers:
            prompts = [value for name, value in server.metrics().items() if name.startswith("sglang:prompt_tokens_tot")]
            assert sum(prompts) > TOKENS, "one of the two had nothing to do"
        if flag:
            check_what_is_passed_on(deployment, documents[0])
        lose_one(deployment, documents)


def check_what_is_passed_on(deployment: Deployment, document: NeedlePrompt) -> None:
    """The server ends a request with an illegal policy. The router forwards the field only in /v1/completions."""
    illegal = {"fluxion_policy": "no such policy"}
    assert len(deployment.ask(document, 0, custom_params=illegal)["output_ids"]) > 0
    completion = {"model": "any", "prompt": document.text(0), "max_tokens": 2, "custom_params": illegal}
    reply = requests.post(deployment.url + "/v1/completions", json=completion, timeout=PATIENCE_S)
    assert reply.status_code == 400 and "no such policy" in reply.text, reply.text


def lose_one(deployment: Deployment, documents: list[NeedlePrompt]) -> None:
    """A server is killed while it decodes: its requests and later ones go to the other server; its streams break
    off."""
    lost, other = deployment.servers
    since = len(lost.log())
    with ThreadPoolExecutor(2 * DOCUMENTS) as pool:
        running = [pool.submit(deployment.ask, document, 0, LONG) for document in documents]
        streams = [pool.submit(deployment.streams_to_its_end, document, 0, LONG) for document in documents]
        lost.wait_for_log(r"Decode batch.*#running-req: [1-9]", since)
        os.killpg(lost.process.pid, signal.SIGKILL)
        during = [future.result() for future in running]
        ended = [future.result() for future in streams]
    assert set(ended) == {False, True}, ended
    after = [deployment.ask(document, 1) for document in documents]
    for number, answers in enumerate((during, after)):
        correct = sum(right(document, number, got) for document, got in zip(documents, answers, strict=True))
        assert correct >= DOCUMENTS - 1, correct
    assert all(len(answer["output_ids"]) == LONG for answer in during)
    other.assert_idle()


def test_servers_share_files(documents: list[NeedlePrompt], logs: Path, tmp_path: Path) -> None:
    """Each server reads what the other computed."""
    config = json.dumps({"disk": str(tmp_path), "host_tokens": 30000, "workers": 1})
    with Server(fluxion=config, log=logs / "1.log") as first, Server(fluxion=config, log=logs / "2.log") as second:
        for writer, reader, document in ((first, second, documents[0]), (second, first, documents[1])):
            new = len(document.questions[1].answer_ids)
            assert writer.generate(document.token_ids(0), 1).cached < TOKENS / 2
            settled(tmp_path)
            got = reader.generate(document.token_ids(1), new)
            assert got.cached > TOKENS * 0.95 and got.tokens == writer.generate(document.token_ids(1), new).tokens
        first.assert_clean()
        second.assert_clean()
