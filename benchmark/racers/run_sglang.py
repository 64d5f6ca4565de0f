"""SGLang through the runner of its own benchmark `one_batch`, with or without this plug-in.

Options: flags (of the server), policies (with the plug-in: they decode in turn after one prefill).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, ClassVar

from driver import Plan, Racer, run, timed_steps


class Sglang(Racer):
    variants: ClassVar[list[str]] = [""]

    def __init__(self) -> None:
        self._batch: Any = None

    def load(self, plan: Plan) -> dict[str, Any]:
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        from fluxion_sglang import openmp

        openmp.wait_passively()  # before torch is imported; for plain SGLang too
        from sglang.benchmark import one_batch

        policies = plan.options.get("policies", [])
        tokens = plan.batches[0] * (-(-(plan.room + 16) // 16) * 16)
        flags = ["--model-path", plan.model, "--device", "cpu", "--max-running-requests", str(plan.batches[0])]
        flags += ["--context-length", str(plan.room + 16)]
        if policies:
            settings = {"policy": policies[0], "host_tokens": tokens, **plan.options.get("config", {})}
            flags += ["--enable-fluxion", "--fluxion-config", json.dumps(settings)]
        else:
            flags += ["--max-total-tokens", str(tokens)]
        self._one_batch = one_batch
        self._runner = loaded(one_batch, [*flags, *plan.options.get("flags", [])])
        torch_runner = self._runner.torch_runner
        self._policies = {}
        if policies:
            from fluxion_sglang.policy import parse_spec
            from fluxion_sglang.sglang.requests import predictors

            context = predictors.context(torch_runner.attn_backend.token_to_kv_pool.config, torch_runner)
            self._policies = {spec: parse_spec(spec, context) for spec in policies}
            type(self).variants = policies
        return {
            "dtype": str(torch_runner.dtype).removeprefix("torch."),
            "backend": type(torch_runner.attn_backend).__name__,
        }

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        self.prefill([prompt])
        said = [int(self._tokens[0])]
        while len(said) < tokens:
            self._step()
            said.append(int(self._tokens[0]))
        self.clear()
        return said

    def prefill(self, prompts: list[list[int]]) -> float:
        import torch

        seconds, tokens = [], []
        for req in self._one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, prompts):
            start = time.perf_counter()
            token, _, batch = self._runner.extend([req])
            seconds.append(time.perf_counter() - start)
            tokens.append(token)
            if self._batch is None:
                self._batch = batch
            else:
                self._batch.merge_batch(batch)
        self._tokens = torch.cat(tokens)
        return seconds[0]

    def decode(self, variant: str, batch: int, steps: int) -> list[float]:
        if batch < len(self._batch.reqs):
            self._batch.filter_batch(keep_indices=list(range(batch)))
            self._tokens = self._tokens[:batch]
        if variant:
            requests = self._runner.torch_runner.attn_backend.requests
            requests.current = [self._policies[variant]] * batch
        return timed_steps(self._step, steps)

    def clear(self) -> None:
        self._batch = None
        self._runner.clear()

    def _step(self) -> None:
        self._tokens, _ = self._runner.decode(self._tokens, self._batch)


class _Loaded(Exception):
    """Carries the runner out of one_batch, which has no function that only loads."""


def loaded(one_batch: Any, flags: list[str]) -> Any:
    """The runner of one_batch in this process, for the flags of a server."""

    def stop(_: str, runner: Any, *__: Any, **___: Any) -> None:
        raise _Loaded(runner)

    one_batch.latency_test_run_once = stop
    sys.argv[1:] = flags
    try:
        one_batch.cli_main()
    except _Loaded as found:
        return found.args[0]
    raise SystemExit("one_batch ended without a run")


if __name__ == "__main__":
    run(Sglang())
