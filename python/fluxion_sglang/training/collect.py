"""Records training samples of a model: one prefill a sequence through SGLang, with the recorder on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fluxion_sglang import openmp
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.training import recorder
from fluxion_sglang.training.dataset import TokenSequence, choose_steps

CHUNK = 4096
"""Tokens of a prefill chunk: bounds what a chunk's queries take, however long a sequence is."""


def record(
    model: str,
    sequences: Sequence[TokenSequence],
    folder: Path,
    *,
    layers: int,
    placement: Placement,
    spread: float,
    dtype: str = "auto",
    device: str | None = None,
    seed: int = 0,
) -> None:
    """Record every sequence that `folder` does not have yet.

    Raises:
        RuntimeError: SGLang refused a sequence.
    """
    missing = [i for i in range(len(sequences)) if not recorder.path(folder, i, layers - 1).exists()]
    wishes = {
        i: {"id": i, "samples": chosen}
        for i in missing
        if (chosen := choose_steps(sequences[i], seed + i, placement.slots))
    }
    if not wishes:
        return
    openmp.wait_passively()  # before torch is imported by the engine's processes
    import sglang

    longest = max(len(sequences[i].tokens) for i in wishes)
    config = {
        "policy": "full",
        "record": str(folder),
        "sinks": placement.sinks,
        "window": placement.window,
        "spread": spread,
        "host_tokens": -(-(longest + 2 * PAGE) // PAGE) * PAGE,
    }
    engine = sglang.Engine(
        model_path=model,
        dtype=dtype,
        **({} if device is None else {"device": device}),
        enable_fluxion=True,
        fluxion_config=json.dumps(config),
        # A token that comes from the tree has no query to record.
        disable_radix_cache=True,
        chunked_prefill_size=CHUNK,
        max_running_requests=1,
        log_level="error",
    )
    try:
        for i, wish in tqdm(wishes.items(), desc="recording", unit="seq"):
            reply = engine.generate(
                input_ids=list(sequences[i].tokens),
                sampling_params={"temperature": 0, "max_new_tokens": 1, "custom_params": {recorder.PARAMETER: wish}},
            )
            reason = reply["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                raise RuntimeError(f"SGLang refused sequence {i}: {reason.get('message')}")
    finally:
        engine.shutdown()
