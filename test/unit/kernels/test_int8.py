"""Keys and values in 8 bits: the storage format, and every kernel over it, on every ISA of this CPU."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import reference
import torch
from effort import case
from hypothesis import given
from hypothesis import strategies as st
from int8 import INT8, bytes_of_rows, multiplied_queries, pack_tiles, stored, unpack_tiles
from kernel_calls import EVERY, HEAD_DIMS, INF, ISAS, NAN, OWN_ISAS, accuracy, attend, few, head_dims, isas, k, seeds
from native_world import NativeWorld
from test_attend import draw_masks
from torch import Tensor

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import NativePool, Workers, pool_bytes, row_bytes
from fluxion_sglang.sglang.start import served_models, validation

BF16 = torch.bfloat16
HUGE_PAGE = 2 << 20


def tiles_of(P: int, D: int, size: float = 1.0) -> Tensor:
    """Packed random tiles; some elements, and some rows, are much larger than others."""
    wild = torch.exp2(torch.randint(-6, 7, (P, 2, 16, 1)).float()) * (1 + 20 * (torch.rand(1, 2, 1, D) < 0.05))
    return pack_tiles((size * wild.sqrt() * torch.randn(P, 2, 16, D)).to(BF16))


def poison(packed: Tensor, D: int, wanted: Tensor) -> Tensor:
    """Random bytes, including NaN, in the tokens outside `wanted`, [P, 16] bool."""
    rows = wanted[:, None, :].expand(-1, 2, -1).flatten(1)
    kept = bytes_of_rows(rows, D)
    noise = torch.randint(0, 256, packed.shape, dtype=torch.uint8)
    scales = torch.where(torch.rand(len(packed), 32) < 0.5, NAN, 100.0).to(BF16)
    noise[:, 32 * D :] = scales.view(torch.uint8)
    return torch.where(kept, packed, noise)


def wanted_by(masks: Tensor | None, pages: Tensor, P: int) -> Tensor:
    wanted = torch.zeros(P, 16, dtype=torch.bool)
    for i, page in enumerate(pages.tolist()):
        wanted[page] |= True if masks is None else reference.token_bits(masks)[:, i].any(dim=0)
    return wanted


def check(
    o: Tensor, lse: Tensor, q: Tensor, scale: float, tiles: Tensor, pages: Tensor, masks: Tensor | None, rough: float
) -> None:
    """Compare with attention over the stored values, with integer queries and with weights rounded with the scales of
    their values; or over their bfloat16, with an error up to `rough`."""

    def fits(q: Tensor, tiles: Tensor, slack: Tensor) -> bool:
        want_o, want_lse = reference.attend(q, scale, tiles, pages, masks)
        close = ((lse.double() - want_lse).abs().nan_to_num() <= 1e-5 * (1 + want_lse.abs())).all()
        near = ((o.double() - want_o).norm(dim=1) <= 2 * rough * want_o.norm(dim=1) + slack).all()
        return bool(close and near)

    fine = 2.0**-13 * tiles[pages.long(), 1].double().norm(dim=-1).max()
    q_integers, exact = multiplied_queries(q), tiles.double()
    room = rounding_of_weights(q_integers, scale, exact, pages, masks)
    # If some heads or pages are multiplied in bfloat16, others need not be.
    both = fine + room if rough > 1e-5 else fine
    assert fits(q_integers, exact, room) or fits(q, tiles.to(BF16), both)


def rounding_of_weights(q: Tensor, scale: float, tiles: Tensor, pages: Tensor, masks: Tensor | None) -> Tensor:
    """[G]: bound of the outputs' error if each product of a weight and a scale is off by a random amount up to 1/510 of
    the head's largest one; more than three times the usual error."""
    keys, values = (part.flatten(0, 1) for part in tiles[pages.long()].unbind(1))
    logits = q @ keys.T * scale
    if masks is not None:
        logits = logits.masked_fill(~reference.token_bits(masks).flatten(1), -INF)
    scales = values.abs().amax(-1) / 127
    integers = (values / scales[:, None]).nan_to_num()
    return (logits.softmax(-1) * scales).amax(-1).nan_to_num() / 255 * integers.norm()


# ---- what is stored


