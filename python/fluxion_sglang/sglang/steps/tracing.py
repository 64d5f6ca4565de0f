"""Traces a run of a model: the trace from which a step graph is made (`graphs.py`).

A traced run computes as usual. The tracer sees every operation of PyTorch, every native layer and every attention, with
the tensors that it reads and writes. A trace is complete only if nothing else affects the run. So each tensor must come
from a known source: the inputs, the model's weights, or an earlier operation. A violation ends the tracing with a
reason, and the run continues unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fluxion_sglang.native import WRITTEN, NativeLayers

_UNFILLED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
_TO_PYTHON = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "numpy", "__array__", "__dlpack__", "__bool__", "__int__", "__float__", "__index__")
}
"""Functions that pass a tensor's contents to Python; a trace does not see what Python does with them."""
_BY_CHANCE_OR_VALUE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


class Home(Enum):
    """The kind of memory that a tensor is in."""

    INPUT = "input"
    WEIGHT = "weight"
    VALUE = "value"
    """Written by an operation of the run."""


class Ref(NamedTuple):
    """A tensor of a run.

    Attributes:
        number: index of the input, weight or value whose memory it uses.
        offset: of its first element, in elements.
    """

    home: Home
    number: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Kind(Enum):
    """The kind of an operation."""

    LAYER = "layer"
    """A layer of `NativeLayers`: `what` is its name, with the arguments of `NativeLayers.compute`."""
    TORCH = "torch"
    """An operation of PyTorch: `what` is the overload."""
    OWN = "own"
    """An operation passed to `Tracer.own`: `what` is its key."""


class Op(NamedTuple):
    """An operation of a run.

    Attributes:
        arguments: positional, with a Ref for every tensor. keywords: pairs.
        results: tensors that it wrote, other than its arguments.
    """

    kind: Kind
    what: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Ref, ...]

    def refs(self) -> Iterator[Ref]:
        """Every tensor that it reads or writes."""
        leaves = tree_leaves((self.arguments, self.keywords, self.results), is_leaf=is_ref)
        return (leaf for leaf in leaves if is_ref(leaf))


class Trace(NamedTuple):
    """A run. Two equal traces compute the same result from the same inputs and weights.

    Attributes:
        inputs: the inputs of the run. result: its result.
        weights: addresses of the weights in use. values: sizes in bytes of the memory that operations wrote.
    """

    ops: tuple[Op, ...]
    inputs: tuple[Ref, ...]
    weights: tuple[int, ...]
    values: tuple[int, ...]
    result: Ref


