"""A server in one process: SGLang's HTTP application, tokenizer manager, scheduler and detokenizer, without sockets.

Each part is SGLang's own and is called as its process calls it: a request enters the ASGI application, the scheduler
runs `run_event_loop` (which calls `dispatch_event_loop`), the tokenizer manager runs `handle_loop`. What stands between
the parts is `Pipe`, which holds the pickles that a socket would carry. The event loop of the scheduler is the clock:
each time it polls for requests, the other parts do all they can do, and `_Stop` leaves it when every answer is there.

`Child` runs such a server in a process of its own, so that a test survives what ends it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import multiprocessing
import os
import pickle
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEEDLE = str(ROOT / "models" / "needle")

CHAT = str(Path(__file__).with_name("chat.jinja"))
"""A chat template for the bundled model, which has none: without one SGLang refuses every chat."""

POOL = 4096
"""Tokens of the host pool."""

PATIENCE_S = 60.0
"""For all answers of one call of `together`."""

START_S = 600.0

MOST_GIB = 8.0
"""A server that grows beyond it is ended: it has two hundred megabytes of weights and KV."""

_QUIET_TURNS = 3
"""Turns without anything to do that a run ends with: the scheduler's idle check has run."""

_LEAST_TURNS = 200
"""Turns that a run takes at least until it counts as stuck: a loaded machine is no failure of the server."""


class Died(AssertionError):
    """An exception left a loop whose end is the end of a server."""


class Stuck(AssertionError):
    """A request has no answer, and nothing that the server does will give it one."""


class Spoiled(AssertionError):
    """The server goes on, and is not what it was: a leak, a request that is remembered or was answered twice."""


class _Stop(BaseException):
    """Leaves the scheduler's loop: all answers are there, or there is an error for `together` to raise."""

    def __init__(self, error: AssertionError | None = None) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Args:
        at: polls of the scheduler's loop before it is sent. hang_up: polls after that until the client leaves.
        raw: the body as it is sent, where JSON of `body` would not be it.
    """

    body: Any = None
    path: str = "/generate"
    at: int = 0
    hang_up: int | None = None
    method: str = "POST"
    raw: bytes | None = None


@dataclass
class Answer:
    """What one client has read. `chunks` are the events of a stream, the mark of its end left out."""

    status: int = 0
    data: Any = None
    chunks: list[Any] = field(default_factory=list)
    whole: bool = False
    """The answer ended as HTTP wants it: a stream with its mark."""
    error: str = ""
    """What the application raised."""

    @property
    def last(self) -> Any:
        return self.chunks[-1] if self.chunks else self.data

    @property
    def code(self) -> int:
        """The status that tells how the request went: of a stream, the one of an error within it."""
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
        """What the application raised, without where."""
        return self.error.strip().rpartition("\n")[2]

    @property
    def message(self) -> str:
        """All that the answer says, for a failed assertion."""
        said = self.last if self.last is not None else self.error
        return (said if isinstance(said, str) else json.dumps(said))[:600]


def _trace(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))[-4000:] if error else "it returned"


class _Sent:
    """What sending gives: some of SGLang's code waits for it, some does not."""

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


class _Door(Pipe):
    """What the scheduler polls: the first poll of a loop's iteration is a turn of all other parts."""

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


class _Inbox(Pipe):
    """What the tokenizer manager waits for."""

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


class _Client:
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
        """The client has all it will get. Tasks in the background of an answer may go on."""
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
    """Final answers by request id, as they cross from the scheduler to the tokenizer manager."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.finals: Counter[str] = Counter()

    def sent(self, message: Any) -> None:
        """What the tokenizer manager asks of the scheduler."""
        name = type(message).__name__
        if name.startswith("BatchTokenized"):
            self.asked.update(one.rid for one in message)
        elif name.startswith("Tokenized"):
            self.asked[message.rid] += 1

    def answered(self, message: Any) -> None:
        """What arrives at the tokenizer manager."""
        name = type(message).__name__
        if name == "AbortReq":
            self.finals[message.rid] += 1
        elif hasattr(message, "finished_reasons"):
            pairs = zip(message.rids, message.finished_reasons, strict=True)
            self.finals.update(rid for rid, reason in pairs if reason is not None)

    def differences(self) -> dict[str, tuple[int, int]]:
        """Ids with as many questions and as many final answers, where these differ."""
        rids = self.asked.keys() | self.finals.keys()
        return {rid: (self.asked[rid], self.finals[rid]) for rid in rids if self.asked[rid] != self.finals[rid]}

    def clear(self) -> None:
        self.asked.clear()
        self.finals.clear()


def _pin_nothing() -> None:
    """SGLang's adapters pin host memory, which PyTorch does for an accelerator alone; a CPU has no use for it."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor


