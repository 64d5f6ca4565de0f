"""SGLang's one_batch, with decode steps of several policies in turns after one prefill.

    python benchmark/decode_turns.py --policies full,fluxion --turns 3 --steps 6 --batch-size 8 4 1 ...

Unknown options go to one_batch, which loads the model and writes the result file. Batch sizes descend: a smaller batch
is the first requests of the larger one, so only the largest is prefilled, request by request. All policies decode in
one process within a short time, so drift of the machine affects them alike. The first step of a turn does not count: it
may measure anchors, and caches hold the data of the previous policy. Every policy observes the prefill and remembers
its own steps. Tokens that other policies decode in between are new to it, like an appended turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # for plain SGLang too; before torch is imported

import drawn
import torch
from sglang.benchmark import one_batch

from fluxion_sglang.device.step import StreamDevice
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy import Policy, parse_spec
from fluxion_sglang.sglang.requests import predictors

DRAWN_STEPS = 1
"""Steps of a policy's last turn that the timeline keeps."""
OFF = "off"
"""The only "policy" of a run without the flag."""


class Turns:
    """Replaces one_batch's `latency_test_run_once`.

    Args:
        policies: specs, or `OFF` alone.
        steps: per turn, including the first one, which does not count.
        streams: token ids that each request decodes instead of the model's output; empty: the model's output.
        timeline: file for the layers of each policy's last steps on a device, one line of JSON per policy and batch
            size.
    """

    def __init__(
        self, policies: list[str], turns: int, steps: int, streams: list[list[int]], timeline: Path | None = None
    ) -> None:
        self.policies, self.turns, self.steps = policies, turns, steps
        self.streams = torch.tensor(streams, dtype=torch.int64) if streams else None
        self._chosen: dict[str, Policy | None] = {}
        self._timeline = timeline
        self._warm = False
        self._batch: Any = None
        self._tokens: torch.Tensor | None = None
        self._prefill_s = 0.0
        self._at = 0

    def run_once(
        self,
        run_name: str,
        model_runner: Any,
        rank_print: Any,
        reqs: list[Any],
        batch_size: int,
        input_len: int,
        *_: Any,
        **__: Any,
    ) -> dict[str, Any] | None:
        if not self._warm:  # one_batch warms up with random tokens; each turn warms up with its first step
            self._warm = True
            return None
        if self._batch is None:
            self._chosen = {spec: self._policy(model_runner.torch_runner, spec) for spec in self.policies}
            self._prefill(model_runner, reqs)
        else:
            assert batch_size <= len(self._batch.reqs), "batch sizes must descend"
            self._batch.filter_batch(keep_indices=list(range(batch_size)))
        spent: dict[str, list[float]] = defaultdict(list)
        waited: dict[str, list[float]] = defaultdict(list)
        reads: dict[str, Counter[str]] = defaultdict(Counter)
        device = device_of(model_runner)
        for turn, (spec, policy) in itertools.product(range(self.turns), self._chosen.items()):
            if policy is not None:
                model_runner.torch_runner.attn_backend.requests.current = [policy] * batch_size
            if device is not None:
                device.settle()
                device.timeline.keep(DRAWN_STEPS)
            before = reads_of(model_runner)
            found = [self._step(model_runner, device) for _ in range(self.steps)][1:]
            spent[spec] += [seconds for seconds, _ in found]
            reads[spec].update({name: count - before[name] for name, count in reads_of(model_runner).items()})
            if device is None:
                continue
            waited[spec] += [seconds for _, seconds in found]
            if turn == self.turns - 1 and self._timeline is not None:
                row = {"batch": batch_size, "policy": spec, "steps": device.timeline.kept}
                with self._timeline.open("a") as out:
                    out.write(json.dumps(row) + "\n")
        rank_print(f"{batch_size} x {input_len}: " + ", ".join(f"{k} {min(v) * 1e3:.1f} ms" for k, v in spent.items()))
        return {
            "batch_size": batch_size,
            "input_len": input_len,
            "prefill_s": self._prefill_s,
            "decode_s": spent,
            **({"device_wait_s": waited, "layers": device.layers, "reads": reads} if device is not None else {}),
        }

    def _prefill(self, model_runner: Any, reqs: list[Any]) -> None:
        model_runner.clear()
        start = time.perf_counter()
        tokens = []
        with heard_by(self._chosen.values(), model_runner.torch_runner.attn_backend):
            for req in reqs:
                token, _, batch = model_runner.extend([req])
                tokens.append(token)
                if self._batch is None:
                    self._batch = batch
                else:
                    self._batch.merge_batch(batch)
        model_runner.synchronize()
        self._prefill_s = (time.perf_counter() - start) / len(reqs)
        self._tokens = torch.cat(tokens)

    def _step(self, model_runner: Any, device: StreamDevice | None) -> tuple[float, float]:
        """Seconds of a step, and how many of them the device waited."""
        size = len(self._batch.reqs)
        tokens = self._tokens[:size] if self.streams is None else self.streams[:size, self._at]
        before = 0 if device is None else device.stats()["device_wait_ns"]
        start = time.perf_counter()
        self._tokens, _ = model_runner.decode(tokens, self._batch)
        model_runner.synchronize()
        seconds = time.perf_counter() - start
        self._at += 1
        if device is None:
            return seconds, 0.0
        device.settle()
        return seconds, (device.stats()["device_wait_ns"] - before) * 1e-9

    @staticmethod
    def _policy(runner: Any, spec: str) -> Policy | None:
        if spec == OFF:
            return None
        if spec == drawn.SPEC:
            return drawn.drawn()
        return parse_spec(spec, predictors.context(runner.attn_backend.token_to_kv_pool.config, runner))


