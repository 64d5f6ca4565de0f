"""A predictor's folder: saved data comes back, and unsuitable data is refused in one sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxion_sglang.predictor import artifact
from fluxion_sglang.predictor.artifact import Identity, PredictorError
from fluxion_sglang.predictor.network import HeadPredictor
from fluxion_sglang.training import artifact_writer
from fluxion_sglang.training.artifact_writer import Trained

NAMES = [f"feature{i}" for i in range(41)]
IDENTITY = Identity(
    architecture="LlamaForCausalLM", layers=4, q_heads=8, kv_heads=2, head_dim=64, hidden_size=512, vocab_size=1000,
    rope_theta=500000.0, weights="sha256:abc", sinks=64, window=256, spread=1.0,
)  # fmt: skip
FIRST = "predictor-0.10.safetensors"


def network(seed: int) -> HeadPredictor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = HeadPredictor()
        made.mean.normal_()
        made.std.uniform_(0.5, 2.0)
        made.round_weights()
    return made


def margins(seed: int) -> torch.Tensor:
    return 0.5 + torch.rand(4, 8, 4, generator=torch.Generator().manual_seed(seed))


def save(folder: Path, **changes: Any) -> None:
    trained = {
        0.1: Trained(network(0), 1.5, margins(0), {"auc": 0.9}),
        0.05: Trained(network(1), 0.25, margins(1), {"auc": None}),
    }
    options: dict[str, Any] = {"identity": IDENTITY, "features": NAMES, "calibrated": 0.1, **changes}
    artifact_writer.save(folder, options.pop("trained", trained), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "p")
    return tmp_path / "p"


def load(folder: Path, tau: float | None = None, **changes: Any) -> artifact.LoadedPredictor:
    expect = dataclasses.replace(IDENTITY, **changes)
    return artifact.load(folder, features=NAMES, tau=tau, expect=expect)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "predictor.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights and keep the checksum right, as if a training had written them."""
    state = load_file(folder / FIRST)
    change(state)
    save_file(state, folder / FIRST)
    digest = hashlib.sha256((folder / FIRST).read_bytes()).hexdigest()
    edit(folder, lambda d: d["taus"]["0.10"].update(sha256=digest))


def refusal(folder: Path, *args: Any, **changes: Any) -> str:
    with pytest.raises(PredictorError) as caught:
        load(folder, *args, **changes)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and ";" in text
    return text


@pytest.mark.parametrize(("tau", "seed", "threshold"), [(None, 0, 1.5), (0.1, 0, 1.5), (0.05, 1, 0.25)])
def test_round_trip(folder: Path, tau: float | None, seed: int, threshold: float) -> None:
    loaded = load(folder, tau)
    assert (loaded.tau, loaded.threshold) == (tau or 0.1, threshold)
    assert loaded.metrics == {"auc": 0.9 if seed == 0 else None}
    want = network(seed).state_dict()
    for name, value in loaded.network.state_dict().items():
        assert torch.equal(value, want[name])
    assert torch.equal(loaded.margins, margins(seed))
    assert not loaded.network.training


def test_files(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["predictor-0.05.safetensors", FIRST, "predictor.json"]
    document = json.loads((folder / "predictor.json").read_text())
    assert document["calibrated"] == "0.10" and torch.__version__.startswith(document["versions"]["torch"])
    assert (document["sinks"], document["window"], document["model"]["layers"]) == (64, 256, 4)


def test_names_of_files() -> None:
    assert [artifact.file_name(t) for t in (0.1, 0.05, 0.125, 1.0)] == [
        "predictor-0.10.safetensors",
        "predictor-0.05.safetensors",
        "predictor-0.125.safetensors",
        "predictor-1.00.safetensors",
    ]


def test_saving_again_replaces(folder: Path) -> None:
    save(folder, trained={0.1: Trained(network(5), 2.5, margins(5), {})})
    assert load(folder).threshold == 2.5
    assert torch.equal(load(folder).network.mean, network(5).mean)


def test_looking_needs_no_identity(folder: Path) -> None:
    assert artifact.load(folder, features=NAMES).tau == 0.1


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("architecture", "Qwen2ForCausalLM"), ("layers", 5), ("q_heads", 16), ("kv_heads", 4), ("head_dim", 128),
        ("hidden_size", 1024), ("vocab_size", 2000), ("rope_theta", 10000.0), ("weights", "sha256:def"),
    ],
)  # fmt: skip
def test_another_model(folder: Path, field: str, other: Any) -> None:
    text = refusal(folder, **{field: other})
    assert f"its {field} is {getattr(IDENTITY, field)} and that of the model served is {other}" in text