@pytest.mark.parametrize("isa", OWN_ISAS)
@few
@given(data=st.data(), seed=seeds, D=head_dims)
def test_a_token_is_stored_and_read_as_the_reference_says(isa: str, data: st.DataObject, seed: int, D: int) -> None:
    torch.manual_seed(seed)
    numbers = st.sampled_from([0.0, -0.0, 1.0, 127.5, 255.0, -1e-38, 1e-40, 3e38, -3.38e38, INF, NAN])
    k_row, v_row = (torch.randn(D) * torch.exp2(torch.randint(-40, 40, (D,)).float()) for _ in range(2))
    for i, x in data.draw(st.dictionaries(st.integers(0, D - 1), numbers, max_size=4)).items():
        k_row[i] = x
    k_row, v_row = k_row.to(BF16), v_row.to(BF16)
    offset = data.draw(st.integers(0, 15))
    tile = torch.randint(0, 256, (32 * row_bytes(D, BF16, True),), dtype=torch.uint8)
    before = tile.clone()

    k("write_token")(isa, k_row, v_row, offset, tile)

    mine = torch.zeros(1, 16, dtype=torch.bool)
    mine[0, offset] = True
    rows = mine[:, None, :].expand(-1, 2, -1).flatten()
    changed = bytes_of_rows(rows, D)
    assert torch.equal(tile[~changed], before[~changed]), "nothing but the token was written"
    whole = torch.zeros(1, 2, 16, D, dtype=BF16)
    whole[0, :, offset] = torch.stack([k_row, v_row])
    assert torch.equal(tile[changed], pack_tiles(whole)[0][changed])
    out = torch.full((2, 16, D), 7.0, dtype=BF16)
    k("read_tile")(isa, tile, -offset - 1, out)
    want = torch.full((2, 16, D), 7.0, dtype=BF16)
    want[:, offset] = stored(torch.stack([k_row, v_row]))
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("D", range(32, 257, 16))
def test_what_was_read_is_stored_as_it_is(D: int) -> None:
    """A token can be copied through bfloat16 any number of times. Storing loses half a 127th of the largest element,
    and bfloat16's rounding."""
    x = torch.randn(500, D).to(BF16)
    once = stored(x)
    assert torch.equal(stored(once), once)
    lost = (x.double() - once.double()).abs()
    assert (lost <= x.double().abs().amax(1, keepdim=True) / 254 * (1 + 2.0**-8) + x.double().abs() * 2.0**-8).all()


# ---- kernels


@isas
@few
@given(data=st.data(), seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(1, 12))
def test_attend(isa: str, data: st.DataObject, seed: int, D: int, G: int, n: int) -> None:
    style = data.draw(st.sampled_from(["every", "tokens", "single", "pages", "prefix", "mixed"]))
    torch.manual_seed(seed)
    q, packed = torch.randn(G, D).to(BF16), tiles_of(16, D)
    pages = torch.randint(0, 16, (n,), dtype=torch.int32)
    masks = None if style == "every" else draw_masks(style, n, G)
    wanted = wanted_by(masks, pages, 16)
    packed = poison(packed, D, wanted)
    tiles = torch.where(wanted[:, None, :, None], unpack_tiles(packed, D), 0.0)
    scale = data.draw(st.sampled_from([0.3, 1.0])) / math.sqrt(D)

    o, lse = attend(isa, q, scale, packed, pages, EVERY if masks is None else masks)

    check(o, lse, q, scale, tiles, pages, masks, accuracy(isa, BF16, G))


@isas
@few
@given(seed=seeds, D=st.sampled_from([32, 64, 80, 128, 256]), G=st.integers(17, 64), n=st.integers(1, 20))
def test_attend_for_many_heads(isa: str, seed: int, D: int, G: int, n: int) -> None:
    torch.manual_seed(seed)
    q, packed = torch.randn(G, D).to(BF16), tiles_of(24, D, 0.5)
    pages = torch.randperm(24)[:n].to(torch.int32)
    masks = draw_masks(["pages", "mixed"][seed % 2], n, G)
    wanted = wanted_by(masks, pages, 24)
    packed = poison(packed, D, wanted)
    tiles = torch.where(wanted[:, None, :, None], unpack_tiles(packed, D), 0.0)
    o, lse = attend(isa, q, D**-0.5, packed, pages, masks)
    check(o, lse, q, D**-0.5, tiles, pages, masks, accuracy(isa, BF16, G))


@isas
def test_attend_has_every_shape(isa: str) -> None:
    for D in range(32, 257, 16):
        with case(D=D):
            torch.manual_seed(D)
            packed = tiles_of(7, D)
            tiles, pages = unpack_tiles(packed, D), torch.tensor([4, 1, 2, 6, 0], dtype=torch.int32)
            for G in range(1, 17):
                q = torch.randn(G, D).to(BF16)
                o, lse = attend(isa, q, 0.02, packed, pages)
                check(o, lse, q, 0.02, tiles, pages, None, accuracy(isa, BF16, G))


