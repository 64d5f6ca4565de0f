"""Decide and check what a run does, before any engine starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.scoring.audit_file import SPEC_BYTES
from fluxion_sglang.scoring.serve import OFF, Needs
from fluxion_sglang.sglang.start.offline import CHUNK

from . import suite_named
from .base import Codec, MissingData, Sample, Task
from .model import SPARE, Model
from .record import SAME, header, load

if TYPE_CHECKING:
    pass

FULL: Final = "full"
ORACLE_BUDGET: Final = "0.05"
"""Budget of a bare `oracle` when no `fixed` policy gives one."""

# Results depend on these; tasks and lengths only add cells.
SETTINGS: Final = (
    "benchmark",
    "model",
    "suite",
    "seed",
    "samples",
    "policies",
    "dtype",
    "batch",
    "device",
    "predictor",
    "config",
)


class BadInput(Exception):
    """The run cannot start; the message is one sentence."""


@dataclass(frozen=True)
class Settings:
    """Options of `fluxion bench quality`. config: further options of the server."""

    suite: str
    model: Path
    policies: tuple[str, ...]
    out: Path
    lengths: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    samples: int = 20
    seed: int = 0
    data: Path | None = None
    dtype: str = "auto"
    batch: int = 8
    device: str | None = None
    predictor: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True)
class Cell:
    """A task at a length (None: fixed lengths); it is measured and saved as a whole."""

    task: Task
    length: int | None


@dataclass(frozen=True)
class Plan:
    """A run whose inputs are checked.

    Attributes:
        policies: policies of the engine with the flag; `full` is the first.
        off: whether SGLang without the flag answers too.
        results: contents of the result file: of an earlier run, or a header without rows.
    """

    settings: Settings
    model: Model
    codec: Codec
    policies: tuple[str, ...]
    off: bool
    cells: tuple[Cell, ...]
    needs: Needs
    results: dict[str, Any]

    def samples(self, cell: Cell) -> list[Sample]:
        return cell.task.samples(self.codec, cell.length, self.settings.samples, self.settings.seed)

    def pending(self, policies: Sequence[str]) -> list[Cell]:
        """Cells without a row for one of these policies."""
        done = {(row["task"], row["length"], row["policy"]) for row in self.results["rows"]}
        return [
            cell for cell in self.cells if any((cell.task.name, cell.length, policy) not in done for policy in policies)
        ]


def make(settings: Settings) -> Plan:
    """Check everything that can be checked without an engine.

    Raises:
        BadInput: the first problem found.
    """
    try:
        return _make(settings)
    except (ValueError, MissingData) as error:
        raise BadInput(str(error)) from error
    except ImportError as error:
        missing = f"suite {settings.suite!r} needs the Python package {error.name!r}"
        raise BadInput(f"{missing}; install it with: pip install 'fluxion-sglang[quality]'.") from error


def _make(settings: Settings) -> Plan:
    for name in ("samples", "batch"):
        if getattr(settings, name) < 1:
            raise BadInput(f"--{name} is {getattr(settings, name)}; give 1 or more.")
    if settings.seed < 0:
        raise BadInput(f"--seed is {settings.seed}; give 0 or more.")
    if settings.predictor is not None and not settings.predictor.is_dir():
        raise BadInput(f"--predictor is {settings.predictor}, which is no folder; give one that `fluxion train` wrote.")
    if settings.data is not None and not settings.data.exists():
        raise BadInput(f"There is no {settings.data}, which --data names.")
    _check_out(settings.out)
    suite = suite_named(settings.suite)
    policies, off = expand(settings.policies)
    model = Model.read(settings.model)
    if settings.lengths and not suite.lengths:
        raise BadInput(f"Suite {suite.name!r} takes its samples as they come; leave --lengths out.")
    for length in settings.lengths:
        if not 1 <= length <= model.room:
            raise BadInput(
                f"A prompt and its answer of {length:,} tokens do not fit the {model.positions:,} positions of "
                f"{model.id}, of which SGLang leaves {SPARE} empty; give 1 to {model.room:,}."
            )
    folder = _predictor(settings)
    if any(spec.split(":")[0] == "fluxion" for spec in policies) and _digest(folder) is None:
        raise BadInput(
            f"Policy 'fluxion' needs a predictor, and {folder} has none; train one, or leave the policy out."
        )
    lengths: tuple[int | None, ...] = (settings.lengths or (4096,)) if suite.lengths else (None,)
    codec = model.codec()
    tasks = suite.tasks(codec, settings.data)
    if not tasks:
        raise BadInput(f"Suite {suite.name!r} has no task that {model.id} can be asked.")
    names = [task.name for task in tasks]
    for name in settings.tasks:
        if name not in names:
            raise BadInput(f"Suite {suite.name!r} has no task {name!r}; it has {', '.join(names)}.")
    chosen = [task for task in tasks if task.name in (settings.tasks or names)]
    cells = tuple(Cell(task, length) for task in chosen for length in lengths)
    results = _results(settings, model, policies)
    needs = _needs(cells, settings, codec, model, results)
    return Plan(settings, model, codec, policies, off, cells, needs, results)


def expand(specs: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The policies to serve, `full` first and each once; and whether `off` was among them.

    A bare `oracle` stands for one oracle at the budget of every `fixed`: exact selection for the same share of tokens.

    Raises:
        ValueError: a spec is unknown; one sentence.
    """
    # Imported late: policies bring torch.
    from fluxion_sglang.policy import check_spec

    budgets = {float(budget): budget for spec in specs if (budget := _budget(spec))}
    found = [FULL]
    for spec in specs:
        if spec == "oracle":
            found += [f"oracle:{budget}" for budget in budgets.values() or [ORACLE_BUDGET]]
        elif spec != OFF:
            found.append(spec)
    for spec in found:
        check_spec(spec)
    policies = tuple(dict.fromkeys(found))
    named: dict[bytes, str] = {}
    for spec in policies:
        other = named.setdefault(spec.encode()[:SPEC_BYTES], spec)
        if other != spec:
            raise ValueError(
                f"The policies {other!r} and {spec!r} are alike in their first {SPEC_BYTES} bytes, by which the audit "
                "tells policies apart; run one of them, or write its numbers shorter."
            )
    return policies, OFF in specs


