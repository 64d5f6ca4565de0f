"""Muon (Jordan et al., 2024: kellerjordan.github.io/posts/muon) with matrices of one shape orthogonalised in one batch.

`torch.optim.Muon` takes matrices one by one: 0.86 s a step for this model on a CPU, against 0.1 s here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by five Newton-Schulz steps and scaled to AdamW's root mean square (arXiv 2502.16982).

    Args:
        params: matrices.
        lr: step size, as AdamW's. momentum: Nesterov's. weight_decay: decoupled.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.02
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault((min(p.shape), max(p.shape)), []).append(p)
            for (small, large), params in shapes.items():
                updates = []
                for p in params:
                    average = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["momentum"])
                    update = p.grad.lerp(average, group["momentum"])
                    updates.append(update if p.shape[0] == small else update.T)
                for p, update in zip(params, _orthogonal(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    update = update if p.shape[0] == small else update.T
                    p.add_(update.to(p.dtype), alpha=-group["lr"] * 0.2 * large**0.5)


def _orthogonal(matrices: Tensor) -> Tensor:
    """[N, rows, columns], rows <= columns: approximately the nearest matrices with orthonormal rows (bf16, five
    steps)."""
    x = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        a = torch.bmm(x, x.transpose(1, 2))
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x
