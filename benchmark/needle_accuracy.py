"""Accuracy of the needle model under each policy, served by SGLang's engine.

    python benchmark/needle_accuracy.py            # 4K, 8K and 16K; some ten minutes on two cores
    python benchmark/needle_accuracy.py --quick    # 2K, one document a task

A policy is one process with one engine. Every document is asked several questions, each by itself. Prefill
is exact under every policy, so the first token of an answer always is; what a policy reads decides the
tokens after it. The longer the answer, the sharper the test: two tokens for multikey, 3 to 5 for vartrack,
16 to 24 for copy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from tqdm import tqdm

from fluxion_sglang import openmp
from fluxion_sglang.needle import Task, needle_prompt, score

POLICIES = ("full", "fixed:16:0.05", "fixed:32:0.02", "fixed:16:0.10", "fixed:16:0.25")
TASKS: tuple[Task, ...] = ("multikey", "vartrack", "copy")
LENGTHS = (4096, 8192, 16384)
DOCUMENTS = 3
QUESTIONS = 8


def engine_options(policy: str, length: int) -> dict[str, Any]:
    # The radix tree keeps documents until it needs their room, so the pool is for one and its questions.
    tokens = (length + 8 * 256) // 16 * 16
    options: dict[str, Any] = {
        "model_path": str(common.NEEDLE),
        "device": "cpu",
        "max_running_requests": 8,
        "chunked_prefill_size": 4096,
        "log_level": "error",
    }
    if policy == "off":
        return {**options, "max_total_tokens": tokens}
    return {
        **options,
        "enable_fluxion": True,
        "fluxion_config": json.dumps({"policy": policy, "host_tokens": tokens}),
    }


def serve(engine: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """As many greedy tokens for each prompt as its answer has, all prompts at once."""
    if not prompts:
        return []
    sampling = [{"temperature": 0, "max_new_tokens": len(answer), "ignore_eos": True} for answer in answers]
    return [reply["output_ids"] for reply in engine.generate(input_ids=prompts, sampling_params=sampling)]


def evaluate(policy: str, lengths: list[int], documents: int, questions: int) -> list[dict[str, Any]]:
    """Serve every task at every length under one policy; one row each."""
    import sglang

    engine = sglang.Engine(**engine_options(policy, max(lengths)))
    rows = []
    try:
        for length in lengths:
            for task in TASKS:
                whole, tokens, read, asked = 0, 0, 0, 0
                for seed in range(documents):
                    document = needle_prompt(length, seed=1000 + seed, task=task)
                    answers = [list(q.answer_ids) for q in document.questions[:questions]]
                    prompts = [document.token_ids(i) for i in range(len(answers))]
                    # The first question brings the document in, the others find it in the radix tree.
                    outputs = serve(engine, prompts[:1], answers[:1]) + serve(engine, prompts[1:], answers[1:])
                    for want, got in zip(answers, outputs, strict=True):
                        whole += score(want, got)
                        read += sum(a == b for a, b in zip(want, got, strict=False))
                        tokens += len(want)
                        asked += 1
                rows.append(
                    {
                        "policy": policy,
                        "task": task,
                        "length": length,
                        "questions": asked,
                        "accuracy": round(whole / asked, 4),
                        "token_accuracy": round(read / tokens, 4),
                    }
                )
    finally:
        engine.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the needle model under each policy.")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help='"off" is SGLang without the flag')
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="at most, of one document")
    parser.add_argument("--quick", action="store_true", help="2K, one document; not a published result")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing a result file")
    parser.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = args.lengths or ([2048] if args.quick else list(LENGTHS))
    documents = args.documents or (1 if args.quick else DOCUMENTS)

    if args.into:  # one policy, in a process of its own
        rows = evaluate(args.policies[0], lengths, documents, args.questions)
        args.into.write_text(json.dumps(rows))
        return

    name = "needle_accuracy_quick.json" if args.quick else "needle_accuracy.json"
    path = common.RESULTS / args.machine / name
    openmp.wait_passively()  # for plain SGLang too
    if args.fresh:
        path.unlink(missing_ok=True)
    data = common.resume(path, common.header("needle_accuracy"), common.SAME)
    done = {(row["policy"], row["length"]) for row in data["rows"]}
    with tempfile.TemporaryDirectory(prefix="fluxion-needle-") as folder:
        for policy in (bar := tqdm(args.policies)):
            bar.set_description(policy)
            left = [length for length in lengths if (policy, length) not in done]
            if not left:
                continue
            into = Path(folder) / "rows.json"
            command = [sys.executable, __file__, "--into", str(into), "--policies", policy]
            command += ["--lengths", *map(str, left), "--documents", str(documents)]
            command += ["--questions", str(args.questions)]
            common.run_logged(command, Path(folder) / "policy.log")
            data["rows"] += json.loads(into.read_text())
            common.save(path, data)
    print(f"{path.relative_to(common.ROOT)}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
