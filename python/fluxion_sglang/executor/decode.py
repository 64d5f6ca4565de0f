"""Runs decode steps layer by layer: the policy plans, the executors pull from the queue, the results merge."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.accounts import Accounts
from fluxion_sglang.executor.base import Executor, ExecutorId, LayerWork
from fluxion_sglang.executor.observer import Observer
from fluxion_sglang.executor.phases import Phase
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import AttentionLayer, CorruptMemory, NativeEngine, NativePlan
from fluxion_sglang.policy.base import TOLD, UNSEEN, DecodeStep, LayerPlan, Needs, Observed, Policy, World
from fluxion_sglang.policy.mixed import compose
from fluxion_sglang.predictor.anchors import Anchors
from fluxion_sglang.predictor.criterion import Criterion
from fluxion_sglang.predictor.features import COUNT
from fluxion_sglang.predictor.kernel import features as decode_features

logger = logging.getLogger(__name__)

Scheduler = Callable[[LayerPlan, DecodeStep, Sequence[ExecutorId]], tuple[torch.Tensor, torch.Tensor]]
"""Schedules tasks, given the plan of a layer, the step, and the executors (native workers first).

Returns for each task its value [B, H] float32 (larger runs earlier, ties in order of arrival) and its owner [B, H]
int32, the only executor that may take it. A pure function."""


@dataclass(kw_only=True)
class Layer(ABC):
    """A layer of the current step: its tensors, and how its residents are attended to.

    Attributes:
        index: index into the pool's layers.
        q: [B, Hq, D] on the CPU. scale: multiplies q.k.
        k, v: [B, H, D], this step's token of each request.
        of: the constants of the layer. A layer with a window has no residents, no middle and no plan.
        variant: variant of its attention, the same as in `of`.
        window: the layer's windows (`Windows`) if they are on the CPU.
        out: [B, Hq, D] in q's dtype; written if the CPU merges residents and middle.
    """

    index: int
    of: AttentionLayer
    q: torch.Tensor
    scale: float
    k: torch.Tensor
    v: torch.Tensor
    variant: Variant = PLAIN
    window: torch.Tensor | None = None
    out: torch.Tensor | None = None

    @abstractmethod
    def look(self, native: NativeEngine) -> torch.Tensor:
        """Append the token and attend to the residents. Returns parts [B, Hq, 5] (`NativeEngine.layer_resident`)."""

    @abstractmethod
    def begin(self, native: NativeEngine, plan: NativePlan, parts: torch.Tensor | None) -> None:
        """Start the layer. parts: the result of `look`; None if it was not called."""

    def newest(self, native: NativeEngine) -> None:
        """Compute a whole layer whose variant has a window, into `out`."""
        assert self.out is not None
        native.layer_newest(self.of, self.q, self.k, self.v, self.out)

    def finish(self, native: NativeEngine) -> None:
        """Wait for the layer's results. Raises RuntimeError with the first failure."""
        native.layer_finish()


