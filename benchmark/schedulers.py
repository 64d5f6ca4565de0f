"""Attention time of a layer under every scheduler, on batches of mixed lengths, as in Fluxion's Fig. 10 (c).

    python benchmark/schedulers.py            # about 8 minutes on two cores
    python benchmark/schedulers.py --quick    # short requests, to see that it runs

A round draws the lengths of a batch, its KV, and a plan per layer: half of the heads are streaming heads, the others
read a log-normal share of the middle. All schedulers then run the same layers in turns, so that drift of the machine
affects all alike. With the native workers alone, all schedulers that divide tasks are equivalent to arrival order;
"none" against "priority" then shows the gain of the order. Results go to schedulers.json in
benchmark/results/<machine>, round by round. An interrupted run continues there, unless commit, versions or machine
changed.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import common
from tqdm import tqdm

from fluxion_sglang import openmp

openmp.wait_passively()  # before torch is loaded

import torch  # noqa: E402

sys.path.insert(0, str(common.ROOT / "test"))
from definitions.torch_executor import TorchReferenceExecutor  # noqa: E402

from fluxion_lab.schedulers import by_length, evenly, one_alone  # noqa: E402
from fluxion_sglang.config import FluxionConfig  # noqa: E402
from fluxion_sglang.executor.decode import DecodeEngine, Scheduler  # noqa: E402
from fluxion_sglang.executor.host import HostDevice  # noqa: E402
from fluxion_sglang.executor.workers import create_workers  # noqa: E402
from fluxion_sglang.kv.host_pool import HostPool, KVShape  # noqa: E402
from fluxion_sglang.kv.placement import PAGE, Placement  # noqa: E402
from fluxion_sglang.kv.windows import Windows  # noqa: E402
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Observed, Policy, task_value  # noqa: E402

BATCH = 8
KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
LAYERS = 3
"""Enough layers that no cache holds what the next pass reads."""
# The workloads of the paper at a quarter of the length.
WORKLOADS = {"4K to 16K": (4096, 16384), "8K to 32K": (8192, 32768)}
QUICK_WORKLOADS = {"1K to 4K": (1024, 4096)}
SCHEDULERS: dict[str, Scheduler | None] = {
    "priority": None,
    "none": one_alone,
    "uniform": evenly,
    "length": by_length,
}
# Schedulers, and passes over the layers: the torch executor needs seconds for work that takes the workers milliseconds.
SETS = {
    "cpu": (("priority", "none"), 50),
    "cpu+torch": (tuple(SCHEDULERS), 2),
}
CHUNK = 2048


class Mixture(Policy):
    """Budgets that vary by head like a trained predictor's; every layer has its own plan, by seed.

    Half of the query heads are streaming. The others read 3% of the middle in the median, and one in six more than 8%.
    Groups read blocks of 16, 32 or 64 tokens.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._plans: list[LayerPlan] = []

    def begin_step(self, step: DecodeStep) -> None:
        random = torch.Generator().manual_seed(self._seed)
        self._plans = []
        for _ in range(LAYERS):
            budget = torch.empty(step.batch, step.q_heads).log_normal_(-3.5, 1.0, generator=random).clamp(max=1.0)
            budget *= torch.rand(step.batch, step.q_heads, generator=random) < 0.5
            level = torch.randint(0, 3, (step.batch, step.kv_heads), generator=random)
            retrieves = budget.view(step.batch, step.kv_heads, -1).any(-1)
            blk = (torch.tensor([16, 32, 64])[level] * retrieves).to(torch.int32)
            self._plans.append(LayerPlan(blk, budget, task_value(step.middle, blk, budget)))

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        return self._plans[layer]


