"""Compile and load FlashInfer's kernels for the models of a GPU day: minutes the first time, seconds later."""

from __future__ import annotations

import logging

import torch

from fluxion_sglang.device import flashinfer
from fluxion_sglang.kv.placement import PAGE, Placement

HEADS = {"llama-3.1-8b": (32, 8, 128), "needle": (8, 2, 64)}
"""Query heads, KV heads and head_dim by model."""


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    device, placement = torch.device("cuda"), Placement()
    for name, (q_heads, kv_heads, dim) in HEADS.items():
        shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "dtype": torch.bfloat16}
        scale = dim**-0.5
        chunks = flashinfer.Chunks(**shape, scale=scale, device=device)
        residents = flashinfer.Residents(placement, 1, **shape, scale=scale, device=device)
        windows = torch.zeros(kv_heads, placement.slot_pages, 2, PAGE, dim, dtype=torch.bfloat16, device=device)
        flashinfer.warm_up(chunks, residents, windows, scale, torch.cuda.synchronize)
        print(name, "is ready", flush=True)


if __name__ == "__main__":
    main()
