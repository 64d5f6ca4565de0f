"""Tables of other times: layers and prompts, servers, and other systems beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean, median

from rendering import (
    Columns,
    Data,
    Row,
    Table,
    at,
    columns_of,
    link,
    medians,
    over,
    per_file,
    pivot,
    source,
    table,
)

# The model's other layers, and prompts


SHOWN_ROWS = (1, 4, 8, 32)


def peer_columns(ours: str, value: str, head: Columns, data: Data) -> Columns:
    """`head`, then a column for each other peer, with what it takes over ours."""
    others = dict.fromkeys(row["peer"] for row in data["rows"] if row["peer"] != ours)
    return {**head, **{f"{peer} / {ours}": at(peer, value, form="{:.2f}x") for peer in others}}


def linear_columns(data: Data) -> Columns:
    """Ours, then those of fewer bits with what they read of the stream, then what the peers take over ours."""
    shape = "{outputs:,} x {inputs:,} | {rows} | {ours[gb_per_s]:.0f} | {ours[of_stream]:.0%}"
    bits = [peer for peer in dict.fromkeys(row["peer"] for row in data["rows"]) if peer.endswith("bits")]
    few = {**data, "rows": [row for row in data["rows"] if row["peer"] not in bits]}
    head = columns_of("weights | rows | GB/s | of the stream", shape)
    for peer in bits:
        head[f"{peer} / ours"] = at(peer, "over_ours", form="{:.2f}x")
        head[f"{peer}: of the stream"] = at(peer, "of_stream", form="{:.0%}")
    return peer_columns("ours", "over_ours", head, few)


linears = Table(
    "linears.json",
    linear_columns,
    "Medians of {rounds} interleaved rounds, bfloat16.",
    lambda data: pivot(
        (row for row in data["rows"] if row["rows"] in SHOWN_ROWS), ("outputs", "inputs", "rows"), "peer"
    ),
)


def int8_rows(data: Data) -> list[Row]:
    """A row a model and depth: its answers, and times by batch, 0 that of the first token."""
    found = []
    for row in data["rows"]:
        for depth in sorted({cell["depth"] for cell in row["times"]}):
            cells = {cell["batch"]: cell for cell in row["times"] if cell["depth"] == depth}
            found.append({**row, "depth": depth, "cells": cells})
    return found


experts = Table(
    "experts.json",
    columns_of(
        "rows | experts read | by | of the stream | over ours",
        "{rows} | {active:.0f} | {who} | {of_stream:.0%} | {over_ours:.2f}x",
    ),
    "A layer of Qwen3-30B-A3B: 128 experts of 2,048 x 768, 8 for a row. Medians of {rounds} interleaved rounds.",
)
slices = Table(
    "slices.json",
    columns_of(
        "model | weights | layers | ms a layer | ms a token | tokens/s of a prompt",
        "{model} | {weights} | {layers} | {layer_ms:.2f} | {whole_ms:.0f} | {prompt_tokens_per_s:.0f}",
    ),
    "Random weights in the model's shapes. One request with {prompt} tokens of context, policy `full`. A layer: half "
    "the difference of models with 1 and 3 layers. A token and a prompt of the whole model: by arithmetic.",
    align="llrrrr",
)
same_file = Table(
    "same_file.json",
    {
        "file": "{model}",
        "what": "{what}",
        "tokens before": "{depth:,}",
        **{
            name: f"{{each[{way}]:.1f}}"
            for name, way in {
                "llama.cpp": "llama.cpp",
                "with flash attention": "llama.cpp, flash attention",
                "and KV in q8_0": "llama.cpp, flash attention, KV in q8_0",
                "Fluxion `full`": "Fluxion `full`",
                "Fluxion `sketch`": "Fluxion `sketch`",
            }.items()
        },
        "`full` / fastest llama.cpp": "{ratio[Fluxion `full`]:.2f}x",
    },
    "Steps: milliseconds, less is better. Prompts: tokens a second, more is better. Medians of {steps} steps; "
    "rounds in turns: {rounds}.",
    lambda data: (
        {**row, "what": f"step, batch {row['batch']}" if row["batch"] else "prompt"}
        for row in sorted(data["rows"], key=lambda row: (row["model"], row["batch"] == 0, row["batch"], row["depth"]))
    ),
)
int8_weights = Table(
    "int8_weights.json",
    {
        "model": "{model}",
        "perplexity": "{change:+.2%} [{low:+.2%}, {high:+.2%}]",
        "KL": "{kl:.4f}",
        "same likeliest token": "{same:.1%}",
        "tokens before": "{depth:,}",
        **{
            f"batch {b}: ms a step, of bfloat16's": f"{{cells[{b}][int8_ms]:.1f}}, {{cells[{b}][ratio]:.2f}}x"
            for b in (1, 4, 8)
        },
        "first token": "{cells[0][ratio]:.2f}x",
    },
    "Answers: {windows} windows of {tokens:,} tokens of a book, in float32, against the weights before they were "
    "rounded. Times: policy `full`, medians of {rounds} rounds in turns.",
    int8_rows,
)
prompt_attention = Table(
    "prefill.json",
    partial(
        peer_columns,
        "full",
        "over_full",
        columns_of(
            "prompt | head dimension | GFLOP/s | of a matrix product",
            "{tokens:,} | {head_dim} | {full[gflop_per_s]:.0f} | {full[of_matrix]:.0%}",
        ),
    ),
    "Medians of {rounds} interleaved rounds, bfloat16, 2 KV heads with 4 query heads each.",
    lambda data: pivot(data["rows"], ("tokens", "head_dim"), "peer"),
    align="",
)


def first_token_columns(data: Data) -> Columns:
    """A column a way: without the flag, exact, and by budgets of the prefill."""
    off, exact, *sparse = dict.fromkeys(row["way"] for row in data["rows"])
    heads = {off: "without the flag (s)", exact: "exact (s)", **{way: f"{way} (s)" for way in sparse}}
    return (
        columns_of("model | prompt", "{model} | {tokens:,}")
        | {head: at(way, form="{:.2f}") for way, head in heads.items()}
        | {"without / exact": over(off, exact)}
        | {f"exact / {way}": over(exact, way) for way in sparse}
    )


first_token = Table(
    "first_token.json",
    first_token_columns,
    "Medians of {rounds} rounds, in which the servers take turns.",
    lambda data: medians(data["rows"], ("model", "tokens"), "way", "seconds"),
    told=True,
)

# Servers

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
pool_scale = Table(
    "pool_scale.json",
    lambda data: {
        "milliseconds, in a pool of": "{text}",
        **{f"{row['tokens']:,} tokens": at("ms", i, form="{:,.2f}") for i, row in enumerate(data["rows"])},
        "last / first": lambda row: f"{row['ms'][-1] / row['ms'][0]:.1f}x",
    },
    "A token has one layer and one KV head of 32 elements. The pools are full of prompts of {prompt:,} tokens; medians "
    "of {turns}.",
    lambda data: [{"text": text, "ms": [row[key] for row in data["rows"]]} for key, text in POOL_OPERATIONS.items()],
    told=True,
)
restart = Table(
    "restart.json",
    columns_of(
        "prompt | files | without `disk` | first time, with `disk` | again, in the host pool | after a restart, "
        "files in the page cache | after a restart, files on the disk alone",
        "{tokens:,} tokens | {file_mib:,.0f} MiB | {seconds[plain]:.3f} s | {seconds[cold]:.3f} s | "
        "{seconds[again]:.3f} s | {seconds[restarted]:.3f} s | {seconds[disk]:.3f} s",
    ),
    "Time to the first token, the bundled model in bfloat16, policy `full`; medians of {prompts} prompts.",
    told=True,
)
STALLED = columns_of(
    "idle_ms | gap_p99_ms | short_ttft_ms | health_ms | after_hang_up_ttft_ms | lone_ttft_ms | long_ttft_ms",
    "idle step | longest gap of a stream | short request | `/health` | after a hang-up | long prompt, alone | beside "
    "a stream",
)
stall = Table(
    "stall.json",
    (
        columns_of("model, prompt | passes", "{name}, {long:,} | {passes}")
        | {head: lambda row, key=key: f"{row[key] / 1e3:.3g} s" for key, head in STALLED.items()}
    ),
    "Medians of interleaved rounds.",
    lambda data: [
        {"name": name, "long": entry["long"], "passes": passes, **entry["median"][arm]}
        for name, entry in sorted(data["models"].items())
        for arm, passes in (("before", "SGLang's"), ("paced", "200 ms"))
    ],
    align="ll",
    told=True,
    part="models",
)
soak = Table(
    "soak*.json",
    columns_of(
        "process | memory (MiB) | growth (MiB an hour) | 95% interval | file descriptors | threads",
        "{process} | {rss_mib:,.0f} | {mib_per_hour:+.1f} | {low:+.1f} to {high:+.1f} | {fds} | {threads}",
    ),
    lambda data: (
        f"After {data['minutes']:.0f} minutes, {data['tp']} rank(s), {data['rows'][-1]['done']:,} requests and "
        f"interferences, {data['happened']['retracted requests']} retractions, "
        f"{data['happened']['evicted tokens']:,} evicted tokens: {data['leaked_tokens']} leaked tokens, "
        f"{len(data['wrong'])} wrong or lost answers, the same from the canary all {data['canaries'].split()[0]} times."
    ),
    lambda data: data["processes"],
    command="make soak",
)
sanitizers = Table(
    "sanitizers.json",
    (
        {"sanitizer": "{sanitizer}", "test files": lambda row: str(len(row["tests"]))}
        | {key: f"{{{key}:,}}" for key in ("passed", "skipped", "failed", "reports")}
        | {"minutes": lambda row: f"{row['seconds'] / 60:.0f}"}
    ),
    "Property tests with {effort:g} times their usual number of examples; minutes without the build.",
    command="make sanitize",
)

# The race

OURS = "Fluxion `full`"
"""What the others are compared with."""


def slope(points: dict[int, float]) -> float | None:
    """Least squares through (tokens, milliseconds): milliseconds for 1,024 tokens more; None for one point."""
    if len(points) < 2:
        return None
    middle, level = mean(points), mean(points.values())
    spread = sum((x - middle) ** 2 for x in points)
    return 1024 * sum((x - middle) * (y - level) for x, y in points.items()) / spread


def gb_per_s(ms: float | None, batch: int, kv_bytes: int) -> float | None:
    """GB (10^9 bytes) of KV for each second that a slope adds; None where it adds nothing."""
    return None if ms is None or ms <= 0 else batch * kv_bytes * 1024 / ms / 1e6


def growth(rows: Iterable[Row]) -> float | None:
    """The median of the slopes within rounds, which a drifting machine changes least; None where their signs differ."""
    turns: dict[int, dict[int, float]] = {}
    for row in rows:
        if "failed" not in row:
            turns.setdefault(row["round"], {})[row["depth"]] = row["decode_ms"]
    slopes = [each for points in turns.values() if (each := slope(points)) is not None]
    return median(slopes) if len({each > 0 for each in slopes}) == 1 else None


def ratio(rows: Iterable[Row], ours: Iterable[Row], value: str) -> str:
    """Over ours: the median of the ratios within rounds, which a drifting machine changes least."""
    base = {row["round"]: row[value] for row in ours if value in row}
    found = [row[value] / base[row["round"]] for row in rows if value in row and row["round"] in base]
    return f"{median(found):.2f}x" if found else ""


def by_system(rows: Iterable[Row]) -> dict[str, dict[int, list[Row]]]:
    """Rows by system and depth, in the order in which they ran."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["system"], {}).setdefault(row["depth"], []).append(row)
    return found


