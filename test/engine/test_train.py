"""`fluxion train` as a user calls it, on a tiny model: from lines of JSON to a predictor that loads."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import numpy as np
import pytest
import tiny_model
import torch

from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.predictor import artifact
from fluxion_sglang.predictor.features import COUNT, NAMES
from fluxion_sglang.training import recorder
from fluxion_sglang.training import tau as calibration
from fluxion_sglang.training.fit import split_sequences

pytestmark = pytest.mark.full

LAYERS, HEADS = 2, 4
TAUS = (0.2, 0.5)
PLACEMENT = Placement(sinks=16, window=32)


class TestTrain:
    @pytest.fixture(scope="class")
    def words(self, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        """The command. One of the five sequences is held out for the test: the one with an answer of five tokens."""
        folder = tmp_path_factory.mktemp("train")
        ids = torch.arange(5)
        (held,) = ids[split_sequences(ids, 0).test].tolist()
        rng = np.random.default_rng(0)
        lines = [{"input_ids": rng.integers(3, 32000, n).tolist()} for n in (300, 400, 450, 500)]
        lines[0]["answer_ids"] = [7]
        lines.insert(held, {"input_ids": rng.integers(3, 32000, 350).tolist(), "answer_ids": [5, 6, 7, 8, 9]})
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        model = tiny_model.build(folder / "tiny")
        words = ["-m", "fluxion_sglang.cli", "train", "--model", model, "--data", str(data)]
        words += ["--out", str(folder / "tiny" / "fluxion"), "--taus", ",".join(map(str, TAUS)), "--epochs", "1"]
        words += ["--sinks", str(PLACEMENT.sinks), "--window", str(PLACEMENT.window)]
        return [*words, "--dtype", "float32", "--device", "cpu", "--kl", "0", "--accuracy", "0"]

    @pytest.fixture(scope="class")
    def out(self, words: list[str]) -> Path:
        """The folder of the predictor."""
        done = forked.run(*words)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        folder = Path(words[words.index("--out") + 1])
        found = json.loads((folder / calibration.NAME).read_text())
        assert done.stdout.endswith(f"{folder}: {calibration.verdict(found)}\n")
        return folder

    def test_samples(self, out: Path) -> None:
        for sequence in range(5):
            for layer in range(LAYERS):
                found = recorder.read(out / "samples", sequence, layer)
                assert found.features.shape[1:] == (HEADS, COUNT) and np.isfinite(found.features).all()
                assert (found.step > found.anchor).all() and found.step.min() >= PLACEMENT.slots
                assert found.budgets.shape == (len(found.step), HEADS, len(recorder.TAUS), 5)

    def test_the_predictor_loads(self, out: Path) -> None:
        found = json.loads((out / "samples" / recorder.IDENTITY).read_text())
        for tau in (None, *TAUS):
            artifact.load(out, features=NAMES, tau=tau, expect=artifact.Identity(**found))

    def test_calibration(self, out: Path) -> None:
        found = json.loads((out / calibration.NAME).read_text())
        assert found == calibration.outcome(found["rows"], 0.0, 0.0)
        full, *others = found["rows"]
        assert [row["tau"] for row in others] == list(TAUS)
        assert (full["kl"], full["read"]) == (0.0, 1.0) and full["error_p99"] < 1e-5
        assert all(row["right"] == 0.0 for row in found["rows"]), "of an answer that is noise"
        assert all(0 < row["read"] < 1.1 for row in others), "of the tiles, and their metadata"
        assert others[0]["error_mean"] <= others[1]["error_mean"] < TAUS[1]
        report = (out / "report.md").read_text()
        assert calibration.verdict(found) in report and "### tau 0.20" in report
        assert {path.name for path in out.glob("*.svg")} == {"streaming.svg", "budgets.svg", "blocks.svg"}

    def test_samples_of_other_settings_are_not_mixed_in(self, words: list[str], out: Path) -> None:
        done = forked.run(*words, "--sinks", "32")
        assert done.returncode == 2
        assert done.stderr.endswith("(other sinks; see settings.json); give another --out, or delete it.\n")
