"""Step graphs: replay decode steps without the model's Python (option `model_kernels`).

Between two layers of a small model's decode step, SGLang's Python takes longer than the layers, but its decisions are
the same for every step with the same number of requests. So two steps are traced (`tracing.py`). If the traces are
equal, later steps replay them: consecutive native layers in one call, including attention if the step's plan is known
before its first layer, and the few remaining PyTorch operations one by one. All tensors of a replay share one piece of
memory; tensors that are not needed at the same time may overlap.

Steps that a trace cannot represent run as usual: prefill, models with several ranks, adapters or hooks, and models
whose Python reads tensors.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn
from torch.utils._pytree import tree_map

from fluxion_sglang.native import NativeProgram
from fluxion_sglang.sglang.containment.passes import FailureGuard
from fluxion_sglang.sglang.steps.layers import Contained
from fluxion_sglang.sglang.steps.packed import pieces
from fluxion_sglang.sglang.steps.tracing import Home, Kind, Op, Ref, Trace, TracedLayers, Tracer, is_ref

logger = logging.getLogger(__name__)

MAX_REQUESTS = 32
"""Most requests of a step with a graph; there is a graph for each number of requests."""
_ALIGN = 64
_TRIES = 4
"""Number of traces among which two must be equal; the first steps may do setup work."""


class Attention(Protocol):
    """Computes attention in replays."""

    def add(
        self, program: NativeProgram, key: Any, arguments: Sequence[torch.Tensor], out: torch.Tensor
    ) -> Callable[[], None]:
        """Add an attention layer to a program. Returns the call that computes it outside the program.

        Args:
            key, arguments: of `Tracer.own`, with a replay's tensors. out: the tensor for the result.
        """

    def begin(self) -> bool:
        """Begin a replay. Returns whether the program computes its attention."""

    def end(self) -> None:
        """The program has computed all layers of the replay."""


class States(Protocol):
    """Support for layers with per-request states in replays."""

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The step's inputs besides tokens and positions: the indices of its requests' states."""

    def memory(self) -> list[torch.Tensor]:
        """The memory of the states, which the layers write."""

    def finish(self, forward_batch: Any) -> None:
        """End a replay."""


def place(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Lay out values in one piece of memory, without overlap of values that are needed at the same time.

    Args:
        sizes: bytes of each value. spans: the first and the last operation that needs it.

    Returns:
        The offset of each value, a multiple of 64 bytes, and the total size.
    """
    offsets = [0] * len(sizes)
    placed: list[int] = []
    for value in sorted(range(len(sizes)), key=lambda value: spans[value]):
        first, last = spans[value]
        there = [other for other in placed if spans[other][0] <= last and spans[other][1] >= first]
        at = 0
        for other in sorted(there, key=offsets.__getitem__):
            if offsets[other] - at >= sizes[value]:
                break
            at = max(at, -(-(offsets[other] + sizes[other]) // _ALIGN) * _ALIGN)
        offsets[value] = at
        placed.append(value)
    return offsets, max((at + size for at, size in zip(offsets, sizes, strict=True)), default=0)


class StepGraph:
    """A trace that is ready for replay.

    Args:
        weights: the trace's weights by number.
        attention: computes the operations of kind OWN.
    """

    def __init__(self, trace: Trace, weights: Sequence[torch.Tensor], program: NativeProgram, attention: Attention):
        offsets, size = place(trace.values, _spans(trace))
        # Normal tensors, so that any later pass may write them in any inference mode.
        with torch.inference_mode(False):
            self._memory = torch.empty(max(size, 1), dtype=torch.uint8)
            self._inputs = [torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype) for ref in trace.inputs]
            self._held = [weight.detach() for weight in weights]
        self._offsets = offsets
        self._attention = attention
        whole, parted = _Calls(program), _Calls(program)
        for op in trace.ops:
            arguments = tree_map(self._tensor, op.arguments, is_leaf=is_ref)
            if op.kind is Kind.LAYER:
                program.add(op.what, *arguments)
            elif op.kind is Kind.OWN:
                parted.stretch()
                parted.call(attention.add(program, op.what, arguments, self._tensor(op.results[0])))
            else:
                call = self._call(op, arguments)
                for calls in (whole, parted):
                    calls.stretch()
                    calls.call(call)
        whole.stretch()
        parted.stretch()
        # The same operations, with attention inside and outside the program.
        self._whole, self._parted = whole.calls, parted.calls
        self._result = self._tensor(trace.result)

    def replay(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The result for other inputs of the same shapes, as a new tensor."""
        for own, tensor in zip(self._inputs, inputs, strict=True):
            own.copy_(tensor)
        whole = self._attention.begin()
        for call in self._whole if whole else self._parted:
            call()
        if whole:
            self._attention.end()
        return self._result.clone()

    def zeros(self) -> torch.Tensor:
        """The result of a failed replay."""
        return torch.zeros_like(self._result)

    def _tensor(self, ref: Any) -> Any:
        """The replay's tensor for a Ref; other values unchanged."""
        if not isinstance(ref, Ref):
            return ref
        if ref.home is Home.VALUE:
            memory, at = self._memory, self._offsets[ref.number] // ref.dtype.itemsize
        else:
            memory, at = (self._inputs if ref.home is Home.INPUT else self._held)[ref.number], 0
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=ref.dtype)
            return tensor.set_(memory.untyped_storage(), at + ref.offset, ref.shape, ref.stride)

    def _call(self, op: Op, arguments: Sequence[Any]) -> Callable[[], Any]:
        results = [self._tensor(ref) for ref in op.results]
        keywords = {name: tree_map(self._tensor, value, is_leaf=is_ref) for name, value in op.keywords}
        call = partial(op.what, *arguments, **keywords)
        return partial(_into, results, call) if results else call


