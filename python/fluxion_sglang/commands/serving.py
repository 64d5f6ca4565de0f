"""Runs and queries a server from outside: starts it, waits until it answers, reads its counters, stops it.

`fluxion try` and `fluxion ask` start servers; `fluxion explain` only queries a running one.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Final

import httpx
from openai import OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tqdm import tqdm

from fluxion_sglang.environment import bypass_proxies, is_local

START_LIMIT_S = 900.0
"""Longest time without a new line in the log. A loaded machine may take minutes to import SGLang, and a model may have
to be downloaded. A server that has ended is detected at once."""

REQUEST_LIMIT_S = 3600.0
KEY_VARIABLE: Final = "OPENAI_API_KEY"
UNAUTHORIZED: Final = 401
_PORTS: Final = range(10_000, 32_768)
"""Ports below those that Linux assigns to outgoing connections."""
_SETTLE_LIMIT_S = 2.0
_STOP_LIMIT_S = 10.0
_LOG_LINES = 25
_LONGEST_REASON = 1000  # bytes
_REFUSED = "error: "
"""Prefix of a log line with a refusal by Fluxion; other lines are SGLang's."""

# SGLang's own histograms. If requests come one at a time, two readings differ by one request's value.
TTFT = "sglang:time_to_first_token_seconds"
TPOT = "sglang:request_time_per_output_token_seconds"

# SGLang's defaults are for servers: thousands of request rows, and a prefill as long as memory allows.
SMALL: Final = ("--max-running-requests", "8", "--chunked-prefill-size", "4096")
"""Options of a server for a single user."""

MEASURED: Final = ("--enable-metrics", "--skip-server-warmup")
"""Options of a server whose /metrics are read and must count only the user's requests."""


