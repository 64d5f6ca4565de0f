"""Has `adaptive` learn from prompts like those that one_batch.py decodes, for its time per token:

    cp -r build/learned-far build/learned-time    # what a warm server knows of other prompts (`python -m benchmark`)
    python benchmark/learned.py build/learned-time --prompts 60    # four minutes on two cores
    python benchmark/one_batch.py --models needle --policies full fluxion adaptive --lengths 32256 \\
        --config '{"learned": "build/learned-time"}' --name adaptive

Prompts of half the length are measured faster, and the predictor may be asked about twice the longest.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from safetensors.torch import load_file
from tqdm import tqdm

from fluxion_sglang.commands.needle import MODEL, needle_prompt
from fluxion_sglang.learning.learned import THRESHOLD
from fluxion_sglang.learning.learner import AT_ONCE, FIRST
from fluxion_sglang.sglang.offline import engine_options, start_engine

SEED = 1000
"""one_batch.py asks prompts of the seeds from 0."""

ONE_OF = 6
"""Of so many prompts one has the whole length."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="as the option learned")
    parser.add_argument("--length", type=int, default=32256, help="tokens of the longest prompts")
    parser.add_argument("--prompts", type=int, default=FIRST, help="of which a predictor is trained")
    args = parser.parse_args()
    os.environ[AT_ONCE] = "1"
    config = {"policy": "adaptive", "learned": str(args.folder), "host_tokens": 2 * (args.length + 64) // 16 * 16}
    engine = start_engine(engine_options(str(MODEL), "auto", "cpu", config, max_running_requests=1))
    try:
        # Who is released when the next one comes is learnt from then.
        for i in tqdm(range(args.prompts + 1), unit="prompt"):
            length = args.length if i % ONE_OF == 0 else args.length // 2 + 512
            prompt = needle_prompt(length, seed=SEED + i)
            engine.generate(input_ids=prompt.token_ids(), sampling_params={"temperature": 0, "max_new_tokens": 32})
    finally:
        engine.shutdown()
    if not any(THRESHOLD in load_file(file) for file in args.folder.rglob("*.safetensors")):
        sys.exit(
            f"error: {args.prompts} prompts were not enough to train on; give more (--prompts) or an empty folder."
        )


if __name__ == "__main__":
    main()
