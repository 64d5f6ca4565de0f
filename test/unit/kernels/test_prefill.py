"""Attention of a prefill chunk: the kernel of every ISA of this CPU, and its division among workers."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import NAN, dtypes, error, few, head_dims, isas, k, random_tiles, seeds
from torch import Tensor

from fluxion_sglang.native import NativePool, Workers

NO_WINDOW = 2**31 - 1


def close(got: Tensor, want: Tensor, dtype: torch.dtype, size: float = 1.0) -> bool:
    """Weights are rounded to bfloat16 with an error of at most 2^-9 each. The error of float32 grows with the
    scores."""
    limit = 8e-3 if dtype == torch.bfloat16 else 2e-5 * max(size, 1.0)
    return error(got.flatten(0, -2), want.flatten(0, -2)) < limit


def check_lse(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want, atol=4e-3 if dtype == torch.bfloat16 else 2e-5, rtol=2e-5)


def poison_unseen(tiles: Tensor, pages: Tensor, seen: int) -> None:
    """NaN in all tokens that no query sees: in other tiles, and behind the last token."""
    there = torch.zeros(len(tiles), 16, dtype=torch.bool)
    for i, page in enumerate(pages.tolist()):
        there[page, : max(min(seen - 16 * i, 16), 0)] = True
    tiles.masked_fill_(~there[:, None, :, None], NAN)


@isas
@dtypes
@few
@given(data=st.data(), seed=seeds, D=head_dims, G=st.integers(1, 16), size=st.sampled_from([0.0, 1.0, 30.0]))
def test_extend(isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, G: int, size: float) -> None:
    T = data.draw(st.integers(1, 256 // G))
    n = data.draw(st.integers(1, 20))
    keys = data.draw(st.integers(16 * n - 15, 16 * n))
    # From queries that see nothing to queries that see everything.
    first = data.draw(st.sampled_from([keys - T, 0, -T // 2, -T - 3, keys, keys + 40]) | st.integers(-T, keys))
    window = data.draw(st.sampled_from([NO_WINDOW, 1, 16, 65]) | st.integers(1, keys + 50))
    torch.manual_seed(seed)
    tiles, q = random_tiles(24, D, dtype), (size * torch.randn(T, G, D)).to(dtype)
    pages = torch.randperm(24)[:n].to(torch.int32)
    poison_unseen(tiles, pages, min(keys, first + T))
    o, lse = torch.full((T, G, D), NAN), torch.full((T, G), NAN)

    k("extend")(isa, q, D**-0.5, tiles, pages, keys, first, window, o, lse)

    want, want_lse = reference.extend(q, D**-0.5, tiles, pages, keys, first, window)
    assert close(o, want, dtype, size)
    check_lse(lse, want_lse, dtype)


@isas
@dtypes
@few
@given(data=st.data(), seed=seeds, D=head_dims, G=st.integers(1, 16), size=st.sampled_from([0.0, 1.0, 30.0]))
def test_extend_blocks(
    isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, G: int, size: float
) -> None:
    """Weight of every 64 tokens for a query; the last group may have fewer."""
    T, n = data.draw(st.integers(1, 40 // G or 1)), data.draw(st.integers(1, 20))
    keys = data.draw(st.integers(16 * n - 15, 16 * n))
    torch.manual_seed(seed)
    tiles, q = random_tiles(24, D, dtype), (size * torch.randn(T, G, D)).to(dtype)
    pages = torch.randperm(24)[:n].to(torch.int32)
    poison_unseen(tiles, pages, keys)
    lse = torch.full((T, G, -(-keys // 64)), NAN)

    k("extend_blocks")(isa, q, D**-0.5, tiles, pages, keys, lse)

    scores = torch.einsum("tgd,kd->tgk", q.double(), tiles[pages.long(), 0].double().flatten(0, 1)[:keys]) * D**-0.5
    want = torch.stack([part.logsumexp(2) for part in scores.split(64, dim=2)], dim=2)
    torch.testing.assert_close(lse.double(), want, atol=1e-4, rtol=2e-5)


@isas
@dtypes
def test_rising_scores_lose_nothing(isa: str, dtype: torch.dtype) -> None:
    """Each key outweighs all before it, then the reverse."""
    D, T, n = 64, 40, 20
    torch.manual_seed(5)
    tiles, q = random_tiles(n, D, dtype), torch.ones(T, 2, D, dtype=dtype)
    slope = torch.linspace(-3, 3, n * 16).view(n, 16, 1)
    for sign in (1, -1):
        tiles[:, 0] = (sign * slope).to(dtype)
        o, lse = torch.full((T, 2, D), NAN), torch.full((T, 2), NAN)
        pages = torch.arange(n, dtype=torch.int32)
        k("extend")(isa, q, 0.1, tiles, pages, n * 16, n * 16 - T, NO_WINDOW, o, lse)
        want, want_lse = reference.extend(q, 0.1, tiles, pages, n * 16, n * 16 - T)
        assert close(o, want, dtype)
        check_lse(lse, want_lse, dtype)


@isas
@dtypes
def test_what_is_no_number_stays_none(isa: str, dtype: torch.dtype) -> None:
    """Queries that attend to a NaN output NaN; in float32, earlier queries are unaffected."""
    D, T = 64, 48
    torch.manual_seed(6)
    tiles, q = random_tiles(3, D, dtype), torch.randn(T, 1, D).to(dtype)
    tiles[1, 0, 5, 7] = NAN
    o, lse = torch.empty(T, 1, D), torch.empty(T, 1)
    k("extend")(isa, q, 0.1, tiles, torch.arange(3, dtype=torch.int32), 48, 0, NO_WINDOW, o, lse)
    assert o[21:].isnan().all()
    assert not o[:21].isnan().any()


def chunk_world(workers: int, heads: int, D: int, dtype: torch.dtype, tokens: int) -> tuple[NativePool, Tensor]:
    """A pool with a request of `tokens` tokens, and its pages."""
    pool = NativePool(
        Workers(workers), layers=2, kv_heads=heads, pages=tokens // 16 + 40, head_dim=D, dtype=dtype, sink_pages=4
    )
    for layer in range(2):
        pool.tensor("tiles", layer).fill_(NAN)
    pages = (torch.randperm(tokens // 16 + 39)[: -(-tokens // 16)] + 1).to(torch.int32)
    kv = torch.randn(2, tokens, heads, D).to(dtype)
    pool.append(1, pages, 0, kv[0], kv[1])
    return pool, pages


@dtypes
@few
@given(
    seed=seeds, workers=st.sampled_from([1, 2, 5]), heads=st.integers(1, 4),
    group=st.integers(1, 8) | st.sampled_from([31, 300]), D=st.sampled_from([32, 80, 128]),
    start=st.integers(0, 400) | st.integers(2000, 6000), count=st.integers(0, 300) | st.just(1),
)  # fmt: skip
def test_attend_chunk(
    dtype: torch.dtype, seed: int, workers: int, heads: int, group: int, D: int, start: int, count: int
) -> None:
    torch.manual_seed(seed)
    pool, pages = chunk_world(workers, heads, D, dtype, max(start + count, 1))
    fused = torch.randn(count, heads * group + 3, D).to(dtype)  # q is a slice of a wider tensor
    q, out = fused[:, : heads * group], torch.full((count, heads * group, D), NAN, dtype=dtype)
    if group > 256:
        with pytest.raises(ValueError, match="heads for the pool's"):
            pool.attend_chunk(1, pages, start, q, D**-0.5, out)
        return

    pool.attend_chunk(1, pages, start, q, D**-0.5, out)

    for head in range(heads):
        own = slice(head * group, (head + 1) * group)
        want, _ = reference.extend(q[:, own], D**-0.5, pool.tensor("tiles", 1)[head], pages, start + count, start)
        if count:
            assert close(out[:, own], want, dtype)


@dtypes
@few
@given(
    seed=seeds,
    workers=st.sampled_from([1, 2, 5]),
    heads=st.integers(1, 2),
    group=st.integers(1, 8),
    start=st.integers(0, 400) | st.integers(2000, 6000),
    count=st.integers(1, 300),
    window=st.none() | st.integers(1, 700) | st.sampled_from([1, 16, 64, 4096]),
    sinks=st.booleans(),
    budget=st.sampled_from([1.0, 0.1]),
)
def test_windows_and_sinks(
    dtype: torch.dtype, seed: int, workers: int, heads: int, group: int, start: int, count: int, window: int | None,
    sinks: bool, budget: float,
) -> None:  # fmt: skip
    """Attention of a layer with a window, and of one with attention sinks (logits without value)."""
    torch.manual_seed(seed)
    pool, pages = chunk_world(workers, heads, 32, dtype, start + count)
    q, out = torch.randn(count, heads * group, 32).to(dtype), torch.full((count, heads * group, 32), NAN, dtype=dtype)
    logits = torch.randn(heads * group) * 3 if sinks else None
    if window is None:
        budget = 1.0
    pool.attend_chunk(1, pages, start, q, 32**-0.5, out, budget, window, logits)
    for head in range(heads):
        own = slice(head * group, (head + 1) * group)
        tiles = pool.tensor("tiles", 1)[head]
        want, lse = reference.extend(q[:, own], 32**-0.5, tiles, pages, start + count, start, window or NO_WINDOW)
        if logits is not None:
            want *= torch.sigmoid(lse - logits[own]).unsqueeze(-1)
        assert close(out[:, own], want, dtype)


def test_windows_and_sinks_that_cannot_be_are_refused() -> None:
    pool, pages = chunk_world(1, 1, 32, torch.float32, 64)
    q, out = torch.zeros(8, 4, 32), torch.full((8, 4, 32), NAN)
    for window in (0, -1, -(2**40)):
        with pytest.raises(ValueError, match="attends at least to itself"):
            pool.attend_chunk(1, pages, 0, q, 1.0, out, 1.0, window)
    with pytest.raises(ValueError, match="sinks"):
        pool.attend_chunk(1, pages, 0, q, 1.0, out, 1.0, None, torch.zeros(3))
    assert out.isnan().all()


@dtypes
def test_a_chunk_does_not_depend_on_how_it_is_divided(dtype: torch.dtype) -> None:
    """Queries of a long request, together or one by one, with one or many workers."""
    torch.manual_seed(3)
    pool, pages = chunk_world(5, 1, 64, dtype, 9000)
    q = torch.randn(9, 4, 64).to(dtype)
    whole, single = torch.empty_like(q), torch.empty_like(q)
    pool.attend_chunk(1, pages, 8991, q, 0.125, whole)
    for t in range(9):
        pool.attend_chunk(1, pages, 8991 + t, q[t : t + 1], 0.125, single[t : t + 1])
    assert error(whole.flatten(0, 1), single.flatten(0, 1)) < (1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_wrong_chunks_are_refused() -> None:
    pool, pages = chunk_world(1, 2, 32, torch.float32, 64)
    q, out = torch.zeros(8, 4, 32), torch.full((8, 4, 32), NAN)
    bad = pages.clone()
    bad[2] = 0
    for layer, ids, start, wrong in (
        (2, pages, 0, "no layer 2"),
        (1, pages, 60, "every page"),
        (1, bad, 40, "page id"),
    ):
        with pytest.raises(ValueError, match=wrong):
            pool.attend_chunk(layer, ids, start, q, 1.0, out)
    with pytest.raises(ValueError, match="3 heads"):
        pool.attend_chunk(1, pages, 0, q[:, :3].contiguous(), 1.0, out[:, :3].contiguous())
    assert out.isnan().all()


def sparse_and_exact(
    pool: NativePool, pages: Tensor, start: int, q: Tensor, budget: float
) -> tuple[float, Tensor, Tensor]:
    """The share that was read, and a chunk's output with the budget and without one."""
    sparse, exact = torch.full_like(q, NAN), torch.full_like(q, NAN)
    read = pool.attend_chunk(1, pages, start, q, q.shape[2] ** -0.5, sparse, budget)
    assert pool.attend_chunk(1, pages, start, q, q.shape[2] ** -0.5, exact) == 1
    return read, sparse, exact


