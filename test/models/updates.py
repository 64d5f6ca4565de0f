"""Start SGLang's engine on a model, update its weights, and print its answers before and after.

    python updates.py FOLDER

Prints MARK and a dict of answers, each with tokens and log probabilities of the same prompts. In between, the engine
reads a weight, reloads the folder, and gets other weights, then the first ones again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from program import MARK, answer
from safetensors.torch import load_file

OPTIONS = {
    "device": "cpu",
    "dtype": "bfloat16",
    "max_running_requests": 8,
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.4,
    "log_level": "info",
    "enable_fluxion": True,
    "fluxion_config": '{"prefill_pass_ms": 0}',  # the division of a prompt must not depend on the clock
}
ASKED = [
    {
        "input_ids": [7 + i * step % 250 for i in range(length)],
        "sampling_params": {"temperature": 0, "ignore_eos": True},
    }
    for length, step in ((9, 3), (40, 7), (300, 11))
]


def main() -> None:
    import sglang

    folder = Path(sys.argv[1])
    weights = {
        name: w.to(torch.bfloat16) for path in folder.glob("*.safetensors") for name, w in load_file(path).items()
    }
    engine = sglang.Engine(model_path=str(folder), **OPTIONS)

    def ask() -> list[Any]:
        engine.flush_cache()
        return [[one["ids"], one["logprobs"]] for one in answer(engine, ASKED)]

    def update(times: float) -> None:
        engine.begin_weight_update()
        engine.update_weights_from_tensor([(name, w * times if "proj" in name else w) for name, w in weights.items()])
        engine.end_weight_update()

    try:
        found: dict[str, Any] = {"packed": ask(), "packed again": ask()}
        read = torch.tensor(engine.get_weights_by_name("lm_head.weight", truncate_size=100))
        found["as it was loaded"] = torch.equal(read, weights["lm_head.weight"][:100].float())
        found["one in rows"] = ask()
        engine.update_weights_from_disk(str(folder))
        found["all in rows"] = ask()
        update(1.25)
        found["other weights"] = ask()
        update(1)
        found["first weights"] = ask()
    finally:
        engine.shutdown()
    print(MARK + json.dumps(found))


if __name__ == "__main__":
    main()