@pytest.mark.parametrize(("field", "other"), [("sinks", 32), ("window", 128)])
def test_another_placement(folder: Path, field: str, other: int) -> None:
    has = getattr(IDENTITY, field)
    assert f"trained with {field} {has} and this server has {field} {other}" in refusal(folder, **{field: other})


def test_an_unknown_tau(folder: Path) -> None:
    assert "has no tau 0.20, only 0.05, 0.10" in refusal(folder, 0.2)


def test_other_features(folder: Path) -> None:
    names = [*NAMES[:7], "mean_v_norm", *NAMES[8:]]
    with pytest.raises(PredictorError, match="feature 7 is feature7 there and mean_v_norm in this version"):
        artifact.load(folder, features=names)
    with pytest.raises(PredictorError, match="feature 40 is feature40 there and nothing in this version"):
        artifact.load(folder, features=NAMES[:40])


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "has no predictor.json" in refusal(tmp_path / "empty")
    (folder / FIRST).unlink()
    assert f"{FIRST} do not exist" in refusal(folder)
    assert load(folder, 0.05).threshold == 0.25


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_broken_json(folder: Path, text: bytes) -> None:
    (folder / "predictor.json").write_bytes(text)
    assert "is not JSON" in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"kind": "other"}'])
def test_some_other_json(folder: Path, text: str) -> None:
    (folder / "predictor.json").write_text(text)
    assert "is not a predictor of this project" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(format=4), "has format 4 and this version reads formats up to 3"),
        (lambda d: d.pop("taus"), "its taus is missing"),
        (lambda d: d.pop("features"), "its features is missing"),
        (lambda d: d.pop("calibrated"), "its calibrated is missing"),
        (lambda d: d.update(model=7), "its model is not what it should be"),
        (lambda d: d["model"].pop("head_dim"), "does not say the head_dim"),
        (lambda d: d.pop("sinks"), "does not say the sinks"),
        (lambda d: d["model"].update(layers=0), "its layers is 0, which is no number of them"),
        (lambda d: d["model"].update(layers=10**12), "its layers is 1000000000000, which is no number"),
        (lambda d: d["model"].update(layers=4.0), "its layers is 4.0, which is no number of them"),
        (lambda d: d["model"].update(q_heads=True), "its q_heads is True, which is no number of them"),
        (lambda d: d["model"].update(q_heads="8"), "its q_heads is '8', which is no number of them"),
        (lambda d: d["taus"].update({"0.10": 3}), "its entry for tau 0.10 is no object"),
        (lambda d: d["taus"]["0.10"].update(threshold="high"), "is 'high', which is no finite number"),
        (lambda d: d["taus"]["0.10"].update(threshold=math.nan), "is nan, which is no finite number"),
        (lambda d: d["taus"]["0.10"].update(file="../x.safetensors"), "is not in the folder"),
        (lambda d: d["taus"]["0.10"].pop("metrics"), "its metrics is missing"),
    ],
)
def test_damaged_json(folder: Path, change: Callable[[dict[str, Any]], object], why: str) -> None:
    edit(folder, change)
    assert why in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:keep])
    assert "is truncated or no safetensors file" in refusal(folder)


