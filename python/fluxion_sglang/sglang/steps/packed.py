"""Packed weights of linear layers, in the order that the workers read fastest (`csrc/kernels/panels.h`).

The module's Parameter stays in place and reports its old shape and strides, but its numbers are reordered in the same
memory. Any operation on it first restores the rows permanently, and the layer then uses them. So no other code has to
know about packing, such as code that loads, saves, compares or shares weights.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fluxion_sglang.native import NativeLayers

logger = logging.getLogger(__name__)

_SLICE = 64 << 20
"""Bytes of a weight that are unpacked at a time for a product with many rows of x."""

T = TypeVar("T")


class Packer:
    """Packs weights of a model.

    Args:
        layers: their kernels define the order.
    """

    def __init__(self, layers: NativeLayers) -> None:
        self.layers = layers
        self.lock = threading.Lock()  # guards the order of all weights: loaders may use several threads
        self._memory = torch.empty(0, dtype=torch.bfloat16)
        self._told = False

    def pack(self, weight: nn.Parameter) -> None:
        """Pack a weight in place if that makes it faster, for all modules that hold this Parameter.

        No other tensor may use the memory.
        """
        plain = weight.data
        # Swapping would change the class of a subclass.
        if type(weight) is not nn.Parameter or weight.requires_grad or not self.layers.gains_from_packing(plain):
            return
        memory = PackedMemory(plain, self)
        stand_in = nn.Parameter(PackedWeight(memory), requires_grad=False)
        stand_in.__dict__.update(weight.__dict__)
        try:
            torch.utils.swap_tensors(weight, stand_in)
        except RuntimeError as error:  # C++ code holds a reference
            logger.info("Fluxion: weights of the shape %s stay in rows, because %s", tuple(weight.shape), error)
            return
        try:
            memory.pack()
        except Exception as error:  # it is still in rows
            logger.warning("Fluxion: weights of the shape %s stay in rows, because %s", tuple(weight.shape), error)

    def tell(self, operation: str, shape: torch.Size) -> None:
        """Log once that an operation unpacks a weight."""
        if not self._told:
            self._told = True
            logger.info(
                "Fluxion: %s of weights of the shape %s needs them in rows, and so they stay: decode steps of eight "
                "requests read them at about three quarters of the speed until the server is started again. Other "
                "weights that this happens to are not listed",
                operation,
                tuple(shape),
            )

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """Scratch memory for as many rows, valid until the next call."""
        if self._memory.numel() < rows.numel():
            self._memory = self._memory[:0].clone()  # frees the old memory first
            with torch.inference_mode(False):
                self._memory = torch.empty(rows.numel(), dtype=rows.dtype)
        return self._memory[: rows.numel()].view(rows.shape)


class PackedMemory:
    """A weight's memory.

    Attributes:
        inner: [outputs, in] bfloat16, contiguous; packed according to `order`.
        packed: whether it is packed. order: the same as a tensor for the kernels (`NativeLayers.linear`) and graphs.
    """

    def __init__(self, inner: torch.Tensor, packer: Packer) -> None:
        self.inner, self._packer, self.packed = inner, packer, False
        with torch.inference_mode(False):
            self.order = torch.zeros(1, dtype=torch.int32)
        self._known: dict[Callable[[torch.Tensor], Any], Any] = {}

    def pack(self) -> None:
        self._packer.layers.repack(self.inner)
        self._say(True)

    def _say(self, packed: bool) -> None:
        self.packed = packed
        self.order.fill_(packed)

    def rows(self, operation: str) -> torch.Tensor:
        """`inner`, permanently in rows from here on."""
        with self._packer.lock:
            if self.packed:
                self._packer.tell(operation, self.inner.shape)
                self._packer.layers.repack(self.inner, unpack=True)
                self._say(False)
                self._known.clear()
        return self.inner

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over slices [n, in] of the weight in rows, with their first row's index; valid until the next."""
        if not self.packed:
            yield 0, self.inner
            return
        panel = self._packer.layers.panel
        size = max(_SLICE // (self.inner.stride(0) * self.inner.itemsize) // panel, 1) * panel
        for first in range(0, len(self.inner), size):
            part = self.inner[first : first + size]
            room = self._packer.room(part)
            self._packer.layers.repack(part, room, unpack=True)
            yield first, room

    def known(self, compute: Callable[[torch.Tensor], T]) -> T:
        """compute(rows), on an unpacked copy while the weight is packed. Cached until the weight is unpacked."""
        if not self.packed:
            return compute(self.inner)
        if compute not in self._known:
            copy = torch.empty_like(self.inner)
            self._packer.layers.repack(self.inner, copy, unpack=True)
            self._known[compute] = compute(copy)
        found: T = self._known[compute]
        return found


class PackedWeight(torch.Tensor):
    """The Parameter of a packed weight: a tensor without memory of its own.

    Its shape, strides and dtype are those of the weight in rows. Any operation gets the rows.
    """

    memory: PackedMemory

    @staticmethod
    def __new__(cls, memory: PackedMemory) -> PackedWeight:
        inner = memory.inner
        with torch.inference_mode(False):  # like the views of a parameter
            self: PackedWeight = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
            )
        self.memory = memory
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Many functions of PyTorch read the address of a tensor's memory without reaching __torch_dispatch__.
        if func in _SAY_WHAT_IT_IS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch._has_compatible_shallow_copy_type:
            return False  # modules that are cast get a plain Parameter
        if func == _SET_DATA and (args[0].shape != args[1].shape or args[0].dtype is not args[1].dtype):
            raise RuntimeError("A packed weight takes no data of another shape or dtype; assign a new Parameter.")
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].memory)

        def in_rows(leaf: Any) -> Any:
            if not isinstance(leaf, cls):
                return leaf
            rows = leaf.memory.rows(getattr(func, "__name__", str(func)))
            # Pass an alias, because an operation that transposes or reassigns a tensor must affect only its own.
            return rows if func == _SET_DATA else rows.detach()

        return func(*tree_map(in_rows, args), **tree_map(in_rows, kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(self.memory.rows("a deep copy").clone(), requires_grad=False)
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, packed={self.memory.packed})"


_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "grad_fn", "is_leaf",
    "is_cpu", "is_cuda", "is_meta", "is_quantized", "is_sparse", "data", "_backward_hooks",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "is_contiguous", "get_device",
    "is_floating_point", "is_complex", "is_inference", "requires_grad_", "detach", "__len__", "__hash__", "__repr__",
)  # fmt: skip
_SAY_WHAT_IT_IS = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(torch.Tensor, name) for name in _METHODS),
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that own the memory of a parameter or buffer."""
    return (tensor.memory.inner, tensor.memory.order) if isinstance(tensor, PackedWeight) else (tensor,)


def of_rows(weight: torch.Tensor, compute: Callable[[torch.Tensor], T]) -> T:
    """compute(weight in rows); a packed weight stays packed."""
    return weight.memory.known(compute) if isinstance(weight, PackedWeight) else compute(weight)


def owners(model: nn.Module) -> Counter[int]:
    """For each memory address, the number of module attributes with a tensor there."""
    tables = [table for m in model.modules() for table in (m._parameters, m._buffers, vars(m))]
    tensors = [tensor for table in tables for tensor in table.values() if isinstance(tensor, torch.Tensor)]
    return Counter(t.untyped_storage().data_ptr() for t in tensors if _is_plain(t))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own; subclasses and sparse layouts do not."""
    return tensor.layout is torch.strided and type(tensor.data) is torch.Tensor
