"""The prototype of multi-head latent attention: on every ISA this CPU has, against torch in float64."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import INF, NAN, OWN_ISAS, dtypes, error, few, isas, k, own_isas, seeds
from torch import Tensor

from fluxion_sglang.native import Workers, probe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import common
import mla
import tables
from roofline import Arena, page_lists

LATENT, VALUES, TILES = 576, 512, 40
SCALE = 192**-0.5  # of DeepSeek: of a head's query before it is absorbed

heads = st.sampled_from([1, 16, 17, 128]) | st.integers(1, 128)
lengths = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 128]) | st.integers(0, 16 * TILES)


def random_latents(dtype: torch.dtype, tiles: int = TILES) -> Tensor:
    """Elements of unequal size, as in a compressed latent and its rotary part."""
    return (torch.randn(tiles, 16, LATENT) * torch.linspace(0.2, 1.0, LATENT)).to(dtype)


def attend(isa: str, q: Tensor, tiles: Tensor, pages: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    o, lse = torch.full((len(q), VALUES), NAN), torch.full((len(q),), NAN)
    k("attend_latents")(isa, q, SCALE, tiles, pages, keys, o, lse)
    return o, lse


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype, size: float = 1.0) -> None:
    """As `extend` does: weights of bfloat16 are rounded to it, and lse is that of the rounded ones."""
    rounded = dtype == torch.bfloat16
    assert error(got[0], want[0]) < (8e-3 if rounded else 2e-5 * max(size, 1.0))
    torch.testing.assert_close(got[1].double(), want[1], atol=4e-3 if rounded else 2e-5, rtol=2e-5)


@isas
@dtypes
@few
@given(H=heads, keys=lengths, scattered=st.booleans(), seed=seeds, size=st.sampled_from([0.0, 1.0, 30.0]))
def test_attention(isa: str, dtype: torch.dtype, H: int, keys: int, scattered: bool, seed: int, size: float) -> None:
    """Whatever lies behind the last token, or in tiles that are not listed, is not used."""
    torch.manual_seed(seed)
    tiles, q = random_latents(dtype), (size * torch.randn(H, LATENT)).to(dtype)
    pages = (torch.randperm(TILES) if scattered else torch.arange(TILES))[: -(-keys // 16)].to(torch.int32)
    there = torch.zeros(TILES, 16, dtype=torch.bool)
    there[pages.long()] = (torch.arange(16 * len(pages)) < keys).view(-1, 16)
    tiles.masked_fill_(~there[:, :, None], NAN)

    got = attend(isa, q, tiles, pages, keys)

    check(got, reference.attend_latents(q, SCALE, tiles, pages, keys), dtype, size)


@isas
@dtypes
def test_nothing_weighs_nothing(isa: str, dtype: torch.dtype) -> None:
    o, lse = attend(isa, torch.ones(17, LATENT, dtype=dtype), random_latents(dtype), torch.arange(0).int(), 0)
    assert torch.equal(o, torch.zeros(17, VALUES)) and (lse == -INF).all()


@isas
@dtypes
def test_a_head_does_not_depend_on_others(isa: str, dtype: torch.dtype) -> None:
    """It has the same bits in any company, also beside a head that is no number."""
    torch.manual_seed(1)
    tiles, q, pages = random_latents(dtype), torch.randn(128, LATENT).to(dtype), torch.randperm(TILES).int()
    o, lse = attend(isa, q, tiles, pages, 300)
    for part in (slice(0, 1), slice(5, 21), slice(100, 128)):
        some, some_lse = attend(isa, q[part].contiguous(), tiles, pages, 300)
        assert torch.equal(some, o[part]) and torch.equal(some_lse, lse[part])
    q[7] = NAN
    other, _ = attend(isa, q, tiles, pages, 300)
    rest = torch.arange(128) != 7
    assert other[7].isnan().all() and torch.equal(other[rest], o[rest])


@isas
@dtypes
def test_where_tiles_lie_does_not_matter(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    tiles, q, order = random_latents(dtype), torch.randn(16, LATENT).to(dtype), torch.randperm(TILES)
    want = attend(isa, q, tiles[order].contiguous(), torch.arange(TILES).int(), 611)
    got = attend(isa, q, tiles, order.int(), 611)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@isas
@dtypes
def test_rising_scores_lose_nothing(isa: str, dtype: torch.dtype) -> None:
    """Each token weighs more than all before it, then less."""
    torch.manual_seed(3)
    tiles, pages = random_latents(dtype, 20), torch.arange(20).int()
    q = torch.zeros(16, LATENT, dtype=dtype)
    q[:, -1] = 1
    for sign in (1, -1):
        tiles[:, :, -1] = (sign * torch.linspace(-300, 300, 320).view(20, 16)).to(dtype)
        check(attend(isa, q, tiles, pages, 320), reference.attend_latents(q, SCALE, tiles, pages, 320), dtype)


@isas
@dtypes
@few
@given(seed=seeds, cut=st.integers(0, TILES))
def test_parts_merge_to_the_whole(isa: str, dtype: torch.dtype, seed: int, cut: int) -> None:
    """By their LSE, as parts of a task that several workers share."""
    torch.manual_seed(seed)
    tiles, q, pages = random_latents(dtype), torch.randn(16, LATENT).to(dtype), torch.randperm(TILES).int()
    parts = [attend(isa, q, tiles, part, 16 * len(part)) for part in (pages[:cut], pages[cut:])]
    lse = torch.stack([part[1].double() for part in parts])
    merged = (torch.softmax(lse, 0)[..., None] * torch.stack([part[0].double() for part in parts])).sum(0)
    check((merged, lse.logsumexp(0)), reference.attend_latents(q, SCALE, tiles, pages, 16 * TILES), dtype)


@isas
@dtypes
@few
@given(seed=seeds, H=st.integers(1, 16), n=st.integers(0, 90))
def test_metadata_bounds_scores(isa: str, dtype: torch.dtype, seed: int, H: int, n: int) -> None:
    torch.manual_seed(seed)
    tiles, q = random_latents(dtype, 30), torch.randn(H, LATENT).to(dtype)
    entries = torch.full((30, 2, LATENT), NAN, dtype=dtype)
    for tile, entry in zip(tiles, entries, strict=True):
        k("page_minmax")(isa, tile, entry)
    assert torch.equal(entries, torch.stack([tiles.amin(1), tiles.amax(1)], 1))
    index, out = torch.randint(0, 30, (n,), dtype=torch.int32), torch.full((H, n), NAN)
    k("score")(isa, q, entries, index, 1.0, out)
    slack = 1e-5 * 4 * q.double().abs().sum(1, keepdim=True)
    assert ((out.double() - reference.score(q, entries, index)).abs() < slack).all()
    true = torch.einsum("hd,ntd->hnt", q.double(), tiles[index.long()].double())
    assert (true <= (out + slack)[:, :, None]).all()


@own_isas
@dtypes
def test_the_probe_runs_the_kernel(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    tiles, q = random_latents(dtype), torch.randn(3, 17, LATENT).to(dtype)
    lists = [torch.randint(0, TILES, (n,), dtype=torch.int32) for n in (5, 0, 9)]
    o, lse = torch.full((3, 17, VALUES), NAN), torch.full((3, 17), NAN)
    times = probe.attend_latents(Workers(2), isa, q, SCALE, tiles, probe.TaskList.of(lists), o, lse, runs=2)
    assert len(times) == 2 and min(times) > 0
    for i, pages in enumerate(lists):
        want = attend(isa, q[i], tiles, pages, 16 * len(pages))
        assert torch.equal(o[i], want[0]) and torch.equal(lse[i], want[1])


def test_what_cannot_be_is_refused() -> None:
    isa, tiles, pages = OWN_ISAS[0], torch.zeros(4, 16, LATENT), torch.arange(4).int()
    good = (torch.zeros(2, LATENT), SCALE, tiles, pages, 64, torch.zeros(2, VALUES), torch.zeros(2))

    def shaped(name: str, bad: str, good: str) -> str:
        given, wanted = bad.split(maxsplit=1), good.split(maxsplit=1)
        return (
            f"{name} is a {given[0]} tensor of shape {given[1]}; pass a contiguous CPU tensor of {wanted[0]} and shape "
            f"{wanted[1]}."
        )

    wrong = [
        (0, torch.zeros(129, LATENT), "q has 129 heads; pass 1 to 128 heads, those that share one KV head."),
        (0, torch.zeros(2, 512), shaped("q", "float32 [2, 512]", "float32 [2, 576]")),
        (2, tiles.bfloat16(), shaped("tiles", "bfloat16 [4, 16, 576]", "float32 [any, 16, 576]")),
        (3, pages + 1, "pages holds 4 at index 3; pass ids from 0 to 3."),
        (4, 65, "keys is 65; 4 pages have 0 to 64 tokens."),
        (4, -1, "keys is -1; 4 pages have 0 to 64 tokens."),
        (5, torch.zeros(2, LATENT), shaped("o", "float32 [2, 576]", "float32 [2, 512]")),
        (6, torch.zeros(3), shaped("lse", "float32 [3]", "float32 [2]")),
    ]
    for at, bad, sentence in wrong:
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            k("attend_latents")(isa, *good[:at], bad, *good[at + 1 :])
    for H, listed, sentence in (
        (129, pages, "q has 129 heads; pass 1 to 128."),
        (2, pages + 1, "pages holds 4; pass ids from 0 to 3."),
    ):
        q, tasks, o = torch.zeros(1, H, LATENT), probe.TaskList.of([listed]), torch.zeros(1, H, VALUES)
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            probe.attend_latents(Workers(1), isa, q, SCALE, tiles, tasks, o, torch.zeros(1, H))


def test_the_benchmark_measures_what_its_tables_show(tmp_path: Path) -> None:
    arena = Arena.of(32 << 20, 1 << 20)
    tasks = page_lists(arena, mla.TILE_BYTES, 1024, 0.5, 16)
    rows = mla.measure(arena, "half of 1K", tasks, others=True, size=64, rounds=2)
    assert {row["heads"] for row in rows} == set(mla.HEADS)
    # Under a sanitizer the shares round to 0.
    assert all(row["of_stream"] >= 0 and row["of_matrix"] >= 0 and 0 < row["error"] < 8e-3 for row in rows)
    path = tmp_path / "box" / "mla.json"
    common.save(path, {**common.header("mla"), "rounds": 2, "budget": mla.BUDGET, "rows": rows + mla.unions(16, 200)})
    for name, text in (("attention", "| half of 1K |"), ("metadata", "\n| 128 |"), ("unions", "\n| 0.99 |")):
        assert text in tables.TABLES[f"mla_{name}"](tmp_path)


@pytest.mark.parametrize("heads", [16, 128])
def test_heads_that_are_alike_read_less(heads: int) -> None:
    rows = mla.unions(heads, 1000, rounds=3)
    read, found = ([row[key] for row in rows] for key in ("union", "shared"))
    assert read == sorted(read, reverse=True) and found == sorted(found)
    assert read[0] == pytest.approx(1 - (1 - mla.BUDGET) ** heads, abs=0.02), "heads that choose by chance"
    assert mla.BUDGET <= read[-1] < 0.1 and found[-1] > 0.9
