"""adaptive: exact until it has learned; then by its predictor for what it knows, and exact for what it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxion_sglang.learning.familiar import Familiar
from fluxion_sglang.learning.learned import Learned
from fluxion_sglang.learning.learner import FIRST, KEPT, MORE, Learner
from fluxion_sglang.learning.measured import Measured, anchor_of, layers_measured
from fluxion_sglang.policy import adaptive as adaptive_module
from fluxion_sglang.policy import parse_spec, testing
from fluxion_sglang.policy.adaptive import ONE_OF, AdaptivePolicy
from fluxion_sglang.policy.testing import Request, Rig
from fluxion_sglang.predictor.artifact import LoadedPredictor
from fluxion_sglang.predictor.features import COUNT, INDEX
from fluxion_sglang.predictor.measure import Measurement, measure
from fluxion_sglang.predictor.network import HeadPredictor
from fluxion_sglang.training.live import train

PROMPT, STEPS = 500, 6
LAYERS, HEADS = Request(0).q.shape[0], Request(0).q.shape[2]


def adaptive(spec: str = "adaptive") -> AdaptivePolicy:
    policy = parse_spec(spec)
    assert isinstance(policy, AdaptivePolicy)
    return policy


def lean(seed: int, every: int = 0) -> Request:
    """A request whose sinks have nearly all attention, but for that of one query in `every`, which sees none of it."""
    request = Request(seed)
    request.q[..., 0], request.k[..., 0] = 5.0, 0.0
    request.k[:, :32, :, 0] = 8.0
    if every:
        request.q[:, ::every, :, 0] = 0.0
        request.k[:, 32:] *= 2
    return request


def nothing(requests: Sequence[Measured], tau: float) -> Learned:
    """At once: a predictor that has every head stream."""
    network = HeadPredictor().eval().requires_grad_(False)
    last = network.layers[-1]
    assert isinstance(last, torch.nn.Linear)
    last.weight.zero_()
    last.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    anchors = torch.stack([request.anchor for request in requests])
    familiar = Familiar.of(anchors)
    longest = max(float(one.features[:, INDEX["cpu_tokens"]].expm1().max()) for one in requests)
    return Learned(
        LoadedPredictor(network, tau, 0.0, torch.ones(LAYERS, HEADS, 4), {}),
        familiar,
        longest,
    )


class Served:
    """Requests one after the other, under adaptive and exactly."""

    def __init__(self, spec: str = "adaptive", train: Callable[[Sequence[Measured], float], Learned] = nothing) -> None:
        self.policy = adaptive(spec)
        self.rig, self.full = Rig(self.policy), Rig(parse_spec("full"))
        self.policy.learner = Learner(self.policy.criterion.limit, None, train)

    def serve(self, make: Callable[[int], Request], seed: int, prompt: int = PROMPT) -> tuple[float, torch.Tensor]:
        """What it read of the bytes of exact attention, and the error of every step, layer and head."""
        outs, read = [], []
        for rig in (self.rig, self.full):
            request, before = make(seed), rig.engine.native.stats()["tile_bytes"]
            rig.prefill(request, prompt)
            outs.append(torch.stack(rig.run(request, STEPS)))
            rig.release(request)
            read.append(rig.engine.native.stats()["tile_bytes"] - before)
        self.policy.learner.wait()
        a, b = outs
        return read[0] / read[1], (a - b).norm(dim=-1) / b.norm(dim=-1).amax(-1, keepdim=True)

    def warm(self, make: Callable[[int], Request]) -> None:
        for seed in range(FIRST):
            read, error = self.serve(make, seed)
            assert read == 1 and float(error.max()) < 1e-5
        assert len(self.policy.learner) == FIRST


def test_it_begins_exact_and_then_does_what_it_learned() -> None:
    served = Served()
    served.warm(lean)
    assert served.serve(lean, 1000)[0] == 0


def test_it_counts_requests_and_trainings() -> None:
    served = Served()
    served.warm(lean)
    for seed in range(3):
        served.serve(lean, 1000 + seed)
    served.serve(Request, 1)
    assert served.rig.engine.policy_events == {
        ("adaptive", "familiar_requests"): 3,
        ("adaptive", "unfamiliar_requests"): FIRST + 1,
        ("adaptive", "measured_requests"): FIRST + 1,
        ("adaptive", "trainings"): 1,
        ("adaptive", "failed_trainings"): 0,
    }


def test_what_it_does_not_know_stays_exact_until_it_does() -> None:
    served = Served()
    served.warm(lean)
    for seed in range(MORE):
        read, error = served.serve(Request, seed)
        assert read == 1 and float(error.max()) < 1e-5
    assert served.serve(lean, 1000)[0] == 0
    assert min(served.serve(Request, 100 + seed)[0] for seed in range(4)) == 0
    known = [served.serve(lean, 2000 + seed)[0] for seed in range(4)]
    assert known == [0] * 4, "the other kind is known as before"


def test_a_request_is_judged_alone() -> None:
    """In a batch, the strange ones are read exactly and the familiar ones are not."""
    served = Served()
    served.warm(lean)
    mine, strange = lean(1000), Request(1001)
    exact = Rig(parse_spec("full"))
    same = Request(1001)
    for rig, requests in ((served.rig, (mine, strange)), (exact, (same,))):
        for request in requests:
            rig.prefill(request, PROMPT)
    for _ in range(STEPS):
        out, want = served.rig.decode(mine, strange)[1], exact.decode(same)[0]
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
        plan = served.rig.plans[-1]
        assert bool((plan.budget[1] == 1).all()) and bool((plan.budget[0] == 0).all())


def test_running_requests_are_judged_anew() -> None:
    """Those that were strange to the predictor before may be familiar to the next; their own steps did not teach it."""
    served = Served()
    served.warm(lean)
    running = [Request(5000 + i) for i in range(4)]
    for request in running:
        served.rig.prefill(request, 200)
    for _ in range(2):
        served.rig.decode(*running)
        assert bool((served.rig.plans[-1].budget == 1).all())
    for seed in range(MORE):
        served.serve(Request, seed, prompt=200)
    served.rig.decode(*running)
    assert int((served.rig.plans[-1].budget == 0).all(1).sum()) >= 2


def test_some_of_what_it_knows_is_measured_as_well() -> None:
    served = Served()
    served.warm(lean)
    few, _ = ONE_OF
    before = len(served.policy.learner)
    for seed in range(2 * few):
        served.serve(lean, 1000 + seed)
    assert len(served.policy.learner) == before + 2


def test_what_is_measured_is_what_each_step_needed() -> None:
    """Budgets and features of every layer, as `measure` gives them for the same queries."""
    taken: list[Measured] = []
    policy = adaptive("adaptive:0.2")
    rig = Rig(policy)
    policy.learner.take = taken.append  # type: ignore[method-assign]
    request = Request(7)
    rig.prefill(request, PROMPT)
    rig.run(request, 5)
    pages, length = request.page_list, request.length
    want = []
    for step in range(length - 5, length):
        found = [
            measure(
                rig.pool, layer, pages, torch.tensor([step + 1], dtype=torch.int32), request.q[layer, step : step + 1],
                request.q.shape[-1] ** -0.5, rig.pool.placement.window, [policy.criterion],
            ).budgets[0, :, 0]
            for layer in range(request.q.shape[0])
        ]  # fmt: skip
        want.append(torch.stack(found))
    rig.release(request)
    assert len(taken) == 1
    # The first two steps are measured together, layer by layer; then a step at a time.
    want = [torch.stack(want[:2], 1).flatten(0, 1), *want[2:]]
    torch.testing.assert_close(taken[0].budgets, torch.cat(want).flatten(0, 1))
    features = taken[0].features
    early, later = features[: 2 * LAYERS * HEADS], features[2 * LAYERS * HEADS :]
    early = early.view(LAYERS, 2, HEADS, COUNT).transpose(0, 1)
    features = torch.cat([early, later.view(3, LAYERS, HEADS, COUNT)])
    assert bool((features[..., INDEX["layer"]] == torch.arange(LAYERS).view(1, -1, 1)).all())
    assert bool((features[:, 0, 0, INDEX["cpu_tokens"]].diff() >= 0).all())
    for layer in range(LAYERS):
        assert torch.equal(taken[0].anchor[layer], anchor_of(features[3, layer]))


def test_of_a_deeper_model_each_step_measures_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_LAYERS", 6)
    for seed in range(3):
        taken: list[Measured] = []
        policy = adaptive("adaptive:0.2")
        rig = Rig(policy)
        policy._chosen = seed
        policy.learner.take = taken.append  # type: ignore[method-assign]
        request = Request(7)
        rig.prefill(request, PROMPT)
        assert policy.world is not None
        begin = request.length
        for _ in range(40):
            rig.decode(request)
            assert policy.state_bytes - policy._held <= policy.remembers(policy.world, request.length)
        want = []
        for step in range(40):
            for layer in sorted(layers_measured(step, seed, 6)):
                at = torch.tensor([begin + step + 1], dtype=torch.int32)
                q, scale = request.q[layer, begin + step : begin + step + 1], request.q.shape[-1] ** -0.5
                window, pages = rig.pool.placement.window, request.page_list
                found = measure(rig.pool, layer, pages, at, q, scale, window, [policy.criterion])
                want.append((layer, float(at) - 1, found.budgets[0, :, 0]))
        rig.release(request)
        budgets, features = taken[0].budgets.view(-1, HEADS, 5), taken[0].features.view(-1, HEADS, COUNT)
        layers = features[:, 0, INDEX["layer"]].int().tolist()
        order = sorted(range(len(want)), key=lambda i: (max(want[i][1], begin + 1), want[i][0], want[i][1]))
        assert layers == [want[i][0] for i in order] and 4 * (16 + 4) <= len(order) <= 4 * (16 + 8)
        torch.testing.assert_close(budgets, torch.stack([want[i][2] for i in order]))


def test_few_steps_of_a_long_answer_are_measured() -> None:
    taken: list[Measured] = []
    policy = adaptive()
    rig = Rig(policy)
    policy.learner.take = taken.append  # type: ignore[method-assign]
    request = Request(7)
    rig.prefill(request, 300)
    rig.run(request, 150)
    rig.release(request)
    assert 16 + 3 * 4 <= len(taken[0].budgets) / (LAYERS * HEADS) <= 16 + 4 * 4


def test_what_it_reads_to_measure_is_said() -> None:
    """The middle once, and the values of some tokens once more; of the second step twice as much, as the first one is
    measured with it."""
    policy = adaptive()
    rig = Rig(policy)
    request = Request(7)
    rig.prefill(request, 400)
    assert policy.read_besides(request.row) == 0
    found = []
    for _ in range(32):
        rig.decode(request)
        middle = int(policy._step.middle[0])
        found.append(policy.read_besides(request.row) / (middle * rig.pool.shape.token_bytes))
    measured = [0, 2, *[1] * 14, *(float(read > 0) for read in found[16:])]
    most = 1 + HEADS / rig.pool.shape.kv_heads / 2  # every value for each query head
    assert all(times <= read <= times * most for read, times in zip(found, measured, strict=True))
    assert any(read > times for read, times in zip(found, measured, strict=True))
    assert sum(read > 0 for read in found[16:]) == 4
    rig.release(request)
    assert policy.read_besides(request.row) == 0


def test_a_request_of_one_step_and_one_that_begins_again_teach_what_was_seen() -> None:
    taken: list[Measured] = []
    policy = adaptive()
    rig = Rig(policy)
    policy.learner.take = taken.append  # type: ignore[method-assign]
    request = Request(7)
    rig.prefill(request, PROMPT)
    rig.run(request, 1)
    rig.prefill(request, 20)
    assert not taken, "whether it is learnt from was not known yet"
    rig.run(request, 3)
    rig.prefill(request, 20)
    rig.run(request, 4)
    rig.release(request)
    assert [len(one.budgets) for one in taken] == [3 * LAYERS * HEADS, 4 * LAYERS * HEADS]


def test_a_middle_that_outgrows_what_was_measured_is_read_exactly_and_measured() -> None:
    """However alike the prompts: those of what was measured say nothing of an answer that is much longer."""
    served = Served()
    for seed in range(FIRST):
        served.serve(lean, seed, prompt=100)
    taken: list[Measured] = []
    served.policy.learner.take = taken.append  # type: ignore[method-assign]
    request = lean(1000)
    served.rig.prefill(request, 100)
    budgets = []
    for _ in range(120):
        served.rig.run(request, 1)
        budgets.append(float(served.rig.plans[-1].budget.max()))
    known = request.length - 120 + budgets.index(1.0)
    assert budgets[0] == 0 and budgets == sorted(budgets) and known > 100 + STEPS
    served.rig.release(request)
    assert len(taken) == 1 and float(taken[0].features[:, INDEX["cpu_tokens"]].expm1().max()) > 64


def test_a_step_measures_few_requests_and_all_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_module, "TOKENS_A_STEP", 1000)
    calls: list[int] = []

    def counted(*args: Any) -> Measurement:
        calls.append(int(args[3]))
        return measure(*args)

    monkeypatch.setattr(adaptive_module, "measure", counted)
    policy = adaptive()
    taken: list[Measured] = []
    rig = Rig(policy)
    policy.learner.take = taken.append  # type: ignore[method-assign]
    requests = [Request(seed) for seed in range(4)]
    for request in requests:
        rig.prefill(request, PROMPT)
    for _ in range(8):
        calls.clear()
        rig.decode(*requests)
        assert len(calls) <= 3 * LAYERS, "some 420 tokens of a middle each, and at most 1,000"
    for request in requests:
        rig.release(request)
    assert len(taken) == 4


@pytest.mark.full
def test_it_keeps_its_promise_and_reads_less() -> None:
    """With real training. A seventh of the queries needs most of the middle, and gets it."""
    tau = 0.3
    served = Served(f"adaptive:{tau}", train)
    served.warm(lambda seed: lean(seed, 7))
    read, errors = zip(*(served.serve(lambda seed: lean(seed, 7), 1000 + seed) for seed in range(30)), strict=True)
    assert sum(read) / len(read) < 0.9
    assert float((torch.stack(errors) > tau).float().mean()) < 0.02


def test_another_engine_begins_with_what_was_kept(tmp_path: Path) -> None:
    served = Served()
    path = tmp_path / "adaptive-0.10.safetensors"
    served.policy.learner = Learner(0.1, path, nothing)
    served.warm(lean)
    assert path.exists()
    again = adaptive()
    rig = Rig(again, keeps=tmp_path)
    request = lean(1000)
    rig.prefill(request, PROMPT)
    rig.run(request, 2)
    assert bool((rig.plans[-1].budget == 0).all())
    other = Rig(adaptive("adaptive:0.2"), keeps=tmp_path)  # of which nothing is kept
    request = lean(1000)
    other.prefill(request, PROMPT)
    other.run(request, 2)
    assert bool((other.plans[-1].budget == 1).all())


def test_what_it_keeps_is_within_what_it_says() -> None:
    served = Served()
    served.warm(lean)
    world, learner = served.rig.engine.world, served.policy.learner
    assert sum(request.nbytes for request in learner._requests) / FIRST * KEPT <= served.policy.holds(world)


@pytest.mark.parametrize("spec", ["adaptive:0", "adaptive:2", "adaptive:x", "adaptive:0.1:16"])
def test_illegal_specs(spec: str) -> None:
    with pytest.raises(ValueError, match="adaptive"):
        parse_spec(spec)