class ServerError(Exception):
    """The server did not start or did not answer. The message says why and what to do.

    Attributes:
        refusal: the server's one sentence, without `error: `, if it refused to start; else empty.
    """

    def __init__(self, message: str, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


class RequestFailed(OSError):
    """A request got no answer, or an error.

    Attributes:
        status: HTTP status of the error; None without an answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RequestRefused(Exception):
    """The server ended a request with this sentence and continues."""


@dataclass(frozen=True)
class Piece:
    """One event of a stream: the current output of a request of the batch.

    Attributes:
        request: index of the request in its batch.
        after: seconds from the sending of the batch to the event's arrival.
        tokens: all output tokens so far.
    """

    request: int
    after: float
    tokens: list[int]


class Server:
    """A running SGLang server. Failures of requests raise RequestFailed.

    Args:
        url: http://HOST:PORT, or HOST:PORT.
        api_key: of a server with --api-key.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._api_key = api_key
        self._here = False
        with suppress(ValueError):  # no URL; a request will report it
            self._here = is_local(urllib.parse.urlsplit(self.url).hostname)
        direct = [urllib.request.ProxyHandler({})] if self._here else []
        self._open = urllib.request.build_opener(*direct).open

    @classmethod
    def named(cls, url: str, api_key: str | None) -> Server:
        """A server that a user names; its key may be in the environment."""
        return cls(url, api_key or os.environ.get(KEY_VARIABLE))

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, summed over all labels but `executor`, which follows the name and a slash."""
        values: dict[str, float] = {}
        for sample in samples(self.get("/metrics")):
            executor = sample.labels.get("executor")
            name = f"{sample.name}/{executor}" if executor else sample.name
            values[name] = values.get(name, 0.0) + sample.value
        return values

    def settled(self, before: Mapping[str, float] | None = None, last: str = "") -> dict[str, float]:
        """`metrics` after all counts are in, because a server counts shortly after it answers.

        Args:
            before: an earlier reading: wait until `last` has grown since then, at most two seconds.
        """
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        now = self.metrics()
        while time.monotonic() < deadline:
            time.sleep(0.05)
            earlier, now = now, self.metrics()
            counted = before is None or now.get(last, 0.0) > before.get(last, 0.0)
            if counted and all(now[name] == earlier.get(name) for name in now if name in _PER_STEP):
                break
        return now

    def openai(self) -> OpenAI:
        """A client of the server's OpenAI endpoints."""
        client = httpx.Client(trust_env=not self._here, timeout=REQUEST_LIMIT_S)
        return OpenAI(base_url=f"{self.url}/v1", api_key=self._api_key or "none", http_client=client, max_retries=0)

    def generate(self, sampling: Mapping[str, Any], **body: Any) -> dict[str, Any]:
        """Call SGLang's own endpoint.

        Args:
            sampling: sampling parameters, such as temperature and max_new_tokens.
            body: the rest of the request: text or input_ids, return_logprob, and so on.
        """
        reply: dict[str, Any] = self.post("/generate", {**body, "sampling_params": dict(sampling)})
        return reply

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Iterator[Piece]:
        """The outputs of prompts (token ids) that are sent together, as they arrive.

        Raises:
            RequestRefused: the server ended one of them.
        """
        body = {"input_ids": [list(ids) for ids in prompts], "sampling_params": dict(sampling), "stream": True}
        sent = time.perf_counter()
        with self._opened("/generate", body) as reply:
            for line in reply:
                after = time.perf_counter() - sent
                _, colon, text = line.decode().strip().partition("data: ")
                if text == "[DONE]":
                    return
                if not colon:
                    continue
                event = json.loads(text)
                reason = event.get("error") or (event.get("meta_info") or {}).get("finish_reason") or {}
                if "error" in event or reason.get("type") == "abort":
                    raise RequestRefused(str(reason.get("message") or event))
                yield Piece(int(event.get("index", 0)), after, list(event["output_ids"]))
        raise RequestFailed("the server's answer broke off")

    def flush(self) -> None:
        """Empty the radix tree, once the server is idle."""
        for _ in range(50):
            try:
                self.get("/flush_cache")
                return
            except RequestFailed as error:
                if error.status is None:
                    raise
                time.sleep(0.1)  # the last request has answered but is not yet freed
        self.get("/flush_cache")

    def healthy(self) -> bool:
        try:
            self.get("/health", timeout=5)
        except RequestFailed:
            return False
        return True

    def get(self, path: str, timeout: float = 30) -> str:
        """The text at a path."""
        with self._opened(path, timeout=timeout) as reply:
            return str(reply.read().decode(errors="replace"))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer, parsed from JSON. An error has SGLang's own message."""
        with self._opened(path, body) as reply:
            return json.load(reply)

    @contextmanager
    def _opened(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float = REQUEST_LIMIT_S
    ) -> Iterator[Any]:
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            request = urllib.request.Request(self.url + path, data, headers)
            with self._open(request, timeout=timeout) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            if error.code == UNAUTHORIZED:
                how = "with this key" if self._api_key else "without a key"
                raise RequestFailed(
                    f"The server at {self.url} refuses requests {how}; pass its key with --api-key, or in "
                    f"{KEY_VARIABLE}.",
                    error.code,
                ) from error
            said = ""
            with suppress(OSError, http.client.HTTPException):
                said = error.read(_LONGEST_REASON).decode(errors="replace").strip()
            raise RequestFailed(f"{error}: {said}" if said else str(error), error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: no URL, or no JSON.
            raise RequestFailed(str(getattr(error, "reason", None) or error or type(error).__name__)) from error


_PER_STEP = frozenset(
    f"fluxion_{name}_total" for name in ("layers", "middle_tokens", "read_tokens", "tile_bytes", "metadata_bytes")
)
"""Counters that grow in every decode step."""


def samples(text: str) -> Iterator[Sample]:
    """The samples of /metrics; raises ValueError for other text."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def added(before: Mapping[str, float], after: Mapping[str, float], histogram: str) -> float | None:
    """The value that one request added to a histogram between two readings; None if there was not exactly one."""
    names = (f"{histogram}_count", f"{histogram}_sum")
    count, value = (after.get(name, 0.0) - before.get(name, 0.0) for name in names)
    return value if count == 1 else None


@contextmanager
def running_server(
    command: Sequence[str], port: int, environment: Mapping[str, str] | None = None, what: str = "the server"
) -> Iterator[Server]:
    """Start a server on 127.0.0.1, wait until it answers, and stop it at the end in any case.

    Meanwhile signals that end a process raise SystemExit, because the server, in its own session, would survive.

    Args:
        command: the command line (`launch_command`).
        environment: added to this process's.
        what: name of the server in the message about its start.

    Raises:
        ServerError: it ended or hung while starting, or a request failed; the message has the end of its log.
    """
    bypass_proxies()  # a server without the flag also sends requests to itself
    with tempfile.TemporaryFile("w+", errors="replace") as log, exits_at_signals():
        process = subprocess.Popen(
            list(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            server = Server(f"127.0.0.1:{port}")
            _wait_until_ready(server, process, log, what)
            try:
                yield server
            except (RequestFailed, OpenAIError) as error:
                raise ServerError(f"A request failed: {error}\n{_explain(log)}") from error
        finally:
            _stop(process)


def launch_command(model: str, port: int, *flags: str, fluxion: Mapping[str, Any] | None = None) -> list[str]:
    """`python -m sglang.launch_server` for a model.

    Args:
        flags: more words of the command line.
        fluxion: the object of --fluxion-config ({} for the bare flag); None serves without the flag.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port), *flags]
    if fluxion is not None:
        command += ["--enable-fluxion"] + (["--fluxion-config", json.dumps(dict(fluxion))] if fluxion else [])
    return command


