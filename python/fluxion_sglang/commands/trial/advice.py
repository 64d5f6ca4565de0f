"""Recommends what to run, from the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fluxion_sglang.commands.here import program, shell
from fluxion_sglang.commands.serving import launch_command
from fluxion_sglang.commands.trial.results import FULL, OFF, Advice, Agreement, Results

MARGIN: Final = 0.10
NEAR: Final = 0.01
"""Largest KL divergence in nats between `full` and a recommended policy."""
RULE: Final = (
    f"The recommendation is the fastest policy that stays within {NEAR} nats of full (KL, the upper end of its "
    f"interval) at every length, if it takes at least {MARGIN:.0%} less time per token than full, at the longest "
    "length in the largest batch; else full."
)
USUAL_PORT: Final = 30000


def advise(results: Results, flags: Sequence[str], config: Mapping[str, Any]) -> Advice:
    """Args:
    flags: what both servers were started with, and a user would, too.
    config: options of `--fluxion-config` that the user gave.
    """
    best, faster = FULL, 0.0
    for policy in results.policies():
        gain = _gain(results, policy)
        if policy != FULL and gain >= max(MARGIN, faster) and _near(results, policy):
            best, faster = policy, gain
    # The bare flag means fluxion if the model's folder has a predictor. Every other policy is named.
    named = {} if best == "fluxion" and "predictor" not in config and results.model.predictor else {"policy": best}
    command = launch_command(results.model.name, USUAL_PORT, *flags, fluxion={**config, **named})
    return Advice(best, shell(command), _reason(results, best, faster), _notes(results, best))


def _near(results: Results, policy: str) -> bool:
    mine = results.agreements(policy)
    return bool(mine) and all(row.high <= NEAR for row in mine)


def _farthest(results: Results, policy: str) -> Agreement:
    return max(results.agreements(policy), key=lambda row: row.high)


def _largest(results: Results) -> tuple[int, int] | None:
    """The longest length with a time of `full`, and its largest batch."""
    return max(((row.length, row.batch) for row in results.decode if row.policy == FULL), default=None)


def _gain(results: Results, policy: str) -> float:
    """Share of `full`'s time per token that a policy saves."""
    place = _largest(results)
    full, mine = (results.ms(*place, name) if place else None for name in (FULL, policy))
    return 1 - mine / full if full and mine else 0.0


def _reason(results: Results, best: str, gain: float) -> str:
    place = _largest(results)
    if place is None:
        return "Nothing was measured, so the exact policy is the one to begin with."
    length, batch = place
    where = f"at {length:,} tokens and batch {batch}"
    if best != FULL:
        same = min(row.same for row in results.agreements(best))
        return (
            f"{best} stays within {_farthest(results, best).high:.4f} nats of full, has its most probable token in at "
            f"least {same:.1%} of the steps, and took {gain:.0%} less time per token {where}."
        )
    sparse = [policy for policy in results.policies() if policy != FULL]
    if not sparse:
        return "No sparse policy was tried."
    if not results.agreement:
        return "No token was forced, so nothing shows that a sparse policy keeps answers."
    lost = [policy for policy in sparse if not _near(results, policy)]
    slow = [policy for policy in sparse if policy not in lost]
    said = [
        f"{policy} may be {far.high:.4f} nats from full at {far.length:,} tokens"
        for policy in lost
        if results.agreements(policy) and (far := _farthest(results, policy))
    ]
    if slow:
        said += [
            f"{policy} took {_compared(_gain(results, policy))} time per token than full {where}" for policy in slow
        ]
    return f"{'; '.join(said)}."


def _compared(gain: float) -> str:
    return f"{abs(gain):.0%} {'less' if gain > 0 else 'more'}"


def _notes(results: Results, best: str) -> list[str]:
    notes = []
    place = _largest(results)
    if place is not None:
        off, full = results.ms(*place, OFF), results.ms(*place, FULL)
        chosen = results.ms(*place, best)
        where = f"at {place[0]:,} tokens and batch {place[1]}"
        if off and chosen and off >= chosen:
            notes.append(
                f"Without the flag a token takes {off:.1f} ms {where}, and {chosen:.1f} ms with it and {best}: "
                f"{off / chosen:.1f} times as long."
            )
        if off and full and off < full:
            notes.append(
                f"Without the flag a token takes {off:.1f} ms {where}, less than the {full:.1f} ms of full. The flag "
                "pays where the KV of your contexts does not fit the device."
            )
    if best != FULL:
        steps = sum(row.steps for row in results.agreements(best))
        notes.append(
            f"{steps} tokens of one text say little about rare losses. Measure more before you rely on {best}: "
            f"{program('fluxion')} bench quality --suite perplexity --data TEXT --policies {best} --model "
            f"{results.model.folder or 'FOLDER'}"
        )
    refused = results.plan.refused.get("fluxion") if results.plan else None
    if best != "fluxion" and refused is not None:
        folder = results.model.folder or results.model.name
        why = refused if results.model.predictor else "This model has no predictor."
        notes.append(
            f"{why} One learns what each head needs to read: {program('fluxion')} train --model "
            f"{results.model.name} --data data.jsonl --out {folder}/fluxion"
        )
    if best == FULL and "sketch" in results.policies() and not _near(results, "sketch"):
        notes.append("sketch:0.02 reads more than sketch and stays nearer to full: add --policies sketch:0.02.")
    if best == FULL and any(_near(results, policy) for policy in results.policies() if policy != FULL):
        notes.append("Longer prompts and larger batches read more of the middle, and there a sparse policy saves more.")
    return notes
