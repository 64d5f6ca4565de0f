"""SGLang's mixtures of experts on the native workers, and the cases that stay SGLang's.

This includes experts rounded to 8 bits and experts of GGUF files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from sglang.srt.runtime_context import get_context, get_parallel
from torch import nn

from fluxion_sglang.native import NativeLayers, Workers
from fluxion_sglang.sglang.containment.passes import FailureGuard
from fluxion_sglang.sglang.steps import layers, stand_ins
from fluxion_sglang.sglang.steps.tracing import Kind, TracedLayers, Tracer
from fluxion_sglang.sglang.weights.experts import formats_of
from fluxion_sglang.sglang.weights.gguf import Blocks, GgufConfig
from fluxion_sglang.sglang.weights.methods import multiplied_in
from fluxion_sglang.sglang.weights.rounding import FORMAT, RoundingConfig, RoundingExpertsMethod, rounded
from fluxion_sglang.weights import ggml

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 64, 32


class Counted(NativeLayers):
    calls = 0

    def experts(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return super().experts(*args, **kwargs)


NATIVE = Counted(Workers(2))


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes SGLang forget operations that are registered in the test."""
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    monkeypatch.setattr(NATIVE, "calls", 0)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    one_rank = get_parallel().override(moe_ep_size=1, moe_ep_rank=0, moe_tp_size=1, moe_tp_rank=0, tp_group=None)
    with get_context().override_server_args(device="cpu"), one_rank:
        yield


def made(dtype: torch.dtype = torch.float32, rounds: bool = False, inner: int = INNER, **options: Any) -> FusedMoE:
    layer = FusedMoE(
        EXPERTS, HIDDEN, inner, layer_id=0, top_k=CHOSEN, params_dtype=dtype,
        quant_config=RoundingConfig() if rounds else None, **options,
    )  # fmt: skip
    load(layer, 0)
    return layer


def load(layer: FusedMoE, seed: int) -> None:
    """Load like a checkpoint: one expert's matrix after another."""
    for expert in range(EXPERTS):
        for shard, parameter in (("w1", layer.w13_weight), ("w3", layer.w13_weight), ("w2", layer.w2_weight)):
            parameter.weight_loader(parameter, matrix(layer, seed, expert, shard), "weight", shard, expert)
    method: Any = layer.quant_method
    method.process_weights_after_loading(layer)


def matrix(layer: FusedMoE, seed: int, expert: int, shard: str) -> torch.Tensor:
    inner = layer.intermediate_size_per_partition
    size = (HIDDEN, inner) if shard == "w2" else (inner, HIDDEN)
    generator = torch.Generator().manual_seed(100 * seed + 10 * expert + int(shard[1]))
    return (torch.randn(size, generator=generator) / math.sqrt(size[1])).to(layer.params_dtype)


def asked(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, StandardTopKOutput]:
    """Rows, and the output of SGLang's router for random logits."""
    generator = torch.Generator().manual_seed(rows)
    x, logits = (torch.randn(rows, size, generator=generator).to(dtype) for size in (HIDDEN, EXPERTS))
    return x, TopK(CHOSEN, layer_id=0).forward_native(x, logits)


def computed(layer: FusedMoE, x: torch.Tensor, choice: Any) -> torch.Tensor:
    found = layer.run_moe_core(layer.dispatcher.dispatch(x, choice))
    assert isinstance(found, StandardCombineInput)
    return found.hidden_states


def install(layer: FusedMoE, native: Any = None) -> None:
    assert layers.install(nn.Sequential(layer), native or layers.Contained(NATIVE)) == 1
    layer.quant_method._forward_method = None  # SGLang caches the choice of the implementation


def is_native(rows: int, dtype: torch.dtype) -> bool:
    """Whether the workers compute this many rows."""
    return rows * CHOSEN <= layers.MAX_EXPERT_ROWS * EXPERTS or multiplied_in(dtype) is not dtype


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workers_compute_what_sglang_does(dtype: torch.dtype, activation: str, rows: int) -> None:
    layer = made(dtype, activation=activation)
    x, choice = asked(rows, dtype)
    want = computed(layer, x, choice)
    install(layer)
    torch.testing.assert_close(computed(layer, x, choice), want, **tolerance(dtype))
    assert NATIVE.calls == 1


