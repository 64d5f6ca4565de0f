"""What a forecast rests on, measured on this machine; and decode steps of whole models, to compare it with."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import checkpoints
import common
import probe
import torch
from cells import Cell
from forecast.layer import Kernel
from forecast.step import Rates, forecast, shape_key
from forecast.work import ATTEND, ATTEND_BLOCKS, SCAN, SINKS, WINDOW, Model, Reading
from judged import Sizes
from judged import measure as measure_kernel
from layers import empty_step_ns
from racers import driver
from roofline import beyond_caches, interleave, isas, workers

from fluxion_sglang.native import NativeLayers

KERNELS = {ATTEND: Cell("attend", blk=0), ATTEND_BLOCKS: Cell("attend"), SCAN: Cell("scan", blk=0)}
LINEAR_ROWS = (1, 2, 4, 8, 16, 32)
FAR_SHAPE, NEAR_SHAPE = (6144, 4096), (1024, 1024)
"""Outputs and inputs of a matrix: of one whose copies are larger than all caches, and of one that a cache holds."""
SPECS = ("full", "fixed:16:0.05")
BATCHES = (4, 1)
CALIBRATED = ("llama-111m", "qwen3-0.6b")
"""Of 4 layers and of 28: so what a step costs is told from what a layer does."""
CALIBRATED_DEPTH = 512
CHECKED = (("llama-111m", 4096), ("llama-111m", 8192), ("qwen3-0.6b", 4096), ("llama-3.1-8b", 4096))
QUICK = (("llama-111m", 1024),)
CACHE = Path.home() / ".cache" / "fluxion-race" / "checkpoints"
PASSES = 3
PAUSE = "pause"
STEPS, TURNS = 8, 8
"""Of a turn; policies take turns, so that a busy moment of the machine is not one row's."""


def overlap_of(near: float, memory: float, seen: float) -> float:
    """The exponent at which `Kernel.rate` gives what was seen, GB/s of a worker; from 1 to 16."""
    low, high = 1.0, 16.0
    for _ in range(40):
        p = (low + high) / 2
        low, high = (p, high) if Kernel(near, p).rate(memory) < seen else (low, p)
    return round(low, 3)


def kernel_of(near: float, stream: float, scatter: float, seen: float) -> Kernel:
    """Of rates of one worker, in GB/s."""
    return Kernel(round(near, 3), overlap_of(near, scatter, seen), round(scatter / stream, 3))


def kernels(model: Model, sizes: Sizes) -> dict[str, Kernel]:
    """For the model's groups of heads."""
    found = {}
    count = workers(0).count
    for name, cell in KERNELS.items():
        row = measure_kernel(replace(cell, group=model.group, head_dim=model.head_dim), sizes)
        assert row is not None
        found[name] = kernel_of(*(row[key] / count for key in ("cached", "stream", "scatter", "gb_per_s")))
    return found


def streams(rounds: int) -> tuple[float, float]:
    """GB/s of the best stream of all workers, and of one."""
    memory = probe.host_memory(workers(0), beyond_caches(1 << 29))
    memory.fill_(1)

    def best(threads: int) -> float:
        plans = {
            str(plan): lambda plan=plan: probe.stream(workers(threads), isas()[-1], memory, plan)[0][0]
            for plan in probe.PLANS
        }
        return memory.numel() / min(map(median, interleave(plans, rounds).values()))

    return round(best(0), 2), round(best(1), 2)


class Pace:
    """How fast the machine is at the moment, by two yardsticks of a few milliseconds: a stream through memory, and a
    product with weights that a cache holds."""

    def __init__(self) -> None:
        self._memory = probe.host_memory(workers(0), beyond_caches(1 << 28))
        self._memory.fill_(1)
        self._native = NativeLayers(workers(0))
        self._weight = torch.randn(NEAR_SHAPE).to(torch.bfloat16)
        self._x = torch.randn(1, NEAR_SHAPE[1]).to(torch.bfloat16)

    def now(self) -> tuple[float, float]:
        """Passes through memory, and products, a second: the medians of five and of fifty."""
        streams = [probe.stream(workers(0), isas()[-1], self._memory, probe.PLANS[0])[0][0] for _ in range(5)]
        products = []
        for _ in range(50):
            start = time.perf_counter_ns()
            self._native.linear(self._x, self._weight)
            products.append(time.perf_counter_ns() - start)
        return 1e9 / median(streams), 1e9 / median(products)