@dtypes
@few
@given(
    seed=seeds, workers=st.sampled_from([1, 2]), heads=st.integers(1, 2), group=st.sampled_from([1, 4, 7, 40]),
    start=st.integers(0, 3000), count=st.integers(1, 700), budget=st.floats(0.01, 1),
)  # fmt: skip
def test_a_sparse_prefill(
    dtype: torch.dtype, seed: int, workers: int, heads: int, group: int, start: int, count: int, budget: float
) -> None:
    """It reads at most its budget, and everything for the last tokens and for short prefixes."""
    torch.manual_seed(seed)
    pool, pages = chunk_world(workers, heads, 32, dtype, start + count)
    q = torch.randn(count, heads * group, 32).to(dtype)
    read, sparse, exact = sparse_and_exact(pool, pages, start, q, budget)
    assert 0 < read <= 1
    assert sparse.isfinite().all()
    assert close(sparse[-256:], exact[-256:], dtype)
    before = start + count - 257
    if count > 512 and before > 2000:
        # Sinks, the nearest tokens and the block itself come on top; the last tokens read everything.
        dense = 512 / count
        assert read <= dense + (1 - dense) * (budget + (64 + 256 + 64 + 256) / start)
    if start + count <= 64 + 256:
        assert read == 1
        assert close(sparse, exact, dtype)


