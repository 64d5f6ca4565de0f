"""Fill the tables of README.md and docs/ from the result files and the code, so that no number is typed by hand.

`python benchmark/tables.py` rewrites the text between <!-- table:NAME --> and <!-- /table:NAME -->. With --check it
changes nothing, and the exit code is 1 if a table is outdated.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import common
import torch
from decode_tables import DECODE_TABLES
from quality_tables import QUALITY_TABLES
from rendering import columns_of, table
from speed_tables import SPEED_TABLES

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.sglang.start import served_models

_MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.S)


def options(_: Path) -> str:
    out = []
    for group, of in itertools.groupby(FluxionConfig.options(), lambda option: option.group):
        columns = columns_of(
            "key | type | default | what it does | example",
            "`{o.key}` | {o.type} | `{o.default}` | {o.doc} | `{o.example}`",
        )
        out.append(f"### {group}\n\n{table(columns, [{'o': option} for option in of], 'lllll')}")
    return "\n".join(out)


def models(_: Path) -> str:
    """The tested model families."""

    def memory(family: served_models.Family) -> str:
        layers, kv_heads, head_dim = family.shape
        shape = KVShape(layers, kv_heads, head_dim, torch.bfloat16, sketched=True)
        return f"{shape.pool_bytes(32768) / 2**30:.1f}" if layers else ""

    columns = columns_of(
        "family | class in SGLang | a member | host memory of 32K tokens (GiB) | notes",
        "{o.name} | {classes} | {o.member} | {memory} | {o.note}",
    )
    rows = [
        {"o": one, "classes": ", ".join(f"`{name}`" for name in one.classes), "memory": memory(one)}
        for one in served_models.SERVED
    ]
    return table(columns, rows, "lllrl")


def refused_models(_: Path) -> str:
    rows = [
        {
            "why": re.sub(r"\{0\.(\w+(?:\.\w+)*)\}", r"*\1*", one.why),
            "instead": re.sub(r"\{0\.(\w+)\}", r"*\1*", one.instead) or "serve it without `--enable-fluxion`",
        }
        for one in served_models.MODELS
    ]
    return table(columns_of("the error says: it cannot be served, because | instead", "{why} | {instead}"), rows, "ll")


TABLES: dict[str, Callable[[Path], str]] = {
    "options": options,
    "models": models,
    "refused_models": refused_models,
    **DECODE_TABLES,
    **SPEED_TABLES,
    **QUALITY_TABLES,
}


def fill(text: str, results: Path, prefix: str = "") -> str:
    """The text with every marked table rendered anew.

    Args:
        prefix: path from the page to the root of the repository, for links.

    Raises:
        KeyError: the text marks a table that does not exist.
    """

    def render(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise KeyError(f"there is no table {match[2]!r}; the tables are {', '.join(TABLES)}")
        body = TABLES[match[2]](results).replace("](benchmark/", f"]({prefix}benchmark/")
        return f"{match[1]}{body}{match[3]}"

    return _MARKED.sub(render, text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the tables of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    args = parser.parse_args()
    stale = []
    pages = [
        common.ROOT / "README.md",
        *sorted((common.ROOT / "docs").rglob("*.md")),
        *common.ROOT.glob("models/*/README.md"),
    ]
    for page in pages:
        name = str(page.relative_to(common.ROOT))
        old = page.read_text()
        new = fill(old, common.RESULTS, "../" * name.count("/"))
        if new != old:
            stale.append(name)
            if not args.check:
                page.write_text(new)
    if args.check and stale:
        sys.exit(f"{', '.join(stale)}: tables differ from the results; run python benchmark/tables.py")
    print(f"rewritten: {', '.join(stale)}" if stale else "all tables are up to date")


if __name__ == "__main__":
    main()
