"""Layers of a model that the workers compute, parts left to SGLang, and equal results either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, should_apply_lm_head_quant_method
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.platforms import current_platform
from torch import nn

from fluxion_sglang.native import NativeLayers, Workers
from fluxion_sglang.sglang.containment.passes import FailureGuard
from fluxion_sglang.sglang.steps import layers
from fluxion_sglang.sglang.weights import methods

IN, OUT = 48, 40
WORKERS = Workers(2)
LAYERS = NativeLayers(WORKERS)


class AnotherMethod(UnquantizedLinearMethod):
    """Represents any method that quantises, or that changes SGLang's."""


def holding(method: Any, dtype: torch.dtype = torch.float32, wrap: Callable[..., Any] = nn.Parameter) -> nn.Module:
    """A module as SGLang builds it: a method and a weight."""
    module = nn.Module()
    weight = wrap(torch.randn(OUT, IN).to(dtype), requires_grad=False)
    module.register_parameter("weight", weight)
    module.quant_method = method
    return module


def model_of(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


class Counted(NativeLayers):
    """Counts calls that the workers compute."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("linear", "norm", "add_norm", "gate_mul", "rope"):
            self.calls.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """The implementation in use. SGLang forgets operations that are registered in the test."""
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    made = Counted(WORKERS)
    monkeypatch.setitem(globals(), "LAYERS", made)
    yield made


def install(**modules: nn.Module) -> int:
    return layers.install(model_of(**modules), layers.Contained(LAYERS))


def registered(operation: type[BaseFusedOp]) -> Callable[..., Any]:
    return BaseFusedOp._oot_forward_registry[current_platform.get_dispatch_key_name()][operation]


# --- Linear layers ---


@pytest.mark.usefixtures("native")
class TestWhoIsChosen:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_unquantised_layers(self, dtype: torch.dtype) -> None:
        linear, head = holding(UnquantizedLinearMethod(), dtype), holding(UnquantizedEmbeddingMethod(), dtype)
        assert install(linear=linear, head=head) == 2
        assert type(linear.quant_method) is layers._Linear and type(head.quant_method) is layers._Head
        # SGLang checks the method's type, and multiplies with the head's own.
        assert isinstance(linear.quant_method, UnquantizedLinearMethod)
        assert should_apply_lm_head_quant_method(head, head.quant_method)

    @pytest.mark.parametrize(
        "module",
        [
            holding(AnotherMethod()), holding(SimpleNamespace(apply=None)), holding(None),
            holding(UnquantizedLinearMethod(), torch.float16), holding(UnquantizedLinearMethod(), torch.float64),
            model_of(),
        ],
        ids=["subclass", "quantised", "no method", "float16", "float64", "no weight"],
    )  # fmt: skip
    def test_others_stay_as_they_are(self, module: nn.Module) -> None:
        method = getattr(module, "quant_method", None)
        assert install(module=module) == 0
        assert getattr(module, "quant_method", None) is method

    def test_an_adapted_layer_multiplies_its_base_alone(self) -> None:
        base = holding(UnquantizedLinearMethod())
        wrapper = BaseLayerWithLoRA(base, lora_backend=None)
        assert install(wrapper=wrapper) == 1
        assert not hasattr(wrapper, "quant_method") and type(base.quant_method) is layers._Linear

    def test_a_tied_head_is_an_embedding_too(self) -> None:
        tied = holding(UnquantizedEmbeddingMethod())
        assert install(embed_tokens=tied, lm_head=tied) == 1
        ids = torch.tensor([3, 0, 3])
        assert torch.equal(tied.quant_method.embedding(tied, ids), tied.weight[ids])

    def test_an_embedding_of_pytorch_makes_logits(self) -> None:
        embedding = nn.Embedding(OUT, IN).requires_grad_(False)
        assert install(embed_tokens=nn.Embedding(OUT, IN), lm_head=embedding) == 1
        x = torch.randn(2, IN)
        torch.testing.assert_close(embedding.quant_method.apply(embedding, x), x @ embedding.weight.T)

    @pytest.mark.parametrize("special", ["use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target"])
    def test_heads_of_other_precision_are_left_alone(self, special: str) -> None:
        processor = LogitsProcessor.__new__(LogitsProcessor)
        nn.Module.__init__(processor)
        setattr(processor, special, True)
        linear, head = holding(UnquantizedLinearMethod()), holding(UnquantizedEmbeddingMethod())
        assert install(linear=linear, head=head, processor=processor) == 1
        assert type(head.quant_method) is UnquantizedEmbeddingMethod


METHODS = pytest.mark.parametrize("method", [UnquantizedLinearMethod, UnquantizedEmbeddingMethod])


@METHODS
@pytest.mark.parametrize("rows", [1, 4, layers.MAX_ROWS])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_the_workers(native: Counted, method: Any, rows: int, bias: bool) -> None:
    module = holding(method())
    install(module=module)
    x, b = torch.randn(rows, IN), torch.randn(OUT) if bias else None
    got = module.quant_method.apply(module, x, b)
    assert native.calls == ["linear"]
    torch.testing.assert_close(got, method().apply(module, x, b))
    with torch.no_grad():  # updated weights are used at once
        module.weight.mul_(2)
    torch.testing.assert_close(module.quant_method.apply(module, x, b), method().apply(module, x, b))


@METHODS
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(layers.MAX_ROWS + 1, IN), torch.randn(0, IN), torch.randn(2, 3, IN), torch.randn(IN, 4).T,
        torch.randn(IN),
    ],
    ids=["many rows", "no row", "three dimensions", "columns", "a vector"],
)  # fmt: skip
def test_other_shapes_are_sglangs(native: Counted, method: Any, x: torch.Tensor) -> None:
    module = holding(method())
    install(module=module)
    got = module.quant_method.apply(module, x)
    assert native.calls == []
    assert torch.equal(got, method().apply(module, x))


@METHODS
@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_of_a_slow_bfloat16(
    native: Counted, method: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, some rows of the weight at a time."""
    monkeypatch.setattr(methods, "SLOW_BFLOAT16", True)
    monkeypatch.setattr(
        layers, "slices", lambda outputs, inputs, most: (slice(i, i + 32) for i in range(0, outputs, 32))
    )
    module = holding(method()).bfloat16()
    install(module=module)
    x, b = torch.randn(layers.MAX_COPIED_ROWS + 1, IN).bfloat16(), torch.randn(OUT).bfloat16() if bias else None
    want = x.double() @ module.weight.double().T
    assert native.calls == []
    got = module.quant_method.apply(module, x, b)
    torch.testing.assert_close(got.double(), want if b is None else want.bfloat16().double() + b, rtol=1e-2, atol=2e-2)
    module.quant_method.apply(module, x[:-1], b)
    assert native.calls == ["linear"]


def test_what_torch_compiles_is_sglangs(native: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    module = holding(UnquantizedLinearMethod())
    install(module=module)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    module.quant_method.apply(module, torch.randn(2, IN))
    assert native.calls == []


def test_a_head_takes_states_of_another_dtype(native: Counted) -> None:
    head = holding(UnquantizedEmbeddingMethod(), torch.bfloat16)
    install(head=head)
    x = torch.randn(2, IN)
    got = head.quant_method.apply(head, x)
    assert native.calls == ["linear"] and got.dtype is torch.bfloat16
    want = x.to(torch.bfloat16) @ head.weight.T
    torch.testing.assert_close(got, want)


# --- Operations between linear layers ---


def both_ways(operation: BaseFusedOp, *args: Any, **kwargs: Any) -> Any:
    """The registered function's result, compared with SGLang's."""
    got = registered(type(operation))(operation, *args, **kwargs)
    want = operation.forward_native(*args, **kwargs)
    torch.testing.assert_close(got, want)
    return got


class TestNorm:
    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("rows", [1, 100])
    def test_the_plain_one(self, native: Counted, residual: bool, rows: int) -> None:
        norm = RMSNorm(IN)
        install(norm=norm)
        with torch.no_grad():
            norm.weight.normal_()
            both_ways(norm, torch.randn(rows, IN), *([torch.randn(rows, IN)] if residual else []))
        assert native.calls == ["add_norm" if residual else "norm"]

    @pytest.mark.parametrize(
        ("norm", "x", "others"),
        [
            (RMSNorm(IN, cast_x_before_out_mul=True), torch.randn(3, IN), ()),
            (RMSNorm(IN, fp32_residual=True), torch.randn(3, IN), (torch.randn(3, IN),)),
            (RMSNorm(IN, override_orig_dtype=torch.bfloat16), torch.randn(3, IN), ()),
            (RMSNorm(IN, var_hidden_size=IN // 2), torch.randn(3, IN), ()),
            (RMSNorm(IN), torch.randn(3, IN), (torch.randn(3, IN), torch.randn(3, IN))),
            (RMSNorm(IN), torch.randn(3, IN).to(torch.bfloat16), ()),
            (RMSNorm(IN), torch.randn(3, IN), (torch.randn(3, IN).to(torch.bfloat16),)),
            (RMSNorm(IN), torch.randn(3, 2, IN), ()),
        ],
        ids=["cast first", "float32 residual", "rounds", "a part", "addition", "weight", "mixed", "three dimensions"],
    )
    @torch.no_grad()
    def test_others_are_sglangs(self, native: Counted, norm: RMSNorm, x: torch.Tensor, others: Any) -> None:
        install(norm=norm)
        both_ways(norm, x, *others)
        assert native.calls == []

    @pytest.mark.parametrize("kind", [GemmaRMSNorm, Gemma3RMSNorm])
    @torch.no_grad()
    def test_those_of_gemma(self, native: Counted, kind: type[BaseFusedOp]) -> None:
        norm = kind(IN)
        install(norm=norm)
        norm.weight.normal_()
        x, residual = torch.randn(2, 7, IN)
        both_ways(norm, x)
        both_ways(norm, x, residual)
        heads = torch.randn(7, 5 * IN)[:, : 3 * IN].unflatten(1, (3, IN))
        both_ways(norm, heads)
        assert native.calls == ["norm", "add_norm", "norm", "norm", "norm"]
        both_ways(norm, x.double())
        assert len(native.calls) == 5

    @pytest.mark.usefixtures("native")
    def test_a_formula_of_its_own_is_kept(self) -> None:
        class Other(RMSNorm):
            def forward_native(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
                return x

        class Same(RMSNorm):
            pass

        install(other=Other(IN), same=Same(IN))
        (found,) = BaseFusedOp._oot_forward_registry.values()
        assert found.keys() == {Same}


class TestGates:
    @pytest.mark.parametrize("activation", [SiluAndMul(), GeluAndMul()])
    def test_matrices(self, native: Counted, activation: BaseFusedOp) -> None:
        install(activation=activation)
        both_ways(activation, torch.randn(5, 2 * IN))
        assert native.calls == ["gate_mul"]

    @pytest.mark.parametrize("x", [torch.randn(2, 3, 2 * IN), torch.randn(5, 2 * IN).double()])
    @pytest.mark.parametrize("activation", [SiluAndMul(), GeluAndMul()])
    def test_others_are_sglangs(self, native: Counted, activation: BaseFusedOp, x: torch.Tensor) -> None:
        install(activation=activation)
        both_ways(activation, x)
        assert native.calls == []


class TestRope:
    HEAD = 16

    def rotary(self, dtype: torch.dtype = torch.float32, neox: bool = True) -> RotaryEmbedding:
        return RotaryEmbedding(self.HEAD, self.HEAD, 128, 10000, neox, dtype)

    def q_and_k(self, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 4 * self.HEAD), torch.randn(rows, 2 * self.HEAD)

    @pytest.mark.parametrize("neox", [False, True])
    def test_the_plain_one(self, native: Counted, neox: bool) -> None:
        rotary = self.rotary(neox=neox)
        install(rotary=rotary)
        both_ways(rotary, torch.tensor([7, 0, 127]), *self.q_and_k())
        assert native.calls == ["rope"]

    def test_others_are_sglangs(self, native: Counted) -> None:
        rotary, rounded = self.rotary(), self.rotary(torch.bfloat16)
        install(rotary=rotary)
        positions, (q, k) = torch.tensor([7, 0, 127]), self.q_and_k()
        both_ways(rotary, positions.int(), q, k)
        both_ways(rotary, torch.zeros_like(positions), q, k, positions)
        both_ways(rounded, positions, q, k)
        assert native.calls == []

    def test_heads_of_gemma(self, native: Counted) -> None:
        """Positions of one sequence, and heads that are not contiguous."""
        rotary, (q, k) = self.rotary(), self.q_and_k()
        install(rotary=rotary)
        both_ways(rotary, torch.tensor([[7, 0, 127]]), q.view(3, 4, -1), k.view(3, 2, -1))
        assert native.calls == ["rope"]


# --- What fails ---


def test_a_layer_that_fails_fails_its_pass_and_sglang_computes_it(
    native: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed layer and all later ones in the pass; the next pass uses the workers again."""
    guard = FailureGuard()
    linear, norm, activation = holding(UnquantizedLinearMethod()), RMSNorm(IN), SiluAndMul()
    contained = layers.Contained(native, guard.run)
    layers.install(model_of(linear=linear, norm=norm, activation=activation), contained)
    x = torch.randn(3, IN)
    steps: dict[str, Callable[[], Any]] = {
        "linear": lambda: linear.quant_method.apply(linear, x),
        "norm": lambda: registered(RMSNorm)(norm, x.clone()),
        "add_norm": lambda: registered(RMSNorm)(norm, x.clone(), x.clone()),
        "gate_mul": lambda: registered(SiluAndMul)(activation, x),
    }

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Memory ran out.")

    for name, step in steps.items():
        want = step()
        with monkeypatch.context() as patch, guard.containing():
            patch.setattr(native, name, broken)
            torch.testing.assert_close(step(), want)
            assert guard.reason == "Memory ran out."
            native.calls.clear()
            for other in steps.values():
                other()
            assert not native.calls, "the pass is lost: nothing more of it is computed here"
        with guard.containing():
            step()
            assert guard.reason is None and name in native.calls