def select_ns(rounds: int, tasks: int = 32, blocks: int = 2048, group: int = 4) -> float:
    """A block and a head, in one worker."""
    first = torch.arange(tasks + 1, dtype=torch.int64) * blocks
    scores = torch.randn(tasks * blocks * group)
    k, heads = torch.full((tasks,), blocks // 20, dtype=torch.int32), torch.empty(tasks * blocks, dtype=torch.uint16)
    run = partial(probe.select, workers(0), isas()[-1], scores, first, k, heads)
    ns = median(interleave({"select": lambda: run()[0]}, rounds)["select"])
    return round(ns * workers(0).count / (tasks * blocks * group), 3)


def linear(rounds: int, launch_us: float, streamed: float) -> dict[int, Kernel]:
    native, count = NativeLayers(workers(0)), workers(0).count
    outputs, inputs = FAR_SHAPE
    copies = -(-beyond_caches(1 << 28) // (outputs * inputs * 2))
    weights = [torch.randn(FAR_SHAPE).to(torch.bfloat16) for _ in range(copies)]
    small = torch.randn(NEAR_SHAPE).to(torch.bfloat16)
    for weight in weights:
        NativeLayers.into_huge_pages(weight)
        if native.gains_from_packing(weight):  # as a server keeps it
            native.repack(weight)
    order = torch.ones(1, dtype=torch.int32) if native.gains_from_packing(weights[0]) else None

    def timed(x: torch.Tensor, those: Sequence[torch.Tensor], order: torch.Tensor | None = None) -> int:
        start = time.perf_counter_ns()
        for weight in those:
            native.linear(x, weight, order=order)
        return time.perf_counter_ns() - start

    calls = {}
    for rows in LINEAR_ROWS:
        x, y = (torch.randn(rows, size).to(torch.bfloat16) for size in (inputs, NEAR_SHAPE[1]))
        calls |= {f"far {rows}": partial(timed, x, weights, order), f"near {rows}": partial(timed, y, [small] * 64)}
    times = {name: median(ns) for name, ns in interleave(calls, rounds).items()}
    found = {}
    for rows in LINEAR_ROWS:
        spent = {kind: times[f"{kind} {rows}"] - n * launch_us * 1e3 for kind, n in (("far", copies), ("near", 64))}
        if min(spent.values()) <= 0:
            raise SystemExit("error: products took no longer than nothing; the machine is too busy to measure")
        far, near = copies * weights[0].nbytes / spent["far"], 64 * small.nbytes / spent["near"]
        found[rows] = kernel_of(max(near, far * 1.01) / count, streamed / count, streamed / count, far / count)
    return found


def _reduce(rank: int, port: int, sizes: Sequence[int], say: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = []
    for kib in sizes:
        data, spent = torch.zeros(kib * 512, dtype=torch.bfloat16), []
        for _ in range(200):
            start = time.perf_counter()
            dist.all_reduce(data)
            spent.append((time.perf_counter() - start) * 1e6)
        found.append(median(spent))
    if rank == 0:
        say.put(found)
    dist.destroy_process_group()


def reduce_us(small: int = 8, large: int = 512) -> tuple[float, float]:
    """Of two ranks on this machine, by gloo: microseconds for nothing, and for each KiB."""
    from fluxion_sglang.commands.serving import free_port

    spawn = multiprocessing.get_context("spawn")
    say, port = spawn.Queue(), free_port()
    ranks = [spawn.Process(target=_reduce, args=(rank, port, (small, large), say), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        first, second = say.get(timeout=120)
    finally:  # the one that is left waits for the other
        for rank in ranks:
            rank.join(timeout=10)
            rank.kill()
    each = max((second - first) / (large - small), 0.0)
    return round(first - small * each, 2), round(each, 4)


@dataclass(frozen=True)
class Seen:
    """Decode steps of a model.

    Attributes:
        depth: tokens of a prompt. context: of a request, on average over the steps.
        ms: the median of their times. tiles: the share of them that a group read.
        memory, cores: how fast these were beside the steps, of what they were when rates were measured.
    """

    model: str
    depth: int
    context: int
    batch: int
    spec: str
    ms: float
    tiles: float
    memory: float = 1.0
    cores: float = 1.0


def _decode(model: str, depth: int, specs: Sequence[str], say: Any, go: Any) -> None:
    sys.path.insert(0, str(Path(driver.__file__).parent))  # as the drivers of the race find each other
    from run_sglang import Sglang

    config = checkpoints.config(model)
    folder = checkpoints.made(model, CACHE)
    options = {"policies": list(specs)}
    steps, cores, words = TURNS * (driver.WARM + STEPS), common.machine()["cores"], config["vocab_size"]
    plan = driver.Plan(str(folder), [depth], list(BATCHES), steps, cores, options, [], 0, words)
    racer, shape = Sglang(), Model.of(config)
    racer.load(plan)
    racer.prefill(plan.prompts(depth))
    engine = racer._runner.torch_runner.attn_backend.engine
    now, turn = depth, driver.WARM + STEPS
    for batch in BATCHES:  # the larger one first: requests leave a batch, and do not come back
        seconds: dict[str, list[float]] = {spec: [] for spec in specs}
        tiles, contexts = dict.fromkeys(specs, 0), {spec: [] for spec in specs}
        for _ in range(TURNS):
            say.put(PAUSE)
            go.get()
            for spec in specs:
                before = engine.stats()["tile_bytes"]
                seconds[spec] += racer.decode(spec, batch, turn)[driver.WARM :]
                tiles[spec] += engine.stats()["tile_bytes"] - before
                contexts[spec] += range(now + 1, now + turn + 1)
                now += turn
        for spec in specs:
            context = round(sum(contexts[spec]) / len(contexts[spec]))
            groups = steps * shape.layers * batch * shape.kv_heads
            whole = groups * max(context - SINKS - WINDOW, 1) * shape.token_bytes
            ms = median(seconds[spec]) * 1e3
            say.put(Seen(model, depth, context, batch, spec, ms, min(tiles[spec] / whole, 1.0)))
    say.put(None)
    say.close()
    say.join_thread()
    os._exit(0)


def decoded(model: str, depth: int, specs: Sequence[str], pace: Pace, usual: tuple[float, float]) -> Iterator[Seen]:
    """Steps of a model with the flag, in a process of its own, which pauses before each turn for `pace`.

    Args:
        usual: the pace when rates were measured.

    Raises:
        SystemExit: it ended before its time; what it said is above.
    """
    spawn = multiprocessing.get_context("spawn")
    say, go = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=_decode, args=(model, depth, specs, say, go), daemon=True)
    process.start()
    paces: list[tuple[float, float]] = []
    while True:
        try:
            seen = say.get(timeout=5)
        except Exception:
            if process.is_alive():
                continue
            raise SystemExit(f"decoding {model} at {depth} ended with exit code {process.exitcode}") from None
        if seen is None:
            break
        if seen == PAUSE:
            paces.append(pace.now())
            go.put(None)
            continue
        # Of the turns of this batch.
        memory, cores = (median(found) for found in zip(*paces[-TURNS:], strict=True))
        yield replace(seen, memory=round(memory / usual[0], 3), cores=round(cores / usual[1], 3))
    process.join()


def shape_of(model: str) -> Model:
    return Model.of(checkpoints.config(model))


def expected(rates: Rates, seen: Seen) -> float:
    """Milliseconds of the step that was seen, at the pace that the machine had, and with the step's own share of tiles,
    which is the queries' and no matter of speed."""
    reading = Reading(0, 1.0) if seen.spec == "full" else Reading(int(seen.spec.split(":")[1]), seen.tiles)
    rates = rates.at(seen.memory, seen.cores)
    return forecast(shape_of(seen.model), rates.here, rates, seen.batch, seen.context, reading).ms


def around(without: Rates, seen: Sequence[Seen]) -> Mapping[str, tuple[float, float]]:
    """What is neither matrix nor attention, from steps of two models with few tokens, each at both batches."""
    rest = {(one.model, one.batch): (one.ms - expected(without, one)) * 1e3 * one.cores for one in seen}
    few, many = (shape_of(model).layers for model in CALIBRATED)
    layer = {n: max((rest[CALIBRATED[1], n] - rest[CALIBRATED[0], n]) / (many - few), 0.0) for n in BATCHES}
    step = {n: max(rest[CALIBRATED[0], n] - few * layer[n], 0.0) for n in BATCHES}
    large, one = BATCHES

    def pair(of: Mapping[int, float]) -> tuple[float, float]:
        return round(of[one], 2), round(max((of[large] - of[one]) / (large - one), 0.0), 3)

    return {"step_us": pair(step), "layer_us": pair(layer)}


def measure_rates(
    models: Sequence[str], quick: bool, pace: Pace, say: Any = print
) -> tuple[Rates, tuple[float, float]]:
    """Of this machine, with the kernels of the models' shapes, and its pace meanwhile; minutes. Everything is measured
    in each of some passes, so that a slow moment is in one of them."""
    torch.set_num_threads(workers(0).count)
    shapes = {shape_key(shape): shape for shape in map(shape_of, models)}
    sizes = Sizes.quick() if quick else Sizes(rounds=5)
    paces, passes, between = [pace.now()], [], reduce_us()
    for _ in range(1 if quick else PASSES):
        streamed, alone = streams(sizes.rounds)
        launch_us = round(median(empty_step_ns(20 if quick else 200)[0]) / 1e3, 2)
        found = {}
        for key, shape in shapes.items():
            found[key] = kernels(shape, sizes)
            paces.append(pace.now())
        passes.append(
            Rates(
                workers=workers(0).count,
                streamed=streamed,
                alone=alone,
                kernels=found,
                select_ns=select_ns(sizes.rounds),
                linear=linear(sizes.rounds, launch_us, streamed),
                launch_us=launch_us,
                step_us=(0.0, 0.0),
                layer_us=(0.0, 0.0),
                reduce_us=between,
            ).to_json()
        )
        paces.append(pace.now())
        say(json.dumps(passes[-1]))
    memory, cores = (median(of) for of in zip(*paces, strict=True))
    return Rates.from_json(medians(passes)), (memory, cores)


def medians(trees: Sequence[Any]) -> Any:
    """Of every number in trees of the same shape."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: medians([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        return [medians(at) for at in zip(*trees, strict=True)]
    return median(trees)
