"""Whether a cache of tiles would hit: the caches, the choices, and a measurement from a model's folder to its table."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import OWN_ISAS
from test_quality_codec import text_model
from test_sketch import SketchWorld, sketch_of
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import common
import locality
import locality_tables
import tables
from definitions import sketches as reference
from states import States, capture

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.policy import parse_spec

Steps = list[list[int]]

# ---- caches


def plain_lru(steps: Steps, capacity: int) -> Iterator[int]:
    held: list[int] = []  # the one used last at the end
    for tiles in steps:
        hits = 0
        for tile in tiles:
            if tile in held:
                held.remove(tile)
                hits += 1
            held = [*held, tile][-capacity:]
        yield hits


def plain_clock(steps: Steps, capacity: int) -> Iterator[int]:
    queue: list[list[int]] = []  # [tile, found], the next one that the hand comes to first
    for tiles in steps:
        hits = 0
        for tile in tiles:
            entry = next((entry for entry in queue if entry[0] == tile), None)
            if entry:
                entry[1] = 1
                hits += 1
                continue
            if len(queue) == capacity:
                while queue[0][1]:
                    queue.append([queue.pop(0)[0], 0])
                queue.pop(0)
            queue.append([tile, 0])
        yield hits


def plain_s3fifo(steps: Steps, capacity: int) -> Iterator[int]:
    """The paper's Algorithm 1, line by line: READ, INSERT, EVICT, EVICTS and EVICTM."""
    most_small = max(1, capacity // 10)
    small, main, ghost = [], [], []  # type: list[int], list[int], list[int]
    freq: dict[int, int] = {}

    def evict_m() -> None:
        while main:
            tile = main.pop(0)
            if freq[tile] == 0:
                return
            freq[tile] -= 1
            main.append(tile)

    def evict_s() -> None:
        while small:
            tile = small.pop(0)
            if freq[tile] <= 1:
                ghost.append(tile)
                del ghost[: max(0, len(ghost) - (capacity - most_small))]
                return
            if main and len(main) >= capacity - most_small:
                evict_m()
            freq[tile] = 0
            main.append(tile)
            if len(small) + len(main) < capacity:
                return

    for tiles in steps:
        hits = 0
        for tile in tiles:
            if tile in small or tile in main:
                freq[tile] = min(freq[tile] + 1, 3)
                hits += 1
                continue
            while len(small) + len(main) >= capacity:
                if len(small) >= most_small or not main:
                    evict_s()
                else:
                    evict_m()
            freq[tile] = 0
            if tile in ghost:
                ghost.remove(tile)
                main.append(tile)
            else:
                small.append(tile)
        yield hits


PLAIN = {"lru": plain_lru, "clock": plain_clock, "s3fifo": plain_s3fifo}
names = pytest.mark.parametrize("name", PLAIN)


@names
@settings(max_examples=examples(200))
@given(
    steps=st.lists(st.lists(st.integers(0, 40), unique=True, max_size=30), max_size=40),
    capacity=st.sampled_from([1, 2, 3, 7, 20, 41]),
)
def test_caches_are_those_of_the_definitions(name: str, steps: Steps, capacity: int) -> None:
    hits = list(locality.CACHES[name](steps, capacity))
    assert hits == list(PLAIN[name](steps, capacity))
    seen: set[int] = set()
    for tiles, found in zip(steps, hits, strict=True):
        assert found <= min(capacity, len(seen & set(tiles)))
        if capacity == 41:  # all of them
            assert found == len(seen & set(tiles))
        seen |= set(tiles)


@pytest.mark.parametrize(
    ("name", "steps", "capacity", "hits"),
    [
        # 1 is the oldest and was used: 2 makes room.
        ("lru", [[1, 2], [1, 3], [1], [2]], 2, [0, 1, 1, 0]),
        # A loop over more than there is room for.
        ("lru", [[1, 2, 3]] * 3, 2, [0, 0, 0]),
        ("clock", [[1, 2, 3]] * 3, 2, [0, 0, 0]),
        # 1 was found, and is passed over once: 2 makes room for 3. Then it is 1's turn, whatever was used last.
        ("clock", [[1, 2], [1, 3], [4], [1], [3]], 2, [0, 1, 0, 0, 0]),
        # Ten places, one of them small. What is found once is not held when a scan comes, but is remembered.
        ("s3fifo", [[1], list(range(2, 12)), [1], list(range(12, 21)), [1]], 10, [0, 0, 0, 0, 1]),
    ],
)
def test_caches_by_hand(name: str, steps: Steps, capacity: int, hits: list[int]) -> None:
    assert list(locality.CACHES[name](steps, capacity)) == hits


def test_what_is_replayed() -> None:
    """Two groups, a middle that grows from 9 to 10 pages; a tile a step, another one in every second step."""
    tiles = torch.zeros(40, 1, 2, 10, dtype=torch.bool)
    tiles[:, 0, 0, 4] = tiles[1::2, 0, 1, 9] = True
    rows = list(locality.replayed(tiles, [9] * 36 + [10] * 4, 1))
    assert [row["share"] for row in rows] == list(locality.SHARES)
    read = 12 / (2 * (4 * 9 + 4 * 10))  # steps 32 to 39
    assert all(row["read"] == pytest.approx(read) for row in rows)
    assert [row["lru_hit"] for row in rows] == [pytest.approx(4 / 12), pytest.approx(4 / 12), 1, 1, 1, 1]
    assert rows[0]["lru_missed"] == pytest.approx(read * 8 / 12)
    (kept, *_) = locality.replayed(tiles, [9] * 36 + [10] * 4, 2)
    assert kept["read"] == pytest.approx(8 / 152) and kept["lru_hit"] == 1


# ---- choices


@pytest.mark.parametrize("dim", [32, 64, 96, 256])
def test_sketches_are_the_engine_s(dim: int) -> None:
    torch.manual_seed(dim)
    keys = (3 * torch.randn(2, 3 * PAGE, dim)).bfloat16()
    found = locality.Sketches.of(keys)
    pages = [sketch_of(OWN_ISAS[-1], page) for page in keys.view(-1, PAGE, dim)]
    codes, scales = (torch.stack(parts) for parts in zip(*(reference.unpacked(p, dim) for p in pages), strict=True))
    whole = ((codes - 7.5) * scales[..., None]).view(2, -1, dim)
    # Where an element is between two codes, the order of additions decides.
    assert float((found.whole == whole).float().mean()) > 0.999
    upper = ((4 * (codes // 4) - 6) * scales[..., None]).view(2, -1, dim)
    assert float((found.upper == upper).float().mean()) > 0.999
    assert torch.equal(found.widest.double(), scales.amax(1).view(2, -1))
    assert torch.equal(found.first(PAGE).widest, found.widest[:, :1])


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**31 - 1), n=st.integers(1, 40), left=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
def test_the_heaviest(seed: int, n: int, left: float) -> None:
    torch.manual_seed(seed)
    weights = torch.randn(2, 3, n).exp()
    allowed = left * weights.sum(-1)
    kept = locality.heaviest(weights, allowed)
    for row, most, mask in zip(weights.flatten(0, 1), allowed.flatten(), kept.flatten(0, 1), strict=True):
        if left not in (0.0, 1.0):
            assert torch.equal(mask, reference.least_kept(row, 0.0, left))
        assert float(row[~mask].sum()) <= float(most) * (1 + 1e-5)
        if mask.any():  # without the lightest of them, too much would be left
            assert float(row[~mask].sum() + row[mask].min()) >= float(most) * (1 - 1e-5)
            assert (~mask).sum() == 0 or row[mask].min() >= row[~mask].max()


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1), group=st.sampled_from([1, 3]), dim=st.sampled_from([32, 64]),
    sharp=st.sampled_from([0.3, 1.0, 2.0]), left=st.sampled_from([0.05, 0.1, 0.4]),
)  # fmt: skip
def test_sketch_reads_what_the_engine_reads(seed: int, group: int, dim: int, sharp: float, left: float) -> None:
    """The engine's search for the lightest token ends a tenth of what may be left before it, at the most, and it rounds
    queries to 8 bits."""
    world = SketchWorld(seed=seed, sketched=True, heads=2, group=group, dim=dim)
    request = world.add(1500)
    q = sharp * world.randn(1, 2 * group, dim)
    world.begin_step([request])
    world.attend([request], 0, left, q)
    chosen = world.selections([request], 2)
    world.engine.layer_finish()
    middle = request.keys[0][world.middle(request)].transpose(0, 1)
    grouped = q[0].view(2, group, dim)
    beside = torch.tensor([[world.beside(request, 0, head, h) for head in of] for h, of in enumerate(grouped)])
    sketches = locality.Sketches.of(middle)
    union, once = locality.by_sketch(grouped, sketches, beside, world.scale, left)
    most, _ = locality.by_sketch(grouped, sketches, beside, world.scale, 0.85 * left)
    first = world.placement.sink_pages
    engine = torch.zeros_like(union)
    for (_, h), (tokens, *_) in chosen.items():
        engine[h, [page - first for page in {token // PAGE for token in tokens}]] = True
    assert int((union & ~engine).sum()) <= 0.04 * union.numel()
    assert int((engine & ~most).sum()) <= 0.04 * union.numel()
    if group == 1:
        assert torch.equal(union, once)


def plain_sketch(q: Tensor, keys: Tensor, beside: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Of q [G, D], keys [n, D] and beside [G]: pages by union and once, a head and a page at a time, float64."""
    sketches = [sketch_of("scalar", page) for page in keys.view(-1, PAGE, keys.shape[1])]
    skims, near = [], torch.zeros(len(sketches), dtype=torch.bool)
    for query, others in zip(q, beside.double(), strict=True):
        about, off = (torch.cat(x) for x in zip(*(reference.skimmed(s, query[None]) for s in sketches), strict=True))
        unit = torch.maximum(scale * (about + off).max(), others)
        weights, bounds = ((scale * x - unit).exp() for x in (about, about + off))
        whole = weights.sum() + (others - unit).exp()
        near |= reference.least_kept(bounds, float(whole - bounds.sum()), eps / 8)
        skims.append((weights, unit))
    about = torch.cat([reference.keys_of(sketch, keys.shape[1]) for sketch in sketches])
    union, mean, skipped = torch.zeros(len(keys), dtype=torch.bool), torch.zeros(len(keys)).double(), 0.0
    for query, others, (weights, unit) in zip(q.double(), beside.double(), skims, strict=True):
        tokens = (scale * about @ query - unit).exp() * near.repeat_interleave(PAGE)
        left = 4 * weights[~near].sum()
        whole = tokens.sum() + left + (others - unit).exp()
        share = float(left / whole)
        union |= reference.least_kept(tokens / whole, 1 - float(tokens.sum() / whole), max(eps - share, eps / 2))
        mean, skipped = mean + tokens / whole / len(q), skipped + share / len(q)
    once = reference.least_kept(mean, 1 - float(mean.sum()), max(eps - skipped, eps / 2))
    return union.view(-1, PAGE).any(1), once.view(-1, PAGE).any(1)


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1), sharp=st.sampled_from([0.3, 1.0, 3.0]), eps=st.sampled_from([0.05, 0.2]),
    others=st.sampled_from([-3.0, 3.0, 8.0]),
)  # fmt: skip
def test_sketch_by_brute_force(seed: int, sharp: float, eps: float, others: float) -> None:
    """A token beside the limit may fall on either side of it: of rounding, a page may differ."""
    torch.manual_seed(seed)
    q, keys, beside = sharp * torch.randn(3, 64), torch.randn(40 * PAGE, 64), others + torch.randn(3)
    found = locality.by_sketch(q[None], locality.Sketches.of(keys[None]), beside[None], 0.125, eps)
    for got, want in zip(found, plain_sketch(q, keys, beside, 0.125, eps), strict=True):
        assert int((got[0] != want).sum()) <= 1


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 2**31 - 1), pages=st.integers(1, 30), group=st.sampled_from([1, 4]),
    budget=st.sampled_from([0.01, 0.05, 0.25, 1.0]),
)  # fmt: skip
def test_blocks_by_brute_force(seed: int, pages: int, group: int, budget: float) -> None:
    torch.manual_seed(seed)
    q, keys = torch.randn(2, group, 32), torch.randn(2, pages, PAGE, 32)
    lo, hi = keys.amin(2), keys.amax(2)
    union, once = locality.by_blocks(q, lo, hi, budget)
    count = min(pages, max(1, math.ceil(budget * pages - 1e-9)))
    for h in range(2):
        bounds = torch.maximum(q[h, :, None] * lo[h], q[h, :, None] * hi[h]).sum(-1)  # [G, pages]
        wants = [set(row.topk(count).indices.tolist()) for row in (*bounds, bounds.amax(0))]
        assert set(union[h].nonzero().flatten().tolist()) == set().union(*wants[:-1])
        assert set(once[h].nonzero().flatten().tolist()) == wants[-1]


def test_steps_choose_in_the_middle_that_they_have() -> None:
    """17 steps, one page more at the end than at the beginning: it is first read when it is in the middle."""
    torch.manual_seed(0)
    steps, tokens, placement = 17, 16 * 40, Placement()
    states = [States(torch.randn(4, steps, 32), torch.randn(2, tokens, 32), torch.empty(0), 0.2) for _ in range(3)]
    found = locality.choices(states, [parse_spec(spec) for spec in locality.POLICIES])
    middles = [placement.middle(tokens - steps + step + 1) // PAGE for step in range(steps)]
    assert middles[-1] == middles[0] + 1
    for (spec, way), tiles in found.items():
        assert tiles.shape == (steps, 3, 2, middles[-1])
        assert not any(tiles[step, :, :, pages:].any() for step, pages in enumerate(middles))
        if spec == "fixed:16:0.25" and way == "once":
            counts = [math.ceil(0.25 * pages) for pages in middles]
            assert tiles.sum(-1).flatten(1).tolist() == [[count] * 6 for count in counts]
    for step, pages in ((0, middles[0]), (16, middles[-1])):
        n, state = tokens - steps + step + 1, states[1]
        keys, now = state.k[:, 64 : 64 + PAGE * pages], state.q[:, step].view(2, 2, 32)
        residents = torch.cat([state.k[:, :64], state.k[:, placement.window_start(n) : n]], 1)
        assert residents.shape[1] + keys.shape[1] == n
        beside = (0.2 * now @ residents.mT).logsumexp(-1)
        want = locality.by_sketch(now, locality.Sketches.of(keys), beside, 0.2, 0.1)
        for way, tiles in zip(locality.WAYS, want, strict=True):
            assert torch.equal(found[common.SKETCH, way][step, 1, :, :pages], tiles)


# ---- models


def llama(folder: Path) -> Path:
    text_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=300, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_states_by_chunks_are_those_of_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama(tmp_path), dtype=torch.float32).eval()
    tokens = torch.randint(4, 300, (300,)).tolist()
    monkeypatch.setattr(locality, "CHUNK", 128)
    found, whole = locality.states_of(model, tokens, 20), capture(model, tokens)
    assert len(found) == len(whole) == 2
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a.q, b.q[:, -20:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.k, b.k, rtol=1e-4, atol=1e-5)
        assert a.scale == b.scale


def test_layers_with_a_sliding_window_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=300, max_position_embeddings=4096, sliding_window=32, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    tokens = torch.randint(4, 300, (300,)).tolist()
    monkeypatch.setattr(locality, "CHUNK", 128)
    (found,), whole = locality.states_of(model, tokens, 20), capture(model, tokens)
    torch.testing.assert_close(found.q, whole[1].q[:, -20:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.k, whole[1].k, rtol=1e-4, atol=1e-5)


def test_from_a_model_to_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder, text = llama(tmp_path / "tiny"), tmp_path / "words.txt"
    text.write_text("All that is read once may be read once more. " * 60)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    command = ["locality.py", "--models", str(folder), "--text", str(text), "--quick", "--machine", "box"]
    for _ in range(2):  # the second time it replaces its rows
        monkeypatch.setattr(sys, "argv", command)
        locality.main()
    data = common.load(tmp_path / "results" / "box" / "locality_quick.json")
    assert data is not None and data["models"]["tiny"]["group"] == 2 and data["text"] == "words"
    ways = len(locality.POLICIES) * len(locality.WAYS)
    assert len(data["rows"]) == ways * len(locality.KEPT) * len(locality.SHARES)
    for row in data["rows"]:
        for name in locality.CACHES:
            assert 0 <= row[f"{name}_hit"] <= 1
            missed = row["read"] * (1 - row[f"{name}_hit"])
            assert row[f"{name}_missed"] == pytest.approx(missed, abs=1e-5)
            assert missed >= row["read"] - row["share"] - 0.02, "a step hits no more than the cache holds"
        if row["policy"].startswith("fixed") and row["way"] == "once":
            assert row["read"] == pytest.approx(float(row["policy"][-4:]), abs=1 / 44)
    assert f"tiny 1024 {common.SKETCH}" in capsys.readouterr().out
    common.save(tmp_path / "results" / "box" / "locality.json", data)
    shown = locality_tables.locality(tmp_path / "results")
    assert shown.count("| tiny | 1,024 |") == ways and "Not decided yet: gemma3 decides" in shown


# ---- the table


def row(policy: str, read: float, hit: float, **more: Any) -> dict[str, Any]:
    own = {"model": "gemma3", "tokens": 32766, "policy": policy, "way": "union", "kept": 1, "share": 0.15} | more
    hits = {f"{name}_hit": hit - i / 10 for i, name in enumerate(locality.CACHES)}
    missed = {f"{name}_missed": read * (1 - hits[f"{name}_hit"]) for name in locality.CACHES}
    return {**own, "read": read, **hits, **missed}


def saved(results: Path, rows: list[dict[str, Any]]) -> str:
    machine = {"cpu": "X", "cores": 2, "flags": ["avx2"], "gpu": None}
    header = {"commit": "abc", "date": "2026-01-01", "machine": machine, "versions": {"sglang": "1", "torch": "2"}}
    common.save(results / "box" / "locality.json", {**header, "steps": 256, "warm": 32, "rows": rows})
    return tables.TABLES["locality"](results)


def test_the_table_decides_by_policy(tmp_path: Path) -> None:
    rows = [row("a", 0.1, 0.8), row("a", 0.1, 0.5, share=0.1), row("a", 0.1, 0.9, kept=4)]
    rows += [row("b", 0.4, 0.3), row("b", 0.4, 0.95, kept=4), row("b", 0.2, 0.9, way="once")]
    rows += [row("b", 0.2, 0.2, way="once", kept=4), row("c", 0.9, 0.2), row("c", 0.9, 0.2, kept=4)]
    rows += [row("a", 0.9, 0.2, tokens=8192), row("a", 0.9, 0.2, tokens=8192, kept=4)]
    rows += [row("a", 0.9, 0.2, model="smollm2"), row("a", 0.9, 0.2, model="smollm2", kept=4)]
    shown = saved(tmp_path, rows)
    assert (
        "| gemma3 | 32,766 | `a` | union | 10.0% | 2.0% (80%) | 3.0% (70%) | 4.0% (60%) | 0.0% | 15% | 1.0% |" in shown
    )
    assert "| gemma3 | 32,766 | `b` | union | 40.0% | 28.0% (30%) |" in shown and "| 25.0% | over 15% | 2.0% |" in shown
    assert (
        "**Go** for `a` (2.0% missed). **No-go** for `b` (28.0% missed; a go with union, kept 4 or once, kept 1), "
        in shown
    )
    assert "`c` (72.0% missed; no other choice is a go). A go is at most 3% missed" in shown
    assert "gemma3 at 32,766 tokens decides" in shown and "box/locality.json" in shown


def test_another_model_decides_nothing(tmp_path: Path) -> None:
    shown = saved(tmp_path, [row("a", 0.1, 0.9, model="smollm2")])
    assert "Not decided yet: gemma3 decides, and has not been measured." in shown and "o-go" not in shown


def test_without_results_it_says_how_to_get_them(tmp_path: Path) -> None:
    decide: Callable[[Path], str] = tables.TABLES["locality"]
    assert decide(tmp_path) == "Not measured yet: `python benchmark/locality.py`.\n"
