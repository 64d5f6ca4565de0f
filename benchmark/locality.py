"""Whether a cache of tiles in GPU memory would hit: which tiles of the middle a model reads, step by step.

    python benchmark/locality.py                          # the public checkpoints, at all that they take
    python benchmark/locality.py --models gemma3
    python benchmark/locality.py --quick

A model reads a window of real text by exact attention. Its last tokens count as decode steps: what they attend from and
to is what forcing them one by one would give. For every step, layer and KV head it is noted which tiles (pages of 16
tokens of one KV head) of the middle are read, under each policy, in two ways:

- union: every query head of the group chooses, and the group reads what any of them chose, as the engine does.
- once: the group chooses as if it were one head. `fixed` ranks blocks by the best score that a head gives them;
  `sketch` leaves EPS of the mean of the heads' attention.

A choice may be kept: with 4, the tiles of a step are read in the next three, too. The tiles go through caches of a
share of the middle's tiles, all layers and KV heads together. They start empty. The first steps warm them up, and do
not count. `read` (u) is the share of the middle's tiles that is read in a step, `hit` (h) the share of these that the
cache has, `missed` is u (1 - h). Layers with a sliding window have no middle, and do not count. Under `sketch` the
engine reads a few percent more: its search ends up to a tenth of EPS early. `fluxion` is left out, because no public
checkpoint has a predictor. Results go to locality.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from states import States, capture
from torch import Tensor
from tqdm import tqdm

from fluxion_quality.model import Model
from fluxion_quality.perplexity import Text
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.policy import Policy, parse_spec
from fluxion_sglang.policy.fixed import FixedPolicy
from fluxion_sglang.policy.sketch import SketchPolicy
from fluxion_sglang.scoring.model_files import public

sys.path.insert(0, str(common.ROOT / "test"))
from definitions.sketches import mixed_together, rotation
from definitions.torch_executor import block_scores, blocks_to_read

POLICIES = (common.SKETCH, "fixed:16:0.05", "fixed:16:0.25")
WAYS = ("union", "once")
KEPT = (1, 2, 4, 8)
SHARES = (0.02, 0.05, 0.10, 0.15, 0.20, 0.30)
WARM = 32
CHUNK = 1024
"""Tokens of a prompt that the model reads at a time: the masks of more would take gigabytes."""
Row = dict[str, Any]
Steps = list[list[int]]
"""Of every step the tiles that are read, in the order in which they are; no tile twice."""


# ---- caches of `capacity` tiles: they yield the hits of each step. Every tile that is missing is taken in.


def lru(steps: Steps, capacity: int) -> Iterator[int]:
    """The least recently used tile makes room."""
    held: OrderedDict[int, None] = OrderedDict()
    for tiles in steps:
        hits = 0
        for tile in tiles:
            if tile in held:
                held.move_to_end(tile)
                hits += 1
            else:
                held[tile] = None
                if len(held) > capacity:
                    held.popitem(last=False)
        yield hits


def clock(steps: Steps, capacity: int) -> Iterator[int]:
    """Second chance, as `csrc/cuda/near_keep.cu` has it: the next slot makes room that was not found since the hand
    passed it."""
    slots: dict[int, int] = {}
    tile_of: list[int] = []
    found = bytearray(capacity)
    hand = 0
    for tiles in steps:
        hits = 0
        for tile in tiles:
            slot = slots.get(tile)
            if slot is not None:
                found[slot] = 1
                hits += 1
            elif len(tile_of) < capacity:
                slots[tile] = len(tile_of)
                tile_of.append(tile)
            else:
                while found[hand]:
                    found[hand] = 0
                    hand = (hand + 1) % capacity
                del slots[tile_of[hand]]
                slots[tile], tile_of[hand] = hand, tile
                hand = (hand + 1) % capacity
        yield hits


def s3fifo(steps: Steps, capacity: int) -> Iterator[int]:
    """S3-FIFO, which a scan does not flush (Yang et al., SOSP 2023, doi 10.1145/3600006.3613147).

    A tile enters a small queue of a tenth. Found twice there, it goes on to the main queue; otherwise its name alone is
    kept for as many evictions as the main queue has places, and if it comes again meanwhile it enters the main queue.
    """
    few = max(1, capacity // 10)
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: OrderedDict[int, None] = OrderedDict()
    found: dict[int, int] = {}  # of every tile that is held: how often, at most 3

    def evict_main() -> None:
        while found[tile := main.popleft()]:
            found[tile] -= 1
            main.append(tile)
        del found[tile]

    def evict() -> None:
        if len(small) < few and main:
            return evict_main()
        tile = small.popleft()
        if found[tile] > 1:
            found[tile] = 0
            if main and len(main) >= capacity - few:
                evict_main()
            main.append(tile)
            return
        del found[tile]
        ghosts[tile] = None
        if len(ghosts) > capacity - few:
            ghosts.popitem(last=False)

    for tiles in steps:
        hits = 0
        for tile in tiles:
            times = found.get(tile)
            if times is not None:
                found[tile] = min(3, times + 1)
                hits += 1
                continue
            while len(found) >= capacity:
                evict()
            found[tile] = 0
            if tile in ghosts:
                del ghosts[tile]
                main.append(tile)
            else:
                small.append(tile)
        yield hits


CACHES: dict[str, Callable[[Steps, int], Iterator[int]]] = {"clock": clock, "lru": lru, "s3fifo": s3fifo}


# ---- choices: [H, pages] bool, of a step of a layer with H KV heads and G query heads each


class Sketches(NamedTuple):
    """Keys [H, n, D] as sketches have them (`csrc/kernels/sketch.h`), rotated, float32.

    Attributes:
        whole, upper: [H, n, D], what all bits of the codes stand for, and the upper ones alone.
        widest: [H, n / 16], the largest scale of every page.
    """

    whole: Tensor
    upper: Tensor
    widest: Tensor

    @classmethod
    def of(cls, keys: Tensor) -> Sketches:
        rotated = (keys.double() @ rotation(keys.shape[-1])).float()
        scales = (rotated.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-30).bfloat16().float()
        codes = (rotated / scales + 7.5).clamp(0, 15).round()
        widest = scales.unflatten(1, (-1, PAGE)).amax((2, 3))
        return cls((codes - 7.5) * scales, (4 * (codes // 4) - 6) * scales, widest)

    def first(self, tokens: int) -> Sketches:
        return Sketches(self.whole[:, :tokens], self.upper[:, :tokens], self.widest[:, : tokens // PAGE])


def heaviest(weights: Tensor, allowed: Tensor) -> Tensor:
    """[..., n] bool: the fewest of the weights [..., n], the heaviest first, after which at most `allowed` [...] is
    left."""
    ordered, order = weights.sort(-1, descending=True)
    rest = ordered.flip(-1).cumsum(-1).flip(-1)  # with this one and all after it
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, rest > allowed[..., None])


def sketched_shares(q: Tensor, keys: Sketches, beside: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """What tokens of the middle have of each head's attention, as the sketches and `csrc/engine/sketched.cc` have it:
    pages that matter to no head of the group are skimmed alone.

    Args:
        q: [H, G, D]. beside: [H, G], the LSE of the residents.

    Returns:
        [H, G, n], 0 on pages that are skimmed alone, and what these have together, [H, G].
    """
    dim = q.shape[-1]
    rotated = scale / mixed_together(dim) * (q.double() @ rotation(dim)).float()
    about = (rotated @ keys.upper.mT).unflatten(-1, (-1, PAGE)).amax(-1)
    most = about + 1.5 * math.sqrt(1.25) * rotated.norm(dim=-1, keepdim=True) * keys.widest[:, None]
    unit = torch.maximum(most.amax(-1), beside)[..., None]
    whole = (about - unit).exp().sum(-1) + (beside - unit[..., 0]).exp()
    # A page counts as four of its best token, and pages that are skimmed alone may have half of what may be left.
    near = heaviest((most - unit).exp(), eps / 8 * whole).any(1)
    skipped = about.masked_fill(near[:, None], -torch.inf).logsumexp(-1) + math.log(4)
    logits = (rotated @ keys.whole.mT).masked_fill(~near.repeat_interleave(PAGE, 1)[:, None], -torch.inf)
    lse = torch.stack([logits.logsumexp(-1), skipped, beside]).logsumexp(0)
    return (logits - lse[..., None]).exp(), (skipped - lse).exp()


def by_sketch(q: Tensor, keys: Sketches, beside: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """What a group reads under `sketch`, by union and where it chooses once; arguments as of `sketched_shares`."""
    shares, skipped = sketched_shares(q, keys, beside, scale, eps)
    union = heaviest(shares, (eps - skipped).clamp(min=eps / 2)).any(1)
    once = heaviest(shares.mean(1), (eps - skipped.mean(1)).clamp(min=eps / 2))
    by_union, by_once = (tokens.unflatten(1, (-1, PAGE)).any(-1) for tokens in (union, once))
    return by_union, by_once


def by_blocks(q: Tensor, lo: Tensor, hi: Tensor, budget: float) -> tuple[Tensor, Tensor]:
    """The same under `fixed` with blocks of a page.

    Args:
        q: [H, G, D] float32. lo, hi: [H, pages, D], minima and maxima of the keys of every page.
    """
    scores = torch.stack([block_scores(*head, 1.0) for head in zip(q, lo, hi, strict=True)])
    pages = lo.shape[1]
    count = blocks_to_read(budget, pages * PAGE, PAGE, pages)

    def top(ranked: Tensor) -> Tensor:
        best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best, True)

    return top(scores).any(1), top(scores.amax(1))


def choices(states: list[States], policies: list[Policy]) -> dict[tuple[str, str], Tensor]:
    """By policy and way: [T, layers, H, pages] bool, the tiles that each step reads; the states have T queries. Pages
    are those of the last step's middle."""
    placement, (_, steps, _), (heads, tokens, _) = Placement(), states[0].q.shape, states[0].k.shape
    most, sinks = placement.middle(tokens), placement.sinks
    shape = steps, len(states), heads, most // PAGE
    found = {(policy.spec, way): torch.zeros(shape, dtype=torch.bool) for policy in policies for way in WAYS}
    for layer, (q, k, _, scale) in enumerate(tqdm(states, desc="choices", unit="layer", leave=False)):
        middle = k[:, sinks : sinks + most]
        blocks = middle.unflatten(1, (-1, PAGE))
        sketches, lo, hi = Sketches.of(middle), blocks.amin(2), blocks.amax(2)
        grouped = q.float().unflatten(0, (heads, -1))
        for step in range(steps):
            n = tokens - steps + step + 1
            start = placement.window_start(n)
            pages, now = (start - sinks) // PAGE, grouped[:, :, step]
            residents = torch.cat([k[:, :sinks], k[:, start:n]], 1).float()
            beside = (scale * now @ residents.mT).logsumexp(-1)
            for policy in policies:
                if isinstance(policy, SketchPolicy):
                    chosen = by_sketch(now, sketches.first(start - sinks), beside, scale, policy.eps)
                else:
                    assert isinstance(policy, FixedPolicy) and policy.blk == PAGE
                    chosen = by_blocks(now, lo[:, :pages], hi[:, :pages], policy.budget)
                for way, tiles in zip(WAYS, chosen, strict=True):
                    found[policy.spec, way][step, layer, :, :pages] = tiles
    return found


