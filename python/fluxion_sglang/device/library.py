"""The device library: kernels and their launches on a GPU, or on the simulated device that runs the same sources.

`load("cuda")` is for tensors on a CUDA device. `load("sim")` needs no GPU: a "device tensor" is a CPU tensor, and
streams are threads. Its default stream (0) works in the calling thread, so results are complete when a call returns.
Streams are integers (`cudaStream_t`; torch's `stream.cuda_stream`).

*Pinned* tensors are CPU tensors that a device reads in place: from `pinned_empty`, or registered with `host_register`.
Asynchronous calls read their tensors in stream order; the caller must keep them alive until then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import tvm_ffi

from fluxion_sglang.native import check_complete, library_path

ABI_VERSION = 6
"""The required result of the library's `device_abi`."""

Backend = Literal["cuda", "sim"]

_FILES: dict[Backend, str] = {"cuda": "libfluxion_cuda.so", "sim": "libfluxion_sim.so"}
_ELEMENT = {torch.bfloat16: 2, torch.float32: 4}

# Functions that return at once and never wait for another thread. All others release the GIL: a launch waits when the
# device's queue is full, and the work before it may need Python.
_PROMPT = frozenset({"device_abi", "near_bytes", "inject"})


@tvm_ffi.register_error("DeviceError")
class DeviceError(RuntimeError):
    """A device library is missing, has no device, or a call of it failed; one sentence."""


def device_library_path(backend: Backend) -> Path:
    """The path of a device library: in the folder FLUXION_DEVICE_LIBRARIES (for tests), or beside libfluxion.so."""
    folder = os.environ.get("FLUXION_DEVICE_LIBRARIES")
    if folder and (built := Path(folder) / _FILES[backend]).exists():
        return built
    return library_path().with_name(_FILES[backend])


class Port:
    """The device side of a mailbox: sequence counter, and rows and lengths of the step in device memory."""

    def __init__(self, handle: Any, arena: torch.Tensor) -> None:
        self.handle = handle
        self._arena = arena  # keeps it alive: the device reads and writes it while the port lives


