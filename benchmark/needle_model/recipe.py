"""Training recipes of the bundled model, stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .data import Mix
from .model import Shape


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training steps with common settings.

    Attributes:
        shapes: (sequences, tokens) of a step's batch, in turn.
        mix: distribution of the sequences; several ones take turns.
        rate: factor of the step size at the first step and after the last, linear in between.
        penalty: weight of the pressure on heads to work without the middle.
        counted: weight of the loss on counted words, which are rare; symbols of facts have 1.
        probes: positions per sequence at which the two pressures are measured.
        rest: weight of the pressure on heads to contribute little.
        opening: weight of the loss on the first symbol of an answer that repeats its question.
        anew: the stage starts from exported weights in bf16, without momentum.
    """

    steps: int
    shapes: tuple[tuple[int, int], ...]
    mix: Mix | tuple[Mix, ...]
    penalty: float = 0.0
    rest: float = 0.0
    opening: float = 0.5
    anew: bool = False
    probes: int = 12
    counted: float = 1.0
    rate: tuple[float, float] = (1.0, 1.0)

    def at(self, number: int) -> tuple[int, int, Mix]:
        """Number of sequences, tokens of each, and mix of step `number` of the stage."""
        size, length = self.shapes[number % len(self.shapes)]
        return size, length, self.mix if isinstance(self.mix, Mix) else self.mix[number % len(self.mix)]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A whole training run.

    Attributes:
        lr: Muon's step size for matrices; rest_lr: AdamW's for embeddings and norms.
        warmup: steps until the step size is reached.
        word: weight of the loss on essay words; answers have 1.
        tau: error at which a head counts as half dependent on the middle.
        shape: shape of the model.
    """

    stages: tuple[Stage, ...]
    lr: float = 4e-3
    rest_lr: float = 6e-3
    weight_decay: float = 0.02
    warmup: int = 50
    word: float = 0.1
    tau: float = 0.1
    seed: int = 0
    shape: Shape = dataclasses.field(default_factory=Shape)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def places(self) -> Iterator[tuple[int, Stage, int]]:
        """Every step: its index in the run, its stage, and its index in the stage."""
        step = 0
        for stage in self.stages:
            for number in range(stage.steps):
                yield step, stage, number
                step += 1

    def scaled(self, times: int, share: float = 1.0) -> Recipe:
        """The recipe with `times` as many sequences per step, and a share `share` of each stage's steps."""

        def of(stage: Stage) -> Stage:
            shapes = tuple((size * times, length) for size, length in stage.shapes)
            return dataclasses.replace(stage, shapes=shapes, steps=max(1, round(stage.steps * share)))

        return dataclasses.replace(self, stages=tuple(map(of, self.stages)))

    def rate(self, step: int, stage: Stage, number: int) -> float:
        """Factor of the step size at step `number` of the stage, which is step `step` of the run."""
        first, last = stage.rate
        return min(1.0, (step + 1) / self.warmup) * (first + (last - first) * number / stage.steps)


