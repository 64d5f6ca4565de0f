"""The interface of a policy, which decides what attention reads.

For every KV group of every request in a layer, a policy decides the block size, each head's budget, and the priority
of the task. It neither selects pages nor computes attention. Budgets are fractions of the middle, so a policy needs no
knowledge of pages; executors turn budgets into selections of pages. Other selections need an own `TaskKind`.

Most policies are functions of a single step. A policy with state keys it by the row of SGLang's request table, bounds
it, and must handle four facts:
- A row's tokens are prefilled in chunks (`prefilled`) and decoded one by one (`plan`, `decoded`).
- `released` makes all state of a row void: the row has another request, or a request that came without a prefill.
- A row that the policy has never seen may decode.
- A row may gain tokens between two steps that the policy did not see.
Missing or outdated state is therefore rebuilt from the current step and is never an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, Self

import torch

from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import Workers
from fluxion_sglang.predictor.criterion import Criterion

if TYPE_CHECKING:
    from fluxion_sglang.predictor.artifact import LoadedPredictor

SKETCHED: Final = -3
"""The block size of a group whose tokens are selected by sketches of their keys (`policy/sketch.py`)."""

TOLD: Final = 32
"""Number of last queries of a prefill chunk that policies receive."""


@dataclass(frozen=True)
class World:
    """The parts of the engine that a stateful policy may use.

    Attributes:
        pool: holds every token of every request.
        windows: hold the residents, on the CPU or on a device (`Observed.windows`).
        q_heads: query heads of this process.
        rows: number of rows of SGLang's request table. A request's state belongs to one row.
    """

    pool: HostPool
    windows: Windows
    q_heads: int
    rows: int


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of a batch of B requests; all tensors on the CPU.

    Attributes:
        rows: [B] int32, rows of the request table; each names a device window.
        seq_lens: [B] int32, tokens of each request, including this step's.
        middle: [B] int32, tokens of each request's middle.
        kv_heads: KV heads of this process. q_heads: query heads of this process.
        workers: threads that a policy may plan with; they are idle between `begin_step` and a plan's execution.
        page_table: [B, M] int32, physical page of every logical page; valid for this step only.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    middle: torch.Tensor
    kv_heads: int
    q_heads: int
    workers: Workers | None = None
    page_table: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        placement: Placement,
        kv_heads: int,
        q_heads: int,
        workers: Workers | None = None,
        page_table: torch.Tensor | None = None,
    ) -> DecodeStep:
        middle = torch.tensor([placement.middle(int(n)) for n in seq_lens], dtype=torch.int32)
        return cls(rows.to(torch.int32), seq_lens.to(torch.int32), middle, kv_heads, q_heads, workers, page_table)

    @property
    def batch(self) -> int:
        return self.rows.numel()


class TaskKind(ABC):
    """How some tasks of a plan are executed, with their parameters. Its native side is `csrc/engine/task_kind.h`.

    An object belongs to the plans of one step.
    """

    @cached_property
    @abstractmethod
    def handle(self) -> object:
        """The native object of this kind."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, Self | None]], step: tuple[int, int]) -> Self:
        """Join the kinds of several policies, each of which plans part of a batch.

        Args:
            parts: for each policy, the indices of its requests, and its plan's object of this class or None.
            step: (requests, KV heads) of the batch.
        """


@dataclass(frozen=True)
class LayerPlan:
    """What a layer reads; contiguous CPU tensors.

    Attributes:
        blk: [B, H] int32, block size of each group in tokens (16, 32, 64 or 128). 0: no task. `kinds` may define more.
        budget: [B, Hq] float32, fraction of the middle's tokens that each head reads. >= 1 reads everything; 0 is a
            streaming head.
        value: [B, H] float32, the task's priority; larger runs earlier.
        kinds: handle the tasks that are not done by blocks. The first kind that accepts a group executes it.
    """

    blk: torch.Tensor
    budget: torch.Tensor
    value: torch.Tensor
    kinds: tuple[TaskKind, ...] = ()


def unplanned(step: DecodeStep) -> LayerPlan:
    """An uninitialized plan for a layer of the step; the caller fills all of it."""
    return LayerPlan(
        torch.empty(step.batch, step.kv_heads, dtype=torch.int32),
        torch.empty(step.batch, step.q_heads),
        torch.empty(step.batch, step.kv_heads),
    )


