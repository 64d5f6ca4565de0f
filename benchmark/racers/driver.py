"""What every driver of the race does: load a model, take prompts in, decode at a depth, say how long that took.

A driver is run as `python run_X.py PLAN`, PLAN being JSON (`Plan`). It writes a line of JSON to standard output for
`loaded`, then for the `begin` and the `cell` of every depth; whatever its implementation prints goes to standard error.
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
"""Steps before those that count: the first find caches cold, and graphs of this shape unbuilt."""


@dataclass(frozen=True)
class Plan:
    """What a driver measures.

    Attributes:
        model: folder of a checkpoint, as checkpoints.py writes it.
        depths: tokens of a prompt, ascending.
        batches: requests that decode at once, descending.
        steps: that count, of a batch at a depth.
        threads: as many as the machine has cores.
        options: of the implementation.
        probe: a short prompt, and how many tokens every implementation should greedily say to it.
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
        """Tokens that the longest request may come to."""
        variants = max(len(self.options.get("policies", [])), 1)
        return max(self.depths) + (WARM + self.steps) * len(self.batches) * variants + 32

    def prompts(self, depth: int) -> list[list[int]]:
        """One a request of the largest batch: no two begin alike, nor do prompts of two depths."""
        seeds = range(self.batches[0])
        return [random.Random(f"{depth} {seed}").choices(range(3, self.vocabulary), k=depth) for seed in seeds]


class Racer(ABC):
    """An implementation: `load` and `generate`, then for each depth `prefill`, any number of `decode`, and `clear`."""

    variants: ClassVar[list[str]] = [""]
    """What `decode` can do on one prefill."""

    @abstractmethod
    def load(self, plan: Plan) -> dict[str, Any]:
        """Load the model with room for the plan; the settings that matter to a reader."""

    @abstractmethod
    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """The greedy continuation of a prompt."""

    @abstractmethod
    def prefill(self, prompts: list[list[int]]) -> float:
        """Take all the prompts in; seconds until the first one, alone, has its first token."""

    @abstractmethod
    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps of the first `batch` prompts; batches descend."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the prompts."""


class Timed(list[float]):
    """Seconds of each of some steps in one go. cpu_s: CPU time of the process's threads in each."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s: list[float] = []


def timed_steps(step: Any, steps: int) -> Timed:
    """Of `steps` calls."""
    found = Timed()
    for _ in range(steps):
        cpu, start = time.process_time(), time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
        found.cpu_s.append(time.process_time() - cpu)
    return found


def peak_gb() -> float:
    """The most memory that this process has had resident, in GB (10^9 bytes).

    Of no other process, because every driver runs its model in its own. Not from `getrusage`: what it counts includes
    the process as it was before it became this program.
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
                if isinstance(timed, Timed):  # of the others, CPU time is of more than steps
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
    # What an implementation does at its end, such as waiting for its threads, is no part of the race.
    out.flush()
    os._exit(0)
