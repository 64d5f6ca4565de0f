"""Effects of a long prompt on others: gaps of a stream, wait of a short request, /health, and a client that hangs up.

    python benchmark/stall.py --model models/needle --long 30000
    python benchmark/stall.py --model smollm2 --long 7900            # of make checkpoints

Two servers with the flag run side by side, and only one is loaded at a time: one with our prefill passes, and `before`
with SGLang's (prefill_pass_ms 0). Rounds alternate. Results go to stall.json in benchmark/results/<machine>, one entry
per model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import common

from fluxion_sglang.commands.serving import Server, free_port, launch_command, running_server
from fluxion_sglang.scoring.model_files import public

ARMS: dict[str, dict[str, Any]] = {"paced": {}, "before": {"prefill_pass_ms": 0}}
FLAGS = ("--device", "cpu", "--sleep-on-idle", "--log-level", "warning")
WAIT_FOR_S = 900
"""Seconds to wait for an answer."""
SETTLED = 40
"""Tokens of the stream before the long prompt arrives; the gaps between them are those of idle steps."""
WAIT_S = 0.4
"""Seconds from the long prompt to the short one, and from there to the health check."""


class Client:
    """Sends requests to one server. Prompts are random tokens, which the prefix cache cannot hold."""

    def __init__(self, server: Server, vocabulary: int, seed: int) -> None:
        self.server, self._vocabulary, self._random = server, vocabulary, random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, self._vocabulary) for _ in range(length)]

    def stream(self, length: int, new: int, left: Callable[[], bool] = lambda: False) -> list[float]:
        """Times (`time.perf_counter`) at which tokens arrived. left: the client hangs up when it returns true."""
        times: list[float] = []
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        for _ in self.server.stream([self.prompt(length)], sampling):
            times.append(time.perf_counter())
            if left():
                break
        return times


def beside(client: Client, long: int) -> dict[str, float]:
    """A stream runs while a long prompt, a short request and a health check arrive."""
    client.server.flush()
    ended, came = threading.Event(), threading.Semaphore(0)

    def left() -> bool:
        came.release()
        return ended.is_set()

    with ThreadPoolExecutor() as pool:
        stream = pool.submit(client.stream, 500, 6000, left)
        for _ in range(SETTLED):
            came.acquire(timeout=WAIT_FOR_S)
        began = time.perf_counter()
        prompt = pool.submit(client.stream, long, 1)
        time.sleep(WAIT_S)
        asked = time.perf_counter()
        short = pool.submit(client.stream, 64, 4)
        time.sleep(WAIT_S)
        health = time.perf_counter()
        client.server.get("/health", WAIT_FOR_S)
        health = time.perf_counter() - health
        first, short_first = (of.result(WAIT_FOR_S)[0] for of in (prompt, short))
        ended.set()
        times = stream.result(WAIT_FOR_S)
    gaps = [(at, after - at) for at, after in itertools.pairwise(times)]
    idle = median(gap for at, gap in gaps if at + gap < began)
    during = sorted(gap for at, gap in gaps if at + gap > began and at < first)
    return {
        "idle_ms": 1e3 * idle,
        "gap_p99_ms": 1e3 * during[min(int(0.99 * len(during)), len(during) - 1)],
        "gap_max_ms": 1e3 * during[-1],
        "tokens_meanwhile": len(during),
        "short_ttft_ms": 1e3 * (short_first - asked),
        "health_ms": 1e3 * health,
        "long_ttft_ms": 1e3 * (first - began),
    }


def alone(client: Client, long: int) -> dict[str, float]:
    client.server.flush()
    began = time.perf_counter()
    return {"lone_ttft_ms": 1e3 * (client.stream(long, 1)[0] - began)}


def leaves(client: Client, long: int) -> dict[str, float]:
    """A client hangs up during its prefill; measure how long a short request then waits."""
    client.server.flush()
    body = {"input_ids": client.prompt(long), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    request = urllib.request.Request(f"{client.server.url}/generate", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with suppress(TimeoutError):
        urllib.request.urlopen(request, timeout=0.7).close()
    began = time.perf_counter()
    return {"after_hang_up_ttft_ms": 1e3 * (client.stream(64, 4)[0] - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(common.NEEDLE))
    parser.add_argument("--long", type=int, default=30_000, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--name", help="of the entry; by default the model's folder")
    parser.add_argument("--quick", action="store_true", help="one round of a short prompt, which is not saved")
    arguments, words = parser.parse_known_args()
    arguments.model = public(arguments.model)
    if arguments.quick:
        arguments.long, arguments.rounds = 2000, 1
    name = arguments.name or Path(arguments.model).name
    vocabulary = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        clients = {}
        for arm, options in ARMS.items():
            config = {"policy": "full", "host_tokens": 2 * arguments.long + 24_000, **options}
            command = launch_command(arguments.model, port := free_port(), *FLAGS, *words, fluxion=config)
            server = stack.enter_context(running_server(command, port, what=f"{name}, {arm}"))
            clients[arm] = Client(server, vocabulary, seed=len(clients))
            alone(clients[arm], arguments.long // 8)  # one-off costs
        for count in range(arguments.rounds):
            for arm in list(ARMS)[:: 1 if count % 2 == 0 else -1]:
                found: dict[str, float] = {}
                for measure in (alone, beside, leaves):
                    found |= measure(clients[arm], arguments.long)
                rounds[arm].append(found)
                print(arm, {key: round(value, 1) for key, value in found.items()}, flush=True)
    medians = {arm: {key: median(each[key] for each in found) for key in found[0]} for arm, found in rounds.items()}
    ratios = {
        key: sorted(paced[key] / before[key] for paced, before in zip(rounds["paced"], rounds["before"], strict=True))
        for key in ("lone_ttft_ms", "long_ttft_ms")
    }
    for arm, found in medians.items():
        print(arm, {key: round(value, 1) for key, value in found.items()})
    print({key: [round(value, 3) for value in found] for key, found in ratios.items()})
    if arguments.quick:
        return
    path = common.RESULTS / common.machine_name() / "stall.json"
    kept = json.loads(path.read_text())["models"] if path.exists() else {}
    kept[name] = {"long": arguments.long, "flags": words, "median": medians, "rounds": rounds, "ratios": ratios}
    common.save(path, {**common.header("stall"), "models": kept})


if __name__ == "__main__":
    main()
