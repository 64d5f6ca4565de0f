"""What to read. `parse_spec` turns a spec string (`--fluxion-config`, a request, the benchmarks) into a policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.lab.hgca import HgcaPolicy
from fluxion_sglang.lab.labels import LabelsPolicy
from fluxion_sglang.lab.lfps import LfpsPolicy
from fluxion_sglang.lab.lfps_tables import LfpsOptions
from fluxion_sglang.lab.oracle import OraclePolicy
from fluxion_sglang.lab.psa import DEFAULT_BLK, DEFAULT_EPSILON, MEAN, SCORES, PsaPolicy
from fluxion_sglang.policy.anchor import AnchorPolicy
from fluxion_sglang.policy.base import Criterion, DecodeStep, Deviation, LayerPlan, Needs, Observed, Policy
from fluxion_sglang.policy.fixed import FixedPolicy
from fluxion_sglang.policy.fluxion import FluxionPolicy
from fluxion_sglang.policy.selector import DYNAMIC, Choice
from fluxion_sglang.policy.streaming import StreamingPolicy

if TYPE_CHECKING:
    from fluxion_sglang.predictor.artifact import LoadedPredictor

__all__ = [
    "AUTO",
    "BARE",
    "LONGEST",
    "DecodeStep",
    "LayerPlan",
    "Needs",
    "Observed",
    "Policy",
    "Context",
    "PLUGINS",
    "check_spec",
    "examples",
    "parse_spec",
    "FixedPolicy",
    "OraclePolicy",
    "StreamingPolicy",
]

AUTO: Final = "auto"
"""The spec that a server resolves at its start: `fluxion` where a predictor fits, `full` where none does."""

LONGEST: Final = 128
"""Characters of a spec. Specs come from clients: splitting a long one would hold up every request."""

PLUGINS: Final = "fluxion_policies"
"""Entry points of this group are policies of other packages: NAME[:ARG...] gives its class these strings."""

_LEGAL = (
    '"full", "streaming", "fixed:BLK:BUDGET", "oracle:BUDGET", "fluxion", "anchor", "labels" (each of the three also '
    'as NAME:TAU and NAME:TAU:BLK[:all], BLK also any), "score95", "output10", "labels:score95", "labels:output10", '
    '"hgca[:BETA[:ALPHA]]", "psa[:EPS[:BLK[:quest|mean]]]" or "lfps[:BUDGET[:ALPHA:ALPHA]]" (BLK 16, 32, 64 or 128 '
    "tokens; BUDGET, TAU, EPS and the ALPHA of lfps fractions in (0, 1], as in fixed:16:0.05 and anchor:0.10; BETA at "
    "least 0, the ALPHA of hgca from 0 to 1)"
)
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A decimal number. float alone would let through underscores, blanks, and other scripts' digits."""
_LARGEST: Final = torch.finfo(torch.float32).max
_SHOWN = 60
"""Characters of a wrong spec that its error repeats: it may come from a client."""

_ANY = "any"
_ABLATIONS = {
    "score95": Criterion(Deviation.COVERAGE, 0.95),
    "output10": Criterion(Deviation.HEAD, 0.10),
}
"""The criteria of the paper's ablation (Fluxion, section 8.3)."""


def _no_predictor(tau: float | None) -> LoadedPredictor:
    raise ValueError(
        'policy "fluxion" needs a predictor that was trained for this model, and none is loaded; train one with '
        '`fluxion train`, name it in the option predictor, or use "full", which is exact.'
    )


@dataclass(frozen=True)
class Context:
    """What specs refer to beside their own arguments.

    Attributes:
        tau: of specs that name none.
        predictor: the predictor for a tau, or its default one for None; raises ValueError where there is none.
    """

    tau: float = 0.10
    predictor: Callable[[float | None], LoadedPredictor] = _no_predictor


BARE: Final = Context()
"""A context without a predictor."""

Build = Callable[[Context], Policy]


def check_spec(spec: str) -> None:
    """Raises ValueError, one sentence naming the legal specs, for a string that is none; needs no predictor."""
    _build(spec)


def parse_spec(spec: str, context: Context = BARE) -> Policy:
    """Build the policy that `spec` names; its `spec` is that string.

    Raises:
        ValueError: one sentence naming the legal specs, or what the policy lacks.
    """
    policy = _build(spec)(context)
    policy.spec = spec
    return policy


def examples() -> list[str]:
    """A legal spec of every policy that this package has, as errors name them, with arguments of one kind."""
    forms = []
    for form in re.findall(r'"(\w[\w:|\[\]]*)"', _LEGAL):
        while "[" in form:  # what may be left out
            form = re.sub(r"\[[^\[\]]*\]", "", form)
        forms.append(re.sub("BUDGET|TAU|EPS", "0.10", form.replace("BLK", "16")))
    return forms


def _build(spec: str) -> Build:
    build = None
    if len(spec) <= LONGEST:
        build = _named(*spec.split(":")) or _plugin(*spec.split(":"))
    if build is None:
        shown = spec if len(spec) <= _SHOWN else spec[:_SHOWN] + "..."
        raise ValueError(f"policy {shown!r} is not one that this version knows; use {_LEGAL}.")
    return build