@isas
def test_pages_that_are_near_and_pages_alone_change_no_bit(isa: str) -> None:
    for n, G in product([1, 2, 3, 7, 40, 700], [1, 2, 4, 5, 16, 40]):
        with case(n=n, G=G):
            torch.manual_seed(n)
            packed, q = tiles_of(50, 64), torch.randn(G, 64).to(BF16)
            pages, masks = torch.randint(0, 50, (n,), dtype=torch.int32), draw_masks("mixed", n, G)
            for wanted in (EVERY, masks):
                o, lse = attend(isa, q, 0.05, packed, pages, wanted)
                near, near_lse = torch.full((G, 64), NAN), torch.full((G,), NAN)
                k("attend_near")(isa, q, 0.05, packed, pages, wanted, near, near_lse)
                assert torch.equal(near, o) and torch.equal(near_lse, lse)
                alone = torch.full((n, G), NAN)
                k("attend_pages")(isa, q, 0.05, packed, pages, wanted, near, near_lse, alone)
                assert torch.equal(near, o) and torch.equal(near_lse, lse)
                total = alone.double().logsumexp(0)
                torch.testing.assert_close(total, lse.double(), atol=1e-4, rtol=1e-5)


@isas
def test_a_token_of_no_numbers_reaches_exactly_the_heads_that_attend_to_it(isa: str) -> None:
    for part in (0, 1):
        tiles = torch.randn(3, 2, 16, 64).to(BF16)
        tiles[1, part, 4, 3] = NAN
        pages, masks = torch.tensor([2, 1], dtype=torch.int32), torch.full((2, 5), 0xFFFF)
        masks[1] = torch.tensor([0x0010, 0xFFEF, 0, 0x0001, 0xFFFF])
        o, _ = attend(isa, torch.randn(5, 64).to(BF16), 0.1, pack_tiles(tiles), pages, masks.to(torch.uint16))
        assert o.isnan().any(dim=1).tolist() == [True, False, False, False, True]
    q = torch.randn(3, 64).to(BF16)
    q[1, 5] = INF
    o, _ = attend(isa, q, 0.1, tiles_of(3, 64, 0.1), pages)
    assert o.isnan().any(dim=1).tolist() == [False, True, False]


@isas
def test_a_value_of_no_numbers_counts_where_its_weight_is_nothing(isa: str) -> None:
    """0 times infinity is NaN in every kernel."""
    tiles = torch.zeros(1, 2, 16, 64)
    tiles[0, 0, 5], tiles[0, 1, 3, 40] = 100.0, NAN
    o, lse = attend(isa, torch.ones(3, 64).to(BF16), 1.0, pack_tiles(tiles.to(BF16)), torch.zeros(1, dtype=torch.int32))
    assert o.isnan().all() and not lse.isnan().any()


@isas
def test_values_of_any_size(isa: str) -> None:
    for size in [1e-36, 1e-33, 1e-25, 1.0, 1e20]:
        with case(size=size):
            tiles = torch.zeros(3, 2, 16, 64)
            tiles[:, 1] = size * (1 + torch.rand(3, 16, 64))
            packed, pages = pack_tiles(tiles.to(BF16)), torch.tensor([2, 0, 1], dtype=torch.int32)
            o, _ = attend(isa, torch.ones(2, 64).to(BF16), 1.0, packed, pages)
            want = unpack_tiles(packed, 64)[:, 1].double().mean((0, 1))
            assert ((o.double() - want).abs() <= want / 255 + 1e-36).all()


@isas
@few
@given(
    seed=seeds, D=st.sampled_from([32, 64, 80, 128, 256]), G=st.integers(1, 16), steep=st.sampled_from([0.0, 1.0, 6.0])
)
def test_weights_become_integers_of_8_bits(isa: str, seed: int, D: int, G: int, steep: float) -> None:
    """Weights times the scales of values, relative to the largest such product in a tile. The sum of the weights stays
    exact."""
    torch.manual_seed(seed)
    G = min(G, 4) if isa == "amx" else G  # more heads are multiplied in bfloat16
    packed, q, scale = tiles_of(1, D), torch.randn(G, D).to(BF16), steep / D
    keys, values = unpack_tiles(packed, D)[0].double()
    scales = packed[0, 32 * D :].view(BF16)[16:].double()
    weights = (multiplied_queries(q) @ keys.T * scale).softmax(-1)
    unit = (weights * scales).amax(-1, keepdim=True) / 255
    exact, integers = weights * scales / unit, values / scales[:, None]
    o, _ = attend(isa, q, scale, packed, torch.zeros(1, dtype=torch.int32))
    halves = (exact - exact.floor() - 0.5).abs() < 4e-3  # these may round to either side
    slack = ((halves + 1e-3) * integers.norm(dim=-1)).sum(-1) * unit[:, 0]
    assert ((o.double() - exact.round() * unit @ integers).norm(dim=-1) <= slack).all()


