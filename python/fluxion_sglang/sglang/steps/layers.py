"""Runs the model's layers on the native workers, if the CPU is the device (option `model_kernels`).

A decode step reads every weight once for a few rows. PyTorch's matrix products are designed for many rows and read
weights at a fraction of the memory bandwidth. So each module with unquantised weights gets a method that sends few rows
to the workers and everything else to SGLang's own method. PyTorch also needs many passes over the tensors of the
operations between linear layers. SGLang lets a platform replace these operations, and ours take one pass.

Weights with many inputs are packed (`packed.py`).

Quantised weights (`weights/methods.py`) have their own kernels for few rows. For many rows PyTorch multiplies by slices
of the weights, converted to the model's dtype.

In a mixture of experts, router and top-k selection are ordinary layers and operations. One native operation computes
the selected experts; SGLang's method loops over all experts.

A failure of a native layer fails the pass, as for attention (`containment/passes.py`); SGLang's method then computes
the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.platforms import current_platform
from torch import nn

from fluxion_sglang.native import NativeLayers, topology
from fluxion_sglang.sglang.steps.packed import PackedWeight, Packer, owners
from fluxion_sglang.sglang.weights.experts import (
    WEIGHTS,
    PackedExpertsMethod,
    biases_of,
    clamps_of,
    computes_experts,
    formats_of,
)
from fluxion_sglang.sglang.weights.methods import (
    Part,
    QuantisedMethod,
    multiplied_in,
    multiply,
    parts_of,
)
from fluxion_sglang.sglang.weights.rounding import FORMAT, RoundedHeadMethod, RoundingMethod
from fluxion_sglang.weights.quantised import slices

MAX_ROWS = 32 if topology()["isa"] == "amx" else 96
"""Most rows that the workers multiply. Alone, PyTorch is as fast from about 64 rows on, and much faster with a matrix
unit. In a model, however, its threads must be woken between the workers' operations (`benchmark/linears.py`)."""
MAX_COPIED_ROWS = 256
"""The limit for weights that PyTorch must copy first: packed ones, or those in a slow bfloat16 (`multiplied_in`). Up to
it, PyTorch's gain is smaller than the time of the copy."""

MAX_QUANTISED_ROWS = 48
"""The limit for quantised weights."""

MAX_EXPERT_ROWS = MAX_ROWS if topology()["isa"] == "amx" else 256
"""The limit for experts, in mean rows per expert. Up to it PyTorch, which computes one expert after another, was
measured to be slower, also for rounded experts. With a slow bfloat16 (`multiplied_in`) it is always slower."""

_DTYPES = (torch.bfloat16, torch.float32)

T = TypeVar("T")


class Contained:
    """The native layers, with containment of their failures.

    Args:
        run: returns the result of a step, or None if it or an earlier step of the pass fails (`FailureGuard.run`); the
            default raises failures.

    Attributes:
        layers: computes the layers; may be replaced between two calls.
    """

    def __init__(self, layers: NativeLayers, run: Callable[[Callable[[], Any]], Any] = lambda step: step()) -> None:
        self.layers, self._run = layers, run

    def __call__(self, step: Callable[[NativeLayers], T]) -> T | None:
        result: T | None = self._run(lambda: step(self.layers))
        return result