def _named(name: str, *args: str) -> Build | None:
    match name, *args:
        case ("full",):
            # Everything is the whole middle at any block size; the executors skip the scan at budget 1.
            return lambda _: FixedPolicy(BLOCKS[0], 1.0)
        case ("streaming",):
            return lambda _: StreamingPolicy()
        case "fixed", blk, budget:
            if blk not in map(str, BLOCKS):
                return None
            return _given(_fraction(budget), lambda share, _: FixedPolicy(int(blk), share))
        case "oracle", budget:
            return _given(_fraction(budget), lambda share, _: OraclePolicy(share))
        case ("lfps",):
            return lambda _: LfpsPolicy(0.05)
        case "lfps", budget:
            return _given(_fraction(budget), lambda share, _: LfpsPolicy(share))
        case "lfps", budget, vertical, slash:
            alphas = _fraction(vertical), _fraction(slash)
            if alphas[0] is not None and alphas[1] is not None:
                options = LfpsOptions(alphas[0], alphas[1])
                return _given(_fraction(budget), lambda share, _: LfpsPolicy(share, options))
        case "psa", *options:
            return _psa(*options)
        case (("score95" | "output10") as ablation,):
            return lambda _: AnchorPolicy(_ABLATIONS[ablation])
        case "labels", ("score95" | "output10") as ablation:
            return lambda _: LabelsPolicy(_ABLATIONS[ablation])
        case (("fluxion" | "anchor" | "labels") as name,):
            return lambda context: _by_tau(name, context, None)
        case ("fluxion" | "anchor" | "labels") as name, tau, *chosen:
            choice = _choice(*chosen)
            if choice is not None:
                return _given(_fraction(tau), lambda limit, context: _by_tau(name, context, limit, choice))
        case ("hgca",):
            return lambda _: HgcaPolicy()
        case "hgca", beta:
            return _given(_number(beta), lambda share, _: HgcaPolicy(share))
        case "hgca", beta, alpha:
            above, newest = _number(beta), _number(alpha, 1.0)
            return None if above is None or newest is None else lambda _: HgcaPolicy(above, newest)
    return None


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Policies of other packages by name. Looked for once: specs come from clients, too."""
    return {point.name: point for point in entry_points(group=PLUGINS)}


def _plugin(name: str, *args: str) -> Build | None:
    """A policy of another package; made here, too, because only its class knows which arguments are legal."""
    point = _plugins().get(name)
    if point is None:
        return None

    def build(_: Context = BARE) -> Policy:
        try:
            policy = point.load()(*args)
        except Exception as error:  # the sentence of a ValueError is its own
            if isinstance(error, ValueError):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"policy {name!r} ({point.value}) cannot be made with {list(args)} ({type(error).__name__}: {reason}); "
                "see what its package says."
            ) from error
        if not isinstance(policy, Policy):
            raise ValueError(
                f"policy {name!r} ({point.value}) makes no fluxion_sglang.policy.Policy; mend its package."
            )
        return policy

    build()
    return build


def _given(fraction: float | None, build: Callable[[float, Context], Policy]) -> Build | None:
    return None if fraction is None else partial(build, fraction)


def _by_tau(name: str, context: Context, tau: float | None, choice: Choice = DYNAMIC) -> Policy:
    if name == "fluxion":
        return FluxionPolicy(context.predictor(tau), choice)
    criterion = Criterion(Deviation.LAYER, context.tau if tau is None else tau)
    return AnchorPolicy(criterion, choice) if name == "anchor" else LabelsPolicy(criterion, choice)


def _psa(
    epsilon: str = str(DEFAULT_EPSILON), blk: str = str(DEFAULT_BLK), score: str = MEAN, *more: str
) -> Build | None:
    if more or blk not in map(str, BLOCKS) or score not in SCORES:
        return None
    return _given(_fraction(epsilon), lambda share, _: PsaPolicy(share, int(blk), score))


def _choice(blocks: str = _ANY, heads: str | None = None, *more: str) -> Choice | None:
    """What the selector may choose from: one block size or any, and with "all" no streaming heads."""
    if more or heads not in (None, "all") or blocks not in (_ANY, *map(str, BLOCKS)):
        return None
    return Choice(BLOCKS if blocks == _ANY else (int(blocks),), heads == "all")


def _number(text: str, most: float = _LARGEST) -> float | None:
    """The number in [0, most] that `text` spells, or None."""
    number = float(text) if _NUMBER.fullmatch(text) else _LARGEST * 2
    return number if number <= most else None


def _fraction(text: str) -> float | None:
    """The fraction in (0, 1] that `text` spells, or None."""
    if not _NUMBER.fullmatch(text):
        return None
    fraction = float(text)
    # A plan holds float32: a budget that is 0 there would read nothing.
    return fraction if fraction <= 1.0 and torch.tensor(fraction, dtype=torch.float32) > 0 else None
