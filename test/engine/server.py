"""A real SGLang server for a test class, and requests of the tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from forked import Forked
from places import NEEDLE, ROOT

from fluxion_sglang.commands.needle import NeedlePrompt, score
from fluxion_sglang.commands.serving import free_port

PLUGINS = ROOT / "test" / "plugins"
"""Packages that a server finds with this folder on its PYTHONPATH: policies that fail."""

START_TIMEOUT_S = 1800
"""A loaded machine takes minutes; the death of a server is noticed at once."""

PATIENCE_S = 600
"""For work that takes seconds on an idle machine."""

SOUND = re.compile(r"of \d+ tokens, metadata entries and sketches in the host pool, all are sound")
"""Log line of a server whose pool was checked and is sound."""

LEAK_WORDS = re.compile(
    "memory leak detected|Scheduler hit an exception|"
    "Fluxion: (the pass failed|SGLang's scheduler failed|the pools are emptied)"
)


def await_health(url: str, process: Forked | subprocess.Popen[bytes], log: Path) -> None:
    """Block until a started server answers; raise with the end of its log if it does not."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(requests.RequestException):
            if requests.get(url + "/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not come up:\n{log.read_text(errors='replace')[-4000:]}")


@dataclass(frozen=True)
class Completion:
    """A reply: new token ids with their log probabilities, cached prompt tokens, and the reason of its end."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: dict[str, Any]
    raw: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Completion:
        """Parse the reply of `/generate` to a request for one answer."""
        if "meta_info" not in raw:  # refused before it became a request
            return cls([], [], 0, raw, raw)
        meta = raw["meta_info"]
        # An aborted request without generated tokens has neither tokens nor logprobs.
        logprobs = [item[0] for item in meta.get("output_token_logprobs") or []]
        return cls(raw.get("output_ids") or [], logprobs, meta.get("cached_tokens", 0), meta["finish_reason"], raw)


class Server:
    """`python -m sglang.launch_server` on a free port, with SGLang's strict idle leak check on (its default).

    Args:
        flags: extra command line words. env: extra environment.
        model: model folder. fluxion: JSON for --fluxion-config, "" for the bare flag, None for plain SGLang.
        spawn: start it as users do, with processes that import SGLang themselves; otherwise it is forked (forked.py).
    """

    def __init__(
        self, *flags: str, model: str = NEEDLE, fluxion: str | None = "", dtype: str = "float32",
        env: dict[str, str] | None = None, log: Path, spawn: bool = False,
    ) -> None:  # fmt: skip
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)]
        # SGLang's own guess of this fraction is negative on a small machine without chunked prefill.
        command += ["--mem-fraction-static", "0.4"]
        command += ["--dtype", dtype, "--device", "cpu", "--skip-server-warmup", "--enable-metrics"]
        command += ["--sleep-on-idle"]  # several servers wait for their turn; without this option each occupies a core
        if "--max-running-requests" not in flags:
            command += ["--max-running-requests", "16"]
        if "--max-total-tokens" not in flags:
            command += ["--max-total-tokens", "65536"]
        if fluxion is not None:
            command += ["--enable-fluxion"] + (["--fluxion-config", fluxion] if fluxion else [])
        self.log_path = log
        log.write_text("")
        self.process: Forked | subprocess.Popen[bytes]
        if spawn:
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(env or {})}
            with log.open("w") as out:
                self.process = subprocess.Popen(
                    [*command, *flags], stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
        else:
            self.process = Forked([*command[1:], *flags], env or {}, log, log)

    def wait(self) -> Server:
        """Block until the server answers; raise with the end of its log if it does not."""
        try:
            await_health(self.url, self.process, self.log_path)
        except RuntimeError:
            self.stop()
            raise
        return self

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern: str, since: int) -> None:
        """Block until the log, from character `since` on, matches `pattern`."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.log()[since:]):
            assert time.monotonic() < deadline, f"the log never said {pattern!r}"
            time.sleep(0.02)

    def stop(self) -> None:
        for sig in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, sig)
                try:
                    self.process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    continue
        # The scheduler is a grandchild; killing the session's group ends it even if the parent is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self) -> Server:
        return self.wait()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def generate(self, ids: list[int], new: int, policy: str | None = None, **extra: Any) -> Completion:
        """Greedy continuation of a prompt of token ids, exactly `new` tokens long; without `policy` under the
        server's."""
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        if policy is not None:
            params["custom_params"] = {"fluxion_policy": policy}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, **extra}
        return Completion.of(requests.post(self.url + "/generate", json=body, timeout=PATIENCE_S).json())

    def answered(self, document: NeedlePrompt, cached: int) -> tuple[int, float]:
        """Number of right answers to all questions of a document, and the share of its middle that was read.

        cached: minimum number of tokens that later questions find in the tree.
        """
        before, right = self.metrics(), 0
        for i, question in enumerate(document.questions):
            got = self.generate(document.token_ids(i), len(question.answer_ids))
            right += score(question.answer_ids, got.tokens)
            assert i == 0 or got.cached >= cached, "later questions find the document in the tree"
        after, names = self.metrics(), ("fluxion_read_tokens_total", "fluxion_middle_tokens_total")
        read, middle = (after[name] - before.get(name, 0) for name in names)
        return right, read / middle

    def generate_many(self, prompts: list[tuple[list[int], int]]) -> list[Completion]:
        """`generate` for several prompts concurrently."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda p: self.generate(*p), prompts))

    def aborted(self, ids: list[int], new: int, when: str, rid: str, **extra: Any) -> Completion:
        """The answer to a request that is aborted when the log matches `when`."""
        before = len(self.log())
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.generate, ids, new, rid=rid, **extra)
            self.wait_for_log(when, before)
            self.abort(rid)
            got = asked.result(PATIENCE_S)
        assert got.finish.get("type") == "abort", got
        return got

    def abort(self, rid: str) -> None:
        requests.post(self.url + "/abort_request", json={"rid": rid}, timeout=PATIENCE_S).raise_for_status()

    def flush(self) -> None:
        for _ in range(100):
            if requests.post(self.url + "/flush_cache", timeout=PATIENCE_S).status_code == 200:
                return
            time.sleep(0.1)
        raise RuntimeError("flush_cache was refused for 10 seconds")

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by `name{labels}`."""
        samples = {}
        for line in requests.get(self.url + "/metrics", timeout=PATIENCE_S).text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def assert_idle(self) -> None:
        """The server is alive after SGLang's strict idle check, which ends it on a leak."""
        time.sleep(1.5)  # the check runs about once a second
        assert self.process.poll() is None, self.log()[-4000:]
        assert requests.get(self.url + "/health", timeout=PATIENCE_S).status_code == 200
        assert "memory leak detected" not in self.log()

    def assert_clean(self) -> None:
        """`assert_idle`, and the log has no exception and no failed pass."""
        self.assert_idle()
        found = LEAK_WORDS.search(self.log())
        assert found is None, self.log()[max(found.start() - 2000, 0) : found.end() + 2000]

    def assert_sound(self) -> None:
        """The host pool of this server (option canary) holds exactly what was written to it."""
        params = {"max_new_tokens": 1, "custom_params": {"fluxion_check": True}}
        got = self.generate([1, 2, 3], 1, sampling_params=params)
        assert got.finish.get("type") in ("length", "stop"), got.finish
        assert SOUND.search(self.log())
