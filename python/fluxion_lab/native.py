"""The lab's native library, which needs Fluxion's native library in the same process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import tvm_ffi

from fluxion_sglang.native import companion, library_path

_NAME: Final = "libfluxion_lab.so"
_BLOCKING = frozenset({"hgca_establish", "hgca_step", "lfps_begin"})
"""Long-running functions; they release the GIL."""


@cache
def _library() -> tvm_ffi.Module:
    """The loaded library.

    Raises:
        NativeLibraryError: it is missing, cannot be loaded, or was built for another version of Fluxion's.
    """
    # If FLUXION_LIBRARY names another build, that build's lab library is beside it.
    beside = library_path().with_name(_NAME)
    path = beside if beside.is_file() else Path(__file__).parent / "_native" / _NAME
    return companion(path, "build it with `make lab`")


@cache
def function(name: str) -> Callable[..., Any]:
    """A function of the library; blocking ones release the GIL."""
    bound = _library().get_function(name)
    bound.release_gil = name in _BLOCKING
    return bound  # type: ignore[no-any-return]
