"""adaptive: begins exact, and trains its own predictor on the requests that it has answered.

Every request is read exactly at first, and on some of its steps the policy measures what each head would have needed
(`predictor/measure.py`). From enough of them it has a predictor trained (`learning/`), beside the server and at a
low priority. From then on a request that is like those (`learning/familiar.py`) reads what the predictor says, as
`fluxion` does. One that is not is read exactly and measured, so that its kind is known after a few; so is one whose
middle has outgrown what was measured. Some of the familiar ones are measured as well: what the predictor knows follows
the requests of the day.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.learning.learned import Learned
from fluxion_sglang.learning.learner import KEPT, MOST, Learner
from fluxion_sglang.learning.measured import Measured, anchor_of, layers_measured, most_bytes
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import (
    UNSEEN,
    Context,
    DecodeStep,
    LayerPlan,
    Needs,
    Observed,
    Policy,
    World,
    task_value,
)
from fluxion_sglang.policy.fluxion import FluxionPolicy
from fluxion_sglang.predictor.artifact import tau_key
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.features import COUNT
from fluxion_sglang.predictor.measure import measure

ONE_OF: Final = (8, 128)
"""Of so many familiar requests one is learnt from: until as many are kept as can be, and later."""

OUTGROWN: Final = 2.0
"""The longest middle that was measured, times this, is the longest that the predictor is asked about."""

TOKENS_A_STEP: Final = 1 << 16
"""Tokens of middles that a decode step measures at most, or one middle: everybody waits for it."""


class AdaptivePolicy(Policy):
    """See the module. What it has learned is one object's, of all requests that name it.

    Args:
        criterion: of what is measured, and so of what the predictor promises.
    """

    forms: ClassVar[tuple[str, ...]] = ("adaptive[:TAU]",)
    needs = Needs.FEATURES
    option_keys = frozenset({"tau", "learned"})
    prefill_rows = 1
    learns = True

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self.learner = Learner(criterion.limit)
        self._held = 0
        self._fluxion: FluxionPolicy | None = None
        self._learned: Learned | None = None
        self._requests: dict[int, _Request] = {}  # by row
        self._familiar = self._unfamiliar = 0  # requests that were, when their first step was over
        self._chosen = 0  # requests to learn from
        self._turn = 0

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 1)
        return cls(Criterion(Deviation.LAYER, arguments.fraction(words[0]) if words else context.tau))

    @property
    def same(self) -> str:
        return f"adaptive-{tau_key(self.criterion.limit)}"

    def bind(self, world: World) -> None:
        super().bind(world)
        self.learner = Learner(
            self.criterion.limit, None if world.keeps is None else world.keeps / f"{self.same}.safetensors"
        )
        self._requests = {}
        self._familiar = self._unfamiliar = self._chosen = 0
        self._held = self.holds(world)
        self._fluxion = self._learned = None
        if self.learner.learned is not None:
            self._adopt(self.learner.learned)

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        self.released(row)  # what comes has another anchor

    def released(self, row: int) -> None:
        request = self._requests.pop(row, None)
        if request is not None and (measured := request.measured()) is not None:
            self.learner.take(measured)

    def holds(self, world: World) -> int:
        return MOST * most_bytes(world.layers, world.q_heads)[1]

    def remembers(self, world: World, tokens: int) -> int:
        shape = world.pool.shape
        first = world.layers * world.q_heads * (shape.head_dim * shape.dtype.itemsize + COUNT * 4)
        return most_bytes(world.layers, world.q_heads)[0] + first + MOST * 4

    @property
    def state_bytes(self) -> int:
        return self._held + sum(request.nbytes for request in self._requests.values())

    @property
    def counts(self) -> Mapping[str, int]:
        return {
            "familiar_requests": self._familiar,
            "unfamiliar_requests": self._unfamiliar,
            "measured_requests": self._chosen,
            "trainings": self.learner.trainings,
            "failed_trainings": self.learner.failures,
        }

    def read_besides(self, row: int) -> int:
        request = self._requests.get(row)
        return 0 if request is None else request.looked

    def begin_step(self, step: DecodeStep) -> None:
        if (learned := self.learner.poll()) is not None:
            self._adopt(learned)
        self._step = step
        self._place = -1  # of the layer among those that are planned
        self._now = [
            self._requests.setdefault(row, _Request()) if middle else None
            for row, middle in zip(step.rows.tolist(), step.middle.tolist(), strict=True)
        ]
        left = TOKENS_A_STEP
        for place in range(step.batch):
            b = (place + self._turn) % step.batch  # whoever found no room is among the first soon
            if (request := self._now[b]) is not None:
                left = self._begin(request, int(step.middle[b]), left)
        self._turn += 1
        blk = torch.full((step.batch, step.kv_heads), BLOCKS[0], dtype=torch.int32)
        budget = torch.ones(step.batch, step.q_heads)
        self._whole = LayerPlan(blk, budget, task_value(step.middle, blk, budget))
        if self._fluxion is not None:
            self._fluxion.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert observed.features is not None and observed.scale is not None
        step = self._step
        self._place += 1
        for b, request in enumerate(self._now):
            if request is None:
                continue
            request.looked = 0
            if request.steps == 1 or request.measuring:
                seen = _Seen(layer, int(step.seq_lens[b]), q[b], observed.features[b], observed.scale)
                if request.steps == 1:
                    request.note(self._place, seen, self._learned)
                else:
                    for sample in request.to_measure(self._place, seen):
                        self._measure(request, b, sample)
        exact = [b for b, request in enumerate(self._now) if request is None or not request.trusted]
        if self._fluxion is None or len(exact) == len(self._now):
            return self._whole
        plan = self._fluxion.plan(layer, q, observed)
        for name in ("blk", "budget", "value") if exact else ():
            getattr(plan, name)[exact] = getattr(self._whole, name)[exact]
        return plan

    def _adopt(self, learned: Learned) -> None:
        """Requests that run are judged again by what is known now."""
        self._learned, self._fluxion = learned, FluxionPolicy(learned.predictor)
        for request in self._requests.values():
            request.judge(learned)

    def _begin(self, request: _Request, middle: int, left: int) -> int:
        """A step of it; of `left` tokens that the step may measure, returns those that remain.

        Once its first step is over, all of its anchor is known. Whether it is learnt from is decided then, and that
        step is measured with the second.
        """
        request.steps += 1
        request.outgrown = self._learned is not None and middle > OUTGROWN * self._learned.longest
        self._unfamiliar += request.steps == 2 and not request.familiar
        if request.steps == 2 and request.familiar:
            self._familiar += 1
            every = ONE_OF[len(self.learner) >= KEPT]
            if self._familiar % every == 0:
                self._learn_from(request)
        elif request.steps > 1 and not request.trusted and request.number is None:
            self._learn_from(request)
        wanted = middle * request.wants()
        room = wanted <= left or left == TOKENS_A_STEP
        request.begin(room)
        return left - wanted if room else left

    def _learn_from(self, request: _Request) -> None:
        request.learn_from(self._chosen)
        self._chosen += 1

    def _measure(self, request: _Request, b: int, seen: _Seen) -> None:
        """Of the step's request b."""
        step, world = self._step, self.world
        assert step.page_table is not None and world is not None
        length = torch.tensor([seen.length], dtype=torch.int32)
        found = measure(
            world.pool, seen.layer, step.page_table[b], length, seen.q.unsqueeze(0), seen.scale,
            world.pool.placement.window, [self.criterion],
        )  # fmt: skip
        request.take(seen.features.clone(), found.budgets[0, :, 0])
        # It goes over keys and values once, and over the values of the single tokens that a head needs once more.
        shape = world.pool.shape
        again = float(found.budgets[0, :, 0, 0].sum()) / (2 * shape.kv_heads)
        request.looked += round((1 + again) * int(step.middle[b]) * shape.token_bytes)


