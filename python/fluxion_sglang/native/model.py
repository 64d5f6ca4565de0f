"""Layers of the model. CPU tensors go in and out; nothing copies them."""

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
"""The layers, and how many of their last arguments they write."""


class NativeLayers:
    """What computes layers on the workers. One layer at a time.

    Args:
        isa: kernels to use, one of `topology()["isas"]`; None: the best, or FLUXION_ISA.

    Raises:
        ValueError: instructions that this CPU does not have.
    """

    def __init__(self, workers: Workers, isa: str | None = None) -> None:
        self.handle = function("layers_create")(workers.handle, isa or "")
        self._layers = {name: function(f"layers_{name}") for name in WRITTEN}

    def compute(self, layer: str, *arguments: Any) -> None:
        """One of `WRITTEN` by its arguments in the native library, those that it writes last."""
        self._layers[layer](self.handle, *arguments)

    @property
    def panel(self) -> int:
        """Outputs whose weights are packed together (`repack`)."""
        return int(function("layers_panel")(self.handle))

    def gains_from_packing(self, weights: torch.Tensor) -> bool:
        """Whether a decode step of several rows reads weights [outputs, in] faster if they are packed (`repack`)."""
        return bool(function("layers_gain_from_packing")(self.handle, weights))

    def repack(self, weights: torch.Tensor, out: torch.Tensor | None = None, unpack: bool = False) -> None:
        """Write weights in the order in which the kernels of these layers read them fastest, or back in rows.

        Every `panel` rows are packed in the memory of as many rows; the rows that remain stay as they are. Nothing is
        done if it fails.

        Args:
            weights: [outputs, in], bfloat16, contiguous; `in` is a multiple of 32.
            out: as weights are; None: weights.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit, or instructions that nothing is packed for.
        """
        function("layers_repack")(self.handle, weights, weights if out is None else out, unpack)

    @staticmethod
    def into_huge_pages(weights: torch.Tensor) -> None:
        """Have the kernel move weights into huge pages, where they are: reading them takes fewer address translations.

        What Linux before 6.1 or a machine without free huge pages cannot move stays as it is.

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
        """x weights^T + bias, in float32 rounded once; [rows, outputs]. An output depends on its row of x alone.

        Args:
            x: [rows, in], weights: [outputs, in], bias: [outputs], out: [rows, outputs] or None for a new one;
                bfloat16 or float32, the same for all. Rows may be apart by any stride, each is contiguous.
            order: [1] int32, 1 where the weights are packed (`repack`) when the layer is computed, else 0; the result
                is the same, to the bit. None: they are not.

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
        """x weights^T + bias for quantised weights; [rows, outputs]. Sums as of `linear`.

        x is rounded to 16 bits: by at most 2^-16 of the largest of 32 inputs of a row.

        Args:
            x, bias, out: as of `linear`; without `out`, `outputs` says how many there are.
            weights: [panels, bytes] uint8, as of `weights.quantised.pack`. form: their format.

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

        act is SiLU, or GELU in its tanh form. What it, a product of it or a matrix makes is rounded to the dtype of x;
        the sum is float32 and rounded once. A row of the result depends on its row and its choices alone.

        Args:
            x: [rows, hidden], bfloat16 or float32; rows may be apart by any stride.
            ids: [rows, k] int32, the experts of a row; one may come twice. weights: [rows, k] float32.
            gate_up: [experts, 2 * inner, hidden], the gate first. down: [experts, hidden, inner]. The dtype of x, or
                with `forms` uint8: the panels of each expert, [experts, panels, bytes], and inner is a multiple of 32.
                Experts may be apart by any stride.
            forms: of quantised weights, those of gate_up and of down.
            biases: of gate_up and of down, [experts, outputs] float32, added to rounded products.
            clamped: alpha and limit of gpt-oss. Rows of gate_up alternate between gate and up, and the input of down is
                gate * sigmoid(alpha * gate) * (up + 1); gate is at most the limit, up between -limit and limit.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
            IndexError: an expert that is not there. Nothing is computed then.
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
        """Write quantised weights as numbers, [outputs, in] as `out` is: bfloat16 or float32, rounded once.

        Args:
            weights, form: as of `linear_quantised`.
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
            gemma: weights are 1 smaller than what they multiply by.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit; so for the other layers.
        """
        if out is None:
            out = torch.empty_like(x)
        self.compute("norm", x, None, weight, epsilon, gemma, out, None)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, gemma: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of x + residual, and the sum. Both [rows, size], as x is.

        Args:
            gemma: as of `norm`, and the norm is that of the rounded sum; else of the sum before it is rounded.
        """
        out, total = torch.empty_like(x), torch.empty_like(x)
        self.compute("norm", x, residual, weight, epsilon, gemma, out, total)
        return out, total

    def gate_mul(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """silu(left half), or its GELU in the tanh form, rounded, times right half, of x [rows, 2 n]; [rows, n]."""
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
            positions: [rows] int64. q: [rows, query heads * head_dim], k: [rows, KV heads * head_dim], rows apart by
                any stride. cos_sin: [positions, rotary], the dtype of q and k: cosines, then sines, of the angles of
                a position; rotary is even and at most head_dim.
            halves: elements i and i + rotary / 2 of a head turn together (NeoX), or else 2 i and 2 i + 1 (GPT-J).

        Returns:
            q and k turned, as new contiguous tensors.

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
            x: [rows, channels], bfloat16 or float32; rows may be apart by any stride.
            weights: [channels, taps], at most 4 taps, bias: [channels], in the dtype of x.
            states: [slots, channels, taps - 1], in the dtype of x: the inputs before a request's first row, oldest
                first. Those before its next row are left there.
            slots: [requests] int32; rows of a request with a negative one become zeros.
            starts: [requests + 1] int32, first rows of the requests, ascending; None: one row each.
            goes_on: [requests] bool, whether a state is one; if not, zeros stand for it. None: all are.

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

        For each token of a request, with unit vectors of query and key and the query divided by the root of `keys`:
        state = decay * state; state += strength * (value - state key) key^T; out = state query, rounded once. The rows
        of a request depend on that request alone, to the bit, however its tokens are divided among calls.

        Args:
            q, k: [rows, key heads * keys], v: [rows, heads * values], bfloat16 or float32; rows may be apart by any
                stride. Each key head serves heads / key heads heads in a row. keys is a multiple of 16.
            a, b: [rows, heads] float32: decay is e^a, strength b.
            states: [slots, heads, values, keys] float32; slots may be apart by any stride. slots, starts: as of
                `convolve`.
            gates: a_log and dt_bias, [heads] float32. With them decay is exp(-e^a_log * softplus(a + dt_bias)), and
                strength is the sigmoid of b.
            snapshots: [requests] int32 and [requests, heads, values, keys] float32. The state before a request's token
                of that number, counted in this call, is copied there; -1: none.

        Raises:
            ValueError, IndexError: as of `convolve`.
        """
        out = v.new_empty(v.shape)
        gated, copied = gates or (None, None), snapshots or (None, None)
        self.compute("delta_rule", q, k, v, starts, slots, a, b, *gated, states, *copied, out)
        return out


class NativeProgram:
    """Layers in a row, checked once and computed as often as one likes: of the same tensors, whatever is in them.

    Args:
        layers: what computes them.
    """

    def __init__(self, layers: NativeLayers) -> None:
        self._handle = function("program_create")(layers.handle)
        self._add = {name: function(f"program_{name}") for name in WRITTEN}
        self._attend = function("program_attention")
        self._run = function("program_run")
        self._tensors: list[Any] = []  # the library has their addresses
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, layer: str, *arguments: Any) -> None:
        """One more layer; arguments and errors as of `NativeLayers.compute`.

        The tensors are kept. Whoever resizes one, or gives it other memory, must not run the program again.
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
        """One more layer: attention in a step of the engine that `NativeEngine.plan_step` has planned.

        Args:
            q, k, v, out: as of `NativeEngine.layer_begin`; the step has as many requests as they.

        Raises:
            ValueError: a shape or dtype that does not fit.
        """
        self._attend(self._handle, engine.handle, at.handle, q, k, v, out)
        self._tensors.append((engine, at, q, k, v, out))
        self._count += 1

    def run(self, first: int, last: int) -> None:
        """Compute the layers [first, last).

        Raises:
            IndexError: there are fewer; or as the layers do (`NativeLayers`). Layers before a failed one are done.
        """
        self._run(self._handle, first, last)
