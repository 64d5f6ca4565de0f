"""The attention kernel of every ISA this CPU has, for both KV dtypes, against reference.py."""

from __future__ import annotations

import math
from itertools import product

import pytest
import reference
import torch
from effort import case
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import (
    EVERY,
    HEAD_DIMS,
    INF,
    NAN,
    accuracy,
    attend,
    dtypes,
    error,
    few,
    head_dims,
    isas,
    k,
    random_tiles,
    seeds,
)
from torch import Tensor


def poisoned(tiles: Tensor, pages: Tensor, masks: Tensor | None = None) -> Tensor:
    """The tiles with NaN in all tokens that no head attends to."""
    wanted = torch.zeros(len(tiles), 16, dtype=torch.bool)
    for i, page in enumerate(pages.tolist()):
        wanted[page] |= True if masks is None else reference.token_bits(masks)[:, i].any(dim=0)
    return torch.where(wanted[:, None, :, None], tiles, NAN)


def draw_masks(style: str, n: int, G: int) -> Tensor:
    any_tokens = torch.randint(0, 1 << 16, (n, G))
    match style:
        case "tokens":
            masks = any_tokens
        case "single":
            masks = 1 << torch.randint(0, 16, (n, G))
        case "pages":
            masks = torch.where(torch.rand(n, G) < 0.5, 0xFFFF, 0)
        case "prefix":
            masks = ((1 << torch.randint(0, 17, (n, 1))) - 1).expand(n, G)
        case _:
            few_tokens = any_tokens & torch.randint(0, 1 << 16, (n, G)) & torch.randint(0, 1 << 16, (n, G))
            kind = torch.randint(0, 4, (n, G))
            masks = torch.where(kind == 0, 0xFFFF, torch.where(kind == 1, 0, any_tokens))
            masks = torch.where(kind == 3, few_tokens, masks)
            masks[:, torch.randint(0, G, ())] = 0
    return masks.contiguous().to(torch.uint16)


@isas
@dtypes
@few
@given(data=st.data(), seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(1, 12))
def test_attend(isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, G: int, n: int) -> None:
    style = data.draw(st.sampled_from(["every", "tokens", "single", "pages", "prefix", "mixed"]))
    torch.manual_seed(seed)
    q, tiles = torch.randn(G, D).to(dtype), random_tiles(16, D, dtype)
    pages = torch.randint(0, 16, (n,), dtype=torch.int32)
    masks = None if style == "every" else draw_masks(style, n, G)
    tiles = poisoned(tiles, pages, masks)
    scale = data.draw(st.sampled_from([1.0, 3.0])) / math.sqrt(D)

    o, lse = attend(isa, q, scale, tiles, pages, EVERY if masks is None else masks)

    want_o, want_lse = reference.attend(q, scale, tiles, pages, masks)
    assert error(o, want_o) < 1e-5
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@isas
@dtypes
@few
@given(
    data=st.data(), seed=seeds, D=head_dims, G=st.sampled_from([1, 4, 5, 16, 17, 40, 64]), n=st.integers(1, 12),
    cap=st.sampled_from([0.5, 5.0, 50.0]), size=st.sampled_from([0.01, 1.0, 100.0]),
)  # fmt: skip
def test_attend_to_capped_logits(
    isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, G: int, n: int, cap: float, size: float
) -> None:
    """All ways of attending, with caps that hardly bend a logit and caps that saturate nearly all."""
    style = data.draw(st.sampled_from(["every", "tokens", "mixed"]))
    torch.manual_seed(seed)
    q, tiles = (size * torch.randn(G, D)).to(dtype), random_tiles(16, D, dtype)
    pages = torch.randint(0, 16, (n,), dtype=torch.int32)
    masks = None if style == "every" else draw_masks(style, n, G)
    tiles = poisoned(tiles, pages, masks)
    o, lse, page_lse = torch.full((G, D), NAN), torch.full((G,), NAN), torch.full((n, G), NAN)

    k("attend_capped")(isa, q, D**-0.5, cap, tiles, pages, EVERY if masks is None else masks, o, lse, page_lse)

    want_o, want_lse = reference.attend(q, D**-0.5, tiles, pages, masks, cap)
    assert error(o, want_o) < accuracy(isa, dtype, G) + 2e-6 * cap
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)


