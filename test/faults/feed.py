"""Send malformed bodies to a server on which two neighbours stream, and check every request and the server.

    PYTHONPATH=test:. python -m faults --seed 1 --bodies 1000          # in one process, without sockets
    PYTHONPATH=test:. python -m faults --seed 1 --only 17              # one body of that again
    PYTHONPATH=test:. python -m faults --seed 1 --bodies 500 --url http://127.0.0.1:30000

After each round of bodies, the neighbours have the same tokens as alone, each body has one answer, SGLang's idle check
finds no leak, and the host pool holds what was written there. A seed also chooses the server's options, unless --server
does. The exit status is 1 if a check failed; the bodies are printed with seed and index.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults import bodies, scenes
from faults.child import Child, resident_gib
from faults.inprocess import InProcess
from faults.wire import Call

SERVERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": (["--context-length", "512"], {}),
    "chunked": (["--chunked-prefill-size", "32", "--enable-mixed-chunk", "--enable-streaming-session"], {}),
    "serial": (["--disable-overlap-schedule", "--chunked-prefill-size", "64"], {}),
    "embeds": (["--disable-radix-cache", "--context-length", "512"], {}),
    "drafts": (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"], {}),
}
"""Flags, and entries of --fluxion-config."""

POOL = 768
"""Tokens of the host pool: answers and prompts that exceed it are still short."""

SESSION_ROUNDS = 16
"""Rounds until sessions are closed and others opened."""

PATIENCE_S = 60.0


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(prog="faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--bodies", type=int, default=200, help="how many")
    words.add_argument("--first", type=int, default=0, help="index of the first one")
    words.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="these bodies, in one round")
    words.add_argument("--server", choices=SERVERS, help="options of the server; without it the seed chooses")
    words.add_argument("--together", type=int, default=3, help="bodies of a round")
    words.add_argument("--failures", type=int, default=5, help="stop after this number of failures")
    words.add_argument("--json", type=Path, help="a file for the summary")
    words.add_argument("--url", help="a running server; the bodies go there")
    return words


def rounds(args: argparse.Namespace) -> Iterator[list[int]]:
    """Indices of the bodies that are sent together."""
    if args.only:
        yield list(args.only)
        return
    last = args.first + args.bodies
    for first in range(args.first, last, args.together):
        yield list(range(first, min(first + args.together, last)))


class Tally:
    """Counts of results, and lines that report them."""

    def __init__(self, seed: int, server: str) -> None:
        self.seed, self.server = seed, server
        self.codes: Counter[str] = Counter()
        self.bodies = self.contained = 0
        self.failures: list[dict[str, Any]] = []
        bodies.schemas()  # importing SGLang takes longer than many bodies
        self.started = time.monotonic()
        self.memory: list[float] = []
        """GiB of the server at each report."""

    def answered(self, codes: Sequence[int]) -> None:
        self.bodies += len(codes)
        self.codes.update(map(str, codes))

    def failed(self, indices: Sequence[int], calls: Sequence[Call], error: BaseException) -> None:
        lines = [{"seed": self.seed, "index": i, "call": repr(call)} for i, call in zip(indices, calls, strict=True)]
        self.failures.append({"bodies": lines, "error": str(error)})
        print(f"\nFAILED with --seed {self.seed} --server {self.server} --only {' '.join(map(str, indices))}")
        for call in calls:
            print(f"  {call.path} at={call.at} hang_up={call.hang_up}\n    {json.dumps(call.body)[:2000]}")
        print(f"  {type(error).__name__}: {str(error)[:6000]}\n", flush=True)

    def report(self, end: str = "\n") -> None:
        seconds = time.monotonic() - self.started
        memory = f", {self.memory[-1]:.2f} GiB ({self.memory[-1] - self.memory[0]:+.3f})" if self.memory else ""
        print(
            f"{self.bodies} bodies, {self.bodies / max(seconds, 1e-9):.1f} a second; "
            f"{dict(sorted(self.codes.items()))}; {self.contained} contained; {len(self.failures)} failed{memory}",
            end=end, flush=True,
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.started
        return {
            "seed": self.seed, "server": self.server, "bodies": self.bodies, "seconds": round(seconds, 1),
            "statuses": dict(sorted(self.codes.items())), "contained": self.contained, "failures": self.failures,
            "memory_gib": [round(one, 3) for one in self.memory],
        }  # fmt: skip


# --- In one process.


def play(server: InProcess, calls: list[Call]) -> list[int]:
    return [answer.code for answer in scenes.beside(server, calls, patience=PATIENCE_S)]


def open_sessions(server: InProcess) -> list[str]:
    streaming = bool(getattr(server.args, "enable_streaming_session", False))
    return [server.open_session(), server.open_session(streaming=streaming)]


def close_sessions(server: InProcess) -> None:
    """Close all sessions; bodies may open some too."""
    for name in list(server.scheduler.session_controller.sessions):
        server.close_session(name)
    server.idle_check()


def contained(server: InProcess) -> int:
    return contained_of(str(server.ask(path="/metrics/", method="GET").data))


def contained_of(metrics: str) -> int:
    """Number of failures that the server survived, from its metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("fluxion_contained")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def in_process(args: argparse.Namespace, tally: Tally) -> None:
    flags, config = SERVERS[tally.server]
    log = Path(tempfile.mkdtemp(prefix="faults-")) / "server.log"
    with Child(*flags, log=log, config={"canary": 1.0, "host_tokens": POOL, **config}) as child:
        names: list[str] = []
        seen = before = 0
        for number, indices in enumerate(rounds(args)):
            calls = [bodies.call(tally.seed, index) for index in indices]
            try:
                if child.starts != seen or number % SESSION_ROUNDS == 0:
                    if child.starts == seen and names:
                        child.run(close_sessions)
                    names = child.run(open_sessions)
                    seen, before = child.starts, 0 if child.starts != seen else before
                rng = random.Random(f"{tally.seed}:{indices[0]}:sessions")
                calls = [replace(call, body=bodies.with_session(call.body, rng.choice(names))) for call in calls]
                tally.answered(child.run(play, calls))
            except AssertionError as error:
                tally.failed(indices, calls, error)
                if len(tally.failures) >= args.failures:
                    break
                continue
            if number % 50 == 0:
                now = child.run(contained)
                tally.contained, before = tally.contained + now - before, now
                tally.memory.append(resident_gib(child.pid))
                tally.report("\r" if sys.stdout.isatty() else "\n")
        if child.alive and names:
            try:
                child.run(close_sessions)
                tally.contained += child.run(contained) - before
                tally.memory.append(resident_gib(child.pid))
            except AssertionError as error:
                tally.failed([], [], error)


