"""`fluxion doctor`: checks the installed versions, their compatibility and the machine, and suggests a next step."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fluxion_sglang import environment
from fluxion_sglang.commands.here import program, shown

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}

GIB = 1 << 30
# Less memory holds only the host pool of a toy model.
_LITTLE_MEMORY = 4 * GIB
_LITTLE_DISK = 2 * GIB
# A container has 64 MiB by default.
_LITTLE_SHARED_MEMORY = GIB // 4

_NAME = "fluxion-sglang"
_NEEDED = {"torch": "torch", "apache-tvm-ffi": "apache-tvm-ffi>=0.1.11,<0.2"}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        status: OK, WARN (works, but not as well as it could) or FAIL (cannot serve with Fluxion).
        found: the result.
        advice: what to do about it; empty for OK.
        command: repairs a FAIL, ready to paste.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    command: str = ""

    @classmethod
    def unless(cls, bad: bool, name: str, found: str, advice: str) -> Check:
        """WARN with the advice if `bad`, else OK."""
        return cls(name, WARN, found, advice) if bad else cls(name, OK, found)


def run_checks() -> list[Check]:
    """Run every check in order. A check that raises is a FAIL and does not stop the others."""
    checks: list[Check] = []
    for group in (_versions, _entry_points, _hooks, _native, _space, _environment, _gpu):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SGLang's warnings about missing accelerators
                checks.extend(group())
        except Exception as error:
            name = group.__name__.strip("_").replace("_", " ")
            found = f"{type(error).__name__}: {error}"
            checks.append(Check(name, FAIL, found, "please report this", f"{program('fluxion')} doctor --json"))
    return checks


def ready(checks: list[Check]) -> bool:
    return all(check.status != FAIL for check in checks)


def next_command(checks: list[Check]) -> str:
    """The command that repairs the first FAIL, or that shows the effect of the flag on a model; ready to paste."""
    for check in checks:
        if check.status == FAIL:
            return check.command
    return f"{program('fluxion')} try {_model()}"


def serve_command(checks: list[Check]) -> str:
    """The command of a server with the flag, adapted to this machine."""
    words = [program("python"), "-m sglang.launch_server --model-path", _model(), "--enable-fluxion"]
    if any(check.name == "gpu" and check.found == _NO_GPU for check in checks):
        # SGLang's default is thousands of rows, and its idle scheduler keeps a core busy.
        words.append("--device cpu --max-running-requests 8 --sleep-on-idle")
    return " ".join(words)


def print_report(checks: list[Check], console: Console) -> None:
    """Print a table on a terminal, else the same words in plain lines. The last line is the command to run next."""
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for check in checks:
            found = Text(check.found)
            if check.advice:
                found.append(f"\n{check.advice}", _STYLES[check.status])
            table.add_row(Text(check.status, _STYLES[check.status]), Text(check.name, "bold"), found)
        console.print(table)
    else:
        for check in checks:
            _line(console, f"{check.status:4}  {check.name:18}  {check.found}")
            if check.advice:
                _line(console, f"{'':26}{check.advice}")
    console.print()
    if ready(checks):
        _line(console, "Ready: add --enable-fluxion to the server.", "bold green")
        _line(console, f"  {serve_command(checks)}\n")
        _line(console, "Next, see what the flag does with a model:", "bold")
    else:
        _line(console, "Not ready: see the lines with FAIL. Run this, and then the doctor again:", "bold red")
    # Not wrapped at any width, because it will be pasted.
    _line(console, f"  {next_command(checks)}")


def print_json(checks: list[Check]) -> None:
    """Print for programs: every check, whether all is well, and the command to run next."""
    report = {
        "ok": ready(checks),
        "checks": [asdict(check) for check in checks],
        "next": next_command(checks),
        "serve": serve_command(checks) if ready(checks) else None,
    }
    print(json.dumps(report, indent=2))


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _install(*words: str, again: bool = False) -> str:
    """The command that installs packages into this environment, with uv if it exists, else pip.

    Args:
        again: reinstall, without dependencies.
    """
    own = Path(sys.executable).with_name("uv")
    uv = "uv" if shutil.which("uv") else shown(own) if own.exists() else None
    python = program("python")
    command = [f"{uv} pip install --python {python}" if uv else f"{python} -m pip install"]
    if again:
        command.append(f"{'--reinstall' if uv else '--force-reinstall'} --no-deps")
    return " ".join([*command, *(shlex.quote(word) for word in words)])


def _reinstall() -> str:
    """The command that builds and installs this package again from its source."""
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        return _install("-e", str(checkout), again=True)
    try:
        origin = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    return _install(str(origin.get("url") or _NAME), again=True)


def _model() -> str:
    """The bundled model in a checkout, else a placeholder."""
    from fluxion_sglang.commands.needle import MODEL

    return shown(MODEL) if MODEL.is_dir() else "MODEL"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Check]:
    from fluxion_sglang.sglang import compat

    python = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", OK, f"{python} ({sys.executable})")
    yield Check(_NAME, OK, _version(_NAME) or "not installed, run from a checkout")
    sglang = _version("sglang")
    if sglang is None:
        yield Check("sglang", FAIL, "not installed", "install a supported version", _install(compat.REQUIREMENT))
    elif (problem := compat.version_problem(sglang)) is not None:
        yield Check("sglang", FAIL, sglang, problem, _install(compat.REQUIREMENT))
    else:
        yield Check("sglang", OK, f"{sglang} (supported: {compat.SUPPORTED})")
    for distribution, requirement in _NEEDED.items():
        version = _version(distribution)
        if version is None:
            yield Check(distribution, FAIL, "not installed", "install it", _install(requirement))
        else:
            yield Check(distribution, OK, version)


def _entry_points() -> Iterator[Check]:
    for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
        if "fluxion" not in [point.name for point in metadata.entry_points(group=group)]:
            found = f"SGLang does not see it in {group}"
            yield Check("plug-in", FAIL, found, "install the package into this environment", _reinstall())
            return
    allowed, platform = os.environ.get("SGLANG_PLUGINS", ""), os.environ.get("SGLANG_PLATFORM", "")
    if allowed and "fluxion" not in [name.strip() for name in allowed.split(",")]:
        mend = f"export SGLANG_PLUGINS={shlex.quote(allowed.strip(', ') + ',fluxion')}"
        yield Check("plug-in", FAIL, f"kept out by SGLANG_PLUGINS={allowed}", "add fluxion to the list", mend)
    elif platform not in ("", "fluxion"):
        advice = "unset it: SGLang finds its platform itself"
        yield Check("plug-in", FAIL, f"kept out by SGLANG_PLATFORM={platform}", advice, "unset SGLANG_PLATFORM")
    else:
        yield Check("plug-in", OK, "entry points found by SGLang")


def _hooks() -> Iterator[Check]:
    if _version("sglang") is None:
        return
    from fluxion_sglang.sglang import compat

    # The same as in every server process; activation stores its failure in `compat`.
    import_problem = compat.import_sglang()
    problems = [import_problem] if import_problem else list(compat.problems())
    for problem in problems:
        found = "this SGLang is not one that the plug-in fits"
        yield Check("hooks", FAIL, found, problem, _install(compat.REQUIREMENT, again=True))
    if not problems:
        yield Check("hooks", OK, f"all {len(compat.NEEDS)} names of SGLang's are as expected")


def _native() -> Iterator[Check]:
    try:
        from fluxion_sglang import native

        native.library()
    except Exception as error:
        mend = "unset FLUXION_LIBRARY" if "FLUXION_LIBRARY" in os.environ else _reinstall()
        yield Check("native library", FAIL, "does not load", str(error), mend)
        return
    yield Check("native library", OK, str(native.library_path()))
    yield from _machine(native.topology())


def _machine(topology: dict[str, Any]) -> Iterator[Check]:
    from fluxion_sglang import native

    chosen, available = topology.get("isa", ""), f"available: {', '.join(topology.get('isas', []))}"
    if error := topology.get("isa_error", ""):
        yield Check("instruction set", FAIL, available, error, "unset FLUXION_ISA")
    else:
        slow = native.without_best_isa(topology)
        if chosen == "scalar" and not slow:
            slow = "decoding will be slow: the kernels are written for AVX2 and AVX-512"
        yield Check.unless(bool(slow), "instruction set", f"{chosen} ({available})", slow)
    cores, nodes = topology.get("cores", []), topology.get("numa", [])
    found = f"{len(cores)} cores on {max(1, len(nodes))} NUMA node{'s' if len(nodes) > 1 else ''}"
    if (quota := topology.get("cpu_quota", -1)) > 0:
        found += f", with the time of {quota:g} by the control group"
    more = "the engine shares its only core with the server; give the process more"
    yield Check.unless(len(cores) < 2, "cores", found, more)
    mode = topology.get("huge_pages", "unknown")
    mend = (
        "reading the host pool costs more TLB misses; as root: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    yield Check.unless(mode not in ("always", "madvise"), "huge pages", mode, mend)
    left, total = topology.get("available_bytes", 0), topology.get("mem_total_bytes", 0)
    limit = topology.get("cgroup_limit_bytes", -1)
    found = f"{left / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if limit >= 0:
        found += f", limited to {limit / GIB:.1f} GiB by the control group"
    small = "the host pool will be small: every token of every request lives in it"
    yield Check.unless(left < _LITTLE_MEMORY, "host memory", found, small)


def _space() -> Iterator[Check]:
    """Free space for model downloads and servers' files, and the memory that processes share."""
    places = [Path(tempfile.gettempdir()), Path(os.environ.get("HF_HOME") or os.path.expanduser("~"))]
    # Both places may be on one disk.
    disks = {place.stat().st_dev: place for place in places if place.is_dir()}
    free = {place: shutil.disk_usage(place).free for place in disks.values()}
    found = ", ".join(f"{size / GIB:.1f} GiB free in {place}" for place, size in free.items())
    advice = "a model or a server's files may not fit: make room, or set TMPDIR and HF_HOME"
    yield Check.unless(min(free.values(), default=0) < _LITTLE_DISK, "disk", found, advice)
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).free if shared.is_dir() else 0
    advice = "ranks of one server talk through it; a container gets more by docker run --shm-size 2g"
    found = f"{size / GIB:.2f} GiB free in {shared}"
    yield Check.unless(size < _LITTLE_SHARED_MEMORY, "shared memory", found, advice)


