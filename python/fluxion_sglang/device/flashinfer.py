"""The only module that uses FlashInfer: attention to residents, and to a chunk and its prefix.

FlashInfer's LSE has base 2 (m + log2(d)); the rest of the project uses the natural one. `take` and `merge` take it with
a flag for its base.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fluxion_sglang.device.library import DeviceError
from fluxion_sglang.kv.placement import PAGE, Placement

logger = logging.getLogger(__name__)

# A fixed backend: "auto" uses fa3 on Hopper for prefill, whose kernels SGLang does not use and would be compiled extra.
_BACKEND = "fa2"
# Group sizes of the decode kernels without tensor cores; other sizes use the prefill kernels.
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20
_WARM_TOKENS = (1, 8, 320)
"""They cover small, middle and large tiles of queries; residents of one page, and lists that are split."""


@cache
def module() -> Any:
    """FlashInfer, imported when first needed.

    Raises:
        DeviceError: it is not installed or does not import; a sentence.
    """
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # a broken CUDA package may raise any exception
        raise DeviceError(_missing(str(error) or type(error).__name__)) from error


def check_installed() -> None:
    """Check the installation without importing FlashInfer. Raises DeviceError."""
    if importlib.util.find_spec("flashinfer") is None:
        raise DeviceError(_missing("it is not installed"))


def _missing(why: str) -> str:
    return (
        f"FlashInfer, which attends to prompts on a GPU, does not import ({why}); install the flashinfer-python that "
        "SGLang asks for, or serve with --device cpu."
    )


def serves(backend: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer has kernels for such tensors on the device of this backend."""
    return backend == "cuda" and dtype == torch.bfloat16 and head_dim in _HEAD_DIMS


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """The kernels' workspace, shared by all calls because they run in order on one stream."""
    # FlashInfer requires zeros before the first use.
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Full attention of T queries to S keys on the device.

    Args:
        q: [T, Hq, D]. k, v: [S, H, D].

    Returns:
        o [T, Hq, D] in q's dtype, lse [T, Hq] float32 of base 2.
    """
    o, lse = module().single_prefill_with_kv_cache(
        q, k, v, causal=False, sm_scale=scale, backend=_BACKEND, return_lse=True
    )
    return o, lse


class Chunks:
    """Causal attention of the chunks of an extend pass to themselves: planned once a pass, run once a layer.

    Args:
        scale: multiplies q.k in every layer.
    """

    def __init__(
        self, *, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float, device: torch.device
    ) -> None:
        self._q_heads, self._kv_heads, self._head_dim = q_heads, kv_heads, head_dim
        self._dtype, self._scale, self._device = dtype, scale, device
        self._wrapper = module().BatchPrefillWithRaggedKVCacheWrapper(_workspace(device), "NHD", backend=_BACKEND)
        self._tokens = 0

    def plan(self, chunks: Sequence[slice]) -> None:
        """Plan a pass: its chunks' tokens, ascending, none empty; one at least.

        The plan is copied from one pinned buffer, so the previous pass must be done on the device.
        """
        bounds = [0]
        for chunk in chunks:
            # A gap between chunks is planned as a chunk; its result is not used.
            bounds += [bound for bound in (chunk.start, chunk.stop) if bound > bounds[-1]]
        self._tokens = bounds[-1]
        # On the CPU: FlashInfer would copy a device list back, which waits for all earlier work.
        indptr = torch.tensor(bounds, dtype=torch.int32)
        self._wrapper.plan(
            indptr,
            indptr,
            self._q_heads,
            self._kv_heads,
            self._head_dim,
            causal=True,
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def empty(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, Hq, D] and k [T, H, D] of `tokens` tokens, filled with zeros."""
        q, k = (
            torch.zeros(tokens, heads, self._head_dim, dtype=self._dtype, device=self._device)
            for heads in (self._q_heads, self._kv_heads)
        )
        return q, k

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Run one layer of the pass.

        Args:
            q, out: [T, Hq, D]. k, v: [T, H, D]. `out` is written for the chunks' tokens.

        Returns:
            lse [up to T, Hq] float32 of base 2.
        """
        n = self._tokens
        _, lse = self._wrapper.run(q[:n], k[:n], v[:n], out=out[:n], return_lse=True)
        lse_of_base_2: torch.Tensor = lse
        return lse_of_base_2


def resident_lists(
    placement: Placement,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    kv_heads: int,
    window_rows: int,
    divided: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The resident pages of every (request, KV head) as FlashInfer page lists.

    FlashInfer allows only the last page of a list to be partial. The lists are therefore in order of position, not of
    the ring. Sinks are complete before the window has tokens, and a window begins on a page.

    Args:
        rows, lengths: [B] int64 on the CPU, this step's token included.
        window_rows: number of rows of the windows.
        divided: lists of the sinks alone, followed by lists of the windows alone, which may be empty.

    Returns:
        indptr [N + 1], indices [indptr[-1]] and last_page_len [N], int32 on the CPU, with N = B * H, or twice that.
        Indices count the pages of a layer's windows [H, window_rows * slot pages, ...] from the first page of head 0.
    """
    heads = torch.arange(kv_heads)
    starts = torch.tensor([placement.window_start(int(n)) for n in lengths], dtype=torch.int64) // PAGE
    sinks = torch.arange(placement.sink_pages).expand(len(rows), -1)
    ring = starts.unsqueeze(1) + torch.arange(placement.ring // PAGE)
    pages = torch.cat([sinks, ring], 1)  # logical, ascending
    there = pages * PAGE < lengths.unsqueeze(1)
    last = (lengths - 1) % PAGE + 1
    if divided:
        of_sinks = pages < placement.sink_pages
        there = torch.cat([there & of_sinks, there & ~of_sinks])
        last = torch.cat([last.where(lengths <= placement.sinks, PAGE), last])
    slots = torch.where(
        pages < placement.sink_pages,
        pages,
        placement.sink_pages + (pages - placement.sink_pages) % (placement.ring // PAGE),
    )
    slots = slots + rows.unsqueeze(1) * placement.slot_pages
    of_head = heads.view(1, -1, 1) * (window_rows * placement.slot_pages) + slots.unsqueeze(1)
    of_head = of_head.repeat(len(there) // len(rows), 1, 1)
    counts = there.sum(1).repeat_interleave(kv_heads)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = of_head[there.unsqueeze(1).expand_as(of_head)]
    return indptr.int(), indices.int(), last.repeat_interleave(kv_heads).int()


class Residents:
    """Attention to the sinks and windows of a decode step: planned once a step, run once a layer.

    Each (request, KV head) is a FlashInfer request with one KV head, because windows are stored by KV head.

    Args:
        window_rows: number of rows of the windows. scale: default of the layers; `run` may use another at no cost.
    """

    def __init__(
        self,
        placement: Placement,
        window_rows: int,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scale: float,
        device: torch.device,
    ) -> None:
        self._placement, self._window_rows = placement, window_rows
        self._kv_heads, self._group, self._head_dim = kv_heads, q_heads // kv_heads, head_dim
        self._dtype, self._scale = dtype, scale
        self._wrapper = module().BatchDecodeWithPagedKVCacheWrapper(
            _workspace(device), "HND", use_tensor_cores=self._group not in _CUDA_CORE_GROUPS, backend=_BACKEND
        )

    def plan(self, rows: torch.Tensor, lengths: torch.Tensor, divided: bool = False) -> None:
        """Plan a step: rows, lengths [B] int64 on the CPU, this step's token included; B at least 1.

        divided: `run_divided` runs it, not `run`.

        The plan is copied from one pinned buffer, so the previous step must have begun its layers on the device.
        """
        lists = resident_lists(self._placement, rows, lengths, self._kv_heads, self._window_rows, divided)
        # On the CPU: FlashInfer would copy a device list back, which waits for all earlier work.
        self._wrapper.plan(
            *lists,
            num_qo_heads=self._group,
            num_kv_heads=1,
            head_dim=self._head_dim,
            page_size=PAGE,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._scale,
        )

    def run(self, q: torch.Tensor, windows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one layer of the step.

        Args:
            q: [B, Hq, D], contiguous. windows: [H, rows * slot pages, 2, 16, D], including this step's tokens.

        Returns:
            o [B, Hq, D] in q's dtype, lse [B, Hq] float32 of base 2.
        """
        return self._run(q, windows, scale)

    def run_divided(self, q: torch.Tensor, windows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one layer of a step whose policies need attention to the sinks and to the window separately.

        Args:
            as for `run`.

        Returns:
            o [2, B, Hq, D], of the sinks and of the windows, and lse [2, B, Hq], as for `run`. For an empty list o is 0
            and lse -inf; FlashInfer before 0.7 gives about -50,000. `observe` accepts either.
        """
        o, lse = self._run(torch.cat([q, q]), windows, scale)
        return o.view(2, *q.shape), lse.view(2, *q.shape[:2])

    def _run(self, q: torch.Tensor, windows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        batch, q_heads, dim = q.shape
        pages = windows.view(-1, 2, 1, PAGE, dim)
        o, lse = self._wrapper.run(
            q.view(batch * self._kv_heads, self._group, dim),
            pages,
            q_scale=None if scale == self._scale else scale / self._scale,
            return_lse=True,
        )
        return o.view(batch, q_heads, dim), lse.view(batch, q_heads)


def warm_up(
    chunks: Chunks, residents: Residents | None, windows: torch.Tensor, scale: float, settle: Callable[[], None]
) -> None:
    """Run all kernels of the passes on dummy data, in sizes that select different kernels of a module.

    FlashInfer compiles a module on first use, which takes minutes, and the device loads a kernel on its first launch.
    Neither may happen during a pass.

    Args:
        windows: as for `Residents.run`, with any contents. settle: waits for the device.
    """
    start = time.monotonic()
    logger.info("Fluxion: FlashInfer loads its kernels; the first time on a machine it compiles them, for minutes")
    for tokens in _WARM_TOKENS:
        q, k = chunks.empty(tokens)
        chunks.plan([slice(0, tokens)])
        chunks.run(q, k, k, torch.empty_like(q))
        prefill(q, k, k, scale)
        if residents is not None:
            for divided, run in ((False, residents.run), (True, residents.run_divided)):
                residents.plan(torch.zeros(1, dtype=torch.int64), torch.tensor([tokens]), divided)
                run(q[:1], windows, scale)
                settle()
        settle()  # all plans share one buffer
    logger.info("Fluxion: FlashInfer is ready after %.0f s", time.monotonic() - start)