_CHAINS = (3.0, 0.8, 1.5, 1.6)
_MANY_CHAINS = Mix(dense=0.65, counting=0.25, pose=0.2, families=(1.5, 0.5, 2.0, 5.0), rare=4, wide=0.0)
_SHORT = (16, 256)
_SHORTER = (32, 128)
_TINY = (64, 64)
_MIDDLE = ((4, 1024), _SHORT, (8, 512))
# Lists of words only: counting needs as many questions as facts.
_LISTS = Mix(dense=0.0, counting=1.0, pose=0.5, rare=2, skips=True)
_ALL = (2.0, 1.0, 2.5, 1.6)
_NEAR = Mix(dense=0.2, counting=0.3, pose=0.6, families=_ALL, rare=5, wide=0.15, skips=True, many=8)
_FAR = dataclasses.replace(_NEAR, dense=0.1, rare=20, many=12, wide=0.2)
_DENSE = Mix(dense=0.7, counting=0.3, pose=0.3, families=_ALL, rare=3, wide=0.1, skips=True)
_VALUES = Mix(dense=0.8, counting=0.2, pose=0.4, families=(1.0, 0.6, 4.0, 1.0), rare=3, wide=0.1, skips=True)
_PACKED = Mix(
    dense=0.05,
    counting=0.25,
    pose=0.5,
    families=(2.0, 1.2, 2.5, 1.2),
    rare=30,
    many=12,
    wide=0.25,
    packed=0.5,
    skips=True,
)
# Order of a key's values: repeatedly the next greater one.
_ORDER = Mix(
    dense=0.8,
    counting=0.0,
    pose=0.4,
    families=(0.6, 0.4, 5.0, 0.5),
    wide=0.05,
    skips=True,
    terse=0.4,
    values=6,
)
_LONE = Mix(
    dense=0.0,
    counting=0.15,
    pose=0.5,
    families=(0.6, 2.0, 1.0, 2.0),
    rare=30,
    many=5,
    wide=0.05,
    packed=0.1,
    skips=True,
    lone=1.0,
)
_LAST = Mix(dense=0.3, counting=0.3, pose=0.6, families=(1.0, 1.2, 3.5, 1.0), rare=20, many=8, wide=0.1, skips=True)
_ASKED = dataclasses.replace(_LONE, counting=0.1, families=(1.0, 3.0, 0.8, 2.0), long=0.35)
_QUERIES = dataclasses.replace(_LONE, counting=0.1, families=(0.2, 5.0, 0.2, 0.4), wide=0.0, packed=0.0)
_ASKED_SHAPES = ((1, 8192), _SHORT, (1, 8192), _TINY, (1, 8192), (1, 4096), (1, 8192), (8, 512))
_ASKED_MIXES = (_ASKED, _ORDER, _ASKED, _LISTS, _LONE, _LAST, _PACKED, _ORDER)