class DeviceLibrary:
    """The functions of one device library. Use `load`.

    Every function raises ValueError for tensors that do not fit, and DeviceError if the device's runtime fails.
    D is head_dim, a multiple of 16 from 32 to 256; Hq = G * Hk query heads, G from 1 to 16; KV dtype is bfloat16 or
    float32.

    Attributes:
        backend: "cuda" or "sim".
        device: torch's device of this library's tensors: "cuda" or "cpu".
    """

    def __init__(self, backend: Backend, module: tvm_ffi.Module) -> None:
        self.backend: Backend = backend
        self.device = "cuda" if backend == "cuda" else "cpu"
        self._module = module
        self._functions: dict[str, Callable[..., Any]] = {}
        # Bind once the functions that run in every layer.
        self._publish = self._function("publish")
        self._resident = self._function("resident")
        self._observe = self._function("observe")
        self._take = self._function("take")
        self._near_rank = self._function("near_rank")
        self._near_attend = self._function("near_attend")
        self._near_keep = self._function("near_keep")

    def _function(self, name: str) -> Callable[..., Any]:
        bound = self._functions.get(name)
        if bound is None:
            bound = self._module.get_function(name)
            bound.release_gil = name not in _PROMPT
            self._functions[name] = bound
        return bound

    def select(self, device: int) -> None:
        """Use the device of this number (torch's index) in every thread; call it first. The default is 0."""
        self._function("device_select")(device)

    def info(self) -> dict[str, Any]:
        """Describe the device.

        Returns:
            backend ("cuda", "simulated"), device (its number), name, multiprocessors, capability ("9.0"),
            memory_bytes, free_bytes, driver, runtime (versions as numbers of CUDA, 13000 for 13.0).

        Raises:
            DeviceError: there is none.
        """
        report: dict[str, Any] = json.loads(str(self._function("device_info")()))
        return report

    # --- host memory ---

    def host_register(self, memory: torch.Tensor) -> None:
        """Pin existing memory: uint8, its address and size multiples of 4096."""
        self._function("host_register")(memory)

    def host_unregister(self, memory: torch.Tensor) -> None:
        """Undo host_register; the same tensor."""
        self._function("host_unregister")(memory)

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        """New pinned memory, uint8 [nbytes], from a multiple of 4096; freed with its last view."""
        pinned: torch.Tensor = torch.from_dlpack(self._function("pinned_empty")(nbytes))
        return pinned

    # --- the mailbox, device side (csrc/device/layout.h) ---

    def port_create(
        self,
        arena: torch.Tensor,
        *,
        max_requests: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        sinks: int,
        window: int,
        timeout_s: float,
    ) -> Port:
        """Create the device side of the mailbox in `arena`, pinned uint8 of its size. Sequence 0; words unchanged.

        Args:
            sinks, window: tokens, as in kv/placement.py.
            timeout_s: time after which `take` gives up the mailbox.
        """
        handle = self._function("port_create")(
            arena,
            max_requests,
            q_heads,
            kv_heads,
            head_dim,
            self._element(dtype),
            sinks,
            window,
            int(timeout_s * 1e9),
        )
        return Port(handle, arena)

    def port_reset(self, port: Port, stream: int) -> None:
        """Reset sequence and all words of the arena to 0, in stream order. No thread may use the mailbox meanwhile."""
        self._function("port_reset")(port.handle, stream)

    def port_step(self, port: Port, stream: int, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set a step's requests, before its first `publish` and before every replay of a graph that contains one.

        Args:
            rows, lengths: [B] int32 CPU, B from 0 to max_requests: rows of the windows, and tokens of each request with
                this step's. Copied before the call returns; effective in stream order.
        """
        self._function("port_step")(port.handle, stream, rows, lengths)

    def publish(
        self,
        port: Port,
        stream: int,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        windows: torch.Tensor,
    ) -> None:
        """Publish a layer to the CPU: the token to the windows, and q, k, v and the layer to a new sequence's slot.

        Args:
            q, k, v: [N, Hq, D], [N, Hk, D], [N, Hk, D] on the device, KV dtype, dense in D and heads. N is at least the
                step's number of requests; further rows are padding and are ignored.
            windows: the layer's, on the device (kv/windows.py).
        """
        self._publish(port.handle, stream, layer, q, k, v, windows)

    def resident(
        self,
        port: Port,
        stream: int,
        q: torch.Tensor,
        windows: torch.Tensor,
        scale: float,
        o: torch.Tensor,
        lse: torch.Tensor,
        want_parts: bool,
    ) -> None:
        """Attention to sinks and window, the token of this step's `publish` included.

        Args:
            q: [N, Hq, D], as in `publish`.
            o, lse: written: [N, Hq, D] and [N, Hq] float32 on the device, natural log; 0 and -inf for padding.
            want_parts: also write the slot's parts (csrc/kernels/feature_index.h, Part) and signal them.
        """
        self._resident(port.handle, stream, q, windows, scale, o, lse, want_parts)

    def observe(
        self,
        port: Port,
        stream: int,
        o_sink: torch.Tensor,
        lse_sink: torch.Tensor,
        o_local: torch.Tensor,
        lse_local: torch.Tensor,
        base2: bool,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Do the work of `resident` with `want_parts`, from another kernel's attention to the sinks and the window.

        Args:
            o_sink, o_local: [N, Hq, D] KV dtype or float32; lse_sink, lse_local: [N, Hq] float32, in base 2 if `base2`.
            o, lse: written: both merged, [N, Hq, D] and [N, Hq] float32, natural log.
        """
        self._observe(port.handle, stream, o_sink, lse_sink, o_local, lse_local, base2, o, lse)

    def take(self, port: Port, stream: int, o: torch.Tensor, lse: torch.Tensor, base2: bool, out: torch.Tensor) -> None:
        """Wait for the CPU's answer to the last `publish` and merge it with `o`, `lse`.

        A time-out or a cancelled mailbox ends this wait and all waits until `port_reset`; then `out` is `o`.

        Args:
            o: [N, Hq, D] KV dtype or float32; lse: [N, Hq] float32, in base 2 if `base2`. Padding is copied as is.
            out: written: [N, Hq, D] KV dtype.
        """
        self._take(port.handle, stream, o, lse, base2, out)

    # --- the near middle (csrc/cuda/near.h; `device/near.py` defines the order of the calls) ---

    def near_create(
        self,
        port: Port,
        lists: torch.Tensor,
        told: torch.Tensor,
        *,
        layers: int,
        pages: int,
        max_pages: int,
        slots: int,
        together: bool,
        spread: float,
    ) -> Any:
        """Create the near middle of a port and a host pool (`layers` layers, `pages` pages), without copies of tiles.

        Args:
            lists: pinned uint8 of csrc/device/far_lists.h. told: pinned int32 [8].
            max_pages: of a request. slots: copies of tiles per KV head. together: heads of a group read the union of
                their selections. spread: see `NativePool`.
        """
        return self._function("near_create")(
            port.handle, lists, told, layers, pages, max_pages, slots, together, spread
        )

    def near_bytes(self, near: Any) -> int:
        """Device memory of the near middle."""
        return int(self._function("near_bytes")(near))

    def near_step(
        self,
        near: Any,
        port: Port,
        stream: int,
        ranks: bool,
        lengths: torch.Tensor,
        table: torch.Tensor,
        blk: torch.Tensor,
        budget: torch.Tensor,
    ) -> None:
        """Set the requests of the last `port_step`; copied before the call returns.

        Args:
            ranks: the device selects; otherwise blk and budget are ignored, and every list is empty.
            lengths: [B] int32. table: [B, M] int32. blk: [B] int32, tokens of a block; 0: nothing is read. budget: [B]
                float32, of every head. All on the CPU.
        """
        self._function("near_step")(near, port.handle, stream, ranks, lengths, table, blk, budget)

    def near_rank(self, near: Any, port: Port, stream: int, layer: int, q: torch.Tensor) -> None:
        """Score the blocks, select, and write the lists. q: [N, Hq, D] as in `publish`, which follows."""
        self._near_rank(near, port.handle, stream, layer, q)

    def near_attend(self, near: Any, port: Port, stream: int, scale: float, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention to the selected tiles that have copies, merged into o and lse as `resident` wrote them."""
        self._near_attend(near, port.handle, stream, scale, o, lse)

    def near_keep(
        self, near: Any, port: Port, stream: int, layer: int, windows: torch.Tensor, tiles: torch.Tensor
    ) -> None:
        """Copy the pages that the step's tokens fill from the windows, and some far tiles from the pool."""
        self._near_keep(near, port.handle, stream, layer, windows, tiles)

    def near_write(
        self,
        near: Any,
        port: Port,
        stream: int,
        layer: int,
        tiles: torch.Tensor,
        entries: torch.Tensor,
        chunk: torch.Tensor,
    ) -> None:
        """Copy the full pages of a chunk, after its `write_pages`, with the same arguments."""
        self._function("near_write")(near, port.handle, stream, layer, tiles, entries, chunk)

    def near_renew(
        self, near: Any, port: Port, stream: int, layer: int, tiles: torch.Tensor, entries: torch.Tensor
    ) -> None:
        """Read all metadata of a layer from the pool; nothing may write it meanwhile. Layer 0 drops all copies."""
        self._function("near_renew")(near, port.handle, stream, layer, tiles, entries)

    # --- prefill ---

    def fill_window(
        self,
        stream: int,
        tiles: torch.Tensor,
        windows: torch.Tensor,
        row: int,
        start: int,
        stop: int,
        pages: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: int,
        window: int,
    ) -> None:
        """Write all resident positions of a request of `stop` tokens to its row of the windows.

        Args:
            tiles: the layer's host pool [Hk, P, 2, 16, D], pinned, with the positions before `start`.
            windows: the layer's, on the device.
            pages: int32 [ceil(stop / 16)] or longer, on the device or pinned: physical page of every logical page. Only
                pages of resident positions before `start` are read.
            k, v: [stop - start, Hk, D] on the device, dense in D: the positions from `start`.
        """
        self._function("fill_window")(stream, tiles, windows, row, start, stop, pages, k, v, sinks, window)

    def gather(self, stream: int, tiles: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v[16 i + t, h] = key, value of token t of pages[i].

        Args:
            tiles: [Hk, P, 2, 16, D], pinned. pages: int32 [n], on the device or pinned.
            k, v: written: [16 n, Hk, D] on the device, dense in D.
        """
        self._function("gather")(stream, tiles, pages, k, v)

    def write_pages(
        self,
        stream: int,
        tiles: torch.Tensor,
        entries: torch.Tensor,
        moments: torch.Tensor,
        chunk: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write new tokens to the host pool, and of every page that they fill the minimum and maximum of its keys and
        the page's own moments. Bit-identical to the host's (`HostPool::describe_page`). The host makes the page's
        sketch (`NativePool.adopt`).

        Args:
            tiles: the layer's [Hk, P, 2, 16, D], entries: [Hk, P, 2, D], moments: float64 [Hk, P, 2 D + 8]; pinned. The
                tile of a page that is filled holds its earlier tokens.
            chunk: [n, 4] int32, on the device or pinned: distinct pages as (page, first, stop, token): the page's
                tokens [first, stop) are those from number `token` of k and v. Not checked (`HostPool.check`).
            k, v: [T, Hk, D] on the device, dense in D.
        """
        self._function("write_pages")(stream, tiles, entries, moments, chunk, k, v)

    def merge(
        self,
        stream: int,
        o_a: torch.Tensor,
        lse_a: torch.Tensor,
        o_b: torch.Tensor,
        lse_b: torch.Tensor,
        base2: bool,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merge attention to two disjoint sets of tokens, in float32; 0 and -inf for two empty sets.

        Args:
            o_a, o_b: [N, Hq, D] bfloat16 or float32; o_a and o are float32 if o_b is. A side with LSE -inf is not read.
            lse_a, lse_b: [N, Hq] float32, in base 2 if `base2`, otherwise natural.
            o: written: [N, Hq, D] bfloat16 or float32; may be o_a.
            lse: written: [N, Hq] float32, of the same base; may be lse_a.
        """
        self._function("merge")(stream, o_a, lse_a, o_b, lse_b, base2, o, lse)

    # --- measurements, streams and graphs ---

    def copy_in_order(self, stream: int, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy source to `to` by a kernel that reads 16 bytes a thread in order, to measure the link's bandwidth.

        Args:
            source: uint8 [n], pinned, n a multiple of 16. to: uint8 [n] on the device.
        """
        self._function("copy_in_order")(stream, source, to)

    def stream_create(self) -> int:
        """Create a stream that does not wait for any other."""
        return int(self._function("stream_create")())

    def stream_destroy(self, stream: int) -> None:
        """Finish the stream's work, then destroy it."""
        self._function("stream_destroy")(stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait until everything launched on the stream is done."""
        self._function("stream_synchronize")(stream)

    def graph_begin(self, stream: int) -> None:
        """Record launches on the stream from here on instead of running them; not on stream 0."""
        self._function("graph_begin")(stream)

    def graph_end(self, stream: int) -> Any:
        """End the recording and return a graph for `graph_launch`. Its tensors must outlive it."""
        return self._function("graph_end")(stream)

    def graph_launch(self, graph: Any, stream: int) -> None:
        """Run a graph once, in stream order."""
        self._function("graph_launch")(graph, stream)

    def inject(self, kind: str, after: int) -> None:
        """Simulated device only: inject failures, for tests.

        Args:
            kind: "memory": the `after`-th allocation from now fails; "launch": the `after`-th launch is refused;
                "lost": the device is lost before the `after`-th kernel, nothing runs any more and every call fails;
                "none": restores a working device with its contents.
            after: 1 is the next one.
        """
        self._function("inject")(kind, after)

    @staticmethod
    def _element(dtype: torch.dtype) -> int:
        if dtype not in _ELEMENT:
            raise ValueError(f"The KV dtype is {dtype}; devices serve torch.bfloat16 and torch.float32.")
        return _ELEMENT[dtype]


@cache
def load(backend: Backend) -> DeviceLibrary:
    """Load a device library. It does not look for a device (`DeviceLibrary.info` does).

    Raises:
        DeviceError: the library is missing, cannot be loaded, or belongs to another version of this package.
    """
    path = device_library_path(backend)
    if not path.is_file():
        remedy = {
            "cuda": "build fluxion-sglang with FLUXION_CUDA=on where CUDA's compiler (nvcc) is.",
            "sim": "it is for tests: run `make native-tests` and name its folder in FLUXION_DEVICE_LIBRARIES.",
        }
        raise DeviceError(f"The device library {path} does not exist; {remedy[backend]}")
    try:
        check_complete(path)
        module = tvm_ffi.load_module(path)
        version = int(module.get_function("device_abi")())
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise DeviceError(
            f"The device library {path} cannot be loaded ({reason}); reinstall fluxion-sglang."
        ) from error
    if version != ABI_VERSION:
        raise DeviceError(
            f"The device library {path} has ABI version {version} and this package needs {ABI_VERSION}; reinstall "
            "fluxion-sglang so that both come from the same version."
        )
    return DeviceLibrary(backend, module)
