"""The lab's native library, which needs Fluxion's own in the same process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import tvm_ffi

from fluxion_sglang.native.loading import ABI_VERSION, NativeLibraryError, companion, library_path

_NAME: Final = "libfluxion_lab.so"
_BLOCKING = frozenset({"hgca_establish", "hgca_step", "lfps_begin"})
"""These run long: Python threads go on meanwhile."""


@cache
def _library() -> tvm_ffi.Module:
    """The loaded library.

    Raises:
        NativeLibraryError: it is missing, cannot be loaded, or was built for another version of Fluxion's.
    """
    # One that was built together with a library that is not the package's lies beside that.
    beside = library_path().with_name(_NAME)
    path = beside if beside.is_file() else Path(__file__).parent / "_native" / _NAME
    module = companion(path, "lab")
    version = int(module.get_function("lab_abi_version")())
    if version != ABI_VERSION:
        raise NativeLibraryError(
            f"The library {path} is for ABI version {version} and Fluxion has {ABI_VERSION}; build it "
            "again with `make lab`."
        )
    return module


@cache
def function(name: str) -> Callable[..., Any]:
    """A function of the library; blocking ones release the GIL."""
    bound = _library().get_function(name)
    bound.release_gil = name in _BLOCKING
    return bound  # type: ignore[no-any-return]
