"""The work of a decode step: weights to multiply, and KV that tasks read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forecast.layer import TIME, Stage, Task

from fluxion_sglang.kv.host_pool import KVShape

SINKS, WINDOW = 64, 264
"""Resident tokens of a request; a window holds 256 to 271."""
ATTEND, ATTEND_BLOCKS, SCAN = "attend", "attend blocks", "scan"
"""Kernels: attention to consecutive tiles, attention to scattered blocks, and scores of blocks from their metadata."""


@dataclass(frozen=True)
class Model:
    """Shapes of a dense transformer in bfloat16, or of one tensor-parallel rank's part of it."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Model:
        """The model of a config.json.

        Raises:
            ValueError: the model has experts.
        """
        if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ValueError("models with experts cannot be forecast: each token reads other weights")
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            q_heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
        )

    @classmethod
    def read(cls, folder: Path) -> Model:
        return cls.of(json.loads((folder / "config.json").read_text()))

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value in one KV head of one layer."""
        return 2 * self.head_dim * 2

    def pool_bytes(self, tokens: int) -> int:
        """Bytes of host pools for `tokens` tokens, including metadata and moments."""
        return KVShape(self.layers, self.kv_heads, self.head_dim, torch.bfloat16).pool_bytes(tokens)

    def rank(self, ranks: int) -> Model:
        """The part of one of `ranks` tensor-parallel ranks.

        Raises:
            ValueError: the KV heads do not divide evenly.
        """
        if self.kv_heads % ranks:
            raise ValueError(f"{ranks} ranks cannot divide {self.kv_heads} KV heads evenly")
        return Model(
            self.layers,
            self.hidden,
            self.inner // ranks,
            self.q_heads // ranks,
            self.kv_heads // ranks,
            self.head_dim,
            self.vocabulary // ranks,
        )

    def matrices(self) -> list[int]:
        """Bytes of the weights of a layer, one entry per matrix product."""
        qkv = (self.q_heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        o = self.q_heads * self.head_dim * self.hidden
        return [2 * size for size in (qkv, o, 2 * self.inner * self.hidden, self.inner * self.hidden)]

    def head_bytes(self) -> int:
        """Bytes of the matrix that computes logits."""
        return 2 * self.vocabulary * self.hidden


@dataclass(frozen=True)
class Reading:
    """Share of the middle that a group of heads reads.

    Attributes:
        blk: tokens per block; 0: everything, without ranking.
        tiles: share of the tiles that at least one head of the group selects.
    """

    blk: int
    tiles: float

    @classmethod
    def of(cls, spec: str, group: int) -> Reading:
        """Parse `full` or `fixed:BLK:SHARE`. Heads are assumed to choose independently, which reads the most.

        Raises:
            ValueError: any other policy.
        """
        name, *rest = spec.split(":")
        if name == "full" and not rest:
            return cls(0, 1.0)
        if name == "fixed" and len(rest) == 2:
            with suppress(ValueError):
                blk, share = int(rest[0]), float(rest[1])
                if blk in (16, 32, 64, 128) and 0 < share <= 1:
                    return cls(blk, 1 - (1 - share) ** group)
        raise ValueError(f"the policy {spec!r} cannot be forecast; say full or fixed:BLK:SHARE, such as fixed:16:0.05")


def layer_work(
    model: Model, batch: int, context: int, reading: Reading, select_ns: float
) -> tuple[list[Task], list[Task]]:
    """Resident items and tasks of one layer; all requests of the batch have `context` tokens.

    Args:
        select_ns: time to choose among the blocks, per block and head.
    """
    groups, token = batch * model.kv_heads, model.token_bytes
    middle = max(context - SINKS - WINDOW, 0)
    items: list[Task] = [[Stage(ATTEND, min(context, SINKS + WINDOW) * token)]] * groups
    if not middle:
        return items, []
    if not reading.blk:
        return items, [[Stage(ATTEND, middle * token)]] * groups
    blocks = middle / reading.blk
    task = [
        Stage(SCAN, blocks * token),  # a minimum and a maximum per block take as many bytes as a token's key and value
        Stage(TIME, blocks * model.group * select_ns),
        Stage(ATTEND_BLOCKS, reading.tiles * middle * token),
    ]
    return items, [task] * groups
