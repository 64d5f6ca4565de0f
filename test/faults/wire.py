"""Messages between clients and the parts of a server in one process: requests, answers and internal messages."""

from __future__ import annotations

import asyncio
import json
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any


class Died(AssertionError):
    """An exception left a loop; in a real server this ends the process."""


class Stuck(AssertionError):
    """A request has no answer, and no work of the server will produce one."""


class Spoiled(AssertionError):
    """The server runs but is damaged: a leak, a request that is still remembered or was answered twice."""


def trace(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))[-4000:] if error else "it returned"


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Args:
        at: polls of the scheduler's loop before it is sent. hang_up: polls after that until the client leaves.
        raw: the body as bytes, if it differs from the JSON of `body`.
    """

    body: Any = None
    path: str = "/generate"
    at: int = 0
    hang_up: int | None = None
    method: str = "POST"
    raw: bytes | None = None


@dataclass
class Answer:
    """What one client has read. `chunks` are the events of a stream, without the final mark."""

    status: int = 0
    data: Any = None
    chunks: list[Any] = field(default_factory=list)
    whole: bool = False
    """The answer is complete according to HTTP; a stream has its final mark."""
    error: str = ""
    """Exception of the application."""

    @property
    def last(self) -> Any:
        return self.chunks[-1] if self.chunks else self.data

    @property
    def code(self) -> int:
        """Status of the request; for a stream, the status of an error inside it."""
        for chunk in self.chunks[-1:]:
            if isinstance(chunk, dict):
                if isinstance(error := chunk.get("error"), dict):
                    code = error.get("code")
                    return code if isinstance(code, int) else 400
                reason = (chunk.get("meta_info") or {}).get("finish_reason") or {}
                if reason.get("type") == "abort":
                    return int(reason.get("status_code") or 499)
        return self.status

    @property
    def tokens(self) -> list[int]:
        return list(self.last.get("output_ids") or []) if isinstance(self.last, dict) else []

    @property
    def text(self) -> str:
        return str(self.last.get("text")) if isinstance(self.last, dict) else ""

    @property
    def meta(self) -> dict[str, Any]:
        return self.last.get("meta_info", {}) if isinstance(self.last, dict) else {}

    @property
    def reason(self) -> str:
        """The application's exception without its traceback."""
        return self.error.strip().rpartition("\n")[2]

    @property
    def message(self) -> str:
        """The whole answer, for a failed assertion."""
        said = self.last if self.last is not None else self.error
        return (said if isinstance(said, str) else json.dumps(said))[:600]


class _Sent:
    """Result of sending: some of SGLang's code awaits it, some does not."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class Pipe:
    """One direction between two processes: messages are pickled, as SGLang's sockets pickle them."""

    def __init__(self, watch: Callable[[Any], None] = lambda message: None) -> None:
        self.messages: deque[bytes] = deque()
        self._watch = watch

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int = pickle.HIGHEST_PROTOCOL) -> Awaitable[None]:
        self.messages.append(pickle.dumps(message, protocol))
        self._watch(message)
        return _Sent()

    def recv_pyobj(self, flags: int = 0) -> Any:
        return pickle.loads(self.messages.popleft())


class Door(Pipe):
    """Polled by the scheduler: the first poll of a loop's iteration runs a turn of all other parts."""

    def __init__(self, turn: Callable[[], None], watch: Callable[[Any], None]) -> None:
        super().__init__(watch)
        self._turn, self._polled = turn, False

    def recv_pyobj(self, flags: int = 0) -> Any:
        import zmq

        if not self._polled:
            self._polled = True
            self._turn()
        if self.messages:
            return super().recv_pyobj(flags)
        self._polled = False
        raise zmq.Again


class Inbox(Pipe):
    """Queue that the tokenizer manager awaits."""

    def __init__(self, watch: Callable[[Any], None]) -> None:
        super().__init__(watch)
        self._arrived = asyncio.Event()

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int = pickle.HIGHEST_PROTOCOL) -> Awaitable[None]:
        self._arrived.set()
        return super().send_pyobj(message, flags, protocol)

    async def recv_pyobj(self, flags: int = 0) -> Any:
        while not self.messages:
            self._arrived.clear()
            await self._arrived.wait()
        return super().recv_pyobj(flags)


class Client:
    """One HTTP client of the ASGI application."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.answer = Answer()
        self.done = False
        self.gone = asyncio.Event()
        self._sent = False
        self._body = b""

    async def run(self, app: Any) -> None:
        call = self.call
        body = call.raw if call.raw is not None else b"" if call.body is None else json.dumps(call.body).encode()
        self._request = body
        path, _, query = call.path.partition("?")
        headers = [(b"host", b"in.process"), (b"content-type", b"application/json")]
        headers += [(b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": call.method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            self.answer.error = "".join(traceback.format_exception(error))[-3000:]
        finally:
            self._end()

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._request, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self._stream = any(
                name == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body" and not self.done:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                self.answer.whole = True
                self._end()

    def _end(self) -> None:
        """The client is finished. Background tasks of an answer may continue."""
        if self.done:
            return
        self.done = True
        answer = self.answer
        if answer.status and getattr(self, "_stream", False):
            lines = [line for line in self._body.decode().splitlines() if line.startswith("data: ")]
            answer.whole = answer.whole and ("/messages" in self.call.path or lines[-1:] == ["data: [DONE]"])
            answer.chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
        elif self._body:
            text = self._body.decode(errors="replace")
            try:
                answer.data = json.loads(text)
            except ValueError:
                answer.data = text


class Ledger:
    """Final answers by request id, as they pass from the scheduler to the tokenizer manager."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.finals: Counter[str] = Counter()

    def sent(self, message: Any) -> None:
        """Count a request of the tokenizer manager to the scheduler."""
        name = type(message).__name__
        if name.startswith("BatchTokenized"):
            self.asked.update(one.rid for one in message)
        elif name.startswith("Tokenized"):
            self.asked[message.rid] += 1

    def answered(self, message: Any) -> None:
        """Count a message that arrives at the tokenizer manager."""
        name = type(message).__name__
        if name == "AbortReq":
            self.finals[message.rid] += 1
        elif hasattr(message, "finished_reasons"):
            pairs = zip(message.rids, message.finished_reasons, strict=True)
            self.finals.update(rid for rid, reason in pairs if reason is not None)

    def differences(self) -> dict[str, tuple[int, int]]:
        """Ids whose numbers of questions and of final answers differ, with both numbers."""
        rids = self.asked.keys() | self.finals.keys()
        return {rid: (self.asked[rid], self.finals[rid]) for rid in rids if self.asked[rid] != self.finals[rid]}

    def clear(self) -> None:
        self.asked.clear()
        self.finals.clear()