@pytest.mark.parametrize(
    "options",
    [{"swiglu_limit": 7.0}, {"no_combine": True}],
    ids=["a limit", "not combined"],
)
@pytest.mark.parametrize("rounds", [False, True])
def test_other_experts_are_sglangs(options: dict[str, Any], rounds: bool) -> None:
    layer = made(rounds=rounds, **options)
    assert not formats_of(layer)
    x, choice = asked(3)
    want = computed(layer, x, choice)
    layers.install(nn.Sequential(layer), layers.Contained(NATIVE))
    assert torch.equal(computed(layer, x, choice), want) and NATIVE.calls == 0


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_and_clamps(dtype: torch.dtype, rounds: bool, clamped: bool, rows: int) -> None:
    """gpt-oss has both. SGLang compiles its own function for the clamps, so this compares with its stand-in."""
    stand_ins.install()
    options = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5} if clamped else {}
    layer = made(dtype, rounds, with_bias=True, **options)
    for bias in (layer.w13_weight_bias, layer.w2_weight_bias):
        bias.data = torch.randn(bias.shape, generator=torch.Generator().manual_seed(3))
    x, choice = asked(rows, dtype)
    want = computed(layer, x, choice)
    install(layer)
    limit = {"rtol": 1e-3, "atol": 1e-3} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(computed(layer, x, choice), want, **limit)
    assert NATIVE.calls == 1


