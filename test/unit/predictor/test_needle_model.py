"""The bundled model's training: its data states what it asks, a run resumes exactly, and its model is Llama."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.needle_model import export, heads, train
from benchmark.needle_model.data import CHAIN, COMMON, FACT_VALUE, FREQUENT, MULTI, NONE, Generator, Mix
from benchmark.needle_model.feed import Feed
from benchmark.needle_model.model import SINKS, WINDOW, NeedleModel, Shape
from benchmark.needle_model.muon import Muon
from benchmark.needle_model.recipe import RECIPES
from fluxion_sglang.commands import needle

SMALL = Shape(hidden=64, inter=96, layers=2, heads=4, kv_heads=2, head_dim=16)


def stated(tokens: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Facts (key and value) and links of a sequence."""
    facts, links, at = [], [], 0
    while at < len(tokens):
        if tokens[at] in (needle.FACT, needle.LINK) and needle.END in tokens[at:]:
            end = tokens.index(needle.END, at)
            (facts if tokens[at] == needle.FACT else links).append(tokens[at + 1 : end])
            at = end
        at += 1
    return facts, links


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(1.0, 0.0), (0.0, 0.0)]), st.sampled_from([200, 700]))
def test_every_answer_was_stated_before(seed: int, layout: tuple[float, float], length: int) -> None:
    mix = Mix(*layout, pose=0.5, midway=0.5, terse=0.3, values=6)
    batch = Generator(seed, essay=4000).batch(1, length, mix)
    tokens, kinds = batch.tokens[0].tolist(), batch.kinds[0].tolist()
    for at, kind in enumerate(kinds):
        if kind in (FACT_VALUE, MULTI):
            facts, _ = stated(tokens[: at + 1])
            # An answer that starts with a key is the beginning of a fact.
            start = max(i for i in range(at + 1) if tokens[i] in (needle.ANSWER, needle.END)) + 1
            begun = [*tokens[start : at + 1], int(batch.targets[0, at])]
            assert any(fact[: len(begun)] == begun for fact in facts), begun
        if kind == CHAIN:
            _, links = stated(tokens[: at + 1])
            assert [tokens[at], int(batch.targets[0, at])] in links


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**31))
def test_values_of_one_key_are_listed_in_order(seed: int) -> None:
    batch = Generator(seed, essay=4000).batch(4, 600, Mix(1.0, 0.0, pose=0.0, families=(0.1, 0.1, 3.0, 0.1)))
    longest = 0
    for tokens, kinds in zip(batch.tokens.tolist(), batch.kinds.tolist(), strict=True):
        values = [[]]
        for at in range(1, len(tokens)):
            if kinds[at - 1] == MULTI and kinds[at - 2] != MULTI:
                values[-1].append(tokens[at])
            if tokens[at] == needle.ANSWER:
                values.append([])
        longest = max(longest, *map(len, values))  # a document may ask for no chain
        assert all(answer == sorted(set(answer)) for answer in values)
    assert longest > 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [70, 300, 1500])
def test_counted_words_are_the_frequent_ones(seed: int, length: int) -> None:
    batch = Generator(seed, essay=4000).batch(8, length, Mix(dense=0.0, counting=1.0, pose=0.0, rare=2))
    for tokens, targets, kinds in zip(batch.tokens, batch.targets, batch.kinds, strict=True):
        asked = int(np.nonzero((kinds == COMMON) | (kinds == FREQUENT))[0][0])
        kind = int(kinds[asked])
        answer = targets[asked : asked + (10 if kind == COMMON else 3)].tolist()
        words, counts = np.unique(tokens[1 : asked - 1], return_counts=True)
        count = dict(zip(words.tolist(), counts.tolist(), strict=True))
        assert answer == sorted(set(answer))
        others = [n for word, n in count.items() if word >= needle.FIRST_WORD and word not in answer]
        assert min(count[word] for word in answer) > max(others, default=0)
        if kind == FREQUENT:
            assert max(count, key=count.__getitem__) == needle.DOTS


