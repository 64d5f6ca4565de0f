"""`fluxion try` on the bundled model: two real servers, tiny lengths, the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import NEEDLE

from fluxion_sglang import cli

pytestmark = pytest.mark.full


def test_the_bundled_model_gets_a_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, numbers = tmp_path / "report.html", tmp_path / "report.json"
    words = ["--lengths", "1k", "--dtype", "float32", "--server-args", "--device cpu", "--out", str(out)]
    assert cli.main(["try", NEEDLE, *words, "--json", str(numbers)]) == 0
    found = json.loads(numbers.read_text())

    assert found["fit"]["kv_bytes"] == 4096
    assert found["plan"]["policies"] == ["full", "fluxion"]
    assert not found["stopped"] and not found["refusal"]
    # In float32 the flag changes no token.
    assert found["same"] and all(row["agree"] == row["tokens"] > 0 for row in found["same"])
    assert {(row["policy"], row["batch"]) for row in found["decode"]} >= {("off", 1), ("full", 1), ("fluxion", 1)}
    assert all(row["ms"] > 0 for row in found["decode"])
    assert all(row["seconds"] > 0 for row in found["prefill"])
    near = {row["policy"]: row for row in found["agreement"]}
    assert near["full"]["kl"] == 0 and near["full"]["same"] == 1
    assert 0 < near["fluxion"]["kl"] < 0.05 and near["fluxion"]["same"] > 0.9
    reads = {row["policy"]: row for row in found["reads"]}
    assert reads["full"]["share"] == pytest.approx(1)
    assert 0 < reads["fluxion"]["bytes_per_token"] < reads["full"]["bytes_per_token"]

    page = out.read_text()
    assert page.count("<table>") >= 6
    assert "In float32 all" in page
    assert found["advice"]["command"] in capsys.readouterr().out
