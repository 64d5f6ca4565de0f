"""LFPS as a selection: its time beside exact top-k and Quest by length, and how much of the exact top-k it finds.

python benchmark/lfps_selection.py              # the bundled model
python benchmark/lfps_selection.py --quick

Queries, keys and values are those of a model that reads a document and its question. The last tokens count as decode
steps: score tables start before them, and go through the engine step by step. Everything is measured in the same steps:

- time (the paper's Fig. 5a): what one core takes to say what to read, all layers of a step. Exact top-k scores every
  key of the middle, Quest every block of 16; LFPS looks for candidates, scores these, and learns what was chosen.
  The heads of a group share what they read of keys and metadata; the paper's work apart, so both are measured: as the
  model has it, and with a KV head for every query head. Keys have 64 dimensions, and 128 as those of the paper's model:
  the same ones, turned into a larger space, so that every score stays what it is and every key costs twice the bytes.
  Documents beyond the model's 32K are read all the same, for their time; a quarter of an hour, most of it the model's.
- overlap (Fig. 2a): share of a head's k tokens with the largest scores that are among the k it was given, with and
  without the neighbours of candidates.
- candidates (Table 4): share of the middle that LFPS scores, by alpha.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import common
import torch
from states import States, capture
from torch import Tensor
from tqdm import tqdm

from fluxion_lab.kinds import listed
from fluxion_lab.lfps import LfpsPolicy
from fluxion_lab.lfps_tables import LfpsOptions
from fluxion_lab.oracle import OraclePolicy
from fluxion_quality import suite_named
from fluxion_quality.model import Model
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine, native_plan
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import Workers
from fluxion_sglang.policy import Policy
from fluxion_sglang.policy.base import DecodeStep, LayerPlan, World
from fluxion_sglang.policy.fixed import FixedPolicy

sys.path.insert(0, str(common.ROOT / "test"))
from definitions.torch_executor import block_scores

SEED = 6_000_000
BUDGET = 0.02
"""Of the middle: what the paper's Fig. 2 shows."""
NEEDED = 0.1
"""Least attention mass in the middle of a (head, step) whose overlap counts."""
LENGTHS = "4096,16384,32768,65536,131072"
ALPHAS = (0.1, 0.2, 0.3, 0.4)
WIDE = 128
"""Dimensions of a head of the paper's model."""
TASKS = ("niah_single_2", "niah_multikey_1", "vt", "fwe")
Row = dict[str, Any]
_ELSE = torch.ones(1 << 24)


def evict() -> None:
    """Reads so much that no cache has anything else: as the layers of a large model do to one another."""
    _ELSE.sum()


