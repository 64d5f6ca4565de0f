"""What a server's processes hold, and whether it grows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from scipy import stats

MIB = 1 << 20


@dataclass(frozen=True)
class Holding:
    """Of one process: resident memory in MiB, open file descriptors, threads."""

    rss_mib: float
    fds: int
    threads: int


def holdings(pid: int) -> dict[str, Holding]:
    """Of a process and all below it, by the names that SGLang gives them."""
    found: dict[str, Holding] = {}
    seen: Counter[str] = Counter()
    main = psutil.Process(pid)
    for process in [main, *main.children(recursive=True)]:
        with process.oneshot():
            name = "main" if process.pid == pid else title(process)
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name} {seen[name]}"
            rss = round(process.memory_info().rss / MIB, 2)
            found[key] = Holding(rss, process.num_fds(), process.num_threads())
    return found


def title(process: psutil.Process) -> str:
    """SGLang's title of a process, such as sglang::scheduler; else what it runs."""
    words = " ".join(process.cmdline())
    if words.startswith("sglang::"):
        return words.split()[0].strip("\0")
    return "resource tracker" if "resource_tracker" in words else process.name()


@dataclass(frozen=True)
class Slope:
    """Growth in units an hour: the fit, and the two ends of its 95% interval."""

    fit: float
    low: float
    high: float

    def exceeds(self, bound: float) -> bool:
        """Whether growth above the bound is established: the whole interval lies above it."""
        return self.low > bound


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """The straight line through what was seen, by least squares; at least three points at different times."""
    fit = stats.linregress(seconds, values)
    # What never changed has no deviation that scipy could divide by.
    error = float(fit.stderr) if math.isfinite(fit.stderr) else 0.0
    half = float(stats.t.ppf(0.975, len(seconds) - 2)) * error
    ends = (float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)
    return Slope(*(round(3600 * end, 3) for end in ends))


def grown(counts: Sequence[int]) -> bool:
    """Whether what has to be constant went up: the last third of what was seen has more than all before it."""
    cut = len(counts) - max(len(counts) // 3, 1)
    return max(counts[cut:]) > max(counts[:cut])
