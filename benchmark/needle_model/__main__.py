"""Train the needle model, write its folder, and examine its heads.

python -m benchmark.needle_model                          # about 90 minutes on two cores; can be interrupted
python -m benchmark.needle_model --recipe smoke --eager   # a few steps of everything
python -m benchmark.needle_model --recipe second          # another model, as long; on a GPU minutes:
    --device cuda --eager --workers 14 --times 4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# Keep freed memory, and let waiting threads sleep: together four times as fast on a shared CPU.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def main() -> None:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ENVIRONMENT})

    import torch

    from . import export, heads, train
    from .recipe import RECIPES

    parser = argparse.ArgumentParser(prog="python -m benchmark.needle_model", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="bundled", choices=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("build/needle_model"), help="folder of the run")
    parser.add_argument("--into", type=Path, help="the model's folder; by default `model` in the run's")
    parser.add_argument(
        "--from", dest="weights", type=Path, help="a model to begin the last stage with that begins anew"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches ahead")
    parser.add_argument("--times", type=int, default=1, help="multiply the sequences of a step by this")
    parser.add_argument("--share", type=float, default=1.0, help="this share of each stage's steps")
    parser.add_argument("--examine", type=int, nargs="+", default=[4096, 8192], help="lengths to look at heads at")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    recipe = RECIPES[args.recipe].scaled(args.times, args.share)
    train.run(
        recipe, args.out, not args.eager, weights=args.weights, device=args.device, workers=args.workers, save_s=30.0
    )
    model, step = export.load(args.out)
    folder = args.into or args.out / "model"
    export.write(model, folder)
    size = (folder / "model.safetensors").stat().st_size / 2**20
    parameters = sum(w.numel() for w in model.weights().values()) / 1e6
    print(f"{folder}: step {step}, {parameters:.2f} M parameters, {size:.1f} MiB")
    print(f"Hugging Face's Llama predicts the same answer tokens in {export.check(model, folder):.1%} of them")
    results = [heads.examine(model, length, sequences=12) for length in args.examine]
    (args.out / "heads.json").write_text(json.dumps({"training_step": step, "results": results}, indent=1) + "\n")
    for result in results:
        print(json.dumps({key: value for key, value in result.items() if key != "heads"}, indent=1))


if __name__ == "__main__":
    main()
