"""llama.cpp through the low-level interface of llama-cpp-python: `llama_decode`, and an argmax of its logits.

Options: flash_attention, kv (f16, bf16, or q8_0 with flash attention), file (one of the checkpoint's GGUF files).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from driver import Plan, Racer, run, timed_steps

BATCH = 2048
"""Tokens per call during prefill."""
KV_TYPES = {"f16": 1, "q8_0": 8, "bf16": 30}
"""ggml_type"""


class LlamaCpp(Racer):
    def load(self, plan: Plan) -> dict[str, Any]:
        api.llama_backend_init()
        options, largest = plan.options, plan.batches[0]
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        model = api.llama_model_load_from_file(str(Path(plan.model) / options["file"]).encode(), params)
        if not model:
            raise SystemExit("llama.cpp did not load the model")
        wanted = api.llama_context_default_params()
        # Each sequence has its own buffer, because the prompts share nothing.
        wanted.kv_unified = False
        wanted.n_seq_max = largest
        wanted.n_ctx = largest * -(-plan.room // 256) * 256
        wanted.n_batch = BATCH
        wanted.n_threads = wanted.n_threads_batch = plan.threads
        wanted.type_k = wanted.type_v = KV_TYPES[options["kv"]]
        wanted.flash_attn_type = 1 if options["flash_attention"] else 0
        self._context = api.llama_init_from_model(model, wanted)
        if not self._context:
            raise SystemExit("llama.cpp made no context")
        self._memory, self._vocabulary = api.llama_get_memory(self._context), plan.vocabulary
        self._batch = api.llama_batch_init(BATCH, 0, largest)
        self._next, self._depths = [0] * largest, [0] * largest
        has = [part.strip().removesuffix(" = 1") for part in api.llama_print_system_info().decode().split("|")]
        return {
            "weights": options["file"].removesuffix(".gguf"),
            "n_batch": BATCH,
            "n_ubatch": wanted.n_ubatch,
            "kv": options["kv"],
            "flash_attention": options["flash_attention"],
            "built_with": ", ".join(name for name in has if name and "=" not in name),
        }

    def clear(self) -> None:
        api.llama_memory_clear(self._memory, True)

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
        for sequence in range(1, len(prompts)):  # the content of a copy does not change the speed
            api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
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
        """Decode (token, position, sequence, whether its logits are needed)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = api.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")

    def _best(self, row: int) -> int:
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), shape=(self._vocabulary,))
        return int(logits.argmax())


if __name__ == "__main__":
    run(LlamaCpp())