RECIPES = {
    # The model discovers retrieval in short, dense sequences with few keys (facts after about 2.3 million tokens).
    # Later stages extend it to more keys, to haystacks, and to distance. Chains and counting have stages of their own.
    "bundled": Recipe(
        (
            Stage(
                600,
                (_SHORTER,),
                Mix(dense=1.0, counting=0.0, pose=0.0, keys=16, families=(3.0, 0.8, 0.8, 0.8), wide=0.0),
            ),
            Stage(
                300,
                (_SHORT, _SHORTER, _TINY),
                Mix(dense=0.4, counting=0.4, pose=0.3, families=_CHAINS, rare=2, wide=0.05),
            ),
            Stage(150, _MIDDLE, Mix(dense=0.25, counting=0.4, pose=0.6, families=_CHAINS, rare=5, wide=0.1)),
            Stage(250, (_SHORT, _SHORTER), _MANY_CHAINS),
            Stage(
                150, _MIDDLE, Mix(dense=0.3, counting=0.35, pose=0.6, families=(2.0, 0.8, 1.5, 2.5), rare=5, wide=0.1)
            ),
            # Questions may start a chain from one of its variables (midway), which is looked up like the value.
            Stage(
                200,
                (_SHORT, _SHORTER),
                dataclasses.replace(_MANY_CHAINS, families=(1.5, 0.5, 2.0, 4.0), midway=0.6, skips=True),
            ),
            Stage(
                250,
                (_SHORTER, _TINY),
                (Mix(dense=1.0, counting=0.0, pose=0.2, families=(1.5, 0.3, 2.5, 5.0), wide=0.0, midway=0.6), _LISTS),
            ),
            Stage(300, ((4, 1024), _TINY, (8, 512), _SHORTER), (_NEAR, _LISTS, _NEAR, _DENSE), rate=(1.0, 0.8)),
            # All skills exist by now; from here on, heads are pressed to work without the middle.
            Stage(
                600,
                ((2, 2048), _TINY, (4, 1024), _SHORT, (1, 4096), _SHORTER),
                (_NEAR, _LISTS, _NEAR, _DENSE, _FAR, _DENSE),
                penalty=0.1,
                rest=0.05,
                probes=24,
                rate=(0.8, 0.5),
            ),
            Stage(
                250,
                ((1, 4096), _TINY, (2, 2048), _SHORT, (1, 8192), _SHORTER, (4, 1024), (8, 512)),
                (_PACKED, _LISTS, _PACKED, _VALUES, _PACKED, _VALUES, _NEAR, _VALUES),
                penalty=0.15,
                rest=0.03,
                probes=24,
                rate=(0.5, 0.5 - 0.35 * 250 / 1300),
            ),
            Stage(
                1000,
                ((1, 4096), _TINY, _SHORT, (2, 2048), _SHORTER, (8, 512), (1, 8192), _SHORT, _TINY, (4, 1024)),
                (_PACKED, _LISTS, _ORDER, _PACKED, _ORDER, _ORDER, _PACKED, _ORDER, _LISTS, _NEAR),
                penalty=0.15,
                rest=0.03,
                probes=24,
                rate=(0.45, 0.12),
            ),
            Stage(
                650,
                ((1, 8192), _SHORT, (2, 2048), _TINY, (1, 4096), (4, 1024), (1, 4096), (8, 512)),
                (_PACKED, _ORDER, _PACKED, _LISTS, _PACKED, _LAST, _PACKED, _ORDER),
                penalty=0.15,
                rest=0.02,
                probes=24,
                rate=(0.12, 0.005),
            ),
            # A lone question after many words does not ask to count them.
            Stage(
                200,
                ((1, 8192), (4, 1024), (2, 2048), _SHORT, (1, 4096), _TINY),
                (_LONE, _LONE, _LONE, _ORDER, _LONE, _LISTS),
                penalty=0.15,
                rest=0.02,
                probes=24,
                rate=(0.12, 0.005),
            ),
            # Starts from the exported weights and trains more on the worst answers.
            Stage(
                32,
                _ASKED_SHAPES,
                _ASKED_MIXES,
                penalty=0.15,
                rest=0.02,
                opening=3.0,
                probes=24,
                rate=(0.02, 0.14),
                anew=True,
            ),
            Stage(
                232,
                _ASKED_SHAPES,
                _ASKED_MIXES,
                penalty=0.15,
                rest=0.02,
                opening=3.0,
                probes=24,
                rate=(0.14, 0.004),
            ),
            # Several keys in one question at the end of 8K of words.
            Stage(
                96,
                ((1, 8192), (1, 8192), _SHORT, (1, 8192), (1, 8192), _TINY),
                (_QUERIES, _QUERIES, _ORDER, _QUERIES, _ASKED, _LISTS),
                penalty=0.15,
                rest=0.02,
                opening=6.0,
                probes=24,
                rate=(0.1, 0.004),
            ),
        ),
    ),
    # A few steps of every stage, for tests.
    "smoke": Recipe(
        (
            Stage(3, ((2, 64),), Mix(dense=1.0, counting=0.0, pose=0.0, keys=16)),
            Stage(3, ((1, 768), (2, 128)), Mix(dense=0.3, counting=0.3, pose=0.6), penalty=0.2, rest=0.1),
        ),
        warmup=2,
    ),
}


def _second() -> Recipe:
    """A model of another shape. Its heads are pressed half as hard, so more of them need the middle, and more of it.

    It also learns more of the language's words. With more heads it discovers retrieval sooner, so fewer steps suffice.
    """
    recipe = RECIPES["bundled"]
    steps = (360, 300, 150, 250, 150, 200, 250, 300, 210, 88, 350, 228, 70, 12, 82, 34)
    stages = (
        dataclasses.replace(stage, steps=count, penalty=stage.penalty / 2, rest=stage.rest / 2, anew=False)
        for stage, count in zip(recipe.stages, steps, strict=True)
    )
    return dataclasses.replace(recipe, stages=tuple(stages), word=0.2, seed=17, shape=Shape(layers=5, heads=16))


RECIPES["second"] = _second()
