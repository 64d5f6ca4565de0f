"""Options of `fluxion bench quality`. The entry point `bench-quality` in pyproject.toml makes it a command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

HELP: Final = "what policies cost in quality, against full attention"

_MEASURED = ("policy", "request_policies", "predictor", "host_tokens", "host_memory_gb", "audit", "record")
"""Keys of `--fluxion-config` that `bench quality` sets, or has an option for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--suite", required=True, help="ruler, longbench, leval, perplexity, long or extraction")
    option("--lengths", default="", help="tokens of a prompt, as in 4k,8k (k is 1,024); default 4k")
    option(
        "--policies",
        default="oracle,fixed:16:0.05",
        help="policy specs; full is always among them; oracle alone takes the budgets of fixed; off is SGLang "
        "without the flag (default: %(default)s)",
    )
    option(
        "--model", type=Path, help="folder of a model, or smollm2 or gemma3 (make checkpoints); default: models/needle"
    )
    option("--samples", type=int, default=20, help="questions of a task at a length (default: %(default)s)")
    option("--tasks", default="", help="some of the suite's tasks; default: all")
    option(
        "--data",
        type=Path,
        help="folder with the suite's files, where it has any; of perplexity a text: a file, handbook or python",
    )
    option("--seed", type=int, default=0, help="of samples and intervals (default: %(default)s)")
    option("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: the model's")
    option("--batch", type=int, default=8, help="requests that run at a time (default: %(default)s)")
    option("--device", help="as of SGLang's --device; default: its choice")
    option("--predictor", type=Path, help="folder of a predictor; default: `fluxion` in the model's folder")
    option("--fluxion-config", type=_config, default={}, help="further options of the server: a JSON object")
    option("--out", type=Path, help="result file; the same command goes on from it (default: quality_SUITE_MODEL.json)")
    option("--fresh", action="store_true", help="replace the result file instead of going on from it")


def _config(text: str) -> dict[str, object]:
    """Server options of --fluxion-config, without those that the benchmark sets."""
    from fluxion_sglang.config import ConfigError, FluxionConfig

    try:
        values: dict[str, object] = json.loads(text)
        FluxionConfig.from_dict(values)
    except (ConfigError, ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"give a JSON object of options ({error})") from None
    own = sorted(set(_MEASURED) & values.keys())
    if own:
        raise argparse.ArgumentTypeError(
            f"{', '.join(own)} cannot be given, because the benchmark or an option of its own sets it"
        )
    return values


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    # Import late: `fluxion --help` does not need it, and some packages belong to an extra.
    try:
        from . import session
    except ModuleNotFoundError as error:
        print(
            f"fluxion bench quality needs the Python package {error.name!r}; install it with: "
            "pip install 'fluxion-sglang[quality]'.",
            file=sys.stderr,
        )
        return 2
    return session.main(arguments)
