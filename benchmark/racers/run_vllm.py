"""vLLM's CPU build, with its engine stepped in this process.

A prompt stays in the prefix cache between prefill and decode steps, so the two can be timed separately.
"""

from __future__ import annotations

import os
import time
from typing import Any

from driver import Plan, Racer, run, timed_steps

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process, where steps can be timed


class Vllm(Racer):
    def load(self, plan: Plan) -> dict[str, Any]:
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        from vllm import EngineArgs, LLMEngine

        largest = plan.batches[0]
        blocks = largest * (plan.room // 128 + 2) * 128
        facts = plan.options["kv_bytes"] * blocks
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(-(-facts // 2**30), 1))
        args = EngineArgs(
            model=plan.model,
            dtype="bfloat16",
            max_model_len=plan.room,
            max_num_seqs=largest,
            enable_prefix_caching=True,
            max_num_batched_tokens=plan.options.get("chunk", 2048),
            **plan.options.get("engine", {}),
        )
        self._engine = LLMEngine.from_engine_args(args)
        self._requests = 0
        self._prompts: list[list[int]] = []
        chosen = self._engine.vllm_config
        return {
            "dtype": "bfloat16",
            "kv": "bfloat16",
            "chunk": chosen.scheduler_config.max_num_batched_tokens,
            "block": chosen.cache_config.block_size,
            "compiled": chosen.compilation_config.mode.name.lower(),
        }

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        name = self._add(prompt, tokens)
        said: list[int] = []
        while self._engine.has_unfinished_requests():
            for out in self._engine.step():
                if out.request_id.startswith(name):
                    said = list(out.outputs[0].token_ids)
        return said

    def prefill(self, prompts: list[list[int]]) -> float:
        self._prompts = prompts
        seconds = []
        for prompt in prompts:
            start = time.perf_counter()
            self._add(prompt, 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            seconds.append(time.perf_counter() - start)
        return seconds[0]

    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        names = [self._add(prompt, steps + 8) for prompt in self._prompts[:batch]]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {out.request_id for out in self._engine.step() if out.outputs[0].token_ids}
        found = timed_steps(self._engine.step, steps)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return found

    def clear(self) -> None:
        self._engine.reset_prefix_cache()

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._requests += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        name = f"r{self._requests}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


if __name__ == "__main__":
    run(Vllm())