def test_equal_seeds_make_equal_batches_and_states_restore() -> None:
    mix = Mix(dense=0.4, counting=0.3, pose=0.7)
    one, two = Generator(3, essay=4000), Generator(3, essay=4000)
    first = one.batch(3, 300, mix)
    np.testing.assert_equal(vars(first), vars(two.batch(3, 300, mix)))
    state = one.state()
    second = one.batch(2, 300, mix)
    assert (second.tokens[:, :300] != first.tokens[:2]).any()
    two.restore(state)
    np.testing.assert_equal(vars(second), vars(two.batch(2, 300, mix)))
    assert (np.diff(second.positions, axis=1) >= 1).all()
    assert set(second.kinds[0].tolist()) != {NONE}


def test_an_interrupted_run_makes_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SAVE_EVERY", 2)
    recipe = dataclasses.replace(RECIPES["smoke"], shape=SMALL)
    train.run(recipe, tmp_path / "whole", compiled=False)
    train.run(recipe, tmp_path / "parts", compiled=False, stop=4)
    lost = {"step": 5, "loss": 9.0}  # logged, but not saved before the interruption
    (tmp_path / "parts" / "log.jsonl").write_text(json.dumps(lost) + "\n")
    train.run(recipe, tmp_path / "parts", compiled=False)
    states = [torch.load(tmp_path / name / "state.pt", weights_only=False) for name in ("whole", "parts")]
    assert states[0]["step"] == states[1]["step"] == recipe.steps
    for name, weight in states[0]["model"].items():
        torch.testing.assert_close(weight, states[1]["model"][name], rtol=0, atol=0, msg=name)
    assert "9.0" not in (tmp_path / "parts" / "log.jsonl").read_text()
    with pytest.raises(SystemExit, match="another recipe"):
        train.run(RECIPES["bundled"], tmp_path / "whole", compiled=False)


def test_the_folder_is_a_llama_that_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = NeedleModel(SMALL)
    export.write(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, SMALL.vocab, (2, 90))
    with torch.no_grad():
        ours, _ = model(tokens, torch.arange(90).expand(2, -1))
        wanted = theirs(tokens).logits
    assert (ours - wanted).abs().max() < 0.03 * wanted.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = needle.needle_prompt(600, 4).text()
    assert tokenizer(text, add_special_tokens=False).input_ids == needle.needle_prompt(600, 4).token_ids()