class TimedPolicy(LfpsPolicy):
    """Knows what the native parts of its plans and its learning took, and what the tasks chose."""

    def bind(self, world: World) -> None:
        super().bind(world)
        assert self.tables is not None
        self.scan_s = self.learn_s = 0.0
        self.tables._plan = self._timed(self.tables._plan, "scan_s")
        self.tables._update = self._timed(self.tables._update, "learn_s")

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if name == "scan_s":
                evict()
            start = time.perf_counter()
            result = call(*args)
            setattr(self, name, time.perf_counter() - start)
            return result

        return timed

    def lists(self, q_heads: int, middle: int, first: int) -> tuple[Tensor, Tensor]:
        """Of the last layer of a batch of one: candidates and chosen, [Hq, middle] bool."""
        assert self._planned is not None
        plan = self._planned[0]
        lists = listed(plan)
        assert lists is not None
        kv_heads = plan.blk.shape[1]
        out = []
        for masks in (lists.masks, lists.recorded().chosen):
            bits = (masks.to(torch.int32).unsqueeze(-1) >> torch.arange(PAGE)) & 1
            found = torch.zeros(kv_heads, q_heads // kv_heads, middle // PAGE, PAGE, dtype=torch.bool)
            for h in range(kv_heads):
                at = slice(*lists.offsets[h : h + 2].tolist())
                found[h][:, lists.pages[at].long() - first] = bits[at].transpose(0, 1).bool()
            out.append(found.flatten(0, 1).flatten(1))
        return out[0], out[1]


@dataclass
class Stream:
    """A request of one core's engine, fed with what a model computed for `states`, all but the last `steps` tokens
    prefilled."""

    states: list[States]
    steps: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        first = self.states[0]
        self.kv_heads, tokens, dim = first.k.shape
        self.q_heads = first.q.shape[0]
        self.placement = Placement()
        shape = KVShape(len(self.states), self.kv_heads, dim, self.dtype)
        pages = -(-tokens // PAGE)
        self.pool = HostPool(shape, pages * PAGE, self.placement, Workers(1))
        self.windows = Windows(self.pool, 1, "cpu")
        # In a shuffled order, as a busy allocator deals them.
        self.pages = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32) + 1
        self.engine = DecodeEngine(
            self.pool, self.windows, FixedPolicy(PAGE, BUDGET), [],
            FluxionConfig(attend_union=False, share_prefixes=False),
            q_heads=self.q_heads, max_requests=1, max_tokens=tokens,
        )  # fmt: skip
        self.device = HostDevice(self.pool, self.windows, self.engine)
        self.length = tokens - self.steps
        for layer, (_, k, v, _) in enumerate(self._typed()):
            self.pool.append(layer, self.pages, 0, k[: self.length], v[: self.length])
            self.windows.fill(layer, 0, self.length, self.pages)

    def _typed(self) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
        for q, k, v, scale in self.states:
            yield (*(t.transpose(0, 1).to(self.dtype).contiguous() for t in (q, k, v)), scale)

    def run(self, policy: Policy) -> Iterator[tuple[int, Tensor, Tensor, float, int]]:
        """Decodes the steps under `policy`, a layer at a time: (layer, q [Hq, D], keys of the middle [H, L, D] and of
        all [H, n, D], scale, n). The host has them all already, so every policy may have its turn."""
        layers = list(self._typed())
        for layer, (q, _, _, _) in enumerate(layers):
            self.engine.prefilled(layer, 0, self.length, q[: self.length], policy)
            self.windows.fill(layer, 0, self.length, self.pages)
        for step in range(self.steps):
            n = self.length + step + 1
            self.engine.begin_step(torch.tensor([0]), torch.tensor([n]), self.pages.unsqueeze(0), [policy])
            for layer, (q, k, v, scale) in enumerate(layers):
                self.device.decode(layer, q[n - 1 : n], k[n - 1 : n], v[n - 1 : n], scale)
                yield layer, q[n - 1], k[:n].transpose(0, 1), scale, n

    def selection_s(
        self, layer: int, n: int, policy: Policy, plan: LayerPlan | None = None, warm: bool = False
    ) -> float:
        """Seconds to select for every task of a layer of the step at hand under `policy`."""
        q, _, _, scale = self.states[layer]
        query = q[:, n - 1].to(self.dtype).unsqueeze(0).contiguous()
        if plan is None:
            step = DecodeStep.build(torch.tensor([0]), torch.tensor([n]), self.placement, self.kv_heads, self.q_heads)
            policy.begin_step(step)
            plan = policy.plan(layer, query)
        native = self.engine.native
        windows = self.windows.layers[layer]
        tasks = native.layer_begin(native_plan(plan), layer, query, None, None, windows, scale, torch.empty_like(query))
        pages = torch.empty(-(-n // PAGE), dtype=torch.int32)
        masks = torch.empty(len(pages), self.q_heads // self.kv_heads, dtype=torch.uint16)
        if not warm:
            evict()
        start = time.perf_counter()
        for task in range(tasks):
            native.selection(task, pages, masks)
        taken = time.perf_counter() - start
        native.layer_finish()
        return taken


def times(states: list[States], steps: int, dtype: torch.dtype, options: LfpsOptions) -> Row:
    """Milliseconds of a step's selections, all layers: medians over the steps."""
    stream = Stream(states, steps, dtype)
    policy = TimedPolicy(BUDGET, options)
    rivals = {"exact": OraclePolicy(BUDGET), "quest": FixedPolicy(PAGE, BUDGET)}
    taken: dict[str, list[float]] = {}
    found = dict.fromkeys(("exact", "quest", "lfps", "scan", "score", "learn"), 0.0)
    for layer, _, _, _, n in stream.run(policy):
        assert policy._planned is not None
        scored = stream.selection_s(layer, n, policy, policy._planned[0], warm=True)
        for name, rival in rivals.items():
            found[name] += stream.selection_s(layer, n, rival)
        for name, seconds in (("scan", policy.scan_s), ("score", scored), ("learn", policy.learn_s)):
            found[name] += seconds
            found["lfps"] += seconds
        if layer == len(states) - 1:
            for name in found:
                taken.setdefault(name, []).append(1000 * found[name])
                found[name] = 0.0
    assert policy.tables is not None
    counts = policy.tables.counts()
    seen = policy.tables.counts()["planned"] - counts["passed"]
    candidates = counts["candidates"] / seen / stream.placement.middle(n)
    return {
        **{f"{name}_ms": median(values) for name, values in taken.items()},
        "candidates": candidates,
        "passed": counts["passed"] / counts["planned"],
        "state_bytes_per_token": counts["bytes"] / n,
    }


def overlaps(states: list[States], steps: int, dtype: torch.dtype, options: LfpsOptions) -> dict[str, list[float]]:
    """Of every (head, step): overlap and mass of what LFPS and Quest choose, the share of candidates, and how much of
    the exact choice is that of the step before. What counts alone of those that need the middle is *_needed.

    Heads that are passed by choose nothing, and do not count.
    """
    stream = Stream(states, steps, dtype)
    policy = TimedPolicy(BUDGET, options)
    found: dict[str, list[float]] = {}
    last: dict[int, Tensor] = {}
    for layer, q, keys, scale, n in stream.run(policy):
        first, start = stream.placement.sinks, stream.placement.window_start(n)
        middle = start - first
        candidates, chosen = policy.lists(stream.q_heads, middle, first // PAGE)
        group = stream.q_heads // stream.kv_heads
        scores = torch.einsum("hgd,hnd->hgn", q.view(-1, group, q.shape[1]).float(), keys.float()).flatten(0, 1)
        weights = (scale * scores).softmax(-1)[:, first:start]
        k = math.ceil(BUDGET * middle)
        exact = torch.zeros_like(chosen).scatter_(1, scores[:, first:start].topk(k).indices, True)
        before, last[layer] = last.get(layer), exact
        blocks = keys[:, first:start].unflatten(1, (-1, PAGE))
        bounds = torch.cat(
            [
                block_scores(q[h * group : (h + 1) * group].float(), b.amin(1), b.amax(1), 1.0)
                for h, b in enumerate(blocks)
            ]
        )
        quest = torch.zeros(len(bounds), middle // PAGE, dtype=torch.bool)
        quest.scatter_(1, bounds.topk(math.ceil(k / PAGE)).indices, True)
        for head in range(stream.q_heads):
            if not candidates[head].any():
                continue
            kinds = ("", "_needed") if weights[head].sum() >= NEEDED else ("",)
            best = float(weights[head][exact[head]].sum())
            choices = {"lfps": chosen[head], "quest": quest[head].repeat_interleave(PAGE)}
            for name, choice in choices.items():
                overlap = float((choice & exact[head]).sum()) / k
                mass = float(weights[head][choice & exact[head]].sum()) / best
                for kind in kinds:
                    found.setdefault(f"{name}_overlap{kind}", []).append(overlap)
                    found.setdefault(f"{name}_mass{kind}", []).append(mass)
            if before is not None:
                same = before[head] & exact[head, : before.shape[1]]
                found.setdefault("same_as_before", []).append(float(same.sum()) / k)
            found.setdefault("candidates", []).append(float(candidates[head].float().mean()))
    return found


def samples(model: Path, length: int, count: int) -> Iterator[list[States]]:
    """What the model computes for `count` documents of each task with their questions and answers."""
    from transformers import AutoModelForCausalLM

    from fluxion_sglang.commands import needle

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    codec = Model.read(model).codec()
    symbols = {symbol: i for i, symbol in enumerate(needle.VOCABULARY)}
    for task in suite_named("ruler").tasks(codec, None):
        if task.name not in TASKS:
            continue
        for sample in task.samples(codec, length, count, SEED):
            answer = [symbols[symbol] for symbol in sample.meta["answer"].split()]
            yield capture(loaded, [*sample.prompt, *answer])


def overlap_rows(model: Path, length: int, count: int, steps: int) -> list[Row]:
    """A row an alpha, with and without neighbours: means of what `overlaps` finds in `count` documents a task."""
    found: dict[tuple[float, bool], dict[str, list[float]]] = {}
    variants = [(alpha, True) for alpha in ALPHAS] + [(0.2, False)]
    for states in tqdm(samples(model, length, count), desc="overlap", unit="document"):
        for alpha, expand in variants:
            of = overlaps(states, steps, torch.float32, LfpsOptions(alpha, alpha, expand=expand))
            for name, values in of.items():
                found.setdefault((alpha, expand), {}).setdefault(name, []).extend(values)
    return [
        {"alpha": alpha, "expand": expand, "pairs": len(of["candidates"]), **{name: mean(of[name]) for name in of}}
        for (alpha, expand), of in found.items()
    ]


def timed_states(model: Path, length: int, folder: Path | None) -> list[States]:
    """What the model computes for a document of `length` tokens, in bfloat16; kept in `folder`, and taken from there:
    it takes minutes where documents are long."""
    path = folder / f"states_{length}.pt" if folder else None
    if path and path.exists():
        return [States(*state) for state in torch.load(path)]
    found = next(samples(model, length, 1))
    states = [_each(state, lambda t: t.to(torch.bfloat16)) for state in found]
    if path:
        torch.save([tuple(state) for state in states], path)
    return states


def _each(state: States, change: Callable[[Tensor], Tensor]) -> States:
    return state._replace(q=change(state.q), k=change(state.k), v=change(state.v))


def shapes(states: list[States]) -> Iterator[list[States]]:
    """As the model has them, and with a KV head for every query head; then both with keys of 128 dimensions."""
    group, dim = states[0].q.shape[0] // states[0].k.shape[0], states[0].k.shape[2]
    basis = torch.linalg.qr(torch.randn(WIDE, dim, generator=torch.Generator().manual_seed(0)))[0]
    wide = [_each(state, lambda t: t.float() @ basis.T) for state in states]
    for found in (states, wide):
        yield found
        yield [s._replace(k=s.k.repeat_interleave(group, 0), v=s.v.repeat_interleave(group, 0)) for s in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=common.NEEDLE)
    parser.add_argument("--lengths", default=LENGTHS, help="of the time; tokens, comma separated")
    parser.add_argument("--states", type=Path, help="a folder to keep what the model computes in")
    parser.add_argument("--length", type=int, default=4096, help="of the overlap")
    parser.add_argument("--samples", type=int, default=1, help="of each task, for the overlap")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--only", choices=["overlap", "times"], help="one half; the other stays, if it is of this code")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--fresh", action="store_true", help="start over; with --only, too")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.length, args.samples, args.steps = "2048,4096", 2048, 1, 12
    torch.manual_seed(0)
    described = Model.read(args.model)
    data = {**common.header("lfps_selection"), "model": {"id": described.id, "sha256": described.sha256()}}
    data |= {"budget": BUDGET, "steps": args.steps, "length": args.length, "samples": args.samples}
    out = common.RESULTS / common.machine_name() / f"lfps_selection{'_quick' if args.quick else ''}.json"
    data = {"overlap": [], **common.resume(out, data, common.SAME, args.fresh or args.only is None)}
    if args.only != "times":
        data["overlap"] = overlap_rows(args.model, args.length, args.samples, args.steps)
        common.save(out, data)
    if args.only != "overlap":
        data["rows"] = []
        for length in tqdm([int(text) for text in args.lengths.split(",")], desc="time", unit="length"):
            for states in shapes(timed_states(args.model, length, args.states)):
                group, dim = states[0].q.shape[0] // states[0].k.shape[0], states[0].k.shape[2]
                found = times(states, args.steps, torch.bfloat16, LfpsOptions())
                data["rows"].append({"length": length, "group": group, "head_dim": dim, **found})
                common.save(out, data)
    for row in [*data["rows"], *data["overlap"]]:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
