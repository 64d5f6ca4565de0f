"""Serve the needle model with --enable-fluxion and ask it about a long document.

`python -m fluxion_sglang.commands.demo` starts SGLang on the CPU, sends one document and several questions, in turns
through the OpenAI client and through SGLang's own /generate, and prints the answers and what they cost, all numbers
from the server's /metrics. Exit code 0: every answer is right. Needs a checkout of the repository (models/needle), or
`--model-path`.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Final

from tqdm import tqdm

from fluxion_sglang.commands.here import shell
from fluxion_sglang.commands.needle import MODEL, NeedlePrompt, needle_prompt, score
from fluxion_sglang.commands.serving import (
    MEASURED,
    SMALL,
    TPOT,
    TTFT,
    Server,
    ServerError,
    added,
    free_port,
    launch_command,
    running_server,
)

KEYS: Final = 8
SEED: Final = 5
"""Of a document whose questions the model itself answers."""
MAX_TOKENS: Final = 16
"""Generated per question."""


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""


def server_command(args: argparse.Namespace, port: int) -> list[str]:
    """The command line of the server: what a user would type, with sizes for a small machine."""
    # Every question adds a page or two of its own to the shared document, and every answer some more.
    config = {"policy": args.policy, "host_tokens": (args.length + 128 * (args.questions + 8)) // 16 * 16}
    flags = ["--served-model-name", "needle", "--device", "cpu", *SMALL, *MEASURED, "--enable-cache-report"]
    return launch_command(str(args.model_path), port, *flags, fluxion=config)


def run(args: argparse.Namespace) -> bool:
    """The whole demo; whether every answer was right."""
    document = needle_prompt(args.length, KEYS, SEED)
    port = free_port()
    command = server_command(args, port)
    print(f"A document of {args.length:,} tokens with {KEYS} needles; policy {args.policy}.")
    print(f"$ {shell(command)}\n", flush=True)
    # The demo's device is always the CPU, and the CPU platform stands aside where SGLang sees a GPU.
    with running_server(command, port, {"CUDA_VISIBLE_DEVICES": ""}) as server:
        print(f"\n {'client':<10}{'question':<13}{'answer':<28}{'':<7}{'cached':>14}{'TTFT':>10}{'TPOT':>10}")
        right = []
        count = min(args.questions, len(document.questions))
        with tqdm(range(count), "Asking", leave=False, file=sys.stdout, disable=None) as asking:
            for i in asking:
                ok, line = _one_question(server, document, i)
                right.append(ok)
                tqdm.write(line)
                sys.stdout.flush()
        print()
        _report(server.metrics(), args.length + MAX_TOKENS)
    print(f"\n{sum(right)} of {len(right)} answers are right.")
    if not all(right) and args.policy != "full":
        print("A policy that reads part of the middle may miss; `--policy full` reads all of it.")
    return all(right)


def _one_question(server: Server, document: NeedlePrompt, i: int) -> tuple[bool, str]:
    """Whether the answer is right, and its row of the table; nothing else runs meanwhile."""
    question, prompt = document.questions[i], document.text(i)
    before = server.metrics()
    if i % 2 == 0:
        client = "openai"
        reply = server.openai().completions.create(
            model="needle", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        assert reply.usage is not None
        text, tokens = reply.choices[0].text, reply.usage.prompt_tokens
        details = reply.usage.prompt_tokens_details
        cached = (details and details.cached_tokens) or 0
    else:
        client = "generate"
        found = server.generate({"max_new_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}, text=prompt)
        text, tokens, cached = found["text"], found["meta_info"]["prompt_tokens"], found["meta_info"]["cached_tokens"]
    after = server.settled(before, f"{TPOT}_count")
    ttft, tpot = (value if (value := added(before, after, name)) is not None else math.nan for name in (TTFT, TPOT))
    said = " ".join(text.split()[: len(question.answer_ids)])
    ok = score(question.answer, text)
    verdict = "right" if ok else f"wrong, it is {question.answer}"
    return ok, (
        f" {client:<10}{question.text:<13}{said:<28}{verdict:<7}"
        f"{f'{cached:,}':>7} ({cached / tokens:>4.0%}){ttft:>8.2f} s{tpot * 1e3:>7.1f} ms"
    )


def _report(metrics: dict[str, float], tokens: int) -> None:
    """The engine's counters, as sentences of one line each."""

    def total(name: str) -> float:
        return metrics.get(f"fluxion_{name}_total", 0.0)

    resident = int(metrics.get("fluxion_resident_tokens_per_request", 0))
    pool = int(metrics.get("fluxion_host_pool_tokens", 0))
    if not resident or not total("layers"):
        raise DemoError("The server's /metrics show no decode step that went through Fluxion.")
    key = "fluxion_tasks_total/"
    owners = {name.removeprefix(key): value for name, value in metrics.items() if name.startswith(key)}
    tasks = sum(owners.values())
    shares = ", ".join(f"{name} {count / tasks:.0%}" for name, count in sorted(owners.items()))
    read, metadata = total("tile_bytes") + total("metadata_bytes"), total("metadata_bytes")
    print(f" On the device   at most {resident:,} of a request's {tokens:,} tokens ({resident / tokens:.1%})")
    print(f" In the pool     all of them; the host pool holds {pool:,} tokens")
    print(f" Tasks           {tasks:,.0f}: {shares}")
    share = total("read_tokens") / total("middle_tokens")
    print(f" Middle read     {share:.1%} of its tokens by a head in a step, after sharing in the group")
    print(f" Memory read     {read / 2**20:,.1f} MiB by all tasks, {metadata / 2**20:,.1f} of it metadata")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fluxion_sglang.commands.demo",
        description="Serve the needle model with --enable-fluxion and ask it about a long document.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--length", type=int, default=16384, help="tokens of a prompt")
    option("--questions", type=int, default=6, help=f"how many to ask, {KEYS} at most")
    option("--policy", default="auto", help="policy spec, as in --fluxion-config; auto is fluxion here")
    option("--model-path", type=Path, default=MODEL, help="the needle model")
    args = parser.parse_args(argv)
    try:
        if not (args.model_path / "config.json").exists():
            raise DemoError(f"There is no model in {args.model_path}; use a checkout or pass --model-path.")
        return 0 if run(args) else 1
    except (DemoError, ServerError, ValueError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
