"""mistral.rs by its Python package: requests stream their tokens, and a step is the time between two of them.

A prompt stays in the cache of prefixes between its prefill and its decode steps, so the two can be timed apart.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

from driver import Plan, Racer, run


class MistralRs(Racer):
    def load(self, plan: Plan) -> dict[str, Any]:
        os.environ["RAYON_NUM_THREADS"] = str(plan.threads)
        from mistralrs import Architecture, ModelDType, Runner, Which

        folder = Path(plan.model)
        arch = {"llama": Architecture.Llama, "qwen3": Architecture.Qwen3}[plan.options["model_type"]]
        dtype = {"bf16": ModelDType.BF16, "f16": ModelDType.F16, "f32": ModelDType.F32}[plan.options["dtype"]]
        self._runner = Runner(
            which=Which.Plain(
                model_id=str(folder), arch=arch, tokenizer_json=str(folder / "tokenizer.json"), dtype=dtype
            ),
            max_seqs=plan.batches[0],
            prefix_cache_n=plan.batches[0],
            token_source="none",
        )
        self._prompts: list[list[int]] = []
        return {"dtype": plan.options["dtype"], "kv": "f16"}

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        return [int(word) for _, text in self._stream(prompt, tokens) for word in text.split()]

    def prefill(self, prompts: list[list[int]]) -> float:
        self._prompts = prompts
        seconds = []
        for prompt in prompts:
            start = time.perf_counter()
            first = self._stream(prompt, 1)[0][0]
            seconds.append(first - start)
        return seconds[0]

    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        """Between tokens of the first request, while all run: they start at once, so their last steps are joint."""
        found: list[list[float]] = [[] for _ in range(batch)]

        def read(i: int) -> None:
            found[i] = [at for at, _ in self._stream(self._prompts[i], steps + 16 * batch)]

        threads = [threading.Thread(target=read, args=(i,)) for i in range(batch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        joint, until = max(times[0] for times in found), min(times[-1] for times in found)
        times = [at for at in found[-1] if joint <= at <= until]
        if len(times) <= steps:
            raise SystemExit(f"mistral.rs ran {batch} requests together for {len(times)} tokens only")
        return [b - a for a, b in itertools.pairwise(times)][:steps]

    def clear(self) -> None:
        """Nothing: the cache keeps the prompts of `max_seqs` requests, and those of another depth push them out."""

    def _stream(self, prompt: list[int], tokens: int) -> list[tuple[float, str]]:
        """(when it came, text) of every token."""
        from mistralrs import ChatCompletionRequest

        request = ChatCompletionRequest(
            messages=" ".join(map(str, prompt)), model="default", max_tokens=tokens, temperature=0.0, stream=True
        )
        out = []
        for chunk in self._runner.send_chat_completion_request(request):
            text = chunk.choices[0].delta.content
            if text:
                out.append((time.perf_counter(), text))
        return out


if __name__ == "__main__":
    run(MistralRs())
