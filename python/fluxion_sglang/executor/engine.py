"""One decode step of one layer: the policy plans, the executors pull from the queue, the results merge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from fluxion_sglang.executor.accounts import Accounts
from fluxion_sglang.executor.base import Executor, ExecutorId, LayerWork
from fluxion_sglang.executor.phases import Part
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.lab.schedulers import Scheduler, by_priority
from fluxion_sglang.lab.torch_executor import TorchReferenceExecutor
from fluxion_sglang.native import NativeEngine
from fluxion_sglang.policy.base import UNSEEN, Criterion, DecodeStep, LayerPlan, Needs, Observed, Policy, World
from fluxion_sglang.policy.mixed import compose
from fluxion_sglang.predictor.anchors import Anchors
from fluxion_sglang.predictor.features import COUNT, PARTS
from fluxion_sglang.predictor.kernel import features as decode_features
from fluxion_sglang.predictor.measure import measure

if TYPE_CHECKING:
    from fluxion_sglang.config import FluxionConfig
    from fluxion_sglang.device.mailbox import Mailbox


def foreign_executors(config: FluxionConfig, pool: HostPool) -> list[Executor]:
    """The executors that pull beside the native workers."""
    if config.executors == "cpu+torch":
        return [TorchReferenceExecutor(pool, config.attend_union)]
    if config.executors == "cpu+gpu":
        from fluxion_sglang.device import dispatcher as gpu

        return [gpu.create(config, pool)]
    return []


class DecodeEngine:
    """Runs decode steps over the host pool and the device windows.

    Every layer: the new token goes to its window slot and to the host, then resident attention and the queue's tasks
    run side by side, then `merge_state` joins the two. A policy that wants to see the heads first gets the resident
    attention computed before the plan. A failing worker fails the layer with a RuntimeError; the engine stays usable.

    Args:
        policy: what requests follow that have none of their own.
        q_heads: query heads of this process. first_layer, first_head: the model's numbers of layer 0 and head 0 here.
        max_requests, max_tokens: requests of a batch and tokens of a request to make room for now; more is made when
            a step needs it.
        guard: as of `NativeEngine`. With one, every policy's plan follows the resident attention, so that what a
            request reads does not depend on the policies beside it.
        scheduler: who may take which task, and in what order.
        share_prefixes: as of `NativeEngine`.

    Attributes:
        accounts: what its steps read and where their time goes; by default nobody keeps them.
    """

    def __init__(
        self,
        pool: HostPool,
        windows: Windows,
        policy: Policy,
        executors: list[Executor],
        *,
        q_heads: int,
        max_requests: int,
        max_tokens: int,
        attend_union: bool,
        guard: float | None = None,
        scheduler: Scheduler = by_priority,
        share_prefixes: bool = True,
        first_layer: int = 0,
        first_head: int = 0,
    ) -> None:
        self.accounts = Accounts()
        self.pool = pool
        self.windows = windows
        self.policy = policy
        self.executors = executors
        self._executor_ids = [ExecutorId.CPU, *(executor.id for executor in executors)]
        self.scheduler = scheduler
        self.q_heads = q_heads
        self._first_layer, self._first_head = first_layer, first_head
        placement = pool.placement
        self.native = NativeEngine(
            pool.workers,
            pool.native,
            q_heads=q_heads,
            sinks=placement.sinks,
            window=placement.window,
            max_requests=max_requests,
            max_pages=-(-max_tokens // PAGE),
            attend_union=attend_union,
            guard=guard,
            share_prefixes=share_prefixes,
        )
        for executor in executors:
            executor.bind(self.native, q_heads)
        self._guarded = guard is not None
        self.anchors = Anchors(pool, windows.rows, q_heads)
        self._world = World(pool, windows, q_heads, windows.rows)
        self._bound: WeakSet[Policy] = WeakSet()
        self._bind(policy)
        self._step: DecodeStep | None = None
        self._page_table = torch.empty(0, 0, dtype=torch.int32)
        self._owner: torch.Tensor | None = None  # of tasks that the scheduler leaves to anyone
        self._planned = torch.empty(0, 0, dtype=torch.int32)  # blk of the layer that `serve` answered
        self._policy = policy
        self._policies: Sequence[Policy] = ()
        self._needs = Needs.NOTHING
        self._anchored: Sequence[Criterion | None] = ()  # of each request: what its anchor is measured for

    def _bind(self, policy: Policy) -> None:
        if policy.world is not self._world:
            policy.bind(self._world)
        self._bound.add(policy)

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor, policy: Policy | None = None) -> None:
        """A chunk was prefilled, and the host pool has it.

        Args:
            row, length: of the request, all its tokens so far.
            queries: [T, Hq, D] of the chunk's tokens, T at least 1.
            policy: the request's; None: the engine's.
        """
        self.accounts.interrupted()
        self.anchors.note(layer, row, length, queries[-1])
        policy = policy or self.policy
        if policy.prefill_rows:
            self._bind(policy)
            policy.prefilled(layer, row, length, queries[-policy.prefill_rows :])

    def forget(self, row: int) -> None:
        """The row has another request than before, or one that came without a prefill."""
        self.anchors.forget(row)
        for policy in self._bound:
            policy.released(row)

    @property
    def state_bytes(self) -> int:
        """Memory that the policies remember requests in."""
        return sum(policy.state_bytes for policy in self._bound)

    def begin_step(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        policies: Sequence[Policy] | None = None,
    ) -> DecodeStep:
        """A new decode step.

        Args:
            rows: [B]. seq_lens: [B], this token included. page_table: [B, M] int32. All on the CPU.
            policies: that of each request; None: the engine's for all of them.

        Raises:
            ValueError: there are more or fewer policies than requests.
        """
        self.accounts.begin()
        pool = self.pool
        step = DecodeStep.build(
            rows, seq_lens, pool.placement, pool.shape.kv_heads, self.q_heads, pool.workers, page_table
        )
        if policies is not None and len(policies) != step.batch:
            raise ValueError(f"the step has {step.batch} requests and {len(policies)} policies; give one a request.")
        self.native.step(step.rows, step.seq_lens, page_table)
        self._policies = policies or [self.policy] * step.batch
        for policy in policies or ():
            self._bind(policy)
        self._needs = max((policy.needs for policy in self._policies), default=Needs.NOTHING)
        self._anchored = [p.criterion if p.needs is Needs.FEATURES else None for p in self._policies]
        self._policy = compose(self._policies) if policies else self.policy
        self._policy.begin_step(step)
        self._step, self._page_table = step, page_table
        if not self.executors:
            self._owner = torch.full((step.batch, step.kv_heads), int(ExecutorId.CPU), dtype=torch.int32)
        self.accounts.began(step)
        return step

    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one layer of the current step.

        Args:
            q: [B, Hq, D]. k, v: [B, H, D], this step's token of each request. scale: multiplies q.k.

        Returns:
            [B, Hq, D] in q's dtype.

        Raises:
            RuntimeError: a task failed; the message names the first failure.
        """
        assert self._step is not None, "decode() before begin_step()"
        accounts = self.accounts
        accounts.lap(Part.MODEL)
        out = torch.empty_like(q)
        windows = self.windows.layers[layer]
        if self._looks(self._needs):
            parts = torch.empty(self._step.batch, self.q_heads, len(PARTS))
            self.native.layer_resident(layer, q, k, v, windows, scale, parts)
            observed = self._observe(layer, q, scale, parts, windows)
            accounts.lap(Part.RESIDENT)
            plan = self._policy.plan(layer, q, observed)
            accounts.lap(Part.PLAN)
            # What was looked at first has the token and its residents behind it.
            self._begin(layer, q, None, None, scale, plan, out=out)
        else:
            plan = self._policy.plan(layer, q, UNSEEN)
            accounts.lap(Part.PLAN)
            self._begin(layer, q, k, v, scale, plan, windows=windows, out=out)
        self.native.layer_finish()
        accounts.lap(Part.TASKS)
        self._policy.decoded(layer, q, out)
        accounts.layer(layer, self.native, plan.blk)
        accounts.lap(Part.PLAN)
        return out

    def looks(self, policies: Sequence[Policy] | None = None) -> bool:
        """Whether a step of requests with these policies plans by what the residents say; arguments of `begin_step`."""
        return self._looks(max((policy.needs for policy in policies or [self.policy]), default=Needs.NOTHING))

    def _looks(self, needs: Needs) -> bool:
        return self._guarded or needs is not Needs.NOTHING

    def serve(self, layer: int, sequence: int, mailbox: Mailbox, scale: float, timeout_s: float) -> bool:
        """Attention to the middle for a device that has published a layer of the current step: answered here.

        Args:
            sequence: the layer's slot in the mailbox: q, k, v, then parts (where the step `looks`) are the device's, o
                and lse are written.
            scale: multiplies q.k. timeout_s: how long to wait for the parts.

        Returns:
            False: the device has given up, and may not take the answer.

        Raises:
            MailboxError: there will be no parts. RuntimeError: a task failed; the message names the first failure.
            The layer is not answered then.
        """
        assert self._step is not None, "serve() before begin_step()"
        self.accounts.lap(Part.MODEL)
        slot = mailbox.slot(sequence, self._step.batch)
        q, middle = slot.q, (slot.o, slot.lse)
        if self._looks(self._needs):
            self.native.layer_append(layer, slot.k, slot.v)  # while the device attends to the residents
            mailbox.wait_observed(sequence, timeout_s)
            observed = self._observe(layer, q, scale, slot.parts, None)
            self.accounts.lap(Part.RESIDENT)
            plan = self._policy.plan(layer, q, observed)
            planned_ns = time.monotonic_ns()
            self.accounts.lap(Part.PLAN)
            self._begin(layer, q, None, None, scale, plan, middle=middle, parts=slot.parts)
        else:
            plan = self._policy.plan(layer, q, UNSEEN)
            planned_ns = time.monotonic_ns()
            self.accounts.lap(Part.PLAN)
            self._begin(layer, q, slot.k, slot.v, scale, plan, middle=middle)
        taken = mailbox.finish(self.native, sequence, planned_ns)
        self.accounts.lap(Part.TASKS)
        self._planned = plan.blk
        return taken

    def served(self, layer: int, sequence: int, mailbox: Mailbox, scale: float) -> None:
        """The layer that `serve` answered is done; its slot stays as it is until the next layer is answered."""
        assert self._step is not None, "served() before serve()"
        self._policy.decoded(layer, mailbox.slot(sequence, self._step.batch).q, None)
        self.accounts.layer(layer, self.native, self._planned)
        self.accounts.lap(Part.PLAN)

    def _begin(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        scale: float,
        plan: LayerPlan,
        *,
        windows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        middle: tuple[torch.Tensor, torch.Tensor] | None = None,
        parts: torch.Tensor | None = None,
    ) -> None:
        """Start a layer, and have the executors beside the workers do what they take of it."""
        assert self._step is not None
        value, owner = self.scheduler(plan, self._step, self._executor_ids)
        owner = self._owner if owner is None else owner
        self.native.layer_begin(
            layer, q, k, v, windows, plan.blk, plan.budget, value, scale, out, owner,
            plan.listed, plan.record, plan.given, plan.stop, plan.spread, middle, parts,
        )  # fmt: skip
        work = LayerWork(self.native, self._step, self._page_table, plan, layer, q, scale)
        try:
            for executor in self.executors:
                executor.drain(work)
        except BaseException:
            # The pages and rows of this layer may be another request's soon: nothing more may be written to them.
            self.native.abandon()
            raise

    def _observe(
        self, layer: int, q: torch.Tensor, scale: float, parts: torch.Tensor, windows: torch.Tensor | None
    ) -> Observed:
        """What the policies need to know of a layer whose token was taken in and whose residents were attended to."""
        step, placement = self._step, self.pool.placement
        assert step is not None
        features = budgets = None
        if any(self._anchored):
            rows, lengths = step.rows.tolist(), step.seq_lens.tolist()
            self.anchors.refresh(layer, rows, lengths, self._page_table, q, scale, self._anchored)
            features = torch.empty(step.batch, self.q_heads, COUNT)
            decode_features(
                q,
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
                scale,
                features,
            )
        if self._needs is Needs.BUDGETS:
            budgets = torch.zeros(step.batch, self.q_heads, 5)
            for i, policy in enumerate(self._policies):
                if policy.needs is Needs.BUDGETS:
                    length = step.seq_lens[i : i + 1]
                    found = measure(
                        self.pool.native,
                        layer,
                        self._page_table[i],
                        length,
                        q[i : i + 1],
                        scale,
                        placement.window,
                        [policy.criterion],
                    )
                    budgets[i] = found.budgets[0, :, 0]
        return Observed(features, budgets, scale, parts, windows)

    def stats(self) -> dict[str, int]:
        """Cumulative counts of what decoding did (`NativeEngine.stats`), and of what its executors count besides."""
        stats = self.native.stats()
        for executor in self.executors:
            stats |= executor.stats()
        return stats
