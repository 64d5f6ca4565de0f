"""Rules of the code base: direction of imports, no cycles, no duplicate names, no file or function that is too
large."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import CSRC, ROOT

PACKAGE = ROOT / "python" / "fluxion_sglang"
LAB = ROOT / "python" / "fluxion_lab"

RINGS: dict[str, set[str]] = {
    "core": set(),
    "device": {"core"},
    "scoring": {"core"},
    "training": {"core", "scoring"},
    "commands": {"core", "device", "scoring", "training"},
}
"""Imports that each ring allows in addition to itself. Everything outside these folders is the core."""

NATIVE: dict[str, set[str]] = {
    "simd": set(),
    "kernels": {"simd"},
    "runtime": {"kernels"},
    "engine": {"kernels", "runtime"},
    "predictor": {"kernels", "runtime", "engine", "ffi"},
    "ffi": {"kernels", "runtime", "engine"},
    "prefill": {"kernels", "runtime", "ffi"},
    "model": {"kernels", "runtime", "ffi"},
    "probe": {"kernels", "runtime", "ffi"},
    "lab": {"kernels", "runtime", "engine", "ffi"},
    "cuda": {"kernels", "runtime", "device", "ffi"},
    "device": {"kernels", "runtime", "engine", "ffi"},
}
"""Includes that each folder of csrc/ allows in addition to itself. The core includes nothing of device, lab, cuda or
probe."""

NATIVE_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"})

CORE = ["sglang", "executor", "policy", "predictor", "kv", "native"]
"""Folders of the core: each imports only later ones. The checks for authors of policies run an engine."""

OUTSIDE = {"cli", "__main__", "bench_one_batch"}
"""Modules that start programs: they may import commands."""
SAME = {"__init__", "__main__", "base", "command"}
"""File names that may occur in several folders."""


@cache
def sources() -> dict[str, Path]:
    """Every module of the package, by its name without the package's."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(path: Path, later: bool) -> set[str]:
    """Modules that a file imports, as written; later: include imports inside functions."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if for_types(node) or (not later and isinstance(node, ast.FunctionDef)):
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        todo += ast.iter_child_nodes(node)
    return found


def modules(path: Path, later: bool = True) -> set[str]:
    names = {
        name.removeprefix("fluxion_sglang.") for name in imports(path, later) if name.startswith("fluxion_sglang.")
    }
    return names & sources().keys()


def ring(module: str) -> str:
    first = module.partition(".")[0]
    return first if first in RINGS else "core"


def test_imports_go_inwards() -> None:
    wrong = []
    for module, path in sources().items():
        if module in OUTSIDE:
            continue
        allowed = {ring(module), *RINGS[ring(module)]}
        wrong += [f"{module}, of {ring(module)}: {other}" for other in modules(path) if ring(other) not in allowed]
        others = {name.partition(".")[0] for name in imports(path, later=True)}
        if others & {"fluxion_quality", "fluxion_lab"}:
            wrong.append(f"{module}: the product imports neither benchmarks nor lab")
        if "sglang" in others and not module.startswith("sglang."):
            wrong.append(f"{module}: only sglang/ imports SGLang")
    assert not wrong, "\n".join(wrong)


def test_the_lab_is_another_package() -> None:
    """Like third-party packages, it sees policies and what they plan for, and no server."""
    folders = {"policy", "predictor", "kv", "native", "executor"}
    for path in sorted(LAB.glob("*.py")):
        seen = {module.partition(".")[0] for module in modules(path)}
        assert seen <= folders, f"{path.name} imports {seen - folders}"


def test_the_core_has_an_order() -> None:
    wrong = []
    for module, path in sources().items():
        if (own := module.partition(".")[0]) in CORE and module != "policy.testing":
            before = CORE[: CORE.index(own)]
            wrong += [f"{module}: {other}" for other in modules(path) if other.partition(".")[0] in before]
    assert not wrong, "\n".join(wrong)


def test_no_circles() -> None:
    for later in (False, True):
        # A package's __init__ re-exports its modules; modules that import their package form no cycle.
        graph = {
            module: modules(path, later) - {module} for module, path in sources().items() if path.stem != "__init__"
        }
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"{'Also within functions: ' if later else ''}{' -> '.join(error.args[1])}")


def test_includes_go_inwards() -> None:
    wrong = []
    for path in NATIVE_FILES:
        own = path.relative_to(CSRC).parts[0]
        others = set(re.findall(r'#include "(\w+)/', path.read_text())) - {"emulate", own, *NATIVE[own]}
        wrong += [f"{path.relative_to(CSRC)}: {other}/" for other in others]
    assert not wrong, "\n".join(wrong)


def test_names_are_told_apart() -> None:
    """File names are unique."""
    names = Counter(path.stem for path in sources().values())
    assert not {name for name, count in names.items() if count > 1} - SAME


def test_tests_are_told_apart() -> None:
    """pytest imports test files by name and refuses a second one of the same name."""
    names = Counter(path.name for path in (ROOT / "test").rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "__main__.py", "conftest.py"}


def test_nothing_is_too_long_to_read() -> None:
    limits = {ast.ClassDef: 600, ast.FunctionDef: 80}
    wrong = []
    for module, path in sources().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > limits[type(node)]:
                    wrong.append(f"{module}: {node.name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_native_functions_are_short() -> None:
    """A function or class at namespace level ends with a brace in the first column, as clang-format writes it."""
    wrong = []
    for path in NATIVE_FILES:
        begin = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"[A-Za-z\[].*\{$", line) and not line.startswith(("namespace", "extern")):
                begin = number
            if line.startswith("}") and begin:
                if number - begin >= (600 if line.startswith("};") else 80):
                    wrong.append(f"{path.name}:{begin} has {number - begin + 1} lines")
                begin = 0
    assert not wrong, "\n".join(wrong)


def test_the_tour_walks_a_decode_layer() -> None:
    """At most eight hops from `forward_decode` to the queue and back; each names symbols of the given file."""
    tour = (ROOT / "docs" / "dev" / "tour.md").read_text()
    walk = tour[tour.index("## One decode layer") :].split("\n## ")[0]
    hops = re.findall(r"^(\d)\. (.*?)(?=^\d\. |^\*\*|^$)", walk, re.M | re.S)
    assert [int(number) for number, _ in hops] == list(range(1, len(hops) + 1)) and 4 <= len(hops) <= 8
    assert "forward_decode" in hops[0][1] and "forward_decode" in hops[-1][1]
    named = re.findall(r"`([\w.:]+)`\s+in\s+`([\w/.]+)`", walk)
    assert len(named) >= len(hops)
    for name, file in named:
        path = ROOT / file if file.startswith("csrc/") else PACKAGE / file
        last = re.split(r"\.|::", name)[-1]
        assert re.search(rf"\b{last}\b", path.read_text()), f"{name} is not in {file}"
