"""Texts and tables of the results, for both the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxion_sglang.commands.here import shell
from fluxion_sglang.commands.serving import launch_command
from fluxion_sglang.commands.trial import advice
from fluxion_sglang.commands.trial.results import FULL, OFF, Agreement, Results, Same, by_length

_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


@dataclass(frozen=True)
class Table:
    """Rows of text; the first `left` columns are words, the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        lead: the results in sentences.
        how: how it was measured.
        command: a line to paste.
        plot: name of its picture.
    """

    title: str
    lead: Sequence[str] = ()
    table: Table | None = None
    how: str = ""
    command: str = ""
    plot: str = ""


def sections(results: Results) -> list[Section]:
    """The non-empty parts of the report, the recommendation first."""
    parts = (_refusal, _stopped, _recommendation, _model, _same, _speed, _prefill, _agreement, _reads, _notes)
    return [section for part in parts if (section := part(results)) is not None]


def _refusal(results: Results) -> Section | None:
    if not results.refusal:
        return None
    return Section(
        "Fluxion does not serve this model",
        [results.refusal, "Do what the sentence says and try again, or serve the model without the flag:"],
        how=f"The server that was refused: {results.servers.get('with the flag', '')}",
        command=shell(launch_command(results.model.name, advice.USUAL_PORT)),
    )


def _stopped(results: Results) -> Section | None:
    return Section("The trial ended early", [results.stopped]) if results.stopped else None


def _recommendation(results: Results) -> Section | None:
    found = results.advice
    if found is None or not results.decode:
        return None
    return Section(f"Recommended: {found.policy}", [found.reason, *found.notes], how=advice.RULE, command=found.command)


def _model(results: Results) -> Section:
    model, fit = results.model, results.fit
    rows = [
        ("model", model.name),
        ("architecture", f"{model.architecture}, {model.dtype}"),
        ("layers", f"{model.layers}"),
        ("heads", f"{model.heads} query heads, {model.kv_heads} KV heads"),
        ("head dimension", "none: keys are not stored by head" if model.head_dim is None else f"{model.head_dim}"),
        ("longest context", f"{model.positions:,} tokens, as the model was made"),
        ("weights", "not on this machine yet" if model.weights_bytes is None else _size(model.weights_bytes)),
        ("predictor", "in the model's folder" if model.predictor else "none in the model's folder"),
    ]
    lead = []
    if fit is not None:
        rows += [
            ("KV a token", f"{_size(fit.kv_bytes)}, and {_size(fit.pool_bytes)} in the host pool with metadata"),
            ("host memory left", _size(fit.available_bytes)),
        ]
        if fit.problem:
            lead.append(fit.problem)
        else:
            rows += [
                ("host pool", f"{fit.tokens:,} tokens by default, at most {fit.most_tokens:,} (option host_tokens)"),
                ("largest context here", f"{fit.context:,} tokens"),
            ]
    return Section("Model and machine", lead, Table(("", ""), rows, left=2))


def _same(results: Results) -> Section | None:
    if not results.same:
        return None
    rows = []
    for length, here in by_length(results.same).items():
        gaps = [row.gap for row in here if row.gap is not None]
        equal = f"{sum(row.agree == row.tokens for row in here)} of {len(here)}"
        least = f"{min(row.agree for row in here)} of {here[0].tokens}"
        rows.append((f"{length:,}", equal, least, f"{max(gaps):.3f}" if gaps else ""))
    columns = ("length", "equal prompts", "least agreement (tokens)", "largest gap (nats)")
    shown = len(columns) if any(row[-1] for row in rows) else -1
    return Section(
        "Same answers",
        [_verdict(results.dtype, results.same)],
        Table(columns[:shown], [row[:shown] for row in rows], left=0),
        how="Greedy tokens with policy full and without the flag, from the timed runs of the largest batch. The gap is "
        "between SGLang's own two best tokens where the outputs part: a small one is a tie that rounding decides.",
    )


def _verdict(dtype: str, rows: Sequence[Same]) -> str:
    tokens, apart = sum(row.tokens for row in rows), sum(row.agree < row.tokens for row in rows)
    if not apart:
        prompts = _count(len(rows), "prompt")
        return f"In {dtype} all {tokens} tokens of {prompts} are the same with the flag and without."
    if dtype == "float32":
        return (
            f"In float32 {apart} of {len(rows)} prompts got other tokens with the flag. That should not happen unless "
            "two tokens tie: look at the gaps."
        )
    return (
        f"In {dtype} {apart} of {len(rows)} prompts part from SGLang's tokens at some point. Rounding alone may do "
        "that: two correct ways to compute the same differ in the last bits. `fluxion try --dtype float32` compares "
        "in float32."
    )


def _speed(results: Results) -> Section | None:
    if not results.decode:
        return None
    policies = [name for name in (OFF, *results.policies()) if any(row.policy == name for row in results.decode)]
    sparse = [name for name in policies if name not in (OFF, FULL)]
    pairs = [(OFF, FULL)] if OFF in policies else []
    pairs += [(FULL, name) for name in sparse]
    rows = []
    for length, batch in sorted({(row.length, row.batch) for row in results.decode}):
        times = {name: results.ms(length, batch, name) for name in policies}
        ratios = [_ratio(times.get(slow), times.get(fast)) for slow, fast in pairs]
        rows.append(
            (f"{length:,}", str(batch), *(_number(times[name]) for name in policies), *ratios),
        )
    steps, runs = min(row.steps for row in results.decode), min(row.runs for row in results.decode)
    return Section(
        "Time per output token (ms)",
        table=Table(("length", "batch", *policies, *(f"{a} / {b}" for a, b in pairs)), rows, left=0),
        how=f"{_count(runs, 'run')} of {steps} or more streamed tokens a policy and batch, as a client on this machine "
        "sees them: the median over all spans of half a run. A batch of N is N prompts that decode together. Policies "
        "take turns on one server; off is a second one.",
        plot="speed",
    )


def _prefill(results: Results) -> Section | None:
    if not results.prefill:
        return None
    rows = []
    for length, here in by_length(results.prefill).items():
        seconds = {row.policy: f"{row.seconds:.2f}" for row in here}
        rows.append((f"{length:,}", seconds.get(OFF, ""), seconds.get(FULL, "")))
    runs = min(row.runs for row in results.prefill)
    return Section(
        "Time to first token (s)",
        table=Table(("length", OFF, "with the flag"), rows, left=0),
        how=f"Median of {_count(runs, 'prompt')}, one at a time, none of them in the cache. Prefill is exact under "
        "every policy, so it is measured once.",
    )


def _agreement(results: Results) -> Section | None:
    policies = [name for name in results.policies() if name != FULL and results.agreements(name)]
    if not policies:
        return None
    rows = []
    for length, here in by_length(results.agreement).items():
        mine = {row.policy: row for row in here}
        cells = [_near(mine[name]) if name in mine else ("", "") for name in policies]
        rows.append((f"{length:,}", f"{here[0].steps}", *(cell for pair in cells for cell in pair)))
    columns = [column for name in policies for column in (f"{name}: KL (nats)", "same token")]
    return Section(
        "Agreement with full",
        table=Table(("length", "tokens", *columns), rows, left=0),
        how=f"{results.text} Each forced token is a decode step under the policy. KL is the distance of the next-token "
        "distribution from that of full, a mean with its 95% interval. Same token: how often the most probable one is "
        "that of full.",
    )


def _near(row: Agreement) -> tuple[str, str]:
    return f"{row.kl:.4f} [{row.low:.4f}, {row.high:.4f}]", f"{row.same:.1%}"


def _reads(results: Results) -> Section | None:
    if not results.reads:
        return None
    policies = [name for name in results.policies() if any(row.policy == name for row in results.reads)]
    rows = []
    for length, here in by_length(results.reads).items():
        found = {row.policy: (f"{row.share:.1%}", f"{row.bytes_per_token / _MIB:.2f}") for row in here}
        rows.append((f"{length:,}", *(cell for name in policies for cell in found.get(name, ("", "")))))
    columns = [column for name in policies for column in (f"{name}: share", "MiB a token")]
    return Section(
        "Read of the middle",
        table=Table(("length", *columns), rows, left=0),
        how="From the server's /metrics, around the timed runs of batch 1. The share is of the middle's tokens, by a "
        "head in a step. Bytes are K, V and metadata of all layers for one token, on one rank.",
        plot="reads",
    )


def _notes(results: Results) -> Section | None:
    if results.refusal:
        return None
    refused = results.plan.refused if results.plan else {}
    lines = [f"{policy} was not tried: {reason}" for policy, reason in refused.items()]
    lines += results.notes
    return Section("To keep in mind", lines) if lines else None


def made(results: Results) -> list[tuple[str, str]]:
    """Provenance of the report: names and texts."""
    machine, versions = results.header.get("machine", {}), results.header.get("versions", {})
    flags = ", ".join(machine.get("flags", []))
    return [
        ("date", str(results.header.get("date", ""))),
        (
            "machine",
            f"{machine.get('cpu')}, {machine.get('cores')} cores ({flags}); GPU: {machine.get('gpu') or 'none'}",
        ),
        ("versions", ", ".join(f"{k} {versions[k]}" for k in ("fluxion-sglang", "sglang", "torch") if k in versions)),
        ("command", results.command),
        *((f"server {what}", line) for what, line in results.servers.items()),
        ("took", f"{results.seconds / 60:.1f} minutes"),
    ]


def _size(count: float) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.0f} bytes"


def _number(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ratio(slow: float | None, fast: float | None) -> str:
    return f"{slow / fast:.1f}x" if slow and fast else ""
