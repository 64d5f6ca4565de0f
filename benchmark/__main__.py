"""`python -m benchmark [NAME ...] [--quick]`: benchmarks by name, then tables and plots.

`fluxion bench` and `make bench` run it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `python -m benchmark` imports like the scripts beside it
import common
from registry import BENCHMARKS, RIVALS, model_of

GROUPS = ("speed", "quality", "public")
"""Groups that run when no name is given, in this order."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark", description="Benchmarks, then the tables.")
    known = f"{', '.join(GROUPS)} (default: these), or {', '.join(BENCHMARKS)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--list", action="store_true", help="only say what each of them measures")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all of them run")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing result files")
    args = parser.parse_args()
    if args.list:
        print("quality: what policies cost in quality (fluxion bench quality --help)")
        print("\n".join(f"{one.name}: {one.what} ({one.group})" for one in BENCHMARKS.values()))
        return
    names = args.names or GROUPS
    if unknown := [name for name in names if name not in (*GROUPS, *BENCHMARKS)]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join((*GROUPS, *BENCHMARKS))}")
    for benchmark in BENCHMARKS.values():
        if not {benchmark.name, benchmark.group} & set(names):
            continue
        if not model_of(benchmark).is_dir():
            print(f"{benchmark.name} is left out, because there is no {model_of(benchmark)}")
            continue
        run(benchmark.command(args.quick, args.fresh))
    if not args.quick:
        drawn = [common.RESULTS / common.machine_name() / f"quality_{name}.json" for name in ("ruler", RIVALS.name)]
        for path in filter(Path.exists, drawn):
            run([sys.executable, "-m", "fluxion_quality.plot", str(path)])
        for script in ("tables.py", "plot.py"):
            run([sys.executable, str(Path(__file__).with_name(script))])


def run(command: list[str]) -> None:
    print(f"$ {' '.join(common.relative(command))}", flush=True)
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
