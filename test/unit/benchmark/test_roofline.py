"""The roofline's rows: lists, ratios, bars, bands and tables; and every benchmark that uses it runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import forks
import judged
import kernels
import layers
import peers
import plot
import pytest
import roofline
import torch
from cells import Cell, default_cells, quick_cells
from decode_tables import DECODE_TABLES

HEADER = {
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "X", "cores": 2, "flags": ["avx2"], "gpu": None},
    "versions": {"sglang": "1", "torch": "2"},
}


def kernel_row(key: str, fraction: float, **others: Any) -> dict[str, Any]:
    row = {**asdict(Cell("attend")), "key": key, "bytes": 1_000_000, "gb_per_s": 20.0, "what": "", "value": None}
    row |= {
        "stream": 40.0, "scatter": 25.0, "cached": 60.0, "of_stream": fraction / 2, "of_scatter": fraction,
        "error": 1e-6,
    }  # fmt: skip
    return row | {"bars": ["of_scatter >= 0.9"], "met": fraction >= 0.9, "judged": {"of_scatter": fraction}} | others


@pytest.mark.parametrize("cell", quick_cells(), ids=lambda cell: cell.kernel)
def test_every_kind_of_row_of_the_roofline(cell: Cell) -> None:
    row = judged.measure(cell, judged.Sizes.quick())
    if row is None:
        assert cell.kernel == "imbalance" and not layers.HAS_WORKER_TIMES
        return
    assert row["kernel"] == cell.kernel and len(row["bars"]) == len(cell.bars)
    assert row["error"] is None or 0 <= row["error"] < 5e-3
    if cell.kernel in ("attend", "scan"):
        assert row["of_scatter"] > 0 and row["of_stream"] > 0 and row["stream"] > 0
    else:
        assert row["value"] is None or row["value"] > 0
    assert cell.key in kernels.line(row)


def test_the_rows_of_the_roofline_have_names_of_their_own_and_every_bar() -> None:
    cells = default_cells()
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.kernel for cell in cells} == set(judged.MEASURES)


@pytest.mark.parametrize(("blk", "budget"), [(16, 0.05), (16, 1.0), (128, 0.25), (0, 0.05)])
def test_lists_of_pages_are_what_a_cell_says(blk: int, budget: float) -> None:
    arena = judged.arena_of(32 << 20, 8 << 20)
    context, tile = 4096, 8192
    tasks = roofline.page_lists(arena, tile, context, budget, blk)
    sizes = tasks.first.diff().unique().tolist()
    run = blk // 16 or context // 16
    blocks = round(context // 16 // run * budget) if blk else 1
    assert sizes == [blocks * run]
    assert len(tasks.pieces) * tile >= arena.read, "a run reads what was asked for"
    starts = tasks.pieces.view(-1, run)
    assert torch.equal(starts, starts[:, :1] + torch.arange(run, dtype=torch.int32)) and (starts[:, 0] % run == 0).all()
    first = starts[: (32 << 20) // tile // run, 0]
    assert len(first.unique()) == len(first), "no block twice before all were read"
    assert int(tasks.pieces.max()) < (32 << 20) // tile


def test_ratios_are_taken_within_a_round() -> None:
    times = {"kernel": [10, 20, 40], "stream a": [5, 10, 20], "stream b": [9, 9, 9], "scatter a": [8, 16, 32]}
    row = roofline.judge(times, "kernel", 1000, 500)
    assert row["of_scatter"] == 0.8 and row["of_stream"] == 0.9 and row["stream_plan"] == "b"
    assert row["gb_per_s"] == 50 and row["scatter"] == 62.5 and row["stream"] == round(500 / 9, 2)


def test_ceilings_are_the_faster_plan() -> None:
    times = {"kernel": [10, 10, 10], "stream a": [8, 8, 8], "stream b": [4, 4, 4]}
    assert roofline.judge(times, "kernel", 1000, 1000)["of_stream"] == 0.4


def test_a_row_that_fell_out_of_its_band_is_named() -> None:
    data = {**HEADER, "rows": [kernel_row("a", 0.95), kernel_row("b", 0.8)]}
    data["rows"].append(kernel_row("c", 0.5, what="over_ceiling", value=1.2, judged={"over_ceiling": 1.2}))
    held = kernels.bands(data)
    assert kernels.fell_out(data["rows"], held) == {}
    later = [kernel_row("a", 0.86), kernel_row("b", 0.7), kernel_row("new", 0.1)]
    later.append(kernel_row("c", 0.5, judged={"over_ceiling": 1.4}))
    assert list(kernels.fell_out(later, held).values()) == [
        "b: of_scatter is 0.700, its band ends at 0.720",
        "c: over_ceiling is 1.400, its band ends at 1.320",
    ]
    wider = kernels.bands({**HEADER, "rows": later}, held)
    assert kernels.fell_out(later, wider) == {} and kernels.fell_out(data["rows"], wider) == {}
    assert kernels.bands(data, wider) == wider, "the worst counts, in any order"


def test_a_check_that_compared_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Cell("attend"), Cell("attend", group=8)]
    known, new = (cell.key for cell in cells)
    common.save(tmp_path / "box" / "kernels_bands.json", kernels.bands({**HEADER, "rows": [kernel_row(known, 0.9)]}))
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(kernels, "measure", lambda cell, _: kernel_row(cell.key, 0.9))
    monkeypatch.setattr(kernels, "default_cells", lambda: cells)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--check", "--machine", "box"])
    kernels.main()
    assert f"Without a band: {new}.\nEvery other row is within its band." in capsys.readouterr().out
    for only in new, "nothing of this name":
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--check", "--machine", "box", "--only", only])
        with pytest.raises(SystemExit, match="nothing was checked"):
            kernels.main()


def test_a_row_is_out_only_when_it_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("attend"), Cell("attend", group=8)]
    fine, bad = (cell.key for cell in cells)
    held = kernels.bands({**HEADER, "rows": [kernel_row(fine, 0.9), kernel_row(bad, 0.9)]})
    seen = []

    def measure(cell: Cell, _: Any) -> dict[str, Any]:
        seen.append(cell.key)
        return kernel_row(cell.key, 0.9 if cell.key == fine else 0.5)

    monkeypatch.setattr(kernels, "measure", measure)
    slow = {**HEADER, "rows": [kernel_row(fine, 0.5), kernel_row(bad, 0.5)]}
    assert [text.split(": ")[0] for text in kernels.check(slow, held, cells, judged.Sizes.quick())] == [bad]
    assert seen == [fine, bad, bad]


def test_roofline_tables(tmp_path: Path) -> None:
    rows = [kernel_row("a", 0.951), kernel_row("b", 0.899, blk=0, group=8)]
    rows.append(kernel_row("c", 0.5, kernel="layer", what="over_ceiling", value=1.3, bars=["over_ceiling <= 1.2"]))
    common.save(tmp_path / "box" / "kernels.json", {**HEADER, "rounds": 3, "rows": rows})
    common.save(tmp_path / "chest" / "kernels.json", {**HEADER, "rounds": 3, "rows": rows[:1]})
    machines = DECODE_TABLES["machines"](tmp_path)
    assert "| box |  | 40 | 95% | 45% |  | 1.30 | 1 of 3 |" in machines
    assert "| chest |  | 40 | 95% |  |  |  | 1 of 1 |" in machines
    plot.draw_roofline({"rows": rows}, tmp_path / "kernels.svg")
    assert "GB/s" in (tmp_path / "kernels.svg").read_text()


def test_peers_agree_and_are_compared(tmp_path: Path) -> None:
    arena = judged.arena_of(32 << 20, 8 << 20)
    rows = [row for budget in (0.05, 1) for row in peers.measure(2048, budget, 1, arena)]
    names = {(row["peer"], row["budget"]) for row in rows}
    assert {("sdpa bf16", 0.05), ("sdpa bf16, with gather", 0.05), ("SGLang torch_native", 1)} <= names
    assert ("sdpa bf16, with gather", 1) not in names, "a whole context is not gathered"
    assert all(row["error"] < 5e-3 and row["error_ours"] < 5e-3 and row["over_ours"] > 0 for row in rows)
    common.save(tmp_path / "box" / "peers.json", {**HEADER, "rounds": 1, "rows": rows})
    table = DECODE_TABLES["peers"](tmp_path)
    assert "| 2K | SGLang torch_native |" in table and "with gather" not in table


def test_forks_read_one_document() -> None:
    rows = forks.measure(1024, ["fixed:16:0.25", "full"], 1, judged.arena_of(32 << 20, 8 << 20), branches=3)
    assert {row["queries"] for row in rows} == {"alike", "independent"} and {row["branches"] for row in rows} == {3}
    assert {row["sharing"] for row in rows} == {"on", "off"}
    assert all(row["error"] < 5e-3 and row["over_one"] > 0 for row in rows)