@isas
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_integers_fit(isa: str, sign: int) -> None:
    """For the largest head dimension, with products of one sign in each row."""
    tiles = torch.zeros(2, 2, 16, 256)
    tiles[:, 0], tiles[:, 1] = 127.0, 127.0
    q = torch.full((4, 256), float(sign)).to(BF16)
    o, lse = attend(isa, q, 2.0**-12, pack_tiles(tiles.to(BF16)), torch.tensor([1, 0], dtype=torch.int32))
    torch.testing.assert_close(lse, torch.full((4,), math.log(32) + sign * 127 * 256 * 2.0**-12), rtol=1e-6, atol=0)
    torch.testing.assert_close(o, torch.full((4, 256), 127.0), rtol=1e-4, atol=0)


@isas
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_whatever_else_reads_tiles_does_as_with_bfloat16(isa: str, D: int) -> None:
    """Bit for bit equal to bfloat16 tiles with the stored values rounded."""
    torch.manual_seed(D)
    packed = tiles_of(12, D)
    exact = unpack_tiles(packed, D)
    tiles, q = exact.to(BF16).contiguous(), torch.randn(5, D).to(BF16)
    pages = torch.randint(0, 12, (9,), dtype=torch.int32)
    tokens = torch.randint(0, 12 * 16, (75,), dtype=torch.int32)
    long, short = torch.randn(20, 3, D).to(BF16), D**-0.5

    def both(name: str, *size: int, before: tuple = (q,), after: tuple = (pages,), count: int = 1) -> None:
        found = []
        for these in (packed, tiles):
            out = [torch.full(size if i == 0 else size[:-1], NAN) for i in range(count)]
            k(name)(isa, *before, these, *after, *out)
            found.append(out)
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want), name

    both("score_tokens", 5, 9, 16)
    both("score_rows", 5, 75, after=(tokens,))
    both("extend", 20, 3, D, before=(long, short), after=(pages, 139, 120, 2**31 - 1), count=2)
    both("extend", 20, 3, D, before=(long, short), after=(pages, 137, 110, 40), count=2)
    both("extend_blocks", 20, 3, 3, before=(long, short), after=(pages, 139))
    for tile, same, (keys, _) in zip(packed, tiles, exact, strict=True):
        entry, moments = torch.empty(2, D, dtype=BF16), torch.empty(2, 2 * D + 8, dtype=torch.float64)
        k("page_minmax")(isa, tile, entry)
        for i, one in enumerate((tile, same)):
            k("page_moments")(isa, one, moments[i])
        assert torch.equal(moments[0], moments[1])
        low, high = entry.float()
        assert (low <= keys).all() and (keys <= high).all(), "bounds are bounds"
        least, most = keys.amin(0), keys.amax(0)
        assert (least - low <= least.abs() * 2.0**-7).all() and (high - most <= most.abs() * 2.0**-7).all()


# ---- the pool


def make_pool(**options: object) -> NativePool:
    shape = {"layers": 2, "kv_heads": 2, "pages": 40, "head_dim": 48, "dtype": BF16, "int8": True, "sink_pages": 2}
    return NativePool(Workers(2), **{**shape, **options})  # type: ignore[arg-type]


def test_the_pool_reads_what_it_stored_wherever_it_is_read() -> None:
    pool, pages = make_pool(), torch.randperm(39).to(torch.int32) + 1
    k_all, v_all = (torch.randn(300, 2, 48).to(BF16) for _ in range(2))
    for start, stop in ((0, 130), (130, 131), (131, 300)):
        pool.append(1, pages, start, k_all[start:stop], v_all[start:stop])
    got_k, got_v = pool.gather(1, pages[:19])
    assert torch.equal(got_k[:, :300].transpose(0, 1), stored(k_all))
    assert torch.equal(got_v[:, :300].transpose(0, 1), stored(v_all))
    windows = torch.zeros(2, 6, 2, PAGE, 48, dtype=BF16)
    pool.fill_window(1, windows, 0, 300, pages, 32, 48)
    sinks = torch.cat([windows[:, 0], windows[:, 1]], 2)
    assert torch.equal(sinks[:, 0].transpose(0, 1), stored(k_all[:32]))
    assert torch.equal(sinks[:, 1].transpose(0, 1), stored(v_all[:32]))
    last = windows[:, 2 + (18 - 2) % 4]
    assert torch.equal(last[:, 0, :12].transpose(0, 1), stored(k_all[288:]))
    tiles = pool.tensor("tiles", 1)
    assert tiles.shape == (2, 40, 32 * 50) and tiles.dtype == torch.uint8
    got = unpack_tiles(tiles[0, pages[:18].long()], 48)[:, 0].flatten(0, 1)
    assert torch.equal(got.to(BF16), stored(k_all[:288, 0]))