def free_port() -> int:
    """A free port, outside the range of outgoing connections, because a server takes a minute to bind it.

    Raises:
        ServerError: none of a hundred was free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No port from {_PORTS[0]} to {_PORTS[-1]} is free; end what listens on them.")


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: IO[str], what: str) -> None:
    start = heard = time.monotonic()
    said = 0  # bytes of its log
    print(f"Starting {what}", flush=True)
    # No bar without a terminal, because it would fill the log.
    with tqdm(bar_format="{elapsed}", file=sys.stdout, leave=False, disable=None) as bar:
        while not server.healthy():
            if process.poll() is not None:
                ended = f"The server ended with exit code {process.returncode}.\n{_explain(log)}"
                raise ServerError(ended, _refusal(log))
            if (size := os.fstat(log.fileno()).st_size) > said:
                said, heard = size, time.monotonic()
            if time.monotonic() - heard > START_LIMIT_S:
                raise ServerError(
                    f"The server does not answer, and has said nothing for {START_LIMIT_S:.0f} s.\n{_explain(log)}"
                )
            time.sleep(0.5)
            bar.update()
    print(f"It answers after {time.monotonic() - start:.0f} s", flush=True)


def _refusal(log: IO[str]) -> str:
    log.seek(0)
    return next((line.removeprefix(_REFUSED).strip() for line in log if line.startswith(_REFUSED)), "")


def _explain(log: IO[str]) -> str:
    log.seek(0)
    lines = log.readlines()
    refusals = [line for line in lines if line.startswith(_REFUSED)]
    told = "".join(f"    {line}" for line in refusals or lines[-_LOG_LINES:])
    return (
        f"{'It said' if refusals else 'The last lines of its log'}:\n{told}\n"
        "Run `fluxion doctor`: it checks versions, native library, hooks and memory, and says what to change."
    )


@contextmanager
def exits_at_signals() -> Iterator[None]:
    """Meanwhile, signals that end a process raise SystemExit, so that its child processes are stopped, too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Keep ignored signals: with nohup the command must outlive its terminal.
    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Signal the whole process group (from start_new_session), because the server has child processes.
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_STOP_LIMIT_S)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        # Also if a second Ctrl-C ended the wait.
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_STOP_LIMIT_S)
