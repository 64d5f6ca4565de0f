"""Loads the native library.

The library does not depend on torch: tensors are passed as DLPack through apache-tvm-ffi.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

ABI_VERSION = 45
"""The required result of the library's `abi_version`."""

_LIBRARY = Path(__file__).parents[1] / "_native" / "libfluxion.so"

# Functions that wait for other threads or run long release the GIL. The others return within microseconds;
# releasing the GIL could cost them a whole switch interval.
_BLOCKING = frozenset(
    {
        "workers_create",
        "pool_create",
        "pool_append",
        "pool_attend_chunk",
        "pool_adopt",
        "pool_fill_window",
        "pool_forget_sums",
        "pool_gather",
        "pool_sweep",
        "measure",
        "layers_experts",
        "layers_experts_quantised",
        "layers_into_huge_pages",
        "layers_linear",
        "layers_linear_quantised",
        "layers_norm",
        "layers_repack",
        "layers_rope",
        "program_run",
        "layers_gate_mul",
        "layers_widen",
        "engine_step",
        "engine_layer_resident",
        "engine_layer_append",
        "engine_layer_newest",
        "engine_layer_finish",
        "engine_abandon",
        "engine_selection",
        "mailbox_wait",
        "mailbox_finish",
        "mailbox_serve",
    }
)


class NativeLibraryError(RuntimeError):
    """The native library is missing, cannot be loaded, or belongs to another version of this package."""


def library_path() -> Path:
    """The path of the library: FLUXION_LIBRARY, or beside this package's files."""
    return Path(os.environ.get("FLUXION_LIBRARY") or _LIBRARY)


def check_complete(path: Path) -> None:
    """Raise OSError unless an ELF file has all its segments. A truncated one would kill the loader (SIGBUS)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            raise OSError("it is no 64-bit ELF library")
        (table,) = struct.unpack_from("<Q", header, 32)
        entry, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = file.read(entry * count)
    if len(segments) < entry * count:
        raise OSError("it is truncated")
    for at in range(0, entry * count, entry):
        (offset,) = struct.unpack_from("<Q", segments, at + 8)
        (length,) = struct.unpack_from("<Q", segments, at + 32)
        if offset + length > size:
            raise OSError("it is truncated")


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@cache
def library() -> tvm_ffi.Module:
    """The loaded library.

    Raises:
        NativeLibraryError: it is missing, cannot be loaded, or has another ABI version.
    """
    path = library_path()
    if not path.is_file():
        raise NativeLibraryError(
            f"The native library {path} does not exist; reinstall fluxion-sglang, or set FLUXION_LIBRARY to "
            "a built libfluxion.so."
        )
    try:
        check_complete(path)
        module = tvm_ffi.load_module(path)
        version = int(module.get_function("abi_version")())
    except Exception as error:
        raise NativeLibraryError(
            f"The native library {path} cannot be loaded ({_reason(error)}); reinstall fluxion-sglang on this "
            "machine, or unset FLUXION_LIBRARY."
        ) from error
    if version != ABI_VERSION:
        raise NativeLibraryError(
            f"The native library {path} has ABI version {version} and this package needs {ABI_VERSION}; "
            "reinstall fluxion-sglang so that both come from the same version, or unset FLUXION_LIBRARY."
        )
    return module


def companion(path: Path, mend: str) -> tvm_ffi.Module:
    """Load a library of another package that calls this one (`csrc/kernels/api.h`).

    Args:
        mend: advice for the error message.

    Raises:
        NativeLibraryError: either library is missing, cannot be loaded, or was built for another version.
    """
    library()  # the loader finds it by its name
    try:
        check_complete(path)
        module = tvm_ffi.load_module(path)
        version = int(module.get_function("companion_abi_version")())
    except Exception as error:
        raise NativeLibraryError(f"The native library {path} cannot be loaded ({_reason(error)}); {mend}.") from error
    if version != ABI_VERSION:
        raise NativeLibraryError(
            f"The native library {path} is for ABI version {version} and Fluxion has {ABI_VERSION}; {mend}."
        )
    return module


@cache
def function(name: str) -> Callable[..., Any]:
    """A function of the library; blocking ones release the GIL."""
    bound = library().get_function(name)
    bound.release_gil = name in _BLOCKING
    return bound  # type: ignore[no-any-return]


def topology(root: str = "", cores: Sequence[int] = ()) -> dict[str, Any]:
    """What this process may use of the machine.

    Args:
        root: a folder with the /sys and /proc of another machine; by default this one's.
        cores: the cores that a process may use there.

    Returns:
        cores (list[int], best first), numa (list of {id, cores}), huge_pages ("always", "madvise", "never",
        "unknown"), cgroup_version (0, 1, 2), cgroup_limit_bytes and cgroup_available_bytes (-1: unlimited), cpu_quota
        (CPU time of the control group in cores, a float; -1: unlimited), spin_us (time that an idle worker spins before
        it sleeps), mem_total_bytes, mem_available_bytes, available_bytes (the smallest limit), isas (list[str], those
        of the library that the CPU runs, best last), isa_of_cpu (the best that the CPU runs), isa (the one in use) and
        isa_error (why there is none, or "").
    """
    report: dict[str, Any] = json.loads(str(function("topology_json")(root, torch.tensor(cores, dtype=torch.int32))))
    return report


def without_best_isa(topology: dict[str, Any]) -> str:
    """Advice, in one sentence, if the library lacks the best instruction set of this CPU; "" otherwise."""
    best, built = topology["isa_of_cpu"], topology["isas"]
    if best in built:
        return ""
    return (
        f"decoding is slow: the native library was built for another machine, without {best}, the best instruction set "
        f"of this CPU (it has {', '.join(built)}); build it on this machine, or with "
        "FLUXION_CMAKE_ARGS=-DFLUXION_ISAS=all"
    )
