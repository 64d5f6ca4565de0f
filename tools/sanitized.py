"""Adds the outcome of the unit tests under a sanitizer to the results: `make sanitize` calls it.

The outcome of the tests is in pytest's result file; the sanitizer's reports are in one file a process.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from effort import EFFORT

from benchmark.common import RESULTS, SAME, differing, header, load, machine_name, save

NAMES = {"thread": "ThreadSanitizer", "address": "AddressSanitizer, UBSan"}
PATHS = ("python", "csrc", "CMakeLists.txt", "test/unit", "test/native")


def row(sanitizer: str, folder: Path) -> dict[str, Any]:
    """The result of one sanitizer: outcomes of its tests by file, and the number of reports.

    Args:
        folder: of the build; has tests.xml and a file report.PID for each process with a report.

    Raises:
        ValueError: no test ran.
    """
    suite = ElementTree.parse(folder / "tests.xml").getroot().find("testsuite")
    files: dict[str, Counter[str]] = {}
    for case in suite.iter("testcase") if suite is not None else ():
        file = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
        ends = {part.tag for part in case} & {"failure", "error", "skipped"}
        files.setdefault(file, Counter())[next(iter(ends), "passed")] += 1
    if suite is None or not files:
        raise ValueError(f"{folder / 'tests.xml'} has no tests: nothing ran under {NAMES[sanitizer]}")
    total = sum(files.values(), Counter())
    return {
        "sanitizer": NAMES[sanitizer],
        "passed": total["passed"],
        "skipped": total["skipped"],
        "failed": total["failure"] + total["error"],
        "reports": len(list(folder.glob("report.*"))),
        "seconds": round(float(suite.get("time", "0"))),
        "tests": {file: ends["passed"] for file, ends in sorted(files.items())},
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("sanitizer", choices=NAMES)
    words.add_argument("folder", type=Path, help="of the build")
    words.add_argument("--out", type=Path, default=RESULTS / machine_name() / "sanitizers.json")
    arguments = words.parse_args()
    found = row(arguments.sanitizer, arguments.folder)
    data = header("sanitizers", paths=PATHS) | {"effort": EFFORT, "rows": []}
    # Keep the other sanitizer's result for the same code; results for other code are replaced.
    old = load(arguments.out)
    if old is not None and not differing(old, data, (*SAME, "effort")):
        data = old
    data["rows"] = [*(one for one in data["rows"] if one["sanitizer"] != found["sanitizer"]), found]
    save(arguments.out, data)
    print(f"{found['sanitizer']}: {found['passed']} passed, {found['failed']} failed, {found['reports']} reports")


if __name__ == "__main__":
    sys.exit(main())