class Tracer:
    """Traces what runs inside `with`.

    Args:
        inputs: tensors that every run provides; the run must not write them.
        weights: the model's parameters and buffers; the run must not write them either.

    Attributes:
        reason: why there is no trace, completes "because"; None: there is one so far.
        held: the weights in use, by number.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        self.reason: str | None = None
        self.held: list[torch.Tensor] = []
        self._weights = {_address(weight): weight for weight in weights}
        self._homes: dict[int, tuple[Home, int]] = {}
        self._ops: list[Op] = []
        self._values: list[int] = []
        # Keep all tensors alive until the run is over, so that no address is reused.
        self._alive: list[Any] = list(inputs)
        self._stack = ExitStack()
        self._looking = True
        for number, tensor in enumerate(inputs):
            # Replays allocate exactly this size for each input.
            if not tensor.is_contiguous() or tensor.storage_offset() or _address(tensor) in self._homes:
                self._end("an input is a part of other memory")
            self._homes[_address(tensor)] = Home.INPUT, number
        self._inputs = tuple(self._ref(tensor) for tensor in inputs)

    def __enter__(self) -> Self:
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def trace(self, result: object) -> Trace | None:
        """The trace of the run with this result; None if there is a `reason`."""
        found = self._attempt(lambda: self._ref(self._tensor(result)))
        trace = None
        if found is not None and self.reason is None:
            weights = tuple(weight.data_ptr() for weight in self.held)
            trace = Trace(tuple(self._ops), self._inputs, weights, tuple(self._values), found)
        self._alive.clear()
        return trace

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what runs here: it is reported to the tracer separately, or is not part of the run."""
        before, self._looking = self._looking, False
        try:
            yield
        finally:
            self._looking = before

    def own(self, key: Any, arguments: Sequence[Any], compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `compute` as one operation and return its result.

        Args:
            key: identifies the operation; equal for equal operations.
            arguments: the tensors that it reads.
        """
        with self.paused():
            result = compute()
        self._add(Kind.OWN, key, tuple(arguments), {}, (result,))
        return result

    def layer(self, name: str, arguments: Sequence[Any]) -> None:
        """Record a computed native layer; arguments as for `NativeLayers.compute`."""
        if self.reason is not None:
            return
        written = WRITTEN[name]
        for tensor in arguments[-written:]:
            if tensor is not None:
                self._attempt(partial(self._home, tensor, written=True))
        self._add(Kind.LAYER, name, tuple(arguments), {}, ())

    def operation(self, func: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run and record an operation of PyTorch."""
        result = func(*arguments, **keywords)
        if not self._looking or self.reason is not None:
            return result
        self._alive.append(result)
        written = _written(func, arguments, keywords)
        results = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        read = {_address(leaf) for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)}
        fresh = [tensor for tensor in results if _address(tensor) not in read]
        if any(tag in func.tags for tag in _BY_CHANCE_OR_VALUE):
            self._end(f"{func} depends on chance or on what is in a tensor")
        elif not (written or fresh or func.namespace == "aten"):
            # An aten operation without new results is a view. Others may write undeclared tensors.
            self._end(f"{func} gives nothing new and may write what it does not say")
        elif written:
            for tensor in written:
                self._attempt(partial(self._home, tensor, written=True))
            self._add(Kind.TORCH, func, arguments, keywords, ())
        elif func.overloadpacket not in _UNFILLED and fresh:
            self._add(Kind.TORCH, func, arguments, keywords, results)
        # The remaining results are views and uninitialized memory.
        return result

    def asked(self, func: Any) -> None:
        """Check a PyTorch function that is called from Python."""
        if self._looking and func in _TO_PYTHON:
            self._end(f"the model's Python looks into a tensor ({func.__name__})")

    def _add(
        self, kind: Kind, what: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], results: tuple[Any, ...]
    ) -> None:
        def op() -> Op:
            read = tree_map(self._referred, arguments), tuple(sorted(tree_map(self._referred, keywords).items()))
            for result in results:
                self._home(result, written=True)
            return Op(kind, what, *read, tuple(self._ref(result) for result in results))

        if self.reason is not None:
            return
        self._alive.append((arguments, keywords, results))
        found = self._attempt(op)
        if found is not None:
            self._ops.append(found)

    def _referred(self, leaf: Any) -> Any:
        return self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _ref(self, tensor: torch.Tensor) -> Ref:
        """The Ref of a tensor. Raises _Unknown."""
        home, number = self._home(tensor)
        if tensor.is_neg() or tensor.is_conj():
            raise _Unknown("a tensor's memory is not what it stands for")
        return Ref(
            home, number, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        )

    def _home(self, tensor: torch.Tensor, written: bool = False) -> tuple[Home, int]:
        """The home of a tensor; a first write makes new memory a value. Raises _Unknown."""
        address = _address(tensor)
        home = self._homes.get(address)
        if home is None and address in self._weights:
            home = self._homes[address] = Home.WEIGHT, len(self.held)
            self.held.append(self._weights[address])
        if home is None and written:
            home = self._homes[address] = Home.VALUE, len(self._values)
            self._values.append(tensor.untyped_storage().nbytes())
        if home is None:
            raise _Unknown("a tensor comes from outside of the model and of the run")
        if written and home[0] is not Home.VALUE:
            raise _Unknown(f"the run writes an {home[0].value}" if home[0] is Home.INPUT else "the run writes a weight")
        return home

    @staticmethod
    def _tensor(result: object) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise _Unknown("the result is more than one tensor")
        return result

    def _attempt(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except _Unknown as error:
            self._end(str(error))
            return None

    def _end(self, reason: str) -> None:
        self.reason = self.reason or reason


class TracedLayers(NativeLayers):
    """The layers of another object, reported to a tracer."""

    def __init__(self, layers: NativeLayers, tracer: Tracer) -> None:
        self.handle = layers.handle
        self._compute, self._tracer = layers.compute, tracer

    def compute(self, layer: str, *arguments: Any) -> None:
        with self._tracer.paused():
            self._compute(layer, *arguments)
        self._tracer.layer(layer, arguments)


class _Unknown(Exception):
    """The trace does not know the source of a tensor."""


class _Operations(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.operation(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tracer.asked(func)
        return func(*args, **(kwargs or {}))


def is_ref(leaf: Any) -> bool:
    """Whether a leaf is a Ref, which would otherwise be flattened as a tuple."""
    return isinstance(leaf, Ref)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    declared = func._schema.arguments
    given = [*zip(declared, arguments, strict=False), *((a, keywords[a.name]) for a in declared if a.name in keywords)]
    changed = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, torch.Tensor)]
