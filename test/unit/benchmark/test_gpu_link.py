"""The benchmark of the link between CPU and GPU runs on the simulated device, and reports a missing device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import common
import gpu_link
import pytest
import torch


def test_it_runs_on_the_simulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_link, "SHAPES", {"small": (6, 2, 32)})
    monkeypatch.setattr(sys, "argv", ["gpu_link.py", "--device", "sim", "--quick"])
    gpu_link.main()
    found = json.loads((tmp_path / "simulated-device" / "gpu_link_quick.json").read_text())
    trips = [row for row in found["rows"] if row["what"] == "round trip"]
    assert [(row["batch"], row["launched"]) for row in trips] == [
        (b, how) for b in (1, 2) for how in ("stream", "graph")
    ]
    assert all(row["layer_us"] > 0 and row["resident_us"] > 0 for row in trips)
    links = [row for row in found["rows"] if row["what"] == "link"]
    assert [row["tiles"] for row in links] == [4, 8]
    for row in links:
        assert row["gather_gb_per_s"] == pytest.approx(row["tiles"] * 8192 / row["gather_us"] / 1e3, abs=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_link.py"])
    with pytest.raises(SystemExit, match=r"^error: .*\.$"):
        gpu_link.main()