class _Calls:
    """The calls of a replay: runs of a program's consecutive layers, and other calls between them."""

    def __init__(self, program: NativeProgram) -> None:
        self.calls: list[Callable[[], Any]] = []
        self._program, self._first = program, len(program)

    def stretch(self) -> None:
        """Add a run of the program's layers that were added since the last call."""
        if (last := len(self._program)) > self._first:
            self.calls.append(partial(self._program.run, self._first, last))

    def call(self, call: Callable[[], Any]) -> None:
        """Add a call at this point of the program's layers, or in place of the layer that follows."""
        self.calls.append(call)
        self._first = len(self._program)


def _into(results: Sequence[torch.Tensor], call: Callable[[], Any]) -> None:
    found = call()
    for result, value in zip(results, [found] if isinstance(found, torch.Tensor) else found, strict=True):
        result.copy_(value)


def _spans(trace: Trace) -> list[tuple[int, int]]:
    """The first and the last operation that needs each value."""
    spans: dict[int, tuple[int, int]] = {}
    for at, op in enumerate(trace.ops):
        for ref in op.refs():
            if ref.home is Home.VALUE:
                spans[ref.number] = spans.get(ref.number, (at, at))[0], at
    end = len(trace.ops)
    if trace.result.home is Home.VALUE:
        spans[trace.result.number] = spans[trace.result.number][0], end
    return [spans.get(value, (end, end)) for value in range(len(trace.values))]


