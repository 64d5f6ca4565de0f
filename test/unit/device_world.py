"""A mailbox and windows on the simulated device, and attention in float64 as reference."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from native_world import attention

from fluxion_sglang.device.library import DeviceLibrary, Port, load
from fluxion_sglang.device.mailbox import Mailbox, MailboxShape, Word
from fluxion_sglang.kv.placement import PAGE, Placement

PLACEMENT = Placement(64, 256)


def sim() -> DeviceLibrary:
    return load("sim")


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy."""
    flat = sim().pinned_empty(max(tensor.numel() * tensor.element_size(), 1))
    copy = flat[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class Stream:
    """A stream for the duration of a `with`."""

    def __enter__(self) -> int:
        self.handle = sim().stream_create()
        return self.handle

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sim().stream_destroy(self.handle)


@dataclass(frozen=True)
class Shape:
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    max_requests: int = 4
    placement: Placement = PLACEMENT

    @property
    def q_heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Mail:
    """A mailbox, its port and windows of `max_requests` + 1 rows, on the simulated device."""

    def __init__(self, shape: Shape, timeout_s: float = 20.0) -> None:
        self.shape = shape
        library = sim()
        self._sizes: Any = {
            "max_requests": shape.max_requests, "q_heads": shape.q_heads, "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim, "dtype": shape.dtype,
        }  # fmt: skip
        self.mailbox = Mailbox(MailboxShape(**self._sizes))
        self.arena = self.mailbox.arena.fill_(255)  # words never written are NaN
        library.host_register(self.arena)
        weakref.finalize(self, library.host_unregister, self.arena)
        place = shape.placement
        self.port: Port = library.port_create(
            self.arena, **self._sizes, sinks=place.sinks, window=place.window, timeout_s=timeout_s
        )
        library.port_reset(self.port, 0)
        pages = (shape.max_requests + 1) * place.slot_pages
        self.windows = torch.randn(shape.kv_heads, pages, 2, PAGE, shape.head_dim).to(shape.dtype)

    def word(self, name: str) -> int:
        return self.mailbox.load(Word[name.upper()])

    def write(self, name: str, value: int) -> None:
        self.mailbox.store(Word[name.upper()], value)

    def slot(self, name: str, sequence: int, batch: int) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.mailbox.slot(sequence, batch), name)
        return tensor

    def layer(self, sequence: int) -> int:
        return int(self.mailbox.slot(sequence, 0).layer)

    def tokens(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of `rows` tokens."""
        s = self.shape
        sizes = (s.q_heads, s.kv_heads, s.kv_heads)
        q, k, v = (torch.randn(rows, heads, s.head_dim).to(s.dtype) for heads in sizes)
        return q, k, v

    def answer(self, sequence: int, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the CPU's part of a layer: o [B, Hq, D], lse [B, Hq]."""
        self.slot("o", sequence, len(o)).copy_(o)
        self.slot("lse", sequence, len(o)).copy_(lse)
        self.write("answered", sequence)

    def answer_later(self, sequence: int, o: torch.Tensor, lse: torch.Tensor) -> threading.Thread:
        """`answer` from a thread that waits for the layer."""

        def work() -> None:
            while self.word("published") != sequence:
                pass
            self.answer(sequence, o, lse)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def resident(
        self, windows: torch.Tensor, row: int, n: int, q: torch.Tensor, kv_head: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """(o, lse) of the sinks and (o, lse) of the window for one query head, from the definitions."""
        place = self.shape.placement
        tiles = windows[kv_head, row * place.slot_pages : (row + 1) * place.slot_pages]

        def part(positions: range) -> tuple[torch.Tensor, torch.Tensor]:
            at = [place.slot(p) for p in positions]
            keys = torch.stack([tiles[s // PAGE, 0, s % PAGE] for s in at]) if at else torch.empty(0, len(q))
            values = torch.stack([tiles[s // PAGE, 1, s % PAGE] for s in at]) if at else torch.empty(0, len(q))
            return attention(q, keys, values, self.shape.scale)

        return part(range(min(place.sinks, n))), part(range(place.window_start(n), n))


def merged(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge results (o, lse) of attention to disjoint tokens, float64; without tokens 0 and -inf."""
    lses = torch.stack([lse.double() for _, lse in parts])
    lse = lses.logsumexp(0)
    if torch.isneginf(lse):
        return torch.zeros_like(parts[0][0], dtype=torch.float64), lse
    outputs = [o.double() * (each - lse).exp() for (o, each) in parts if not torch.isneginf(each)]
    return torch.stack(outputs).sum(0), lse


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 1e-2