@isas
@dtypes
def test_capped_logits_of_what_is_no_number(isa: str, dtype: torch.dtype) -> None:
    """Scores beyond float32 get the cap; a NaN stays NaN."""
    q, tiles = torch.full((2, 32), 1e30).to(dtype), torch.zeros(2, 2, 16, 32, dtype=dtype)
    tiles[0, 0, 0], tiles[0, 0, 1], tiles[:, 1, :, 0] = 1e30, -1e30, 1.0
    o, lse, page_lse = torch.full((2, 32), NAN), torch.full((2,), NAN), torch.full((1, 2), NAN)
    one = torch.zeros(1, dtype=torch.int32)
    k("attend_capped")(isa, q, 1.0, 3.0, tiles, one, EVERY, o, lse, page_lse)
    want = torch.tensor([3.0, -3.0] + [0.0] * 14).double().logsumexp(0)
    torch.testing.assert_close(lse.double(), want.expand(2), atol=1e-5, rtol=0)
    assert torch.allclose(o[:, 0], torch.ones(2))
    tiles[0, 0, 5, 5] = NAN
    k("attend_capped")(isa, q, 1.0, 3.0, tiles, one, EVERY, o, lse, page_lse)
    assert o.isnan().all()


@isas
@dtypes
def test_attend_has_every_shape(isa: str, dtype: torch.dtype) -> None:
    for D in range(32, 257, 16):
        with case(D=D):
            torch.manual_seed(D)
            tiles = random_tiles(5, D, dtype)
            pages = torch.tensor([4, 1, 2], dtype=torch.int32)
            for G in range(1, 17):
                q = torch.randn(G, D).to(dtype)
                o, lse = attend(isa, q, 0.1, tiles, pages)
                want_o, want_lse = reference.attend(q, 0.1, tiles, pages)
                assert error(o, want_o) < 1e-5
                torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@isas
@dtypes
def test_attend_to_nothing(isa: str, dtype: torch.dtype) -> None:
    for D in HEAD_DIMS:
        with case(D=D):
            q, tiles = torch.randn(3, D).to(dtype), torch.full((4, 2, 16, D), NAN, dtype=dtype)
            for n in (0, 1, 3):
                pages, masks = torch.arange(1, n + 1, dtype=torch.int32), torch.zeros(n, 3, dtype=torch.uint16)
                o, lse = attend(isa, q, 1.0, tiles, pages, masks)
                assert (o == 0).all()
                assert (lse == -INF).all()


@isas
@dtypes
def test_a_nan_reaches_exactly_the_heads_that_attend_to_it(isa: str, dtype: torch.dtype) -> None:
    for part, bits, times in product([0, 1], [0x0010, 0x00FF, 0xFFFF], [1, 8]):
        with case(part=part, bits=bits, times=times):
            tiles = random_tiles(3, 64, dtype)
            tiles[1, part, 4] = NAN
            masks = torch.full((2, 5 * times), 0xFFFF)
            masks[1] = torch.tensor([bits, 0xFFEF, 0, 0x0001, bits]).repeat(times)
            pages = torch.tensor([2, 1], dtype=torch.int32)
            o, _ = attend(isa, torch.randn(5 * times, 64).to(dtype), 0.1, tiles, pages, masks.to(torch.uint16))
            assert o.isnan().any(dim=1).tolist() == [True, False, False, False, True] * times


