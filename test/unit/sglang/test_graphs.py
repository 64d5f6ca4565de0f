"""Traces of a model's computation, and their replays: equal bits, or a reason why there is no trace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from fluxion_sglang.native import NativeLayers, NativeProgram, Workers
from fluxion_sglang.sglang.containment.passes import FailureGuard
from fluxion_sglang.sglang.steps import graphs
from fluxion_sglang.sglang.steps.graphs import StepGraph, StepGraphs, backbone_of, place
from fluxion_sglang.sglang.steps.layers import Contained
from fluxion_sglang.sglang.steps.tracing import Kind, Trace, TracedLayers, Tracer

WORKERS = Workers(2)
HIDDEN, WORDS = 48, 64


# --- Memory ---


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(0, 20)), max_size=24))
def test_no_two_values_that_are_needed_at_one_time_overlap(drawn: list[tuple[int, int, int]]) -> None:
    sizes = [size for size, _, _ in drawn]
    spans = [(first, first + length) for _, first, length in drawn]
    offsets, whole = place(sizes, spans)
    assert all(at % 64 == 0 and at + size <= whole for at, size in zip(offsets, sizes, strict=True))
    for i in range(len(drawn)):
        for j in range(i):
            together = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
            apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
            assert not together or apart or not sizes[i] or not sizes[j]


def test_values_that_follow_each_other_share_memory() -> None:
    spans = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert place([64] * 4, spans) == ([0, 64, 0, 64], 128)


# --- Traces and replays ---


class Backbone(nn.Module):
    """A model with two layers like SGLang's: native layers, views, a sum in place, a copy, attention."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.native = Contained(NativeLayers(WORKERS))
        self.embedding = nn.Parameter(torch.randn(WORDS, HIDDEN, dtype=dtype), requires_grad=False)
        self.mixed = nn.Parameter(torch.randn(2, 3 * HIDDEN, HIDDEN, dtype=dtype) * 0.1, requires_grad=False)
        self.norm = nn.Parameter(torch.rand(HIDDEN, dtype=dtype), requires_grad=False)
        self.part = nn.Identity()
        self.graphs: StepGraphs | None = None
        self.runs = 0
        self.attended: list[int] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, extra: Any = None) -> Any:
        self.runs += 1
        x = torch.nn.functional.embedding(input_ids, self.embedding)
        if extra is not None:
            return x + extra
        residual = x
        for layer in range(2):
            h, residual = self.native(lambda at, x=x, r=residual: at.add_norm(x, r, self.norm, 1e-6))
            mixed = self.native(lambda at, h=h, w=self.mixed[layer]: at.linear(h, w))
            q, k, v = mixed.split(HIDDEN, dim=-1)
            x = self.attend(layer, q, k, v, positions)
            x += q.reshape(-1, 16).contiguous().view(-1, HIDDEN)  # a copy if there are several rows
        return x * 2

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        def compute() -> torch.Tensor:
            return self.attention(layer, q, k, v, at)

        tracer = None if self.graphs is None else self.graphs.tracer
        return compute() if tracer is None else tracer.own(layer, (q, k, v, at), compute)

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        self.attended.append(layer)
        return q * (layer + 1) + k * v * at[:, None].to(q.dtype)

    def add(self, program: NativeProgram, key: Any, arguments: Sequence[Any], out: torch.Tensor) -> Callable[[], None]:
        return lambda: (out.copy_(self.attention(key, *arguments)), None)[1]

    def begin(self) -> bool:
        return False

    def end(self) -> None:
        pytest.fail("no program attends")


DECODE = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
EXTEND = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False))


def step(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (rows,), generator=drawn), torch.randint(9, (rows,), generator=drawn)