def install(model: nn.Module, native: Contained, pack: bool = True) -> int:
    """Let the workers compute the model's layers. Returns the number of linear layers and expert layers among them.

    Layers with SGLang's own quantisation methods or other dtypes stay SGLang's. For a layer with adapters (LoRA) the
    workers compute the base, and SGLang adds the adapters.

    Args:
        pack: whether weights may be packed. Weights that modules share, and embeddings, stay in rows.
    """
    _register_operations(model, native)
    linear, head, quantised = _Linear(native), _Head(native), _Quantised(native)
    heads = _rounds_logits_once(model)
    rounding = any(isinstance(getattr(module, "quant_method", None), RoundingMethod) for module in model.modules())
    packer, holders = Packer(native.layers), owners(model)
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if isinstance(method, QuantisedMethod) and (parts := parts_of(module)):
            method.native = quantised
            for part in parts:
                native.layers.into_huge_pages(part.packed)
            count += 1
            continue
        # Adapters of experts also have this method, but no weights.
        if isinstance(module, FusedMoE) and isinstance(method, UnquantizedFusedMoEMethod) and computes_experts(module):
            if isinstance(method, PackedExpertsMethod):
                method.native = quantised
            for experts in (getattr(module, name) for name in WEIGHTS):
                if _is_plain(experts):
                    native.layers.into_huge_pages(experts.data.flatten(0, 1))
            count += 1
            continue
        if not isinstance(weight, nn.Parameter) or type(weight.data) is not torch.Tensor:
            continue
        if weight.dtype not in _DTYPES or weight.device.type != "cpu":
            continue
        if getattr(module, "use_intel_amx_backend", False):  # SGLang has packed it for its own kernels
            continue
        # Exact types, because a subclass behaves differently.
        if type(method) is UnquantizedLinearMethod:
            module.quant_method = linear
        elif heads and (
            type(method) is UnquantizedEmbeddingMethod or (method is None and _makes_logits(model, module))
        ):
            rounds = rounding and weight.shape[1] % FORMAT.group == 0 and _makes_logits(model, module)
            module.quant_method = method = RoundedHeadMethod(quantised) if rounds else head
            if rounds:
                method.process_weights_after_loading(module)
                count += 1
                continue
        else:
            continue
        if weight.stride(1) == 1:
            native.layers.into_huge_pages(weight.data)
            alone = holders[weight.untyped_storage().data_ptr()] == 1
            if pack and alone and (module.quant_method is linear or isinstance(module, ParallelLMHead)):
                packer.pack(weight)
        count += 1
    return count


# --- linear layers ---


def _makes_logits(model: nn.Module, module: nn.Module) -> bool:
    """Whether this is the model's last layer; in Gemma 3 it is the embedding."""
    return module is getattr(model, "lm_head", None)


def _rounds_logits_once(model: nn.Module) -> bool:
    """Whether logits are just the product of hidden states and weights in the model's dtype."""
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    special = ("use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target")
    return not any(getattr(processor, name, None) for processor in processors for name in special)