@pytest.mark.parametrize("dim", [48, 64])
def test_every_byte_of_a_tile_is_watched(dim: int) -> None:
    """The canary also covers scales; its sums cover the bytes that should be stored."""
    world = NativeWorld(canary=1.0, dtype=INT8, heads=1, dim=dim)
    request = world.add(300)
    page = request.pages[7]
    tile = world.pool.tensor("tiles", 0)[0, page]
    assert world.pool.sweep()[1] == []
    tokens = bytes_of_rows(torch.arange(32) % 16, dim)
    for byte in range(len(tile)):
        tile[byte] ^= 1 << byte % 8
        _, found = world.pool.sweep()
        token = tokens[byte].item()
        assert len(found) == 1 and f"page {page}, token {token})" in found[0]
        tile[byte] ^= 1 << byte % 8
    assert world.pool.sweep()[1] == []


def test_half_the_bytes() -> None:
    plain, packed = (pool_bytes(4, 2, 1000, 128, BF16, int8) for int8 in (False, True))
    assert row_bytes(128, BF16, True) == 130 and row_bytes(128, BF16) == 256
    assert plain - packed == pytest.approx(4 * 2 * 1000 * 32 * (256 - 130), abs=2 * HUGE_PAGE)


def test_only_bfloat16_is_read() -> None:
    with pytest.raises(ValueError, match=r"int8 is read as torch\.bfloat16"):
        make_pool(dtype=torch.float32)


@pytest.mark.parametrize("isa", OWN_ISAS)
def test_one_token_more_is_the_same_whoever_wrote_the_page(isa: str) -> None:
    """A decoded and an appended token are stored identically, in the pool and in the window."""
    one, other = (NativeWorld(isa=isa, dtype=INT8, seed=3) for _ in range(2))
    short = one.add(299)
    one.begin_step([short])
    _, q, out = one.begin_layer([short], 0, one.plan([short]))
    one.engine.layer_finish()
    chosen = {(0, h): [set(one.middle(short))] * one.group for h in range(one.heads)}
    one.check(out, one.expected([short], 0, q, chosen))
    longer = other.add(300, keys=[short.keys[0]])
    pages = [torch.tensor(r.pages, dtype=torch.int32) for r in (short, longer)]
    keys = [w.pool.gather(0, p)[0][:, :300] for w, p in zip((one, other), pages, strict=True)]
    assert torch.equal(*keys)
    # The window after decoding equals a refilled one.
    written = one.windows[0].clone()
    one.windows[0].fill_(NAN)
    one.pool.fill_window(0, one.windows[0], short.row, 300, pages[0], 32, 48)
    there = ~one.windows[0].isnan()
    assert torch.equal(written[there], one.windows[0][there])


@pytest.mark.skipif("avx2" not in ISAS, reason="one ISA alone")
def test_isas_agree_on_what_is_stored() -> None:
    k_row, v_row = torch.randn(128).to(BF16), torch.randn(128).to(BF16)
    found = []
    for isa in OWN_ISAS:
        tile = torch.zeros(32 * 130, dtype=torch.uint8)
        k("write_token")(isa, k_row, v_row, 7, tile)
        found.append(tile)
    assert all(torch.equal(tile, found[0]) for tile in found)


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "says"),
    [('{"kv_dtype": "fp8"}', 'kv_dtype is \'fp8\', but it is one of a few words; use one of "auto", "int8".')],
)
def test_options_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        FluxionConfig.parse(text)
    assert str(refused.value).endswith(says)


def test_devices_and_models_that_cannot_be() -> None:
    config = FluxionConfig.parse('{"kv_dtype": "int8"}')
    with pytest.raises(ConfigError, match="only the CPU reads KV of 8 bits"):
        validation.check_device("cuda", config)
    served_models.check_stored(SimpleNamespace(dtype=BF16), config)
    with pytest.raises(ConfigError, match="add --dtype bfloat16"):
        served_models.check_stored(SimpleNamespace(dtype=torch.float32), config)
    assert 'use --kv-cache-dtype auto, and for KV in 8 bits --fluxion-config \'{"kv_dtype": "int8"}\'' in (
        validation.OPTIONS["kv_cache_dtype"].instead
    )
