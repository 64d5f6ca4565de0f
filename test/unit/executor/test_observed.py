"""Features of a layer: serving and training see the same numbers, whatever passes built the request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from world import World

from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy import LayerPlan, Needs, Observed, Policy, parse_spec
from fluxion_sglang.policy.base import UNSEEN, Criterion, DecodeStep
from fluxion_sglang.predictor.features import INDEX
from fluxion_sglang.training import recorder
from fluxion_sglang.training.recorder import Recorder

NAN = float("nan")


class Spy(Policy):
    """Reads everything, and records what it observes."""

    needs = Needs.FEATURES
    criterion = recorder.CRITERIA[0]

    def __init__(self) -> None:
        self.full = parse_spec("full")
        self.seen: list[torch.Tensor] = []

    def begin_step(self, step: DecodeStep) -> None:
        self.full.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert observed.features is not None
        self.seen.append(observed.features.clone())
        return self.full.plan(layer, q)


class Told:
    """Decodes a row under a spy, and records the query of every position that was an anchor or a step."""

    def __init__(self, world: World, row: int) -> None:
        self.world, self.row = world, row
        self.samples: list[tuple[int, list[int]]] = []
        self.queries: list[dict[int, torch.Tensor]] = [{} for _ in range(world.layers)]
        self.seen: list[list[torch.Tensor]] = [[] for _ in range(world.layers)]

    def extend(self, count: int) -> None:
        self.world.extend(self.row, count)

    def decode(self, steps: int) -> None:
        world, spy = self.world, Spy()
        anchor = world.length(self.row) - 1
        for layer in range(world.layers):
            self.queries[layer][anchor] = world.anchors[self.row][layer]
        for _ in range(steps):
            spy.seen.clear()
            for got, want in world.decode([self.row], [spy]):
                assert torch.allclose(got.double(), want, atol=1e-4 if world.dtype == torch.float32 else 3e-2)
            for layer in range(world.layers):
                self.queries[layer][world.length(self.row) - 1] = world.queries[layer][0]
                self.seen[layer].append(spy.seen[layer][0])
        self.samples.append((anchor, list(range(anchor + 1, anchor + 1 + steps))))

    def check(self, folder: Path) -> None:
        """Training's record of the whole sequence at once equals what was observed step by step."""
        world, length = self.world, self.world.length(self.row)
        pages = world.page_list(self.row, length)
        found = Recorder(folder, world.pool)
        for layer in range(world.layers):
            q = torch.full((length, world.heads * world.group, world.dim), NAN, dtype=world.dtype)
            for position, query in self.queries[layer].items():
                q[position] = query
            request = ExtendRequest(self.row, 0, length, 0, pages)
            found.prefilled(layer, request, {"id": 3, "samples": self.samples}, q, world.scale)
            samples = recorder.read(folder, 3, layer)
            assert samples.step.tolist() == [step for _, steps in self.samples for step in steps]
            seen = torch.stack(self.seen[layer])
            assert torch.equal(torch.from_numpy(samples.features), seen), layer
            assert seen.isfinite().all() and (seen[..., INDEX["layer"]] == layer).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serving_sees_what_training_records(tmp_path: Path, dtype: torch.dtype) -> None:
    world = World(dtype=dtype, seed=11)
    told = Told(world, 1)
    told.extend(700)
    told.extend(413)  # a second chunk; ends inside a page
    told.decode(40)
    told.extend(300)  # an appended turn: a new anchor
    told.decode(20)
    told.check(tmp_path)


def test_after_a_radix_hit(tmp_path: Path) -> None:
    world = World(seed=12)
    world.extend(1, 1500)
    world.share(2, 1, 900 // PAGE)
    told = Told(world, 2)
    told.extend(30)
    told.decode(20)
    told.check(tmp_path)


def test_after_500_decoded_tokens(tmp_path: Path) -> None:
    world = World(seed=13, layers=1)
    told = Told(world, 1)
    told.extend(600)
    told.decode(500)
    told.check(tmp_path)


@pytest.mark.parametrize("length", [20, 64, 330, 352])
def test_with_no_middle_or_hardly_one(tmp_path: Path, length: int) -> None:
    world = World(seed=length, layers=1)
    told = Told(world, 1)
    told.extend(length)
    told.decode(20)
    told.check(tmp_path)


def test_a_row_without_a_prefill_takes_its_next_query_as_anchor() -> None:
    world, spy = World(seed=14), Spy()
    world.extend(1, 800)
    world.engine.anchors.forget(1)
    world.decode([1], [spy])
    first = torch.stack([features[0] for features in spy.seen])
    assert (first[..., INDEX["q_cosine"]] - 1).abs().max() < 1e-5
    spy.seen.clear()
    world.decode([1], [spy])
    second = torch.stack([features[0] for features in spy.seen])
    assert (second[..., INDEX["q_cosine"]] < 0.9).all(), "the anchor stays"


def test_layers_and_heads_have_the_models_numbers() -> None:
    """A process with a part of the model observes the same as one with all of it."""
    parts = []
    for first in ((0, 0), (7, 16)):
        world, spy = World(seed=18, first=first), Spy()
        world.extend(1, 900)
        world.decode([1], [spy])
        parts.append(torch.stack(spy.seen)[:, 0])
    whole, part = parts
    assert part[..., INDEX["layer"]].tolist() == [[7.0] * 8, [8.0] * 8]
    assert (part[..., INDEX["head"]] == 16 + torch.arange(8.0)).all()
    at = [INDEX["layer"], INDEX["head"]]
    part[..., at] = whole[..., at]
    assert torch.equal(part, whole)


def test_requests_of_one_batch_have_criteria_of_their_own() -> None:
    world = World(seed=15)
    for row in (1, 2, 3):
        world.extend(row, 900)
    strict, loose = Spy(), Spy()
    strict.criterion, loose.criterion = Criterion(limit=0.02), Criterion(limit=0.5)
    world.decode([1, 2, 3], [strict, parse_spec("streaming"), loose])
    at = INDEX["anchor_budget_16"]
    assert strict.seen[0].shape == loose.seen[0].shape == (1, 8, 41)
    assert (strict.seen[0][..., at] > loose.seen[0][..., at]).all()


def test_labels_keep_the_criterion_at_every_step() -> None:
    world = World(seed=16, attend_union=False)
    for row, length in ((1, 700), (2, 1200)):
        world.extend(row, length)
    for limit in (0.05, 0.2, 0.5):
        policy = parse_spec(f"labels:{limit}")
        for got, want in world.decode([1, 2], [policy, policy]):
            error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).amax(-1, keepdim=True)
            assert error.max() <= limit + 1e-4


def test_anchor_is_exact_for_its_anchor() -> None:
    """A step that repeats the anchor query, with an unchanged middle, reads what the anchor needed."""
    world, limit = World(seed=17, attend_union=False), 0.1
    world.extend(1, 1000)
    policy = parse_spec(f"anchor:{limit}")
    for layer in range(world.layers):
        world.engine.anchors.queries[layer][1] = 0  # a zero anchor query gives every key the same weight
    errors = []
    for got, want in world.decode([1], [policy]):
        errors.append((got.double() - want).norm(dim=-1) / want.norm(dim=-1).amax(-1, keepdim=True))
    assert torch.stack(errors).isfinite().all()
    before = world.engine.stats()["tokens_read"]
    world.decode([1], [parse_spec("streaming")])
    assert world.engine.stats()["tokens_read"] == before
