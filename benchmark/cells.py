"""The rows of kernels.py: what each measures, and the bounds it must meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roofline import isas

Bars = tuple[tuple[str, str, float], ...]
"""(name of a fraction or value in the row, ">=" or "<=", bound)"""


@dataclass(frozen=True)
class Cell:
    """One row of kernels.json.

    Attributes:
        kernel: attend, scan, select, append, layer, empty, imbalance, forks or sdpa.
        context: tokens of a request.
        blk: tokens per block; 0: everything in one run (dense).
        budget: share of the blocks that are read.
        isa: instruction set; "" for the best one.
        threads: 0 for one per core.
        shuffled: for a layer step, the pages of a request lie anywhere, as after long use. Otherwise they lie in the
            order in which a prefill takes them from a mostly free pool.
    """

    kernel: str
    context: int = 32768
    blk: int = 16
    budget: float = 0.05
    group: int = 4
    head_dim: int = 128
    dtype: str = "bf16"
    isa: str = ""
    threads: int = 0
    shuffled: bool = False
    bars: Bars = ()

    @property
    def key(self) -> str:
        """Name of the row; also its key in the bands."""
        parts = [self.kernel]
        if self.kernel not in ("append", "empty", "imbalance"):
            parts += [f"blk {self.blk}", f"{self.budget:.0%}"] if self.blk else ["dense"]
        parts += ["shuffled"] if self.shuffled else []
        parts += [f"{self.context // 1024}K", f"G={self.group}", f"D={self.head_dim}", self.dtype]
        parts += [self.isa or isas()[-1], f"{self.threads} threads" if self.threads else "all threads"]
        return " ".join(parts)


SCATTERED: Bars = (("of_scatter", ">=", 0.90),)
SCATTERED_AVX2: Bars = (("of_scatter", ">=", 0.70),)
CONSECUTIVE: Bars = (("of_scatter", ">=", 0.90), ("of_stream", ">=", 0.80))
LONG = 131072


def has_below_best(isa: str) -> bool:
    """Whether this CPU runs `isa` and a better one too; rows without an ISA already measure the best."""
    return isa in isas()[:-1]


def default_cells() -> list[Cell]:
    attend, scan = Cell("attend"), Cell("scan", blk=0)
    scattered = SCATTERED_AVX2 if isas()[-1] == "avx2" else SCATTERED
    cells = [replace(attend, context=context, bars=scattered) for context in (32768, LONG)]
    cells += [
        replace(attend, context=context, blk=blk, bars=CONSECUTIVE) for context in (32768, LONG) for blk in (128, 0)
    ]
    cells += [
        replace(attend, context=context, group=8, bars=(("of_scatter", ">=", 0.75),)) for context in (32768, LONG)
    ]
    if has_below_best("avx2"):
        avx2 = replace(attend, isa="avx2", bars=SCATTERED_AVX2)
        cells += [avx2, replace(avx2, context=LONG), replace(avx2, group=1, bars=()), replace(avx2, group=8, bars=())]
    if "avx512bf16" in isas():
        cells.append(replace(attend, isa=isas()[-2]))
    if "amx" in isas():
        cells.append(replace(attend, isa=isas()[-2], group=8))
    cells.append(replace(attend, group=16))
    cells += [replace(attend, group=1), replace(attend, head_dim=64), replace(attend, dtype="f32")]
    cells += [replace(attend, budget=budget) for budget in (0.02, 0.10, 0.25)]
    packed = replace(attend, dtype="int8")
    cells += [replace(packed, context=context, blk=blk) for context in (32768, LONG) for blk in (16, 128, 0)]
    cells += [replace(packed, group=1), replace(packed, group=8), replace(packed, head_dim=64)]
    cells += [replace(attend, threads=1), replace(attend, threads=1, blk=0)]
    streams: Bars = (("of_stream", ">=", 0.85),)
    cells += [replace(scan, context=context, bars=streams) for context in (32768, LONG)]
    cells += [replace(scan, group=8), replace(scan, group=1), replace(scan, head_dim=64), replace(scan, dtype="f32")]
    cells += [replace(scan, isa="avx2")] if has_below_best("avx2") else []
    cells += [replace(scan, isa=isas()[-2], group=8)] if "amx" in isas() else []
    cells += [replace(scan, threads=1), replace(scan, blk=16, budget=1.0)]
    cells += [Cell("select", context=context, bars=(("share", "<=", 0.10),)) for context in (32768, LONG)]
    cells += [Cell("append"), Cell("empty", context=1024, bars=(("microseconds", "<=", 15.0),))]
    cells += [Cell("layer", context=context, bars=(("over_ceiling", "<=", 1.20),)) for context in (32768, LONG)]
    cells += [Cell("layer", context=context, shuffled=True) for context in (32768, LONG)]
    cells.append(Cell("imbalance", context=65536, bars=(("busiest_over_mean", "<=", 1.10),)))
    cells.append(Cell("forks", bars=(("over_one", "<=", 2.5),)))
    cells.append(Cell("sdpa", bars=(("sdpa_over_ours", ">=", 3.0),)))
    return cells


def quick_cells() -> list[Cell]:
    """The first cell of each kernel, with a short context."""
    few = dict.fromkeys(cell.kernel for cell in default_cells())
    first = [next(cell for cell in default_cells() if cell.kernel == kernel) for kernel in few]
    return [replace(cell, context=2048) for cell in first]