def typical(value: Callable[[Row], float], form: str, rows: list[Row]) -> str:
    """The median over rounds, or why there is none."""
    values = [value(row) for row in rows if "failed" not in row]
    return form.format(median(values)) if values else rows[-1]["failed"] if rows else ""


def race_columns(first: str, depths: list[int], head: str, value: Callable[[Row], float], form: str) -> Columns:
    """The system, and a column a depth."""
    return {
        first: "{system}",
        **{
            head.format(f"{depth:,}"): lambda row, depth=depth: typical(value, form, row["at"].get(depth, []))
            for depth in depths
        },
    }


def race_rows(rows: list[Row], value: str) -> tuple[list[int], list[Row]]:
    """Depths, and a row a system: its rows by depth, those of the deepest, and their `value` over ours."""
    depths, found = sorted({row["depth"] for row in rows}), by_system(rows)
    ours = found.get(OURS, {}).get(depths[-1], [])
    return depths, [
        {
            "system": system,
            "at": of,
            "last": of.get(depths[-1], []),
            "ratio": ratio(of.get(depths[-1], []), ours, value),
        }
        for system, of in found.items()
    ]


def _decode(data: Data, model: str, batch: int) -> str:
    of = [row for row in data["rows"] if row["model"] == model and row.get("batch", batch) == batch]
    depths, rows = race_rows(of, "decode_ms")
    for row in rows:
        row["timed"] = [one for one in row["last"] if "cpu_median_ms" in one]
        row["grows"] = growth(one for some in row["at"].values() for one in some)
        row["speed"] = gb_per_s(row["grows"], batch, data["models"][model]["kv_bytes"])
    cpu = {"CPU time there (ms)": lambda row: typical(lambda one: one["cpu_median_ms"], "{:,.1f}", row["timed"])}
    columns = (
        race_columns(f"batch {batch}", depths, "at {} (ms)", lambda row: row["decode_ms"], "{:,.1f}")
        | {f"at {depths[-1]:,} / {OURS}": "{ratio}"}
        | (cpu if any(row["timed"] for row in rows) else {})
        | columns_of("1,024 tokens more (ms) | KV at that slope (GB/s)", "{grows:.3f} | {speed:.1f}")
    )
    return table(columns, rows)


