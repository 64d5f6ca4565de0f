"""What llama.cpp and ik_llama.cpp have in common: `llama_decode`, and an argmax over its logits."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

import numpy as np
from driver import Plan, Racer, timed_steps

BATCH = 2048
"""Tokens of a call during prefill."""
KV_TYPES = {"f16": 1, "bf16": 30}
"""ggml_type"""


class Ggml(Racer):
    def __init__(self, api: Any) -> None:
        self._api = api

    @abstractmethod
    def open(self, plan: Plan, tokens: int) -> tuple[Any, dict[str, Any]]:
        """A context of `tokens` for each sequence, and the settings to show."""

    @abstractmethod
    def copy(self, sequence: int) -> None:
        """Copy all that sequence 0 has to another, so that the two share no memory."""

    def load(self, plan: Plan) -> dict[str, Any]:
        self._api.llama_backend_init()
        self._context, settings = self.open(plan, -(-plan.room // 256) * 256)
        self._vocabulary = plan.vocabulary
        largest = plan.batches[0]
        self._batch = self._api.llama_batch_init(BATCH, 0, largest)
        self._next, self._depths = [0] * largest, [0] * largest
        return {"weights": plan.options["file"].removesuffix(".gguf"), "n_batch": BATCH, **settings}

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        self._take(prompt)
        said = [self._next[0]]
        while len(said) < tokens:
            self._step(1)
            said.append(self._next[0])
        self.clear()
        return said

    def prefill(self, prompts: list[list[int]]) -> float:
        start = time.perf_counter()
        self._take(prompts[0])
        seconds = time.perf_counter() - start
        for sequence in range(1, len(prompts)):  # what is in a copy makes no step slower
            self.copy(sequence)
            self._depths[sequence], self._next[sequence] = self._depths[0], self._next[0]
        return seconds

    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        return timed_steps(lambda: self._step(batch), steps)

    def _take(self, prompt: list[int]) -> None:
        for at in range(0, len(prompt), BATCH):
            piece = prompt[at : at + BATCH]
            last = len(prompt) - at - 1
            self._fill([(token, at + i, 0, i == last) for i, token in enumerate(piece)])
        self._next[0], self._depths[0] = self._best(len(piece) - 1), len(prompt)

    def _step(self, batch: int) -> None:
        self._fill([(self._next[i], self._depths[i], i, True) for i in range(batch)])
        for i in range(batch):
            self._next[i] = self._best(i)
            self._depths[i] += 1

    def _fill(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")

    def _best(self, row: int) -> int:
        logits = np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, row), shape=(self._vocabulary,))
        return int(logits.argmax())