class DecodeEngine:
    """Runs decode steps over the host pool and the windows.

    In every layer the new token is written to the host pool and its window slot. Then resident attention and the
    queue's tasks run concurrently, and the part that ends last merges both by log-sum-exp. If a policy needs to observe
    the heads, resident attention is computed before the plan. A failing worker fails the layer with a RuntimeError; the
    engine stays usable.

    Args:
        policy: default policy of requests.
        executors: executors besides the native workers.
        options: the engine uses canary and share_prefixes.
        q_heads: query heads of this process. first_layer, first_head: index in the model of this process's layer 0 and
            head 0.
        max_requests, max_tokens: initial room for requests of a batch and tokens of a request; grows on demand.
        scheduler: assigns tasks to executors and orders them. None: one queue, the plan's largest value first; a free
            worker takes the next task (Fluxion, section 6.2).
        attend_union: all heads of a group read the union of their selections. False is for comparisons.

    Attributes:
        accounts: counts bytes and times of steps; the default keeps nothing.
        observers: observers of steps.
        union: the argument attend_union.
        world: the parts of the engine that its policies may use.
        corrupt: called with the index in the pass of each request that read corrupt host memory, and a sentence; the
            request's output is zero. The default raises.
    """

    def __init__(
        self,
        pool: HostPool,
        windows: Windows,
        policy: Policy,
        executors: list[Executor],
        options: FluxionConfig,
        *,
        q_heads: int,
        max_requests: int,
        max_tokens: int,
        first_layer: int = 0,
        first_head: int = 0,
        scheduler: Scheduler | None = None,
        attend_union: bool = True,
    ) -> None:
        self.accounts = Accounts()
        self.observers: list[Observer] = []
        self.corrupt: Callable[[int, str], None] = _corrupt
        self.pool = pool
        self.windows = windows
        self.policy = policy
        self.executors = executors
        self.scheduler = scheduler
        self.q_heads = q_heads
        self.native = NativeEngine(
            pool.workers,
            pool,
            q_heads=q_heads,
            sinks=pool.placement.sinks,
            window=pool.placement.window,
            max_requests=max_requests,
            max_pages=-(-max_tokens // PAGE),
            attend_union=attend_union,
            share_prefixes=options.share_prefixes,
        )
        self.anchors = Anchors(pool, windows.rows, q_heads)
        self._canary = options.canary > 0
        self.union = attend_union
        self._executor_ids = [ExecutorId.CPU, *(executor.id for executor in executors)]
        self._first_layer, self._first_head = first_layer, first_head
        self.world = World(pool, windows, q_heads, windows.rows)
        self._bound: WeakSet[Policy] = WeakSet()
        self._bind(policy)
        # State of the current step.
        self._step: DecodeStep | None = None
        self._page_table = torch.empty(0, 0, dtype=torch.int32)
        self._owner: torch.Tensor | None = None  # of tasks, if the scheduler leaves them to any executor
        self._policy = policy
        self._looks = False
        self._anchored: Sequence[Criterion | None] = ()  # per request: the criterion that its anchor is measured for
        self._plan: tuple[LayerPlan, NativePlan] | None = None  # of the last layer

    def _bind(self, policy: Policy) -> None:
        if policy.world is not self.world:
            policy.bind(self.world)
        self._bound.add(policy)

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor, policy: Policy | None = None) -> None:
        """A prefill chunk is in the host pool.

        Args:
            row, length: the request's row and its number of tokens so far.
            queries: [T, Hq, D], queries of the chunk's tokens, T >= 1.
            policy: the request's; None: the engine's.
        """
        self.accounts.interrupted()
        self.anchors.note(layer, row, length, queries[-1])
        policy = policy or self.policy
        self._bind(policy)
        policy.prefilled(layer, row, length, queries[-TOLD:])

    def forget(self, row: int) -> None:
        """Drop the state of a row: its request has ended, or the row has another request, or one without a prefill."""
        self.anchors.forget(row)
        watching: list[Policy | Observer] = [*self._bound, *self.observers]
        for one in watching:
            try:
                one.released(row)
            except Exception:  # no containment between passes: an exception would end the server
                logger.exception("Fluxion: %s could not forget a request", type(one).__name__)

    def looks(self, policies: Sequence[Policy] | None = None) -> bool:
        """Whether a step with these policies plans after resident attention; None: the engine's policy."""
        return any(policy.needs is not Needs.NOTHING for policy in policies or [self.policy])

    def begin_step(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        policies: Sequence[Policy] | None = None,
    ) -> DecodeStep:
        """Begin a decode step.

        Args:
            rows: [B]. seq_lens: [B], this token included. page_table: [B, M] int32. All on the CPU.
            policies: one per request; None: the engine's for all of them.

        Raises:
            ValueError: the number of policies differs from the number of requests.
        """
        self.accounts.begin()
        pool = self.pool
        step = DecodeStep.build(
            rows, seq_lens, pool.placement, pool.shape.kv_heads, self.q_heads, pool.workers, page_table
        )
        if policies is not None and len(policies) != step.batch:
            raise ValueError(f"the step has {step.batch} requests and {len(policies)} policies; give one a request.")
        self.native.step(step.rows, step.seq_lens, page_table)
        for policy in policies or ():
            self._bind(policy)
        everyone = policies or [self.policy] * step.batch
        self._looks = self.looks(policies)
        self._anchored = [policy.criterion if policy.needs is Needs.FEATURES else None for policy in everyone]
        self._policy = compose(everyone) if policies else self.policy
        self._policy.begin_step(step)
        self._step, self._page_table, self._plan = step, page_table, None
        if not self.executors:
            # Only workers pull. Owned tasks may be computed in bundles (`csrc/engine/bundle.h`).
            self._owner = torch.full((step.batch, step.kv_heads), int(ExecutorId.CPU), dtype=torch.int32)
        for observer in self.observers:
            observer.began(step, everyone)
        self.accounts.began(step)
        return step

    def attend(self, at: Layer) -> None:
        """Compute attention of one layer of the current step. The caller calls `attended` once it has the result.

        Raises:
            RuntimeError: a task failed; the message names the first failure, and there is no result.
        """
        assert self._step is not None, "attend() before begin_step()"
        accounts = self.accounts
        accounts.lap(Phase.MODEL)
        if at.variant.window is not None:
            at.newest(self.native)
            self._lose_corrupt()
            accounts.lap(Phase.TASKS)
            return
        parts, observed = None, UNSEEN
        if self._looks:
            parts = at.look(self.native)
            accounts.lap(Phase.RESIDENT)
            observed = self._observe(at, parts)
            accounts.lap(Phase.FEATURES)
        plan = self._policy.plan(at.index, at.q, observed)
        accounts.lap(Phase.PLAN)
        at.begin(self.native, self._native_plan(plan), parts)
        if self.executors:
            work = LayerWork(self.native, self._step, self._page_table, plan, at.index, at.q, at.scale, at.variant.cap)
            self._drain(work)
        at.finish(self.native)
        self._lose_corrupt()
        accounts.lap(Phase.TASKS)

    def _lose_corrupt(self) -> None:
        for request, sentence in self.native.corrupt().items():
            self.corrupt(request, sentence)

    def _drain(self, work: LayerWork) -> None:
        """Let the other executors compute tasks of the open layer."""
        try:
            for executor in self.executors:
                executor.drain(work)
        except BaseException:
            # Another request may soon own the pages and rows of this layer, so no worker may write to them any more.
            self.native.abandon()
            raise

    def attended(self, at: Layer) -> None:
        """Tell policy, accounts and observers that the layer is done. Its tensors are unchanged since `attend`."""
        if at.variant.window is None:
            assert self._plan is not None, "attended() before attend()"
            self._policy.decoded(at.index, at.q, at.out)
            self.accounts.layer(at.index, self.native, self._plan[0].blk)
        else:
            self.accounts.layer(at.index, self.native, None)
        for observer in self.observers:
            observer.decoded(at)
        self.accounts.lap(Phase.PLAN)

    def steady_plan(self) -> NativePlan | None:
        """The plan of every layer of the current step, if it is known before the first and no observer is set."""
        assert self._step is not None, "steady_plan() before begin_step()"
        watched = self.accounts.watches or any(observer.watches for observer in self.observers)
        if watched or self._canary or self.executors or not self._policy.steady:
            return None
        return self._native_plan(self._policy.plan(0, torch.empty(self._step.batch, 0)))

    def plan_step(self) -> bool:
        """Pass the steady plan of the current step to the native engine, if there is one."""
        plan = self.steady_plan()
        if plan is not None:
            self.native.plan_step(plan, residents_first=self._looks)
        return plan is not None

    def served(self, layers: int) -> None:
        """The first layers of the current step are done without `attend`."""
        self.accounts.served(layers, self.native)

    def _native_plan(self, plan: LayerPlan) -> NativePlan:
        """Convert a plan. The result is reused while the policy returns the same plan object."""
        assert self._step is not None
        if self._plan is None or self._plan[0] is not plan:
            value, owner = plan.value, self._owner
            if self.scheduler is not None:
                value, owner = self.scheduler(plan, self._step, self._executor_ids)
            self._plan = plan, native_plan(plan, value, owner)
        return self._plan[1]

    def _observe(self, at: Layer, parts: torch.Tensor) -> Observed:
        """What the policies observe of a layer after its token was appended and its residents were attended to."""
        step, placement, layer = self._step, self.pool.placement, at.index
        assert step is not None
        features = None
        if any(self._anchored):
            rows, lengths = step.rows.tolist(), step.seq_lens.tolist()
            self.anchors.refresh(layer, rows, lengths, self._page_table, at.q, at.scale, self._anchored)
            features = torch.empty(step.batch, self.q_heads, COUNT)
            decode_features(
                at.q,
                parts,
                step.rows,
                step.seq_lens,
                self.anchors.statistics[layer],
                self.anchors.queries[layer],
                self.anchors.mean_k[layer],
                self._first_layer + layer,
                self._first_head,
                placement.sinks,
                placement.window,
                at.scale,
                features,
            )
        return Observed(features, at.scale, parts, at.window)

    def done(self) -> dict[str, int]:
        """Cumulative counts of the native engine, also for observers: `NativeEngine.stats`, canary counts, worker_ns
        (all workers)."""
        return self.native.stats() | self.pool.canary_counts() | {"worker_ns": sum(self.native.worker_ns())}

    def stats(self) -> dict[str, int]:
        """Cumulative counts of decode steps, with the workers' time and corrections by observers."""
        stats = self.done()
        for observer in self.observers:
            stats = observer.count(stats)
        return stats


def _corrupt(request: int, sentence: str) -> None:
    raise CorruptMemory(sentence)


def native_plan(plan: LayerPlan, value: torch.Tensor | None = None, owner: torch.Tensor | None = None) -> NativePlan:
    """Convert a plan for the native engine. value, owner: a scheduler's; default: the plan's value, no owner."""
    kinds = [kind.handle for kind in plan.kinds]
    return NativePlan(plan.blk, plan.budget, plan.value if value is None else value, owner, kinds)