class InProcess:
    """A server with the given command line flags.

    Args:
        config: entries of --fluxion-config. fluxion: whether the flag is there at all.
    """

    def __init__(
        self,
        *flags: str,
        config: dict[str, Any] | None = None,
        fluxion: bool = True,
        model: str = NEEDLE,
        patience: float = PATIENCE_S,
    ) -> None:
        import torch
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if "--enable-lora" in flags:
            _pin_nothing()
        from sglang.srt.server_args import PortArgs, prepare_server_args
        from sglang.srt.utils import set_prometheus_multiproc_dir

        set_prometheus_multiproc_dir()

        words = ["--model-path", model, "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
        words += ["--mem-fraction-static", "0.4", "--log-level", "error", "--skip-server-warmup", "--enable-metrics"]
        words += [] if "--max-running-requests" in flags else ["--max-running-requests", "8"]
        words += [] if "--max-total-tokens" in flags or fluxion else ["--max-total-tokens", str(POOL)]
        if fluxion:
            words += ["--enable-fluxion", "--fluxion-config", json.dumps({"host_tokens": POOL, **(config or {})})]
        self.args = prepare_server_args([*words, *flags])
        self.patience = patience
        self.canary = bool(config and config.get("canary"))
        self.alone: dict[int, Answer] = {}
        """Neighbours' answers without anybody beside them (see `scenes`)."""
        self.ledger = Ledger()
        self.leaks: list[str] = []
        self.turns = 0
        self._clients: list[_Client] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[_Client] = []
        self._deadline = 0.0
        self._first = self._quiet = 0
        self.loop = asyncio.SelectorEventLoop()  # uvloop does not say what is ready
        asyncio.set_event_loop(self.loop)
        torch.set_grad_enabled(False)
        ports = PortArgs.init_new(self.args)
        self._make_scheduler(ports)
        self._make_detokenizer()
        self._make_tokenizer_manager(ports)
        self._make_application()

    def _make_scheduler(self, ports: Any) -> None:
        from sglang.srt.managers import scheduler as module
        from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker as Checker
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = scheduler = module.Scheduler(self.args, ports)
        self.door = _Door(self._turn, self.ledger.sent)
        self.to_detokenizer = Pipe()
        self.to_tokenizer = _Inbox(self.ledger.answered)
        object.__setattr__(scheduler.request_receiver, "recv_from_tokenizer", self.door)
        scheduler.ipc_channels.send_to_detokenizer.socket = self.to_detokenizer
        scheduler.ipc_channels.send_to_tokenizer.socket = self.to_tokenizer

        report = Checker._report_leak

        def noted(checker: Any, pool: str, message: str) -> None:
            self.leaks.append(f"{pool}: {message}")
            report(checker, pool, message)

        Checker._report_leak = noted

    def _make_detokenizer(self) -> None:
        from sglang.srt.managers import detokenizer_manager as module

        module.start_cpu_monitor_thread = lambda *names: None
        self.detokenizer = detokenizer = object.__new__(module.DetokenizerManager)
        detokenizer.init_tokenizer(self.args)
        detokenizer.init_running_status(self.args)
        detokenizer.init_request_dispatcher()

    def _make_tokenizer_manager(self, ports: Any) -> None:
        from sglang.srt.managers import tokenizer_manager as module

        module.assert_published = lambda *args, **kwargs: None  # this process has the scheduler's role, too
        module.start_cpu_monitor_thread = lambda *names: None
        server = self

        class Manager(module.TokenizerManager):
            def init_ipc_channels(self, ports: Any) -> None:
                self.tokenizer_ipc_name = None
                self.send_to_scheduler = server.door
                self.recv_from_detokenizer = server.to_tokenizer

            def auto_create_handle_loop(self) -> None:
                """It runs already, and this process keeps its signals."""

        self.manager = manager = Manager(self.args, ports, start_pd_bootstrap_service=False)
        manager.crash_dump_folder = None
        manager.max_req_input_len = self.scheduler.max_req_input_len
        manager.event_loop = self.loop
        self._handle_loop = self.loop.create_task(manager.handle_loop())

    def _make_application(self) -> None:
        from sglang.srt.entrypoints import http_server as module

        templates = module.TemplateManager()
        templates.initialize_templates(
            tokenizer_manager=self.manager,
            model_path=self.args.model_path,
            chat_template=CHAT,
            completion_template=None,
        )
        state = module._GlobalState(self.manager, templates, self.scheduler.get_init_info())
        module.set_global_state(state)
        module._wait_and_warmup = lambda **kwargs: None
        self.app = app = module.app
        app.is_single_tokenizer_mode, app.server_args, app.warmup_thread_kwargs = True, self.args, {}
        self._lifespan = module.lifespan(app)
        self.loop.run_until_complete(self._lifespan.__aenter__())
        self.manager.server_status = module.ServerStatus.Up

    # --- One run of the scheduler's loop.

    def together(self, calls: Sequence[Call], patience: float | None = None) -> list[Answer]:
        """The answers to requests that are sent in one run of the loop, which ends when the server is idle.

        Raises:
            Died: a loop ended. Stuck: an answer is missing after `patience` seconds.
        """
        self._clients = [_Client(call) for call in calls]
        self._waiting = list(self._clients)
        self._first = self.turns
        self._deadline = time.monotonic() + (patience or self.patience)
        try:
            self.scheduler.run_event_loop()
        except _Stop as stop:
            if stop.error is not None:
                raise stop.error from None
        except Exception as error:
            raise Died("the scheduler's loop: " + _trace(error)) from error
        else:
            raise Died("the scheduler's loop returned")
        return [client.answer for client in self._clients]

    def _turn(self) -> None:
        """What the other processes do while the scheduler makes one pass."""
        self.turns += 1
        now = self.turns - self._first
        for client in list(self._waiting):
            if client.call.at < now:
                self._waiting.remove(client)
                task = self.loop.create_task(client.run(self.app))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for client in self._clients:
            if client.call.hang_up is not None and client.call.at + client.call.hang_up < now:
                client.gone.set()
        self._detokenize()
        self._pump()
        if self._handle_loop.done():
            raise _Stop(Died("the tokenizer manager's loop: " + _trace(self._handle_loop.exception())))
        self._quiet = self._quiet + 1 if self._idle() else 0
        if self._quiet >= _QUIET_TURNS and self._answered():
            raise _Stop
        if self._quiet:
            time.sleep(0.001)
        if time.monotonic() > self._deadline and now > _LEAST_TURNS:
            raise _Stop(Stuck(self._stuck()))

    def _detokenize(self) -> None:
        while self.to_detokenizer.messages:
            message = self.to_detokenizer.recv_pyobj()
            try:
                output = self.detokenizer._request_dispatcher(message)
            except Exception as error:
                raise _Stop(Died("the detokenizer: " + _trace(error))) from error
            if output is not None:
                self.to_tokenizer.send_pyobj(output)

    def _pump(self) -> None:
        """Run the asyncio loop until nothing in it is ready."""
        for _ in range(10_000):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if not self.loop._ready:  # type: ignore[attr-defined]
                return

    def _answered(self) -> bool:
        return not self._waiting and all(client.done or client.gone.is_set() for client in self._clients)

    def _idle(self) -> bool:
        scheduler = self.scheduler
        return (
            not self.door.messages
            and not self.to_detokenizer.messages
            and not getattr(scheduler, "result_queue", None)
            and not scheduler.last_batch
            and scheduler.is_fully_idle()
        )

    def _stuck(self) -> str:
        scheduler = self.scheduler
        silent = [client.call for client in self._clients if not client.done]
        running = scheduler.running_batch.batch_size() if scheduler.running_batch else 0
        return (
            f"no answer to {silent[:3]!r}; {len(scheduler.waiting_queue)} requests wait, {running} run, "
            f"{len(scheduler.grammar_manager.grammar_queue)} wait for a grammar"
        )

    # --- What tests ask.

    def ask(self, body: Any = None, path: str = "/generate", **call: Any) -> Answer:
        """The answer to one request, alone."""
        return self.together([Call(body, path, **call)])[0]

    def open_session(self, **body: Any) -> str:
        return str(self.ask({"capacity_of_str_len": 100_000, **body}, "/open_session").data)

    def close_session(self, name: str) -> None:
        self.ask({"session_id": name}, "/close_session")

    def idle_check(self) -> None:
        """Raise Spoiled unless nothing is lost: SGLang's own idle check finds no leak, no prefix is locked, each
        request got one final answer, none is remembered, and the host pool holds what was written there (with the
        option canary)."""
        self.together([])
        leaks, self.leaks = self.leaks, []
        cache = self.scheduler.tree_cache
        if not cache.session_records() and (locked := cache.full_protected_size()):
            leaks.append(f"{locked} tokens of prefixes are locked")
        differences = self.ledger.differences()
        self.ledger.clear()
        kept = list(self.manager.rid_to_state)
        if leaks or differences or kept:
            raise Spoiled(f"leaks {leaks}; rid: (asked, final answers) {differences}; remembered for ever {kept}")
        if self.canary:
            params = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"fluxion_check": True}}
            answer = self.ask({"input_ids": [1, 2, 3], "sampling_params": params})
            if answer.code != 200:
                raise Spoiled(answer.message)

    def flush(self) -> None:
        answer = self.ask(None, "/flush_cache")
        assert answer.status == 200, answer.message


