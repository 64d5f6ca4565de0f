"""A server's policy at the start: fallbacks to full, refused starts, and log messages."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import test_predictor_artifact as trained
import torch

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.policy import Policy
from fluxion_sglang.predictor.artifact import DoesNotFit, Identity, PredictorError
from fluxion_sglang.predictor.features import NAMES
from fluxion_sglang.sglang.requests import predictors


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The served model is the one for which `trained` saves predictors."""

    def identity(options: FluxionConfig, runner: Any) -> Identity:
        return dataclasses.replace(trained.IDENTITY, window=options.window)

    monkeypatch.setattr(predictors, "identity", identity)
    monkeypatch.setattr(predictors, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    caplog.set_level(logging.INFO, logger=predictors.logger.name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with a predictor for it."""
    trained.save(tmp_path / "fluxion", features=NAMES)
    return tmp_path


def start(model: Path, **options: Any) -> Policy:
    config = FluxionConfig(**options).validate()
    runner: Any = SimpleNamespace(server_args=SimpleNamespace(model_path=str(model)))
    return predictors.server_policy(config, predictors.context(config, runner))


def test_a_predictor_that_fits_is_used(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start(model).spec == "fluxion" and "policy fluxion, tau 0.10, because a predictor fits" in caplog.text
    assert start(model, policy="fluxion:0.05").criterion.limit == 0.05


def test_a_tau_is_kept_once_however_it_is_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs come from clients: 300 spellings of one tau must not keep 300 networks."""
    runner: Any = SimpleNamespace(server_args=SimpleNamespace(model_path=str(model)))
    context = predictors.context(FluxionConfig(), runner)
    loads: list[Any] = []
    load = predictors.load
    monkeypatch.setattr(predictors, "load", lambda *args, **options: loads.append(args) or load(*args, **options))
    found = {id(context.predictor(float(f"0.05{'0' * zeros}1"))) for zeros in range(8, 300)}
    assert len(found) == 1 == len(loads)
    assert context.predictor(0.05).tau == 0.05
    with pytest.raises(PredictorError, match=r"has no tau 0\.06"):
        context.predictor(0.06)


def test_a_policy_that_was_named_is_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start(model, policy="fixed:16:0.05").spec == "fixed:16:0.05"
    assert [record.getMessage() for record in caplog.records] == [
        "Fluxion: policy fixed:16:0.05, as --fluxion-config says."
    ]


@pytest.mark.parametrize("case", ["nothing", "no predictor.json", "another window"])
def test_none_that_fits_is_full_and_the_log_says_why_and_what_would_be_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    if case == "no predictor.json":
        (tmp_path / "fluxion").mkdir()
    elif case == "another window":
        trained.save(tmp_path / "fluxion", features=NAMES)
    assert start(tmp_path, window=512).spec == "full"
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.INFO and "\n" not in message
    for words in ("policy full", "exact", "train", "`fluxion try`"):
        assert words in message
    assert ("set window to 256" in message) == (case == "another window")


def test_a_tau_that_was_not_trained_ends_the_start(model: Path) -> None:
    with pytest.raises(PredictorError, match=r"has no tau 0\.15, only 0\.05, 0\.10; choose one"):
        start(model, policy="fluxion:0.15")


@pytest.mark.parametrize("file", ["predictor.json", trained.FIRST])
def test_a_damaged_file_ends_the_start(model: Path, file: str) -> None:
    path = model / "fluxion" / file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PredictorError, match="copy the folder again or train again"):
        start(model)


def test_features_of_another_version_end_the_start(tmp_path: Path) -> None:
    trained.save(tmp_path / "fluxion", features=NAMES[::-1])
    with pytest.raises(PredictorError, match="trained on other features"):
        start(tmp_path)


def test_a_policy_or_a_predictor_that_was_named_must_fit(model: Path, tmp_path: Path) -> None:
    for options in ({"policy": "fluxion"}, {"predictor": str(model / "fluxion")}):
        with pytest.raises(DoesNotFit, match="set window to 256"):
            start(tmp_path / "other", window=512, **{"predictor": str(model / "fluxion"), **options})
    with pytest.raises(DoesNotFit, match="none is named"):
        start(tmp_path / "other", policy="fluxion:0.05")


def built(rank: int, ranks: int, first: float = 1.0) -> torch.nn.Module:
    """Two layers on one of `ranks` ranks: matrices and the norm of queries are divided, other norms are not."""
    layers = torch.nn.ModuleList()
    for _ in range(2):
        layer = torch.nn.Module()
        layer.proj, layer.input_layernorm, layer.q_norm = (
            torch.nn.Linear(8, 8 // ranks),
            torch.nn.LayerNorm(8, bias=False),
            torch.nn.LayerNorm(8 // ranks, bias=False),
        )
        torch.nn.init.constant_(layer.q_norm.weight, rank + 1)
        torch.nn.init.constant_(layer.input_layernorm.weight, first)
        layers.append(layer)
    return layers


def fingerprint(model: torch.nn.Module) -> str:
    return predictors.fingerprint(predictors.norms(model))


def test_the_fingerprint_is_that_of_the_whole_model_on_every_rank() -> None:
    whole = fingerprint(built(0, 1))
    assert fingerprint(built(0, 2)) == fingerprint(built(1, 2)) == whole
    assert fingerprint(built(0, 1).bfloat16()) == whole
    assert fingerprint(built(0, 1, first=1.25)) != whole


def test_stages_of_a_pipeline_have_one_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = predictors.norms(built(0, 1))
    stages = [{name: weight for name, weight in whole.items() if name.startswith(first)} for first in ("0.", "1.")]
    assert all(stages) and sum(map(len, stages)) == len(whole)
    several(monkeypatch, lambda mine: stages, pp_size=2, pp_group=SimpleNamespace(cpu_group="stages"))
    of_each = [predictors.fingerprint(predictors._of_all_stages(stage)) for stage in stages]
    assert of_each == [predictors.fingerprint(whole)] * 2


def several(monkeypatch: pytest.MonkeyPatch, gather: Callable[[Any], list[Any]], **parallel: Any) -> None:
    """Simulate several processes; `gather` maps this process's value to the values of all."""

    def all_gather_object(found: list[Any], mine: Any, group: str) -> None:
        found[:] = gather(mine)

    monkeypatch.setattr(predictors, "get_parallel", lambda: SimpleNamespace(**parallel))
    monkeypatch.setattr(predictors.dist, "all_gather_object", all_gather_object)


def test_stages_exchange_their_weights_at_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They must not do so when a request arrives, which the stages see at different times."""
    asked: list[object] = []
    runner: Any = SimpleNamespace(server_args=SimpleNamespace(model_path=str(model)))
    monkeypatch.setattr(predictors, "identity", lambda *of: asked.append(of) or trained.IDENTITY)
    predictors.context(FluxionConfig(), runner)
    assert not asked
    monkeypatch.setattr(predictors, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    context = predictors.context(FluxionConfig(), runner)
    assert len(asked) == 1
    context.predictor(None)
    context.predictor(0.05)
    assert len(asked) == 1


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_would_decide_differently_do_not_start(
    model: Path, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, runner = FluxionConfig(), SimpleNamespace(server_args=SimpleNamespace(model_path=str(model)))
    policy = start(model)
    theirs = "policy full, no predictor"
    several(
        monkeypatch,
        lambda mine: [mine, mine if same else theirs],
        launch_world_size=2,
        world_group=SimpleNamespace(cpu_group="ranks"),
    )
    if same:
        predictors.check_ranks(policy, config, cast(Any, runner))
        return
    with pytest.raises(
        ConfigError, match=r"rank 0 has policy fluxion, predictor \w+ and rank 1 has policy full, no pre"
    ):
        predictors.check_ranks(policy, config, cast(Any, runner))


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"policy": "fixed:16:0.05", "predictor": "p"}, "option predictor; only requests"),
        ({"policy": "full", "predictor": "p", "request_policies": False}, "option predictor; nothing here"),
        ({"policy": "full"}, ""),
    ],
)
def test_the_log_names_options_that_the_policy_does_not_use(
    model: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], unused: str
) -> None:
    start(model, **options)
    lines = [record.getMessage() for record in caplog.records if "does not use" in record.getMessage()]
    assert len(lines) == bool(unused) and unused in "".join(lines)