def task_value(middle: torch.Tensor, blk: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Work of each task in tokens: V(blk) = 2 L / blk + 2 L * sum_h bgt_h (Fluxion, section 6).

    Args:
        middle: [B] tokens of the middle, L. blk: [B, H]. budget: [B, Hq], clipped at 1 here.

    Returns:
        [B, H] float32.
    """
    tokens = middle.to(torch.float32).unsqueeze(1)
    per_group = budget.clamp(max=1.0).view(*blk.shape, -1).sum(-1)
    return 2 * tokens / blk.clamp(min=1) + 2 * tokens * per_group


class Needs(IntEnum):
    """What a policy must observe of a layer before it plans."""

    NOTHING = 0
    RESIDENTS = 1
    """The step's token is in the pool, and attention to the residents is computed."""
    FEATURES = 2
    """The 41 features of every head. They depend on the anchor query and on attention to sinks and window."""


@dataclass(frozen=True)
class Observed:
    """What is known of a layer's heads before it is planned, for a batch of B requests.

    Rows of requests whose policy does not need a part are undefined.

    Attributes:
        features: [B, Hq, 41] float32 (`predictor/features.py`); None unless a policy needs them.
        scale: multiplies q.k; None unless a policy needs the residents.
        parts: [B, Hq, 5] float32, attention to the residents (`predictor/features.py`, PARTS): log-sum-exp of the sinks
            and of the window with the step's token, and three norms. None unless a policy needs the residents.
        windows: the layer's windows (`Windows`) if they are on the CPU; None if a device holds them. In both cases the
            host pool has the residents, including this step's token.
    """

    features: torch.Tensor | None = None
    scale: float | None = None
    parts: torch.Tensor | None = None
    windows: torch.Tensor | None = None


UNSEEN = Observed()


def _no_predictor(tau: float | None) -> LoadedPredictor:
    raise ValueError(
        'policy "fluxion" needs a predictor that was trained for this model, and none is loaded; train one with '
        '`fluxion train`, name it in the option predictor, or use "full", which is exact.'
    )


@dataclass(frozen=True)
class Context:
    """What a policy spec needs beside its own arguments.

    Attributes:
        predictor: returns the predictor for a tau, or the default one for None; raises ValueError if there is none.
    """

    predictor: Callable[[float | None], LoadedPredictor] = _no_predictor


def policy_name(policy: Policy) -> str:
    """The policy's label in metrics: the first word of its spec."""
    return policy.spec.partition(":")[0] or type(policy).__name__


class Policy(ABC):
    """Decides what each KV group reads in each layer of a decode step.

    Attributes:
        forms: its specs for error messages: NAME and arguments, optional ones in brackets.
        spec: the string that it was parsed from; "" if there is none.
        needs: what `plan` must observe.
        criterion: the error criterion of the budgets among the features.
        yardstick: it reads every key to decide. It is for measurements, not for serving.
        predicts: `from_spec` asks for a predictor.
        exact: its decode steps compute full attention, so any other request may reuse the KV of its tokens.
        sketches: it needs a host pool with sketches of keys.
        world: the engine that it is bound to.
    """

    forms: ClassVar[tuple[str, ...]] = ()
    spec: str = ""
    needs: Needs = Needs.NOTHING
    criterion: Criterion = Criterion()
    yardstick: bool = False
    predicts: bool = False
    exact: bool = False
    sketches: bool = False
    world: World | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        """Build the policy of a spec whose arguments are `words`.

        The default calls the class with the words. A subclass therefore need not know the arguments of its bases.

        Raises:
            NotLegal: the words are no arguments of this policy.
            ValueError: one sentence: what the policy lacks or what is wrong.
        """
        return cls(*words)

    def bind(self, world: World) -> None:
        """Called by an engine before anything else. Another engine binds the policy again; its state starts anew."""
        self.world = world

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:  # noqa: B027
        """A chunk of the request in `row` was prefilled; all its `length` tokens so far are in the host pool.

        Args:
            queries: [m, Hq, D], queries of the last m tokens; m is `TOLD`, or less for a shorter chunk.
        """

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:  # noqa: B027
        """`layer` of the current step is done.

        Args:
            q: the queries that `plan` received. out: [B, Hq, D], the output of attention; None if a device merges it.
        """

    def released(self, row: int) -> None:  # noqa: B027
        """Drop the state of `row`: its request has ended, or the row has another request, or one without a prefill."""

    @property
    def steady(self) -> bool:
        """Whether `plan` returns one object for all layers of a step, independent of what it observes, and `decoded`
        does nothing. Then a step plans once, and its layers run without Python between them."""
        return False

    @property
    def uniform(self) -> tuple[int, float] | None:
        """(blk, budget) if every head of every layer and step reads the fraction `budget` in blocks of `blk` tokens. A
        device that holds the metadata may then select in the policy's place. None: call `plan`."""
        return None

    @abstractmethod
    def begin_step(self, step: DecodeStep) -> None:
        """Begin a new step; called once before its layers."""

    @abstractmethod
    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        """Plan `layer` of the current step. q: [B, Hq, D] on the CPU. `observed` is valid until `decoded`.

        An engine reuses its work for a plan object that it has seen. A plan with other contents must be another object.
        """