def graphed(dtype: torch.dtype = torch.float32) -> tuple[Backbone, StepGraphs, FailureGuard]:
    model, guard = Backbone(dtype), FailureGuard()
    model.native = Contained(model.native.layers, guard.run)
    model.graphs = StepGraphs(model, model.native, guard, model)
    return model, model.graphs, guard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_replays_give_the_same_bits(dtype: torch.dtype, rows: int, mode: Any) -> None:
    plain = Backbone(dtype)
    model, _, _ = graphed(dtype)
    with mode():
        for seed in range(6):
            inputs = step(rows, seed)
            assert torch.equal(model.forward(*inputs, DECODE), plain(*inputs, DECODE))
    assert model.runs == 2  # the others were replays
    assert model.attended == [0, 1] * 6


class Stateful(Backbone):
    """Its first layer also has a state for each request, which `graphs.States` places; the step copies some states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.held = torch.randn(8, 1, HIDDEN, 16)
        self.slots = torch.zeros(1, dtype=torch.int32)
        self.copied = 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, extra: Any = None) -> Any:
        x = super().forward(input_ids, positions, forward_batch, extra)
        gates = x[:, :1].float().contiguous()
        q, k = x[:, :16], x[:, 16:32]
        x = x + self.native(lambda at: at.delta_rule(q, k, x, -gates.abs(), gates, self.held, self.inputs()[0]))
        with nullcontext() if self.graphs is None else self.graphs.paused():
            self.finish(forward_batch)
        return x

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.slots,)

    def memory(self) -> list[torch.Tensor]:
        return [self.held]

    def finish(self, forward_batch: Any) -> None:
        if forward_batch.copies.any():  # the contents of a tensor, which no trace may depend on
            self.held[7] = self.held[int(self.slots[0])]
            self.copied += 1


def test_replays_keep_states() -> None:
    """In other slots than the traced steps had, and with the copies that the model's Python makes after a layer."""
    plain, model, guard = Stateful(), Stateful(), FailureGuard()
    model.native = Contained(model.native.layers, guard.run)
    model.graphs = StepGraphs(model, model.native, guard, model, model)
    for seed in range(8):
        batch = SimpleNamespace(forward_mode=DECODE.forward_mode, copies=torch.tensor([seed % 3 == 2]))
        for one in (plain, model):
            one.slots = torch.tensor([seed % 5, (seed + 2) % 5], dtype=torch.int32)
        assert torch.equal(model.forward(*step(2, seed), batch), plain(*step(2, seed), batch))
        assert torch.equal(model.held, plain.held)
    assert model.runs == 2 and model.copied == plain.copied == 2


def test_results_are_not_each_other_s_memory() -> None:
    model, _, _ = graphed()
    found = [model.forward(*step(2, seed), DECODE) for seed in range(5)]
    plain = Backbone()
    assert all(torch.equal(out, plain(*step(2, seed), DECODE)) for seed, out in enumerate(found))


def test_every_number_of_requests_has_its_own() -> None:
    model, _, _ = graphed()
    plain = Backbone()
    for seed in range(12):
        inputs = step(1 + seed % 3, seed)
        assert torch.equal(model.forward(*inputs, DECODE), plain(*inputs, DECODE))
    assert model.runs == 6


def test_weights_that_change_where_they_are_are_followed() -> None:
    model, _, _ = graphed()
    for seed in range(3):
        model.forward(*step(2, seed), DECODE)
    model.mixed.data.mul_(0.5)
    plain = Backbone()
    plain.mixed.data.mul_(0.5)
    assert torch.equal(model.forward(*step(2, 7), DECODE), plain(*step(2, 7), DECODE))
    assert model.runs == 2


def test_weights_in_other_memory_make_other_graphs() -> None:
    model, _, _ = graphed()
    for seed in range(3):
        model.forward(*step(2, seed), DECODE)
    plain = Backbone()
    model.norm.data = plain.norm.data = torch.rand(HIDDEN)
    for seed in range(4):
        assert torch.equal(model.forward(*step(2, seed), DECODE), plain(*step(2, seed), DECODE))
    assert model.runs == 4