def test_one_bit_of_the_weights(folder: Path) -> None:
    content = bytearray((folder / FIRST).read_bytes())
    content[-100] ^= 1
    (folder / FIRST).write_bytes(content)
    assert "is not the file that was saved with this predictor.json" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.pop("layers.0.bias"), "layers.0.bias is not there and should be float32 [272]"),
        (lambda s: s.update(extra=torch.zeros(2)), "extra is float32 [2] and should be not there"),
        (lambda s: s.update(mean=torch.zeros(40)), "mean is float32 [40] and should be float32 [41]"),
        (lambda s: s.update(std=torch.ones(41).double()), "std is float64 [41] and should be float32 [41]"),
        (lambda s: s["layers.2.weight"][3].fill_(math.nan), "has a value in layers.2.weight that is not finite"),
        (lambda s: s["std"][3].fill_(math.inf), "has a value in std that is not finite"),
        (lambda s: s["std"][3].fill_(0.0), "has a value in std that is not positive"),
        (lambda s: s.pop("margins"), "margins is not there and should be float32 [4, 8, 4]"),
        (
            lambda s: s.update(margins=torch.ones(4, 8, 1)),
            "margins is float32 [4, 8, 1] and should be float32 [4, 8, 4]",
        ),
        (lambda s: s["margins"][3].fill_(math.nan), "has a value in margins that is not finite"),
        (lambda s: s["margins"][3].fill_(0.0), "has a value in margins that is not positive"),
    ],
)
def test_other_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], why: str) -> None:
    edit_weights(folder, change)
    assert why in refusal(folder)


def test_weights_take_half_the_room(folder: Path) -> None:
    assert (folder / FIRST).stat().st_size < 230_000
    state = load_file(folder / FIRST)
    assert state["layers.1.weight"].dtype == torch.bfloat16 and state["layers.1.bias"].dtype == torch.float32


def to_float32(state: dict[str, torch.Tensor]) -> None:
    state.update({name: value.float() for name, value in state.items()})


def test_a_file_of_the_second_format_holds_float32(folder: Path) -> None:
    edit_weights(folder, to_float32)
    assert "layers.0.weight is float32 [272, 41] and should be bfloat16 [272, 41]" in refusal(folder)
    edit(folder, lambda d: d.update(format=2))
    loaded = load(folder)
    assert torch.equal(loaded.margins, margins(0))
    for name, value in loaded.network.state_dict().items():
        assert torch.equal(value, network(0).state_dict()[name])
    assert "layers.0.weight is bfloat16 [272, 41] and should be float32 [272, 41]" in refusal(folder, 0.05)


def test_a_file_of_the_first_format_has_no_margins(folder: Path) -> None:
    edit_weights(folder, to_float32)
    edit_weights(folder, lambda s: s.pop("margins"))
    edit(folder, lambda d: d.update(format=1))
    assert torch.equal(load(folder).margins, torch.ones(4, 8, 4))
    assert torch.equal(load(folder).network.mean, network(0).mean)
    edit_weights(folder, lambda s: s.update(margins=torch.ones(4, 8, 4)))
    assert "margins is float32 [4, 8, 4] and should be not there" in refusal(folder)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"calibrated tau 0.3 is not among those trained \(0.05, 0.10\)"):
        save(tmp_path, calibrated=0.3)
    broken = network(0)
    with torch.no_grad():
        broken.layers[1].bias[2] = math.nan
    with pytest.raises(PredictorError, match=r"layers.1.bias that is not finite; train it again"):
        save(tmp_path, trained={0.1: Trained(broken, 0.0, margins(0), {})})
    with pytest.raises(PredictorError, match=r"margins that is not positive; train it again"):
        save(tmp_path, trained={0.1: Trained(network(0), 0.0, -margins(0), {})})
    with pytest.raises(PredictorError, match=r"threshold for tau 0\.1 is inf"):
        save(tmp_path, trained={0.1: Trained(network(0), math.inf, margins(0), {})})
    assert not any(tmp_path.iterdir())


def test_what_is_refused_leaves_what_is_there(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    good = Trained(network(5), 2.5, margins(5), {})
    bad = Trained(network(6), 2.5, margins(6)[..., :1], {})
    with pytest.raises(PredictorError, match=r"margins for tau 0\.1 have the shape \(4, 8, 1\) and not \(4, 8, 4\)"):
        save(folder, trained={0.05: good, 0.1: bad}, calibrated=0.05)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_margins_are_kept_in_float32(folder: Path) -> None:
    save(folder, trained={0.1: Trained(network(5), 2.5, margins(5).double(), {})})
    assert torch.equal(load(folder).margins, margins(5))
