"""What adaptive learns: which requests are alike, when it trains, what it keeps, and that a child process trains."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.learning import learner as learner_module
from fluxion_sglang.learning.apart import train_apart
from fluxion_sglang.learning.familiar import ALONE, FURTHEST, MISTAKEN, NEIGHBOURS, STRETCH, Familiar, thinned
from fluxion_sglang.learning.learned import Learned
from fluxion_sglang.learning.learner import FIRST, KEPT, MORE, Learner
from fluxion_sglang.learning.measured import (
    FIRST_STEPS,
    LAYERS,
    SAMPLES,
    STRETCHES,
    Measured,
    anchor_of,
    layers_measured,
    most_bytes,
    pack,
    unpack,
)
from fluxion_sglang.predictor.artifact import LoadedPredictor
from fluxion_sglang.predictor.features import COUNT, INDEX
from fluxion_sglang.predictor.network import HeadPredictor
from fluxion_sglang.training.live import MOST, train

L, H, TAU = 2, 3, 0.1


def measured(seed: int, steps: int = 4) -> Measured:
    """A request in which head 0 streams, head 1 needs a tenth, and head 2 what its budget at the anchor says."""
    random = torch.Generator().manual_seed(seed)
    features = torch.zeros(steps, L, H, COUNT)
    features[..., INDEX["q_norm"]] = torch.randn(steps, L, H, generator=random)
    features[..., INDEX["z_mean"]] = torch.randn(L, H, generator=random)
    features[..., INDEX["layer"]] = torch.arange(L).view(L, 1).float()
    features[..., INDEX["head"]] = torch.arange(H).float()
    features[..., INDEX["cpu_tokens"]] = math.log1p(4096)
    need = torch.rand(1, generator=random) * 0.5 + 0.1
    features[..., 2, INDEX["anchor_budget_16"]] = need
    budgets = torch.zeros(steps, L, H, 1 + len(BLOCKS))
    budgets[:, :, 1], budgets[:, :, 2] = 0.1, need
    return Measured.of(torch.stack([anchor_of(layer) for layer in features[0]]), features, budgets)


def learned_of(requests: Sequence[Measured], tau: float) -> Learned:
    """At once, and nothing."""
    network = HeadPredictor().eval().requires_grad_(False)
    anchors = torch.stack([request.anchor for request in requests])
    familiar = Familiar.of(anchors)
    return Learned(
        LoadedPredictor(network, tau, 0.0, torch.ones(L, H, len(BLOCKS)), {}),
        familiar,
        4096.0,
    )


def same(a: Learned, b: Learned) -> bool:
    mine, other = a.tensors(), b.tensors()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@given(number=st.integers(0, 1 << 40), layers=st.integers(1, 130))
def test_the_measured_steps(number: int, layers: int) -> None:
    """All of the first ones, and every layer as often as another, but for one turn; then one in every quarter."""
    chosen = {step: found for step in range(1 << 12) if (found := layers_measured(step, number, layers))}
    assert all(len(found) == min(LAYERS, layers) and max(found) < layers for found in chosen.values())
    assert list(chosen)[:FIRST_STEPS] == list(range(FIRST_STEPS))
    times = Counter(place for step in range(FIRST_STEPS) for place in chosen[step])
    assert max(times.values()) - min(times[place] for place in range(layers)) <= 1
    quarters = [(step.bit_length(), step * 4 >> step.bit_length() - 1) for step in list(chosen)[FIRST_STEPS:]]
    assert quarters == [(bits, 4 + quarter) for bits in range(5, 13) for quarter in range(4)]
    assert not any(layers_measured((FIRST_STEPS << STRETCHES) + step, number, layers) for step in range(64))


@pytest.mark.parametrize("layers", [16, 32, 80])
def test_every_layer_is_measured_at_every_step(layers: int) -> None:
    """Whatever number of the requests is kept: of a prompt that is asked again and again, one is."""
    for numbers in (range(0, 16000, 8), range(3, 6003, 3)):
        for steps in ((0,), (5,), (17, 18, 19), (40,)):
            seen = {place for n in numbers for step in steps for place in layers_measured(step, n, layers)}
            assert len(seen) == layers, (numbers, steps)
        few = numbers[:96]
        assert len({place for n in few for step in range(3) for place in layers_measured(step, n, layers)}) == layers


def test_later_steps_differ_from_request_to_request() -> None:
    for begin in (16, 256, 4096):
        found = [[s for s in range(begin, 2 * begin) if layers_measured(s, n, 4)] for n in range(300)]
        assert all(len(steps) == 4 for steps in found)
        assert len({step for steps in found for step in steps}) >= min(0.95 * begin, 600)


def test_there_is_room_for_all_that_is_measured() -> None:
    running, kept = most_bytes(6, 8)
    pairs = sum(len(layers_measured(step, 3, 6)) for step in range(FIRST_STEPS << STRETCHES))
    assert running == 6 * 8 * 28 * 4 + pairs * 8 * (COUNT + 5) * 4
    assert kept <= running


@given(steps=st.lists(st.integers(1, FIRST_STEPS), min_size=1, max_size=6))
def test_requests_come_back_from_a_file(steps: list[int]) -> None:
    requests = [measured(seed, count) for seed, count in enumerate(steps)]
    again = unpack(pack(requests))
    assert len(again) == len(requests)
    assert all(
        torch.equal(a, b) for one, two in zip(requests, again, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_of_a_large_model_not_all_is_kept() -> None:
    features = torch.arange(3.0 * SAMPLES * COUNT).view(3, SAMPLES, COUNT)
    one = Measured.of(torch.zeros(1, 1), features, features[..., :5])
    assert len(one.features) == SAMPLES and torch.equal(one.features[:, :5], one.budgets)
    assert len(one.features.unique(dim=0)) == SAMPLES


@given(n=st.integers(2, 60), seed=st.integers(0, 1000), constant=st.booleans())
def test_familiar_by_its_definition(n: int, seed: int, constant: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    anchors = torch.randn(n, L, 5, generator=random)
    if constant:
        anchors[..., 0] = 1000.0
    asked = torch.randn(L, 5, generator=random) * 1.5
    if constant:
        asked[..., 0] = 1000.0005  # rounding
    familiar = Familiar.of(anchors)
    values = anchors.double()
    mean, std = values.mean(0), values.std(0, correction=0)
    std = torch.maximum(std, 1e-3 * mean.abs() + 1e-6)

    def standard(x: torch.Tensor) -> torch.Tensor:
        return ((x - mean) / std).clamp(-FURTHEST, FURTHEST)

    def neighbours(x: torch.Tensor, others: list[int], layer: int, count: int) -> list[tuple[float, int]]:
        apart = [(float((standard(x) - standard(values[j])).square()[: layer + 1].sum()), j) for j in others]
        return sorted(apart)[:count]

    def all_but(share: float, found: list[float]) -> float:
        return sorted(found)[min(math.ceil((1 - share) * (n + 1) - 1e-9), n) - 1]

    distances = familiar.start()
    for layer in range(L):
        around = [neighbours(values[i], [j for j in range(n) if j != i], layer, NEIGHBOURS - 1) for i in range(n)]
        own = [found[-1][0] for found in around]
        most = all_but(ALONE, own)
        near = [min(distance, most) for distance in own]
        ratios = [own[i] / min(near[j] for _, j in around[i]) for i in range(n)]
        limit = min(all_but(MISTAKEN, ratios), STRETCH[1] * all_but(STRETCH[0], ratios))
        found = neighbours(asked.double(), list(range(n)), layer, NEIGHBOURS)
        ratio = found[-1][0] / min(near[j] for _, j in found)
        said = familiar.add(layer, asked[layer], distances)
        if n > NEIGHBOURS and abs(ratio - limit) > 1e-3 * limit:
            assert said == (ratio <= limit)


def test_a_kind_beside_one_that_is_just_known_is_not_familiar() -> None:
    """Of the known kind there are as few as there may be, and the next of the others is far away."""
    random = torch.Generator().manual_seed(3)

    def ask(count: int, at: float) -> torch.Tensor:
        return torch.randn(count, L, 40, generator=random) * 0.05 + at

    familiar = Familiar.of(torch.cat([ask(80, 0.0), ask(NEIGHBOURS, 6.0)]))
    for at, known in ((6.0, True), (4.5, False)):
        answers = []
        for one in ask(50, at):
            distances = familiar.start()
            answers.append([familiar.add(layer, one[layer], distances) for layer in range(L)][-1])
        assert sum(answers) >= 45 if known else not any(answers)


def test_kinds_that_vary_more_than_others_are_familiar_too() -> None:
    random = torch.Generator().manual_seed(2)
    kinds = [(0.0, 0.05), (3.0, 0.05), (-3.0, 1.0)]  # where, and how far spread

    def ask(count: int) -> list[torch.Tensor]:
        return [torch.randn(count, L, 40, generator=random) * spread + at for at, spread in kinds]

    familiar = Familiar.of(torch.cat(ask(40)))
    for kind in ask(100):
        answers = []
        for one in kind:
            distances = familiar.start()
            answers.append([familiar.add(layer, one[layer], distances) for layer in range(L)][-1])
        assert sum(answers) > 80
    # As far from a narrow kind as the wide one is from itself: of another kind.
    distances = familiar.start()
    stranger = torch.randn(L, 40, generator=random)
    assert not [familiar.add(layer, stranger[layer], distances) for layer in range(L)][-1]


def test_a_rare_kind_that_varies_is_familiar_too() -> None:
    """Three of a hundred, each further from its like than the others are from any."""
    random = torch.Generator().manual_seed(5)

    def ask(count: int, at: float, spread: float) -> torch.Tensor:
        return torch.randn(count, L, 40, generator=random) * spread + at

    familiar = Familiar.of(torch.cat([ask(388, 0.0, 0.02), ask(12, 4.0, 1.0)]))
    answers = []
    for one in ask(100, 4.0, 1.0):
        distances = familiar.start()
        answers.append([familiar.add(layer, one[layer], distances) for layer in range(L)][-1])
    assert sum(answers) > 80


@given(seed=st.integers(0, 1000), n=st.integers(1, 40), most=st.integers(1, 40))
def test_what_is_most_alike_goes_first(seed: int, n: int, most: int) -> None:
    requests = [measured(seed + i) for i in range(n)]
    kept = thinned(requests, most)
    assert len(kept) == min(n, most)
    names = [next(i for i, one in enumerate(requests) if one.anchor is other.anchor) for other in kept]
    assert names == sorted(names)
    if len(kept) < n:
        again = requests[0]._replace(anchor=requests[0].anchor * (1 + 1e-5))
        names = [id(one.anchor) for one in thinned([*requests, again], n)]
        assert id(requests[0].anchor) not in names and id(again.anchor) in names


def test_familiar_calls_few_strange_and_all_that_are() -> None:
    random = torch.Generator().manual_seed(0)
    familiar = Familiar.of(torch.randn(150, L, 40, generator=random))

    def known(shift: float) -> float:
        found = []
        for _ in range(300):
            distances = familiar.start()
            one = torch.randn(L, 40, generator=random) + shift
            found.append([familiar.add(layer, one[layer], distances) for layer in range(L)][-1])
        return sum(found) / len(found)

    assert known(0.0) > 0.93
    assert known(1.5) == 0.0
    assert not familiar.add(0, torch.full((40,), torch.nan), familiar.start())


def test_a_kind_has_to_be_seen_more_than_once_or_twice() -> None:
    random = torch.Generator().manual_seed(1)
    usual, other = torch.randn(200, L, 40, generator=random), torch.randn(9, L, 40, generator=random) * 0.1 + 6
    for seen in (0, 1, 3, NEIGHBOURS - 1, NEIGHBOURS):
        distances = (familiar := Familiar.of(torch.cat([usual, other[:seen]]))).start()
        asked = torch.randn(L, 40, generator=random) * 0.1 + 6
        answers = [familiar.add(layer, asked[layer], distances) for layer in range(L)]
        assert answers[-1] == (seen >= NEIGHBOURS)


def test_when_it_trains_and_with_what() -> None:
    asked: list[int] = []

    def note(requests: Sequence[Measured], tau: float) -> Learned:
        assert tau == TAU
        asked.append(len(requests))
        return learned_of(requests, tau)

    learner = Learner(TAU, train=note)
    for seed in range(FIRST + 3 * MORE):
        learner.take(measured(seed))
        learner.wait()
        found = learner.poll()
        assert (found is not None) == (seed + 1 >= FIRST and (seed + 1 - FIRST) % MORE == 0)  # MORE is over a 16th
        assert found is None or found is learner.learned
    assert asked == [FIRST, FIRST + MORE, FIRST + 2 * MORE, FIRST + 3 * MORE]
    for seed in range(2 * KEPT):
        learner.take(measured(1000 + seed))
        learner.wait()
        learner.poll()
    assert len(learner) <= KEPT + KEPT // 16 and max(asked) == KEPT
    assert asked[-1] == asked[-2] == KEPT and asked.count(KEPT) <= 2 * KEPT // (KEPT // 16)


def test_one_training_at_a_time_and_nobody_waits() -> None:
    go, running = threading.Event(), []

    def slow(requests: Sequence[Measured], tau: float) -> Learned:
        running.append(len(requests))
        assert go.wait(60)
        return learned_of(requests, tau)

    learner = Learner(TAU, train=slow)
    for seed in range(FIRST + 5 * MORE):
        learner.take(measured(seed))
        assert learner.poll() is None
    assert running == [FIRST]
    go.set()
    learner.wait()
    assert learner.poll() is not None
    learner.take(measured(999))
    learner.wait()
    assert running == [FIRST, FIRST + 5 * MORE + 1]


def test_what_comes_while_there_is_no_room_teaches_nothing() -> None:
    go = threading.Event()

    def slow(requests: Sequence[Measured], tau: float) -> Learned:
        assert go.wait(60)
        return learned_of(requests, tau)

    learner = Learner(TAU, train=slow)
    for seed in range(learner_module.MOST + 5):
        learner.take(measured(seed))
    assert len(learner) == learner_module.MOST
    go.set()
    for _ in range(2):
        learner.wait()
        assert learner.poll() is not None
        learner.take(measured(9000 + _))
    learner.wait()
    learner.poll()
    assert len(learner) == KEPT + 1, "one came after it was thinned"


def test_what_a_training_was_given_stays_until_it_ends() -> None:
    """Also when the one before it failed, and what comes meanwhile fills the list."""
    go, given = threading.Event(), []

    def slow(requests: Sequence[Measured], tau: float) -> Learned:
        given.append(len(requests))
        if len(given) == 1:
            raise ValueError("no head needed anything")
        assert go.wait(60)
        return learned_of(requests, tau)

    learner = Learner(TAU, train=slow)
    for seed in range(learner_module.MOST + 5):
        learner.take(measured(seed))
        if len(learner) == FIRST:
            learner.wait()
            assert learner.poll() is None
    assert given == [FIRST, 2 * FIRST] and len(learner) == learner_module.MOST
    go.set()
    learner.wait()
    assert learner.poll() is not None
    assert len(learner) == learner_module.MOST


def test_a_training_that_fails_is_not_tried_at_every_request(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def failing(requests: Sequence[Measured], tau: float) -> Learned:
        tried.append(len(requests))
        raise ValueError("no head needed anything")

    learner = Learner(TAU, train=failing)
    with caplog.at_level(logging.WARNING):
        for seed in range(4 * FIRST):
            learner.take(measured(seed))
            learner.wait()
            assert learner.poll() is None
    assert tried == [FIRST, 2 * FIRST, KEPT]
    assert (learner.trainings, learner.failures) == (0, 3)
    assert learner.learned is None and "no head needed anything" in caplog.text


def test_a_training_that_cannot_begin_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    learner = Learner(TAU, train=learned_of)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(threading.Thread, "start", refuse)
        for seed in range(FIRST):
            learner.take(measured(seed))
        assert learner.poll() is None
    assert len(learner) == FIRST and learner.failures == 1 and "can't start new thread" in caplog.text
    for seed in range(FIRST, 2 * FIRST):
        learner.take(measured(seed))
    learner.wait()
    assert learner.poll() is not None and len(learner) == 2 * FIRST


def test_other_answers_to_a_prompt_teach_nothing_more() -> None:
    learner = Learner(TAU, train=learned_of)
    one = measured(0)
    for noise in (0.0, 1e-6, 1e-5):
        learner.take(one._replace(anchor=one.anchor * (1 + noise), budgets=one.budgets + noise))
    learner.take(measured(1))
    assert len(learner) == 2


def test_what_is_no_number_or_of_another_shape_teaches_nothing() -> None:
    learner = Learner(TAU, train=learned_of)
    learner.take(measured(0))
    broken = measured(1)
    broken.features[0, 0] = torch.nan
    learner.take(broken)
    learner.take(measured(2)._replace(anchor=measured(2).anchor[:1]))
    assert len(learner) == 1


def test_the_second_start_is_warm(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "adaptive.safetensors"
    learner = Learner(TAU, path, learned_of)
    assert learner.learned is None
    for seed in range(FIRST):
        learner.take(measured(seed))
    learner.wait()
    first = learner.poll()
    assert first is not None and [file.name for file in path.parent.iterdir()] == [path.name]
    again = Learner(TAU, path, learned_of)
    assert again.learned is not None and same(again.learned, first) and len(again) == FIRST
    for seed in range(MORE):
        assert again.poll() is None
        again.take(measured(100 + seed))
    again.wait()
    assert again.poll() is not None, "what was kept counts among what is enough"


def test_a_server_that_stops_while_it_trains_need_not_measure_again(tmp_path: Path) -> None:
    path, seen = tmp_path / "adaptive.safetensors", []

    def stopped(requests: Sequence[Measured], tau: float) -> Learned:
        assert path.exists()
        raise KeyError

    first = Learner(TAU, path, stopped)
    for seed in range(FIRST):
        first.take(measured(seed))
    first.wait()

    def note(requests: Sequence[Measured], tau: float) -> Learned:
        seen.append(len(requests))
        return learned_of(requests, tau)

    again = Learner(TAU, path, note)
    assert again.learned is None and len(again) == FIRST
    again.take(measured(FIRST))
    again.wait()
    assert seen == [FIRST + 1] and again.poll() is not None


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "parts"])
def test_a_damaged_file_begins_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import save

    path = tmp_path / "adaptive.safetensors"
    requests = [measured(seed) for seed in range(4)]
    whole = {**pack(requests), **learned_of(requests, TAU).tensors()}
    if damage == "parts":
        whole |= {name: value[..., :5].contiguous() for name, value in whole.items() if name.startswith("familiar.m")}
    content = {
        "empty": b"",
        "cut": save(whole)[:-100],
        "other": save({"features": torch.ones(1)}),
        "parts": save(whole),
    }
    path.write_bytes(content[damage])
    with caplog.at_level(logging.WARNING):
        learner = Learner(TAU, path, learned_of)
    assert learner.learned is None and len(learner) == 0
    assert "begins anew" in caplog.text and str(path) in caplog.text


def test_what_killed_servers_left_behind_goes(tmp_path: Path) -> None:
    path = tmp_path / "adaptive-0.1.safetensors"
    old, new, other = (tmp_path / name for name in (f"{path.name}.x1.part", f"{path.name}.x2.part", "others.part"))
    for file in (old, new, other):
        file.write_bytes(b"half")
    for file in (old, other):
        os.utime(file, (0, 0))
    Learner(0.1, path)._save([measured(0)], None)
    assert path.exists() and not old.exists() and new.exists() and other.exists()


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    learner = Learner(TAU, tmp_path / "file" / "adaptive.safetensors", learned_of)
    with caplog.at_level(logging.WARNING):
        for seed in range(FIRST):
            learner.take(measured(seed))
        learner.wait()
    assert learner.poll() is not None and "cannot keep" in caplog.text


def test_training_finds_what_heads_need() -> None:
    """Through the process that a server starts; what it knows holds of requests that it has not seen."""
    found = train_apart([measured(seed) for seed in range(60)], TAU)
    assert found.predictor.tau == TAU and len(found.familiar.known) == 60
    asked = [measured(1000 + seed) for seed in range(20)]
    features = torch.stack([request.features.view(-1, L, H, COUNT) for request in asked])
    labels = torch.stack([request.budgets.view(-1, L, H, 5) for request in asked])[..., 1]
    out = found.predictor.network(features.view(-1, COUNT)).view(*labels.shape, 3)
    streams = out[..., 2] > found.predictor.threshold
    assert not bool(streams[..., 1:].any()) and float(streams[..., 0].float().mean()) > 0.9
    budget = (out[..., 0] + 4 * out[..., 1]) * found.predictor.margins[..., 0]
    enough = (budget >= labels * 0.98)[..., 1:].float().mean()
    assert float(enough) > 0.9
    assert float((budget - labels)[..., 1:].mean()) < 0.1, "it reads everything"


def test_a_process_that_fails_says_why() -> None:
    idle = [request._replace(budgets=request.budgets * 0) for request in map(measured, range(10))]
    with pytest.raises(RuntimeError, match="no head needed anything"):
        train_apart(idle, TAU)


def test_nothing_is_trained_while_a_layer_was_never_measured() -> None:
    requests = [measured(seed) for seed in range(20)]
    below = [one.features[:, INDEX["layer"]] < L - 1 for one in requests]
    shallow = [
        one._replace(features=one.features[chosen], budgets=one.budgets[chosen])
        for one, chosen in zip(requests, below, strict=True)
    ]
    with pytest.raises(ValueError, match="layers of which nothing was measured"):
        train(shallow, TAU)
    assert len(train([*shallow, *requests[5:]], TAU).predictor.margins) == L


def test_more_samples_than_are_trained_on() -> None:
    from fluxion_sglang.training import live

    one = measured(0)
    count = MOST // len(one.budgets) + 10
    assert len(live._samples([one] * count, range(count))) == MOST


def test_training_is_the_same_again() -> None:
    requests = [measured(seed) for seed in range(20)]
    assert same(train(requests, TAU), train(requests, TAU))


def test_requests_wait_for_a_training_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(learner_module.AT_ONCE, "1")
    learner = Learner(TAU, train=learned_of)
    for seed in range(FIRST):
        assert learner.poll() is None
        learner.take(measured(seed))
    assert learner.poll() is not None