@dataclass
class Batch:
    """KV and queries of a batch of requests; one decode step, which may be repeated."""

    pool: HostPool
    windows: Windows
    lengths: list[int]
    table: torch.Tensor

    @classmethod
    def draw(cls, lengths: list[int], seed: int) -> Batch:
        """Requests of the given lengths, with normal random keys and values, and shuffled pages as in a busy
        allocator."""
        random = torch.Generator().manual_seed(seed)
        pages = [-(-(n + 1) // PAGE) for n in lengths]
        pool = HostPool(
            KVShape(LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16),
            sum(pages) * PAGE,
            Placement(),
            create_workers(FluxionConfig()),
        )
        windows = Windows(pool, len(lengths), "cpu")
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        dealt = (torch.randperm(sum(pages), generator=random) + 1).to(torch.int32).split(pages)
        for row, (length, own) in enumerate(zip(lengths, dealt, strict=True)):
            table[row, : len(own)] = own
            for layer, start in itertools.product(range(LAYERS), range(0, length, CHUNK)):
                size = (min(CHUNK, length - start), KV_HEADS, HEAD_DIM)
                k, v = (torch.randn(size, generator=random).to(torch.bfloat16) for _ in range(2))
                pool.append(layer, own, start, k, v)
            windows.heal(row, length, own)
        return cls(pool, windows, lengths, table)

    def engine(self, executors: str, scheduler: str, seed: int) -> DecodeEngine:
        """An engine over this KV, after the beginning of its step."""
        config = FluxionConfig()
        engine = DecodeEngine(
            self.pool,
            self.windows,
            Mixture(seed),
            [TorchReferenceExecutor(self.pool, True)] if executors == "cpu+torch" else [],
            config,
            q_heads=KV_HEADS * GROUP,
            max_requests=len(self.lengths),
            max_tokens=max(self.lengths) + 1,
            scheduler=SCHEDULERS[scheduler],
        )
        engine.begin_step(torch.arange(len(self.lengths)), torch.tensor(self.lengths) + 1, self.table)
        return engine


def measure(workload: str, span: tuple[int, int], turn: int, quick: bool) -> list[dict[str, Any]]:
    """One round of one workload; a row per set of executors and scheduler."""
    random = torch.Generator().manual_seed(turn)
    lengths = torch.randint(span[0], span[1] + 1, (BATCH,), generator=random).tolist()
    load = os.getloadavg()[0]
    batch = Batch.draw(lengths, turn)
    q = torch.randn(BATCH, KV_HEADS * GROUP, HEAD_DIM, generator=random).to(torch.bfloat16)
    k, v = (torch.randn(BATCH, KV_HEADS, HEAD_DIM, generator=random).to(torch.bfloat16) for _ in range(2))
    rows = []
    for executors, (schedulers, passes) in SETS.items():
        engines = {name: batch.engine(executors, name, turn) for name in schedulers}
        times: dict[str, list[float]] = {name: [] for name in schedulers}
        for turns in range(3 if quick else passes + 1):
            for name, engine in engines.items():
                for layer in range(LAYERS):
                    start = time.perf_counter()
                    HostDevice(batch.pool, batch.windows, engine).decode(layer, q, k, v, HEAD_DIM**-0.5)
                    if turns > 0:  # the first pass warms up
                        times[name].append(time.perf_counter() - start)
        for name, engine in engines.items():
            stats = engine.stats()
            rows.append(
                {
                    "workload": workload,
                    "executors": executors,
                    "scheduler": name,
                    "round": turn,
                    "lengths": lengths,
                    "layers": len(times[name]),
                    "layer_ms": round(median(times[name]) * 1e3, 4),
                    "tasks_a_layer": round(stats["tasks"] / stats["layers"], 2),
                    "torch_tasks": round(stats["tasks_torch"] / stats["tasks"], 4),
                    "load_before": round(load, 2),
                }
            )
    return rows


def main() -> None:
    args = common.arguments(__doc__, "short requests", rounds=10, fresh=True).parse_args()
    workloads = QUICK_WORKLOADS if args.quick else WORKLOADS
    path = common.result_path(args, "schedulers")
    data = common.resume(path, common.header("schedulers"), common.SAME, args.fresh)
    done = {(row["round"], row["workload"]) for row in data["rows"]}
    rounds = range(1 if args.quick else args.rounds)
    cells = [cell for cell in itertools.product(rounds, workloads) if cell not in done]
    with tqdm(total=sum(workloads[w][1] for _, w in cells), bar_format="{l_bar}{bar}| {elapsed}<{remaining}") as bar:
        for turn, workload in cells:
            bar.set_description(f"{workload}, round {turn}")
            read = common.memory_read_gb_per_s(data["machine"]["cores"])
            data.setdefault("memory_read_gb_per_s", []).append(read)
            data["rows"] += measure(workload, workloads[workload], turn, args.quick)
            common.save(path, data)
            bar.update(workloads[workload][1])
    print(f"{path.relative_to(common.ROOT)}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
