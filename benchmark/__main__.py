"""`python -m benchmark [--quick]` (what `make bench` runs): every benchmark, then tables and plots."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

MEASURE = ("one_batch.py", "needle_accuracy.py")
RENDER = ("tables.py", "plot.py")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark", description="Every benchmark, then the tables.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all of them run")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing result files")
    args = parser.parse_args()
    passed = [flag for flag, on in (("--quick", args.quick), ("--fresh", args.fresh)) if on]
    for script in MEASURE:
        _run(script, *passed)
    if not args.quick:
        for script in RENDER:
            _run(script)


def _run(script: str, *args: str) -> None:
    print(f"$ python benchmark/{' '.join([script, *args])}", flush=True)
    code = subprocess.run([sys.executable, str(Path(__file__).parent / script), *args], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