@dtypes
@pytest.mark.parametrize("budget", [0.02, 0.1])
def test_a_sparse_prefill_finds_what_matters(dtype: torch.dtype, budget: float) -> None:
    """A few distant tokens have all the weight of the heads that look for them."""
    torch.manual_seed(11)
    pool, pages = chunk_world(2, 2, 64, dtype, 6000)
    k, v = torch.randn(2, 6000, 2, 64)
    needles = torch.tensor([100, 1777, 3999])
    k[needles] += 3 * torch.nn.functional.one_hot(torch.arange(3), 64)[:, None]
    k[needles] *= 6
    pool.append(1, pages, 0, k.to(dtype), v.to(dtype))
    q = torch.randn(1000, 8, 64) * 0.1
    q[:, 1] += 6 * k[100, 0] / k[100, 0].norm()
    q[:, 6] += 6 * k[1777, 1] / k[1777, 1].norm()
    q[500:, 7] += 6 * k[3999, 1] / k[3999, 1].norm()
    read, sparse, exact = sparse_and_exact(pool, pages, 5000, q.to(dtype), budget)
    assert read < 0.5
    for head, first in ((1, 0), (6, 0), (7, 512)):
        assert error(sparse[first:, head], exact[first:, head]) < 2e-2


def test_a_sparse_prefill_samples_what_is_spread_evenly() -> None:
    """Heads with uniform attention get the mean of a sample from the whole prefix."""
    pool, pages = chunk_world(2, 1, 32, torch.float32, 8000)
    v = torch.linspace(0, 1, 8000)[:, None, None].expand(8000, 1, 32)
    pool.append(1, pages, 0, torch.zeros(8000, 1, 32), v.contiguous())
    read, sparse, exact = sparse_and_exact(pool, pages, 6000, torch.randn(2000, 2, 32), 0.25)
    assert read < 0.55
    assert (sparse - exact).abs().max() < 0.1  # the nearest tokens are read completely


def test_a_sparse_prefill_hides_no_nan() -> None:
    pool, pages = chunk_world(2, 1, 32, torch.float32, 4000)
    pool.tensor("tiles", 1)[0, int(pages[7]), 0, 3, 5] = NAN
    _, sparse, exact = sparse_and_exact(pool, pages, 3000, torch.randn(1000, 2, 32), 0.1)
    assert exact.isnan().all()
    assert sparse.isnan().all()


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.5, NAN])
def test_a_wrong_budget_of_a_prefill_is_refused(budget: float) -> None:
    pool, pages = chunk_world(1, 1, 32, torch.float32, 64)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        pool.attend_chunk(1, pages, 0, torch.zeros(8, 1, 32), 1.0, torch.zeros(8, 1, 32), budget)
