"""Whether servers on a GPU answer many clients as well with the flag as without, and stay intact.

    python benchmark/gpu_day/load.py                # on a machine with a GPU; some minutes
    python benchmark/gpu_day/load.py --device sim   # on the simulated device, fewer and shorter prompts

Clients ask several questions about each document, so prompts share prefixes. Some clients hang up during an answer, and
SGLang retracts a request every 20 steps. Everything runs twice, the second time with the prompts in the radix tree. The
script counts right answers. Afterwards the server must empty its pools, which SGLang checks for leaks, and answer once
more. Servers run beside each other, so times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from fluxion_sglang.commands import serving
from fluxion_sglang.commands.needle import needle_prompt, score

LENGTHS, QUICK_LENGTHS = (600, 1200, 2400, 4000, 6000, 9000, 12000, 16000), (600, 900)
QUESTIONS = 4
ROUNDS = 2
CLIENTS = 16
NEW = 24
HANGS_UP = 6
"""One of this many clients hangs up, after a few tokens of a long answer."""
MOST_TOKENS = 80000
"""Tokens for which each server has memory."""
OFF: dict[str, Any] | None = None
NEAR = {"policy": "full", "host_tokens": 50000, "hot_tiles_gb": 0.01}
QUICK_CONFIGS: tuple[dict[str, Any] | None, ...] = (OFF, {"policy": "fluxion"}, NEAR)
CONFIGS = (*QUICK_CONFIGS, {"policy": "full"})
CORES_OF_A_SERVER = 3
LOST = 0.05
"""Share of the right answers that a sparse policy may lose. `full` may lose one answer, to rounding."""


@dataclass(frozen=True)
class Case:
    """A prompt with its right answer; None: the client hangs up."""

    token_ids: list[int]
    answer: tuple[int, ...] | None


def cases(lengths: tuple[int, ...]) -> list[Case]:
    """All cases, with documents mixed; the order is the same for every server."""
    found = []
    for length in lengths:
        prompt = needle_prompt(length, keys=QUESTIONS, seed=length)
        found += [Case(prompt.token_ids(i), question.answer_ids) for i, question in enumerate(prompt.questions)]
    random.Random(0).shuffle(found)
    return [Case(case.token_ids, None) if i % HANGS_UP == HANGS_UP - 1 else case for i, case in enumerate(found)]


def ask(server: serving.Server, case: Case) -> bool:
    """Whether the answer is right. False for a client that hangs up after a few tokens."""
    sampling = {"temperature": 0, "max_new_tokens": NEW if case.answer else 2000, "ignore_eos": True}
    if case.answer is None:
        for piece in server.stream([case.token_ids], sampling):
            if len(piece.tokens) > 2:
                break
        return False
    return score(case.answer, server.generate(sampling, input_ids=case.token_ids)["output_ids"])


def options(device: str, config: dict[str, Any] | None) -> list[str]:
    """Options of the server's command line."""
    place, dtype = ("cuda", "bfloat16") if device == "cuda" else ("cpu", "float32")
    words = ["--device", place, "--dtype", dtype]
    words += ["--max-total-tokens", str(MOST_TOKENS), "--max-running-requests", "8", "--chunked-prefill-size", "2048"]
    words += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup"]
    if device == "cuda" and config is OFF:
        words += ["--attention-backend", "flashinfer"]
    return words


def serve(device: str, config: dict[str, Any] | None, asked: list[Case]) -> dict[str, Any]:
    """Row of one server: its config, answers, right answers, and whether it is healthy at the end."""
    port = serving.free_port()
    if config is not OFF and device == "cuda":
        config = {**config, "cuda_graphs": True}
    name = "off" if config is OFF else json.dumps(config)
    command = serving.launch_command(str(common.NEEDLE), port, *options(device, config), fluxion=config)
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    environment |= common.SIMULATED if device == "sim" else {}
    with serving.running_server(command, port, environment, name) as server:
        right = 0
        for _ in range(ROUNDS):
            with ThreadPoolExecutor(CLIENTS) as clients:
                right += sum(clients.map(lambda case: ask(server, case), asked))
        server.flush()
        ask(server, asked[0])
        alive = server.healthy()
    whole = sum(case.answer is not None for case in asked) * ROUNDS
    return {"config": name, "answers": whole, "right": right, "alive": alive}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--machine", help="folder under benchmark/results; without it nothing is kept")
    args = parser.parse_args()
    configs = QUICK_CONFIGS if args.quick else CONFIGS
    asked = cases(QUICK_LENGTHS if args.quick else LENGTHS)
    at_once = max(1, len(os.sched_getaffinity(0)) // CORES_OF_A_SERVER)
    rows: list[dict[str, Any]] = []
    with serving.exits_at_signals(), ThreadPoolExecutor(at_once if args.device == "cuda" else 1) as pool:
        for row in pool.map(lambda config: serve(args.device, config, asked), configs):
            rows.append(row)
            print(row, flush=True)
            if args.machine:
                path = common.RESULTS / args.machine / "gpu_load.json"
                common.save(path, {**common.header("gpu_load"), "rows": rows})
    base, whole = rows[0]["right"], rows[0]["answers"]
    if base < 0.9 * whole:
        raise SystemExit("error: the model does not answer without the flag either, so this says nothing")
    for row, config in zip(rows, configs, strict=True):
        exact = config is OFF or config["policy"] == "full"
        if not row["alive"] or row["right"] < base - (1 if exact else max(1, LOST * whole)):
            raise SystemExit(f"error: a server under load lost answers or did not live: {row}")


if __name__ == "__main__":
    main()
