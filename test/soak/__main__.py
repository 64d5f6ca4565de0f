"""Hours of mixed load on a server with a tiny model, and the invariants that it must keep.

    make soak                             # 10 minutes, one rank
    make soak ARGS="--minutes 480 --tp 2"

The server listens on the loopback interface only. Its host pool is small, so that requests are constantly retracted and
prefixes evicted. Storms of requests alternate with quiet moments. In each of these the pool is empty, a canary prompt
gets the same answers as at first, and memory, file descriptors and threads of every process are recorded. SGLang's leak
check stays on. Results go to benchmark/results/<machine>: soak.json for one rank, soak_tp2.json for two. The exit
status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests
from engine import tiny_model, tiny_predictor
from engine.server import LEAK_WORDS, PATIENCE_S, Server
from soak.load import CANARIES, Load
from soak.watch import grown, holdings, slope

from benchmark.common import RESULTS, header, machine_name, save

POOL = 3200
"""Tokens of the host pool: two of the longest prompts with their answers."""
WARM_UP = 0.25
"""Share of a run whose memory is ignored, while allocators and caches fill."""
BOUND_MIB_PER_HOUR = 30.0
"""Growth of a process's memory that counts as a leak, once it is established."""


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--minutes", type=float, default=10, help="of the whole run, the server's start not counted")
    words.add_argument("--storm", type=float, default=20, metavar="SECONDS", help="from one quiet moment to the next")
    words.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    words.add_argument("--seed", type=int, default=1, help="of the requests")
    words.add_argument("--bound", type=float, default=BOUND_MIB_PER_HOUR, metavar="MIB", help="of growth in an hour")
    words.add_argument("--out", type=Path, default=None, help="file of the results")
    return words


def serve(folder: Path, tp: int) -> Server:
    model = tiny_model.build(folder / "model", kv_heads=2)
    predictor = tiny_predictor.build(folder / "predictor", model)
    options = {"policy": "fluxion", "predictor": predictor, "host_tokens": POOL, "sketches": True}
    flags = ["--chunked-prefill-size", "256", "--enable-mixed-chunk", "--schedule-conservativeness", "0.1"]
    # Two ranks on one NUMA node: by default SGLang binds each rank to a node.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}
    env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "50"}
    return Server(
        *flags, *(["--tp", str(tp)] if tp > 1 else []),
        model=model, fluxion=json.dumps(options), env=env, log=folder / "server.log",
    )  # fmt: skip


def quiet(server: Server, load: Load, at: float) -> dict[str, Any]:
    """A moment without requests: idle server, empty pool, canary unchanged. Returns a row of the results."""
    server.flush()
    server.assert_idle()
    used = [int(one["num_used_tokens"]) for one in loads(server)]
    if any(used):
        load.failures.append(f"after {at:.0f} s {used} tokens of the host pool have no owner")
    before = len(load.failures)
    for spec in CANARIES:
        load.ask_canary(spec)
    server.flush()
    held = {name: dataclasses.asdict(one) for name, one in holdings(server.process.pid).items()}
    row = {"at_s": round(at, 1), "done": sum(load.counts.values()), "leaked_tokens": max(used)}
    row["canaries"] = "same" if len(load.failures) == before else "differ"
    return row | {key: {name: one[key] for name, one in held.items()} for key in ("rss_mib", "fds", "threads")}


def loads(server: Server) -> list[dict[str, Any]]:
    """Every replica's report about its pool, which the scheduler publishes at intervals."""
    deadline = time.monotonic() + 10
    while True:
        found = requests.get(server.url + "/v1/loads", timeout=PATIENCE_S).json()["loads"]
        if not any(one["num_used_tokens"] for one in found) or time.monotonic() > deadline:
            return list(found)
        time.sleep(0.5)