def _product(native: Contained, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The layer's output for x, or None if SGLang must compute it."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    order, copied = None, multiplied_in(x.dtype) is not x.dtype
    if isinstance(weight, PackedWeight):
        memory = weight.memory
        weight, order = memory.inner, memory.order
        copied |= memory.packed
    few = (
        x.dim() == 2
        and 0 < x.shape[0] <= (MAX_COPIED_ROWS if copied else MAX_ROWS)
        and x.dtype is weight.dtype
        and x.stride(1) == 1
        and weight.stride(1) == 1
        and not torch.compiler.is_compiling()
    )
    return native(lambda layers: layers.linear(x, weight, bias, order=order)) if few else None


class _InRows:
    """A layer with a substituted weight."""

    def __init__(self, layer: nn.Module, weight: torch.Tensor) -> None:
        self._layer, self.weight = layer, weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _by_sglang(method: Callable[..., torch.Tensor], layer: nn.Module, x: torch.Tensor, bias: Any) -> torch.Tensor:
    """The output of SGLang's method; a packed weight stays packed. PyTorch may compute bfloat16 in float32."""
    weight: Any = layer.weight
    dtype = multiplied_in(x.dtype)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], len(weight))
    if isinstance(weight, PackedWeight):
        parts = [
            method(_InRows(layer, rows), x, None if bias is None else bias[first : first + len(rows)])
            for first, rows in weight.memory.slices()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    plain = type(weight.data) is torch.Tensor and not torch.compiler.is_compiling()
    if plain and x.dtype is weight.dtype is not dtype:
        outputs, inputs = weight.shape
        return multiply(x, (weight[rows].to(dtype) for rows in slices(outputs, inputs, 4 << 20)), bias)
    return method(layer, x, bias)


class _Quantised:
    """The kernels for quantised weights (`weights.methods.Native`)."""

    def __init__(self, native: Contained) -> None:
        self._native = native
        self._room = torch.empty(0)

    def __call__(self, x: torch.Tensor, parts: Sequence[Part], bias: torch.Tensor | None) -> torch.Tensor | None:
        few = x.dim() == 2 and 0 < x.shape[0] <= MAX_QUANTISED_ROWS and x.dtype in _DTYPES and x.stride(1) == 1
        if not few or torch.compiler.is_compiling():
            return None
        out = x.new_empty(x.shape[0], sum(part.outputs for part in parts))

        def compute(layers: NativeLayers) -> torch.Tensor:
            first = 0
            for part in parts:
                outputs = slice(first, first := first + part.outputs)
                mine = None if bias is None else bias[outputs]
                layers.linear_quantised(x, part.packed, part.format, mine, out[:, outputs])
            return out

        return self._native(compute)

    def wide(self, part: Part, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some rows of a weight in this dtype. The next call overwrites them."""
        size = (rows.stop - rows.start) * part.inputs
        if self._room.numel() < size or self._room.dtype is not dtype:
            self._room = torch.empty(0)
            with torch.inference_mode(False):
                self._room = torch.empty(size, dtype=dtype)
        room = self._room[:size].view(-1, part.inputs)
        self._native(lambda layers: layers.widen(part.panels(rows), part.format, room))
        return room


class _Linear(UnquantizedLinearMethod):
    def __init__(self, native: Contained) -> None:
        super().__init__()
        self._native = native

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = _product(self._native, layer, x, bias)
        return _by_sglang(super().apply, layer, x, bias) if out is None else out


class _Head(UnquantizedEmbeddingMethod):
    """An embedding, or the layer that makes logits: SGLang multiplies by any method that is not its own."""

    def __init__(self, native: Contained) -> None:
        super().__init__()
        self._native = native

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(layer.weight, torch.Tensor)
        x = x.to(layer.weight.dtype)  # as SGLang does before its own product
        out = _product(self._native, layer, x, bias)
        return _by_sglang(super().apply, layer, x, bias) if out is None else out


# --- experts ---


def _is_plain(experts: Any) -> bool:
    """Whether the kernels accept these weights [experts, outputs, inputs], or panels of them."""
    return (
        type(experts) is nn.Parameter
        and experts.dtype in (*_DTYPES, torch.uint8)
        and experts.device.type == "cpu"
        and experts.is_contiguous()
    )


def _experts(
    native: Contained, method: UnquantizedFusedMoEMethod, layer: Any, dispatch_output: StandardDispatchOutput
) -> StandardCombineInput:
    x, choice, out = dispatch_output.hidden_states, dispatch_output.topk_output, None
    gate_up, down, forms = layer.w13_weight, layer.w2_weight, formats_of(layer)
    if (
        computes_experts(layer)
        and TopKOutputChecker.format_is_standard(choice)
        and choice.topk_weights.dtype is torch.float32
        and _rows(x)
        and choice.topk_ids.numel() > 0
        and (choice.topk_ids.numel() <= MAX_EXPERT_ROWS * len(gate_up) or multiplied_in(x.dtype) is not x.dtype)
        and _is_plain(gate_up)
        and _is_plain(down)
        and (forms or gate_up.dtype is x.dtype)
        and not getattr(layer, "use_intel_amx_backend", False)
        and not torch.compiler.is_compiling()
    ):
        ids, weights = choice.topk_ids.to(torch.int32).contiguous(), choice.topk_weights.contiguous()
        act = {"gelu": layer.moe_runner_config.activation == "gelu", "clamped": clamps_of(layer)}
        biases = biases_of(layer)
        out = native(lambda layers: layers.experts(x, ids, weights, gate_up, down, forms, biases=biases, **act))
    return method.forward_native(layer, dispatch_output) if out is None else StandardCombineInput(hidden_states=out)


# --- operations between linear layers ---


def _register_operations(model: nn.Module, native: Contained) -> None:
    key = current_platform.get_dispatch_key_name()
    gemma = sys.modules.get("sglang.srt.models.gemma3_causal")
    for module in model.modules():
        if gemma is not None and isinstance(module, gemma.Gemma3Attention):
            # Use the same forward as for other models. SGLang itself uses it on CPUs with a matrix unit.
            module.forward = module.forward_cpu
        for base, operation in _OPERATIONS.items():
            # A subclass with its own formula keeps it.
            if isinstance(module, base) and type(module).forward_native is base.forward_native:
                # Must be a function, because SGLang binds it to the module.
                BaseFusedOp.register_oot_forward(type(module), _method(partial(operation, native)), key)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return forward


def _rows(*tensors: torch.Tensor) -> bool:
    """Whether these are matrices of one dtype that the kernels accept."""
    first = tensors[0]
    return first.dtype in _DTYPES and all(
        t.dim() == 2 and t.dtype is first.dtype and t.stride(1) == 1 and t.device.type == "cpu" for t in tensors
    )


def _rms_norm(
    native: Contained,
    norm: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: nn.Module | None = None,
) -> Any:
    plain = (
        post_residual_addition is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and norm.variance_size_override is None
        and norm.weight.dtype is x.dtype
        and x.shape[-1] == norm.hidden_size
    )
    out: Any = None
    if plain and residual is None and _rows(x):
        out = native(lambda layers: layers.norm(x, norm.weight, norm.variance_epsilon))
    elif plain and residual is not None and _rows(x, residual):
        out = native(lambda layers: layers.add_norm(x, residual, norm.weight, norm.variance_epsilon))
    return norm.forward_native(x, residual, post_residual_addition, quant_linear) if out is None else out


def _gemma_norm(
    native: Contained,
    norm: Gemma3RMSNorm | GemmaRMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *rest: Any,
) -> Any:
    epsilon = norm.eps if isinstance(norm, Gemma3RMSNorm) else norm.variance_epsilon
    plain = not any(part is not None for part in rest) and norm.weight.dtype is x.dtype
    out: Any = None
    if plain and residual is None and x.dim() == 3:  # the heads of queries or keys
        out = native(lambda layers: _norm_heads(layers, x, norm.weight, epsilon)) if _rows(x[:, 0]) else None
    elif plain and residual is None and _rows(x):
        out = native(lambda layers: layers.norm(x, norm.weight, epsilon, gemma=True))
    elif plain and residual is not None and _rows(x, residual):
        out = native(lambda layers: layers.add_norm(x, residual, norm.weight, epsilon, gemma=True))
    return norm.forward_native(x, residual, *rest) if out is None else out


def _norm_heads(layers: NativeLayers, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x: [rows, heads, size]; heads may have any stride."""
    out = x.new_empty(x.shape)
    for head in range(x.shape[1]):
        layers.norm(x[:, head], weight, epsilon, gemma=True, out=out[:, head])
    return out


def _silu_mul(native: Contained, activation: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    out = native(lambda layers: layers.gate_mul(x)) if _rows(x) else None
    return activation.forward_native(x) if out is None else out


def _gelu_mul(native: Contained, activation: GeluAndMul, x: torch.Tensor) -> torch.Tensor:
    by_tanh = activation.approximate == "tanh" and _rows(x)
    out = native(lambda layers: layers.gate_mul(x, gelu=True)) if by_tanh else None
    return activation.forward_native(x) if out is None else out


def _rope(
    native: Contained,
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    plain = (
        offsets is None
        and fused_set_kv_buffer_arg is None
        and positions.dtype is torch.int64
        and positions.is_contiguous()
        and not hasattr(rotary, "sin_cos_cache")
    )
    out = None
    q, k = (x.flatten(1) if x.dim() == 3 and x.is_contiguous() else x for x in (query, key))
    if plain and _rows(q, k, rotary.cos_sin_cache):
        size, halves = rotary.head_size, rotary.is_neox_style
        out = native(lambda layers: layers.rope(positions.flatten(), q, k, rotary.cos_sin_cache, size, halves))
        out = out and (out[0].view(query.shape), out[1].view(key.shape))
    return rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg) if out is None else out


_OPERATIONS: dict[type[BaseFusedOp], Callable[..., Any]] = {
    RMSNorm: _rms_norm,
    GemmaRMSNorm: _gemma_norm,
    Gemma3RMSNorm: _gemma_norm,
    SiluAndMul: _silu_mul,
    GeluAndMul: _gelu_mul,
    RotaryEmbedding: _rope,
    UnquantizedFusedMoEMethod: _experts,
    PackedExpertsMethod: _experts,
}
