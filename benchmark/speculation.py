"""TPOT with NGRAM speculative decoding and without it, on text that repeats itself: two servers that take turns.

    python benchmark/speculation.py            # the bundled model, about ten minutes
    python benchmark/speculation.py --quick

Both servers have the flag and the policy `full`, and the same prompts: documents with questions and answers behind
them, which the model goes on with. A cell is a prompt length and a batch; a round asks one server, then the other, and
each prompt is in their caches. TPOT is (last token - first token) / (tokens - 1) of a request, by the clock of the
client, and of a batch the median of its requests. `accepted` is how many tokens a verify pass added, `same` whether the
servers gave the same tokens: in float32 they do. Results go to speculation.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import common
from tqdm import tqdm

from fluxion_sglang.commands.needle import needle_prompt
from fluxion_sglang.commands.serving import Server, free_port, launch_command, running_server

LENGTHS, QUICK_LENGTHS = (4096, 16384, 31744), (2048,)
BATCHES, QUICK_BATCHES = (1, 4), (1,)
NEW = 256
ROUNDS, QUICK_ROUNDS = 5, 2
WAYS = {"plain": (), "ngram": ("--speculative-algorithm", "NGRAM")}
FLAGS = (
    *(
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--max-running-requests",
        "4",
    ),
    *("--chunked-prefill-size", "4096", "--max-total-tokens", "160000", "--mem-fraction-static", "0.4"),
)


def prompts(length: int, batch: int) -> list[list[int]]:
    """Documents of about so many tokens, each with its questions and their answers behind it, again and again."""
    found = []
    for seed in range(batch):
        prompt = needle_prompt(length - 512, 4, seed)
        pairs = [(*question.token_ids, *question.answer_ids) for question in prompt.questions]
        tail = list(itertools.islice(itertools.cycle(itertools.chain.from_iterable(pairs)), 512))
        found.append((prompt.token_ids() + tail)[:length])
    return found


def ask(server: Server, asked: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
    """Milliseconds a token, and the tokens of each request."""
    first: dict[int, tuple[float, int]] = {}
    last: dict[int, tuple[float, list[int]]] = {}
    for piece in server.stream(asked, {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}):
        first.setdefault(piece.request, (piece.after, len(piece.tokens)))
        last[piece.request] = piece.after, piece.tokens
    times = [
        (last[i][0] - first[i][0]) / max(len(last[i][1]) - first[i][1], 1) * 1e3 for i in range(len(asked))
    ]  # fmt: skip
    return median(times), [last[i][1] for i in range(len(asked))]


def accepted(server: Server, asked: Sequence[Sequence[int]]) -> float:
    """Tokens that a verify pass added, on average."""
    reply: Any = server.generate(
        {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}, input_ids=[list(ids) for ids in asked]
    )
    verified = [one["meta_info"]["spec_verify_ct"] for one in reply]
    return round((NEW - 1) * len(asked) / sum(verified), 2)


def measure(servers: dict[str, Server], length: int, batch: int, rounds: int) -> dict[str, Any]:
    asked = prompts(length, batch)
    times: dict[str, list[float]] = {way: [] for way in servers}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for way, server in servers.items():
            time, answers[way] = ask(server, asked)
            if turn > 0:  # the first one prefills
                times[way].append(time)
    tpot = {way: round(median(found), 3) for way, found in times.items()}
    ratios = [plain / ngram for plain, ngram in zip(times["plain"], times["ngram"], strict=True)]
    return {
        "length": length,
        "batch": batch,
        "tpot_ms": tpot,
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "accepted": accepted(servers["ngram"], asked),
        "same": answers["plain"] == answers["ngram"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short prompt")
    parser.add_argument("--machine", default=common.machine_name(), help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    args = parser.parse_args()
    path = common.result_path(args, "speculation")
    lengths, batches = (QUICK_LENGTHS, QUICK_BATCHES) if args.quick else (LENGTHS, BATCHES)
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    flags = {way: [*FLAGS, *more] for way, more in WAYS.items()}
    header = {**common.header("speculation"), "model": "needle", "new_tokens": NEW, "rounds": rounds, "flags": flags}
    result = common.resume(path, header, (*common.SAME, "new_tokens", "rounds", "flags"), args.fresh)
    cells = [cell for cell in itertools.product(lengths, batches) if cell not in _done(result)]
    with ExitStack() as stack:
        servers = {}
        for way, words in flags.items() if cells else ():
            port = free_port()
            command = launch_command(str(common.NEEDLE), port, *words, fluxion={"policy": "full"})
            servers[way] = stack.enter_context(running_server(command, port, what=f"the server: {way}"))
        for length, batch in tqdm(cells, disable=None):
            result["rows"].append(measure(servers, length, batch, rounds))
            common.save(path, result)
    for row in result["rows"]:
        print(row)


def _done(result: dict[str, Any]) -> set[tuple[int, int]]:
    return {(row["length"], row["batch"]) for row in result["rows"]}


if __name__ == "__main__":
    main()
