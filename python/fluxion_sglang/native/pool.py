"""The native pool and its workers. CPU tensors go in and out without copies."""

from __future__ import annotations

import torch
import tvm_ffi

from fluxion_sglang.native.loading import function

_NO_WINDOW = 2**31 - 1  # kNoWindow of kernels/table.h


@tvm_ffi.register_error("CorruptMemory")
class CorruptMemory(RuntimeError):
    """The canary found memory that differs from what was written to it. Results that depend on it are invalid."""


_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_INT8 = 2
_SCALE = 2  # bytes


def pool_bytes(
    layers: int,
    kv_heads: int,
    pages: int,
    head_dim: int,
    dtype: torch.dtype,
    int8: bool = False,
    sketched: bool = False,
) -> int:
    """Bytes of host memory that a NativePool of this shape maps; `pages` counts page 0.

    Raises:
        ValueError: a shape or dtype that the kernels do not serve.
    """
    return int(function("pool_bytes")(layers, kv_heads, pages, head_dim, _stored_id(dtype, int8), sketched))


def row_bytes(head_dim: int, dtype: torch.dtype, int8: bool = False) -> int:
    """Bytes of one key or one value as stored in the pool; a tile has 32 of them."""
    return head_dim + _SCALE if int8 else head_dim * dtype.itemsize


def _stored_id(dtype: torch.dtype, int8: bool) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"The KV dtype is {dtype}; the kernels serve torch.bfloat16 and torch.float32.")
    if int8 and dtype != torch.bfloat16:
        raise ValueError(f"The KV dtype is {dtype}; what is stored as int8 is read as torch.bfloat16.")
    return _INT8 if int8 else _DTYPES[dtype]


class Workers:
    """Persistent compute threads. The calling thread is one of them and is never pinned.

    Args:
        count: threads, the caller included.
        cores: int32 core numbers for the others, thread w on cores[w % len]; None: every core this process may use.
        spin_us: microseconds that idle threads spin for work before they sleep, unless FLUXION_SPIN_US or a quota of
            CPU time decides. None: the best value if the CPU is the device.
        pinned: False: the operating system places threads on any of the cores.

    Raises:
        ValueError: a bad count, or a core this process may not run on.
        RuntimeError: the threads cannot be started.
    """

    def __init__(
        self, count: int, cores: torch.Tensor | None = None, spin_us: int | None = None, pinned: bool = True
    ) -> None:
        empty = torch.empty(0, dtype=torch.int32)
        self.handle = function("workers_create")(
            count, empty if cores is None else cores, -1 if spin_us is None else spin_us, pinned
        )
        self.count = count

    @property
    def cores(self) -> list[int]:
        """The cores that threads are assigned to."""
        return [int(core) for core in str(function("workers_cores")(self.handle)).split(",")]


