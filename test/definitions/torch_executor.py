"""The reference executor: tasks in plain torch, float32, straight from the definitions.

It shares no code with the native kernels for scores, selection and attention, and serves as their oracle. Beside them
on one queue it also shows that any executor may compute a task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from definitions.progressive import MICROBATCH_PAGES, read_until
from definitions.sketches import exact_share, keys_of, least_kept
from fluxion_lab.kinds import LISTED, SINGLE, EarlyStop, Record, early_stop, listed
from fluxion_sglang.executor.base import Executor, ExecutorId, LayerWork
from fluxion_sglang.executor.merge import merge_state
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy.base import SKETCHED
from fluxion_sglang.policy.sketch import SketchedTokens


def block_pages(middle: int, blk: int, sink_pages: int) -> list[range]:
    """Logical pages of every block of the middle, without sinks and window; budgets count these blocks.

    Args:
        middle: tokens of the middle. blk: tokens of a block; blocks are aligned to absolute positions.
    """
    span, stop = blk // PAGE, sink_pages + middle // PAGE
    return [
        range(max(b * span, sink_pages), min((b + 1) * span, stop)) for b in range(sink_pages // span, -(-stop // span))
    ]


def block_scores(q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, spread: float) -> torch.Tensor:
    """Scores that rank blocks: q at the center of each block's box, plus a share of the contribution of the half
    widths.

    With a `spread` of 1 this is Quest's upper bound of q.k, sum_d max(q_d min_d, q_d max_d) (arXiv 2406.10774). The
    weights of minima and maxima are rounded to the metadata's dtype, as in the kernels.

    Args:
        q: [G, D]. lo, hi: [n, D] in the KV dtype. spread: in (0, 1].

    Returns:
        [G, n] float32; float64 if q is float64.
    """
    half, wide = q / 2, spread * q.abs() / 2
    low, high = ((half + sign * wide).to(lo.dtype).to(q.dtype) for sign in (-1, 1))
    return low @ lo.to(q.dtype).T + high @ hi.to(q.dtype).T


def blocks_to_read(budget: float, middle: int, blk: int, blocks: int) -> int:
    """Number of blocks for a budget: ceil(budget * middle / blk), at least one, at most all; a budget of 1 means all.

    The middle's first and last block may be cut, so there can be more blocks than middle / blk. A relative tolerance of
    1e-6 keeps budgets that float32 rounds up (0.05) from one block too many.
    """
    if budget >= 1:
        return blocks
    return min(blocks, max(1, math.ceil(budget * middle / blk * (1 - 1e-6))))


def positions_of(pages: Iterable[int]) -> list[int]:
    """Positions of the tokens of logical pages, in ascending order."""
    return [page * PAGE + t for page in sorted(pages) for t in range(PAGE)]


class TorchReferenceExecutor(Executor):
    """Pulls tasks in the calling thread.

    Args:
        attend_union: all heads of a group attend to blocks that one of them chose.
    """

    id = ExecutorId.TORCH

    def __init__(self, pool: HostPool, attend_union: bool) -> None:
        self.pool = pool
        self.attend_union = attend_union

    def drain(self, work: LayerWork) -> None:
        while (task := work.pop(self.id)) is not None:
            try:
                result = self.compute(work, *work.request_and_head(task))
            except Exception as error:  # every pulled task must be reported, or the layer waits for it
                work.native.task_failed(task, f"the torch executor failed: {error}")
            else:
                work.native.task_done(task, *result)

    def compute(self, work: LayerWork, b: int, h: int) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
        """Arguments of `NativeEngine.task_done` for request `b` and KV head `h`: o [G, D] and lse [G], float32, the
        tokens read, and the bytes of tiles and of metadata.

        The metadata counts every page, because this executor scans all of them. The native engine needs less: one entry
        per coarse block, and none if every head reads everything.
        """
        group = work.group
        heads = slice(h * group, (h + 1) * group)
        q = work.q[b, heads].float()
        if int(work.plan.blk[b, h]) == SKETCHED:
            return self.by_sketches(work, b, h, q)
        blk, again = int(work.plan.blk[b, h]), 0  # again: keys and values read beside attended ones
        if blk == LISTED:
            chosen, again = self.select_listed(work, b, h, q)
        elif blk == SINGLE:
            chosen = self.select_tokens(work, b, h, q)
        elif (stopping := early_stop(work.plan)) is not None and 0 < float(stopping.stop[b, h]) < 1:
            chosen, again = self.select_until(work, b, h, q, stopping)
        else:
            chosen = self.select(work, b, h, q)
        o = torch.zeros_like(q)
        lse = torch.full((group,), -torch.inf)
        for g, positions in enumerate(chosen):
            if not positions:
                continue
            k, v = self.rows(work, b, h, positions)
            scores = _logits(work, k.float() @ q[g])
            lse[g] = scores.logsumexp(0)
            o[g] = (scores - lse[g]).exp() @ v.float()
        if blk == LISTED and (lists := listed(work.plan)) is not None and lists.given is not None:
            more = lists.given.lse[b, heads]
            o, lse = merge_state(o, lse, lists.given.o[b, heads].where(more[:, None] > -torch.inf, 0.0), more)
        pair = 2 * q.shape[1] * self.pool.tiles(work.layer).element_size()  # a key and a value; a minimum and a maximum
        tile_bytes = len(set().union(*chosen)) * pair + again * pair // 2
        metadata_bytes = 0 if blk in (SINGLE, LISTED) else int(work.step.middle[b]) // PAGE * pair
        return o, lse, sum(map(len, chosen)), tile_bytes, metadata_bytes

    def by_sketches(
        self, work: LayerWork, b: int, h: int, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
        """`compute` for a group that chooses tokens by sketches of their keys (`csrc/engine/sketched.h`).

        It scores all tokens with all bits, without skimming.
        """
        middle, placement, n = int(work.step.middle[b]), self.pool.placement, int(work.step.seq_lens[b])
        kind = next(kind for kind in work.plan.kinds if isinstance(kind, SketchedTokens))
        left = float(kind.left[b, h])
        first = placement.sinks // PAGE
        pages = work.page_table[b, first : first + middle // PAGE].tolist()
        sketches = self.pool.tensor("sketches", work.layer)[h]
        about = torch.cat([keys_of(sketches[page], q.shape[1]) for page in pages]).float()
        scores = _logits(work, q @ about.T)
        k, v = self.rows(work, b, h, range(n))
        window = torch.tensor([*range(placement.sinks), *range(placement.sinks + middle, n)])
        residents = _logits(work, q @ k[window].float().T).logsumexp(1)
        read, exact = torch.full((2, middle), left == 0)
        for g in range(work.group if left > 0 else 0):
            top = torch.maximum(scores[g].max(), residents[g])
            weights, beside = (scores[g] - top).exp(), float((residents[g] - top).exp())
            read |= least_kept(weights, beside, left)
            exact |= least_kept(weights, beside, exact_share(left))
        tiles = int(read.view(-1, PAGE).any(1).sum())
        if left == 0 or 2 * int(exact.sum()) > tiles * PAGE:
            exact = read
        k, v = (part[placement.sinks : placement.sinks + middle].float() for part in (k, v))
        logits = torch.where(exact, _logits(work, q @ k.T), scores)[:, read]
        lse = logits.logsumexp(1)
        o = logits.softmax(1) @ v[read]
        row = self.pool.tiles(work.layer).element_size() * q.shape[1]
        rows = 2 * tiles * PAGE if exact is read else int(read.sum()) + int(exact.sum())
        return o, lse, int(read.sum()) * work.group, rows * row, len(pages) * sketches.shape[1] if left > 0 else 0

    def rows(self, work: LayerWork, b: int, h: int, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens of a request, [n, D] each."""
        at = torch.as_tensor(positions)
        pages = work.page_table[b].long()[at // PAGE]
        k, v = self.pool.tiles(work.layer)[h][pages, :, at % PAGE].unbind(1)
        return k, v

    def select_tokens(self, work: LayerWork, b: int, h: int, q: torch.Tensor) -> list[list[int]]:
        """For each head of the group, positions of the tokens with the largest q.k; the earlier of equal ones."""
        middle, first = int(work.step.middle[b]), self.pool.placement.sinks
        keys, _ = self.rows(work, b, h, range(first, first + middle))
        order = torch.sort(q @ keys.float().T, dim=1, descending=True, stable=True).indices + first
        budgets = work.plan.budget[b, h * work.group : (h + 1) * work.group].tolist()
        counts = [blocks_to_read(budget, middle, 1, middle) if budget > 0 else 0 for budget in budgets]
        return [sorted(row[:count].tolist()) for row, count in zip(order, counts, strict=True)]

    def select_listed(self, work: LayerWork, b: int, h: int, q: torch.Tensor) -> tuple[list[list[int]], int]:
        """For each head of the group, the positions in its list or the best of them; and the number of keys ranked."""
        lists = listed(work.plan)
        assert lists is not None
        offsets, pages, masks = lists.offsets, lists.pages, lists.masks
        group, middle = work.group, int(work.step.middle[b])
        at = slice(*offsets[b * work.step.kv_heads + h :][:2].tolist())
        rows = list(zip(pages[at].tolist(), masks[at].tolist(), strict=True))
        chosen: list[list[int]] = []
        ranked: set[int] = set()
        for g, budget in enumerate(work.plan.budget[b, h * group : (h + 1) * group].tolist()):
            own = [page * PAGE + t for page, row in rows for t in range(PAGE) if row[g] >> t & 1]
            count = blocks_to_read(budget, middle, 1, middle) if budget > 0 else 0
            if 0 < count < len(own):
                keys, _ = self.rows(work, b, h, own)
                best = torch.sort(keys.float() @ q[g], descending=True, stable=True).indices[:count]
                ranked |= set(own)
                own = sorted(own[i] for i in best.tolist())
            chosen.append(own if count else [])
        if lists.record is not None:
            ranked |= self.record(work, b, h, q, lists.record, chosen)
        return chosen, len(ranked)

    def record(
        self, work: LayerWork, b: int, h: int, q: torch.Tensor, record: Record, chosen: list[list[int]]
    ) -> set[int]:
        """Record what each head of the group chose from its list; return the positions whose keys this reads."""
        lists = listed(work.plan)
        assert lists is not None
        offsets, pages, masks = lists.offsets, lists.pages, lists.masks
        first, end = offsets[b * work.step.kv_heads + h :][:2].tolist()
        budget = work.plan.budget[b, h * work.group : (h + 1) * work.group]
        at = {page: i for i, page in enumerate(pages[first:end].tolist(), start=first)}
        for g, positions in enumerate(chosen):
            found = torch.zeros(end - first, dtype=torch.int32)
            if positions:
                keys, _ = self.rows(work, b, h, positions)
                for position, score in zip(positions, (keys.float() @ q[g]).tolist(), strict=True):
                    page, t = divmod(position, PAGE)
                    found[at[page] - first] |= 1 << t
                    record.scores[at[page], g, t] = score
            record.chosen[first:end, g] = found.to(torch.uint16)
        scored = masks[first:end].to(torch.int32)[:, (budget > 0) & (budget < 1)].tolist()
        return {
            page * PAGE + t
            for page, i in at.items()
            for mask in scored[i - first]
            for t in range(PAGE)
            if mask >> t & 1
        }

    def select(self, work: LayerWork, b: int, h: int, q: torch.Tensor) -> list[list[int]]:
        """Positions of the blocks that each head of the group attends to, in ascending order."""
        blocks, scores, counts = self.ranked(work, b, h, q, self.pool.spread)
        chosen: list[set[int]] = []
        for row, count in zip(scores, counts, strict=True):
            best = torch.sort(row, descending=True, stable=True).indices[:count]
            chosen.append({page for i in best.tolist() for page in blocks[i]})
        if self.attend_union:
            union = set().union(*chosen)
            chosen = [union] * work.group
        return [positions_of(pages) for pages in chosen]

    def select_until(
        self, work: LayerWork, b: int, h: int, q: torch.Tensor, stopping: EarlyStop
    ) -> tuple[list[list[int]], int]:
        """Positions of the blocks that each head attends to before the group has enough; and the number of keys and
        values read twice, because heads reached them in different microbatches."""
        blocks, scores, counts = self.ranked(work, b, h, q, float(stopping.spread[b, h]))
        middle, placement, n = int(work.step.middle[b]), self.pool.placement, int(work.step.seq_lens[b])
        logits = _logits(work, q @ self.rows(work, b, h, range(n))[0].float().T)
        found = read_until(
            scores,
            [logits[:, positions_of(pages)] for pages in blocks],
            torch.cat([logits[:, : placement.sinks], logits[:, placement.sinks + middle :]], dim=1),
            float(stopping.stop[b, h]),
            least=max(1, MICROBATCH_PAGES * PAGE // int(work.plan.blk[b, h])),
            union=self.attend_union,
            limits=counts,
        )
        chosen = [positions_of(page for i in read for page in blocks[i]) for read in found.read]
        read = sum(len(blocks[i]) for batch in found.microbatches for i in batch) * PAGE
        return chosen, 2 * (read - len(set().union(*chosen)))

    def ranked(
        self, work: LayerWork, b: int, h: int, q: torch.Tensor, spread: float
    ) -> tuple[list[range], torch.Tensor, list[int]]:
        """Pages of the middle's blocks, their scores [G, n], and each head's number of blocks."""
        group, blk, middle = work.group, int(work.plan.blk[b, h]), int(work.step.middle[b])
        blocks = block_pages(middle, blk, self.pool.placement.sink_pages)
        pages = work.page_table[b].long()
        lo, hi = self.pool.page_metadata(work.layer)[h].unbind(1)
        scores = block_scores(
            q,
            torch.stack([lo[pages[list(block)]].amin(0) for block in blocks]),
            torch.stack([hi[pages[list(block)]].amax(0) for block in blocks]),
            spread,
        )
        budgets = work.plan.budget[b, h * group : (h + 1) * group].tolist()
        return blocks, scores, [blocks_to_read(x, middle, blk, len(blocks)) if x > 0 else 0 for x in budgets]


def _logits(work: LayerWork, scores: torch.Tensor) -> torch.Tensor:
    """Softmax inputs of scores q.k."""
    scaled = work.scale * scores
    return work.cap * torch.tanh(scaled / work.cap) if work.cap else scaled
