"""Tables are made from result files: their contents, and that the pages in the repository are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import attention
import common
import one_batch
import plot
import pytest
import registry
import rendering
import restart
import tables
import torch
from tables import TABLES

from fluxion_quality import plan
from fluxion_sglang import cli
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.policy import check_spec, parse_spec
from fluxion_sglang.policy.base import TOLD
from fluxion_sglang.policy.fixed import FixedPolicy

HEADER = {
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "X", "cores": 2, "flags": ["avx2"], "gpu": None},
    "versions": {"sglang": "1", "torch": "2"},
    "memory_read_gb_per_s": [20.4, 30.2],
}


def write(results: Path, name: str, rows: list[dict[str, Any]], **header: Any) -> None:
    common.save(results / "box" / name, {**HEADER, **header, "rows": rows})


def row(policy: str, tpot: float, turn: int = 0, model: str = "m") -> dict[str, Any]:
    return {"model": model, "policy": policy, "length": 8192, "batch": 4, "round": turn, "tpot_ms": tpot, "steps": 25}


def attention_row(policy: str, ms: float, **others: Any) -> dict[str, Any]:
    times = {
        "attention_ms": ms, "resident_ms": 0.1, "features_ms": 0.03, "plan_ms": 0.02, "queue_ms": 0.7, "other_ms": 0.15,
    }  # fmt: skip
    found = {"model": "m", "policy": policy, "length": 8192, "batch": 4, "layers": 4, **times, "anchor_ms": None}
    found |= {"read": 0.125, "tile_bytes": 3_000_000, "metadata_bytes": 1_000_000, "gb_per_s": 10.0}
    return found | {"memory_read_gb_per_s": 25.0, "error_mean": 0.01, "error_max": 0.2} | others


def test_one_batch_tables_show_medians_over_rounds_and_ratios(tmp_path: Path) -> None:
    rows = [row("off", 30.0), row("full", 9.0), row("off", 50.0, 1), row("full", 11.0, 1), row("off", 40.0, 2)]
    rows += [row("full", 10.0, 2), row("fixed:16:0.05", 1.0), row("full", 2.0) | {"length": 32768}]
    write(tmp_path, "one_batch_needle.json", rows)
    write(tmp_path, "one_batch_llama-slice.json", [row("off", 8.0, model="n"), row("full", 2.0, model="n")])
    text = TABLES["one_batch"](tmp_path)
    assert [line for line in text.splitlines() if line.startswith("|")][2:] == [
        "| n | 4 | 8,192 | 8.0 | 2.0 | 4.0x |",
        "| m | 4 | 8,192 | 40.0 | 10.0 | 4.0x |",
    ], "a row has the first policy"
    assert "Medians of 25 steps. X, 2 cores. Data: [one_batch_llama-slice](benchmark/" in text


def test_one_batch_tables_leave_out_what_is_not_measured_and_the_sizes_between(tmp_path: Path) -> None:
    sizes = [(batch, length) for batch in (1, 4, 8) for length in (1024, 2048, 4096)]
    rows = [row(policy, 2.0) | {"batch": b, "length": n} for policy in ("full", "sketch:0.10") for b, n in sizes]
    write(tmp_path, "one_batch_sketch.json", rows)
    lines = [line for line in TABLES["one_batch_sketch"](tmp_path).splitlines() if line.startswith("| m ")]
    assert lines == [
        f"| m | {size} | 2.0 |  | 2.0 |  | 1.0x |" for size in ("1 | 1,024", "1 | 4,096", "8 | 1,024", "8 | 4,096")
    ]


def test_attention_is_drawn(tmp_path: Path) -> None:
    rows = [attention_row("full", 4.0), attention_row("fluxion", 1.0, anchor_ms=2.0)]
    plot.draw_lengths({"rows": [*rows, attention_row("full", 1.0, batch=1)]}, tmp_path / "attention.svg")
    assert "attention (ms a layer)" in (tmp_path / "attention.svg").read_text()


def test_attention_of_random_requests() -> None:
    requests = attention.random_requests(700, 2)
    policies = {spec: parse_spec(spec) for spec in ("full", "fixed:16:0.25", "labels:0.2", "anchor")}
    rows = {found["policy"]: found for found in attention.measure(requests, 2, policies, turns=1)}
    assert rows["full"]["error_max"] < 1e-5 and rows["full"]["read"] == 1
    assert rows["full"]["metadata_bytes"] == 0
    # K and V of the middles of two requests, at the counted steps.
    middle = mean(Placement().middle(701 + step) for step in range(1, requests.steps))
    assert rows["full"]["tile_bytes"] == round(2 * middle * 2 * 8 * 128 * 2)
    assert 0 < rows["fixed:16:0.25"]["tile_bytes"] < rows["full"]["tile_bytes"]
    assert rows["fixed:16:0.25"]["error_mean"] > 0.01
    assert rows["labels:0.2"]["error_max"] < 0.3
    assert rows["anchor"]["anchor_ms"] > 0 and rows["full"]["anchor_ms"] is None
    for found in rows.values():
        assert found["steps"] == requests.steps - 1
        assert 0 < found["queue_ms"] < found["attention_ms"]
    assert list(attention.policies_of("random", ["full", "anchor", "fluxion"])) == ["full"]


def test_policies_that_remember_hear_of_the_prefill_before_every_turn() -> None:
    class Hearing(FixedPolicy):
        def __init__(self) -> None:
            super().__init__(16, 0.5)
            self.heard: list[tuple[Any, ...]] = []

        def prefilled(self, *args: Any) -> None:
            self.heard.append(args)

        def released(self, row: int) -> None:
            self.heard.append((row,))

    requests = attention.random_requests(400, 2)
    bench, policy = attention.Bench(requests, 2), Hearing()
    for turn in range(2):
        policy.heard.clear()
        bench.turn(policy)
        told = [args for args in policy.heard if len(args) > 1]
        assert [args[:3] for args in told] == [(layer, row, 400) for row in range(2) for layer in range(2)]
        for layer, row, _, queries in told:
            asked = requests.tails[row][layer][0][: requests.asked]
            assert torch.equal(queries, torch.cat([requests.document_q[layer], asked])[-TOLD:])
        if turn:
            assert [args for args in policy.heard if len(args) == 1] == [(0,), (1,)]


def test_a_named_list_of_policies_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "memory_read_gb_per_s", lambda _: 30.0)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    policies = ["full", "hgca:0", "hgca:1", "psa:0.95", "lfps:0.10"]
    options = [
        "--quick", "--name", "few", "--lengths", "700", "--batches", "2", "--turns", "1", "--policies", *policies,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["attention.py", "--machine", "box", *options])
    attention.main()
    data = common.load(tmp_path / "box" / "attention_few_quick.json")
    assert data is not None and not (tmp_path / "box" / "attention_quick.json").exists()
    rows = {row["policy"]: row for row in data["rows"]}
    assert list(rows) == policies
    assert rows["hgca:0"]["read"] == 1 and rows["hgca:0"]["error_max"] < 1e-3
    assert 0 < rows["hgca:1"]["tile_bytes"] < rows["full"]["tile_bytes"]


def rival(policy: str, score: float, **others: Any) -> dict[str, Any]:
    """A row of a quality file: one task, two documents."""
    found = {"task": "niah", "length": 8192, "policy": policy, "score": score, "delta": score - 1.0, "measure": "score"}
    found |= {"samples": [score, score], "documents": [0, 1], "read_fraction": 0.25, "bytes_per_token": 1234567.0}
    return found | {"error_mean": 0.1, "error_p99": 0.2, "kl": 0.5, "same": 1.0} | others


def test_rivals_stand_side_by_side(tmp_path: Path) -> None:
    for policy in registry.RIVALS.policies:
        check_spec(policy)
    assert "python -m benchmark quality_rivals" in TABLES["rivals"](tmp_path)
    rows = [rival("full", 1.0, read_fraction=1.0), rival("psa:0.95", 0.9), rival("hgca:1", 0), rival("hgca:0.25", 0.5)]
    header = {"model": {"id": "n", "sha256": "f" * 64}, "samples": 2, "seed": 0, "dtype": "float32"}
    write(tmp_path, "quality_rivals.json", rows, policies=[row["policy"] for row in rows], **header)
    text = TABLES["rivals"](tmp_path)
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| policy | score 8K | reads 8K |",
        "| --- | ---: | ---: |",
        "| `full` | 1.000 | 100.0% |",
        "| `hgca:1` | 0.000 | 25.0% |",
        "| `psa:0.95` | 0.900 | 25.0% |",
    ]
    assert "RULER, 2 documents a task, float32. X, 2 cores, 2026-01-01." in text


def test_requests_of_the_bundled_model_are_what_it_sees_in_one_go() -> None:
    from transformers import AutoModelForCausalLM

    requests = attention.needle_requests(520, 2)
    prompt = attention.needle_prompt(520)
    question = prompt.questions[1]
    model = AutoModelForCausalLM.from_pretrained(common.NEEDLE, dtype=torch.bfloat16).eval()
    whole = attention.capture(model, [*prompt.token_ids(1), *question.answer_ids[:-1]])
    assert requests.steps == len(question.answer_ids) - 1 and requests.asked == len(question.token_ids)
    for layer, states in enumerate(whole):
        q, k, v = requests.tails[1][layer]
        document_k, document_v = requests.document[layer]
        for got, want in (
            (q, states.q[:, -len(q) :]),
            (torch.cat([document_k, k]), states.k),
            (torch.cat([document_v, v]), states.v),
        ):
            error = (got.transpose(0, 1) - want).float().norm() / want.float().norm()
            assert error < 0.02, layer  # chunks round differently in bfloat16


def test_only_models_with_a_predictor_are_asked_for_fluxion() -> None:
    assert one_batch.serves("needle", "fluxion") and one_batch.serves("needle", "fluxion:0.05")
    assert not one_batch.serves("llama-slice", "fluxion")
    assert all(one_batch.serves("llama-slice", policy) for policy in one_batch.POLICIES if policy != "fluxion")


def test_a_page_without_results_says_how_to_get_them(tmp_path: Path) -> None:
    page = "a\n<!-- table:one_batch -->\nold\n<!-- /table:one_batch -->\nb\n"
    filled = tables.fill(page, tmp_path)
    assert "Not measured yet: `python benchmark/one_batch.py`." in filled
    assert "old" not in filled
    assert tables.fill(filled, tmp_path) == filled


def test_a_table_shows_rows_by_columns_and_leaves_out_what_a_row_lacks() -> None:
    columns = {
        "name": "{name}",
        "half ": "{a:.1f}",
        "half": rendering.at("of", "b", form="{}"),
        "ratio": rendering.over("a", "c"),
    }
    rows = [{"name": "x", "a": 1.0, "c": 2.0, "of": {"b": 3}}, {"name": "y", "a": None}]
    assert rendering.table(columns, rows).splitlines() == [
        "| name | half | half | ratio |",
        "| --- | ---: | ---: | ---: |",
        "| x | 1.0 | 3 | 0.5x |",
        "| y |  |  |  |",
    ]


def test_rows_that_agree_become_one() -> None:
    rows = [{"at": 1, "by": "a", "ms": 1.0}, {"at": 1, "by": "a", "ms": 3.0}, {"at": 2, "by": "b", "ms": 5.0}]
    assert rendering.medians(rows, ("at",), "by", "ms") == [{"at": 1, "a": 2.0}, {"at": 2, "b": 5.0}]


@pytest.mark.parametrize("name", registry.BENCHMARKS)
def test_every_benchmark_of_the_registry_has_a_command(name: str) -> None:
    benchmark = registry.BENCHMARKS[name]
    words = benchmark.command(quick=True, fresh=True)
    if isinstance(benchmark, registry.Quality):
        arguments = cli._parser().parse_args(words[3:])
        assert arguments.fresh and arguments.lengths == "2k" and arguments.out.name == f"{name}_quick.json"
        plan.expand(arguments.policies.split(","))
    else:
        assert Path(words[1]).is_file() and benchmark.name.startswith(Path(words[1]).stem)


def test_an_unknown_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no table 'nonsense'"):
        tables.fill("<!-- table:nonsense -->\n<!-- /table:nonsense -->", tmp_path)


def test_saved_results_are_json_with_a_row_a_line(tmp_path: Path) -> None:
    write(tmp_path, "r.json", [row("off", 1.0), row("full", 2.0)])
    path = tmp_path / "box" / "r.json"
    assert json.loads(path.read_text())["rows"] == [row("off", 1.0), row("full", 2.0)]
    assert sum('"tpot_ms"' in line for line in path.read_text().splitlines()) == 2


def test_saved_fractions_have_six_digits_and_whole_numbers_all_of_theirs(tmp_path: Path) -> None:
    write(tmp_path, "r.json", [{**row("off", 1 / 3), "each": [2e-7 / 3, 15400961.0, 15400961]}])
    (saved,) = json.loads((tmp_path / "box" / "r.json").read_text())["rows"]
    assert saved == {**row("off", 0.333333), "each": [6.66667e-08, 15400961.0, 15400961]}


def test_a_result_file_is_continued_only_when_it_measured_the_same(tmp_path: Path) -> None:
    for name in "r.json", "r_quick.json":
        write(tmp_path, name, [row("off", 1.0)])
    path, quick = tmp_path / "box" / "r.json", tmp_path / "box" / "r_quick.json"
    same = ("commit", "machine")
    assert common.resume(tmp_path / "none.json", HEADER, same, False) == {**HEADER, "rows": []}
    assert common.resume(path, HEADER, same, False)["rows"] == [row("off", 1.0)]
    other = {**HEADER, "commit": "def"}
    with pytest.raises(SystemExit, match=r"r.json differs in commit; start over with --fresh"):
        common.resume(path, other, same, False)
    assert common.resume(path, other, same, True) == common.resume(quick, other, same, False) == {**other, "rows": []}
    with pytest.raises(SystemExit, match=r"differs in config;"):  # which the file does not have at all
        common.resume(path, {**HEADER, "config": None}, (*same, "config"), False)


def test_files_that_are_waited_for_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"1234")
    steps = iter([lambda: None, lambda: None, lambda: new.write_bytes(b"5"), lambda: new.write_bytes(b"567")])
    monkeypatch.setattr(restart.time, "sleep", lambda _: next(steps, lambda: None)())
    assert restart.settle(tmp_path, 4) == 7
    monkeypatch.setattr(restart, "PATIENCE_S", 0)
    with pytest.raises(SystemExit, match="not written"):
        restart.settle(tmp_path, 7)
