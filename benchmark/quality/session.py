"""One run of `fluxion bench quality`: from its options to results and tables."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fluxion_sglang.commands.here import shell
from fluxion_sglang.commands.needle import MODEL
from fluxion_sglang.policy import check_spec
from fluxion_sglang.scoring.kl import tokens_compared
from fluxion_sglang.scoring.model_files import public
from fluxion_sglang.scoring.serve import EngineFailed, RequestFailed, Start, starter

from . import plan, table
from .run import run


def main(arguments: argparse.Namespace, start: Start | None = None) -> int:
    """Run the command; return the exit code. It is 2 for bad input, before any engine starts, and 1 if the engine
    fails.

    Args:
        start: starts engines; for tests.
    """
    try:
        asked = settings(arguments)
        made = plan.make(asked)
    except plan.BadInput as error:
        print(error, file=sys.stderr)
        return 2
    top = tokens_compared(made.model.vocabulary)
    config = dict(asked.config)
    if any(policy is not None and policy.sketches for policy in map(check_spec, made.policies)):
        config.setdefault("sketches", True)
    if asked.predictor is not None:
        config["predictor"] = str(asked.predictor)
    try:
        results = run(made, start or starter(asked.model, top, asked.dtype, asked.device, config))
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. {asked.out} has every finished cell; the same command goes on from there.", file=sys.stderr
        )
        return 130
    except (EngineFailed, RequestFailed) as error:
        print(error, file=sys.stderr)
        return 1
    print(table.markdown(results))
    plot = shell([sys.executable, "-m", "fluxion_quality.plot", str(asked.out)])
    print(f"Results are in {asked.out}. A plot: {plot}")
    return 0


def settings(arguments: argparse.Namespace) -> plan.Settings:
    """Settings from the options.

    Raises:
        plan.BadInput: one sentence.
    """
    model = Path(public(str(arguments.model))) if arguments.model else MODEL
    out = arguments.out or Path(f"quality_{arguments.suite}_{model.resolve().name}.json")
    return plan.Settings(
        suite=arguments.suite,
        model=model,
        policies=words(arguments.policies),
        out=out,
        lengths=tuple(length(word) for word in words(arguments.lengths)),
        tasks=words(arguments.tasks),
        samples=arguments.samples,
        seed=arguments.seed,
        data=Path(public(str(arguments.data), "texts")) if arguments.data else None,
        dtype=arguments.dtype,
        batch=arguments.batch,
        device=arguments.device,
        predictor=arguments.predictor,
        config=arguments.fluxion_config,
        fresh=arguments.fresh,
    )


def words(text: str) -> tuple[str, ...]:
    """Parts of a comma-separated list, without duplicates."""
    return tuple(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def length(word: str) -> int:
    """Number of tokens; k means 1,024: "4k" is 4096.

    Raises:
        plan.BadInput: the word is not a number.
    """
    found = re.fullmatch(r"([0-9]+)([kK]?)", word)
    if not found:
        raise plan.BadInput(f"--lengths has {word!r}; give numbers of tokens such as 4096 or 4k.")
    return int(found[1]) * (1024 if found[2] else 1)
