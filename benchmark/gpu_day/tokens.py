"""Whether the bundled model on a GPU gives the same answers with the flag as without.

    python benchmark/gpu_day/tokens.py                # on a machine with a GPU; some minutes
    python benchmark/gpu_day/tokens.py --device sim   # on the simulated device, shorter prompts

In float32, greedy tokens must be equal. Only the simulated device checks this, because SGLang's RMSNorm takes no
float32 on a GPU. In bfloat16, rounding may change a token that is almost as likely as another. There the script counts
right answers, and the flag must not reduce them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from fluxion_sglang.commands.needle import needle_prompt, score

LENGTHS = (700, 2000, 5000, 20000)
QUICK_LENGTHS = (700, 1500)
NEW = 24
MOST_TOKENS = 80000
"""Tokens for which the device has memory."""
OFF = "off"
FULL = '{"policy": "full"}'
NEAR = '{"policy": "full", "host_tokens": 50000, "hot_tiles_gb": 0.01}'
"""Copies of some of the tiles. The host pool is small, because its metadata takes device memory that MOST_TOKENS
needs."""
CONFIGS = (OFF, FULL, NEAR)
CASES = tuple(("bfloat16", config) for config in CONFIGS)
SIMULATED_CASES = tuple(("float32", config) for config in CONFIGS)
CORES_OF_AN_ENGINE = 3
"""Cores per engine; it limits how many start at once. The model is small, so starting takes most of the time."""


def answer(device: str, dtype: str, config: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """Tokens that one engine generates for each prompt. config: value of the flag, or `OFF`."""
    import sglang

    options: dict[str, Any] = {"device": "cuda" if device == "cuda" else "cpu", "dtype": dtype, "random_seed": 0}
    if device == "cuda":
        # Few requests and no graphs: they save time and memory at the start and change no token.
        options |= {"sampling_backend": "pytorch", "grammar_backend": "none", "max_running_requests": 8}
        options |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    if config != OFF:
        options |= {"enable_fluxion": True, "fluxion_config": config}
    elif device == "cuda":
        options |= {"attention_backend": "flashinfer"}
    engine = sglang.Engine(model_path=str(common.NEEDLE), max_total_tokens=MOST_TOKENS, **options)
    try:
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        return [
            engine.generate(input_ids=needle_prompt(n, seed=n).token_ids(), sampling_params=sampling)["output_ids"]
            for n in lengths
        ]
    finally:
        engine.shutdown()


def in_a_process(device: str, dtype: str, config: str, quick: bool) -> list[list[int]]:
    """Run `answer` in a process of its own, which frees the device at its end."""
    command = [sys.executable, __file__, "--device", device, "--one", dtype, config, *["--quick"] * quick]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{dtype} {config} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="short prompts")
    parser.add_argument("--one", nargs=2, metavar=("DTYPE", "CONFIG"), help=argparse.SUPPRESS)
    parser.add_argument("--machine", help="folder under benchmark/results; without it nothing is kept")
    args = parser.parse_args()
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    if args.one:
        print(json.dumps(answer(args.device, *args.one, lengths)))
        return
    rows: list[dict[str, Any]] = []
    without: dict[str, list[list[int]]] = {}
    cases = CASES if args.device == "cuda" else SIMULATED_CASES
    at_once = max(1, len(os.sched_getaffinity(0)) // CORES_OF_AN_ENGINE)
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda case: in_a_process(args.device, *case, args.quick), cases))
    for (dtype, config), tokens in zip(cases, found, strict=True):
        base = without.setdefault(dtype, tokens)
        right = [
            score(needle_prompt(n, seed=n).questions[0].answer_ids, t) for n, t in zip(lengths, tokens, strict=True)
        ]
        same = sum(a == b for a, b in zip(tokens, base, strict=True))
        rows.append({"dtype": dtype, "config": config, "prompts": len(lengths), "same": same, "right": sum(right)})
        print(rows[-1], flush=True)
        if args.machine:
            common.save(
                common.RESULTS / args.machine / "gpu_tokens.json", {**common.header("gpu_tokens"), "rows": rows}
            )
    exact = all(row["same"] == row["prompts"] for row in rows if row["dtype"] == "float32")
    most = {row["dtype"]: row["right"] for row in rows if row["config"] == OFF}
    if min(most.values()) < len(lengths) - 1:
        raise SystemExit("error: the model does not answer without the flag either, so this says nothing")
    if not exact or any(row["right"] < most[row["dtype"]] for row in rows):
        raise SystemExit("error: answers with the flag are not those without it")


if __name__ == "__main__":
    main()