def device_of(model_runner: Any) -> StreamDevice | None:
    """The GPU device that runs Fluxion's passes; None on a CPU."""
    device = getattr(model_runner.torch_runner.attn_backend, "device", None)
    return device if isinstance(device, StreamDevice) else None


def reads_of(model_runner: Any) -> dict[str, int]:
    """Bytes of tiles read so far: by all processors, and by the GPU."""
    engine = getattr(model_runner.torch_runner.attn_backend, "engine", None)
    if engine is None:
        return dict.fromkeys(("tile_bytes", "gpu_tile_bytes"), 0)
    stats = engine.stats()
    device = device_of(model_runner)
    near = device.stats().get("near_tiles", 0) if device is not None else 0
    if near:
        near *= PAGE * engine.pool.shape.token_bytes // engine.pool.shape.kv_heads
    return {"tile_bytes": stats.get("tile_bytes", 0) + near, "gpu_tile_bytes": near}


@contextmanager
def heard_by(policies: Iterable[Policy | None], backend: Any) -> Iterator[None]:
    """Tell all policies with memory what the backend prefills in this context, as if the requests were theirs."""
    hearers = [policy for policy in policies if policy is not None and type(policy).prefilled is not Policy.prefilled]
    if not hearers:
        yield
        return
    engine = backend.engine
    prefilled = engine.prefilled

    def tell(layer: int, row: int, length: int, queries: torch.Tensor, _: Policy | None = None) -> None:
        for policy in hearers:
            prefilled(layer, row, length, queries, policy)

    engine.prefilled = tell
    try:
        yield
    finally:
        engine.prefilled = prefilled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--policies",
        required=True,
        help=f'comma separated; "{OFF}" for a run without the flag, "{drawn.SPEC}" for drawn.py\'s',
    )
    parser.add_argument("--turns", type=int, required=True, help="of each policy")
    parser.add_argument("--steps", type=int, required=True, help="of a turn; the first does not count")
    parser.add_argument("--streams", type=Path, help="JSON: token ids that each request decodes")
    parser.add_argument("--timeline", type=Path, help="file for the layers of some steps on a device")
    args, others = parser.parse_known_args()
    streams = json.loads(args.streams.read_text()) if args.streams else []
    one_batch.latency_test_run_once = Turns(
        args.policies.split(","), args.turns, args.steps, streams, args.timeline
    ).run_once
    sys.argv[1:] = others
    one_batch.cli_main()


if __name__ == "__main__":
    main()