def _prefill(data: Data, model: str) -> str:
    least = min(data["batches"])
    of = [row for row in data["rows"] if row["model"] == model and row.get("batch", least) == least]
    depths, rows = race_rows(of, "prefill_s")
    rows = [row for row in rows if not row["system"].startswith("Fluxion") or row["system"] == OURS]
    for row in rows:
        row["system"] = row["system"].removesuffix(" `full`")
        peaks = [one["peak_gb"] for some in row["at"].values() for one in some if "peak_gb" in one]
        row["peak"] = max(peaks, default=None)
    columns = {
        **race_columns("", depths, "{} (tokens/s)", lambda row: row["depth"] / row["prefill_s"], "{:,.0f}"),
        f"first token at {depths[-1]:,} (s)": lambda row: typical(lambda one: one["prefill_s"], "{:,.1f}", row["last"]),
        "of Fluxion's": "{ratio}",
        **({"peak memory (GB)": "{peak:.1f}"} if any(row["peak"] for row in rows) else {}),
    }
    return table(columns, rows)


def _race(draw: Callable[[Data, str], str], plot: bool, path: Path, data: Data) -> str:
    """What `draw` says of each model, what the model is, and of how many rounds medians are."""
    out = []
    for model, of in data["models"].items():
        cut = f", cut to {of['layers']} layers and {of['cut']['vocab_size']:,} words" if of["cut"] else ""
        size = f"{of['parameters'] / 1e6:,.0f}M parameters, {of['kv_bytes']:,} bytes of KV a token."
        out.append(f"**{model}**{cut}: {size}\n\n{draw(data, model)}")
    counts = Counter(tuple(row.get(key) for key in ("model", "system", "depth", "batch")) for row in data["rows"])
    least, most = min(counts.values()), max(counts.values())
    turns = f"{most}" if least == most else f"{least} to {most}"
    out.append(source(path, data, f"Medians of {turns} round(s), each of {data['steps']} steps."))
    if plot and (drawn := path.with_suffix(".svg")).is_file():
        out.append(f"!{link(drawn, 'A decode step against context')}\n")
    return "\n".join(out)