# --- A server in a process of its own.


def resident_gib(pid: int | str = "self") -> float:
    """What a process holds in memory; 0 of one that ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def _serve(connection: Any, log: str, flags: tuple[str, ...], options: dict[str, Any]) -> None:
    """The child's side: make a server, and call what the parent names with it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    server: InProcess | None = None

    def reply(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
        try:
            return "value", function(*args)
        except (Died, Stuck, Spoiled) as error:
            return type(error).__name__, str(error)
        except BaseException as error:
            return "error", _trace(error)

    def start() -> None:
        nonlocal server
        server = InProcess(*flags, **options)

    connection.send(reply(start))
    while server is not None:
        function, args, patience = connection.recv()
        faulthandler.dump_traceback_later(patience, file=descriptor)
        answer = reply(function, server, *args)
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


class Child:
    """`InProcess` in a process of its own, which is started again after what it did not survive.

    Args:
        flags, options: as of `InProcess`. log: the file of what it prints.
    """

    def __init__(self, *flags: str, log: Path, env: dict[str, str] | None = None, **options: Any) -> None:
        self._flags, self._options, self._log, self._env = flags, options, log, env or {}
        self._process: Any = None
        self.starts = 0

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        keep = {name: os.environ.get(name) for name in self._environment()}
        os.environ.update(self._environment())
        try:
            words = (theirs, str(self._log), self._flags, self._options)
            self._process = context.Process(target=_serve, args=words, daemon=True)
            self._process.start()
        finally:
            for name, value in keep.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        theirs.close()
        self.starts += 1
        self._reply(START_S)

    def _environment(self) -> dict[str, str]:
        return {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **self._env}

    def run(self, function: Callable[..., Any], *args: Any, patience: float = 2 * PATIENCE_S) -> Any:
        """`function(server, *args)` in the server's process; the function is named, so it is one of a module.

        Raises:
            AssertionError: an assertion in the function failed, or the server did not survive it: the next call starts
                another.
        """
        if self._process is None:
            self.start()
        self._connection.send((function, args, patience))
        return self._reply(patience + 15)

    def _reply(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        kind, value = "Stuck", f"the process of the server does not come back in {seconds:.0f} s"
        while time.monotonic() < deadline and kind == "Stuck":
            try:
                if self._connection.poll(0.5):
                    kind, value = self._connection.recv()
            except (EOFError, ConnectionError):
                kind, value = "Died", "the process of the server ended"
            if self._process.is_alive() and resident_gib(self._process.pid) > MOST_GIB:
                kind, value = "Died", f"the process of the server grew beyond {MOST_GIB} GiB"
        if kind == "value":
            return value
        if kind == "error":
            raise AssertionError(value)
        self.stop()
        raise {"Died": Died, "Stuck": Stuck, "Spoiled": Spoiled}[kind](
            f"{value}\nIts log ends with:\n{self.log()[-3000:]}"
        )

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
