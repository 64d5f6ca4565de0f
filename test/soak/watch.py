"""Resources of a server's processes, and whether they grow."""

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
    """Resources of one process: resident memory in MiB, open file descriptors, threads."""

    rss_mib: float
    fds: int
    threads: int


def holdings(pid: int) -> dict[str, Holding]:
    """Resources of a process and all its descendants, by SGLang's names."""
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
    """SGLang's title of a process, such as sglang::scheduler; else its program."""
    words = " ".join(process.cmdline())
    if words.startswith("sglang::"):
        return words.split()[0].strip("\0")
    return "resource tracker" if "resource_tracker" in words else process.name()


@dataclass(frozen=True)
class Slope:
    """Growth in units per hour: the fit, and the ends of its 95% interval."""

    fit: float
    low: float
    high: float

    def exceeds(self, bound: float) -> bool:
        """Whether growth above the bound is established: the whole interval lies above it."""
        return self.low > bound


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least-squares line through the observations; at least three points at different times."""
    fit = stats.linregress(seconds, values)
    # Constant observations have no deviation to divide by.
    error = float(fit.stderr) if math.isfinite(fit.stderr) else 0.0
    half = float(stats.t.ppf(0.975, len(seconds) - 2)) * error
    ends = (float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)
    return Slope(*(round(3600 * end, 3) for end in ends))


def grown(counts: Sequence[int]) -> bool:
    """Whether a value that must be constant grew: the maximum of the last third exceeds all before it."""
    cut = len(counts) - max(len(counts) // 3, 1)
    return max(counts[cut:]) > max(counts[:cut])
