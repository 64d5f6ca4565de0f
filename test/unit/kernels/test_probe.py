"""The probes read exactly the listed pieces, once each, and their kernels equal the engine's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark import probe
from fluxion_sglang.native import Workers, topology

ISAS = topology()["isas"]
PAGE = 16


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(2)


@pytest.fixture(scope="module")
def memory(workers: Workers) -> torch.Tensor:
    memory = probe.host_memory(workers, 3 << 20)
    assert memory.numel() == 3 << 20 and int(memory.count_nonzero()) == 0
    generator = torch.Generator().manual_seed(0)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))
    return memory


def word_sum(part: torch.Tensor) -> int:
    return int(part.numpy().view(np.uint32).sum(dtype=np.uint32))


def lists(sizes: list[int], limit: int) -> probe.TaskList:
    generator = torch.Generator().manual_seed(sum(sizes))
    return probe.TaskList.of([torch.randint(0, limit, (size,), generator=generator) for size in sizes])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("plan", [*probe.PLANS, probe.ReadPlan(4, 1 << 12)])
@settings(max_examples=examples(20), deadline=None)
@given(sizes=st.lists(st.integers(0, 23), min_size=1, max_size=5), piece=st.sampled_from([64, 320, 512, 8192]))
def test_a_scatter_reads_every_listed_piece_once(isa: str, plan: probe.ReadPlan, sizes: list[int], piece: int) -> None:
    workers = Workers(1)
    memory = torch.randint(0, 256, (64 * piece,), dtype=torch.uint8, generator=torch.Generator().manual_seed(piece))
    tasks = lists(sizes, 64)
    if not tasks.pieces.numel():
        return
    times, total = probe.scatter(workers, isa, memory, piece, tasks, plan, runs=2)
    assert total == word_sum(memory.view(64, piece)[tasks.pieces.long()].reshape(-1))
    assert len(times) == 2 and min(times) > 0


@pytest.mark.parametrize("plan", probe.PLANS)
def test_a_stream_reads_all_of_the_memory(workers: Workers, memory: torch.Tensor, plan: probe.ReadPlan) -> None:
    for pages in (1, 3, 384):
        part = memory[: pages * probe.STREAM_PIECE]
        assert probe.stream(workers, ISAS[-1], part, plan)[1] == word_sum(part)


def test_a_long_stream_is_shared_out_without_a_gap(workers: Workers) -> None:
    memory = torch.ones(9 << 20, dtype=torch.uint8)
    assert probe.stream(workers, ISAS[-1], memory, probe.PLANS[0])[1] == word_sum(memory)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_what_they_give_one_by_one(workers: Workers, isa: str, dtype: torch.dtype) -> None:
    G, D, P = 3, 64, 40
    generator = torch.Generator().manual_seed(1)
    tasks = lists([5, 0, 17, 1], P)
    q = torch.randn(tasks.tasks, G, D, generator=generator).to(dtype)
    tiles = torch.randn(P, 2, PAGE, D, generator=generator).to(dtype)
    entries = tiles[:, :, 0].contiguous()
    masks = torch.randint(0, 1 << 16, (len(tasks.pieces), G), generator=generator).to(torch.uint16)
    parts = [slice(a, b) for a, b in zip(tasks.first[:-1].tolist(), tasks.first[1:].tolist(), strict=True)]
    for given_masks in (None, masks):
        o, lse = torch.full((tasks.tasks, G, D), torch.nan), torch.full((tasks.tasks, G), torch.nan)
        times = probe.attend(workers, isa, q, 0.125, tiles, tasks, o, lse, given_masks, runs=3)
        assert len(times) == 3 and min(times) > 0
        for i, part in enumerate(parts):
            want_o, want_lse = torch.empty(G, D), torch.empty(G)
            own = torch.empty(0, dtype=torch.uint16) if given_masks is None else given_masks[part]
            probe.function("k_attend")(isa, q[i], 0.125, tiles, tasks.pieces[part], own, want_o, want_lse)
            assert torch.equal(o[i], want_o) and torch.equal(lse[i], want_lse)
    scores = torch.full((G * len(tasks.pieces),), torch.nan)
    probe.score(workers, isa, q, entries, tasks, scores, spread=0.5)
    heads = torch.full((len(tasks.pieces),), 0xFFFF, dtype=torch.uint16)
    k = torch.tensor([2, 7, 9, 1], dtype=torch.int32)
    probe.select(workers, isa, scores, tasks.first, k, heads)
    for i, part in enumerate(parts):
        n = part.stop - part.start
        if n == 0:
            continue
        want = torch.empty(G, n)
        probe.function("k_score")(isa, q[i], entries, tasks.pieces[part], 0.5, want)
        assert torch.equal(scores[G * part.start : G * part.stop].view(G, n), want)
        for g in range(G):
            best = set(want[g].sort(descending=True, stable=True).indices[: int(k[i])].tolist())
            assert {b for b in range(n) if int(heads[part][b]) >> g & 1} == best


def test_what_cannot_be_read_is_refused(workers: Workers, memory: torch.Tensor) -> None:
    plan, tasks = probe.PLANS[0], lists([4], 4)
    with pytest.raises(ValueError, match="multiple of 64"):
        probe.scatter(workers, ISAS[0], memory, 96, tasks, plan)
    with pytest.raises(ValueError, match="ids from 0 to 2"):
        probe.scatter(workers, ISAS[0], memory, 1 << 20, probe.TaskList.of([torch.tensor([3])]), plan)
    with pytest.raises(ValueError, match="1, 2 or 4 streams"):
        probe.scatter(workers, ISAS[0], memory, 64, tasks, probe.ReadPlan(3, 0))
    with pytest.raises(ValueError, match="must rise from 0"):
        probe.scatter(workers, ISAS[0], memory, 64, probe.TaskList(tasks.pieces, torch.tensor([0, 3])), plan)
    with pytest.raises(ValueError, match="instruction set"):
        probe.scatter(workers, "mmx", memory, 64, tasks, plan)
    with pytest.raises(ValueError, match="k is 5 for a task of 4"):
        heads = torch.empty(4, dtype=torch.uint16)
        probe.select(workers, ISAS[0], torch.empty(4), tasks.first, torch.tensor([5], dtype=torch.int32), heads)
