"""Pack weights as in quantised checkpoints, by the formats' published rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Grid:
    """weight = scale * (integer - zero): integers [outputs, inputs], zeros [outputs, groups], scales float16."""

    integers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    bits: int
    symmetric: bool

    def wide(self) -> torch.Tensor:
        """The weight in float32, with minima in float16, as in the kernels."""
        middle = 128 if self.bits == 8 else 0
        group = self.integers.shape[1] // self.scales.shape[1]
        minima = (-self.scales.float() * (self.zeros - middle)).half()
        scales, minima = (part.float().repeat_interleave(group, 1) for part in (self.scales, minima))
        return (self.integers - middle) * scales + minima


def rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> Grid:
    """The weight on a grid; a group of -1 spans all inputs."""
    parts = weight.float().unflatten(1, (-1, weight.shape[1] if group == -1 else group))
    most = (1 << bits) - 1
    if symmetric:
        scales = (parts.abs().amax(-1) / (most // 2)).half()
        zeros = torch.full(scales.shape, 1 << bits - 1)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().long().clamp(0, most)
    integers = ((parts / scales.float()[..., None]).round().long() + zeros[..., None]).clamp(0, most)
    return Grid(integers.flatten(1), zeros, scales, bits, symmetric)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the second dimension into int32; the first value takes the lowest bits."""
    return (values.unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def gptq(grid: Grid, v2: bool = False) -> dict[str, torch.Tensor]:
    zeros = grid.zeros if v2 else grid.zeros - 1 & (1 << grid.bits) - 1
    inputs = grid.integers.shape[1]
    return {
        "qweight": words(grid.integers, grid.bits).T.contiguous(),
        "qzeros": words(zeros.T, grid.bits),
        "scales": grid.scales.T.contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs // grid.scales.shape[1])).int(),
    }


def awq(grid: Grid) -> dict[str, torch.Tensor]:
    packed = [words(part.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4) for part in (grid.integers, grid.zeros)]
    return {"qweight": packed[0], "qzeros": packed[1], "scales": grid.scales.T.contiguous()}


def pack_quantised(grid: Grid) -> dict[str, torch.Tensor]:
    found = {
        "weight_packed": words(grid.integers, grid.bits),
        "weight_scale": grid.scales,
        "weight_shape": torch.tensor(grid.integers.shape),
    }
    if not grid.symmetric:
        found["weight_zero_point"] = words(grid.zeros.T, grid.bits).T.contiguous()
    return found


def int_quantised(grid: Grid) -> dict[str, torch.Tensor]:
    return {"weight": (grid.integers - 128).to(torch.int8), "weight_scale": grid.scales}


def gptq_config(bits: int, group: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False} | more


def auto_round_config(bits: int, group: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    packing = "auto_round:auto_gptq"
    return {
        "quant_method": "auto-round", "bits": bits, "group_size": group, "sym": symmetric, "packing_format": packing,
    } | more  # fmt: skip


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | more


def compressed_config(
    bits: int, group: int, symmetric: bool = True, form: str = "pack-quantized", **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group, "dynamic": False,
    }  # fmt: skip
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if form == "int-quantized" else None,
    }
    groups = {"config_groups": {"group_0": scheme}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]} | groups | more
