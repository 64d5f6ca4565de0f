"""Every kernel except attention, on every ISA of this CPU, for both KV dtypes, against reference.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import reference
import torch
from effort import case
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import INF, NAN, OWN_ISAS, attend, dtypes, error, few, head_dims, isas, k, random_tiles, seeds
from torch import Tensor

from benchmark.probe import library

# ---- score

# Long lists are divided such that no two parts start at the same place of a page: 256 to 260 entries, and so on.
long_lists = st.sampled_from([252, 253, 256, 257, 260, 512, 1000, 1023, 1024])


@isas
@dtypes
@few
@given(
    seed=seeds, D=head_dims, G=st.integers(1, 16) | st.sampled_from([31, 62, 64]), n=st.integers(0, 70) | long_lists,
    runs=st.booleans(), spread=st.sampled_from([1.0, 0.75, 0.5, 0.3]),
)  # fmt: skip
def test_score(isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int, runs: bool, spread: float) -> None:
    torch.manual_seed(seed)
    keys = torch.randn(90, 16, D).to(dtype)
    entries = torch.stack([keys.amin(dim=1), keys.amax(dim=1)], dim=1)
    q = torch.randn(G, D).to(dtype)
    q[:, 0] = torch.tensor([0.0, -0.0])[torch.randint(0, 2, (G,))].to(dtype)
    index = torch.arange(5, 5 + n) % 90 if runs else torch.randint(0, 90, (n,))
    index = index.to(torch.int32)
    unread = torch.ones(90, dtype=torch.bool)
    unread[index.long()] = False
    entries[unread] = NAN
    out = torch.full((G, n), NAN)

    k("score")(isa, q, entries, index, spread, out)

    size = (q.double().abs().sum(dim=1, keepdim=True) * 4).clamp(min=1e-30)
    # The weights (1 +- spread) q / 2 are rounded to bf16; with spread 1 they are exactly q and 0.
    rounding = 1e-5 if dtype == torch.float32 or spread == 1 else 2.0**-8
    assert (((out.double() - reference.score(q, entries, index, spread)) / size).abs() < rounding).all()
    if spread < 1:
        return
    true = torch.einsum("gd,ntd->gnt", q.double(), keys[index.long()].double())
    assert (true <= (out.double() + 1e-5 * size)[:, :, None]).all()


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, G=st.integers(1, 64), n=st.integers(1, 70) | long_lists, part=st.integers(1, 8))
def test_a_score_depends_on_its_head_and_entry_alone(
    isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int, part: int
) -> None:
    """Equal bits at any place in a list, consecutive or not, with any other heads and entries."""
    torch.manual_seed(seed)
    entries = torch.randn(n, 2, D).to(dtype)
    q = torch.randn(G, D).to(dtype)
    whole, some = torch.full((G, n), NAN), torch.full((min(part, G), n), NAN)
    k("score")(isa, q, entries, torch.arange(n, dtype=torch.int32), 0.5, whole)
    order = torch.randperm(n)
    k("score")(isa, q[: len(some)].contiguous(), entries, order.to(torch.int32), 0.5, some)
    assert torch.equal(some, whole[: len(some), order])


@isas
@dtypes
def test_how_entries_are_fetched_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    """A list of several turns, in which the kernel tries every prefetch pace on an ISA that has some (throttle.h)."""
    for G in [1, 4, 8]:
        with case(G=G):
            n = 3000
            entries, q = torch.randn(n, 2, 128).to(dtype), torch.randn(G, 128).to(dtype)
            index = torch.randperm(n).to(torch.int32)
            want = torch.full((G, n), NAN)
            for part in range(0, n, 10):  # too few for a pace
                some = torch.full((G, 10), NAN)
                k("score")(isa, q, entries, index[part : part + 10].contiguous(), 0.5, some)
                want[:, part : part + 10] = some
            for _ in range(30):
                out = torch.full((G, n), NAN)
                k("score")(isa, q, entries, index, 0.5, out)
                assert torch.equal(out, want)


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(0, 20))
def test_score_tokens(isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int) -> None:
    torch.manual_seed(seed)
    tiles, q = random_tiles(30, D, dtype), torch.randn(G, D).to(dtype)
    pages = torch.randint(0, 30, (n,), dtype=torch.int32)
    tiles[:, 1] = NAN  # no value is read
    out = torch.full((G, n, 16), NAN)

    k("score_tokens")(isa, q, tiles, pages, out)

    want = reference.score_tokens(q, tiles, pages)
    size = q.double().norm(dim=1)[:, None, None] * tiles[pages.long(), 0].double().norm(dim=-1)
    assert (((out.double() - want) / size.clamp(min=1e-30)).abs() < 1e-5).all()


# ---- select


def check_select(isa: str, scores: Tensor, count: int, bit: int = 4) -> None:
    heads = torch.full((len(scores),), 0x8001, dtype=torch.int32).to(torch.uint16)
    k("select")(isa, scores, count, bit, heads)
    got = heads.to(torch.int32)
    chosen = reference.select(scores, count)
    assert torch.equal((got & bit).bool(), chosen)
    assert ((got | bit) == (0x8001 | bit)).all()


@isas
@few
@given(
    scores=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, 2.5, INF, -INF, NAN]) | st.floats(width=32), min_size=1
    ),
    data=st.data(),
)
def test_select(isa: str, scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)) | st.sampled_from([1, len(scores)]))
    check_select(isa, torch.tensor(scores, dtype=torch.float32), count)


def scores_of(n: int) -> dict[str, Tensor]:
    return {
        "normal": torch.randn(n),
        "ties": torch.randint(-3, 3, (n,)).float(),
        "equal": torch.full((n,), 7.5),
        # Any bit pattern: denormals, infinities and NaN of both signs.
        "bits": torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(torch.float32),
        "nothing": torch.where(torch.rand(n) < 0.5, NAN, -INF),
        "one": torch.full((n,), -INF).index_fill(0, torch.tensor([n // 2]), 1.0),
        "narrow": (torch.randint(0, 5000, (n,)).to(torch.int32) + 0x3F800000).view(torch.float32),
        # Neighbours are similar, so few groups may hold the largest; ties at the largest finite number.
        "sorted": torch.randn(n).sort().values,
        "infinite": torch.tensor([INF, NAN, 0.0, -0.0, -INF])[torch.randint(0, 5, (n,))],
    }


@isas
def test_select_of_many(isa: str) -> None:
    for n in (1, 2, 15, 16, 17, 255, 256, 1000, 4099):
        torch.manual_seed(n)
        for kind, scores in scores_of(n).items():
            with case(n=n, kind=kind):
                for count in sorted({1, (n + 1) // 2, max(1, n // 20), max(1, n // 16), max(1, n - 1), n}):
                    check_select(isa, scores, count, bit=0x4000)


# ---- patterns: score_rows, compare_codes, weights


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(0, 70))
def test_score_rows(isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int) -> None:
    """Tokens in any order, also repeated; no other token is read, and nothing is written past the end."""
    torch.manual_seed(seed)
    tiles = random_tiles(6, D, dtype)
    tokens = torch.randint(0, 6 * 16, (n,), dtype=torch.int32)
    keys = tiles[:, 0].reshape(-1, D).clone()
    tiles[:, 1] = NAN
    for t in set(range(96)).difference(tokens.tolist()):
        tiles[t // 16, 0, t % 16] = NAN
    q, out = torch.randn(G, D).to(dtype), torch.full((G * n + 16,), NAN)
    k("score_rows")(isa, q, tiles, tokens, out[: G * n].view(G, n))
    want = q.double() @ keys[tokens.long()].double().T
    torch.testing.assert_close(out[: G * n].view(G, n).double(), want, rtol=1e-4, atol=1e-4 * math.sqrt(D))
    assert out[G * n :].isnan().all()


@isas
@few
@given(seed=seeds, words=st.integers(0, 5), limit=st.sampled_from([0, 1, 100, 127, 128, 129, 254, 255]))
def test_compare_codes(isa: str, seed: int, words: int, limit: int) -> None:
    torch.manual_seed(seed)
    near = limit + torch.randint(-2, 3, (words, 64))
    codes = torch.where(torch.rand(words, 64) < 0.5, near.clamp(0, 255), torch.randint(0, 256, (words, 64)))
    found = torch.full((2, words + 1), 0x5A5A)
    k("compare_codes")(isa, codes.to(torch.uint8).flatten(), limit, found[0, :words], found[1, :words])
    for got, is_so in zip(found.tolist(), (codes > limit, codes == limit), strict=True):
        want = [sum(1 << b for b in range(64) if row[b]) for row in is_so.tolist()]
        assert [word & (1 << 64) - 1 for word in got] == [*want, 0x5A5A]


# ---- block_mass


def check_block_mass(
    isa: str, scores: Tensor, chosen: Tensor, scale: float, tokens: int, first: int, last: int, cap: float = 0.0
) -> None:
    n, bits = len(scores), 0x0120
    # Bits of other heads, and words and scores past the end, must not count.
    heads = torch.randint(0, 1 << 16, (n + 16,)) & ~bits
    heads[:n] |= torch.where(chosen, torch.tensor([0x0100, 0x0020, 0x0120])[torch.randint(0, 3, (n,))], 0)
    heads[n:] = 0xFFFF
    scores = torch.cat([scores, torch.full((16,), 1e30)])
    mass = torch.full((2,), NAN)
    k("block_mass")(isa, scores[:n], heads.to(torch.uint16)[:n], bits, scale, cap, tokens, first, last, mass)
    want = torch.tensor(reference.block_mass(scores[:n], chosen, scale, tokens, first, last, cap), dtype=torch.float64)
    torch.testing.assert_close(mass.double(), want, rtol=2e-6, atol=2e-5)


@isas
@few
@given(
    data=st.data(), seed=seeds, n=st.integers(1, 70), size=st.sampled_from([0.1, 10.0, 1e3, 1e30, 3e38]),
    chosen=st.sampled_from([0.0, 0.05, 0.5, 1.0]), tokens=st.sampled_from([16, 128]),
)  # fmt: skip
def test_block_mass(isa: str, data: st.DataObject, seed: int, n: int, size: float, chosen: float, tokens: int) -> None:
    torch.manual_seed(seed)
    scores = size * (torch.rand(n) * 2 - 1)
    for special in data.draw(st.lists(st.sampled_from([INF, -INF, NAN, 0.0]), max_size=3)):
        scores[torch.randint(0, n, ())] = special
    first, last = torch.randint(1, tokens // 16 + 1, (2,)).tolist()
    scale, cap = data.draw(st.sampled_from([1.0, 0.1])), data.draw(st.sampled_from([0.0, 4.0]))
    check_block_mass(isa, scores, torch.rand(n) < chosen, scale, tokens, 16 * first, 16 * last, cap)


@isas
def test_block_mass_of_many_and_of_nothing(isa: str) -> None:
    for n in [1, 15, 16, 17, 32, 33, 4099]:
        with case(n=n):
            torch.manual_seed(n)
            for scores in (3 * torch.randn(n), torch.full((n,), -INF), torch.full((n,), NAN), torch.full((n,), 7.0)):
                for chosen in (torch.rand(n) < 0.1, torch.zeros(n).bool(), torch.ones(n).bool()):
                    check_block_mass(isa, scores, chosen, 0.5, 32, 16, 32)


@isas
@few
@given(
    seed=seeds, n=st.integers(0, 70), size=st.sampled_from([0.1, 10.0, 1e3, 3e38]),
    keep=st.sampled_from([0.0, 0.9, 1.0]), take=st.sampled_from([0.0, 0.1, 1.0]),
    special=st.sampled_from([NAN, INF, -INF, 0.0]),
)  # fmt: skip
def test_add_weights(isa: str, seed: int, n: int, size: float, keep: float, take: float, special: float) -> None:
    torch.manual_seed(seed)
    scores, scale = size * (torch.rand(n) * 2 - 1), 0.25
    scores[torch.randint(0, n, (1,)) if n else torch.empty(0, dtype=torch.long)] = special
    lse = float(torch.where(scores.isnan(), -INF, scores * scale).logsumexp(0).clamp(-1e38, 1e38)) if n else 0.0
    sums = torch.cat([torch.rand(n) if keep else torch.full((n,), NAN), torch.full((16,), 7.0)])
    weights = torch.where(scores.isnan(), 0.0, (scores.double() * scale - lse).clamp(max=0.0).exp())
    want = (sums[:n].double() * keep if keep else 0.0) + take * weights
    k("add_weights")(isa, scores, scale, lse, keep, take, sums[:n])
    torch.testing.assert_close(sums[:n].double(), want, rtol=2e-4, atol=1e-7)
    assert (sums[n:] == 7.0).all()


@isas
@dtypes
@few
@given(
    seed=seeds, D=head_dims, n=st.integers(2, 40), size=st.sampled_from([0.3, 1.0, 3.0]), read=st.floats(0.0, 1.0),
    cap=st.sampled_from([0.0, 1.0, 20.0]),
)  # fmt: skip
def test_block_mass_of_bounds_is_an_upper_bound(
    isa: str, dtype: torch.dtype, seed: int, D: int, n: int, size: float, read: float, cap: float
) -> None:
    """The attention to the chosen blocks and to the others is at most the weight of their bounds. The same holds for
    the share left out, relative to the known total."""
    torch.manual_seed(seed)
    keys, q, scale = torch.randn(n, 16, D).to(dtype), (size * torch.randn(1, D)).to(dtype), 1 / math.sqrt(D)
    entries = torch.stack([reference.page_minmax(keys[i : i + 1]) for i in range(n)])
    scores, mass = torch.full((1, n), NAN), torch.full((2,), NAN)
    k("score")(isa, q, entries, torch.arange(n, dtype=torch.int32), 1.0, scores)
    chosen = torch.rand(n) < read
    k("block_mass")(isa, scores[0], chosen.to(torch.uint16), 1, scale, cap, 16, 16, 16, mass)
    logits = reference.capped(scale * (keys.double() @ q[0].double()), cap)
    read_lse, unread_lse = (logits[part].flatten().logsumexp(0) for part in (chosen, ~chosen))
    assert float(read_lse) <= mass[0] + 1e-3 and float(unread_lse) <= mass[1] + 1e-3
    residents = reference.capped(scale * torch.randn(80, D).double() @ q[0].double(), cap).logsumexp(0)
    known = torch.logaddexp(residents, read_lse)
    assert (unread_lse - torch.logaddexp(known, unread_lse)).exp() <= 1.001 * (mass[1].double() - known).exp()


# ---- metadata


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims)
def test_minmax(isa: str, dtype: torch.dtype, seed: int, D: int) -> None:
    torch.manual_seed(seed)
    tiles = random_tiles(3, D, dtype)
    tiles[:, 1] = NAN
    entries = torch.full((3, 2, D), NAN).to(dtype)
    for tile, entry in zip(tiles, entries, strict=True):
        k("page_minmax")(isa, tile, entry)
        assert torch.equal(entry, reference.page_minmax(tile))
    k("merge_minmax")(isa, entries[0], entries[1])
    assert torch.equal(entries[0], reference.page_minmax(torch.cat([tiles[0], tiles[1]], dim=1)))
    assert torch.equal(entries[1], reference.page_minmax(tiles[1]))


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, size=st.sampled_from([1.0, 1e-3, 300.0]))
def test_moments(isa: str, dtype: torch.dtype, seed: int, D: int, size: float) -> None:
    torch.manual_seed(seed)
    tile = (size * random_tiles(1, D, dtype)[0]).to(dtype)
    sums, scalar = torch.full((2, 2 * D + 8), NAN, dtype=torch.float64)
    k("page_moments")(isa, tile, sums)
    torch.testing.assert_close(sums, reference.page_moments(tile), rtol=1e-12, atol=size * 1e-12)
    k("page_moments")("scalar", tile, scalar)
    assert torch.equal(sums, scalar)


# ---- merge_state


@isas
@dtypes
@few
@given(
    seed=seeds,
    D=head_dims,
    lse_a=st.floats(-300, 300, width=32) | st.just(-INF),
    gap=st.floats(-200, 200, width=32) | st.just(-INF),
)
def test_merge_state(isa: str, dtype: torch.dtype, seed: int, D: int, lse_a: float, gap: float) -> None:
    torch.manual_seed(seed)
    lse_b = float(torch.tensor(gap if lse_a == -INF else lse_a + gap))
    # A side without tokens must not be read.
    o_a = torch.full((D,), NAN) if lse_a == -INF else torch.randn(D)
    o_b = torch.full((D,), NAN) if lse_b == -INF else torch.randn(D)
    out = torch.full((D,), NAN).to(dtype)

    lse = k("merge_state")(isa, o_a, lse_a, o_b, lse_b, out)

    want, want_lse = reference.merge_state(o_a, lse_a, o_b, lse_b)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    assert ((out.double() - want).abs() <= unit * want.abs() + 1e-6).all()
    assert lse == pytest.approx(want_lse, rel=1e-6, abs=1e-6)


@isas
@dtypes
def test_merge_state_rounds_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    o = torch.randint(-(2**31), 2**31, (200, 64)).to(torch.int32).view(torch.float32)
    o[0, :4] = torch.tensor([NAN, INF, -INF, -NAN])
    # A NaN with only low bits, which must not round to infinity; and halfway cases, rounded to even in both directions.
    o[1, :3] = torch.tensor([0x7F800001, 0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    for row in o:
        out = torch.zeros(64).to(dtype)
        k("merge_state")(isa, row.contiguous(), 1.0, torch.full((64,), NAN), -INF, out)
        torch.testing.assert_close(out, row.to(dtype), rtol=0, atol=0, equal_nan=True)


@isas
@dtypes
def test_parts_merge_into_the_whole(isa: str, dtype: torch.dtype) -> None:
    tiles, q = random_tiles(9, 128, dtype), torch.randn(4, 128).to(dtype)
    pages = torch.arange(9, dtype=torch.int32)
    (o_a, lse_a), (o_b, lse_b) = (attend(isa, q, 0.1, tiles, part) for part in (pages[:4], pages[4:]))
    want_o, want_lse = reference.attend(q, 0.1, tiles, pages)
    for g in range(4):
        out = torch.full((128,), NAN).to(dtype)
        lse = k("merge_state")(isa, o_a[g], lse_a[g].item(), o_b[g], lse_b[g].item(), out)
        assert lse == pytest.approx(want_lse[g].item(), rel=1e-6)
        assert error(out, want_o[g]) < (5e-3 if dtype == torch.bfloat16 else 1e-5)


# ---- which ISA, and wrong arguments


def test_isas() -> None:
    assert OWN_ISAS[0] == "scalar"
    assert len(set(OWN_ISAS)) == len(OWN_ISAS)
    assert set(OWN_ISAS) <= {"scalar", "avx2", "avx512", "avx512bf16", "amx"}
    facts = Path("/proc/cpuinfo").read_text()
    vectors = [isa for isa in OWN_ISAS if isa != "amx"]
    if "avx512" in OWN_ISAS and "avx512bf16" in OWN_ISAS:
        assert vectors[-2:] == (["avx512bf16", "avx512"] if "GenuineIntel" in facts else ["avx512", "avx512bf16"])
    # A kernel or a sandbox may block a unit that the CPU has.
    assert vectors == OWN_ISAS or (OWN_ISAS[-1] == "amx" and " amx_bf16" in facts)


def test_fluxion_isa_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUXION_ISA", raising=False)
    assert library().best_isa() == OWN_ISAS[-1]
    monkeypatch.setenv("FLUXION_ISA", "scalar")
    assert library().best_isa() == "scalar"
    monkeypatch.setenv("FLUXION_ISA", "sse9")
    with pytest.raises(RuntimeError, match=r"FLUXION_ISA=sse9 .* use one of scalar"):
        library().best_isa()


def test_wrong_arguments_are_refused() -> None:
    q, tiles = torch.zeros(2, 64), torch.zeros(4, 2, 16, 64)
    pages, masks = torch.tensor([1, 2], dtype=torch.int32), torch.ones(2, 2).to(torch.uint16)
    o, lse = torch.zeros(2, 64), torch.zeros(2)
    good = ["scalar", q, 1.0, tiles, pages, masks, o, lse]
    k("attend")(*good)
    for at, bad, message in [
        (0, "sse9", "isa sse9 cannot be run"),
        (1, q.half(), "q is a float16 tensor, which no kernel takes"),
        (1, q[:, :40].contiguous(), "q has head_dim 40"),
        (1, torch.zeros(65, 64), "q has 65 heads"),
        (1, torch.zeros(64, 2).T, "q is a float32 tensor of shape .*, not contiguous; pass"),
        (3, tiles.bfloat16(), "tiles is a bfloat16 tensor .* of float32 and shape"),
        (3, tiles[:, :1], "tiles is a float32 tensor of shape"),
        (4, pages.long(), "pages is a int64 tensor"),
        (4, pages + 2, "pages holds 4 at index 1; pass ids from 0 to 3"),
        (4, -pages, "pages holds -1 at index 0"),
        (5, masks[:, :1].contiguous(), "masks is a uint16 tensor of shape"),
        (5, masks.to(torch.int16), "masks is a int16 tensor"),
        (6, o.double(), "o is a float64 tensor"),
        (7, torch.zeros(3), "lse is a float32 tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            k("attend")(*good[:at], bad, *good[at + 1 :])

    heads = torch.zeros(3).to(torch.uint16)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"k is {count} of 3 scores"):
            k("select")("scalar", torch.zeros(3), count, 1, heads)
    with pytest.raises(ValueError, match="bit is 65536"):
        k("select")("scalar", torch.zeros(3), 1, 65536, heads)
    with pytest.raises(ValueError, match="heads is a uint16 tensor"):
        k("select")("scalar", torch.zeros(4), 1, 1, heads)
    with pytest.raises(ValueError, match="index holds 4"):
        k("score")(
            "scalar", q, tiles[:, :, 0].contiguous(), torch.tensor([4], dtype=torch.int32), 1.0, torch.zeros(2, 1)
        )
    with pytest.raises(ValueError, match="sums is a float32 tensor"):
        k("page_moments")("scalar", tiles[0], torch.zeros(136))
    with pytest.raises(ValueError, match="entry is a float32 tensor"):
        k("page_minmax")("scalar", tiles[0].bfloat16(), torch.zeros(2, 64))
