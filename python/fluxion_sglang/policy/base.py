"""What to read: the interface of a policy.

A policy decides, for every group of every request in a layer, the block size, each head's budget, and the priority of
the task; it neither selects pages nor computes attention. Budgets are fractions of the middle, so a policy needs no
knowledge of pages; executors turn them into selections, the one currency between the two sides. A policy that chooses
otherwise brings a kind of task of its own (`TaskKind`).

Most policies are functions of a step. One that remembers keeps its state by the row of SGLang's request table, and
bounds it. It must do with four facts: a row's tokens are prefilled in chunks (`prefilled`) and decoded one by one
(`plan`, `decoded`); when the row has another request, or one that came without a prefill, all it had is void
(`released`); a row may decode that it has never heard of; and between two of its steps a row may gain tokens that it
did not see. So state that is missing or behind is made anew from the step at hand, never an error.
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
"""The block size of a group that reads what sketches of all keys say (`policy/sketch.py`)."""

TOLD: Final = 32
"""Tokens at a chunk's end whose queries policies get."""


@dataclass(frozen=True)
class World:
    """What a policy with state may use of the engine that it serves.

    Attributes:
        pool: holds every token of every request.
        windows: hold the residents, on the CPU or on a device (`Observed.windows`).
        q_heads: query heads of this process.
        rows: rows of SGLang's request table: state of a request belongs to one of them.
    """

    pool: HostPool
    windows: Windows
    q_heads: int
    rows: int


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of a batch of B requests; all tensors on the CPU.

    Attributes:
        rows: [B] int32, request rows (they name the device window).
        seq_lens: [B] int32, tokens of each request, this step's included.
        middle: [B] int32, tokens of each request's middle.
        kv_heads: KV heads of this process; q_heads: query heads of this process.
        workers: threads that a policy may plan with; they are idle between `begin_step` and a plan's execution.
        page_table: [B, M] int32, physical page of every logical page; of this step alone.
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
    """How some tasks of a plan are done, and what the plan says of them. Its native side is `csrc/engine/task_kind.h`.

    An object belongs to the plans of one step.
    """

    @cached_property
    @abstractmethod
    def handle(self) -> object:
        """What the native library knows it by."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, Self | None]], step: tuple[int, int]) -> Self:
        """One kind for a batch, of policies that plan parts of it.

        Args:
            parts: of each policy the indices of its requests, and its plan's kind of this class, if it has one.
            step: requests and KV heads of the batch.
        """


@dataclass(frozen=True)
class LayerPlan:
    """What a layer reads; contiguous CPU tensors.

    Attributes:
        blk: [B, H] int32, block size of each group in tokens (16, 32, 64 or 128); 0 makes no task; other numbers mean
            what a kind of `kinds` says.
        budget: [B, Hq] float32, fraction of the middle's tokens that each head reads; >= 1 is everything, 0 a
            streaming head.
        value: [B, H] float32, the task's priority: larger runs earlier.
        kinds: how tasks are done that are not done by blocks. The first that takes a group has it.
    """

    blk: torch.Tensor
    budget: torch.Tensor
    value: torch.Tensor
    kinds: tuple[TaskKind, ...] = ()


def unplanned(step: DecodeStep) -> LayerPlan:
    """Room for a plan of a layer of the step, to be written whole."""
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
    """What a policy has to see of a layer before it plans."""

    NOTHING = 0
    RESIDENTS = 1
    """That the step's token is in the pool, and the residents are attended to."""
    FEATURES = 2
    """The 41 features of every head, which rest on the anchor query and on attention to sinks and window."""


@dataclass(frozen=True)
class Observed:
    """What is known of a layer's heads before it is planned, for a batch of B requests.

    Rows of requests whose policy does not need a part hold anything.

    Attributes:
        features: [B, Hq, 41] float32 (`predictor/features.py`); None unless a policy needs them.
        scale: multiplies q.k; None unless a policy needs the residents.
        parts: [B, Hq, 5] float32, attention to the residents (`predictor/features.py`, PARTS): LSE of the sinks and of
            the window with the step's token, and three norms; None unless a policy needs the residents.
        windows: the layer's windows (`Windows`) where they are the CPU's; None where they are a device's. The host pool
            has the residents, this step's token included, in either case.
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
    """What specs refer to beside their own arguments.

    Attributes:
        predictor: the predictor for a tau, or its default one for None; raises ValueError where there is none.
    """

    predictor: Callable[[float | None], LoadedPredictor] = _no_predictor


def policy_name(policy: Policy) -> str:
    """What metrics call it: the first word of its spec."""
    return policy.spec.partition(":")[0] or type(policy).__name__


class Policy(ABC):
    """Decides what each group reads in each layer of a decode step.

    Attributes:
        forms: its specs, for errors: NAME and arguments, in brackets what may be left out.
        spec: the string that names it; "" when it was not made from one.
        needs: what `plan` has to be given.
        criterion: of the budgets in what it is given.
        yardstick: it reads every key to decide: to measure by, not to serve with.
        predicts: `from_spec` asks for a predictor.
        exact: what it decodes is full attention, so that every other request may build on the KV of its tokens.
        sketches: it needs a host pool with sketches of keys.
        world: what it was bound to.
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
        """The policy of a spec, `words` being what follows its name.

        A class that does not define this itself is called with the words: it need not know what its bases take.

        Raises:
            NotLegal: these are no arguments of the policy. ValueError: one sentence, what it lacks or what is wrong.
        """
        return cls(*words)

    def bind(self, world: World) -> None:
        """Called by an engine before anything else; by another engine again, and then it starts anew."""
        self.world = world

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:  # noqa: B027
        """A chunk of the request in `row` was prefilled; all its `length` tokens so far are in the host pool.

        Args:
            queries: [m, Hq, D], those of the last m tokens: `TOLD`, or what the chunk has.
        """

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:  # noqa: B027
        """`layer` of the current step is done.

        Args:
            q: as `plan` had it. out: [B, Hq, D], the attention's output; None where a device merges it.
        """

    def released(self, row: int) -> None:  # noqa: B027
        """What is known of `row` is void: its request has ended, or it has another one, or one that came without a
        prefill."""

    @property
    def steady(self) -> bool:
        """Whether `plan` gives one object for all layers of a step, whatever it is told of them, and `decoded` does
        nothing. Then a step asks once, and its layers are computed without Python between them."""
        return False

    @property
    def uniform(self) -> tuple[int, float] | None:
        """(blk, budget), if every head of every layer of every step reads blocks of so many tokens, so large a share of
        them; then a device that has the metadata may choose in the policy's place. None: it depends, ask `plan`."""
        return None

    @abstractmethod
    def begin_step(self, step: DecodeStep) -> None:
        """A new step begins; called once before its layers."""

    @abstractmethod
    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        """What `layer` of the current step reads. q: [B, Hq, D] on the CPU; what is seen lasts until `decoded`.

        A plan that was given before is taken to say what it said then: one that says more is another object.
        """
