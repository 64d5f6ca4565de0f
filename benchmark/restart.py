"""First token of a prompt that an earlier server computed: computed anew, from memory, and from files (option `disk`).

    python benchmark/restart.py            # the bundled model, about five minutes on 2 cores
    python benchmark/restart.py --quick

Two servers, with and without `disk`, take turns with new prompts. `plain` and `cold` are their first tokens, and
`again` is the first token of a prompt that is in the host pool. Then a second server replaces the one with `disk`.
`restarted` is the first token with the files in the operating system's cache, and `disk` with the files dropped from
that cache. The host pool is flushed before each. Times are the client's, medians over the prompts. `same` says whether
all gave the same tokens. Results go to restart.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import common
from tqdm import tqdm

from fluxion_sglang.commands.needle import needle_prompt
from fluxion_sglang.commands.serving import Server, free_port, launch_command, running_server

LENGTHS, QUICK_LENGTHS = (4096, 16384), (2048,)
PROMPTS, QUICK_PROMPTS = 3, 1
NEW = 16
FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--skip-server-warmup", "--sleep-on-idle"),
    *("--max-running-requests", "4", "--chunked-prefill-size", "4096", "--mem-fraction-static", "0.4"),
)
TOKENS = 131072
"""Tokens of each host pool; all prompts fit."""
PATIENCE_S = 120
"""Seconds to wait for a prompt's files."""


def prompts(length: int, count: int) -> list[list[int]]:
    return [needle_prompt(length, 8, 100 + seed).token_ids()[:length] for seed in range(count)]


def ask(server: Server, ids: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens."""
    pieces = list(server.stream([ids], {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}))
    return pieces[0].after, pieces[-1].tokens


def start(stack: ExitStack, folder: Path | None) -> Server:
    port = free_port()
    config = {"policy": "full", "host_tokens": TOKENS} | ({} if folder is None else {"disk": str(folder)})
    command = launch_command(str(common.NEEDLE), port, *FLAGS, fluxion=config)
    return stack.enter_context(running_server(command, port, what=f"a server with{'' if folder else 'out'} disk"))


def size_of(folder: Path) -> int:
    """Bytes of all files in the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def settle(folder: Path, past: int) -> int:
    """Wait until the folder exceeds `past` bytes, because writing starts late, and stops growing; return its size.

    Raises:
        SystemExit: this took too long.
    """
    until = time.monotonic() + PATIENCE_S
    before, now = -1, size_of(folder)
    while now <= past or now != before:
        if time.monotonic() > until:
            raise SystemExit(f"error: files are still not written after {PATIENCE_S} s: {past} bytes before, {now} now")
        time.sleep(1)
        before, now = now, size_of(folder)
    return now


def throw_out(folder: Path) -> None:
    """Drop the folder's files from the operating system's cache, after writing dirty pages."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(lengths: Sequence[int], count: int) -> list[dict[str, Any]]:
    seconds: dict[int, dict[str, list[float]]] = {length: {} for length in lengths}
    answers: dict[int, dict[str, list[list[int]]]] = {length: {} for length in lengths}
    sizes: dict[int, int] = {}
    asked = {length: prompts(length, count) for length in lengths}

    def note(way: str, server: Server, length: int, ids: Sequence[int]) -> None:
        time_s, tokens = ask(server, ids)
        seconds[length].setdefault(way, []).append(time_s)
        answers[length].setdefault(way, []).append(tokens)

    with tempfile.TemporaryDirectory(prefix="fluxion-restart-") as name:
        folder = Path(name)
        with ExitStack() as stack:
            plain, kept = start(stack, None), start(stack, folder)
            size = size_of(folder)
            for server in plain, kept:
                ask(server, prompts(512, 1)[0])  # includes one-off costs
            size = settle(folder, size)
            for length in lengths:
                before = size
                for ids in tqdm(asked[length], desc=f"{length} tokens", disable=None):
                    note("plain", plain, length, ids)
                    note("cold", kept, length, ids)
                    size = settle(folder, size)
                    note("again", kept, length, ids)
                sizes[length] = (size - before) // count
        with ExitStack() as stack:
            server = start(stack, folder)
            ask(server, prompts(512, 1)[0])
            for way in "restarted", "disk":
                for length in lengths:
                    for ids in asked[length]:
                        server.flush()
                        if way == "disk":
                            throw_out(folder)
                        note(way, server, length, ids)
    rows = []
    for length in lengths:
        times = {way: round(median(found), 4) for way, found in seconds[length].items()}
        rows.append(
            {
                "tokens": length,
                "file_mib": round(sizes[length] / 2**20, 1),
                "seconds": times,
                "samples": {way: [round(one, 4) for one in found] for way, found in seconds[length].items()},
                "cold_to_restarted": round(times["cold"] / times["restarted"], 1),
                "cold_to_disk": round(times["cold"] / times["disk"], 1),
                "cold_to_plain": round(times["cold"] / times["plain"], 3),
                "same": all(found == answers[length]["plain"] for found in answers[length].values()),
            }
        )
    return rows


def main() -> None:
    args = common.arguments(__doc__, "one short prompt").parse_args()
    lengths, count = (QUICK_LENGTHS, QUICK_PROMPTS) if args.quick else (LENGTHS, PROMPTS)
    rows = common.told(measure(lengths, count))
    common.publish(args, "restart", rows, model="needle", new_tokens=NEW, prompts=count, flags=list(FLAGS))


if __name__ == "__main__":
    main()
