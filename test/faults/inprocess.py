"""A server in one process: SGLang's HTTP application, tokenizer manager, scheduler and detokenizer, without sockets.

Each part is SGLang's own and is called as its process calls it: a request enters the ASGI application, the scheduler
runs `run_event_loop` (which calls `dispatch_event_loop`), and the tokenizer manager runs `handle_loop`. A `Pipe`
between the parts holds the pickles that a socket would carry. The event loop of the scheduler is the clock: each time
it polls for requests, the other parts do all available work. `_Stop` leaves the loop when every answer has arrived.

`Child` (child.py) runs such a server in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults.wire import Answer, Call, Client, Died, Door, Inbox, Ledger, Pipe, Spoiled, Stuck, trace
from places import NEEDLE

CHAT = str(Path(__file__).with_name("chat.jinja"))
"""A chat template for the bundled model, which has none; without one SGLang refuses every chat."""

POOL = 4096
"""Tokens of the host pool."""

PATIENCE_S = 60.0
"""Seconds for all answers of one call of `together`."""

_QUIET_TURNS = 3
"""A run ends after this many turns without work; the scheduler's idle check has run by then."""

_LEAST_TURNS = 200
"""Minimum turns before a run counts as stuck: a loaded machine is no failure of the server."""


class _Stop(BaseException):
    """Leaves the scheduler's loop: all answers have arrived, or `together` has an error to raise."""

    def __init__(self, error: AssertionError | None = None) -> None:
        super().__init__()
        self.error = error


def _pin_nothing() -> None:
    """SGLang's adapters pin host memory, which PyTorch supports only for accelerators; a CPU does not need it."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor


class InProcess:
    """A server with the given command line flags.

    Args:
        config: entries of --fluxion-config. fluxion: whether the flag is set.
    """

    def __init__(
        self, *flags: str, config: dict[str, Any] | None = None, fluxion: bool = True, model: str = NEEDLE,
        patience: float = PATIENCE_S,
    ) -> None:  # fmt: skip
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
        """Answers of the neighbours when they run alone (see `scenes`)."""
        self.ledger = Ledger()
        self.leaks: list[str] = []
        self.turns = 0
        self._clients: list[Client] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[Client] = []
        self._deadline = 0.0
        self._first = self._quiet = 0
        self.loop = asyncio.SelectorEventLoop()  # uvloop does not show which handles are ready
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
        self.door = Door(self._turn, self.ledger.sent)
        self.to_detokenizer = Pipe()
        self.to_tokenizer = Inbox(self.ledger.answered)
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
                """The loop already runs, and this process keeps its signals."""

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
        """Send requests in one run of the loop, which ends when the server is idle; return their answers.

        Raises:
            Died: a loop ended. Stuck: an answer is missing after `patience` seconds.
        """
        self._clients = [Client(call) for call in calls]
        self._waiting = list(self._clients)
        self._first = self.turns
        self._deadline = time.monotonic() + (patience or self.patience)
        try:
            self.scheduler.run_event_loop()
        except _Stop as stop:
            if stop.error is not None:
                raise stop.error from None
        except Exception as error:
            raise Died("the scheduler's loop: " + trace(error)) from error
        else:
            raise Died("the scheduler's loop returned")
        return [client.answer for client in self._clients]

    def _turn(self) -> None:
        """The work of the other processes during one pass of the scheduler."""
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
            raise _Stop(Died("the tokenizer manager's loop: " + trace(self._handle_loop.exception())))
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
                raise _Stop(Died("the detokenizer: " + trace(error))) from error
            if output is not None:
                self.to_tokenizer.send_pyobj(output)

    def _pump(self) -> None:
        """Run the asyncio loop until no handle is ready."""
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

    # --- Used by tests.

    def ask(self, body: Any = None, path: str = "/generate", **call: Any) -> Answer:
        """The answer to a single request."""
        return self.together([Call(body, path, **call)])[0]

    def open_session(self, **body: Any) -> str:
        return str(self.ask({"capacity_of_str_len": 100_000, **body}, "/open_session").data)

    def close_session(self, name: str) -> None:
        self.ask({"session_id": name}, "/close_session")

    def idle_check(self) -> None:
        """Raise Spoiled if something is lost: SGLang's idle check finds a leak, a prefix is locked, a request did not
        get exactly one final answer or is still remembered, or the host pool differs from what was written (with the
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
