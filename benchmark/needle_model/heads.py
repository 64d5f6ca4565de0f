"""Statistics of the needle model's heads when it answers.

For every head and every answered token ("step"): whether sinks and window suffice (a streaming head), or else the
smallest budget that keeps the error within tau, for every block size (Fluxion, Eq. 2; blocks ranked by Quest's bound,
as in serving); where the attention mass lies; and how large the values of the sinks are.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .data import KINDS, WORD, Generator, Mix
from .model import SINKS, WINDOW, NeedleModel

BLOCKS = (16, 32, 64, 128)
_PAGE = 16


@torch.no_grad()
def sequence_statistics(model: NeedleModel, tokens: Tensor, steps: Tensor, tau: float) -> dict[str, Tensor]:
    """Statistics of one sequence.

    Args:
        tokens: [T] int64. steps: [N] int64, positions whose next token belongs to an answer.

    Returns:
        error [L, N, Hq] with sinks and window alone; budget [L, N, Hq, 4], the smallest share of the middle for BLOCKS;
        bos, window [L, N, Hq], attention mass on token 0 and on the last 256 tokens; tokens90 [L, N, Hq], tokens
        that hold 90% of the mass; sink_value [L, H], norm of token 0's value over the mean norm; overlap [L], mean
        mass that two heads of a group have in common.
    """
    found: dict[str, list[Tensor]] = {}

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        row = _layer_statistics(q[0, :, steps].float(), k[0].float(), v[0].float(), steps, tau)
        for name, value in row.items():
            found.setdefault(name, []).append(value)

    model(tokens[None], torch.arange(len(tokens))[None], None, observe)
    return {name: torch.stack(rows) for name, rows in found.items()}


def _layer_statistics(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, tau: float) -> dict[str, Tensor]:
    """Statistics of one layer: q [Hq, N, D] at the steps; k, v [H, T, D]."""
    Hq, N, D = q.shape
    H, T = k.shape[:2]
    group = Hq // H
    at = torch.arange(T)
    scores = torch.einsum("hgnd,htd->hgnt", q.view(H, group, N, D), k).reshape(Hq, N, T) / math.sqrt(D)
    scores = scores.masked_fill(at > steps[:, None], -math.inf)
    p = scores.softmax(-1)
    grouped_v = v.repeat_interleave(group, 0)
    full = p @ grouped_v
    # Page aligned, as in serving: the window is the last 256 to 271 tokens.
    start = ((steps + 1 - WINDOW) // _PAGE * _PAGE)[:, None]
    resident = (at < SINKS) | (at >= start)
    near = scores.masked_fill(~resident, -math.inf)
    near_lse = near.logsumexp(-1)
    near_o = near.softmax(-1) @ grouped_v
    largest = full.norm(dim=-1).amax(0).clamp(min=1e-9)
    error = (near_o - full).norm(dim=-1) / largest
    budget = torch.stack(
        [_least_budget(q, k, v, scores, start[:, 0], near_o, near_lse, full, largest, blk, tau) for blk in BLOCKS], -1
    )
    mass = p.sort(-1, descending=True).values.cumsum(-1)
    pairs = p.view(H, group, N, T)
    common = [torch.minimum(pairs[:, i], pairs[:, j]).sum(-1).mean() for i in range(group) for j in range(i + 1, group)]
    return {
        "error": error.T,
        "budget": budget.transpose(0, 1),
        "bos": p[..., 0].T,
        "window": (p * (at >= start)).sum(-1).T,
        "tokens90": ((mass < 0.9).sum(-1) + 1).float().T,
        "sink_value": v[:, 0].norm(dim=-1) / v.norm(dim=-1).mean(-1),
        "overlap": torch.stack(common).mean(),
    }


def _least_budget(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    start: Tensor,
    near_o: Tensor,
    near_lse: Tensor,
    full: Tensor,
    largest: Tensor,
    blk: int,
    tau: float,
) -> Tensor:
    """[Hq, N]: smallest share of blocks; blocks are merged in the order of Quest's bound until the error stays within
    tau."""
    Hq, N, D = q.shape
    H = k.shape[0]
    out = torch.zeros(Hq, N)
    for n in range(N):
        stop = int(start[n])
        edges = [SINKS, *range((SINKS // blk + 1) * blk, stop, blk), stop]
        sizes = torch.tensor([b - a for a, b in itertools.pairwise(edges)])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        count = len(sizes)
        for h in range(H):
            heads = slice(h * Hq // H, (h + 1) * Hq // H)
            keys, query = k[h, SINKS:stop], q[heads, n]
            index = owner[:, None].expand(-1, D)
            low = torch.full((count, D), math.inf).scatter_reduce(0, index, keys, "amin")
            high = torch.full((count, D), -math.inf).scatter_reduce(0, index, keys, "amax")
            bound = query.clamp(min=0) @ high.T + query.clamp(max=0) @ low.T
            order = bound.argsort(-1, descending=True)
            s = scores[heads, n, SINKS:stop]
            top = torch.maximum(s.amax(-1), near_lse[heads, n])[:, None]
            weight = (s - top).exp()
            mass = torch.zeros(len(s), count).index_add(1, owner, weight)
            value = torch.zeros(len(s), count, D).index_add(1, owner, weight[..., None] * v[h, SINKS:stop])
            mass = mass.gather(1, order).cumsum(1)
            value = value.gather(1, order[..., None].expand(-1, -1, D)).cumsum(1)
            resident = (near_lse[heads, n, None] - top).exp()
            merged = (value + resident[..., None] * near_o[heads, n, None]) / (mass + resident)[..., None]
            error = (merged - full[heads, n, None]).norm(dim=-1) / largest[n]
            alone = (near_o[heads, n] - full[heads, n]).norm(dim=-1) / largest[n]
            error = torch.cat([alone[:, None], error], 1)
            # The index of the last error above tau, plus one: from there on the error stays within tau.
            beyond = torch.arange(count + 1) * (error > tau)
            blocks = torch.where((error > tau).any(1), beyond.amax(1) + 1, 0)
            tokens = torch.cat([torch.zeros(len(s), 1), sizes[order].cumsum(1).float()], 1)
            out[heads, n] = tokens.gather(1, blocks.clamp(max=count)[:, None])[:, 0] / (stop - SINKS)
    return out


def summary(rows: list[dict[str, Tensor]], tau: float) -> dict[str, Any]:
    """Numbers of the model card, over all sequences and steps."""
    joined = {name: torch.cat([row[name] for row in rows], 1) for name in rows[0] if rows[0][name].dim() >= 3}
    L, N, Hq = joined["error"].shape
    streaming = joined["error"] <= tau
    budget = joined["budget"]
    retrieval = ~streaming
    slope = torch.linspace(-1.5, 1.5, len(BLOCKS)) / 5.0
    sink_value = torch.stack([row["sink_value"] for row in rows]).mean(0)
    heads = []
    for layer in range(L):
        for head in range(Hq):
            needy = retrieval[layer, :, head]
            least = budget[layer, :, head][needy]
            heads.append(
                {
                    "layer": layer,
                    "head": head,
                    "streaming": round(streaming[layer, :, head].float().mean().item(), 3),
                    "error": round(joined["error"][layer, :, head].mean().item(), 3),
                    "bos": round(joined["bos"][layer, :, head].mean().item(), 3),
                    "window": round(joined["window"][layer, :, head].mean().item(), 3),
                    "tokens90": int(joined["tokens90"][layer, :, head].median().item()),
                    "budget": [round(b, 4) for b in least.mean(0).tolist()] if len(least) else None,
                }
            )
    return {
        "tau": tau,
        "steps": N,
        "streaming": round(streaming.float().mean().item(), 4),
        "streaming_by_layer": [round(x, 4) for x in streaming.float().mean((1, 2)).tolist()],
        "budget_of_retrieval_heads": {
            str(blk): round(budget[..., i][retrieval].mean().item(), 4) for i, blk in enumerate(BLOCKS)
        },
        "budget_grows": round(((budget * slope).sum(-1)[retrieval] > 0).float().mean().item(), 4),
        "sink_value": [[round(x, 3) for x in layer] for layer in sink_value.tolist()],
        "overlap_in_group": [round(x, 3) for x in torch.stack([r["overlap"] for r in rows]).mean(0).tolist()],
        "heads": heads,
    }


def examine(model: NeedleModel, length: int, sequences: int, steps: int = 24, tau: float = 0.10) -> dict[str, Any]:
    """The numbers of the model card.

    Args:
        length: tokens of a sequence. steps: maximum number of answered tokens that are examined per sequence.
    """
    data = Generator(99)
    rows, kinds = [], torch.zeros(len(KINDS))
    for i in tqdm(range(sequences), "heads"):
        batch = data.batch(1, length, Mix(dense=0.0, counting=float(i % 4 == 3), pose=0.0))
        kind = torch.from_numpy(batch.kinds[0])
        places = torch.nonzero((kind > WORD) & (torch.arange(length) > 2 * (SINKS + WINDOW))).flatten()
        if len(places) == 0:
            continue
        chosen = torch.randperm(len(places), generator=torch.Generator().manual_seed(i))[:steps]
        places = places[chosen].sort().values
        kinds += torch.bincount(kind[places], minlength=len(KINDS))
        rows.append(sequence_statistics(model, torch.from_numpy(batch.tokens[0]), places, tau))
    by_kind = {name: int(n) for name, n in zip(KINDS, kinds.tolist(), strict=True) if n}
    return {"length": length, **summary(rows, tau), "steps_by_kind": by_kind}