def test_other_passes_are_the_model_s_own() -> None:
    model, _, _ = graphed()
    for _ in range(4):
        model.forward(*step(2), EXTEND)
        model.forward(*step(2), DECODE, extra=torch.ones(HIDDEN))
        model.forward(*step(graphs.MAX_REQUESTS + 1), DECODE)
        model.forward(*step(0), DECODE)
    assert model.runs == 16


def test_a_replay_that_fails_fails_its_pass_and_not_the_next() -> None:
    model, _, guard = graphed()
    plain = Backbone()
    for seed in range(3):
        model.forward(*step(2, seed), DECODE)
    whole, model.attention = model.attention, None  # type: ignore[method-assign]
    with guard.containing():
        out = model.forward(*step(2), DECODE)
    assert guard.reason is not None and out.shape == (2, HIDDEN) and not out.any()
    model.attention = whole  # type: ignore[method-assign]
    with guard.containing():
        out = model.forward(*step(2), DECODE)
    assert guard.reason is None and torch.equal(out, plain(*step(2), DECODE))


def test_a_step_that_fails_is_no_trace() -> None:
    model, _, guard = graphed()
    contained, plain = model.native, Contained(model.native.layers)
    for seed in range(4):
        with guard.containing():
            if seed == 0:
                guard.run(lambda: 1 // 0)
            model.native = plain if seed == 0 else contained
            model.forward(*step(2, seed), DECODE)
    assert model.runs == 3


def test_what_differs_from_step_to_step_is_not_replayed() -> None:
    model, _, _ = graphed()
    plain = Backbone()
    given_to = model.attend
    model.attend = lambda *a: given_to(*a) * model.runs  # type: ignore[method-assign]
    for seed in range(8):
        assert torch.equal(model.forward(*step(1, seed), DECODE), _scaled(plain, seed, model.runs))
    assert model.runs == 8


def _scaled(plain: Backbone, seed: int, by: int) -> torch.Tensor:
    given_to = Backbone.attend
    plain.attend = lambda *a: given_to(plain, *a) * by  # type: ignore[method-assign]
    return plain(*step(1, seed), DECODE)


# --- What a trace cannot hold ---


def traced(run: Callable[[torch.Tensor, torch.Tensor], Any]) -> tuple[Trace | None, str | None]:
    x, weight = torch.arange(6.0).view(2, 3), torch.ones(3)
    with Tracer([x], [weight]) as tracer:
        result = run(x, weight)
    return tracer.trace(result), tracer.reason


torch.library.define("fluxion_test::in_secret", "(Tensor x) -> Tensor")


@torch.library.impl("fluxion_test::in_secret", "CompositeExplicitAutograd")
def _writes_in_secret(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@pytest.mark.parametrize("part", [lambda x: x[1:], lambda x: x.t(), lambda x: x[:1].expand(2, 3)])
def test_an_input_that_is_part_of_other_memory(part: Any) -> None:
    x = part(torch.randn(2, 3))
    with Tracer([x], []) as tracer:
        result = x + 1
    assert tracer.trace(result) is None and tracer.reason == "an input is a part of other memory"


def test_a_graph_that_cannot_be_made_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, guard = graphed()
    plain = Backbone()

    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(graphs, "StepGraph", broken)
    for seed in range(4):
        with guard.containing():
            assert torch.equal(model.forward(*step(2, seed), DECODE), plain(*step(2, seed), DECODE))
        assert guard.reason is None
    assert model.runs == 4


def _in_secret(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out + 1


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda x, w: x * x.sum().item(), "looks into a tensor"),
        (lambda x, w: x * x[0].tolist()[1], "looks into a tensor"),
        (lambda x, w: x + 1 if x[0, 0] > 0 else x, "looks into a tensor"),
        (lambda x, w: torch.from_numpy(x.numpy()) + 1, "looks into a tensor"),
        (lambda x, w: x[x > 2], "chance or on what is in a tensor"),
        (lambda x, w: x + torch.rand(3), "chance or on what is in a tensor"),
        (lambda x, w: x + OUTSIDE, "from outside"),
        (lambda x, w: _in_secret(x), "from outside"),
        (lambda x, w: x.add_(1), "writes an input"),
        (lambda x, w: w.add_(1), "writes a weight"),
        (lambda x, w: (x + 1, x), "more than one tensor"),
        (lambda x, w: torch.ops.fluxion_test.in_secret(x) + 1, "may write what it does not say"),
        (lambda x, w: torch.complex(x, x).conj().imag, "not what it stands for"),
    ],
)
def test_reasons(run: Any, why: str) -> None:
    trace, reason = traced(run)
    assert trace is None and reason is not None and why in reason


