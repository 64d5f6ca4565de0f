"""Output of `fluxion explain` for given metrics and a given audit, and when there is nothing to show."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from reads_world import GROUPS, LAYERS, audit, metrics, serving
from rich.console import Console

from fluxion_sglang import cli
from fluxion_sglang.commands.reads import served as server_reads
from fluxion_sglang.commands.reads.audited import of_audit
from fluxion_sglang.commands.reads.picture import Timeline
from fluxion_sglang.commands.reads.sentences import percent, scale_end, sentences
from fluxion_sglang.commands.reads.served import Reading, of_readings
from fluxion_sglang.commands.reads.terminal import rendered


def picture(*texts: str):  # type: ignore[no-untyped-def]
    return of_readings([Reading.parse(text, float(at)) for at, text in enumerate(texts)], "http://there", "now")


def test_a_picture_is_the_growth_between_the_first_reading_and_the_last() -> None:
    found = picture(metrics(1), metrics(2), metrics(5))
    assert (found.steps, found.tokens) == (40, 80)
    assert found.layers == list(range(LAYERS)) and found.columns == list(range(GROUPS))
    assert found.share == pytest.approx(np.array([[0.0, 0.1], [0.2, 0.3], [0.4, 0.5]]))
    assert found.layer_share.tolist() == pytest.approx([0.05, 0.25, 0.45])
    assert found.mean_share == pytest.approx(0.25)
    # A tenth of the tokens read, whether or not requests read them together.
    assert found.metadata == pytest.approx(0.025)
    assert found.blocks == pytest.approx({"streaming": 0.25, "16": 0.75})
    assert list(found.blocks) == ["streaming", "16"]
    assert sum(found.parts.values()) == pytest.approx(0.010)
    assert found.timeline.total().tolist() == pytest.approx([0.25, 0.25])
    assert found.timeline.tokens_per_s.tolist() == pytest.approx([20, 60])


def test_what_changed_meanwhile_is_in_the_time_line() -> None:
    before, after = metrics(1, [[0.1] * GROUPS] * LAYERS), metrics(2, [[0.3] * GROUPS] * LAYERS)
    found = picture(metrics(0), before, after, after)
    total = found.timeline.total()
    assert total[:2].tolist() == pytest.approx([0.1, 0.5])
    assert np.isnan(total[2]), "nothing was decoded then"


def test_layers_of_two_pipeline_stages_are_one_picture() -> None:
    text = metrics(1).replace('layer="2"', 'layer="7"')
    found = picture(metrics(0).replace('layer="2"', 'layer="7"'), text)
    assert found.layers == [0, 1, 7] and found.layer_share.tolist() == pytest.approx([0.05, 0.25, 0.45])


def test_neighbours_in_time_add_up() -> None:
    line = Timeline(
        np.arange(1, 5),
        np.array([[1.0], [3.0], [0.0], [5.0]]),
        np.array([[10.0], [10.0], [0.0], [10.0]]),
        np.arange(4.0),
    )
    two = line.binned(2)
    assert two.total().tolist() == pytest.approx([0.2, 0.5]) and two.tokens_per_s.tolist() == [0.5, 2.5]
    assert two.at.tolist() == [2, 4]
    assert line.binned(9) is line


def test_the_three_sentences() -> None:
    assert sentences(picture(metrics(0), metrics(3))) == [
        "Heads read 25% of the middle, plus block metadata of 2.5% of its size.",
        "Layer 2 reads most (45%), layer 0 least (5%).",
        "A decode step takes 10 ms, 50% of it outside attention, so a sparser policy could save at most 30%.",
    ]


def test_sentences_where_there_is_less_to_say() -> None:
    alike = picture(metrics(0), metrics(1, [[1.0] * GROUPS] * LAYERS, timed=False))
    assert sentences(alike)[1] == "All layers read alike (100%)."
    assert sentences(alike)[2].startswith("No step was timed")


@pytest.mark.parametrize(
    ("share", "said"), [(0.0, "0%"), (0.004, "0.4%"), (0.05, "5%"), (0.215, "22%"), (1.0, "100%"), (np.nan, "-")]
)
def test_percent(share: float, said: str) -> None:
    assert percent(share) == said


def test_colours_end_at_a_round_number() -> None:
    assert [scale_end(np.array([v, np.nan])) for v in (0.03, 0.2, 0.3, 1.0, 1.3)] == [0.05, 0.25, 0.5, 1.0, 1.3]


def text(found, width: int, terminal: bool) -> str:  # type: ignore[no-untyped-def]
    console = Console(
        width=width, force_terminal=terminal, color_system="truecolor" if terminal else None, highlight=False
    )
    with console.capture() as capture:
        console.print(rendered(found, console))
    return capture.get()


def test_without_a_terminal_there_are_numbers_and_no_escapes() -> None:
    said = text(picture(metrics(0), metrics(2)), 80, terminal=False)
    assert "\x1b" not in said
    rows = [line.split() for line in said.splitlines()]
    assert ["0", "0%", "10%", "5%"] in rows and ["2", "40%", "50%", "45%"] in rows
    assert "nothing 25%, blocks of 16 75%" in said
    assert any("attention to the middle" in line and "3 ms" in line and "30%" in line for line in said.splitlines())


def test_in_a_terminal_cells_are_coloured_and_lines_fit() -> None:
    found = picture(metrics(0), metrics(2))
    said = text(found, 80, terminal=True)
    assert "48;2;" in said  # a background in 24 bits
    plain = Console(width=80, color_system=None, force_terminal=True)
    with plain.capture() as capture:
        plain.print(rendered(found, plain))
    assert all(len(line.rstrip()) <= 80 for line in capture.get().splitlines())


def test_many_heads_in_a_narrow_terminal_are_colours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_audit(audit(tmp_path / "a.npy"))
    assert found.errors is not None
    wide = found.errors.repeat(8, axis=1)
    many = type(found)(**{**found.__dict__, "errors": wide, "columns": list(range(wide.shape[1]))})
    said = text(many, 100, terminal=True)
    assert ".020" not in said and "query heads 0 to 31" in said
    assert ".020" in text(many, 1000, terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert ".020" in text(many, 1000, terminal=True)


# --- the command ---


def test_totals_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: metrics(3)) as url:
        assert cli.main(["explain", "--url", url, "--once"]) == 0
    said = capsys.readouterr().out
    assert "since its start" in said and "30 decode steps, 60 tokens" in said
    assert "Heads read 25% of the middle" in said and "over time" not in said


def test_a_server_that_is_watched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_reads, "POLL_S", 0.05)
    units = itertools.count(1)
    with serving(lambda: metrics(next(units))) as url:
        assert cli.main(["explain", "--url", url, "--seconds", "0.4"]) == 0
    said = capsys.readouterr()
    assert "Watching" in said.err and "share read" in said.out and "tokens/s" in said.out


@pytest.mark.parametrize(
    ("served", "status", "sentence"),
    [
        ("", 404, "start it with --enable-metrics"),
        ("", 401, "pass its key with --api-key, or in OPENAI_API_KEY"),
        ("sglang:num_running_reqs 0\n", 200, "has no counters of Fluxion"),
        ("fluxion_layers_total 3\n", 200, "older fluxion-sglang"),
        ("{}", 200, "no SGLang server"),
        (metrics(0), 200, "has not decoded yet"),
        (metrics(2).replace(" 2000.0", " 0"), 200, "longer than the 336 tokens"),
    ],
)
def test_servers_with_nothing_to_show(
    served: str, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda: served, status) as url:
        assert cli.main(["explain", "--url", url, "--once"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and not said.out and len(said.err.splitlines()) == 1


def test_a_server_that_decodes_nothing_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda: metrics(3)) as url:
        assert cli.main(["explain", "--url", url, "--seconds", "0.1"]) == 2
    assert "decoded nothing" in (said := capsys.readouterr().err) and "--once" in said


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(str) as url:
        pass
    assert cli.main(["explain", "--url", url]) == 2
    assert f"No server answers at {url}" in capsys.readouterr().err
    assert cli.main(["explain", "--url", "localhost"]) == 2
    assert "No server answers at http://localhost" in capsys.readouterr().err


def test_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("0", "-1", "long", "nan"):
        with pytest.raises(SystemExit):
            cli.main(["explain", "--seconds", seconds])
        assert "is no time" in capsys.readouterr().err


# --- audits ---


def test_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = audit(tmp_path / "a.npy")
    assert cli.main(["explain", "--audit", str(path), "--policy", "fluxion"]) == 0
    said = capsys.readouterr().out
    assert "50 decode steps, 50 tokens" in said
    assert "Heads read 20% of the middle, plus block metadata of 5% of its size." in said
    assert "Layer 2 reads most (30%), layer 0 least (10%)." in said
    assert "head 3 of layer 2 has the largest, 0.050" in said
    rows = [line.split()[:6] for line in said.splitlines()]
    assert ["1", ".010", ".020", ".030", ".040", "20%"] in rows


def test_an_audit_of_several_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = audit(tmp_path / "a.npy")
    assert cli.main(["explain", "--audit", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fluxion", "20%", "5%", ".025", ".050", "150"] in rows
    assert ["full", "100%", "0%", ".000", ".000", "150"] in rows
    assert cli.main(["explain", "--audit", str(path), "--policy", "full"]) == 0
    assert "No head is off by more than rounding." in capsys.readouterr().out


def test_files_with_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "empty").touch()
    mixed = audit(tmp_path / "mixed", steps=1)
    with mixed.open("ab") as file:
        from fluxion_sglang.scoring.audit_file import record_dtype

        np.save(file, np.zeros(2, record_dtype(8)))
    for name, more, sentence in (
        ("missing", (), "cannot be read"),
        (".", (), "cannot be read"),
        ("text", (), "is no audit file"),
        ("array.npy", (), "array of another kind"),
        ("empty", (), "has no decode step yet"),
        ("mixed", (), "different numbers of heads"),
        (audit(tmp_path / "short", middle=0).name, (), "had no middle"),
        (audit(tmp_path / "good").name, ("--policy", "hgca"), "it has policies fluxion, full"),
    ):
        assert cli.main(["explain", "--audit", str(tmp_path / name), *more]) == 2, name
        said = capsys.readouterr()
        assert sentence in said.err and not said.out, name
    assert cli.main(["explain", "--policy", "full"]) == 2
    assert "--policy needs --audit" in capsys.readouterr().err
