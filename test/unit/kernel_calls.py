"""Calls of the kernels of every ISA on this CPU, for tests."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from benchmark.probe import library
from fluxion_sglang.native import topology

OWN_ISAS = str(library().isas()).split(",")
EMULATED = Path(os.environ["FLUXION_DEVICE_LIBRARIES"]) / "libfluxion_amx.so"
"""Kernels for a matrix unit that is emulated in C, for CPUs with AVX-512 and without that unit."""
_WIDE = topology()["isa_of_cpu"].startswith("avx512")
ISAS = OWN_ISAS + ["amx"] * (_WIDE and EMULATED.is_file())
DTYPES = [torch.float32, torch.bfloat16]
HEAD_DIMS = [32, 48, 64, 80, 96, 128, 192, 256]
NAN, INF = math.nan, math.inf
EVERY = torch.empty(0, 0, dtype=torch.uint16)  # the masks that mean: all tokens

few = settings(max_examples=examples(40))
isas = pytest.mark.parametrize("isa", ISAS)
own_isas = pytest.mark.parametrize("isa", OWN_ISAS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
seeds = st.integers(0, 2**31 - 1)
head_dims = st.sampled_from(HEAD_DIMS)


def k(name: str) -> Callable[..., Any]:
    def call(isa: str, *args: Any) -> Any:
        kernels = library() if isa in OWN_ISAS else tvm_ffi.load_module(EMULATED)
        return getattr(kernels, "k_" + name)(isa, *args)

    return call


def attend(
    isa: str, q: Tensor, scale: float, tiles: Tensor, pages: Tensor, masks: Tensor = EVERY
) -> tuple[Tensor, Tensor]:
    o, lse = torch.full(q.shape, NAN), torch.full(q.shape[:1], NAN)
    k("attend")(isa, q, scale, tiles, pages, masks, o, lse)
    return o, lse


def error(got: Tensor, want: Tensor) -> float:
    """The largest relative error in norm over the rows; a row of zeros must be matched exactly."""
    difference = (got.double() - want.double()).norm(dim=-1)
    size = want.double().norm(dim=-1)
    return float(torch.where(size > 0, difference / size, difference * INF).nan_to_num(0.0, INF).max())


def accuracy(isa: str, dtype: torch.dtype, heads: int) -> float:
    """Bound for `error` of attention over random values.

    For more than 16 heads, avx512bf16 rounds weights to bfloat16, an error of at most 2^-9 each. For more than 4, amx
    splits weights into two bfloat16 numbers, an error of at most 2^-16 each.
    """
    if dtype == torch.bfloat16 and isa == "avx512bf16" and heads > 16:
        return 5e-3
    return 2e-5 if dtype == torch.bfloat16 and isa == "amx" and heads > 4 else 1e-5


def random_tiles(P: int, D: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(P, 2, 16, D).to(dtype)
