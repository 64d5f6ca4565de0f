"""Run programs as forks of a process that has imported SGLang.

Importing SGLang takes most of a server's start, in each of its three processes. A fork server (multiprocessing's, one
per pytest process) imports it once. A program here is a fork of it, and the processes that SGLang would spawn are forks
of the program. Tests of starting, dying and killing use `python -m` instead.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

_IMPORTS = [
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
]
PATIENCE_S = 1800
"""Seconds to wait for a program's end; on an idle machine it takes seconds."""

_READ_AT_IMPORT = ("TEST_RETRACT", "TEST_RETRACT_INTERVAL", "TEST_RETRACT_NO_PREFILL_BS")
"""Environment variables that the scheduler's module reads at import."""

_context = multiprocessing.get_context("forkserver")


class Forked:
    """A program in a session of its own, with the parts of `subprocess.Popen` that tests use.

    Args:
        words: arguments of `python`: `-m` and a module, or a script, then its arguments.
        more: environment variables in addition to this process's. out, err: files for its output. given: its standard
            input.
    """

    def __init__(self, words: list[str], more: Mapping[str, str], out: Path, err: Path, given: str = "") -> None:
        if forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
            _start()
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **more}
        work = (words, env, str(out), str(err), given)
        self._process = _context.Process(target=_run, args=work)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked program", timeout)
        return self._process.exitcode


def run(*words: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, like `subprocess.run` with captured output. environment: added to this process's."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = Forked(list(words), environment, out, err, given)
        code = process.wait(PATIENCE_S)
        texts = [path.read_text("utf-8", "replace") for path in (out, err)]
        return subprocess.CompletedProcess(words, code, *texts)


def _start() -> None:
    """Start the fork server. OpenMP's runtime, which `import torch` loads, reads its environment variables then."""
    from fluxion_sglang.openmp import wait_passively

    before = dict(os.environ)
    wait_passively()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _context.set_forkserver_preload(_IMPORTS)
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


def _run(words: list[str], env: dict[str, str], out: str, err: str, given: str) -> None:
    os.setsid()
    for name, descriptor in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.stdin = io.StringIO(given)
    scheduler, environ = sys.modules["sglang.srt.managers.scheduler"], sys.modules["sglang.srt.environ"]
    for name in _READ_AT_IMPORT:
        setattr(scheduler, name, getattr(environ.envs, f"SGLANG_{name}").get())
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *method, **force: None
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # as at the exit of an interpreter: SGLang's errors may have a hook
        sys.exit(1)