# ---- the model


def states_of(model: Any, tokens: list[int], steps: int) -> list[States]:
    """Queries of the last `steps` tokens and all keys, of the layers that attend to everything."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    prompt = tokens[: len(tokens) - steps]
    with torch.no_grad():
        for at in tqdm(range(0, len(prompt), CHUNK), desc="prefill", unit="chunk", leave=False):
            model(torch.tensor([prompt[at : at + CHUNK]]), past_key_values=cache, logits_to_keep=1)
    found = capture(model, tokens[len(prompt) :], cache)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(found)
    return [state for state, kind in zip(found, kinds, strict=True) if kind == "full_attention"]


def replayed(tiles: Tensor, middles: list[int], kept: int) -> Iterator[Row]:
    """A row a share: what is read of the middle's tiles, and what caches of that share have of it.

    Args:
        tiles: [T, layers, H, pages] bool. middles: pages of the middle at each step.
    """
    groups = tiles[0, :, :, 0].numel()
    steps = [tiles[step - step % kept].flatten().nonzero().flatten().tolist() for step in range(len(tiles))]
    counted = max(1, sum(map(len, steps[WARM:])))
    read = counted / (groups * sum(middles[WARM:]))
    for share in SHARES:
        capacity = max(1, round(share * groups * middles[-1]))
        row: Row = {"kept": kept, "share": share, "read": read}
        for name, cache in CACHES.items():
            hit = sum(list(cache(steps, capacity))[WARM:]) / counted
            row |= {f"{name}_hit": hit, f"{name}_missed": read * (1 - hit)}
        yield row


def measure(folder: Path, text: Path, tokens: int | None, steps: int) -> tuple[Row, list[Row]]:
    """What there is to say of a model, and its rows.

    Args:
        tokens: of the window, those of the steps included; None: all that the model takes.
    """
    from transformers import AutoModelForCausalLM

    described = Model.read(folder)
    tokens = tokens or described.room
    (sample,) = Text((text,), targets=steps).samples(described.codec(), tokens, 1, 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    states = states_of(model, list(sample.prompt), steps)
    group, layers = len(states[0].q) // len(states[0].k), len(states)
    about = {"sha256": described.sha256(), "layers": layers, "kv_heads": len(states[0].k), "group": group}
    found = choices(states, [parse_spec(spec) for spec in POLICIES])
    middles = [Placement().middle(tokens - steps + step + 1) // PAGE for step in range(steps)]
    rows = []
    for (policy, way), tiles in tqdm(found.items(), desc="caches", unit="choice", leave=False):
        for kept in KEPT:
            own = {"model": described.id, "tokens": tokens, "policy": policy, "way": way}
            rows += [{**own, **row} for row in replayed(tiles, middles, kept)]
    return about, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2,gemma3", help="names of `make checkpoints`, or folders")
    parser.add_argument("--text", default="handbook", help="a name of `make checkpoints`, or a file")
    parser.add_argument("--tokens", type=int, help="of the window; default: all that the model takes")
    parser.add_argument("--steps", type=int, default=256, help=f"of these tokens; the first {WARM} warm the caches up")
    parser.add_argument("--quick", action="store_true", help="1K tokens; the result file is not a published one")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing the result file")
    parser.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.steps = 1024, 48
    path = common.result_path(args, "locality")
    text = Path(public(args.text, "texts"))
    header = {**common.header("locality"), "text": text.stem, "steps": args.steps, "warm": WARM, "models": {}}
    data = common.resume(path, header, (*common.SAME, "text", "steps", "warm"), args.fresh)
    for name in args.models.split(","):
        about, rows = measure(Path(public(name)), text, args.tokens, args.steps)
        same = {(row["model"], row["tokens"]) for row in rows}
        data["rows"] = [row for row in data["rows"] if (row["model"], row["tokens"]) not in same] + rows
        data["models"][rows[0]["model"]] = about
        common.save(path, data)
        for row in (row for row in rows if row["kept"] == 1):
            missed = ", ".join(f"{name} {row[f'{name}_missed']:.3f}" for name in CACHES)
            print(
                f"{row['model']} {row['tokens']} {row['policy']:14} {row['way']:5} "
                f"read {row['read']:.3f}; cache {row['share']:.2f}: missed {missed}"
            )
    print(f"{path}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