def test_pressure_measures_what_sinks_and_window_miss() -> None:
    """Compare with attention written out for each probe."""
    torch.manual_seed(1)
    B, Hq, H, T, D = 2, 4, 2, 900, 8
    q, k, v = torch.randn(B, Hq, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    probes = torch.randint(SINKS + WINDOW, T, (B, 5))
    from benchmark.needle_model.model import _head_norms

    error, size = _head_norms(q, k, v, full, probes)
    for b in range(B):
        for n, at in enumerate(probes[b].tolist()):
            near = torch.cat([torch.arange(SINKS), torch.arange(at - WINDOW + 1, at + 1)])
            norms = full[b, :, at].norm(dim=-1)
            for h in range(Hq):
                weights = (k[b, h // 2, near] @ q[b, h, at] / D**0.5).softmax(0)
                missed = (weights @ v[b, h // 2, near] - full[b, h, at]).norm() / norms.max()
                torch.testing.assert_close(error[b, h, n], missed, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(size[b, h, n], norms[h] / norms.max(), rtol=1e-4, atol=1e-5)


def test_least_budget_is_where_the_error_stays_within_tau() -> None:
    """Compare with attention computed anew for every number of blocks."""
    torch.manual_seed(2)
    Hq, H, T, D, tau, blk = 4, 2, 700, 8, 0.1, 32
    steps = torch.tensor([650, 699])
    q, k, v = torch.randn(Hq, 2, D) * 2, torch.randn(H, T, D), torch.randn(H, T, D)
    found = heads._layer_statistics(q, k, v, steps, tau)
    for n, step in enumerate(steps.tolist()):
        start = (step + 1 - WINDOW) // 16 * 16
        blocks = [range(max(a, SINKS), min(a + blk, start)) for a in range(SINKS // blk * blk, start, blk)]

        def out(h: int, places: list[int], n: int = n) -> torch.Tensor:
            return (k[h // 2, places] @ q[h, n] / D**0.5).softmax(0) @ v[h // 2, places]

        full = torch.stack([out(h, list(range(step + 1))) for h in range(Hq)])
        largest = full.norm(dim=-1).max()
        near = [*range(SINKS), *range(start, step + 1)]
        for h in range(Hq):
            keys = [k[h // 2, list(b)] for b in blocks]
            bounds = torch.stack([torch.maximum(q[h, n] * x.amin(0), q[h, n] * x.amax(0)).sum() for x in keys])
            order = bounds.argsort(descending=True).tolist()
            errors = []
            for count in range(len(blocks) + 1):
                chosen = [t for i in order[:count] for t in blocks[i]]
                errors.append(float((out(h, near + chosen) - full[h]).norm() / largest))
            least = max((i + 1 for i, e in enumerate(errors) if e > tau), default=0)
            tokens = sum(len(blocks[i]) for i in order[:least])
            assert abs(found["budget"][n, h, 1] - tokens / (start - SINKS)) < 1e-6
            assert abs(found["error"][n, h] - errors[0]) < 1e-5


@pytest.mark.full
def test_a_stage_that_begins_anew_needs_only_the_exported_weights(tmp_path: Path) -> None:
    smoke = dataclasses.replace(RECIPES["smoke"], shape=SMALL)
    last = dataclasses.replace(smoke.stages[1], anew=True, opening=2.0)
    whole = dataclasses.replace(smoke, stages=(smoke.stages[0], last))
    train.run(whole, tmp_path / "whole", compiled=False)
    train.run(whole, tmp_path / "first", compiled=False, stop=3)
    export.write(export.load(tmp_path / "first")[0], tmp_path / "model")
    train.run(whole, tmp_path / "rest", compiled=False, weights=tmp_path / "model")
    there, again = (export.load(tmp_path / name) for name in ("whole", "rest"))
    assert there[1] == again[1] == 6
    for name, weight in there[0].weights().items():
        assert torch.equal(weight, again[0].weights()[name]), name
    with pytest.raises(SystemExit, match="No stage of this recipe begins anew"):
        train.run(smoke, tmp_path / "none", compiled=False, weights=tmp_path / "model")


def test_muon_steps_are_orthogonal() -> None:
    torch.manual_seed(3)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 48), (48, 16))]
    before = [w.detach().clone() for w in weights]
    optimizer = Muon(weights, lr=1.0, weight_decay=0.0)
    for w in weights:
        w.grad = torch.randn_like(w)
    optimizer.step()
    for w, old in zip(weights, before, strict=True):
        values = torch.linalg.svdvals((w.detach() - old) / (0.2 * 48**0.5))
        assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.full
def test_batches_made_ahead_are_the_same_however_many_make_them() -> None:
    places = list(RECIPES["smoke"].places())
    made = []
    for workers, first in ((1, 0), (2, 2)):
        feed = Feed(5, places[first:], workers)
        made.append([batch.tokens for batch in feed])
        feed.close()
    assert len(made[0]) == len(places)
    for ours, theirs in zip(made[0][2:], made[1], strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.full
def test_a_second_shape_is_trained_and_exported(tmp_path: Path) -> None:
    smoke = RECIPES["smoke"]
    assert [stage.shapes for stage in smoke.scaled(3, 0.5).stages] == [((6, 64),), ((3, 768), (6, 128))]
    shape = RECIPES["second"].shape
    assert shape.heads // shape.kv_heads == 8
    recipe = dataclasses.replace(smoke, shape=dataclasses.replace(shape, hidden=64, layers=2))
    train.run(recipe, tmp_path, compiled=False, workers=1)
    model, step = export.load(tmp_path)
    assert model.shape == recipe.shape and step == recipe.steps
