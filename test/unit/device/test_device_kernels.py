"""Kernels of the device library against float64 references, on the simulated device."""

from __future__ import annotations

import math

import pytest
import torch
from device_world import Mail, Shape, merged, pinned, poison, sim, tolerance
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.kv.placement import PAGE, Placement

DTYPES = (torch.float32, torch.bfloat16)
DIMS = tuple(range(32, 257, 16))


@st.composite
def shapes(draw: st.DrawFn, max_requests: int = 3) -> Shape:
    return Shape(
        group=draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16))),
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from(DIMS)),
        dtype=draw(st.sampled_from(DTYPES)),
        max_requests=max_requests,
        placement=Placement(draw(st.sampled_from((0, 16, 64, 80))), draw(st.sampled_from((16, 48, 256)))),
    )


def lengths_around(place: Placement) -> st.SearchStrategy[int]:
    """Lengths around every boundary: pages, sinks, window, ring."""
    marks = [1, PAGE, place.sinks, place.window, place.sinks + place.window, place.slots, 2 * place.slots, 1000]
    return st.builds(lambda mark, off: max(mark + off, 1), st.sampled_from(marks), st.integers(-2, 2))


@settings(max_examples=examples(60))
@given(st.data())
def test_publish_and_resident_are_attention_to_sinks_and_window(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    mail, place = Mail(shape), shape.placement
    batch = data.draw(st.integers(0, 3))
    padding = data.draw(st.integers(0, 3 - batch))
    rows = data.draw(st.permutations(range(4)))[:batch]
    lengths = [data.draw(lengths_around(place)) for _ in rows]
    q, k, v = mail.tokens(batch + padding)
    # Data outside of every request must not be read, whatever it is.
    before = mail.windows.clone()
    for row, n in zip(rows, lengths, strict=True):
        held = {place.slot(p) for p in (*range(min(place.sinks, n)), *range(place.window_start(n), n))}
        for s in set(range(place.slots)) - held:
            mail.windows[:, row * place.slot_pages + s // PAGE, :, s % PAGE] = math.nan
    want = mail.windows.clone()
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        s = place.slot(n - 1)
        want[:, row * place.slot_pages + s // PAGE, 0, s % PAGE] = k[b]
        want[:, row * place.slot_pages + s // PAGE, 1, s % PAGE] = v[b]
    o, lse = poison(batch + padding, shape.q_heads, shape.head_dim), poison(batch + padding, shape.q_heads)
    library = sim()
    library.port_step(mail.port, 0, torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
    library.publish(mail.port, 0, 3, q, k, v, mail.windows)
    assert mail.word("published") == 1 and mail.word("batch") == batch and mail.layer(1) == 3
    for name, given_ in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(mail.slot(name, 1, batch), given_[:batch])
    assert torch.equal(mail.windows.nan_to_num(7), want.nan_to_num(7))
    assert before.shape == want.shape
    library.resident(mail.port, 0, q, mail.windows, shape.scale, o, lse, True)
    assert mail.word("observed") == 1
    parts = mail.slot("parts", 1, batch)
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        for head in range(shape.q_heads):
            sinks, local = mail.resident(want, row, n, q[b, head], head // shape.group)
            whole = merged(sinks, local)
            torch.testing.assert_close(o[b, head].double(), whole[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[b, head].double(), whole[1], atol=1e-5, rtol=1e-5)
            expected = [sinks[1], local[1], sinks[0].norm(), local[0].norm(), whole[0].norm()]
            torch.testing.assert_close(parts[b, head].double(), torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert torch.equal(o[batch:], torch.zeros_like(o[batch:])) and bool(torch.isneginf(lse[batch:]).all())


def test_a_result_does_not_depend_on_the_batch() -> None:
    shape = Shape()
    mail = Mail(shape)
    q, k, v = mail.tokens(3)
    rows, lengths = torch.tensor([2, 0, 3], dtype=torch.int32), torch.tensor([700, 30, 400], dtype=torch.int32)

    def run(chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(chosen)
        o, lse = poison(n, shape.q_heads, shape.head_dim), poison(n, shape.q_heads)
        sim().port_step(mail.port, 0, rows[chosen], lengths[chosen])
        sim().publish(mail.port, 0, 0, q[chosen], k[chosen], v[chosen], mail.windows)
        sim().resident(mail.port, 0, q[chosen], mail.windows, shape.scale, o, lse, False)
        return o, lse

    whole = run([0, 1, 2])
    for b in range(3):
        alone = run([b])
        assert torch.equal(alone[0][0], whole[0][b]) and torch.equal(alone[1][0], whole[1][b])


@settings(max_examples=examples(60))
@given(st.data())
def test_take_merges_and_observe_observes(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    mail, library = Mail(shape), sim()
    batch = data.draw(st.integers(0, 3))
    padding = data.draw(st.integers(0, 3 - batch))
    base2, own = data.draw(st.booleans()), data.draw(st.sampled_from((torch.float32, shape.dtype)))
    step = torch.arange(batch, dtype=torch.int32), torch.full((batch,), 5, dtype=torch.int32)
    library.port_step(mail.port, 0, *step)
    q, k, v = mail.tokens(batch + padding)
    library.publish(mail.port, 0, 0, q, k, v, mail.windows)
    unit = 1 / math.log(2) if base2 else 1.0

    def result(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random results; some are empty, with NaN as o."""
        o, lse = torch.randn(rows, shape.q_heads, shape.head_dim), 3 * torch.randn(rows, shape.q_heads)
        empty = torch.rand(rows, shape.q_heads) < 0.3
        lse[empty], o[empty] = -math.inf, math.nan
        return o, lse

    sinks, local = result(batch + padding), result(batch + padding)
    o, lse = poison(batch + padding, shape.q_heads, shape.head_dim), poison(batch + padding, shape.q_heads)
    library.observe(mail.port, 0, sinks[0].to(own), sinks[1] * unit, local[0].to(own), local[1] * unit, base2, o, lse)
    assert mail.word("observed") == 1
    parts = mail.slot("parts", 1, batch)
    for b in range(batch + padding):
        for head in range(shape.q_heads):
            each = [(p[0][b, head].to(own).float(), p[1][b, head]) for p in (sinks, local)]
            want = merged(*each)
            torch.testing.assert_close(o[b, head].double(), want[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[b, head].double(), want[1], atol=1e-5, rtol=1e-5)
            if b < batch:
                norms = [torch.zeros(()) if torch.isneginf(p[1]) else p[0].norm() for p in each]
                expected = torch.tensor([each[0][1], each[1][1], *norms, want[0].norm()], dtype=torch.float32)
                torch.testing.assert_close(parts[b, head], expected, atol=1e-4, rtol=1e-4)

    mine, given_ = result(batch + padding), result(batch)
    mine[0][batch:] = torch.randn(padding, shape.q_heads, shape.head_dim)
    mail.answer(1, *given_)
    out = poison(batch + padding, shape.q_heads, shape.head_dim, dtype=shape.dtype)
    library.take(mail.port, 0, mine[0].to(own), mine[1] * unit, base2, out)
    assert torch.equal(out[batch:], mine[0][batch:].to(own).to(shape.dtype))
    for b in range(batch):
        for head in range(shape.q_heads):
            pair = [(mine[0][b, head].to(own).float(), mine[1][b, head]), (given_[0][b, head], given_[1][b, head])]
            want_o = merged(*pair)[0]
            close = tolerance(shape.dtype)
            torch.testing.assert_close(out[b, head].double(), want_o, atol=close, rtol=close)


@pytest.mark.parametrize("size", [0, 16, 4096 + 16, 3 << 20])
def test_a_copy_in_order(size: int) -> None:
    source = pinned(torch.randint(0, 256, (size,), dtype=torch.uint8))
    to = torch.zeros(size + 16, dtype=torch.uint8)
    sim().copy_in_order(0, source, to[:size])
    assert torch.equal(to[:size], source) and not to[size:].any()
    with pytest.raises(ValueError, match="no multiple of 16 bytes"):
        sim().copy_in_order(0, pinned(torch.zeros(24, dtype=torch.uint8)), torch.zeros(24, dtype=torch.uint8))


def test_a_score_that_overflows_is_still_a_number() -> None:
    shape = Shape(group=1, kv_heads=1, head_dim=32)
    mail = Mail(shape)
    mail.windows.fill_(1)
    q, k, v = torch.full((1, 1, 32), 3e38), torch.full((1, 1, 32), 3e38), torch.ones(1, 1, 32)
    sim().port_step(mail.port, 0, torch.zeros(1, dtype=torch.int32), torch.tensor([100], dtype=torch.int32))
    sim().publish(mail.port, 0, 0, q, k, v, mail.windows)
    o, lse = poison(1, 1, 32), poison(1, 1)
    sim().resident(mail.port, 0, q, mail.windows, 1.0, o, lse, False)
    assert bool((o == 1).all()) and bool(lse.isfinite())


@pytest.mark.parametrize("token", [3, 500, 697], ids=["sinks", "window", "last page"])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_nan_in_sinks_or_window_reaches_the_result_and_its_parts(token: int, part: int) -> None:
    shape = Shape()
    mail, place = Mail(shape), shape.placement
    q, k, v = mail.tokens(1)
    s = place.slot(token)
    mail.windows[1, s // PAGE, part, s % PAGE] = math.nan
    sim().port_step(mail.port, 0, torch.zeros(1, dtype=torch.int32), torch.tensor([700], dtype=torch.int32))
    sim().publish(mail.port, 0, 0, q, k, v, mail.windows)
    o, lse = poison(1, shape.q_heads, shape.head_dim), poison(1, shape.q_heads)
    sim().resident(mail.port, 0, q, mail.windows, shape.scale, o, lse, True)
    assert o[0].isnan().any(dim=1).tolist() == [h >= shape.group for h in range(shape.q_heads)]
    assert lse[0].isnan().tolist() == [part == 0 and h >= shape.group for h in range(shape.q_heads)]
    lse_parts = mail.slot("parts", 1, 1)[0, :, :2].isnan()  # of the sinks, of the window
    reached = [token < place.sinks, token >= place.sinks]
    want = [[part == 0 and h >= shape.group and r for r in reached] for h in range(shape.q_heads)]
    assert lse_parts.tolist() == want


@settings(max_examples=examples(60))
@given(st.data())
def test_fill_window_fills_from_the_host_and_from_the_chunk(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    place = shape.placement
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    stop = data.draw(lengths_around(place))
    start = data.draw(st.one_of(st.just(stop), st.just(0), st.integers(0, stop)))
    pages_count = -(-stop // PAGE)
    tiles = pinned(torch.randn(shape.kv_heads, pages_count + 3, 2, PAGE, shape.head_dim).to(shape.dtype))
    pages = torch.randperm(pages_count + 3)[:pages_count].to(torch.int32)
    k, v = (torch.randn(stop - start, shape.kv_heads, shape.head_dim).to(shape.dtype) for _ in range(2))
    wide = torch.randn(stop - start, 3, shape.kv_heads, shape.head_dim).to(shape.dtype)
    wide[:, 1] = v
    windows = torch.randn(shape.kv_heads, 3 * place.slot_pages, 2, PAGE, shape.head_dim).to(shape.dtype)
    want = windows.clone()
    for p in (*range(min(place.sinks, stop)), *range(place.window_start(stop), stop)):
        s = place.slot(p)
        page, token = place.slot_pages + s // PAGE, s % PAGE
        host = tiles[:, int(pages[p // PAGE]), :, p % PAGE]
        want[:, page, 0, token] = k[p - start] if p >= start else host[:, 0]
        want[:, page, 1, token] = v[p - start] if p >= start else host[:, 1]
    sim().fill_window(0, tiles, windows, 1, start, stop, pinned(pages), k, wide[:, 1], place.sinks, place.window)
    assert torch.equal(windows, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_gather_is_the_hosts(dtype: torch.dtype, count: int) -> None:
    tiles = pinned(torch.randn(2, 8, 2, PAGE, 48).to(dtype))
    pages = torch.randperm(8)[:count].to(torch.int32)
    stage = poison(count * PAGE, 2, 2, 48, dtype=dtype)
    sim().gather(0, tiles, pinned(pages), stage[:, 0], stage[:, 1])
    for half in (0, 1):
        want = tiles[:, pages.long(), half].permute(1, 2, 0, 3).reshape(count * PAGE, 2, 48)
        assert torch.equal(stage[:, half], want)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 1000), tokens=st.integers(0, 9), heads=st.integers(1, 5), dim=st.sampled_from(DIMS),
    kinds=st.sampled_from([
        (torch.float32, torch.float32, torch.float32), (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ]),
    base2=st.booleans(), in_place=st.booleans(),
)  # fmt: skip
def test_merge_is_attention_to_both(
    seed: int, tokens: int, heads: int, dim: int, kinds: tuple[torch.dtype, ...], base2: bool, in_place: bool
) -> None:
    torch.manual_seed(seed)
    base = math.log(2) if base2 else 1.0
    parts = []
    for kind in kinds[:2]:
        # Slices at any offset, like the tokens of a request.
        o, lse = torch.randn(tokens + 1, heads, dim).to(kind)[1:], 30 * torch.randn(tokens + 1, heads)[1:]
        empty = torch.rand(tokens, heads) < 0.3
        o[empty], lse[empty] = math.nan, -math.inf
        parts.append((o, lse))
    want = [
        [
            merged(*((o[t, h].double().nan_to_num(), lse[t, h].double() * base) for o, lse in parts))
            for h in range(heads)
        ]
        for t in range(tokens)
    ]
    (o_a, lse_a), (o_b, lse_b) = parts
    o, lse = poison(tokens, heads, dim, dtype=kinds[2]), poison(tokens, heads)
    if in_place:
        o, lse = (o_a if kinds[0] == kinds[2] else o), lse_a
    sim().merge(0, o_a, lse_a, o_b, lse_b, base2, o, lse)
    limit = 1e-5 if kinds[2] == torch.float32 else 2e-2
    for t in range(tokens):
        for h in range(heads):
            torch.testing.assert_close(o[t, h].double(), want[t][h][0], atol=limit, rtol=limit)
            torch.testing.assert_close(lse[t, h].double() * base, want[t][h][1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("base2", [False, True])
def test_a_nan_on_either_side_of_a_merge_is_a_nan(base2: bool) -> None:
    inf, nan = math.inf, math.nan
    pairs = [(-inf, nan), (nan, -inf), (0.0, nan), (nan, 0.0), (nan, nan), (-inf, -inf), (0.0, -inf)]
    lse_a, lse_b = (torch.tensor([pair[i] for pair in pairs])[None] for i in (0, 1))
    o_a, o_b = torch.full((1, len(pairs), 32), 1.0), torch.full((1, len(pairs), 32), 2.0)
    o, lse = torch.full_like(o_a, 7.0), torch.full_like(lse_a, 7.0)
    sim().merge(0, o_a, lse_a, o_b, lse_b, base2, o, lse)
    for h in range(5):
        assert bool(o[0, h].isnan().all()) and bool(lse[0, h].isnan())
    assert o[0, 5].tolist() == [0] * 32 and lse[0, 5] == -inf
    assert o[0, 6].tolist() == [1] * 32 and lse[0, 6] == 0


def test_what_cannot_be_merged_or_written_is_refused() -> None:
    o, lse = torch.zeros(2, 3, 32), torch.zeros(2, 3)
    half = o.bfloat16()
    with pytest.raises(ValueError, match="o_b is float32, so o_a and o must be, too"):
        sim().merge(0, half, lse, o, lse, True, o, lse)
    with pytest.raises(ValueError, match="lse_b has the shape"):
        sim().merge(0, o, lse, o, lse[:1], True, o, lse)
    with pytest.raises(ValueError, match="head_dim is 24"):
        sim().merge(0, *(o[..., :24].contiguous(), lse) * 2, True, o[..., :24].contiguous(), lse)
    tiles, entries = pinned(torch.zeros(1, 4, 2, PAGE, 32)), pinned(torch.zeros(1, 4, 2, 32))
    moments, k = pinned(torch.zeros(1, 4, 72, dtype=torch.float64)), torch.zeros(2, 1, 32)
    chunk = torch.zeros(0, 4, dtype=torch.int32)
    sim().write_pages(0, tiles, entries, moments, chunk, k, k)
    with pytest.raises(ValueError, match="entries is host memory that is not pinned"):
        sim().write_pages(0, tiles, entries.clone(), moments, chunk, k, k)
    with pytest.raises(ValueError, match="moments has the shape"):
        sim().write_pages(0, tiles, entries, moments[..., :71], chunk, k, k)
    with pytest.raises(ValueError, match="v has the shape"):
        sim().write_pages(0, tiles, entries, moments, chunk, k, k[:1])


def test_arguments_that_do_not_fit_are_refused() -> None:
    shape = Shape()
    mail = Mail(shape)
    q, k, v = mail.tokens(2)
    with pytest.raises(ValueError, match="number of requests is 5"):
        sim().port_step(mail.port, 0, torch.zeros(5, dtype=torch.int32), torch.ones(5, dtype=torch.int32))
    with pytest.raises(ValueError, match="A length is 0"):
        sim().port_step(mail.port, 0, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="must have"):
        sim().publish(mail.port, 0, 0, q, k[:, :1], v, mail.windows)
    with pytest.raises(ValueError, match="no multiple of the 21 pages"):
        sim().publish(mail.port, 0, 0, q, k, v, mail.windows[:, :20])
    sim().publish(mail.port, 0, 0, q, k, v, mail.windows)
    with pytest.raises(ValueError, match="A row is 5"):
        sim().port_step(mail.port, 0, torch.tensor([5], dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    sim().port_step(mail.port, 0, torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="number of rows is 2"):
        sim().publish(mail.port, 0, 0, q, k, v, mail.windows)
    tiles = torch.zeros(2, 4, 2, PAGE, 64)
    with pytest.raises(ValueError, match="not pinned"):
        sim().gather(0, tiles, torch.zeros(0, dtype=torch.int32), k[:0], v[:0])
    with pytest.raises(ValueError, match="dtype"):
        sim().port_create(
            mail.arena, max_requests=1, q_heads=1, kv_heads=1, head_dim=64, dtype=torch.float16, sinks=0, window=16,
            timeout_s=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="cannot have 3 query heads"):
        sim().port_create(
            mail.arena, max_requests=1, q_heads=3, kv_heads=2, head_dim=64, dtype=torch.float32, sinks=0, window=16,
            timeout_s=1,
        )  # fmt: skip