def hears(spec: str) -> bool:
    """Whether a policy observes more of a prompt than a hit in the radix tree leaves to prefill."""
    return spec.partition(":")[0] == "lfps"


def groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of samples by document, ordered by the first sample."""
    found: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        found.setdefault(sample.document or i, []).append(i)
    return list(found.values())


def targets(sample: Sample) -> int:
    """Number of trailing tokens of the prompt that are forced; 0: the sample is a question."""
    return int(sample.meta.get("targets", 0))


def counted(sample: Sample) -> Sequence[int]:
    """Indices of a sample's targets that count; never the first, which comes from the exact prefill."""
    chosen: Sequence[int] = sample.meta.get("counted", range(1, targets(sample)))
    return chosen


def fingerprint(samples: Sequence[Sample]) -> str:
    """Digest of all prompts and right answers: rows with equal digests are comparable."""
    asked = [
        (
            sample.prompt,
            sample.references,
            sample.max_new_tokens,
            sample.document,
            targets(sample),
            tuple(counted(sample)),
        )
        for sample in samples
    ]
    return hashlib.sha256(str(asked).encode()).hexdigest()[:12]


def _predictor(settings: Settings) -> Path:
    """Folder where the server looks for the predictor."""
    return settings.predictor or settings.model / "fluxion"


def _digest(folder: Path) -> str | None:
    """Digest of the predictor in the folder; None if there is none."""
    files = sorted(folder.glob("predictor*")) if folder.is_dir() else []
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12] if files else None


