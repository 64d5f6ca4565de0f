"""Native layers of the model. CPU tensors go in and out without copies."""

from __future__ import annotations

from typing import Any

import torch

from fluxion_sglang.native.engine import AttentionLayer, NativeEngine
from fluxion_sglang.native.loading import function
from fluxion_sglang.native.pool import Workers
from fluxion_sglang.weights.quantised import Format

WRITTEN = {
    "linear": 1, "linear_quantised": 1, "experts": 1, "experts_quantised": 1, "norm": 2, "gate_mul": 1, "rope": 2,
    "convolve": 1, "delta_rule": 1,
}  # fmt: skip
"""The layers, with the number of their last arguments that they write."""


class NativeLayers:
    """Computes layers on the workers, one layer at a time.

    Args:
        isa: kernels to use, one of `topology()["isas"]`; None: the best, or FLUXION_ISA.

    Raises:
        ValueError: instructions that this CPU does not have.
    """

    def __init__(self, workers: Workers, isa: str | None = None) -> None:
        self.handle = function("layers_create")(workers.handle, isa or "")
        self._layers = {name: function(f"layers_{name}") for name in WRITTEN}

    def compute(self, layer: str, *arguments: Any) -> None:
        """Compute a layer of `WRITTEN`, given its arguments in the native library, outputs last."""
        self._layers[layer](self.handle, *arguments)

    @property
    def panel(self) -> int:
        """Number of outputs whose weights are packed together (`repack`)."""
        return int(function("layers_panel")(self.handle))

    def gains_from_packing(self, weights: torch.Tensor) -> bool:
        """Whether a decode step of several rows reads weights [outputs, in] faster if they are packed (`repack`)."""
        return bool(function("layers_gain_from_packing")(self.handle, weights))

    def repack(self, weights: torch.Tensor, out: torch.Tensor | None = None, unpack: bool = False) -> None:
        """Write weights in the order that the kernels read fastest (panels), or unpack them into rows.

        `panel` rows are packed in the memory of as many rows; remaining rows are unchanged. An error writes nothing.

        Args:
            weights: [outputs, in], bfloat16, contiguous; `in` is a multiple of 32.
            out: as weights; None: in place.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit, or an instruction set without packed kernels.
        """
        function("layers_repack")(self.handle, weights, weights if out is None else out, unpack)

    @staticmethod
    def into_huge_pages(weights: torch.Tensor) -> None:
        """Let the kernel move weights into huge pages at the same addresses, for fewer address translations.

        Memory stays as it is with Linux before 6.1, or if there are no free huge pages.

        Args:
            weights: [outputs, in], bfloat16 or float32, or uint8 of any shape; each row is contiguous.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
        """
        function("layers_into_huge_pages")(weights)

    def linear(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x weights^T + bias, summed in float32 and rounded once; [rows, outputs]. Outputs depend on their row alone.

        Args:
            x: [rows, in], weights: [outputs, in], bias: [outputs], out: [rows, outputs] or None for a new one; bfloat16
                or float32, the same for all. Rows may have any stride; each is contiguous.
            order: [1] int32, 1 if the weights are packed (`repack`) when the layer runs, else 0. The result is
                bit-identical. None: they are not packed.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
        """
        if out is None:
            out = x.new_empty(x.shape[0], weights.shape[0])
        self.compute("linear", x, weights, order, bias, out)
        return out

    def linear_quantised(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        form: Format,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        outputs: int = 0,
    ) -> torch.Tensor:
        """x weights^T + bias for quantised weights; [rows, outputs]. Sums as in `linear`.

        x is rounded to 16 bits, with an error of at most 2^-16 of the largest of 32 inputs of a row.

        Args:
            x, bias, out: as for `linear`; without `out`, `outputs` is their number.
            weights: [panels, bytes] uint8, as from `weights.quantised.pack`. form: their format.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
        """
        if out is None:
            out = x.new_empty(x.shape[0], outputs)
        self.compute("linear_quantised", x, weights, form.bits, form.group, form.minima, bias, out)
        return out

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        forms: tuple[Format, Format] | None = None,
        *,
        gelu: bool = False,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        clamped: tuple[float, float] | None = None,
    ) -> torch.Tensor:
        """The sum, over the experts that a row chose, of weight * (act(x gate^T) * (x up^T)) down^T; [rows, hidden].

        act is SiLU, or GELU in its tanh form. Results of matrix products, act and its product are rounded to the dtype
        of x; the sum is float32 and rounded once. A row of the result depends only on its row of x and its choices.

        Args:
            x: [rows, hidden], bfloat16 or float32; rows may have any stride.
            ids: [rows, k] int32, the experts of a row; duplicates are allowed. weights: [rows, k] float32.
            gate_up: [experts, 2 * inner, hidden], the gate first. down: [experts, hidden, inner]. The dtype of x, or
                with `forms` uint8: the panels of each expert, [experts, panels, bytes], and inner is a multiple of 32.
                Experts may have any stride.
            forms: formats of quantised weights, of gate_up and of down.
            biases: of gate_up and of down, [experts, outputs] float32, added to rounded products.
            clamped: alpha and limit of gpt-oss. Rows of gate_up alternate between gate and up, and the input of down is
                gate * sigmoid(alpha * gate) * (up + 1); gate is at most the limit, up between -limit and limit.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
            IndexError: an expert is out of range. Nothing is computed then.
        """
        out = x.new_empty(x.shape)
        (bias, down_bias), act = biases or (None, None), (gelu, *(clamped or (0.0, 0.0)))
        if forms is None:
            self.compute("experts", x, ids, weights, gate_up, bias, down, down_bias, *act, out)
        else:
            one, other = ((form.bits, form.group, form.minima) for form in forms)
            name = "experts_quantised"
            self.compute(name, x, ids, weights, gate_up, *one, bias, down, *other, down_bias, *act, out)
        return out

    def widen(self, weights: torch.Tensor, form: Format, out: torch.Tensor) -> None:
        """Write quantised weights as numbers, [outputs, in], in the dtype of `out`: bfloat16 or float32, rounded once.

        Args:
            weights, form: as for `linear_quantised`.
        """
        function("layers_widen")(self.handle, weights, form.bits, form.group, form.minima, out)

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        gemma: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """RMSNorm of every row; [rows, size].

        Args:
            x: [rows, size], weight: [size], out: as x, or None for a new one; bfloat16 or float32, all the same.
            gemma: the factor is 1 + weight.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit; the same for the other layers.
        """
        if out is None:
            out = torch.empty_like(x)
        self.compute("norm", x, None, weight, epsilon, gemma, out, None)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, gemma: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of x + residual, and the sum. Both [rows, size], as x.

        Args:
            gemma: as for `norm`, and the sum is rounded before its norm; else the norm uses the unrounded sum.
        """
        out, total = torch.empty_like(x), torch.empty_like(x)
        self.compute("norm", x, residual, weight, epsilon, gemma, out, total)
        return out, total

    def gate_mul(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """act(left half), rounded, times right half, of x [rows, 2 n]; [rows, n]. act is SiLU, or GELU by tanh."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self.compute("gate_mul", x, gelu, out)
        return out

    def rope(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
        halves: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary embedding of queries and keys.

        Args:
            positions: [rows] int64. q: [rows, query heads * head_dim], k: [rows, KV heads * head_dim], rows of any
                stride. cos_sin: [positions, rotary], the dtype of q and k: cosines, then sines, of the angles of a
                position; rotary is even and at most head_dim.
            halves: pairs are elements i and i + rotary / 2 of a head (NeoX), or else 2 i and 2 i + 1 (GPT-J).

        Returns:
            The rotated q and k, as new contiguous tensors.

        Raises:
            IndexError: a position that cos_sin does not have.
        """
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        self.compute("rope", positions, q, k, cos_sin, head_dim, halves, q_out, k_out)
        return q_out, k_out

    def convolve(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor | None = None,
        goes_on: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A causal convolution of every channel over a request's tokens, and SiLU; [rows, channels].

        Args:
            x: [rows, channels], bfloat16 or float32; rows may have any stride.
            weights: [channels, taps], at most 4 taps, bias: [channels], in the dtype of x.
            states: [slots, channels, taps - 1], in the dtype of x: the inputs before a request's first row, oldest
                first. Updated to the inputs before its next row.
            slots: [requests] int32; rows of a request with a negative slot become zeros.
            starts: [requests + 1] int32, first rows of the requests, ascending; None: one row each.
            goes_on: [requests] bool; false: zeros replace the stored state. None: all true.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
            IndexError: numbers in `starts` or `slots` that do not fit. Nothing is computed then.
        """
        out = x.new_empty(x.shape)
        self.compute("convolve", x, starts, slots, goes_on, weights, bias, states, out)
        return out

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor | None = None,
        *,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
        snapshots: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The gated delta rule ("Gated Delta Networks", Yang et al., 2025, Eq. 10); [rows, heads * values].

        Query and key of each token are normalized to unit length, and the query is divided by the root of `keys`. Then
        state = decay * state; state += strength * (value - state key) key^T; out = state query, rounded once. The rows
        of a request depend only on that request, bit for bit, however its tokens are divided among calls.

        Args:
            q, k: [rows, key heads * keys], v: [rows, heads * values], bfloat16 or float32; rows may have any stride.
                Each key head serves heads / key heads consecutive heads. keys is a multiple of 16.
            a, b: [rows, heads] float32: decay is e^a, strength b.
            states: [slots, heads, values, keys] float32; slots may have any stride. slots, starts: as for `convolve`.
            gates: a_log and dt_bias, [heads] float32. With them decay is exp(-e^a_log * softplus(a + dt_bias)), and
                strength is the sigmoid of b.
            snapshots: [requests] int32 and [requests, heads, values, keys] float32. The state before the token of that
                index in this call is copied there; -1: none.

        Raises:
            ValueError, IndexError: as for `convolve`.
        """
        out = v.new_empty(v.shape)
        gated, copied = gates or (None, None), snapshots or (None, None)
        self.compute("delta_rule", q, k, v, starts, slots, a, b, *gated, states, *copied, out)
        return out


class NativeProgram:
    """A sequence of layers, checked once and run any number of times on the current contents of the same tensors.

    Args:
        layers: computes the layers.
    """

    def __init__(self, layers: NativeLayers) -> None:
        self._handle = function("program_create")(layers.handle)
        self._add = {name: function(f"program_{name}") for name in WRITTEN}
        self._attend = function("program_attention")
        self._run = function("program_run")
        self._tensors: list[Any] = []  # keeps the tensors alive: the library holds their addresses
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, layer: str, *arguments: Any) -> None:
        """Add a layer; arguments and errors as for `NativeLayers.compute`.

        The program keeps the tensors. If a tensor is resized or gets other memory, the program must not run again.
        """
        self._add[layer](self._handle, *arguments)
        self._tensors.append(arguments)
        self._count += 1

    def attend(
        self,
        engine: NativeEngine,
        at: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add an attention layer, for a step of the engine that `NativeEngine.plan_step` has planned.

        Args:
            q, k, v, out: as for `NativeEngine.layer_begin`, with the step's number of requests.

        Raises:
            ValueError: a shape or dtype that does not fit.
        """
        self._attend(self._handle, engine.handle, at.handle, q, k, v, out)
        self._tensors.append((engine, at, q, k, v, out))
        self._count += 1

    def run(self, first: int, last: int) -> None:
        """Compute the layers [first, last).

        Raises:
            IndexError: there are fewer layers. Layers raise their own errors (`NativeLayers`); those before are done.
        """
        self._run(self._handle, first, last)
