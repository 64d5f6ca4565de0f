"""Records training samples of a model: one prefill per sequence through SGLang, with the recorder on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.sglang.start.offline import engine_options, start_engine
from fluxion_sglang.training import recorder
from fluxion_sglang.training.dataset import TokenSequence, choose_steps
from fluxion_sglang.wishes import RECORD


def record(
    model: str,
    sequences: Sequence[TokenSequence],
    folder: Path,
    *,
    layers: int,
    placement: Placement,
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
        i: recorder.wishes_for(i, chosen)
        for i in missing
        if (chosen := choose_steps(sequences[i], seed + i, placement.slots))
    }
    if not wishes:
        return
    longest = max(len(sequences[i].tokens) for i in wishes)
    config = {
        "policy": "full",
        "record": str(folder),
        "sinks": placement.sinks,
        "window": placement.window,
        "host_tokens": -(-(longest + 2 * PAGE) // PAGE) * PAGE,
    }
    # Without the radix tree, because a token from a cache hit has no query to record.
    alone = {"disable_radix_cache": True, "max_running_requests": 1}
    engine = start_engine(engine_options(model, dtype, device, config, **alone))
    try:
        for i, wish in tqdm(wishes.items(), desc="recording", unit="seq"):
            reply = engine.generate(
                input_ids=list(sequences[i].tokens),
                sampling_params={"temperature": 0, "max_new_tokens": 1, "custom_params": {RECORD: wish}},
            )
            reason = reply["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                raise RuntimeError(f"SGLang refused sequence {i}: {reason.get('message')}")
            if not recorder.path(folder, i, layers - 1).exists():
                raise RuntimeError(f"sequence {i} was not recorded; see the log, and whether {folder} has room.")
    finally:
        engine.shutdown()