def _budget(spec: str) -> str | None:
    name, *args = spec.split(":")
    try:
        return args[-1] if name == "fixed" and float(args[-1]) < 1 else None
    except (IndexError, ValueError):
        return None  # check_spec reports the error


def _needs(cells: Sequence[Cell], settings: Settings, codec: Codec, model: Model, results: dict[str, Any]) -> Needs:
    """Capacity for the largest document with as many answers as run concurrently. Checks all samples and earlier
    rows."""
    most, forced = 0, False
    for cell in cells:
        samples = cell.task.samples(codec, cell.length, settings.samples, settings.seed)
        what = f"Task {cell.task.name!r}" + (f" at {cell.length:,} tokens" if cell.length else "")
        if not samples:
            raise BadInput(f"{what} has no samples.")
        asked = fingerprint(samples)
        for row in results["rows"]:
            if (row["task"], row["length"]) == (cell.task.name, cell.length) and row["prompts"] != asked:
                raise BadInput(
                    f"{settings.out} has answers to other questions of task {row['task']!r}; give another --out, or "
                    "--fresh to start over."
                )
        for sample in samples:
            size = len(sample.prompt) + (0 if targets(sample) else sample.max_new_tokens)
            if size > model.room:
                raise BadInput(
                    f"{what} needs {size:,} tokens for sample {sample.id!r} and its answer, but SGLang gives them "
                    f"{model.room:,} of the {model.positions:,} positions of {model.id}; use shorter prompts."
                )
            if targets(sample) == 1:
                raise BadInput(f"{what} forces one token, which the exact prefill computes; force two or more.")
            forced |= targets(sample) > 0
        if not targets(samples[0]):
            cell.task.score(samples[0], "")  # find a missing package of the metric now
        for members in groups(samples):
            prompts = [samples[i].prompt for i in members]
            shared = _shared(prompts)
            own = max(len(samples[i].prompt) - shared + samples[i].max_new_tokens for i in members)
            most = max(most, shared + settings.batch * (own + 2 * PAGE))
    # One chunk more, so that no prefill waits for the pages of a request that is about to end.
    return Needs(most + CHUNK, settings.batch, forced)


def _shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length of the common prefix of all prompts; the smallest and the largest in order have the shortest one."""
    low, high = min(prompts), max(prompts)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def _check_out(path: Path) -> None:
    """Check that the result file can be written. The first save may come only after an hour."""
    if path.is_dir():
        raise BadInput(f"--out names the folder {path}; name a file in it.")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise BadInput(f"--out {path} lies below {parent}, which is a file; name another place.")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"--out {path} cannot be written, as nothing may be in {parent}; name another place.")


def _rows(rows: Any) -> bool:
    """Whether this has the form of rows of a result file."""
    named = ("task", "length", "policy", "prompts")
    return isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= set(named) for row in rows)


def _results(settings: Settings, model: Model, policies: tuple[str, ...]) -> dict[str, Any]:
    """Results of an earlier run with the same settings, or new ones without rows."""
    fresh = {
        **header("quality"),
        "model": {"id": model.id, "sha256": model.sha256()},
        "suite": settings.suite,
        "seed": settings.seed,
        "samples": settings.samples,
        "policies": list(policies),
        "dtype": settings.dtype,
        "batch": settings.batch,
        "device": settings.device,
        "predictor": _digest(_predictor(settings)),
        "config": dict(settings.config),
        "rows": [],
    }
    try:
        old = None if settings.fresh else load(settings.out)
    except ValueError:
        old = {}
    if old is None:
        return fresh
    if not isinstance(old, dict) or old.get("benchmark") != "quality" or not _rows(old.get("rows")):
        raise BadInput(f"{settings.out} is no result file; give another --out, or --fresh to replace it.")
    differ = [key for key in (*SETTINGS, *SAME) if old.get(key) != fresh[key]]
    if differ:
        raise BadInput(
            f"{settings.out} has results of a run that differs in {', '.join(differ)}; give another --out, or --fresh "
            "to start over."
        )
    return old