def race_decode(results: Path) -> str:
    """Time of a decode step by depth, its slope, and the bytes of KV that the slope stands for."""

    def draw(data: Data, model: str) -> str:
        return "\n".join(_decode(data, model, batch) for batch in sorted(data["batches"]))

    return per_file(results, "race.json", partial(_race, draw, True), "python benchmark/race.py")


def race_prefill(results: Path) -> str:
    """Tokens a second of a prompt that runs alone, the time to its first token, and peak memory if rows have it."""
    return per_file(results, "race.json", partial(_race, _prefill, False), "python benchmark/race.py")


def _settings(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(form.format(name, value) for name, value in row.get(key, {}).items())


race_systems = Table(
    "race.json",
    (
        {"": "{name}"}
        | {
            "versions": _settings("versions", "{} {}"),
            "settings": _settings("settings", "{} {}"),
            "same greedy tokens": _settings("says", "{}: {}"),
        }
        | {"what failed": "{reason}"}
    ),
    rows=lambda data: [{"name": name, **facts} for name, facts in data["systems"].items()],
    align="lllll",
)

SPEED_TABLES: dict[str, Callable[[Path], str]] = {
    "linears": linears,
    "int8_weights": int8_weights,
    "experts": experts,
    "slices": slices,
    "same_file": same_file,
    "prompt_attention": prompt_attention,
    "first_token": first_token,
    "pool_scale": pool_scale,
    "restart": restart,
    "stall": stall,
    "soak": soak,
    "sanitizers": sanitizers,
    "race_decode": race_decode,
    "race_prefill": race_prefill,
    "race_systems": race_systems,
}
