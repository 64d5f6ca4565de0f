"""The CPU executor's kernels and layer steps against the memory roofline.

    python benchmark/kernels.py            # about 4 minutes on two cores
    python benchmark/kernels.py --quick    # small sizes, to see that it runs
    python benchmark/kernels.py --check    # measure again, and compare fractions with the bands of this machine
    python benchmark/kernels.py --bands    # widen the bands by the results; with --fresh, start them anew

Every row is interleaved with two ceilings in the same process. *Stream* reads memory from end to end. *Scatter* only
reads the pieces that the row's kernel reads, from the same list (`probe.py`). Both take the best of several plans, with
the kernel's threads. *Cached* runs the same kernel over tiles in the second-level cache, which gives its speed of
computing. Rows contain their bounds and the error against float64. Results go to kernels.json in
benchmark/results/<machine>, row by row. An interrupted run continues there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import common
from tqdm import tqdm

from fluxion_sglang import openmp

openmp.wait_passively()  # before torch is loaded

from cells import Cell, default_cells, quick_cells  # noqa: E402
from judged import Sizes, measure  # noqa: E402

TOLERANCE = 0.10
"""How much worse than its band a fraction may be, relative to the band. Times have no bands."""
TRIES = 2


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['key']:58}"]
    if row["gb_per_s"]:
        parts.append(f"{row['gb_per_s']:6.1f} GB/s ({row['bytes'] / 1e6:.0f} MB)")
    if "of_stream" in row:
        parts += [f"{kind} {row[kind]:.1f}: {row[f'of_{kind}']:4.0%}" for kind in ("stream", "scatter") if kind in row]
    if row["value"] is not None:
        parts.append(f"{row['what']} {row['value']:.3g}")
    if row["error"] is not None:
        parts.append(f"error {row['error']:.1e}")
    if row["bars"]:
        parts.append(f"[{', '.join(row['bars'])}: {'met' if row['met'] else 'NOT MET'}]")
    return "  ".join(parts)


def run(cells: list[Cell], path: Path, sizes: Sizes, header: dict[str, Any], fresh: bool) -> dict[str, Any]:
    data = common.resume(path, header, (*common.SAME, "rounds"), fresh)
    done = {row["key"] for row in data["rows"]}
    missing = [cell for cell in cells if cell.key not in done]
    with tqdm(total=len(cells), initial=len(cells) - len(missing), unit="row") as bar:
        for cell in missing:
            bar.set_description(cell.key)
            row = measure(cell, sizes)
            if row is not None:
                data["rows"].append(row)
                common.save(path, data)
                tqdm.write(line(row))
            bar.update()
    return data


def better_high(name: str) -> bool:
    return name.startswith("of_") or name == "sdpa_over_ours"


def bands(data: dict[str, Any], known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Bands for `check`: for every row, the worst fractions in the results and in the bands `known`.

    On a shared machine, the speed of the memory varies and that of the cores does not. Fractions of a kernel that
    computes more than it reads therefore vary over time, and bands need several runs.
    """
    worst = {row["key"]: dict(row) for row in (known or {"rows": []})["rows"]}
    for row in data["rows"]:
        band = worst.setdefault(row["key"], {"key": row["key"]})
        for name, value in row["judged"].items():
            band[name] = (min if better_high(name) else max)(value, band.get(name, value))
    rows = [band for band in worst.values() if len(band) > 1]
    return {**{key: data[key] for key in ("commit", "date", "machine")}, "tolerance": TOLERANCE, "rows": rows}


def fell_out(rows: list[dict[str, Any]], held: dict[str, Any]) -> dict[str, str]:
    """One sentence for every row that is worse than its band, by key."""
    found = {}
    limits = {row["key"]: row for row in held["rows"]}
    for row in rows:
        for name, value in row["judged"].items():
            if name not in limits.get(row["key"], {}):
                continue
            high = better_high(name)
            limit = limits[row["key"]][name] * (1 - held["tolerance"] if high else 1 + held["tolerance"])
            if value < limit if high else value > limit:
                found[row["key"]] = f"{row['key']}: {name} is {value:.3f}, its band ends at {limit:.3f}"
    return found


def without_band(rows: list[dict[str, Any]], held: dict[str, Any]) -> list[str]:
    """Keys of the rows without a band."""
    limits = {row["key"]: row for row in held["rows"]}
    return [row["key"] for row in rows if not row["judged"].keys() & limits.get(row["key"], {}).keys()]


def check(data: dict[str, Any], held: dict[str, Any], cells: list[Cell], sizes: Sizes) -> list[str]:
    """Sentences about rows that are outside their bands in these results and in all of TRIES further measurements."""
    out = fell_out(data["rows"], held)
    for _ in range(TRIES):
        again = [measure(cell, sizes) for cell in cells if cell.key in out]
        out = fell_out([row for row in again if row is not None], held)
    return list(out.values())


def main() -> None:
    parser = common.arguments(__doc__, "small sizes", rounds=11, fresh=True)
    parser.add_argument("--only", default="", help="rows whose key contains this")
    parser.add_argument("--check", action="store_true", help="measure anew; exit code 1 if a row fell out of its band")
    parser.add_argument("--bands", action="store_true", help="widen what --check compares with; no measurement")
    args = parser.parse_args()
    folder = common.RESULTS / args.machine
    path, banded = folder / "kernels.json", folder / "kernels_bands.json"
    if args.bands:
        data = common.load(path)
        if data is None:
            sys.exit(f"{path} does not exist; measure first: python benchmark/kernels.py")
        common.save(banded, bands(data, None if args.fresh else common.load(banded)))
        return
    if args.check:
        held = common.load(banded)
        if held is None:
            sys.exit(f"{banded} does not exist; make it with python benchmark/kernels.py --bands")
        path = folder / "kernels_check.json"
    if args.quick:
        path = folder / "kernels_quick.json"
    if args.fresh or args.check:
        path.unlink(missing_ok=True)
    cells = [cell for cell in (quick_cells() if args.quick else default_cells()) if args.only in cell.key]
    sizes = Sizes.quick() if args.quick else Sizes(rounds=args.rounds)
    data = run(cells, path, sizes, {**common.header("kernels"), "rounds": sizes.rounds}, args.fresh)
    judged = [row for row in data["rows"] if row["bars"]]
    print(f"{sum(row['met'] for row in judged)} of {len(judged)} rows with a bar meet it.")
    if args.check:
        assert held is not None
        path.unlink(missing_ok=True)
        without = without_band(data["rows"], held)
        if without:
            print(f"Without a band: {', '.join(without)}.")
        if len(without) == len(data["rows"]):
            sys.exit(f"No row that was measured has a band in {banded}: nothing was checked.")
        if out := check(data, held, cells, sizes):
            sys.exit("\n".join(out))
        print("Every other row is within its band." if without else "Every row is within its band.")
        return
    print(f"{path.relative_to(common.ROOT)}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
