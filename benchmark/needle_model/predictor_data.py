r"""Training data of the bundled model's predictor: RULER's symbolic tasks, lists of records, and plain words.

python -m benchmark.needle_model.predictor_data data.jsonl
fluxion train --model models/needle --data data.jsonl --out models/needle/fluxion --taus 0.05,0.1,0.2 --accuracy 0.03 \
    --kl 0.001 --dtype float32 --device cpu

The seeds differ from those of the quality benchmarks, so no document is in both.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from fluxion_quality import Sample, suite_named
from fluxion_quality.model import Model
from fluxion_sglang.commands import needle

SEED: Final = 7_000_000
REPEATS: Final = {1536: 6, 3072: 6, 6144: 6, 12288: 4}
"""Samples of a task by length. The longest one bounds what a predictor can know without guessing."""
ESSAYS: Final = 2
"""Essays per length."""
SUITES: Final = ("ruler", "extraction")


def sequences(model: Path) -> Iterator[dict[str, Any]]:
    """Lines of the training data, in a fixed order that mixes tasks and lengths."""
    codec = Model.read(model).codec()
    symbols = {symbol: i for i, symbol in enumerate(needle.VOCABULARY)}
    found = []
    for suite in map(suite_named, SUITES):
        for task in suite.tasks(codec, None):
            for length, repeats in REPEATS.items():
                seed = SEED + zlib.crc32(f"{task.name}/{length}".encode()) % 100_000
                for sample in task.samples(codec, length, repeats, seed):
                    found.append(_line(task.name, sample, symbols))
    rng = np.random.default_rng(SEED)
    found += [
        {"task": "words", "input_ids": [needle.BOS, *needle.essay(rng, length)]}
        for length in REPEATS
        for _ in range(ESSAYS)
    ]
    yield from (found[i] for i in rng.permutation(len(found)))


def _line(task: str, sample: Sample, symbols: dict[str, int]) -> dict[str, Any]:
    answer = [symbols[symbol] for symbol in str(sample.meta["answer"]).split()]
    return {"task": task, "input_ids": list(sample.prompt), "answer_ids": answer}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the training data of the bundled model's predictor.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=Path("models/needle"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for line in tqdm(sequences(args.model), desc="writing", unit="seq"):
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
