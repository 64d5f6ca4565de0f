"""What a long prompt does to the others: a stream's gaps, a short request's wait, /health, and a client that leaves.

    python benchmark/stall.py --model models/needle --long 30000
    python benchmark/stall.py --model smollm2 --long 7900            # of make checkpoints

Two servers with the flag run side by side, one loaded at a time: passes as they are, and `before` with SGLang's
(prefill_pass_ms 0). Rounds alternate. Results go to stall.json in benchmark/results/<machine>, one entry a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import common
import requests

from fluxion_sglang.commands.serving import free_port
from fluxion_sglang.scoring.model_files import public

ARMS = {"paced": {}, "before": {"prefill_pass_ms": 0}}
START_S = 900
SETTLED = 40
"""Tokens of the stream before the long prompt comes; their gaps are idle steps."""
WAIT_S = 0.4
"""From the long prompt to the short one, and from there to the question for health."""


class Client:
    """Sends requests to one server. Prompts are random tokens, so that none is in the prefix cache."""

    def __init__(self, url: str, vocabulary: int, seed: int) -> None:
        self.url, self._vocabulary, self._random = url, vocabulary, random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, self._vocabulary) for _ in range(length)]

    def stream(self, length: int, new: int, left: Callable[[], bool] = lambda: False) -> list[float]:
        """Times of `time.perf_counter` at which tokens came. left: the client leaves when it says so."""
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": self.prompt(length), "sampling_params": params, "stream": True}
        times: list[float] = []
        with requests.post(self.url + "/generate", json=body, stream=True, timeout=START_S) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                if left():
                    break
        return times

    def health(self) -> float:
        began = time.perf_counter()
        requests.get(self.url + "/health", timeout=START_S).raise_for_status()
        return time.perf_counter() - began

    def flush(self) -> None:
        for _ in range(100):
            if requests.post(self.url + "/flush_cache", timeout=60).status_code == 200:
                return
            time.sleep(0.1)
        raise RuntimeError("the server is not idle")


class Background(threading.Thread):
    """A call in a thread, with its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self.result = call, None
        self.start()

    def run(self) -> None:
        self.result = self._call()

    def wait(self) -> Any:
        self.join(START_S)
        assert self.result is not None, "a request failed"
        return self.result


def beside(client: Client, long: int) -> dict[str, float]:
    """A stream runs, a long prompt comes, then a short request and a question for health."""
    client.flush()
    ended = threading.Event()
    stream = Background(lambda: client.stream(500, 6000, ended.is_set))
    time.sleep(2.0)
    began = time.perf_counter()
    prompt = Background(lambda: client.stream(long, 1))
    time.sleep(WAIT_S)
    asked = time.perf_counter()
    short = Background(lambda: client.stream(64, 4))
    time.sleep(WAIT_S)
    health = client.health()
    first = prompt.wait()[0]
    short_first = short.wait()[0]
    ended.set()
    times = stream.wait()
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
    client.flush()
    began = time.perf_counter()
    return {"lone_ttft_ms": 1e3 * (client.stream(long, 1)[0] - began)}


def leaves(client: Client, long: int) -> dict[str, float]:
    """A client hangs up during its prefill; what a short request waits that comes then."""
    client.flush()
    params = {"temperature": 0, "max_new_tokens": 1}
    body = {"input_ids": client.prompt(long), "sampling_params": params}
    with suppress(requests.exceptions.ReadTimeout):
        requests.post(client.url + "/generate", json=body, timeout=0.7)
    began = time.perf_counter()
    return {"after_hang_up_ttft_ms": 1e3 * (client.stream(64, 4)[0] - began)}


@contextmanager
def server(model: str, options: dict[str, Any], long: int, words: Sequence[str], log: Path) -> Iterator[str]:
    port = free_port()
    config = {"policy": "full", "host_tokens": 2 * long + 24_000, **options}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)]
    command += ["--device", "cpu", "--enable-fluxion", "--fluxion-config", json.dumps(config), "--sleep-on-idle"]
    command += ["--log-level", "warning", *words]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while True:
                try:
                    if requests.get(url + "/health", timeout=30).status_code == 200:
                        break
                except requests.RequestException:
                    pass
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(60)


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
        folder = Path(stack.enter_context(TemporaryDirectory()))
        clients = {}
        for arm, options in ARMS.items():
            url = stack.enter_context(server(arguments.model, options, arguments.long, words, folder / f"{arm}.log"))
            clients[arm] = Client(url, vocabulary, seed=len(clients))
            alone(clients[arm], arguments.long // 8)  # what runs once, ran
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
