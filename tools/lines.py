"""Counts lines of code by folder: `python tools/lines.py`. Comments, docstrings and blank lines do not count."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def of_python(text: str) -> int:
    """Number of lines with at least one token outside of docstrings."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documentation.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def of_cpp(text: str) -> int:
    """Number of lines that are not blank without comments; comment marks inside strings are ignored."""

    def without(match: re.Match[str]) -> str:
        return match[1] or "\n" * match[0].count("\n")

    text = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', without, text, flags=re.S)
    return sum(1 for line in text.split("\n") if line.strip())


def main() -> None:
    counts: Counter[str] = Counter()
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        path = ROOT / name
        if path.suffix == ".py":
            count = of_python(path.read_text())
        elif path.suffix in {".h", ".cc", ".cu", ".cuh"}:
            count = of_cpp(path.read_text())
        else:
            continue
        top, *rest = name.split("/")
        counts[top] += count
        if len(rest) > 1:
            counts[f"{top}/{rest[0]}"] += count
    for folder, count in sorted(counts.items()):
        print(f"{count:7,}  {folder}")


if __name__ == "__main__":
    main()
