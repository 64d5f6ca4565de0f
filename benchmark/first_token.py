"""Time to the first token of a prompt: plain SGLang, an exact prefill and sparse prefills, in turns.

    python benchmark/first_token.py            # two models, about ten minutes on 2 cores
    python benchmark/first_token.py --quick

For every model, a server without the flag and one per budget (option `prefill_budget`) run at the same time; only one
of them is busy at a time. Each round asks all of them about the same new prompts, the longest first. Times are the
client's, medians over the rounds. Policy `full`, bfloat16; chunks are SGLang's default. Results go to first_token.json
in benchmark/results/<machine>.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import common
from one_batch import model_folder
from tqdm import tqdm

from fluxion_sglang.commands.needle import needle_prompt
from fluxion_sglang.commands.serving import Server, free_port, launch_command, running_server

MODELS, QUICK_MODELS = ("llama-slice", "needle"), ("needle",)
LENGTHS, QUICK_LENGTHS = (4096, 16384, 32256), (2048,)
BUDGETS = (1.0, 0.3, 0.15)
ROUNDS, QUICK_ROUNDS = 3, 1
FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--skip-server-warmup", "--sleep-on-idle"),
    *("--max-running-requests", "1", "--mem-fraction-static", "0.2"),
)


def start(stack: ExitStack, model: str, budget: float | None) -> Server:
    """A server with the flag; without it if the budget is None."""
    tokens = 2 * max(LENGTHS)
    flags = [*FLAGS]
    if model != "needle":
        flags += ["--load-format", "dummy", "--tokenizer-path", str(common.NEEDLE)]
    config = None
    if budget is None:
        flags += ["--max-total-tokens", str(tokens)]
    else:
        config = {"policy": "full", "host_tokens": tokens, "prefill_budget": budget}
    command = launch_command(str(model_folder(model)), port := free_port(), *flags, fluxion=config)
    return stack.enter_context(running_server(command, port, what=f"{model}, {name_of(budget)}"))


def name_of(budget: float | None) -> str:
    return "off" if budget is None else f"budget {budget:g}"


def ask(server: Server, ids: Sequence[int]) -> float:
    """Seconds to the first token."""
    first, *_ = server.stream([ids], {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
    return first.after


def measure(model: str, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    ways: tuple[float | None, ...] = (None, *BUDGETS)
    seconds: dict[tuple[int, float | None], list[float]] = {}
    with ExitStack() as stack:
        servers = {budget: start(stack, model, budget) for budget in ways}
        for server in servers.values():
            ask(server, needle_prompt(1024, seed=99).token_ids())  # includes one-off costs
        cells = [(turn, length) for turn in range(rounds) for length in sorted(lengths, reverse=True)]
        for turn, length in tqdm(cells, desc=model, disable=None):
            ids = needle_prompt(length, 8, 200 + turn).token_ids()[:length]
            for budget, server in servers.items():
                server.flush()  # empty the prefix cache
                seconds.setdefault((length, budget), []).append(ask(server, ids))
    return [
        {
            "model": model,
            "tokens": length,
            "way": name_of(budget),
            "seconds": round(median(seconds[length, budget]), 4),
            "samples": [round(one, 4) for one in seconds[length, budget]],
        }
        for length in lengths
        for budget in ways
    ]


def main() -> None:
    args = common.arguments(__doc__, "one model and short prompts").parse_args()
    models, lengths, rounds = (QUICK_MODELS, QUICK_LENGTHS, QUICK_ROUNDS) if args.quick else (MODELS, LENGTHS, ROUNDS)
    rows = common.told(row for model in models for row in measure(model, lengths, rounds))
    common.publish(args, "first_token", rows, rounds=rounds, flags=list(FLAGS))


if __name__ == "__main__":
    main()