# --- Over HTTP.


def over_http(args: argparse.Namespace, tally: Tally) -> None:
    import asyncio

    asyncio.run(_over_http(args, tally))


async def _over_http(args: argparse.Namespace, tally: Tally) -> None:
    import asyncio

    import httpx

    # One connection per request: connections that a client abandoned are not reused.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=args.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:

        async def stream(which: int) -> list[int]:
            """Tokens of a neighbour, which streams."""
            body = {**scenes.neighbour(which).body, "stream": True}
            last: dict[str, Any] = {}
            async with client.stream("POST", "/generate", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        last = json.loads(line[6:])
            assert (last.get("meta_info") or {}).get("finish_reason"), f"neighbour {which} got {str(last)[:500]}"
            return list(last["output_ids"])

        async def send(call: Call) -> int:
            await asyncio.sleep(call.at * 0.003)
            content = json.dumps(call.body).encode()
            headers = {"content-type": "application/json"}
            leaves = None if call.hang_up is None else call.hang_up * 0.003
            try:
                request = client.request(call.method, call.path, content=content, headers=headers)
                return (await asyncio.wait_for(request, leaves)).status_code
            except TimeoutError:
                return 0  # this client hung up
            except httpx.HTTPError as error:
                raise AssertionError(f"no whole answer from {call.path}: {type(error).__name__} {error}") from error

        alone = [await stream(which) for which in range(2)]
        before = contained_of((await client.get("/metrics", follow_redirects=True)).text)
        session = (await client.post("/open_session", json={"capacity_of_str_len": 100_000})).json()
        for number, indices in enumerate(rounds(args)):
            calls = [bodies.call(tally.seed, index) for index in indices]
            calls = [replace(call, body=bodies.with_session(call.body, session)) for call in calls]
            try:
                streams = [asyncio.ensure_future(stream(which)) for which in range(2)]
                await asyncio.sleep(0.02)
                tally.answered(await asyncio.gather(*map(send, calls)))
                got = await asyncio.gather(*streams)
                assert got == alone, f"the neighbours got {got}, and alone {alone}"
            except (AssertionError, httpx.HTTPError) as error:
                tally.failed(indices, calls, error)
                if len(tally.failures) >= args.failures:
                    break
            if number % 50 == 0:
                tally.report("\r" if sys.stdout.isatty() else "\n")
        tally.contained = contained_of((await client.get("/metrics", follow_redirects=True)).text) - before
        await asyncio.sleep(3)  # everything that clients left behind has ended by then
        health = await client.get("/health_generate")
        if health.status_code != 200:
            tally.failed([], [], AssertionError(f"/health_generate says {health.status_code}"))


def main() -> int:
    args = parser().parse_args()
    tally = Tally(args.seed, "url" if args.url else args.server or list(SERVERS)[args.seed % len(SERVERS)])
    (over_http if args.url else in_process)(args, tally)
    tally.report()
    print(json.dumps({**tally.summary(), "failures": len(tally.failures)}))
    if args.json:
        args.json.write_text(json.dumps(tally.summary(), indent=1) + "\n")
    return int(bool(tally.failures))
