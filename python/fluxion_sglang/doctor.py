"""The checks of `fluxion doctor`: what is installed, whether it fits together, what the machine offers."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

OK, WARN, FAIL = "OK", "WARN", "FAIL"

GIB = 1 << 30
# Less than this holds the host pool of a toy model only.
_LITTLE_MEMORY = 4 * GIB


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        status: OK, WARN (works, but not as well as it could) or FAIL (cannot serve with Fluxion).
        found: what is there.
        advice: what to do about it; empty for OK.
    """

    name: str
    status: str
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def run_checks() -> list[Check]:
    """Every check in order. A check that breaks is a FAIL of its own and does not stop the others."""
    checks: list[Check] = []
    for group in (_versions, _entry_points, _hooks, _native, _gpu):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SGLang's, about accelerators that are not there
                checks.extend(group())
        except Exception as error:
            name = group.__name__.strip("_").replace("_", " ")
            checks.append(Check(name, FAIL, f"{type(error).__name__}: {error}", "please report this"))
    return checks


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Check]:
    from fluxion_sglang.sglang import compat

    python = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", OK, f"{python} ({sys.executable})")
    yield Check("fluxion-sglang", OK, _version("fluxion-sglang") or "not installed, run from a checkout")
    sglang = _version("sglang")
    if sglang is None:
        yield Check("sglang", FAIL, "not installed", "pip install 'sglang>=0.5.22,<0.5.24'")
    elif (problem := compat.version_problem(sglang)) is not None:
        yield Check("sglang", FAIL, sglang, problem)
    else:
        yield Check("sglang", OK, f"{sglang} (supported: {compat.SUPPORTED})")
    for distribution in ("torch", "apache-tvm-ffi"):
        version = _version(distribution)
        if version is None:
            yield Check(distribution, FAIL, "not installed", f"pip install {distribution}")
        else:
            yield Check(distribution, OK, version)


def _entry_points() -> Iterator[Check]:
    for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
        names = [point.name for point in metadata.entry_points(group=group)]
        if "fluxion" not in names:
            yield Check(
                "plug-in",
                FAIL,
                f"SGLang does not see it in {group}",
                f"install the package into this environment: {sys.executable} -m pip install fluxion-sglang",
            )
            return
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if allowed and "fluxion" not in [name.strip() for name in allowed.split(",")]:
        yield Check("plug-in", FAIL, f"kept out by SGLANG_PLUGINS={allowed}", "add fluxion to the list")
    elif platform not in ("", "fluxion"):
        yield Check(
            "plug-in",
            FAIL,
            f"kept out by SGLANG_PLATFORM={platform}",
            "unset it: SGLang finds its platform itself",
        )
    else:
        yield Check("plug-in", OK, "entry points found by SGLang")


def _hooks() -> Iterator[Check]:
    if _version("sglang") is None:
        return
    from fluxion_sglang.sglang import compat

    # What every process of a server does; activation leaves its failure in `compat`.
    import_problem = compat.import_sglang()
    problems = [import_problem] if import_problem else list(compat.problems())
    for problem in problems:
        yield Check("hooks", FAIL, "this SGLang is not one that the plug-in fits", problem)
    if not problems:
        yield Check("hooks", OK, f"all {len(compat.NEEDS)} names of SGLang's are as expected")


def _native() -> Iterator[Check]:
    try:
        from fluxion_sglang import native

        native.library()
    except Exception as error:
        yield Check("native library", FAIL, "does not load", str(error))
        return
    yield Check("native library", OK, str(native.library_path()))
    topology = native.topology()
    for check in (_isa, _cores, _huge_pages, _memory):
        yield check(topology)


def _isa(topology: dict[str, Any]) -> Check:
    chosen, available = topology.get("isa", ""), ", ".join(topology.get("isas", []))
    if error := topology.get("isa_error", ""):
        return Check("instruction set", FAIL, f"available: {available}", error)
    if chosen == "scalar":
        return Check(
            "instruction set",
            WARN,
            f"scalar (available: {available})",
            "decoding will be slow: the kernels are written for AVX2 and AVX-512",
        )
    return Check("instruction set", OK, f"{chosen} (available: {available})")


def _cores(topology: dict[str, Any]) -> Check:
    cores, nodes = topology.get("cores", []), topology.get("numa", [])
    found = f"{len(cores)} cores on {max(1, len(nodes))} NUMA node{'s' if len(nodes) > 1 else ''}"
    if len(cores) < 2:
        return Check("cores", WARN, found, "the engine shares its only core with the server; give the process more")
    return Check("cores", OK, found)


def _huge_pages(topology: dict[str, Any]) -> Check:
    mode = topology.get("huge_pages", "unknown")
    if mode in ("always", "madvise"):
        return Check("huge pages", OK, mode)
    return Check(
        "huge pages",
        WARN,
        mode,
        "reading the host pool costs more TLB misses; as root: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _memory(topology: dict[str, Any]) -> Check:
    available, total = topology.get("available_bytes", 0), topology.get("mem_total_bytes", 0)
    limit = topology.get("cgroup_limit_bytes", -1)
    found = f"{available / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if limit >= 0:
        found += f", limited to {limit / GIB:.1f} GiB by the control group"
    if available < _LITTLE_MEMORY:
        return Check(
            "host memory",
            WARN,
            found,
            "the host pool will be small: every token of every request lives in it",
        )
    return Check("host memory", OK, found)


def _gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("gpu", OK, "none: the CPU is the device")
        return
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    hide = (
        'hide it from the server and from this command: set CUDA_VISIBLE_DEVICES="" and add --device cpu to the server'
    )
    from fluxion_sglang.device import flashinfer
    from fluxion_sglang.device.library import DeviceError, load

    try:
        library = load("cuda").info()
    except DeviceError as error:
        yield Check("gpu", FAIL, f"{names}: SGLang would serve on it, and Fluxion cannot: {error}", f"or {hide}")
        return
    yield Check("gpu", OK, f"{names}; compute capability {library['capability']}")
    if flashinfer.module() is None:
        yield Check(
            "flashinfer",
            WARN,
            "not installed, or does not import",
            "prefill attends by plain products, which is slow: pip install flashinfer-python",
        )
    else:
        yield Check("flashinfer", OK, str(_version("flashinfer-python")))
