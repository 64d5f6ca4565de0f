"""A device in Python for a world of requests: it publishes layers, attends to the residents, and takes answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from world import World

from fluxion_sglang.device.mailbox import Mailbox, MailboxShape, Word
from fluxion_sglang.device.server import LayerServer
from fluxion_sglang.executor.merge import merge_state
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy import Policy


class GaveUp(Exception):
    """The device waited too long, or was cancelled."""


def mailbox_for(world: World, requests: int = 4) -> Mailbox:
    return Mailbox(MailboxShape(requests, world.heads * world.group, world.heads, world.dim, world.dtype))


class PythonDevice:
    """The device's side of the protocol (csrc/device/layout.h), as sequential calls in the calling thread.

    Attributes:
        parts: output of the last layer's `observe`, [B, Hq, 5].
    """

    def __init__(self, world: World, mailbox: Mailbox, timeout_s: float = 20.0) -> None:
        self.world, self.mailbox, self.timeout_s = world, mailbox, timeout_s
        self.sequence = 0
        self.rows: list[int] = []
        self.lengths: list[int] = []

    def step(self, rows: list[int], lengths: list[int]) -> None:
        """lengths: including this step's token."""
        self.rows, self.lengths = rows, lengths

    def publish(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        world, place = self.world, self.world.placement
        for b, (row, n) in enumerate(zip(self.rows, self.lengths, strict=True)):
            page, offset = divmod(place.slot(n - 1), PAGE)
            tile = world.windows.layers[layer][:, row * place.slot_pages + page]
            tile[:, 0, offset], tile[:, 1, offset] = k[b], v[b]
        self.sequence += 1
        if self.mailbox.load(Word.LATE):
            return
        slot = self.mailbox.slot(self.sequence, len(self.rows))
        slot.q.copy_(q), slot.k.copy_(k), slot.v.copy_(v)
        slot.layer.fill_(layer)
        self.mailbox.store(Word.PUBLISHED, self.sequence)

    def resident(self, layer: int, q: torch.Tensor, observe: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """o [B, Hq, D] and lse [B, Hq] float32 of sinks and window; `observe`: also publish the parts."""
        runs = [torch.zeros(*q.shape[:2], q.shape[2] + 1, dtype=torch.float64) for _ in range(2)]
        for b, (row, n) in enumerate(zip(self.rows, self.lengths, strict=True)):
            place = self.world.placement
            sinks, start = range(min(place.sinks, n)), place.window_start(n)
            for run, positions in zip(runs, (sinks, range(start, n)), strict=True):
                run[b] = self._attend(layer, row, [place.slot(p) for p in positions], q[b])
        (o_sink, lse_sink), (o_local, lse_local) = ((run[..., :-1].float(), run[..., -1].float()) for run in runs)
        o, lse = merge_state(o_sink, lse_sink, o_local, lse_local)
        norms = (part.norm(dim=-1) for part in (o_sink, o_local, o))
        self.parts = torch.stack([lse_sink, lse_local, *norms], dim=-1)
        if observe and not self.mailbox.load(Word.LATE):
            self.mailbox.slot(self.sequence, len(self.rows)).parts.copy_(self.parts)
            self.mailbox.store(Word.OBSERVED, self.sequence)
        return o, lse

    def _attend(self, layer: int, row: int, slots: list[int], q: torch.Tensor) -> torch.Tensor:
        """[Hq, D + 1] float64: o and lse."""
        world, first = self.world, row * self.world.placement.slots
        at = torch.tensor(slots, dtype=torch.long) + first
        tokens = world.windows.layers[layer][:, at // PAGE, :, at % PAGE].double()  # [n, H, 2, D] or [H, n, 2, D]
        tokens = tokens.movedim(0, 1) if tokens.shape[0] == len(slots) and tokens.shape[1] == world.heads else tokens
        keys, values = (tokens[:, :, i].repeat_interleave(world.group, 0) for i in (0, 1))
        scores = torch.einsum("hd,hnd->hn", q.double(), keys) * world.scale
        lse = scores.logsumexp(-1) if slots else torch.full((len(q),), -torch.inf, dtype=torch.float64)
        o = torch.einsum("hn,hnd->hd", scores.softmax(-1), values)
        return torch.cat([o, lse.unsqueeze(1)], dim=1)

    def take(self, o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """[B, Hq, D] float32, merged with the CPU's half."""
        end, mailbox = time.monotonic() + self.timeout_s, self.mailbox
        while mailbox.load(Word.ANSWERED) < self.sequence:
            late = mailbox.load(Word.LATE) != 0
            if not late and time.monotonic() < end and not mailbox.load(Word.CANCEL):
                time.sleep(0)
                continue
            if not late:
                mailbox.store(Word.LATE, self.sequence)
            if mailbox.load(Word.ANSWERED) < self.sequence:
                raise GaveUp
        slot = mailbox.slot(self.sequence, len(self.rows))
        read = (slot.lse != -torch.inf).unsqueeze(-1)
        return merge_state(o, lse, torch.where(read, slot.o, 0.0), slot.lse)[0]


class DeviceWorld:
    """A world whose decode steps run on the Python device."""

    def __init__(self, world: World, timeout_s: float = 20.0) -> None:
        self.world = world
        self.mailbox = mailbox_for(world)
        self.server = LayerServer(world.engine, self.mailbox, timeout_s)
        self.device = PythonDevice(world, self.mailbox, timeout_s)

    def __enter__(self) -> DeviceWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def begin(self, rows: list[int], policies: Sequence[Policy] | None = None) -> None:
        """Begin a step of these rows, on the device and on the server."""
        world = self.world
        lengths = [world.length(row) + 1 for row in rows]
        table = world.table(rows, lengths)
        self.device.step(rows, lengths)
        self.server.begin(torch.tensor(rows, dtype=torch.int64), torch.tensor(lengths), table, world.scale, policies)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The device's output of a layer, and exact attention, [B, Hq, D] each."""
        world, device, rows = self.world, self.device, self.device.rows
        q = world.randn(len(rows), world.heads * world.group, world.dim)
        k, v = world.randn(len(rows), world.heads, world.dim), world.randn(len(rows), world.heads, world.dim)
        device.publish(layer, q, k, v)
        got = device.take(*device.resident(layer, q))
        return got, world.take(rows, layer, q, k, v)

    def decode(
        self, rows: list[int], policies: Sequence[Policy] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`World.decode`, on the device."""
        self.begin(rows, policies)
        results = [self.layer(layer) for layer in range(self.world.layers)]
        self.server.finish()
        return results