def judged(rows: list[dict[str, Any]], bound: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Development of memory, file descriptors and threads by process; and messages about growth."""
    processes, wrong = [], []
    warm = [row for row in rows if row["at_s"] >= WARM_UP * rows[-1]["at_s"]]
    for name in rows[-1]["rss_mib"]:
        seen = [row for row in warm if name in row["rss_mib"]]
        if len(seen) < 3:
            wrong.append(f"{name} was seen {len(seen)} times after the warm-up; make the run longer")
            continue
        fit = slope([row["at_s"] for row in seen], [row["rss_mib"][name] for row in seen])
        if fit.exceeds(bound):
            wrong.append(f"{name} grows by {fit.fit} MiB an hour ({fit.low} to {fit.high}), and {bound} are allowed")
        for what in ("fds", "threads"):
            if grown([row[what][name] for row in seen]):
                wrong.append(f"{what} of {name} grow: {[row[what][name] for row in seen]}")
        ends = {key: seen[-1][key][name] for key in ("rss_mib", "fds", "threads")}
        processes.append({"process": name, "mib_per_hour": fit.fit, "low": fit.low, "high": fit.high} | ends)
    return processes, wrong


def run(words: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with serve(folder, words.tp) as server:
        load = Load(server, words.seed, pool=POOL)
        rows: list[dict[str, Any]] = []
        start = time.monotonic()
        while True:
            rows.append(quiet(server, load, time.monotonic() - start))
            print(f"{rows[-1]['at_s']:8.0f} s  {rows[-1]['done']:7d} done  {len(load.failures)} wrong", flush=True)
            left = 60 * words.minutes - (time.monotonic() - start)
            if left <= 0:
                break
            load.storm(min(words.storm, left))
        metrics = server.metrics()
        log = server.log()
    processes, wrong = judged(rows, words.bound)
    wrong = [*load.failures, *wrong]
    if found := LEAK_WORDS.search(log):
        wrong.append(f"the log says {log[found.start() : found.start() + 200]!r}")
    # Check that the intended events happened.
    happened = dict(sorted(load.counts.items())) | {
        "evicted tokens": int(total(metrics, "evicted_tokens_total")),
        "retracted requests": int(total(metrics, "num_retracted_requests_total")),
        "decode steps of a layer": int(total(metrics, "fluxion_layers_total")),
    }
    needed = ("ask", "fork", "hang up", "abort", "turn", "session turn", "flush", "pause retract", "refused policy")
    wrong += [f"nothing was: {name}" for name in (*needed, *list(happened)[-3:]) if not happened.get(name)]
    return header("soak", paths=("python", "csrc", "test/soak", "test/engine")) | {
        "minutes": round(rows[-1]["at_s"] / 60, 1), "tp": words.tp, "seed": words.seed, "host_tokens": POOL,
        "bound_mib_per_hour": words.bound, "warm_up": WARM_UP, "quiet_moments": len(rows),
        "leaked_tokens": max(row["leaked_tokens"] for row in rows),
        "canaries": f"{load.counts['canary']} answers, {len(CANARIES)} policies",
        "happened": happened, "wrong": wrong[:50], "processes": processes, "rows": rows,
    }  # fmt: skip


def total(metrics: dict[str, float], name: str) -> float:
    return sum(value for sample, value in metrics.items() if re.search(rf"\b\w*{name}(?![a-z_])", sample))


def main() -> int:
    words = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="fluxion-soak-") as folder:
        found = run(words, Path(folder))
    path = words.out or RESULTS / machine_name() / f"soak{f'_tp{words.tp}' if words.tp > 1 else ''}.json"
    save(path, found)
    for one in found["processes"]:
        print(
            f"{one['process']}: {one['rss_mib']} MiB, grows by {one['mib_per_hour']} MiB an hour "
            f"({one['low']} to {one['high']} with 95%, bound {words.bound}); {one['fds']} fds, {one['threads']} threads"
        )
    print(json.dumps(found["happened"]))
    for sentence in found["wrong"]:
        print(f"WRONG: {sentence}")
    print(f"{path}: {'not ' if found['wrong'] else ''}as it has to be")
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