OUTSIDE = torch.ones(3)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: x + w,
        lambda x, w: x.t().contiguous().view(-1)[1:],
        lambda x, w: torch.zeros(2, 3).add_(x)[:, ::2],
        lambda x, w: torch.cat([x, x.to(torch.float64)], 1),
        lambda x, w: torch.stack(torch.unbind(x * w, 1)[::2]),
        lambda x, w: torch.full((2, 3), 2.0).mul_(x).sort(dim=1, descending=True)[0],
        lambda x, w: x,
        lambda x, w: w,
    ],
)
def test_operations_of_pytorch(run: Any) -> None:
    with torch.inference_mode():
        x, weight = torch.randn(2, 3), torch.randn(3)
        with Tracer([x], [weight]) as tracer:
            run(x, weight)
            result = run(x, weight)
        trace = tracer.trace(result)
        assert trace is not None, tracer.reason
        graph = StepGraph(trace, tracer.held, NativeProgram(NativeLayers(WORKERS)), Backbone())
        for _ in range(3):
            x = torch.randn(2, 3)
            assert torch.equal(graph.replay(x), run(x, weight))


def test_native_layers_are_one_call_a_stretch() -> None:
    layers = NativeLayers(WORKERS)
    x, w = torch.randn(2, 16), torch.randn(16, 16)

    def run(at: NativeLayers, x: torch.Tensor) -> torch.Tensor:
        return at.gate_mul(at.linear(at.linear(x, w) * 2, w))

    with Tracer([x], [w]) as tracer:
        result = run(TracedLayers(layers, tracer), x)
    trace = tracer.trace(result)
    assert trace is not None
    assert [op.kind for op in trace.ops] == [Kind.LAYER, Kind.TORCH, Kind.LAYER, Kind.LAYER]
    graph = StepGraph(trace, tracer.held, NativeProgram(layers), Backbone())
    assert len(graph._whole) == len(graph._parted) == 3
    assert torch.equal(graph.replay(x), run(layers, x))


# --- The backbone of a model ---


class Attends(RadixAttention):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class Logits(LogitsProcessor):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Attends()), nn.Sequential(Attends())])

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> None: ...


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attends()])

    def forward(self, hidden_states: Any) -> None: ...


def _model(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def test_the_backbone_is_all_but_the_logits() -> None:
    inner = Inner()
    assert backbone_of(_model(model=inner, logits_processor=Logits())) is inner
    assert backbone_of(_model(model=Other(), logits_processor=Logits())) is None
    assert backbone_of(_model(model=inner, second=Inner(), logits_processor=Logits())) is None


# --- Who watches ---


def test_a_hook_that_comes_late_sees_every_step() -> None:
    model, _, _ = graphed()
    for seed in range(3):
        model.forward(*step(2, seed), DECODE)
    hook = model.part.register_forward_hook(lambda *_: None)
    model.forward(*step(2), DECODE)
    assert model.runs == 3
    hook.remove()
    model.forward(*step(2), DECODE)
    assert model.runs == 3
