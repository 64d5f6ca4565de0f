"""The predictor network: native inference against torch, on every instruction set."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from fluxion_sglang.native import Workers, function, topology
from fluxion_sglang.predictor.features import COUNT
from fluxion_sglang.predictor.inference import NativePredictor
from fluxion_sglang.predictor.network import CLIP, HeadPredictor

ISAS: list[str] = topology()["isas"]
isas = pytest.mark.parametrize("isa", ISAS)


def network(seed: int = 0) -> HeadPredictor:
    """Random weights of a size that keeps activations alive, and a non-trivial standardisation."""
    random = torch.Generator().manual_seed(seed)
    made = HeadPredictor()
    with torch.no_grad():
        for layer in made.layers:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=random) * (2 / layer.in_features) ** 0.5)
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=random))
        made.mean.copy_(torch.randn(COUNT, generator=random) * 5)
        made.std.copy_(torch.rand(COUNT, generator=random) * 3 + 0.1)
    return made


def features(rows: int, seed: int = 1) -> torch.Tensor:
    """Features, some of them beyond the clip."""
    return torch.randn(rows, COUNT, generator=torch.Generator().manual_seed(seed)) * 8


def served(model: HeadPredictor, isa: str, x: torch.Tensor) -> torch.Tensor:
    """Predictions with the roundings of an instruction set, else in float64. The model does not change."""
    rounds = isa == "avx512bf16"
    y = ((x.double() - model.mean) / model.std).clamp(-CLIP, CLIP)
    for layer in model.layers:
        y = (y.bfloat16() if rounds else y).double() @ layer.weight.detach().bfloat16().double().T
        y = y + layer.bias.detach().double()
        y = y if layer is model.layers[-1] else y.relu()
    return y


def close(got: torch.Tensor, want: torch.Tensor, isa: str) -> None:
    # A float32 sum may round to another bfloat16 than the exact one.
    torch.testing.assert_close(got.double(), want, atol=2e-2 if isa == "avx512bf16" else 5e-4, rtol=5e-4)


def run(native: NativePredictor, x: torch.Tensor, workers: Workers | None = None) -> torch.Tensor:
    """Predictions, written between guard rows that must not change."""
    guarded = torch.full((len(x) + 2, 3), math.nan)
    guarded[0] = guarded[-1] = 7.0
    native.forward(x, guarded[1:-1], workers)
    assert (guarded[0] == 7.0).all() and (guarded[-1] == 7.0).all()
    return guarded[1:-1].clone()


def test_the_network_has_the_size_of_the_paper() -> None:
    count = sum(p.numel() for p in HeadPredictor().parameters())
    assert count == 112_083
    assert abs(count / 112_000 - 1) < 0.02


@isas
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 31, 32, 33, 64, 1000])
def test_forward_equals_torch(isa: str, rows: int) -> None:
    model, x = network(), features(rows)
    native = NativePredictor(model, isa)
    assert native.isa == isa
    close(run(native, x), served(model, isa, x), isa)


def test_rounding_changes_little() -> None:
    """Rounding changes float32 predictions little on the best instruction set, and not at all if the weights are
    rounded before."""
    model, x = network(), features(1000)
    want = model(x).detach()
    got = run(NativePredictor(model), x)
    assert float((got - want).abs().max()) < 0.02 * float(want.abs().max())
    model.round_weights()
    assert torch.equal(run(NativePredictor(model), x), got)


@isas
def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    native, x = NativePredictor(network(), isa), features(77)
    together = run(native, x)
    for rows in (1, 5, 16, 40):
        assert torch.equal(torch.cat([run(native, part) for part in x.split(rows)]), together)


@isas
@pytest.mark.parametrize("count", [1, 2, 5])
def test_workers_change_no_bit(isa: str, count: int) -> None:
    native, workers = NativePredictor(network(), isa), Workers(count)
    for rows in (0, 1, 8, 9, 16, 17, 64, 77, 1000):
        x = features(rows, seed=rows)
        alone = run(native, x)
        for _ in range(3):
            assert torch.equal(run(native, x, workers), alone)


@isas
def test_every_output_counts(isa: str) -> None:
    """Change one weight at a time, so that every input and output of a panel is distinguished."""
    x = features(3)
    for layer, out, inp in [(0, 271, 40), (0, 16, 0), (1, 239, 271), (2, 143, 239), (2, 15, 16), (3, 2, 143)]:
        model = network()
        before = run(NativePredictor(model, isa), x)
        with torch.no_grad():
            model.layers[layer].weight[out, inp] += 5.0
            model.layers[layer].bias[out] += 5.0
        after = run(NativePredictor(model, isa), x)
        assert not torch.equal(before, after)
        close(after, served(model, isa, x), isa)


@isas
def test_extreme_features(isa: str) -> None:
    """Infinities are clipped. A NaN reaches only the predictions of its own row; the selector then reads everything."""
    model, x = network(), features(24)
    x[2, 5], x[3, 0], x[4, 40] = math.inf, -math.inf, 1e38
    want = served(model, isa, x)
    x[7, 11] = math.nan  # rows 15 and 23 take its place in the buffer later
    got = run(NativePredictor(model, isa), x)
    assert got[7].isnan().all()
    rest = torch.arange(24) != 7
    close(got[rest], want[rest], isa)


@isas
def test_layers_of_odd_widths(isa: str) -> None:
    """A row of NaN leaves no trace for rows that later take its place."""
    widths, random = (5, 33, 1, 3), torch.Generator().manual_seed(0)
    shapes = [shape for a, b in pairwise(widths) for shape in ((b, a), (b,))]
    parameters = [torch.randn(shape, generator=random) for shape in shapes]
    parts = (torch.tensor(widths, dtype=torch.int32), torch.zeros(5), torch.ones(5))
    handle = function("predictor_create")(isa, *parts, torch.cat([p.flatten() for p in parameters]))
    x = torch.randn(40, 5, generator=random)
    x[3] = math.nan
    out = torch.full((40, 3), math.nan)
    function("predictor_forward")(handle, x, out, None)
    y = x.double()
    for i in range(3):
        weight, bias = (p.double() for p in parameters[2 * i : 2 * i + 2])
        y = (y.bfloat16() if isa == "avx512bf16" else y).double() @ weight.bfloat16().double().T + bias
        y = y if i == 2 else y.relu()
    assert out[3].isnan().all()
    rest = torch.arange(40) != 3
    close(out[rest], y[rest], isa)


def test_weights_are_copied() -> None:
    model, x = network(), features(4)
    native = NativePredictor(model)
    before = run(native, x)
    with torch.no_grad():
        model.layers[0].weight.zero_()
    assert torch.equal(run(native, x), before)


def test_wrong_arguments() -> None:
    native = NativePredictor(network())
    out = torch.full((4, 3), 7.0)
    for x in (torch.zeros(4, 40), torch.zeros(4, COUNT).double(), torch.zeros(COUNT, 4).T, torch.zeros(3, 41)):
        with pytest.raises(ValueError, match=r"and must be a contiguous tensor in host memory of float32 and shape \["):
            native.forward(x, out)
    assert (out == 7.0).all()
    with pytest.raises(ValueError, match="isa abacus cannot be run by this CPU"):
        NativePredictor(network(), "abacus")


@pytest.mark.parametrize("name", ["mean", "std", "layers.1.weight", "layers.3.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(name: str, value: float) -> None:
    model = network()
    with torch.no_grad():
        model.state_dict()[name].view(-1)[1] = value
    with pytest.raises(ValueError, match="not finite"):
        NativePredictor(model)


def test_weights_that_bfloat16_does_not_hold() -> None:
    model = network()
    with torch.no_grad():
        model.layers[2].weight[3, 4] = 3.4e38
    with pytest.raises(ValueError, match="too large for bfloat16"):
        NativePredictor(model)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_std_must_be_positive(value: float) -> None:
    model = network()
    model.std[3] = value
    with pytest.raises(ValueError, match="not positive"):
        NativePredictor(model)