@isas
@dtypes
def test_what_is_no_number_reaches_only_heads_that_read_its_page(isa: str, dtype: torch.dtype) -> None:
    """Among many heads, most read whole pages. The kernel may multiply heads that do not read a page along with
    them."""
    for part, number in product([0, 1], [NAN, INF]):
        with case(part=part, number=number):
            tiles = random_tiles(3, 64, dtype)
            wanted = torch.arange(40) % 3 == 0
            q = torch.randn(40, 64).to(dtype)
            pages = torch.tensor([2, 1, 0], dtype=torch.int32)
            masks = torch.full((3, 40), 0xFFFF)
            masks[1] = torch.where(wanted, 0xFFFF, 0)
            want, want_lse = attend(isa, q, 0.1, tiles, pages, masks.to(torch.uint16))
            assert want.isfinite().all()
            tiles[1, part, 4] = number
            o, lse = attend(isa, q, 0.1, tiles, pages, masks.to(torch.uint16))
            assert not o[wanted].isfinite().all(dim=1).any()
            o, lse, want, want_lse = o[~wanted], lse[~wanted], want[~wanted], want_lse[~wanted]
            assert error(o, want) < 2 * accuracy(isa, dtype, 40)
            torch.testing.assert_close(lse, want_lse)
            # If the ISA has a separate path for many heads, it cannot take it now; rounding shows which path ran.
            assert torch.equal(o, want) != (dtype == torch.bfloat16 and isa in ("avx512bf16", "amx"))


@isas
@dtypes
def test_softmax_weights_to_a_few_ulp(isa: str, dtype: torch.dtype) -> None:
    """One-hot values make the output equal the weights. This tests the accuracy of exp, which is 0 below e^-87."""
    tiles = torch.zeros(2, 2, 16, 32).to(dtype)
    tiles[:, 1, :, :16] = torch.eye(16).to(dtype)
    q = torch.zeros(1, 32).to(dtype)
    q[0, 0] = 1
    for _ in range(100):
        tiles[1, 0, :, 0] = (-86 * torch.rand(16)).to(dtype)
        tiles[1, 0, 5, 0] = 0
        o, _ = attend(isa, q, 1.0, tiles, torch.tensor([1], dtype=torch.int32))
        want, _ = reference.attend(q, 1.0, tiles, torch.tensor([1], dtype=torch.int32))
        torch.testing.assert_close(o[:, :16].double(), want[:, :16], rtol=4e-7, atol=0)
    tiles[1, 0, :, 0] = torch.tensor([0.0, -90, -100, -1e4, -1e30] + [-INF] * 11).to(dtype)
    o, lse = attend(isa, q, 1.0, tiles, torch.tensor([1], dtype=torch.int32))
    assert o[0, :16].tolist() == [1.0] + [0.0] * 15
    assert lse.item() == 0.0


@isas
@dtypes
@few
@given(data=st.data(), seed=seeds, D=head_dims, G=st.sampled_from([1, 3, 4, 8, 11, 32]), n=st.integers(1, 12))
def test_weights_sum_to_one(
    isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, G: int, n: int
) -> None:
    """A value common to all tokens is the output: weights are divided by the sum of the weights used."""
    style = data.draw(st.sampled_from(["every", "tokens", "single", "pages", "prefix"]))
    torch.manual_seed(seed)
    q, tiles = torch.randn(G, D).to(dtype), random_tiles(16, D, dtype)
    tiles[:, 1] = torch.randn(D).to(dtype)
    pages = torch.randint(0, 16, (n,), dtype=torch.int32)
    masks = EVERY if style == "every" else draw_masks(style, n, G)
    o, lse = attend(isa, q, 2 / math.sqrt(D), tiles, pages, masks)
    want = torch.where(lse[:, None] > -INF, tiles[0, 1, 0].float(), 0)
    torch.testing.assert_close(o, want, rtol=2e-6, atol=0)


