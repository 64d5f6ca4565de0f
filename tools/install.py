"""Installs everything into .venv: SGLang with its dependencies, and the native library, both at the same time.

`make` runs this with any Python 3.11 to 3.13 of the machine, so it uses only the standard library. Packages are
installed with uv, which takes a tenth of pip's time; if uv is unavailable, with pip.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# uv must use the system's certificates, as pip and browsers do: machines behind a proxy have their own.
os.environ.setdefault("UV_SYSTEM_CERTS", "1")

QUIET_S = 15.0
"""Seconds between two lines of progress without a terminal."""


class Failed(Exception):
    """A step failed; the message is for the user."""


class Task:
    """A command that runs in the background, its output in a file."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a compiler has child processes
            )

    def lines(self) -> list[str]:
        return [line for line in re.split(r"[\r\n]+", self.log.read_text(errors="replace")) if line.strip()]

    def warnings(self) -> list[str]:
        """A compiler's warnings. Continuous integration treats them as errors, so developers must see them."""
        return [line for line in self.lines() if re.search(r":\d+: warning: ", line)]

    def failure(self) -> str:
        told = "\n".join(f"    {line}" for line in self.lines()[-30:])
        return f"{told}\nerror: {self.name} failed; the whole log is in {self.log.relative_to(ROOT)}"


def installer() -> list[str]:
    """The command that installs packages into .venv. It first installs the build requirements of the native library.

    They go into .venv, not into a build environment, so that the library is built in place and incrementally.
    """
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON)]
    try:
        if not Path(uv[0]).exists():
            call([*pip, "-q", "uv"])
        call([*uv, "-q", *build])
        return uv
    except Failed as error:
        print(f"{error}\nuv does not work here; pip installs the packages, which takes minutes longer.", flush=True)
        call([*pip, "-q", *build])
        return pip


def packages(install: list[str], extras: str) -> Task:
    """Install this package in editable form, or that of `lab`; the native library is built in parallel (`native`).

    Its metadata is built in an isolated environment: setuptools runs plug-ins of other packages, and in .venv their
    dependencies may be missing until everything is installed.
    """
    what = "python/fluxion_lab" if extras == "lab" else f".[{extras}]" if extras else "."
    command = [*install, "-e", what]
    return Task("installing packages", command, VENV / "install.log", {"FLUXION_SKIP_NATIVE": "1"})


def native() -> Task:
    command = [str(PYTHON), "setup.py", "-q", "build_ext", "--inplace"]
    return Task("building the native library", command, VENV / "build.log", {"NINJA_STATUS": "[%f/%t] "})


def packages_progress(lines: list[str]) -> str:
    """The current step of uv or pip."""
    started = [line.split()[1] for line in lines if line.startswith("Downloading ")]
    ended = {line.split()[1] for line in lines if re.match(r"\s*Downloaded ", line)}
    waiting = [name for name in started if name not in ended]
    if any(line.startswith("Prepared ") for line in lines):
        return "packages: putting them in place"
    if started and len(ended) < len(started):
        return f"packages: downloading {', '.join(waiting[:3])}" + (", ..." if len(waiting) > 3 else "")
    collected = [line.split()[1] for line in lines if line.startswith("Collecting ")]
    return f"packages: {collected[-1]}" if collected else "packages: resolving"


def native_progress(lines: list[str]) -> str:
    """The number of files that ninja has compiled."""
    counts = [match for line in lines if (match := re.match(r"\[(\d+)/(\d+)\]", line))]
    return f"native library: {counts[-1][1]} of {counts[-1][2]} steps" if counts else "native library: configuring"


def watch(tasks: dict[Task, Callable[[list[str]], str]]) -> None:
    """Show progress until all tasks are done.

    Raises:
        Failed: one of them failed; the others were stopped.
    """
    start = said = time.monotonic()
    terminal = sys.stdout.isatty()
    running = dict(tasks)
    found: list[str] = []
    try:
        while running:
            time.sleep(0.2)
            for task in list(running):
                code = task.process.poll()
                if code:
                    raise Failed(task.failure())
                if code == 0:
                    del running[task]
                    found += task.warnings()
            now = time.monotonic()
            status = f"  {now - start:4.0f} s  " + "; ".join(show(task.lines()) for task, show in running.items())
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r{status[:width]:<{width}}", end="", flush=True)
            elif running and now - said >= QUIET_S:
                print(status, flush=True)
                said = now
    finally:
        if terminal:
            print("\r\x1b[K", end="")
        for task in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.process.pid, signal.SIGTERM)
            task.process.wait()
    print("".join(f"{line}\n" for line in found), end="", flush=True)


def call(command: list[str], environment: dict[str, str] | None = None) -> str:
    """The output of a command.

    Raises:
        Failed: it ended with an error; the message has its output.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{done.stdout}\nerror: {' '.join(command)} failed")
    return done.stdout


def make_venv() -> None:
    if not (VENV / "bin" / "pip").exists():
        try:
            call([sys.executable, "-m", "venv", str(VENV)])
        except Failed as error:
            raise Failed(
                f"error: {sys.executable} cannot make a virtual environment ({str(error).strip()}); install its venv "
                "module (Debian: apt-get install python3-venv)"
            ) from error


def install_everything(extras: str) -> None:
    start = time.monotonic()
    print("Installing SGLang, PyTorch and the native library into .venv: 11 GB of disk, minutes, once", flush=True)
    make_venv()
    watch({packages(installer(), extras): packages_progress, native(): native_progress})
    print(f"Installed in {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", action="store_true", help="build the native library alone")
    parser.add_argument(
        "--extras", default="", help="extras of this package, as in dev or docs,bench, or lab: fluxion-lab"
    )
    arguments = parser.parse_args()
    try:
        if arguments.native:
            print("Building the native library", flush=True)
            watch({native(): native_progress})
        elif arguments.extras and PYTHON.exists():
            print(f"Installing what {arguments.extras} needs", flush=True)
            watch({packages(installer(), arguments.extras): packages_progress})
        else:
            install_everything(arguments.extras)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
