"""Fills the tables of README.md and docs/ from the result files and the code, so that no number is typed.

`python benchmark/tables.py` rewrites what lies between <!-- table:NAME --> and <!-- /table:NAME -->; with
--check it changes nothing, and its exit code is 1 if it would.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import common
from decode_tables import DECODE_TABLES
from forecast_tables import FORECAST_TABLES
from hgca_tables import HGCA_TABLES
from layer_tables import LAYER_TABLES
from locality_tables import LOCALITY_TABLES
from quality_tables import QUALITY_TABLES
from race_tables import RACE_TABLES
from rendering import link, nothing, result_files, table, where
from roofline_tables import ROOFLINE_TABLES
from summary_tables import SUMMARY_TABLES

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.metrics import described

POOL_OPERATIONS = {
    "alloc_ms": "find pages for a prompt",
    "append_ms": "write its KV",
    "insert_ms": "put it into the radix tree",
    "match_ms": "find it there",
    "decode_ms": "attention of a decode step over it, `fixed:16:0.05`",
    "page_ms": "find one more page",
    "free_ms": "give that back",
    "evict_ms": "evict as many tokens",
    "flush_ms": "flush everything",
}
_MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.S)


def options(_: Path) -> str:
    out = []
    for group, options in itertools.groupby(FluxionConfig.options(), lambda option: option.group):
        rows = [[f"`{o.key}`", o.type, f"`{o.default}`", o.doc, f"`{o.example}`"] for o in options]
        out.append(f"### {group}\n\n{table(['key', 'type', 'default', 'what it does', 'example'], rows, 'lllll')}")
    return "\n".join(out)


def metrics(_: Path) -> str:
    return table(["metric", "what it says"], [[f"`{name}`", text] for name, text in described().items()], "ll")


def soak(results: Path) -> str:
    """What each process of a server held after a soak, and how its memory went; and what had happened by then."""
    out = []
    for path, data in result_files(results, "soak*.json"):
        rows = [
            [
                *(f"{one['process']}", f"{one['rss_mib']:,.0f}"),
                *(f"{one['mib_per_hour']:+.1f}", f"{one['low']:+.1f} to {one['high']:+.1f}"),
                *(f"{one['fds']}", f"{one['threads']}"),
            ]
            for one in data["processes"]
        ]
        head = ["process", "memory (MiB)", "growth (MiB an hour)", "95% interval", "file descriptors", "threads"]
        seen = data["happened"]
        note = (
            f"After {data['minutes']:.0f} minutes, {data['tp']} rank(s), {data['rows'][-1]['done']:,} requests and "
            f"interferences, {seen['retracted requests']} retractions, {seen['evicted tokens']:,} evicted tokens: "
            f"{data['leaked_tokens']} leaked tokens, {len(data['wrong'])} wrong or lost answers, the same from the "
            f"canary all {data['canaries'].split()[0]} times. {where(data)}"
        )
        out.append(f"{table(head, rows, 'lrrrrr')}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or "Not measured yet: `make soak`.\n"


def sanitizers(results: Path) -> str:
    """How the unit tests of the native library ended under each sanitizer, and what it reported."""
    out = []
    for path, data in result_files(results, "sanitizers.json"):
        rows = [
            [
                *(one["sanitizer"], str(len(one["tests"]))),
                *(f"{one[key]:,}" for key in ("passed", "skipped", "failed", "reports")),
                f"{one['seconds'] / 60:.0f}",
            ]
            for one in data["rows"]
        ]
        head = ["sanitizer", "test files", "passed", "skipped", "failed", "reports", "minutes"]
        note = (
            f"Property tests with {data['effort']:g} times their usual number of examples; minutes without the build. "
            f"{where(data)}"
        )
        out.append(f"{table(head, rows, 'lrrrrrr')}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or "Not run yet: `make sanitize`.\n"


def pool_scale(results: Path) -> str:
    """A line an operation: its time in pools of more and more tokens."""
    out = []
    for path, data in result_files(results, "pool_scale.json"):
        rows = data["rows"]
        lines = [
            [text, *(f"{row[key]:,.2f}" for row in rows), f"{rows[-1][key] / rows[0][key]:.1f}x"]
            for key, text in POOL_OPERATIONS.items()
        ]
        head = ["milliseconds, in a pool of", *(f"{row['tokens']:,} tokens" for row in rows), "last / first"]
        note = (
            "A token has one layer and one KV head of 32 elements. The pools are full of prompts of "
            f"{data['prompt']:,} tokens; medians of {data['turns']}. {where(data)} [Data]({link(path)}), "
            "`python benchmark/pool_scale.py`."
        )
        out.append(f"{table(head, lines, 'l' + 'r' * (len(head) - 1))}\n{note}\n")
    return "\n".join(out) or nothing("pool_scale.py")


def restart(results: Path) -> str:
    """A line a prompt: its first token, by where its KV comes from."""
    out = []
    for path, data in result_files(results, "restart.json"):
        ways = ["plain", "cold", "again", "restarted", "disk"]
        head = ["prompt", "files", "without `disk`", "first time, with `disk`", "again, in the host pool"]
        head += ["after a restart, files in the page cache", "after a restart, files on the disk alone"]
        lines = [
            [
                f"{row['tokens']:,} tokens",
                f"{row['file_mib']:,.0f} MiB",
                *(f"{row['seconds'][way]:.3f} s" for way in ways),
            ]
            for row in data["rows"]
        ]
        note = (
            "Time to the first token, the bundled model in bfloat16, policy `full`; medians of "
            f"{data['prompts']} prompts. {where(data)} [Data]({link(path)}), `python benchmark/restart.py`."
        )
        out.append(f"{table(head, lines, 'l' + 'r' * (len(head) - 1))}\n{note}\n")
    return "\n".join(out) or nothing("restart.py")


def stall(results: Path) -> str:
    """A line a model and a server: what a long prompt does to the others, and they to it."""
    keys = ("idle_ms", "gap_p99_ms", "short_ttft_ms", "health_ms", "after_hang_up_ttft_ms")
    keys += ("lone_ttft_ms", "long_ttft_ms")
    head = ["model, prompt", "passes", "idle step", "longest gap of a stream", "short request", "`/health`"]
    head += ["after a hang-up", "long prompt, alone", "beside a stream"]
    out = []
    for path, data in result_files(results, "stall.json", "models"):
        lines = [
            [f"{name}, {entry['long']:,}", passes, *(f"{entry['median'][arm][key] / 1e3:.3g} s" for key in keys)]
            for name, entry in sorted(data["models"].items())
            for arm, passes in (("before", "SGLang's"), ("paced", "200 ms"))
        ]
        note = f"Medians of interleaved rounds. {where(data)} [Data]({link(path)}), `python benchmark/stall.py`."
        out.append(f"{table(head, lines, 'll' + 'r' * (len(head) - 2))}\n{note}\n")
    return "\n".join(out) or nothing("stall.py")


TABLES: dict[str, Callable[[Path], str]] = {
    "options": options,
    "metrics": metrics,
    "soak": soak,
    "pool_scale": pool_scale,
    "restart": restart,
    "stall": stall,
    "sanitizers": sanitizers,
    **DECODE_TABLES,
    **QUALITY_TABLES,
    **SUMMARY_TABLES,
    **ROOFLINE_TABLES,
    **HGCA_TABLES,
    **LAYER_TABLES,
    **LOCALITY_TABLES,
    **RACE_TABLES,
    **FORECAST_TABLES,
}


def fill(text: str, results: Path, prefix: str = "") -> str:
    """The text with every marked table rendered anew.

    Args:
        prefix: from the page to the root of the repository, for links.

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
        *sorted((common.ROOT / "docs").glob("*.md")),
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
