"""Serve the needle model with --enable-fluxion and ask it about a long document.

`python -m fluxion_sglang.commands.demo` starts SGLang on the CPU, sends one document and several questions through the
OpenAI client and through SGLang's own /generate, and prints the answers and what they cost, all numbers from
the server's /metrics. Exit code 0: every answer is right. Needs a checkout of the repository (models/needle),
or `--model-path`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

from tqdm import tqdm

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
    shell,
)


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer and what it cost.

    Attributes:
        cached: prompt tokens whose KV the radix tree found in the host pool.
        ttft, tpot: seconds, from /metrics; nan where it does not say.
    """

    client: str
    text: str
    prompt_tokens: int
    cached: int
    ttft: float
    tpot: float


def server_command(args: argparse.Namespace, port: int) -> list[str]:
    """The command line of the server: what a user would type, with sizes for a small machine."""
    # Every question adds a page or two of its own to the shared document, and every answer some more.
    host_tokens = args.host_tokens or (args.length + 128 * (args.questions + 8)) // 16 * 16
    config = {"policy": args.policy, "host_tokens": host_tokens, "executors": args.executors}
    flags = ["--served-model-name", "needle", "--device", "cpu", *SMALL, *MEASURED, "--enable-cache-report"]
    return launch_command(str(args.model_path), port, *flags, fluxion=config)


def _openai(server: Server, prompt: str, max_tokens: int) -> tuple[str, int, int]:
    """Text, prompt tokens and cached tokens of a completion through the OpenAI client."""
    reply = server.openai().completions.create(
        model="needle", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    return reply.choices[0].text, reply.usage.prompt_tokens, (details and details.cached_tokens) or 0


def _generate(server: Server, prompt: str, max_tokens: int) -> tuple[str, int, int]:
    """The same through SGLang's native endpoint."""
    reply = server.generate({"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}, text=prompt)
    meta = reply["meta_info"]
    return reply["text"], meta["prompt_tokens"], meta["cached_tokens"]


def ask(server: Server, client: str, prompt: str, max_tokens: int) -> Reply:
    """Send one prompt while nothing else runs, and read its times from /metrics."""
    before = server.metrics()
    send = _openai if client == "openai" else _generate
    text, prompt_tokens, cached = send(server, prompt, max_tokens)
    after = server.settled(before, f"{TPOT}_count")
    ttft, tpot = (value if (value := added(before, after, name)) is not None else math.nan for name in (TTFT, TPOT))
    return Reply(client, text.strip(), prompt_tokens, cached, ttft, tpot)


def run(args: argparse.Namespace) -> bool:
    """The whole demo; whether every answer was right."""
    document = needle_prompt(args.length, args.keys, args.seed)
    questions = min(args.questions, len(document.questions))
    command = server_command(args, args.port)
    print(f"A document of {args.length:,} tokens with {args.keys} needles; policy {args.policy}.")
    print(f"$ {shell(command)}\n", flush=True)
    # The demo's device is always the CPU, and the CPU platform stands aside where SGLang sees a GPU.
    with running_server(command, args.port, {"CUDA_VISIBLE_DEVICES": ""}) as server:
        print(f"\n {'client':<10}{'question':<13}{'answer':<28}{'':<7}{'cached':>14}{'TTFT':>10}{'TPOT':>10}")
        right = []
        with tqdm(range(questions), "Asking", leave=False, file=sys.stdout, disable=None) as asking:
            for i in asking:
                client = ("openai", "generate")[i % 2]
                ok, line = _one_question(server, document, i, client, args.max_tokens)
                right.append(ok)
                tqdm.write(line)
                sys.stdout.flush()
        print()
        _report(server.metrics(), args.length + args.max_tokens)
    print(f"\n{sum(right)} of {len(right)} answers are right.")
    if not all(right) and args.policy != "full":
        print("A policy that reads part of the middle may miss; `--policy full` reads all of it.")
    return all(right)


def _one_question(server: Server, document: NeedlePrompt, i: int, client: str, max_tokens: int) -> tuple[bool, str]:
    """Whether the answer is right, and its row of the table."""
    question = document.questions[i]
    reply = ask(server, client, document.text(i), max_tokens)
    said = " ".join(reply.text.split()[: len(question.answer_ids)])
    ok = score(question.answer, reply.text)
    verdict = "right" if ok else f"wrong, it is {question.answer}"
    return ok, (
        f" {client:<10}{question.text:<13}{said:<28}{verdict:<7}"
        f"{f'{reply.cached:,}':>7} ({reply.cached / reply.prompt_tokens:>4.0%}){reply.ttft:>8.2f} s"
        f"{reply.tpot * 1e3:>7.1f} ms"
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
    middle, read = total("middle_tokens"), total("read_tokens")
    print(f" On the device   at most {resident:,} of a request's {tokens:,} tokens ({resident / tokens:.1%})")
    print(f" In the pool     all of them; the host pool holds {pool:,} tokens")
    print(f" Tasks           {tasks:,.0f}: {shares}")
    print(f" Middle read     {read / middle:.1%} of its tokens by a head in a step, after sharing in the group")
    print(
        f" Memory read     {(total('tile_bytes') + total('metadata_bytes')) / 2**20:,.1f} MiB by all tasks, "
        f"{total('metadata_bytes') / 2**20:,.1f} of it metadata"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fluxion_sglang.commands.demo",
        description="Serve the needle model with --enable-fluxion and ask it about a long document.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--length", type=int, default=16384, help="tokens of a prompt")
    option("--keys", type=int, default=8, help="needles in the document")
    option("--questions", type=int, default=6, help="how many of them to ask for")
    option("--policy", default="auto", help="policy spec, as in --fluxion-config; auto is fluxion here")
    option("--executors", default="auto", help="who computes, as in --fluxion-config")
    option("--max-tokens", type=int, default=16, help="tokens generated per question")
    option("--host-tokens", type=int, help="size of the host pool; by default what the prompts need")
    # A document whose questions the model itself answers.
    option("--seed", type=int, default=5, help="of the document")
    option("--port", type=int, help="of the server; by default a free one")
    option("--model-path", type=Path, default=MODEL, help="the needle model")
    args = parser.parse_args(argv)
    args.port = args.port or free_port()
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