class StepGraphs:
    """The graphs of a model's decode steps, one for each number of requests.

    Args:
        backbone: as from `backbone_of`. Its `forward` is replaced.
        layers: computes native layers.
        failures: of the pass; a step with a failure makes no graph.
        attention: computes attention in replays. states: of layers with states, or None.

    Attributes:
        tracer: of the step that is being traced, for the attention backend; None: no step is traced.
        layers: the argument.
    """

    def __init__(
        self,
        backbone: nn.Module,
        layers: Contained,
        failures: FailureGuard,
        attention: Attention,
        states: States | None = None,
    ) -> None:
        self.tracer: Tracer | None = None
        self._states = states
        self.layers, self._failures, self._attention = layers, failures, attention
        modules = list(backbone.modules())
        self._tables = [table for module in modules for table in (module._parameters, module._buffers)]
        # Hooks of a module would not see a replay, and may be added at any time.
        self._watchers = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._known: list[torch.Tensor] = []  # weights at the last check
        self._pieces: list[torch.Tensor] = []  # tensors with their memory
        self._addresses: list[int] = []
        self._traces: dict[int, list[Trace]] = {}
        self._graphs: dict[int, StepGraph] = {}
        self._refused: set[int] = set()
        self._never = False
        self._forward = backbone.forward
        backbone.forward = self.forward

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *others: Any, **named: Any
    ) -> Any:
        """The backbone's forward: hidden states [B, hidden] of a decode step; other passes run unchanged."""
        forward = partial(self._forward, input_ids, positions, forward_batch, *others, **named)
        special = any(other is not None for other in (*others, *named.values()))
        if self._never or special or not forward_batch.forward_mode.is_decode() or any(self._watchers):
            return forward()
        rows = input_ids.shape[0]
        if not 0 < rows <= MAX_REQUESTS or rows in self._refused:
            return forward()
        if (addresses := self._now()) != self._addresses:
            # The weights have changed since the graphs were made.
            self._addresses = addresses
            self._graphs.clear()
            self._traces.clear()
            self._refused.clear()
        inputs = (input_ids, positions, *(self._states.inputs() if self._states is not None else ()))
        if (graph := self._graphs.get(rows)) is None:
            return self._traced(rows, inputs, forward)
        out: torch.Tensor | None = self._failures.run(lambda: graph.replay(*inputs))
        if out is None:
            return graph.zeros()
        if self._states is not None:
            self._states.finish(forward_batch)
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what runs here from the trace."""
        with self.tracer.paused() if self.tracer is not None else nullcontext():
            yield

    def _traced(self, rows: int, inputs: tuple[torch.Tensor, ...], forward: Callable[[], Any]) -> Any:
        """Compute a step by the model's own Python; keep its trace, or make it a graph."""
        tracer, layers = Tracer(inputs, self._pieces), self.layers.layers
        self.tracer, self.layers.layers = tracer, TracedLayers(layers, tracer)
        try:
            with tracer:
                result = forward()
        finally:
            self.tracer, self.layers.layers = None, layers
        if self._failures.reason is None:
            try:
                self._learn(rows, tracer, result)
            except Exception:  # the result is valid without a graph
                logger.exception("Fluxion: decode steps of %d requests run without a graph, which cannot be made", rows)
                self._refused.add(rows)
        return result

    def _learn(self, rows: int, tracer: Tracer, result: object) -> None:
        """Keep the trace of a step with this result, or make it a graph if an equal one was seen."""
        trace = tracer.trace(result)
        if trace is None:
            self._never = True
            logger.info("Fluxion: decode steps run without graphs, because %s", tracer.reason)
        elif trace in (before := self._traces.setdefault(rows, [])):
            program = NativeProgram(self.layers.layers)
            self._graphs[rows] = StepGraph(trace, tracer.held, program, self._attention)
            del self._traces[rows]
        elif len(before) + 1 == _TRIES:
            self._refused.add(rows)
            del self._traces[rows]
            logger.info("Fluxion: no two decode steps of %d requests compute the same; they run without a graph", rows)
        else:
            before.append(trace)

    def _now(self) -> list[int]:
        """The current addresses of all weights."""
        held = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        if len(held) != len(self._known) or not all(map(is_, held, self._known)):
            self._known, self._pieces = held, [piece for tensor in held for piece in pieces(tensor)]
            self._pieces += self._states.memory() if self._states is not None else []
        return [piece.data_ptr() for piece in self._pieces]


def backbone_of(model: nn.Module) -> nn.Module | None:
    """The part of a model that maps token ids [B], positions [B] and the batch to hidden states [B, hidden].

    It contains every attention layer, and no layer that makes logits. None: there is no such part.
    """
    attention = {module for module in model.modules() if isinstance(module, RadixAttention)}
    for module in model.modules():
        inside = set(module.modules())
        if attention <= inside and not any(isinstance(part, LogitsProcessor) for part in inside):
            taken = list(inspect.signature(module.forward).parameters)
            return module if taken[:1] == ["input_ids"] and taken[2:3] == ["forward_batch"] else None
    return None
