"""`fluxion bench quality`: options, refusals, tables and plots. The engine is a fake one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from quality_world import FakeEngine, Starter, World, model_folder

from fluxion_quality import plan as planning
from fluxion_quality import plot, record, session, table
from fluxion_quality.plan import BadInput
from fluxion_sglang import cli
from fluxion_sglang.scoring.serve import EngineFailed


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Starter:
    """Fake engines for every run of the command."""
    found = Starter()
    monkeypatch.setattr(planning, "suite_named", lambda name: World())
    monkeypatch.setattr(session, "starter", lambda *args: found)
    return found


def words(folder: Path, *more: str) -> list[str]:
    model = str(model_folder(folder / "model"))
    out = str(folder / "out.json")
    return ["bench", "quality", "--suite", "world", "--model", model, "--samples", "4", "--out", out, *more]


def test_the_command_measures_and_prints_a_table(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(
        tmp_path, "--lengths", "64,1k", "--policies", "oracle,fixed:16:0.05,streaming", "--tasks", "echo,alone"
    )
    assert cli.main(asked) == 0
    out = capsys.readouterr().out
    assert "| task | prompt | documents | full | oracle:0.05 | fixed:16:0.05 | streaming |" in out
    assert "| echo | 64 | 2 | 1.000 | 1.000 (+0.000 [+0.000, +0.000]) |" in out
    assert "| 1,024 | streaming | 0.000 | -1.000 [-1.000, -1.000] | 0.0% | 0.00 | 0.5000 | 0.5000 |" in out
    assert str(tmp_path / "out.json") in out
    assert len(start.engines) == 1
    assert cli.main(asked) == 0
    assert len(start.engines) == 1
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--lengths", "4q"), "--lengths has '4q'"),
        (("--lengths", "1000k"), "do not fit the 4,096 positions"),
        (("--seed", "-1"), "--seed is -1"),
        (("--data", "/nowhere/data"), "no /nowhere/data"),
        (("--policies", "fast"), "policy 'fast'"),
        (("--tasks", "sing"), "no task 'sing'"),
        (("--samples", "0"), "--samples is 0"),
        (("--model", "/nowhere"), "no model in /nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert cli.main(words(tmp_path, *more)) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""
    assert start.engines == []
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("content", ["hello", "{}", '{"benchmark": "one_batch", "rows": []}'])
def test_a_file_of_something_else_stays_as_it_is(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "out.json").write_text(content)
    assert cli.main(words(tmp_path)) == 2
    assert "is no result file" in capsys.readouterr().err
    assert (tmp_path / "out.json").read_text() == content
    assert cli.main([*words(tmp_path), "--out", str(tmp_path)]) == 2
    assert "--out names the folder" in capsys.readouterr().err
    assert cli.main([*words(tmp_path), "--out", str(tmp_path / "out.json" / "below.json")]) == 2
    assert "out.json, which is a file" in capsys.readouterr().err
    assert start.engines == []


def test_an_engine_that_does_not_start(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise EngineFailed("The engine did not start: RuntimeError: no such device")

    monkeypatch.setattr(session, "starter", lambda *args: fail)
    assert cli.main(words(tmp_path, "--lengths", "64")) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "The engine did not start: RuntimeError: no such device"


def test_an_unknown_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(tmp_path)) == 2
    assert "no suite 'world'; take one of ruler" in capsys.readouterr().err


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fluxion_quality.session", None)
    monkeypatch.delattr(sys.modules["fluxion_quality"], "session")
    assert cli.main(["bench", "quality", "--suite", "ruler"]) == 2
    assert "pip install 'fluxion-sglang[quality]'" in capsys.readouterr().err


def test_an_interrupt(start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start._interrupt_at = 2
    assert cli.main(words(tmp_path, "--lengths", "64")) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert start.engines[0].closed


def test_a_failed_request(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "_answer", lambda *args: {"meta_info": {"finish_reason": {"type": "abort"}}})
    assert cli.main(words(tmp_path, "--lengths", "64")) == 1
    assert "under policy 'full' failed" in capsys.readouterr().err


def test_lists_and_lengths() -> None:
    assert session.words("a, b,,a ") == ("a", "b")
    assert session.words("") == ()
    assert [session.length(word) for word in ("4k", "16K", "100")] == [4096, 16384, 100]
    for word in ("k", "-4", "4.5k", "4kk", "٤"):
        with pytest.raises(BadInput):
            session.length(word)


def test_default_file_and_model(start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "MODEL", model_folder(tmp_path / "needle"))
    assert cli.main(["bench", "quality", "--suite", "world", "--lengths", "64", "--samples", "2"]) == 0
    data = json.loads((tmp_path / "quality_world_needle.json").read_text())
    assert data["policies"] == ["full", "oracle:0.05", "fixed:16:0.05"]
    assert data["model"]["id"] == "needle"


class TestRendering:
    @pytest.fixture
    def data(self, start: Starter, tmp_path: Path) -> dict[str, Any]:
        more = ("--lengths", "64,128", "--policies", "off,streaming,fixed:16:0.05")
        assert cli.main(words(tmp_path, *more)) == 0
        found = record.load(tmp_path / "out.json")
        assert found is not None
        return found

    def test_a_gpu_is_named(self, data: dict[str, Any]) -> None:
        data["machine"] |= {"cpu": "a CPU", "generation": None, "cores": 3, "flags": ["avx2"], "gpu": None}
        assert table.where(data).startswith("a CPU, 3 cores (avx2), no GPU; sglang ")
        data["machine"] |= {"generation": "Zen 9", "flags": [], "gpu": "a GPU"}
        assert table.where(data).startswith("a CPU (Zen 9), 3 cores, a GPU; sglang ")
        assert table.where(data).endswith(f"commit {data['commit']}, {data['date']}.")
        assert table.where(data) in table.markdown(data)

    def test_gaps_stay_empty(self, data: dict[str, Any]) -> None:
        data["rows"] = [row for row in data["rows"] if (row["task"], row["policy"]) != ("echo", "streaming")]
        text = table.scores(data)
        assert "| echo | 64 | 2 | 1.000 |  | 1.000 (+0.000" in text
        averages = {(length, policy): row for length, policy, row in table.averaged(data)}
        # Means cover the tasks that all policies have, which excludes echo.
        assert {(row["tasks"], row["documents"]) for row in averages.values()} == {(2, 8)}
        assert len(averages) == 8
        alone = [row["score"] for row in data["rows"] if (row["length"], row["policy"]) == (64, "full")][1:]
        assert averages[64, "full"]["score"] == pytest.approx(sum(alone) / 2)
        assert averages[64, "off"]["kl"] is None and averages[64, "off"]["same"] == 1.0

    def test_a_policy_that_lacks_a_length_leaves_the_others_their_tasks(self, data: dict[str, Any]) -> None:
        data["rows"] = [row for row in data["rows"] if (row["length"], row["policy"]) != (64, "streaming")]
        averages = {(length, policy): row["tasks"] for length, policy, row in table.averaged(data)}
        assert len(averages) == 7 and set(averages.values()) == {3}

    def test_scores_without_intervals(self, data: dict[str, Any]) -> None:
        text = table.scores(data, intervals=False)
        assert "| task | prompt | documents | full | streaming | fixed:16:0.05 | off |" in text
        assert "| echo | 64 | 2 | 1.000 | 0.000 | 1.000 | 1.000 |" in text
        assert "[" not in text and "(" not in text and "[" in table.scores(data)

    def test_what_an_interval_without_width_means_is_said(self, data: dict[str, Any]) -> None:
        assert "zero width" in " ".join(table.markdown(data).split()) and "3/n" in table.markdown(data)

    def test_an_average_of_tasks_is_more_certain_than_each(self, data: dict[str, Any]) -> None:
        for row in data["rows"]:
            if row["policy"] == "fixed:16:0.05" and row["task"] != "forced":
                row["samples"] = [0.0, 0.0, 1.0, 1.0]
        both = [row for row in data["rows"] if row["task"] != "forced"]
        one = [row for row in both if row["task"] == "echo"]
        width = {}
        for name, rows in (("both", both), ("one", one)):
            found = {key[1]: key[2] for key in table.averaged({**data, "rows": rows}) if key[0] == 64}
            width[name] = found["fixed:16:0.05"]["delta_high"] - found["fixed:16:0.05"]["delta_low"]
        assert 0 < width["both"] < width["one"]

    def test_pareto(self, data: dict[str, Any]) -> None:
        # The other task is better with lower scores, so leave it out.
        data["rows"] = [row for row in data["rows"] if row["task"] != "forced"]
        text = table.pareto(data)
        head = ["policy"] + [name for at in (64, 128) for name in (f"score at {at}", "delta", "read")]
        assert text.startswith(f"| {' | '.join(head)} |\n")
        assert "| fixed:16:0.05 | 1.000 | +0.000" in text
        assert "| off |" not in text and text.index("| streaming |") < text.index("| full |")
        data["rows"] = [row for row in data["rows"] if (row["length"], row["policy"]) != (128, "streaming")]
        (line,) = [line for line in table.pareto(data).splitlines() if line.startswith("| streaming |")]
        assert line.endswith("|  |  |  |"), "a length without the policy stays empty"

    def test_averages_say_over_what(self, data: dict[str, Any]) -> None:
        text = table.averages(data)
        assert "| prompt | policy | score | delta | read | MB a token | error | p99 | KL | same |" in text
        tasks, documents = table.averaged(data)[0][2]["tasks"], table.averaged(data)[0][2]["documents"]
        assert f"Means over {tasks} tasks and {documents} documents at each length." in text
        data["rows"] = [row for row in data["rows"] if (row["length"], row["task"]) != (128, "echo")]
        text = table.averages(data)
        assert f"Means over {tasks} tasks and {documents} documents at 64, {tasks - 1} tasks and" in text
        data["rows"] = [row for row in data["rows"] if row["length"] == 64]
        assert f"Means over {tasks} tasks and {documents} documents.\n" in table.averages(data)

    def test_perplexities_beyond_all_measure_are_short(self, data: dict[str, Any]) -> None:
        data["rows"][0]["score"] = 962917214.677
        assert "| 9.6e+08 |" in table.scores(data)

    def test_families_leave_out_what_sets_the_reads(self) -> None:
        specs = ["fixed:32:0.05", "psa:0.95:32:quest", "psa:0.999:32", "hgca:0.5:0.1", "hgca:1", "full", "score95"]
        assert [table.family(spec) for spec in specs] == [
            "fixed:32", "psa:32:quest", "psa:32", "hgca", "hgca", "full", "score95",
        ]  # fmt: skip

    def test_no_rows(self, data: dict[str, Any]) -> None:
        assert table.markdown({**data, "rows": []}) == "No cell is measured yet.\n"

    def test_a_plot(self, data: dict[str, Any], tmp_path: Path) -> None:
        plot.draw(data, tmp_path / "a.svg")
        plot.draw(data, tmp_path / "b.svg")
        text = (tmp_path / "a.svg").read_text()
        assert "fixed:16" in text and "64 tokens" in text and "128 tokens" in text
        assert text == (tmp_path / "b.svg").read_text()
        assert "Pareto" not in text, "of perplexities less is better"
        data["rows"] = [row for row in data["rows"] if row["measure"] == "score"]
        plot.draw(data, tmp_path / "a.svg")
        assert (tmp_path / "a.svg").read_text().count("Pareto front</text>") == 1

    def test_the_commands_of_both(self, data: dict[str, Any], tmp_path: Path) -> None:
        drawn: list[str] = []
        table.render(lambda data, path: drawn.append(path.name), [str(tmp_path / "out.json")])
        assert drawn == ["out.json"]
        with pytest.raises(SystemExit, match="name one"):
            table.render(lambda data, path: None, [])
        with pytest.raises(SystemExit, match="there is no x"):
            table.render(lambda data, path: None, ["x"])
