"""The native library (`csrc/`): loading it, and typed wrappers of its functions."""

from fluxion_sglang.native.engine import AttentionLayer, NativeEngine
from fluxion_sglang.native.loading import (
    ABI_VERSION,
    NativeLibraryError,
    check_complete,
    companion,
    function,
    library,
    library_path,
    topology,
    without_best_isa,
)
from fluxion_sglang.native.model import WRITTEN, NativeLayers, NativeProgram
from fluxion_sglang.native.plan import NativePlan
from fluxion_sglang.native.pool import CorruptMemory, NativePool, Workers, pool_bytes, row_bytes

__all__ = [
    "ABI_VERSION",
    "WRITTEN",
    "AttentionLayer",
    "CorruptMemory",
    "NativeEngine",
    "NativeLayers",
    "NativeProgram",
    "NativeLibraryError",
    "NativePlan",
    "NativePool",
    "Workers",
    "check_complete",
    "companion",
    "function",
    "library",
    "library_path",
    "pool_bytes",
    "row_bytes",
    "topology",
    "without_best_isa",
]
