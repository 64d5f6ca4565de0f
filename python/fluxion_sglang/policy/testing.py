"""Contract checks for policies, to be run on any policy (docs/extend.md).

    from fluxion_sglang.policy.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_my_policy(check):
        check(lambda: MyPolicy(0.1))

A check takes a function that makes a new policy, serves requests on a real engine (`Rig`), and raises AssertionError
with one sentence. It needs no model, SGLang or pytest, and takes a second or two.

Outputs are compared bit by bit. What a request reads must not depend on other requests of the batch, on earlier
requests, on the number of threads, or on the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import BLOCKS, PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import Workers
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Observed, Policy
from fluxion_sglang.policy.fixed import FixedPolicy

Make = Callable[[], Policy]

_LAYERS, _HEADS, _GROUP, _DIM = 2, 2, 2, 32
_PLACEMENT = Placement(sinks=32, window=48)
_ROWS, _TOKENS = 8, 16384
_SCALE = _DIM**-0.5
_EMPTY = _PLACEMENT.sinks + _PLACEMENT.window
"""Length of the longest request whose middle is empty at any position in its last page."""


class Request:
    """A request whose tensors depend only on its seed, with the state of its tokens in the pool.

    Attributes:
        q: [layers, N, Hq, D]. k, v: [layers, N, H, D].
    """

    def __init__(self, seed: int, policy: Policy | None = None) -> None:
        random = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(_LAYERS, 1024, heads, _DIM, generator=random) for heads in (_HEADS * _GROUP, _HEADS, _HEADS)
        )
        self.policy = policy
        self.row = 0
        self.length = 0
        self.pages: list[int] = []

    @property
    def page_list(self) -> torch.Tensor:
        return torch.tensor(self.pages, dtype=torch.int32)


@dataclass
class Rig:
    """An engine with its own pool that serves requests as SGLang's backend does (`sglang/steps/backend.py`).

    Args:
        policy: the default policy of requests. Every plan of it is checked.
        canary: share of reads that the pool checks. Reads of memory that was never written are reported in `corrupt`.
    """

    policy: Policy
    workers: int = 2
    canary: float = 0.0
    corrupt: dict[int, str] = field(default_factory=dict)
    plans: list[LayerPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = KVShape(_LAYERS, _HEADS, _DIM, torch.float32, sketched=self.policy.sketches)
        self.pool = HostPool(shape, _TOKENS, _PLACEMENT, Workers(self.workers), canary=self.canary)
        self.windows = Windows(self.pool, _ROWS, "cpu")
        self.watch(self.policy)
        self.engine = DecodeEngine(
            self.pool,
            self.windows,
            self.policy,
            [],
            FluxionConfig(),
            q_heads=_HEADS * _GROUP,
            max_requests=_ROWS,
            max_tokens=_TOKENS,
        )
        self.engine.corrupt = self.corrupt.__setitem__
        self.device = HostDevice(self.pool, self.windows, self.engine)
        self.free_pages = list(range(self.pool.pages - 1, 0, -1))
        self.free_rows = list(range(_ROWS - 1, 0, -1))
        self.generations = torch.zeros(_ROWS, dtype=torch.int64)

    def watch(self, policy: Policy) -> None:
        """From now on, check every plan of the policy and keep it in `plans`."""
        begin_step, plan = policy.begin_step, policy.plan
        steps: list[DecodeStep] = []

        def begun(step: DecodeStep) -> None:
            steps[:] = [step]
            begin_step(step)

        def planned(layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
            found = plan(layer, q, observed)
            check_plan(found, steps[0])
            self.plans.append(found)
            return found

        policy.begin_step, policy.plan = begun, planned  # type: ignore[method-assign]

    def prefill(self, request: Request, count: int) -> None:
        """Prefill the next `count` tokens in one chunk. The first chunk assigns a row to the request."""
        if request.row == 0:
            request.row = self.free_rows.pop()
            self.generations[request.row] += 1
        start, end = request.length, request.length + count
        self._grow(request, end)
        rows, generations = torch.tensor([request.row]), self.generations[[request.row]]
        if self.windows.taken_over(rows, generations):
            self.engine.forget(request.row)
        self.windows.mark(rows, generations, torch.tensor([end]))
        for layer in range(_LAYERS):
            tokens = slice(start, end)
            self.pool.append(layer, request.page_list, start, request.k[layer, tokens], request.v[layer, tokens])
            self.engine.prefilled(layer, request.row, end, request.q[layer, tokens], request.policy)
            self.windows.fill(layer, request.row, end, request.page_list)
        request.length = end

    def adopt(self, request: Request, other: Request, tokens: int) -> None:
        """Start the request with the first `tokens` of another one, in whole pages, as on a radix-tree cache hit."""
        request.pages, request.length = other.pages[: tokens // PAGE], tokens
        for mine, others in ((request.q, other.q), (request.k, other.k), (request.v, other.v)):
            mine[:, :tokens] = others[:, :tokens]

    def decode(self, *requests: Request) -> list[torch.Tensor]:
        """Run one decode step of a batch. Returns for each request its outputs, [layers, Hq, D]."""
        for request in requests:
            request.length += 1
            self._grow(request, request.length)
        rows, lengths = (torch.tensor([getattr(r, name) for r in requests]) for name in ("row", "length"))
        table = torch.zeros(len(requests), max(len(r.pages) for r in requests), dtype=torch.int32)
        for b, request in enumerate(requests):
            table[b, : len(request.pages)] = request.page_list
        generations = self.generations[rows]
        for i in self.windows.stale(rows, generations, lengths - 1):
            self.windows.heal(requests[i].row, requests[i].length - 1, table[i])
            self.engine.forget(requests[i].row)
        policies = [request.policy or self.policy for request in requests]
        self.engine.begin_step(rows, lengths, table, policies if any(r.policy for r in requests) else None)
        self.windows.mark(rows, generations, lengths)
        out = []
        for layer in range(_LAYERS):
            q, k, v = (torch.stack([getattr(r, x)[layer, r.length - 1] for r in requests]) for x in "qkv")
            out.append(self.device.decode(layer, q, k, v, _SCALE))
        outputs = [torch.stack([of[b] for of in out]) for b in range(len(requests))]
        assert all(bool(o.isfinite().all()) for o in outputs), "An output is not finite."
        return outputs

    def run(self, request: Request, steps: int) -> list[torch.Tensor]:
        """Decode the request alone for `steps` steps."""
        return [self.decode(request)[0] for _ in range(steps)]

    def release(self, request: Request, keep: bool = False) -> None:
        """End or retract the request. keep: its pages stay allocated, as in the radix tree."""
        self.engine.forget(request.row)
        self.free_rows.append(request.row)
        if not keep:
            self.free_pages += request.pages
        request.row = 0

    def _grow(self, request: Request, tokens: int) -> None:
        while len(request.pages) * PAGE < tokens:
            request.pages.append(self.free_pages.pop())


def check_plan(plan: LayerPlan, step: DecodeStep) -> None:
    """Raise AssertionError with one sentence for a plan that an engine cannot execute."""
    groups, heads = (step.batch, step.kv_heads), (step.batch, step.q_heads)
    wanted = [("blk", plan.blk, groups, torch.int32), ("budget", plan.budget, heads, torch.float32)]
    wanted += [("value", plan.value, groups, torch.float32)]
    for name, tensor, size, dtype in wanted:
        got = (tuple(tensor.shape), tensor.dtype)
        assert got == (size, dtype), f"{name} has shape and dtype {got}, and a plan of this step {(size, dtype)}."
        assert tensor.is_contiguous(), f"{name} is not contiguous."
        assert bool(tensor.isfinite().all()), f"{name} has numbers that are not finite."
    legal = torch.tensor([0, *BLOCKS], dtype=torch.int32)
    assert plan.kinds or bool(torch.isin(plan.blk, legal).all()), (
        f"blk is none of {legal.tolist()} in {plan.blk.tolist()}."
    )
    assert bool((plan.budget >= 0).all()), "A budget is negative."


def _served(
    make: Make, seed: int, length: int, steps: int, chunk: int = 10_000, workers: int = 2
) -> list[torch.Tensor]:
    """The outputs of a request that is alone on its engine."""
    rig = Rig(make(), workers)
    request = Request(seed)
    _prefill(rig, request, length, chunk)
    return rig.run(request, steps)


def _prefill(rig: Rig, request: Request, length: int, chunk: int = 10_000) -> None:
    while request.length < length:
        rig.prefill(request, min(chunk, length - request.length))


def _same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], what: str) -> None:
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"{what}: the outputs differ at step {step} (by {float((a - b).abs().max()):.1e})."


def it_can_be_made(make: Make) -> None:
    """The function returns a new `Policy` on each call."""
    one, other = make(), make()
    assert isinstance(one, Policy), f"It is a {type(one).__name__}, and no fluxion_sglang.policy.Policy."
    assert one is not other, "Every call must make a policy of its own."


def it_plans_every_length(make: Make) -> None:
    """Lengths from one token to many, around every edge of sinks, window and pages."""
    rig = Rig(make())
    edges = [_EMPTY + more for more in (-1, 0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE)]
    for length in (1, PAGE, _PLACEMENT.sinks, _PLACEMENT.sinks + 1, *edges, 300, 700):
        request = Request(length)
        rig.prefill(request, length)
        rig.run(request, 2)
        given = {id(plan) for plan in rig.plans[-_LAYERS:]}
        assert not rig.policy.steady or len(given) == 1, "It is `steady`, and its plan differs from layer to layer."
        rig.release(request)
    assert rig.plans, "It was never asked for a plan."


def an_empty_middle_is_exact(make: Make) -> None:
    """If all tokens are resident, the output equals full attention."""
    request = Request(3)
    rig = Rig(make())
    rig.prefill(request, _EMPTY - 4)
    out = rig.run(request, 3)[-1]
    k, v = (x[:, : request.length].repeat_interleave(_GROUP, 2).double() for x in (request.k, request.v))
    scores = torch.einsum("lhd,lnhd->lhn", request.q[:, request.length - 1].double(), k) * _SCALE
    want = torch.einsum("lhn,lnhd->lhd", scores.softmax(-1), v)
    assert torch.allclose(out.double(), want, atol=1e-5), "With nothing in the middle the output is not exact."


def it_grows_with_its_request(make: Make) -> None:
    """Decode across pages and blocks, starting with an empty middle."""
    rig = Rig(make())
    request = Request(4)
    rig.prefill(request, _EMPTY - 8)
    rig.run(request, 140)
    assert request.length > _EMPTY + 128


def it_is_deterministic(make: Make) -> None:
    """Another run, another engine and another number of workers give the same outputs."""
    want = _served(make, 5, 500, 20)
    for workers in (1, 2, 3):
        _same(_served(make, 5, 500, 20, workers=workers), want, f"A second run, {workers} workers")


def batch_mates_do_not_matter(make: Make) -> None:
    """Alone, in a batch under one policy, and in a batch that mixes policies, the outputs are the same."""
    lengths = {6: 420, 7: 60, 8: 700}
    alone = {seed: _served(make, seed, length, 12) for seed, length in lengths.items()}
    for mixed in (False, True):
        rig = Rig(make())
        others = [Request(20, FixedPolicy(16, 1.0)), Request(21, FixedPolicy(0, 0.0)), Request(22, make())]
        others = others if mixed else []
        requests = [Request(seed) for seed in lengths]
        for request, length in zip(requests, lengths.values(), strict=True):
            rig.prefill(request, length)
        for other in others:
            rig.prefill(other, 333)
        batch = [x for pair in zip(others, requests, strict=True) for x in pair] if mixed else requests
        outs = [rig.decode(*batch) for _ in range(12)]
        for b, request in enumerate(batch):
            if request in requests:
                seed = list(lengths)[requests.index(request)]
                what = "Among requests of other policies" if mixed else "In a batch"
                _same([out[b] for out in outs], alone[seed], what)


def a_row_is_taken_over_clean(make: Make) -> None:
    """A row and pages that an ended request used before carry no state over."""
    want = _served(make, 9, 450, 20)
    rig = Rig(make())
    for seed, length, steps in ((10, 700, 30), (11, 60, 3), (12, 450, 1)):
        before = Request(seed)
        rig.prefill(before, length)
        rig.run(before, steps)
        row = before.row
        rig.release(before)
    request = Request(9)
    rig.prefill(request, 450)
    assert request.row == row, "This check means to use a row again."
    _same(rig.run(request, 20), want, "In a row that others had before")


def a_retracted_request_starts_anew(make: Make) -> None:
    """After a retraction, prompt and decoded tokens are prefilled again, into the same row or another."""
    want = _served(make, 13, 460, 20)
    for taken in (False, True):
        rig = Rig(make())
        request = Request(13)
        rig.prefill(request, 450)
        rig.run(request, 10)
        rig.release(request)
        if taken:
            rig.prefill(Request(14), 300)
        request.pages, request.length = [], 0
        rig.prefill(request, 460)
        _same(rig.run(request, 20), want, "After a retraction")


def an_appended_turn_is_as_a_fresh_request(make: Make) -> None:
    """The earlier turn's tokens are a radix-tree hit; only the new turn is prefilled."""
    turn, prefix = 96, 480
    fresh = Rig(make())
    whole = Request(15)
    _prefill(fresh, whole, prefix)
    fresh.prefill(whole, turn)
    want = fresh.run(whole, 20)
    for taken in (False, True):
        rig = Rig(make())
        first, second = Request(15), Request(15)
        rig.prefill(first, 450)
        rig.run(first, prefix - 450)
        rig.release(first, keep=True)
        if taken:
            rig.prefill(Request(16), 100)
        rig.adopt(second, first, prefix)
        rig.prefill(second, turn)
        _same(rig.run(second, 20), want, "After an appended turn")


