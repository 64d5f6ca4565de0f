"""Keeps KV across restarts: writes the host pool's pages to files, through SGLang's linker of external caches.

SGLang asks the linker how much of a prompt is in files (`lookup`), makes it read that before a pass (`load`), and
passes new pages of the radix tree to it (`offload`). SGLang's device pages are pages of the host pool. The tree has
only exact KV.

A page that is read has only its tiles. Its metadata and moments depend on the pages before it. They are computed when
the request's pass begins, where its path is known (`begin`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from fluxion_sglang.config import DISK_GB, ConfigError
from fluxion_sglang.kv.host_pool import GIB
from fluxion_sglang.kv.page_store import BadPage, PageStore
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang.memory.pools import FluxionKVPool
from fluxion_sglang.sglang.steps.packed import of_rows

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

BACKLOG = 8
"""One in this many pages of the pool may wait to be written; the tree cannot evict them. Further pages are not kept."""
INT8_ORDER = "int8, keys by 2 elements, values by 4 tokens"
"""Order of integers in a tile (`DType` in csrc/kernels/table.h). Files with another order are not used."""
_SAMPLES = 64
"""Elements in the sample of a parameter, spread over all of it."""

_Pages = list[tuple[str, int]]
"""Pairs of a page's name and number."""


def manifest(runner: ModelRunner, pool: FluxionKVPool) -> dict[str, Any]:
    """Everything that the KV of a token depends on besides the tokens up to it, for this rank."""
    config, shape, parallel = runner.model_config, pool.host.shape, get_parallel()
    model = config.hf_config.to_dict()
    for key in ("transformers_version", "_name_or_path"):
        model.pop(key, None)
    return {
        "architecture": (config.hf_config.architectures or ["unknown"])[0],
        "config": hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest(),
        "weights": weights_digest(runner.model),
        "stored": INT8_ORDER if shape.int8 else str(shape.dtype),
        "layers": [pool.start_layer, pool.start_layer + shape.layers],
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "page": PAGE,
        "tp": [parallel.attn_tp_rank, parallel.attn_tp_size],
    }


