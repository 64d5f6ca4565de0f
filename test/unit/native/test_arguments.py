"""The native C ABI with illegal arguments: each is refused with a message, or is harmless.

Every function of the core's ABI is called correctly first. Then each argument is spoilt in turn: tensors of another
dtype, rank or size, non-contiguous, and empty; numbers that are negative, huge, or beyond 32 bits. A crash ends the
test's process; under `make sanitize`, so does every access outside a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import CSRC

from fluxion_lab import native as lab
from fluxion_sglang.native import AttentionLayer, NativeEngine, NativePlan, NativePool, Workers, loading
from fluxion_sglang.predictor.features import COUNT, PARTS

LAYERS, HEADS, HQ, DIM, PAGES = 2, 2, 4, 32, 40
SINKS, WINDOW, ROWS = 64, 64, 3
SLOT_PAGES = (SINKS + WINDOW + 16) // 16
B, TOKENS, ANCHOR = 2, 200, 16

NUMBERS = (-1, -(2**31) - 1, -(2**63), 2**31, 2**32, 2**32 + 1, 2**63 - 1)
"""Illegal as any size or index."""
TESTED_ELSEWHERE = {"csrc/probe", "csrc/cuda", "csrc/device"}
"""Folders whose functions measure or belong to a device; requests do not reach them."""
ANY_NUMBER = {
    ("workers_create", 0): "as many threads as there may be; fewer than one are refused",
    ("workers_create", 2): "a time to spin, bounded; below 0: what is best",
    ("pool_attend_chunk", 8): "a window as long as that is none",
    ("engine_layer", 6): "the same",
    ("engine_create", 8): "0 and less: what is best",
    ("engine_create", 10): "less than 0: the machine's",
    ("features", 8): "a feature",
    ("features", 9): "a feature",
    ("pool_sweep", 1): "as many sentences as there are",
    ("nodes_to_interleave", 3): "as many nodes as there are, if any",
    ("hgca_release", 1): "a row that is not there has nothing to release",
    ("engine_task_done", 1): "a claim: none of these holds",
    ("engine_task_failed", 1): "a claim: none of these holds",
    ("hgca_averages", 2): "a row that is not there has none",
    ("hgca_step", 6): "no window: residents are not evaluated",
    ("engine_task_done", 4): "a count for the statistics",
    ("engine_task_done", 5): "a count for the statistics",
    ("engine_task_done", 6): "a count for the statistics",
    ("engine_selection", 1): "a claim: none of these holds",
}
"""Arguments that accept any number, and its meaning: (function, index)."""


class Rig:
    """Objects that the functions need."""

    def __init__(self) -> None:
        self.workers = Workers(2)
        self.pool = NativePool(
            self.workers, layers=LAYERS, kv_heads=HEADS, pages=PAGES, head_dim=DIM, dtype=torch.float32, sink_pages=4
        )
        self.guarded = NativePool(
            self.workers, layers=1, kv_heads=1, pages=4, head_dim=DIM, dtype=torch.float32, sink_pages=0, canary=1.0
        )
        self.engine = NativeEngine(
            self.workers, self.pool, q_heads=HQ, sinks=SINKS, window=WINDOW, max_requests=2, max_pages=16,
            attend_union=True, share_prefixes=True,
        )  # fmt: skip
        self.pages = torch.arange(1, 21, dtype=torch.int32)
        self.table = torch.stack([self.pages[:14], self.pages[:14]]).contiguous()
        k = torch.randn(TOKENS, HEADS, DIM)
        for layer in range(LAYERS):
            self.pool.append(layer, self.pages, 0, k, k)
        self.rows, self.lengths = i32(1, 2), i32(TOKENS, TOKENS)
        self.engine.step(self.rows, self.lengths, self.table)
        self.blk, self.budget = torch.full((B, HEADS), 16, dtype=torch.int32), torch.full((B, HQ), 0.5)
        self.value = torch.ones(B, HEADS)
        self.plan = NativePlan(self.blk, self.budget, self.value)
        self.windows = torch.zeros(HEADS, ROWS * SLOT_PAGES, 2, 16, DIM)
        self.hgca = function("hgca_create")(self.pool.handle, HQ, WINDOW, ROWS, 0.1, 1.0)
        self.lfps = function("lfps_create")(self.pool.handle, HQ, ROWS, WINDOW, 0.9, 0.2, 0.2, 0.5, True, 16)
        self.layers = function("layers_create")(self.workers.handle, "")
        self.program, self.unrun = (function("program_create")(self.layers) for _ in range(2))
        self.kept = torch.ones(2, 64), torch.empty(2, 32)
        function("program_gate_mul")(self.program, self.kept[0], False, *self.kept[1:])

    def calls(self) -> dict[str, list[Any]]:
        """A good call of every function: its arguments, created anew."""
        q, kv = torch.randn(B, HQ, DIM), torch.randn(B, HEADS, DIM)
        pool, engine, hgca, lfps = self.pool.handle, self.engine.handle, self.hgca, self.lfps
        chunk, out = torch.randn(20, HEADS, DIM), torch.empty(20, HQ, DIM)
        step, sinks = [self.rows, self.lengths], torch.randn(HQ)
        at, windowed = AttentionLayer(self.engine, 0, 0.1, self.windows), AttentionLayer(self.engine, 0, 0.1, newest=64)
        groups = B * HEADS
        layers = {
            "linear": [torch.randn(3, 64), torch.randn(48, 64), None, torch.randn(48), torch.empty(3, 48)],
            "linear_quantised": [
                torch.randn(3, 64), torch.ones(3, 1088, dtype=torch.uint8), 8, 64, False, torch.randn(48),
                torch.empty(3, 48),
            ],
            "experts": [
                torch.randn(3, 64), i32(0, 1, 2, 3, 0, 2).view(3, 2), torch.rand(3, 2), torch.randn(4, 64, 64),
                torch.randn(4, 64), torch.randn(4, 64, 32), torch.randn(4, 64), False, 1.7, 7.0, torch.empty(3, 64),
            ],
            "experts_quantised": [
                torch.randn(3, 64), i32(0, 1, 2, 3, 0, 2).view(3, 2), torch.rand(3, 2),
                torch.ones(4, 4, 1088, dtype=torch.uint8), 8, 64, False, torch.randn(4, 64),
                torch.ones(4, 4, 576, dtype=torch.uint8), 8, 64, False, torch.randn(4, 64), False, 1.7, 7.0,
                torch.empty(3, 64),
            ],
            "norm": [torch.randn(3, 64), None, torch.randn(64), 1e-5, False, torch.empty(3, 64), None],
            "gate_mul": [torch.randn(3, 64), False, torch.empty(3, 32)],
            "rope": [
                torch.arange(3), torch.randn(3, 128), torch.randn(3, 64), torch.randn(50, 32), 32, True,
                torch.empty(3, 128), torch.empty(3, 64),
            ],
            "convolve": [
                torch.randn(3, 64), i32(0, 1, 3), i32(0, 2), torch.tensor([True, False]), torch.randn(64, 4),
                torch.randn(64), torch.randn(4, 64, 3), torch.empty(3, 64),
            ],
            "delta_rule": [
                torch.randn(3, 64), torch.randn(3, 64), torch.randn(3, 32), i32(0, 1, 3), i32(0, 2), torch.randn(3, 4),
                torch.randn(3, 4), torch.randn(4), torch.randn(4), torch.randn(5, 4, 8, 32), i32(0, -1),
                torch.randn(2, 4, 8, 32), torch.empty(3, 32),
            ],
        }  # fmt: skip
        return {
            **{f"layers_{name}": [self.layers, *arguments] for name, arguments in layers.items()},
            **{f"program_{name}": [self.unrun, *arguments] for name, arguments in layers.items()},
            "layers_widen": [self.layers, *layers["linear_quantised"][1:5], torch.empty(48, 64)],
            "workers_create": [1, i32(), -1, True],
            "pool_bytes": [1, 1, 4, DIM, 0, True],
            "pool_create": [self.workers.handle, 1, 1, 4, DIM, 0, 0, True, 1.0, "", 0.5],
            "pool_canary_counts": [self.guarded.handle, torch.empty(2, dtype=torch.int64)],
            "pool_sweep": [self.guarded.handle, 4, torch.zeros(1, dtype=torch.int64)],
            "topology_json": ["", i32()],
            "nodes_to_interleave": ["", i32(), i32(0), 1],
            "pool_tensor": [pool, "tiles", 0],
            "pool_append": [pool, 0, self.pages, 100, chunk, chunk],
            "pool_check": [pool, self.pages, 0, 20],
            "pool_adopt": [pool, 0, self.pages, 0, 20, True],
            "pool_fill_window": [pool, 0, self.windows, 1, TOKENS, self.pages, SINKS, WINDOW],
            "pool_forget_sums": [pool, self.pages],
            "pool_gather": [pool, 0, self.pages, *torch.empty(2, HEADS, 320, DIM)],
            "pool_attend_chunk": [
                pool, 0, self.pages, 100, torch.randn(20, HQ, DIM), 0.1, 9.0, 1.0, 4096, sinks,
                (2 << torch.arange(20)) - 1, out,
            ],
            "engine_create": [pool, HQ, SINKS, WINDOW, 1, 4, True, 0.0, 0, True, -1],
            "engine_step": [engine, *step, self.table],
            "engine_layer_resident": [engine, at.handle, q, kv, kv, torch.empty(B, HQ, len(PARTS))],
            "engine_layer_append": [engine, 0, kv, kv],
            "engine_layer_begin": [engine, self.plan.handle, at.handle, q, kv, kv, torch.empty(B, HQ, DIM)],
            "engine_layer_newest": [engine, windowed.handle, q, kv, kv, torch.empty(B, HQ, DIM)],
            "engine_layer": [engine, 0, self.windows, 0.1, 9.0, sinks, 64],
            "engine_plan_step": [engine, self.plan.handle, False],
            "program_attention": [self.unrun, engine, at.handle, q, kv, kv, torch.empty(B, HQ, DIM)],
            "engine_middle_begin": [
                engine, self.plan.handle, at.handle, q, kv, kv, torch.empty(B, HQ, DIM), torch.empty(B, HQ), None
            ],
            "engine_queue_pop": [engine, 1],
            "engine_task": [engine, 0],
            "engine_task_done": [engine, 0, torch.empty(HQ // HEADS, DIM), torch.empty(HQ // HEADS), 1, 1, 1],
            "engine_task_failed": [engine, 0, "why"],
            "engine_selection": [engine, 0, torch.empty(64, dtype=torch.int32), u16(64, HQ // HEADS)],
            "engine_result": [engine, torch.empty(B, HQ, DIM)],
            "engine_reads": [engine, torch.empty(B, HEADS, 2, dtype=torch.int64)],
            "engine_stats": [engine, torch.empty(len(self.engine.stats()), dtype=torch.int64)],
            "engine_worker_counts": [engine, torch.empty(2, 2, dtype=torch.int64)],
            "engine_owners": [engine, torch.empty(8, dtype=torch.int8)],
            "families": [self.table, i32(13, 13), 4, 1, torch.empty(B, 2, dtype=torch.int32)],
            "plan_create": [self.blk, self.budget, self.value, None, None],
            "listed_create": [torch.zeros(groups + 1, dtype=torch.int64), i32(), u16(0, 2), None, None, None, None],
            "single_tokens_create": [],
            "sketched_create": [torch.full((B, HEADS), 0.1)],
            "early_stop_create": [torch.ones(B, HEADS), torch.ones(B, HEADS)],
            "features": [
                "", q, torch.randn(B, HQ, len(PARTS)), i32(1, 2), self.lengths, torch.randn(ROWS, HQ, ANCHOR),
                torch.randn(ROWS, HQ, DIM), torch.randn(ROWS, HEADS, DIM), 0, 0, SINKS, WINDOW, 0.1,
                torch.empty(B, HQ, COUNT),
            ],
            "predictor_plan": [
                torch.randn(B * HQ, 3), i32(64, 64), HEADS, 0.5, torch.ones(HQ, 4), 240, self.blk.clone(),
                self.budget.clone(), self.value.clone(),
            ],
            "hgca_create": [pool, HQ, WINDOW, ROWS, 0.1, 1.0],
            "hgca_establish": [hgca, 0, 1, TOKENS, torch.randn(2, HQ, DIM), self.pages, 0.1],
            "hgca_step": [hgca, 0, *step, self.table, q, self.windows, 0.1],
            "hgca_averages": [hgca, 0, 1, torch.empty(HQ, 500)],
            "hgca_release": [hgca, 1],
            "hgca_bytes": [hgca],
            "lfps_create": [pool, HQ, ROWS, WINDOW, 0.9, 0.2, 0.2, 0.5, True, 16],
            "lfps_begin": [lfps, 0, 1, TOKENS, self.pages, torch.randn(4, HQ, DIM), 0.1],
            "lfps_release": [lfps, 1],
            "lfps_tables": [lfps, 0, 1, 0, torch.empty(400), torch.empty(400)],
            "lfps_counts": [lfps, torch.empty(4, dtype=torch.int64)],
            "layers_create": [self.workers.handle, ""],
            "layers_into_huge_pages": [torch.randn(64, 64)],
            "layers_gain_from_packing": [self.layers, torch.randn(64, 64)],
            "layers_repack": [self.layers, *torch.randn(2, 64, 64).bfloat16(), False],
            "program_create": [self.layers],
            "program_run": [self.program, 0, 1],
        }  # fmt: skip


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def u16(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint16)


def spoilt(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """Illegal replacements of a good argument: a name, the argument, and whether it must be refused.

    A size that the function is free to choose (number of tokens or pages) may differ: then it is harmless, or does not
    fit the other arguments.
    """
    if isinstance(value, bool | str) or value is None:
        yield "an object", object(), True
    elif isinstance(value, int):
        for number in NUMBERS:
            yield str(number), number, True
        yield "a tensor", torch.zeros(1), True
    elif isinstance(value, float):
        for wrong in (float("nan"), float("inf"), -1e300):
            yield str(wrong), wrong, False
    elif isinstance(value, torch.Tensor):
        yield "a number", 7, True
        yield "float16", torch.zeros(value.shape, dtype=torch.float16), True
        yield "int16", torch.zeros(value.shape, dtype=torch.int16), True
        yield "complex64", torch.zeros(value.shape, dtype=torch.complex64), True
        yield "one dimension more", value[None], True
        yield "none", value.flatten()[:0], value.ndim > 1
        if value.numel() > 1:
            holes = torch.stack([value, value], -1)[..., 0]
            yield "holes", holes, True
        for axis, size in enumerate(value.shape):
            if size > 1:
                yield f"less of axis {axis}", value.narrow(axis, 0, size - 1).contiguous(), False
                yield f"nothing of axis {axis}", value.narrow(axis, 0, 0).contiguous(), False
            if value.ndim > 1:
                yield f"more of axis {axis}", torch.cat([value, value], axis), False
        if value.dtype == torch.int32 and value.numel():
            for number in (-1, -(2**31), 2**31 - 1):
                yield f"full of {number}", torch.full_like(value, number), False


def exported(folder: Path = CSRC) -> set[str]:
    """The functions of the core's ABI, and of the lab's."""
    found = set()
    for path in folder.rglob("*.cc"):
        if f"csrc/{path.relative_to(CSRC).parts[0]}" not in TESTED_ELSEWHERE:
            found |= set(re.findall(r"TYPED_FUNC\((\w+)", path.read_text()))
    return found


def function(name: str) -> Callable[..., Any]:
    return (lab if name in exported(CSRC / "lab") else loading).function(name)


OTHERS = {
    "abi_version": "no arguments", "companion_abi_version": "no arguments",
    "isas": "no arguments", "best_isa": "no arguments",
    "engine_stat_names": "no arguments", "workers_cores": "an object alone", "pool_isa": "an object alone",
    "predictor_isa": "an object alone", "engine_abandon": "an object alone", "engine_corrupt": "an object alone",
    "engine_layer_finish": "an object alone", "layers_panel": "an object alone",
    "predictor_create": "test_predictor_network.py", "predictor_forward": "test_predictor_network.py",
    "measure": "test_measure.py", "hgca_lists": "test_hgca.py",
    "lfps_plan": "test_lfps_tables.py", "lfps_update": "test_lfps_tables.py",
}  # fmt: skip
"""Functions that are not called here, with the reason or the place of their tests."""


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


def test_every_function_is_here(rig: Rig) -> None:
    assert exported() - OTHERS.keys() == set(rig.calls())


def test_a_pool_that_nobody_could_count_is_refused() -> None:
    """Each size is legal, but all together exceed 64 bits of bytes."""
    with pytest.raises(ValueError, match="more bytes than a machine has addresses for"):
        function("pool_bytes")(4096, 1024, 2**27 - 1, 256, 0, False)
    with pytest.raises(ValueError, match="it needs 2 to 134217727"):
        function("pool_bytes")(1, 1, 2**27, 32, 0, False)


def settle(rig: Rig) -> None:
    """Restore the state: no open layer, and a step of the usual size."""
    rig.engine.abandon()
    rig.engine.step(rig.rows, rig.lengths, rig.table)


@pytest.mark.parametrize("name", sorted(exported() - OTHERS.keys()))
def test_spoilt_arguments(rig: Rig, name: str) -> None:
    wrong: list[str] = []
    for at, good in enumerate(rig.calls()[name]):
        for what, bad, refuse in spoilt(good):
            settle(rig)
            arguments = rig.calls()[name]
            arguments[at] = bad
            try:
                function(name)(*arguments)
                # Started work reads the arguments until it ends.
                if name in ("engine_layer_begin", "engine_middle_begin"):
                    function("engine_layer_finish")(rig.engine.handle)
            except (ValueError, RuntimeError, TypeError, IndexError, OverflowError) as error:
                text = str(error)
                if not text.strip() or "bad_alloc" in text or "std::" in text:
                    wrong.append(f"argument {at}, {what}: {text!r} is no sentence")
            else:
                if refuse and (name, at) not in ANY_NUMBER:
                    wrong.append(f"argument {at}, {what}: taken")
    settle(rig)
    assert not wrong, f"{name}:\n" + "\n".join(wrong)