def test_very_many_rows_are_sglangs() -> None:
    layer = made()
    install(layer)
    computed(layer, *asked(EXPERTS * layers.MAX_EXPERT_ROWS // CHOSEN + 1))
    assert NATIVE.calls == 0


def test_a_step_with_experts_is_traced_and_is_one_layer() -> None:
    """The router's choice is traced too: nothing in between reads a tensor's values."""
    layer = made()
    install(layer, native := layers.Contained(NATIVE))
    x, gate = torch.randn(3, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    router = TopK(CHOSEN, layer_id=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return computed(layer, x, router.forward_native(x, x @ gate.T))

    tracer = Tracer([x], [*layer.parameters(), gate])
    native.layers = TracedLayers(NATIVE, tracer)
    with tracer:
        result = step(x)
    trace = tracer.trace(result)
    native.layers = NATIVE
    assert trace is not None, tracer.reason
    assert [op.what for op in trace.ops if op.kind is Kind.LAYER] == ["experts"]


def test_experts_that_fail_fail_their_pass_and_sglang_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, layer = FailureGuard(), made()
    x, choice = asked(3)
    want = computed(layer, x, choice)
    install(layer, layers.Contained(NATIVE, guard.run))
    with guard.containing():
        wrong = choice._replace(topk_ids=choice.topk_ids + EXPERTS)
        with pytest.raises(RuntimeError):  # SGLang fails here too
            computed(layer, x, wrong)
        assert "which is not among the 8 of the layer" in (guard.reason or "")
        torch.testing.assert_close(computed(layer, x, choice), want)
    with guard.containing():
        torch.testing.assert_close(computed(layer, x, choice), want)
        assert guard.reason is None


class TestRounded:
    @pytest.mark.parametrize("rows", [1, 9, EXPERTS * layers.MAX_EXPERT_ROWS // CHOSEN + 1])
    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_they_are_the_experts_with_rounded_weights(self, dtype: torch.dtype, native: bool, rows: int) -> None:
        plain, layer = made(dtype), made(dtype, rounds=True)
        for weight in (plain.w13_weight, plain.w2_weight):
            for expert in weight.data:
                expert.copy_(rounded(expert).wide())
        x, choice = asked(rows, dtype)
        want = computed(plain, x, choice)
        assert formats_of(layer) == (FORMAT, FORMAT) and layer.w13_weight.shape[:2] == (EXPERTS, 2 * INNER // 16)
        if native:
            install(layer)
        got = computed(layer, x, choice)
        limit = {"rtol": 1e-3, "atol": 1e-3} if dtype is torch.float32 else tolerance(dtype)
        torch.testing.assert_close(got, want, **limit)
        assert NATIVE.calls == (native and is_native(rows, dtype))

    def test_a_size_that_is_no_multiple_of_a_group_stays(self) -> None:
        layer = made(rounds=True, inner=48)
        assert isinstance(layer.quant_method, RoundingExpertsMethod) and not formats_of(layer)
        x, choice = asked(3)
        want = computed(layer, x, choice)
        install(layer)
        torch.testing.assert_close(computed(layer, x, choice), want)
        assert NATIVE.calls == 1

    def test_weights_are_updated_and_rounded_again(self) -> None:
        layer = made(torch.bfloat16, rounds=True)
        install(layer)
        x, choice = asked(3, torch.bfloat16)
        before = computed(layer, x, choice)
        with pytest.raises(ValueError, match="begin the update of weights before new ones are loaded"):
            load(layer, 1)
        method: Any = layer.quant_method
        for _ in range(2):  # a failed update is rolled back: restored again
            method.restore_weights_before_loading(layer)
        assert not formats_of(layer) and layer.w13_weight.shape == (EXPERTS, 2 * INNER, HIDDEN)
        torch.testing.assert_close(computed(layer, x, choice), before, **tolerance(torch.bfloat16))
        load(layer, 1)
        new = computed(layer, x, choice)
        assert formats_of(layer) and (new - before).abs().max() > 0.1
        other = made(torch.bfloat16)
        load(other, 1)
        torch.testing.assert_close(new, computed(other, x, choice), rtol=0.05, atol=0.05)

    def test_what_is_not_finite_is_refused(self) -> None:
        layer = made(rounds=True)
        method: Any = layer.quant_method
        method.restore_weights_before_loading(layer)
        layer.w2_weight.data[5, 0, 0] = math.nan
        with pytest.raises(ValueError, match="because some are not finite; leave that option out"):
            method.process_weights_after_loading(layer)
        method.restore_weights_before_loading(layer)
        load(layer, 1)
        assert formats_of(layer)


class TestOfAGgufFile:
    def load(self, layer: FusedMoE, kinds: dict[str, Type]) -> FusedMoE:
        """Load like a GGUF file: all experts' matrices at once. Returns the layer with the dequantised weights."""
        plain = made(layer.params_dtype)
        for shard, kind in kinds.items():
            matrices = torch.cat([matrix(plain, 0, expert, shard) for expert in range(EXPERTS)]).float()
            stored = gguf.quants.quantize(matrices.numpy(), kind)
            wide = torch.from_numpy(gguf.quants.dequantize(stored, kind)).unflatten(0, (EXPERTS, -1))
            loaded = wide.flatten(0, 1).to(ggml.DENSE[int(kind)]) if int(kind) in ggml.DENSE else torch.tensor(stored)
            if int(kind) in ggml.KINDS:
                loaded.ggml = Blocks(int(kind), matrices.shape[1])  # type: ignore[attr-defined]
            to, like = ("w2", plain.w2_weight) if shard == "w2" else ("w13", plain.w13_weight)
            parameter = getattr(layer, f"{to}_weight")
            parameter.weight_loader(parameter, loaded, "weight", shard_id=shard, expert_id=0)
            {"w1": like[:, :INNER], "w3": like[:, INNER:], "w2": like}[shard].data.copy_(wide)
        self.process(layer)
        return plain

    def process(self, layer: FusedMoE) -> None:
        method: Any = layer.quant_method
        method.process_weights_after_loading(layer)

    def empty(self, dtype: torch.dtype, **options: Any) -> FusedMoE:
        return FusedMoE(
            EXPERTS, HIDDEN, INNER, layer_id=0, top_k=CHOSEN, params_dtype=dtype, quant_config=GgufConfig(), **options
        )

    @pytest.mark.parametrize("rows", [1, 9, EXPERTS * layers.MAX_EXPERT_ROWS // CHOSEN + 1])
    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "kinds",
        [(Type.Q4_0, Type.Q4_0, Type.Q8_0), (Type.Q8_0, Type.Q5_0, Type.Q4_1), (Type.Q4_1, Type.F16, Type.BF16)],
        ids=lambda kinds: "-".join(kind.name for kind in kinds),
    )
    def test_they_are_the_experts_with_its_weights(
        self, kinds: tuple[Type, ...], dtype: torch.dtype, native: bool, rows: int
    ) -> None:
        """If one matrix is not quantised, none is."""
        layer = self.empty(dtype)
        plain = self.load(layer, dict(zip(("w1", "w3", "w2"), kinds, strict=True)))
        formats = ggml.KINDS[int(kinds[0])].format, getattr(ggml.KINDS.get(int(kinds[2])), "format", None)
        assert formats_of(layer) == (formats if formats[1] else None)
        self.process(layer)  # repeating it changes nothing
        x, choice = asked(rows, dtype)
        want = computed(plain, x, choice)
        if native:
            install(layer)
        limit = {"rtol": 1e-3, "atol": 1e-3} if dtype is torch.float32 else tolerance(dtype)
        torch.testing.assert_close(computed(layer, x, choice), want, **limit)
        assert NATIVE.calls == (native and is_native(rows, dtype))

    def test_they_take_no_other_weights(self) -> None:
        layer = self.empty(torch.float32)
        kinds = dict.fromkeys(("w1", "w3", "w2"), Type.Q8_0)
        self.load(layer, kinds)
        with pytest.raises(ValueError, match="cannot be updated while the server runs"):
            self.load(layer, kinds)

    def test_others_are_refused(self) -> None:
        with pytest.raises(ValueError, match="leave --moe-runner-backend and --ep-size out"):
            self.empty(torch.float32, apply_router_weight_on_input=True)