@isas
@dtypes
def test_huge_scores(isa: str, dtype: torch.dtype) -> None:
    """The largest score takes all attention, in any page order, also if it overflows float32."""
    for size, heads in product([1e2, 1e4, 1e10, 1e19, 3e38], [2, 40]):
        with case(size=size, heads=heads):
            for order in ([1, 2, 3], [3, 2, 1]):
                tiles = torch.zeros(4, 2, 16, 64).to(dtype)
                tiles[:, 1] = torch.randn(4, 16, 64).to(dtype)
                tiles[1:, 0, :, 0] = -size
                tiles[2, 0, 7, 0] = size
                q = torch.zeros(heads, 64).to(dtype)
                q[:, 0] = size
                o, lse = attend(isa, q, 1.0, tiles, torch.tensor(order, dtype=torch.int32))
                assert (o == tiles[2, 1, 7].float()).all()
                want = min(float(q[0, 0]) * float(tiles[2, 0, 7, 0]), torch.finfo(torch.float32).max)
                torch.testing.assert_close(lse, torch.full((heads,), want), rtol=1e-6, atol=0)


@isas
@dtypes
@pytest.mark.parametrize("heads", [1, 40])
def test_scores_of_minus_infinity_weigh_nothing(isa: str, dtype: torch.dtype, heads: int) -> None:
    tiles = random_tiles(3, 32, dtype)
    tiles[1:, 0] = 0
    tiles[1:, 0, :, 0] = -INF
    q = torch.ones(heads, 32).to(dtype)
    o, lse = attend(isa, q, 0.2, tiles, torch.tensor([1, 2], dtype=torch.int32))
    assert (o == 0).all()
    assert (lse == -INF).all()
    o, lse = attend(isa, q, 0.2, tiles, torch.tensor([1, 0, 2], dtype=torch.int32))
    want_o, want_lse = reference.attend(q, 0.2, tiles, torch.tensor([0]))
    assert error(o, want_o) < accuracy(isa, dtype, heads)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=0)


