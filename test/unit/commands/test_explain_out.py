"""`fluxion explain --out` writes one picture in the format of the suffix."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from reads_world import audit, metrics, serving

from fluxion_sglang import cli
from fluxion_sglang.commands import explain
from fluxion_sglang.commands.reads import served as server_reads
from fluxion_sglang.scoring.audit_file import AuditLog
from fluxion_sglang.scoring.audit_file import read as read_audit

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", explain.SUFFIXES)
def test_formats(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"picture{suffix}"
    with serving(lambda: metrics(3)) as url:
        assert cli.main(["explain", "--url", url, "--once", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(MAGIC[suffix])
    assert capsys.readouterr().out.strip() == str(out)


def test_what_a_server_that_is_watched_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_reads, "POLL_S", 0.05)
    units = itertools.count(1)
    out = tmp_path / "picture.svg"
    with serving(lambda: metrics(next(units))) as url:
        assert cli.main(["explain", "--url", url, "--seconds", "0.4", "--out", str(out)]) == 0
    text = out.read_text()
    for said in (
        "Share of the middle that each group reads",
        "Where the 10 ms of a decode step go",
        "second",
        "layer 2",
    ):
        assert said in text, said
    assert "Heads read 25% of the middle" in text and "3 ms (30%)" in text


def test_what_an_audit_shows(tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    assert cli.main(["explain", "--audit", str(audit(tmp_path / "a.npy")), "--out", str(out)]) == 0
    text = out.read_text()
    for said in ("Mean error of each query head", "decode step", "20%, error 0.025", "100%, error 0.000"):
        assert said in text, said


def test_a_policy_whose_requests_had_no_middle(tmp_path: Path) -> None:
    path, out = audit(tmp_path / "a.npy", steps=2, policies=("fluxion", "full")), tmp_path / "picture.svg"
    log = AuditLog(path)
    (short,) = read_audit(audit(tmp_path / "short.npy", steps=1, policies=("anchor",), middle=0))[0]
    log.append(short)
    assert cli.main(["explain", "--audit", str(path), "--out", str(out)]) == 0
    assert "no middle" in out.read_text()


def test_errors_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--out", "picture.bmp"])
    assert "give .png, .svg, .pdf" in capsys.readouterr().err
    path = audit(tmp_path / "a.npy")
    assert cli.main(["explain", "--audit", str(path), "--out", str(tmp_path / "missing" / "a.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert cli.main(["explain", "--audit", str(tmp_path / "missing")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(explain, "find_spec", lambda name: None)
    assert cli.main(["explain", "--audit", str(path), "--out", str(tmp_path / "a.png")]) == 2
    assert "pip install 'fluxion-sglang[bench]'" in capsys.readouterr().err
