"""Hugging Face transformers with torch's attention (SDPA), as in `generate`: its cache grows at every step."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from driver import Plan, Racer, run, timed_steps
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers(Racer):
    def load(self, plan: Plan) -> dict[str, Any]:
        torch.set_num_threads(plan.threads)
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, plan.options["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype, attn_implementation="sdpa").eval()
        return {"dtype": plan.options["dtype"], "kv": plan.options["dtype"], "attention": "sdpa"}

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        self._take(prompt)
        said = [int(self._next)]
        while len(said) < tokens:
            self._step()
            said.append(int(self._next))
        return said

    def prefill(self, prompts: list[list[int]]) -> float:
        start = time.perf_counter()
        self._take(prompts[0])
        seconds = time.perf_counter() - start
        self._cache.batch_repeat_interleave(len(prompts))  # the content of a copy does not change the speed
        self._next = self._next.repeat(len(prompts), 1)
        return seconds

    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        if batch < len(self._next):
            self._cache.batch_select_indices(torch.arange(batch))
            self._next = self._next[:batch]
        return timed_steps(self._step, steps)

    def clear(self) -> None:
        del self._cache

    @torch.inference_mode()
    def _take(self, prompt: list[int]) -> None:
        self._cache = DynamicCache()
        ids = torch.tensor([prompt])
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._next = out.logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def _step(self) -> None:
        out = self._model(input_ids=self._next, past_key_values=self._cache, use_cache=True)
        self._next = out.logits[:, -1:].argmax(-1)


if __name__ == "__main__":
    run(Transformers())
