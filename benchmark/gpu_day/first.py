"""Check the basis of all other steps: pinned host memory, and the round trip of a layer.

python benchmark/gpu_day/first.py                # on a machine with a GPU; seconds
python benchmark/gpu_day/first.py --device sim   # on the simulated device
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import gpu_link
import torch

from fluxion_sglang.device import library
from fluxion_sglang.device.pinned import Pinned

GIB = 2**30


def pin(device: library.DeviceLibrary, size: int) -> dict[str, Any]:
    """Time to pin memory whose pages are already present."""
    memory = torch.empty(size + 4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :][:size].fill_(1)
    start = time.perf_counter()
    pinned = Pinned(device, memory)
    seconds = time.perf_counter() - start
    pinned.release()
    return {"what": "pin", "gib": size / GIB, "seconds_per_gib": round(seconds / (size / GIB), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--machine", help="folder under benchmark/results; default: the device's name")
    args = parser.parse_args()
    try:
        device = library.load(args.device)
        about = device.info()
    except library.DeviceError as error:
        raise SystemExit(f"error: {error}") from None
    path = common.RESULTS / (args.machine or common.folder_name(about["name"])) / "gpu_first.json"
    data = {**common.header("gpu_first"), "device": about, "rows": []}
    print(about)
    real = args.device == "cuda"
    sizes = (GIB, 8 * GIB) if real else (GIB // 16,)
    trips = {"batches": [1], "layers": 2, "turns": 1}
    for ask in (
        *(lambda size=size: [pin(device, size)] for size in sizes),
        lambda: gpu_link.round_trips(device, **trips),
    ):
        for row in ask():
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            data["rows"].append(row)
        common.save(path, data)


if __name__ == "__main__":
    main()
