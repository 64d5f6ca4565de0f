"""`fluxion train` before an engine starts: refusals in one sentence, and messages of a failing engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxion_sglang import __version__
from fluxion_sglang.scoring.serve import EngineFailed
from fluxion_sglang.training import collect, command
from fluxion_sglang.training import run as train
from fluxion_sglang.training.dataset import TokenSequence

Run = Callable[..., int]
SEQUENCE = {"input_ids": [1] * 400}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of a few bytes, and three texts; recording is not reached."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 508, "vocab_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"weights")
    write(tmp_path, *[SEQUENCE] * 3)

    def record(*args: Any, **options: Any) -> None:
        raise RuntimeError("SGLang refused sequence 2: it is too long\nand more")

    monkeypatch.setattr(collect, "record", record)
    return tmp_path


def write(folder: Path, *lines: object) -> None:
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--out", str(folder / "out")]
    return train.main(parser.parse_args([*given, *words]))


def error(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--quantile", "1"], "--quantile is 1; give a number between 0 and 1"),
        (["--quantile", "0"], "--quantile is 0; give"),
        (["--quantile", "nan"], "--quantile is nan; give"),
        (["--coverage", "1"], "--coverage is 1; give a number between 0 and 1"),
        (["--miss-rate", "1"], "--miss-rate is 1; give a number from 0 to below 1"),
        (["--miss-rate", "-0.1"], "--miss-rate is -0.1; give"),
        (["--epochs", "0"], "--epochs is 0; give at least 1"),
        (["--taus", "0.07"], "--taus is '0.07'; give some of 0.02, 0.05"),
        (["--sinks", "17"], "sinks is 17, but it is kept in whole pages"),
        (["--window", "0"], "window is 0, but it is kept in whole pages"),
        (["--data", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_options_are_checked_first(
    world: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert run(world, *words) == 2
    assert sentence in error(capsys)
    assert not (world / "out").exists()


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([SEQUENCE] * 2, "has 2 sequences that are longer than sinks and window together, but training, validation"),
        ([SEQUENCE, SEQUENCE, {"input_ids": [1] * 300}], "has 2 sequences that are longer"),
        ([{**SEQUENCE, "answer_ids": [1]}] * 3, "Every sequence that is held out for calibration has an answer of"),
        ([*[SEQUENCE] * 3, {"input_ids": [1] * 500, "answer_ids": [2]}], "data.jsonl:4 has 501 tokens, its"),
    ],
)
def test_sequences_are_checked_first(
    world: Path, capsys: pytest.CaptureFixture[str], lines: list[object], sentence: str
) -> None:
    write(world, *lines)
    assert run(world) == 2
    assert sentence in error(capsys)
    assert not (world / "out").exists()


@pytest.mark.parametrize(("package", "name"), [("sklearn", "scikit-learn"), ("dill", "dill")])
def test_packages_are_looked_for_first(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    real = train.find_spec
    monkeypatch.setattr(train, "find_spec", lambda asked: None if asked == package else real(asked))
    assert run(world) == 2
    assert f"needs the Python package {name}; install it with: pip install 'fluxion-sglang[train]'" in error(capsys)


@pytest.mark.parametrize("out", ["org/name/fluxion", "org/name"])
def test_a_folder_named_like_a_model_of_the_hub_is_not_made(
    world: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    """SGLang would take it for the model."""
    assert run(world, "--model", "org/name", "--out", out) == 2
    assert "--out lies in a folder named like the model; give another, and name it at serving" in error(capsys)
    assert not (world / "org").exists()


def test_a_folder_that_is_no_model_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "model" / "config.json").unlink()
    assert run(world) == 2
    assert "which cannot be read" in error(capsys)
    assert not (world / "out").exists()


def test_a_failing_engine_is_one_sentence(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(world) == 1
    assert error(capsys) == "error: The recording failed: RuntimeError, SGLang refused sequence 2: it is too long\n"


def test_an_engine_that_fails_in_calibration_is_one_sentence(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise EngineFailed("The engine did not start: no memory")

    monkeypatch.setattr(train, "_run", fail)
    assert run(world) == 1
    assert error(capsys) == "error: The engine did not start: no memory\n"


def test_the_plan(world: Path) -> None:
    """Texts are cut to the model's positions; the end of a test text is decoded."""
    write(world, *[{"input_ids": [1] * 600}] * 3)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--model", str(world / "model"), "--data", str(world / "data.jsonl"), "--out", str(world / "out")]
    plan = train._planned(parser.parse_args(words))
    text = TokenSequence((1,) * 500)
    assert (plan.sequences, plan.ends) == ([text] * 3, [(text, 62)])
    assert (plan.taus, plan.layers, plan.vocabulary) == ([0.05, 0.1, 0.2, 0.3], 2, 64)


def test_samples_of_another_run_are_not_mixed_in(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        assert run(world, *words) == 2
        return error(capsys)

    assert run(world) == run(world) == 1, "it comes to the recording, and the same command comes there again"
    capsys.readouterr()
    settings = json.loads((world / "out" / "samples" / "settings.json").read_text())
    assert settings["version"] == __version__ and len(settings["weights"]) == 64
    words = ("--sinks", "32", "--window", "128")
    assert "samples of another run (other sinks, window; see settings.json)" in refused(*words)
    assert "(other seed, dtype;" in refused("--seed", "3", "--dtype", "bfloat16")
    (world / "model" / "model.safetensors").write_bytes(b"weights of another training")
    assert "(other weights;" in refused()
    (world / "model" / "model.safetensors").write_bytes(b"weights")
    write(world, *[SEQUENCE] * 4)
    assert "(other data;" in refused()
    write(world, *[SEQUENCE] * 3)
    monkeypatch.setattr(train, "__version__", "0.0.1")
    assert "(other version;" in refused()
