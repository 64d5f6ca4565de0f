"""Common part of the race's drivers: load a model, prefill prompts, decode at a depth, and report times.

A driver runs as `python run_X.py PLAN`; PLAN is JSON (`Plan`). It writes a line of JSON to standard output for
`loaded`, then for `begin` and `cell` of every depth. Output of its implementation goes to standard error.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

WARM = 3
"""Steps that do not count: the first ones find cold caches and missing graphs for this shape."""


@dataclass(frozen=True)
class Plan:
    """What a driver measures.

    Attributes:
        model: folder of a checkpoint, written by checkpoints.py.
        depths: tokens of a prompt, ascending.
        batches: requests that decode at once, descending.
        steps: counted steps of a batch at a depth.
        threads: number of cores of the machine.
        options: of the implementation.
        probe: a short prompt, and the number of tokens of the greedy answer that all implementations give to it.
    """

    model: str
    depths: list[int]
    batches: list[int]
    steps: int
    threads: int
    options: dict[str, Any]
    probe: list[int]
    says: int
    vocabulary: int

    @property
    def room(self) -> int:
        """Maximum tokens of a request."""
        variants = max(len(self.options.get("policies", [])), 1)
        return max(self.depths) + (WARM + self.steps) * len(self.batches) * variants + 32

    def prompts(self, depth: int) -> list[list[int]]:
        """Prompts of the largest batch. All start differently, also those of different depths."""
        seeds = range(self.batches[0])
        return [random.Random(f"{depth} {seed}").choices(range(3, self.vocabulary), k=depth) for seed in seeds]


class Racer(ABC):
    """An implementation: `load` and `generate`, then for each depth `prefill`, any number of `decode`, and `clear`."""

    variants: ClassVar[list[str]] = [""]
    """Ways to decode after one prefill."""

    @abstractmethod
    def load(self, plan: Plan) -> dict[str, Any]:
        """Load the model with room for the plan; return settings for the reader."""

    @abstractmethod
    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """The greedy continuation of a prompt."""

    @abstractmethod
    def prefill(self, prompts: list[list[int]]) -> float:
        """Prefill all prompts; return the seconds until the first one, which runs alone, has its first token."""

    @abstractmethod
    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps of the first `batch` prompts; batches descend."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the prompts."""


class Timed(list[float]):
    """Seconds of each of several steps in sequence. cpu_s: CPU time of the process's threads in each."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s: list[float] = []


def timed_steps(step: Any, steps: int) -> Timed:
    """Times of `steps` calls."""
    found = Timed()
    for _ in range(steps):
        cpu, start = time.process_time(), time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
        found.cpu_s.append(time.process_time() - cpu)
    return found


def peak_gb() -> float:
    """Peak resident memory of this process, in GB (10^9 bytes).

    One process suffices, because every driver runs its model in its own. `getrusage` is unsuitable: it includes the
    process before exec.
    """
    kib = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert kib is not None
    return round(int(kib[1]) * 1024 / 1e9, 3)


def run(racer: Racer) -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(event: str, **facts: Any) -> None:
        out.write(json.dumps({"event": event, **facts}) + "\n")

    start = time.perf_counter()
    settings = racer.load(plan)
    load_s = time.perf_counter() - start
    said = racer.generate(plan.probe, plan.says)
    say("loaded", settings=settings, load_s=round(load_s, 2), says=said)
    for depth in plan.depths:
        say("begin", depth=depth)
        prompts = plan.prompts(depth)
        cpu = time.process_time()
        prefill_s = racer.prefill(prompts)
        cpu = time.process_time() - cpu
        found = []
        for batch in plan.batches:
            for variant in racer.variants:
                timed = racer.decode(variant, batch, WARM + plan.steps)
                row = {"batch": batch, "variant": variant, "decode_s": [round(s, 7) for s in timed[WARM:]]}
                if isinstance(timed, Timed):  # other times cover more than steps
                    row["step_cpu_s"] = [round(s, 7) for s in timed.cpu_s[WARM:]]
                found.append(row)
        racer.clear()
        say(
            "cell",
            depth=depth,
            prefill_s=round(prefill_s, 4),
            prefill_cpu_s=round(cpu, 3),
            peak_gb=peak_gb(),
            decode=found,
        )
    # Skip the shutdown of the implementation, such as waiting for its threads.
    out.flush()
    os._exit(0)