class _Seen(NamedTuple):
    """A layer of a step of a request: tokens with this one's, q [Hq, D], features [Hq, 41]."""

    layer: int
    length: int
    q: torch.Tensor
    features: torch.Tensor
    scale: float


class _Request:
    """What is known of a request that runs.

    Attributes:
        steps: that began. familiar: it is, by what is known. outgrown: its middle is longer than what was measured.
        number: None, or it is learnt from, as so many before it are.
        looked: bytes that it read for that in the layer at hand. nbytes: of what is kept of it.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.familiar = False
        self.outgrown = False
        self.number: int | None = None
        self._since = 1  # the step that is the first to be measured
        self.looked = 0
        self.nbytes = 0
        self._first: list[_Seen] = []  # layers of the first step, until the second
        self._anchor: list[torch.Tensor] = []  # of each of them [Hq * 28]
        self._distances: torch.Tensor | None = None
        self._measured: list[frozenset[int]] = []  # of the steps that this step measures, which layers
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def trusted(self) -> bool:
        """To the predictor."""
        return self.familiar and not self.outgrown

    def note(self, place: int, seen: _Seen, learned: Learned | None) -> None:
        """The next layer of the first step."""
        self._first.append(seen._replace(q=seen.q.clone(), features=seen.features.clone()))
        self._anchor.append(anchor_of(seen.features))
        self.nbytes += seen.q.nbytes + seen.features.nbytes + self._anchor[-1].nbytes
        if learned is not None:
            if self._distances is None:
                self._distances = learned.familiar.start()
            self.familiar = learned.familiar.add(place, self._anchor[place], self._distances)

    def judge(self, learned: Learned) -> None:
        """By another predictor than before."""
        self._distances = learned.familiar.start()
        for place, anchor in enumerate(self._anchor):
            self.familiar = learned.familiar.add(place, anchor, self._distances)

    def learn_from(self, number: int) -> None:
        """From this step on, or if it is the second, from the first."""
        self.number = number
        self._since = 1 if self.steps == 2 else self.steps

    def wants(self) -> int:
        """How many of its steps this one is to measure."""
        return len(self._wanted())

    def _wanted(self) -> list[frozenset[int]]:
        """Layers of those steps: of this one, and before it of the first with the second."""
        if self.number is None:
            return []
        steps = [0, 1] if self.steps == 2 else [self.steps - self._since]
        wanted = [layers_measured(step, self.number, len(self._anchor)) for step in steps]
        return [layers for layers in wanted if layers]

    def begin(self, room: bool) -> None:
        """Another step; room: it may measure what it wants."""
        self._measured = self._wanted() if room else []
        if self.steps > 2 or (self.steps == 2 and not self.measuring):
            self.nbytes -= sum(seen.q.nbytes + seen.features.nbytes for seen in self._first)
            self._first = []
        if self.steps > 1:
            self._distances = None

    def to_measure(self, place: int, seen: _Seen) -> list[_Seen]:
        """Of the next layer of this step."""
        first = self._first[place : place + 1] if self.steps == 2 else []
        return [one for one, layers in zip([*first, seen], self._measured, strict=False) if place in layers]

    @property
    def measuring(self) -> bool:
        """This step."""
        return bool(self._measured)

    def take(self, features: torch.Tensor, budgets: torch.Tensor) -> None:
        """What was measured of a layer: [Hq, 41] and [Hq, 5]."""
        self._samples.append((features, budgets))
        self.nbytes += features.nbytes + budgets.nbytes

    def measured(self) -> Measured | None:
        """None: nothing was."""
        if not self._samples:
            return None
        features, budgets = (torch.cat(parts) for parts in zip(*self._samples, strict=True))
        return Measured.of(torch.stack(self._anchor), features, budgets)