def _environment() -> Iterator[Check]:
    """Problems of a server's requests to itself, or of its processes' communication; no lines without problems."""
    if (problem := environment.socket_problem()) is not None:
        yield Check("sockets", FAIL, "no server could make them", problem, "export TMPDIR=/tmp")
    if names := environment.proxies():
        found = f"{', '.join(names)} set; servers with the flag and these commands reach this machine without"
        yield Check("proxy", OK, found)


_NO_GPU = "none: the CPU is the device"


def _gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("gpu", OK, _NO_GPU)
        return
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    hide = (
        'hide it from the server and from this command: set CUDA_VISIBLE_DEVICES="" and add --device cpu to the server'
    )
    from fluxion_sglang.device import flashinfer
    from fluxion_sglang.device.library import DeviceError, load

    try:
        library = load("cuda")
        capability = library.info()["capability"]
    except DeviceError as error:
        # Users with a CUDA compiler can build the library; others can serve on the CPU.
        mend = f"FLUXION_CUDA=on {_reinstall()}" if shutil.which("nvcc") else 'export CUDA_VISIBLE_DEVICES=""'
        yield Check("gpu", FAIL, f"{names}: SGLang would serve on it, and Fluxion cannot: {error}", f"or {hide}", mend)
        return
    tried = f"on a GPU only a few prompts have been checked; to serve on the CPU, {hide}"
    yield Check("gpu", WARN, f"{names}; compute capability {capability}", tried)
    try:
        flashinfer.module()
    except DeviceError as error:
        yield Check("flashinfer", FAIL, str(error), command=_install("flashinfer-python"))
    else:
        yield Check("flashinfer", OK, str(_version("flashinfer-python")))