def weights_digest(model: torch.nn.Module, whole: bool = True) -> str:
    """Digest of a sample of every parameter and, if `whole`, of its sum, which any changed number changes."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(of_rows(weight, _sample))
        if whole:
            digest.update(of_rows(weight, _sum))
    return digest.hexdigest()


def _flat(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach()
    return flat.view(-1) if flat.is_contiguous() else flat.as_strided((flat.numel(),), (1,))


def _sample(weight: torch.Tensor) -> bytes:
    flat = _flat(weight)
    count = min(_SAMPLES, flat.numel())
    places = torch.arange(count) * (flat.numel() - 1) // max(count - 1, 1)
    sample = flat[places.to(flat.device)].cpu().contiguous().view(torch.uint8)
    return bytes(sample.numpy().tobytes())


def _sum(weight: torch.Tensor) -> bytes:
    words = _flat(weight).view(torch.uint8)
    if words.numel() % 8 == 0 == words.storage_offset() % 8:
        words = words.view(torch.int64)
    return f"{int(words.sum(dtype=torch.int64))}".encode()  # may overflow, which does no harm


class DiskLinker(UnifiedCacheLinker):
    """The linker of one process. The scheduler's thread calls it; a thread of its own writes."""

    def __init__(
        self,
        server_args: Any,
        params: CacheInitParams,
        *,
        components: object,
        extra_config: object = None,
        forward_stream: object = None,
    ) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        assert isinstance(pool, FluxionKVPool), "the option disk comes with the flag"
        self.pool, self.host = pool, pool.host
        folder = pool.config.path("disk")
        assert folder is not None
        self._folder = folder
        # Replicas have the same pages and share a folder.
        ranks = max(server_args.tp_size // server_args.nnodes, 1)
        self._limit = int(pool.config.beside_path("disk", "gb", DISK_GB) * GIB) // ranks
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(pool.layer_num)
        self._tiles = self.host.stored.numpy()
        self._store: PageStore | None = self._open()
        self._names: dict[int, str] = {}  # of written or read pages; outdated once a page is reused
        self._queued: dict[str, _Pages] = {}
        # Pages with only tiles from files. The next pass with such a page computes the rest, or overwrites the page.
        self._bare = torch.zeros(self.host.pages, dtype=torch.bool)
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._written: SimpleQueue[bool] = SimpleQueue()
        self._waiting: deque[int] = deque()  # number of pages of each node in the write queue
        self._failing = False
        # Counts of the stores before the last flush.
        self._before = dict.fromkeys(("disk_read_pages", "disk_written_pages", "disk_refused_pages"), 0)
        pool.disk = self
        self._start()

    # --- lookup ---

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys = _of(transfers).keys
        return list(range(1, self._store.leading(keys) + 1)) if keys and self._store is not None else []

    # --- from files into the pool ---

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        self._queued[rid] = _pages(_of(transfers))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Read all queued pages now, because the pass that follows needs them."""
        if not self._queued:
            return -1
        pages = [page for queued in self._queued.values() for page in queued]
        self._queued = {}
        index = int(self.layer_done_counter.update_producer())
        try:
            self._read(pages)
        except Exception as error:
            if not isinstance(error, BadPage):
                logger.exception("Fluxion: KV could not be read from files")
            # The requests end, but their pass is still computed, so it needs finite numbers.
            self._tiles[:, :, [page for _, page in pages]] = 0
            self.layer_done_counter.fail(index, error)
        else:
            for layer in range(self.pool.layer_num):
                self.layer_done_counter.complete(index, layer)
        return index

    def _read(self, pages: _Pages) -> None:
        tiles = self._tiles

        def put(i: int, page: Any) -> None:
            tiles[:, :, pages[i][1]] = page.reshape(tiles.shape[0], tiles.shape[1], tiles.shape[3])

        assert self._store is not None, "it had them a moment ago"
        numbers = [page for _, page in pages]
        self._bare[numbers] = True
        self.host.forget_sums(torch.tensor(numbers, dtype=torch.int32))
        self._store.read([name for name, _ in pages], put)
        self._names.update((page, name) for name, page in pages)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def begin(self, pages: torch.Tensor, start: int, stop: int) -> None:
        """Complete read pages before a request's pass that appends tokens `start` to `stop`; no other pass runs.

        Args:
            pages: [>= stop / 16] int32, the request's. The pool has those of its first `start` tokens.
        """
        self._bare[pages[start // PAGE : -(-stop // PAGE)].long()] = False
        there = pages[: start // PAGE]
        bare = self._bare[there.long()].nonzero()
        if len(bare):
            first, last = int(bare[0]), int(bare[-1])
            for layer in range(self.pool.layer_num):
                self.host.adopt(layer, pages, first * PAGE, (last + 1 - first) * PAGE, described=False)
            self._bare[there.long()] = False
        names = [self._names.get(page) for page in there.tolist()]
        if self._store is not None:
            self._tasks.put(partial(self._store.used, [name for name in names if name is not None]))

    def append(self, pages: torch.Tensor, positions: torch.Tensor) -> None:
        """Mark pages as not read from files: tokens are appended at positions [B, T] int64 of pages [B, n]."""
        self._bare[pages.gather(1, positions // PAGE).flatten().long()] = False

    # --- from the pool into files ---

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue a node's pages for writing. Always true, because ranks must agree; outcomes follow in order."""
        pages = _pages(_of(transfers))
        waiting = sum(self._waiting)
        if waiting and waiting + len(pages) > self.host.pages // BACKLOG:
            pages = []
        self._names.update((page, name) for name, page in pages)
        self._waiting.append(len(pages))
        self._tasks.put(partial(self._write, pages))
        return True

    def _main(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _write(self, pages: _Pages) -> None:
        done = False
        try:
            # While the model's weights change, nothing is kept until the flush, which opens another folder.
            if self._store is not None and pages and self._sample() == self._opened_with:
                for name, page in reversed(pages):  # the first page is the newest and is evicted last
                    self._store.write(name, self._tiles[:, :, page])
                done, self._failing = True, False
        except Exception as error:
            if not self._failing:
                logger.warning("Fluxion: KV cannot be written to files, and the server goes on without (%r)", error)
            self._failing = True
        self._written.put(done)

    def num_completed_offloads(self) -> int:
        return self._written.qsize()

    def pop_completed_offload(self) -> bool:
        self._waiting.popleft()
        return self._written.get()

    # --- life ---

    def stats(self) -> dict[str, int]:
        """Cumulative counts, named as in `executor/metrics.py`."""
        if self._store is None:
            return self._before
        now = (self._store.read_pages, self._store.written_pages, self._store.refused_pages)
        return {name: old + new for (name, old), new in zip(self._before.items(), now, strict=True)}

    def reset(self) -> None:
        """Restart after a flush: the tree is empty, and the weights may have changed."""
        self._stop()
        self._before = self.stats()
        while self._written.qsize():
            self._written.get()
        self._queued = {}
        self._waiting.clear()
        self._names, self._bare[:] = {}, False
        self.layer_done_counter.reset()
        if self._store is not None:
            self._store.close()
        try:
            self._store = self._open()
        except ConfigError as error:  # must not end a running server
            logger.warning("Fluxion: KV is kept in files no more, because %s", error)
            self._store = None
        self._start()

    def close(self) -> None:
        self._stop()
        if self._store is not None:
            self._store.close()

    def _sample(self) -> str:
        assert self.pool.weights is not None, "the attention backend sets it before"
        return self.pool.weights()

    def _open(self) -> PageStore:
        assert self.pool.manifest is not None, "the attention backend sets it before"
        self._opened_with = self._sample()
        try:
            store = PageStore(self._folder, self.pool.manifest(), self._tiles[:, :, 0].nbytes, self._limit)
        except OSError as error:
            raise ConfigError(
                f"disk is {str(self._folder)!r}, where KV cannot be kept ({error.strerror or error}); name a folder "
                "that this user may write to, or leave the key out."
            ) from error
        logger.info(
            "Fluxion: KV is kept in %s: %d pages of %d tokens are there, and there is room for %d",
            store.folder, len(store), PAGE, self._limit // store.file_bytes,
        )  # fmt: skip
        return store

    def _start(self) -> None:
        self._thread = Thread(target=self._main, name="fluxion-disk-writer", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._tasks.put(None)
        self._thread.join()


def _of(transfers: Sequence[PoolTransfer]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _pages(transfer: Any) -> _Pages:
    numbers = (transfer.device_indices[::PAGE] // PAGE).tolist()
    return list(zip(transfer.keys, numbers, strict=True))
