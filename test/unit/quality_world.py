"""A cheap suite, model folder and engine for the tests of the quality harness."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fluxion_quality.base import Codec, Sample, Suite, Task
from fluxion_sglang.commands import needle
from fluxion_sglang.scoring.audit_file import record_dtype
from fluxion_sglang.scoring.forced import NOTES
from fluxion_sglang.scoring.serve import Needs, Server

VOCABULARY = len(needle.VOCABULARY)
HEADS = 4
CONFIDENCE = {"full": 6.0, "off": 6.0, "streaming": 2.0, "prefill": 9.0}
AUDIT = record_dtype(HEADS)


class Echo(Task):
    """Documents of a few questions; the answer is the key's value, and the key is the prompt's last token."""

    name = "echo"
    questions = 2

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        rng = np.random.default_rng(seed)
        out = []
        for i in range(count):
            document, question = divmod(i, self.questions)
            if question == 0:
                words = (needle.BOS, *(needle.FIRST_WORD + rng.integers(0, needle.WORDS, (length or 64) - 2)).tolist())
            key = int(rng.integers(0, 100))
            prompt = (*words, needle.FIRST_KEY + key)
            out.append(Sample(f"{i}", prompt, (f"v{key}",), 3, f"d{document}"))
        return out

    def score(self, sample: Sample, output: str) -> float:
        return float(sample.references[0] in output.split())


class Alone(Echo):
    name = "alone"

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        return [Sample(s.id, s.prompt, s.references, 3) for s in super().samples(codec, length, count, seed)]


class Forced(Echo):
    name = "forced"

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        found = super().samples(codec, length, count, seed)
        return [Sample(s.id, s.prompt, (), 1, meta={"targets": 4}) for s in found]


class World(Suite):
    name = "world"
    lengths = True

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        return [Echo(), Alone(), Forced()]


def model_folder(folder: Path, positions: int = 4096) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": positions}))
    vocabulary = {symbol: i for i, symbol in enumerate(needle.VOCABULARY)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class FakeEngine:
    """The parts of SGLang's engine that the harness uses. Policy "streaming" answers v0, all others the truth. The
    probability of a token is the confidence of its policy; the first token comes from a prefill, with equal probability
    under every policy."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.closed = False
        self.interrupt_at: int | None = None
        self.records: list[NDArray[Any]] = []
        self.forgotten: list[int] = []  # batches before each flush

    def flush_cache(self) -> SimpleNamespace:
        self.forgotten.append(len(self.batches))
        return SimpleNamespace(success=True)

    def generate(
        self,
        input_ids: Sequence[list[int]],
        sampling_params: Sequence[dict[str, Any]],
        return_logprob: bool,
        top_logprobs_num: Sequence[int],
        custom_logit_processor: Sequence[str | None] | None = None,
    ) -> list[dict[str, Any]]:
        assert return_logprob
        if len(self.batches) == self.interrupt_at:
            raise KeyboardInterrupt
        self.batches.append([{"ids": i, **p} for i, p in zip(input_ids, sampling_params, strict=True)])
        processors = custom_logit_processor or [None] * len(input_ids)
        jobs = zip(input_ids, sampling_params, top_logprobs_num, processors, strict=True)
        return [self._answer(*job) for job in jobs]

    def shutdown(self) -> None:
        self.closed = True

    def _answer(self, ids: list[int], params: dict[str, Any], top: int, processor: str | None) -> dict[str, Any]:
        assert params["temperature"] == 0
        custom = params.get("custom_params", {})
        policy = custom.get("fluxion_policy", "off")
        forced = custom.get("forced")
        assert (forced is not None) == (processor is not None) == params["ignore_eos"]
        value = 0 if policy == "streaming" else ids[-1] - needle.FIRST_KEY
        tokens = forced or [needle.ANSWER, needle.FIRST_VALUE + value, needle.EOS][: params["max_new_tokens"]]
        for _ in tokens[1:]:
            if policy != "off":
                self._record(policy, len(ids))
        rows = [self._distribution(token, policy if step else "prefill") for step, token in enumerate(tokens)]
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if forced:
            meta[NOTES] = [[row[token], list(range(VOCABULARY)), row] for token, row in zip(tokens, rows, strict=True)]
        else:
            order = [np.argsort(row)[::-1][:top] for row in rows]
            meta["output_top_logprobs"] = [
                [(row[i], int(i), None) for i in best] for row, best in zip(rows, order, strict=True)
            ]
            meta["output_token_logprobs"] = [(row[t], t, None) for t, row in zip(tokens, rows, strict=True)]
        return {"output_ids": tokens, "meta_info": meta}

    def _distribution(self, token: int, policy: str) -> list[float]:
        logits = np.zeros(VOCABULARY)
        logits[token] = CONFIDENCE.get(policy, 4.0)
        return list(logits - np.log(np.exp(logits).sum()))

    def _record(self, policy: str, length: int) -> None:
        share = {"full": 100, "streaming": 0}.get(policy, 10)
        error = {"full": 0.0, "streaming": 0.5}.get(policy, 0.125)
        rows = [(policy.encode(), layer, length, 48, share, share // 10, 100, [error] * HEADS) for layer in (0, 1)]
        self.records.append(np.array(rows, AUDIT))


class FakeServer(Server):
    """The harness's server on a fake engine; its audit needs no file."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine, VOCABULARY)
        self.fake = engine

    def audited(self) -> list[NDArray[Any]]:
        found, self.fake.records = self.fake.records, []
        return found


class Starter:
    """Starts fake engines and records them."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.started: list[tuple[str, Needs]] = []
        self.engines: list[FakeEngine] = []
        self._interrupt_at = interrupt_at

    def __call__(self, policy: str, needs: Needs) -> Server:
        self.started.append((policy, needs))
        self.engines.append(engine := FakeEngine())
        engine.interrupt_at = self._interrupt_at
        return FakeServer(engine)