@isas
@dtypes
def test_attend_over_a_long_list(isa: str, dtype: torch.dtype) -> None:
    """Rounding errors must not accumulate over a long list, nor while the maximum rises."""
    tiles = random_tiles(600, 64, dtype)
    q = torch.randn(2, 64).to(dtype)
    pages = torch.randperm(600).to(torch.int32)
    means = (tiles[:, 0].float() @ q[0].float()).amax(dim=1)
    for order in (pages, means.argsort().to(torch.int32), means.argsort(descending=True).to(torch.int32)):
        o, lse = attend(isa, q, 0.125, tiles, order)
        want_o, want_lse = reference.attend(q, 0.125, tiles, order)
        assert error(o, want_o) < 2e-5
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@isas
@dtypes
@few
@given(data=st.data(), seed=seeds, D=head_dims, n=st.integers(1, 40))
def test_attend_for_many_heads(isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, n: int) -> None:
    """Heads of several requests in one call; most read nothing or all of a page."""
    G = data.draw(st.sampled_from([17, 24, 28, 32, 63, 64]))
    group = data.draw(st.sampled_from([1, 4, 7, 8]))
    style = data.draw(st.sampled_from(["every", "by request", "mixed"]))
    torch.manual_seed(seed)
    q, tiles = torch.randn(G, D).to(dtype), random_tiles(50, D, dtype)
    pages = torch.randperm(50, dtype=torch.int32)[:n].contiguous()
    masks = None if style == "every" else draw_masks("mixed", n, G)
    if style == "by request":
        request = torch.where(torch.rand(n, -(-G // group)) < 0.3, 0xFFFF, 0)
        masks = request.repeat_interleave(group, dim=1)[:, :G].contiguous().to(torch.uint16)
    tiles = poisoned(tiles, pages, masks)

    o, lse = attend(isa, q, 1 / math.sqrt(D), tiles, pages, EVERY if masks is None else masks)

    want_o, want_lse = reference.attend(q, 1 / math.sqrt(D), tiles, pages, masks)
    assert error(o, want_o) < accuracy(isa, dtype, G)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@isas
@dtypes
@few
@given(data=st.data(), seed=seeds, D=head_dims, G=st.integers(1, 16) | st.sampled_from([30, 64]), n=st.integers(0, 20))
def test_attend_pages(isa: str, dtype: torch.dtype, data: st.DataObject, seed: int, D: int, G: int, n: int) -> None:
    """The output equals attend's bit for bit, and each page has its weight."""
    style = data.draw(st.sampled_from(["every", "tokens", "single", "pages", "mixed"]))
    torch.manual_seed(seed)
    q, tiles = torch.randn(G, D).to(dtype), random_tiles(16, D, dtype)
    pages = torch.randint(0, 16, (n,), dtype=torch.int32)
    masks = None if style == "every" else draw_masks(style, n, G)
    tiles, scale = poisoned(tiles, pages, masks), 2 / math.sqrt(D)
    bits = EVERY if masks is None else masks
    o, lse, page_lse = torch.full(q.shape, NAN), torch.full((G,), NAN), torch.full((n, G), NAN)

    k("attend_pages")(isa, q, scale, tiles, pages, bits, o, lse, page_lse)

    want_o, want_lse = attend(isa, q, scale, tiles, pages, bits)
    assert torch.equal(o, want_o) and torch.equal(lse, want_lse)
    for i in range(n):
        _, want = reference.attend(q, scale, tiles, pages[i : i + 1], None if masks is None else masks[i : i + 1])
        torch.testing.assert_close(page_lse[i].double(), want, rtol=1e-5, atol=1e-5)


@isas
@dtypes
@pytest.mark.parametrize("G", [1, 4])
def test_how_lines_are_fetched_changes_no_bit(isa: str, dtype: torch.dtype, G: int) -> None:
    """Lists of several turns, in which the kernel tries every prefetch pace, on an ISA that has some
    (csrc/kernels/throttle.h), beside tiles in a cache, without pacing."""
    n = 203
    q, tiles = torch.randn(G, 128).to(dtype), random_tiles(n, 128, dtype)
    pages = torch.randperm(n).to(torch.int32)
    want_o, want_lse = torch.full((G, 128), NAN), torch.full((G,), NAN)
    k("attend_near")(isa, q, 0.1, tiles, pages, EVERY, want_o, want_lse)
    weights = []
    for _ in range(40):
        o, lse = attend(isa, q, 0.1, tiles, pages)
        assert torch.equal(o, want_o) and torch.equal(lse, want_lse)
        page_lse = torch.full((n, G), NAN)
        k("attend_pages")(isa, q, 0.1, tiles, pages, EVERY, o, lse, page_lse)
        assert torch.equal(o, want_o) and torch.equal(lse, want_lse)
        weights.append(page_lse)
    assert not weights[0].isnan().any() and all(torch.equal(page_lse, weights[0]) for page_lse in weights)


@isas
@dtypes
def test_pages_that_weigh_next_to_nothing(isa: str, dtype: torch.dtype) -> None:
    """Such pages may get no weight beside a heavier page before them, but not beside one after them."""
    tiles = torch.zeros(3, 2, 16, 32).to(dtype)
    tiles[1:, 0, :, 0] = torch.tensor([[0.0], [200.0]])
    q = torch.zeros(1, 32).to(dtype)
    q[0, 0] = 1
    for order, light in (([1, 2], 0), ([2, 1], 1)):
        page_lse = torch.full((2, 1), NAN)
        pages = torch.tensor(order, dtype=torch.int32)
        k("attend_pages")(isa, q, 1.0, tiles, pages, EVERY, torch.empty(1, 32), torch.empty(1), page_lse)
        assert page_lse[1 - light].item() == pytest.approx(200 + math.log(16), rel=1e-6)
        assert page_lse[light].item() == (pytest.approx(math.log(16), rel=1e-6) if light == 0 else -INF)