class NativePool:
    """Tiles, metadata, moments and optional sketches of every layer in one mapping (layouts: `tensor`).

    Args:
        pages: page ids 0..pages-1; page 0 is padding.
        dtype: torch.bfloat16 or torch.float32: of queries, metadata and windows, and of keys and values.
        int8: keys and values are stored as 8-bit integers with a scale for every token and head, rounded on append.
            Decode multiplies with the stored integers; other readers get values rounded to bfloat16. dtype must be
            torch.bfloat16.
        sketched: every full page has a sketch of its keys, 4 bits an element (`write_sketch` in csrc/kernels/table.h).
        sink_pages: logical pages below this number are left out of coarse entries and moments.
        spread: share of the half width of a block's min/max box that its score counts, in (0, 1].
        isa: kernels to use, one of `topology()["isas"]`; None: the best, or FLUXION_ISA.
        canary: share of the reads of tiles, metadata and sketches that are compared with checksums made at writing, 0
            to 1. A read that differs raises CorruptMemory, or fails its request in the engine (`NativeEngine.corrupt`).
            The checksums take 143 bytes a tile, and 8 more with sketches. Not compared are moments, tags, keys that
            policies of other packages score, and keys that predictors are measured with.

    Raises:
        ValueError: a shape the kernels do not serve.
        RuntimeError: the memory cannot be allocated.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        layers: int,
        kv_heads: int,
        pages: int,
        head_dim: int,
        dtype: torch.dtype,
        int8: bool = False,
        sketched: bool = False,
        sink_pages: int,
        spread: float = 1.0,
        isa: str | None = None,
        canary: float = 0.0,
    ) -> None:
        self.canary = canary
        self.workers = workers
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.handle = function("pool_create")(
            workers.handle,
            layers,
            kv_heads,
            pages,
            head_dim,
            _stored_id(dtype, int8),
            sink_pages,
            sketched,
            spread,
            isa or "",
            canary,
        )
        self._append = function("pool_append")
        self._check = function("pool_check")
        self._adopt = function("pool_adopt")
        self._fill_window = function("pool_fill_window")
        self._gather = function("pool_gather")
        self._attend_chunk = function("pool_attend_chunk")
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def isa(self) -> str:
        """The kernels in use."""
        return str(function("pool_isa")(self.handle))

    def tensor(self, name: str, layer: int) -> torch.Tensor:
        """A view of a layer's memory, which stays mapped while the view lives.

        Args (H KV heads, P pages, D head_dim):
            name: "tiles" [H, P, 2, 16, D], KV dtype: K, then V, of a page. With int8 [H, P, bytes] uint8
                (`DType` in csrc/kernels/table.h).
            "meta0".."meta3" [H, ceil(P / 2^j), 2, D], KV dtype: {min, max} over the keys of a block of
                2^j pages; coarse levels live at [last page >> j].
            "tag1".."tag3" [ceil(P / 2^j)] int32: the last page of the block whose entry is there, or -1.
            "moments" [H, P, 2 D + 8] float64: sums along the path of k, v, |k|^1..4, |v|^1..4.
            "sketches" [H, P, bytes] uint8, if the pool has them.
            "memory" [bytes] uint8: all of the above, of all layers; whole pages of 4096 bytes.
        """
        view = self._views.get((name, layer))
        if view is None:
            view = self._views[name, layer] = torch.from_dlpack(function("pool_tensor")(self.handle, name, layer))
        return view

    def canary_counts(self) -> dict[str, int]:
        """Cumulative counts: canary_checks, of compared tiles, entries and sketches; canary_mismatches among them."""
        counts = torch.zeros(2, dtype=torch.int64)
        function("pool_canary_counts")(self.handle, counts)
        return {"canary_checks": int(counts[0]), "canary_mismatches": int(counts[1])}

    def sweep(self, most: int = 10) -> tuple[int, list[str]]:
        """Compare the whole pool with its checksums. No thread may write meanwhile.

        Returns:
            The number of compared tokens, entries and sketches of all layers and heads, and sentences about the first
                `most` mismatches.

        Raises:
            ValueError: the pool has no canary.
        """
        checked = torch.zeros(1, dtype=torch.int64)
        found = str(function("pool_sweep")(self.handle, most, checked)).splitlines()
        return int(checked[0]), found

    def append(self, layer: int, pages: torch.Tensor, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write tokens start..start+T-1 of a request, and the metadata, moments and sketches of every page that this
        fills.

        Args:
            pages: [>= ceil((start + T) / 16)] int32, the request's pages from its first.
            k, v: [T, H, D], KV dtype; any strides, D contiguous.

        Raises:
            ValueError: a page id or position out of range; nothing was written.
        """
        self._append(self.handle, layer, pages, start, k, v)

    def check(self, pages: torch.Tensor, start: int, count: int) -> None:
        """Raise ValueError if `append` of `count` tokens would."""
        self._check(self.handle, pages, start, count)

    def adopt(self, layer: int, pages: torch.Tensor, start: int, count: int, described: bool = True) -> None:
        """Complete an `append` of tokens that are already in their tiles: compute everything derived from them.

        Call it once for every write, after the write is done and before any read.

        Args:
            described: a device has also written the metadata and own moments of the pages that it filled
                (`DeviceLibrary.write_pages`).

        Raises:
            ValueError: as for `append`.
        """
        self._adopt(self.handle, layer, pages, start, count, described)

    def forget_sums(self, pages: torch.Tensor) -> None:
        """Drop the canary's checksums of these pages (int32), until tokens are appended or adopted.

        Raises:
            ValueError: a page id out of range; nothing was dropped.
        """
        function("pool_forget_sums")(self.handle, pages)

    def fill_window(
        self,
        layer: int,
        windows: torch.Tensor,
        row: int,
        n: int,
        pages: torch.Tensor,
        sinks: int,
        window: int,
    ) -> None:
        """Copy the sinks and window of a request of n tokens into a row of the device windows.

        Args:
            windows: [H, rows * S / 16, 2, 16, D], KV dtype, S = sinks + window + 16.
            pages: [>= ceil(n / 16)] int32.
            sinks, window: tokens, multiples of 16.

        Raises:
            ValueError: a row, length or page id out of range; nothing was written.
        """
        self._fill_window(self.handle, layer, windows, row, n, pages, sinks, window)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the K and V of m pages (int32 ids) out of the tiles: two tensors [H, 16 m, D], KV dtype.

        Raises:
            ValueError: a page id out of range.
        """
        size = (self.kv_heads, pages.numel() * 16, self.head_dim)
        k, v = torch.empty(size, dtype=self.dtype), torch.empty(size, dtype=self.dtype)
        self._gather(self.handle, layer, pages, k, v)
        return k, v

    def attend_chunk(
        self,
        layer: int,
        pages: torch.Tensor,
        start: int,
        q: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        budget: float = 1.0,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> float:
        """Attention of tokens start..start+T-1 of a request to themselves and all tokens before them, in the pool.

        Keys and values are read in place. Sums are float32. In bfloat16 the attention weights are rounded to bfloat16
        if the CPU has bfloat16 products.

        Args:
            pages: [>= ceil((start + T) / 16)] int32, the request's pages from its first.
            q: [T, Hq, D], KV dtype, [Hq, D] contiguous; Hq a multiple of the pool's KV heads.
            scale: multiplies q.k.
            out: [T, Hq, D], KV dtype, contiguous; overwritten.
            budget: the largest share of earlier tokens that is read; below 1 the prefill is sparse. For about 64
                queries and the heads of a group, it selects the blocks of 64 tokens with the largest weight for any of
                them; every eighth query is scored. Sinks and the nearest 256 tokens are always read; the last 256
                queries read everything.
            window: newest tokens that a token attends to, itself included; the prefill is then exact. None: all.
            sinks: [Hq] float32: a logit of each head that joins the softmax and has no value. None: there are none.
            tree: [T] int64, T at most 64 and at most `window`: the tokens are nodes of a tree, parents first. Bit i of
                tree[t] says that token i is an ancestor of token t, or t itself. A token attends exactly to these and
                to all tokens before the tree; its position is its depth. None: a chain.
            cap: logits are cap * tanh(scale * q.k / cap), above 0; 0: they are not capped.

        Returns:
            The share of the earlier tokens that was read.

        Raises:
            ValueError: a page id, position or shape that does not fit; nothing was written.
        """
        most = _NO_WINDOW if window is None else window
        return float(
            self._attend_chunk(self.handle, layer, pages, start, q, scale, cap, budget, most, sinks, tree, out)
        )