def a_row_may_be_new_to_it(make: Make) -> None:
    """A row that decodes without a prefill, or decoded under another policy meanwhile, recovers without an error."""
    rig = Rig(make())
    request = Request(17)
    rig.prefill(request, 400)
    rig.run(request, 3)
    request.policy = FixedPolicy(16, 1.0)
    rig.run(request, 40)
    request.policy = None
    rig.run(request, 5)
    copied = Request(18)
    rig.adopt(copied, request, request.length // PAGE * PAGE)
    copied.row = rig.free_rows.pop()
    rig.generations[copied.row] += 1
    rig.run(copied, 20)


def another_engine_starts_anew(make: Make) -> None:
    """State from one engine's requests does not affect another engine's requests."""
    want = _served(make, 19, 400, 10)
    policy = make()
    first = Rig(policy)
    request = Request(40)
    first.prefill(request, 600)
    first.run(request, 5)
    second, request = Rig(policy), Request(19)
    second.prefill(request, 400)
    _same(second.run(request, 10), want, "Bound to a second engine")


CHECKS: Final[dict[str, Callable[[Make], None]]] = {
    check.__name__: check
    for check in (
        it_can_be_made,
        it_plans_every_length,
        an_empty_middle_is_exact,
        it_grows_with_its_request,
        it_is_deterministic,
        batch_mates_do_not_matter,
        a_row_is_taken_over_clean,
        a_retracted_request_starts_anew,
        an_appended_turn_is_as_a_fresh_request,
        a_row_may_be_new_to_it,
        another_engine_starts_anew,
    )
}
"""The checks by name. Each takes a function that makes a new policy."""
