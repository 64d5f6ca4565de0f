"""Every benchmark: its name, what it measures, and how to start it.

`fluxion bench`, `python -m benchmark`, `make bench` and `make quality` read this list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import common

from fluxion_sglang.scoring.model_files import public

SECOND = "build/second"
"""A model of another shape, made by `python -m benchmark.needle_model --recipe second --into build/second`."""
QUICK = "--quick"


class _Rivals(NamedTuple):
    """All policies under one harness: quality, attention and TPOT of one model."""

    name: str = "rivals"
    model: str = "needle"
    lengths: tuple[int, ...] = (4096, 8192)
    batches: tuple[int, ...] = (1, 8)
    policies: tuple[str, ...] = (
        *("full", "streaming", "oracle:0.05", "fixed:16:0.05", "fixed:16:0.10", "fixed:16:0.25", "fixed:32:0.10"),
        *("score95", "output10", "anchor", "fluxion"),
        *("hgca:0.25", "hgca:1", "psa:0.95", "psa:0.99", "lfps:0.05", "lfps:0.10"),
    )


RIVALS = _Rivals()


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        what: what it measures.
        group: speed, quality or public, which `python -m benchmark` runs; apart: runs by name only.
        words: command line after the interpreter.
        lengths: arguments that --quick leaves out, because the benchmark has its own short lengths.
        continues: an interrupted run continues its result file, and --fresh starts over.
        model: folder that must exist.
    """

    name: str
    what: str
    group: str
    words: tuple[str, ...]
    lengths: tuple[str, ...] = ()
    continues: bool = False
    model: Path = common.ROOT

    def command(self, quick: bool, fresh: bool) -> list[str]:
        words = [*self.words, *(() if quick else self.lengths), *([QUICK] if quick else [])]
        return [sys.executable, *words, *(["--fresh"] if fresh and self.continues else [])]


class Quality(Benchmark):
    """A run of `fluxion bench quality`. The default is float32, where differences come from policies and not from
    rounding."""

    def command(self, quick: bool, fresh: bool) -> list[str]:
        options = list(self.words)
        for option, value in (("--lengths", "2k"), ("--samples", "2")) if quick else ():
            options[options.index(option) + 1] = value
        out = common.RESULTS / common.machine_name() / f"{self.name}{'_quick' if quick else ''}.json"
        options += [] if "--dtype" in options else ["--dtype", "float32"]
        options += ["--device", "cpu", "--out", str(out), *(["--fresh"] if fresh else [])]
        return [sys.executable, "-m", "fluxion_sglang.cli", "bench", "quality", *options]


def _quality(name: str, suite: str, lengths: str, samples: object, policies: str, *more: str, group: str) -> Quality:
    words = ("--suite", suite, "--lengths", lengths, "--samples", str(samples), "--policies", policies, *more)
    model = Path(more[more.index("--model") + 1]) if "--model" in more else common.ROOT
    return Quality(f"quality_{name}", f"{suite}, {lengths}", group, words, model=model)


def _script(name: str, what: str, *words: str, group: str = "speed", **others: Any) -> Benchmark:
    script = str(Path(__file__).with_name(f"{name.partition(' ')[0]}.py"))
    return Benchmark(name.replace(" ", "_"), what, group, (script, *words), **others)


def _of_rivals() -> list[Benchmark]:
    words = ["--name", RIVALS.name, "--models", RIVALS.model, "--batches", *map(str, RIVALS.batches)]
    words += ["--policies", *RIVALS.policies]
    lengths = ("--lengths", *map(str, RIVALS.lengths))
    return [
        _script(f"{name} {RIVALS.name}", f"the same of all policies ({of})", *words, lengths=lengths, continues=True)
        for name, of in (("attention", "a layer"), ("one_batch", "a token"))
    ]


SPEED: Sequence[Benchmark] = (
    _script("kernels", "kernels and layer steps against the limit of the memory", continues=True),
    _script("attention", "attention of a layer, by policy", continues=True),
    _script("one_batch", "time per output token, with the flag and without", continues=True),
    _script("schedulers", "a layer's attention under every scheduler", continues=True),
    *_of_rivals(),
    _script("forks", "branches of one document, decoded together"),
    _script("peers", "attention by other libraries, beside ours"),
    _script("linears", "linear layers of a decode step, beside others'"),
    _script("experts", "the experts of a layer in a decode step, beside SGLang's loop"),
    _script("step_graphs", "decode steps of small models with step graphs and without"),
    _script("prefill", "attention of a prompt, beside torch's"),
    _script("fairness", "what a request pays for the policies of those beside it"),
    _script("canary", "what the option `canary` costs"),
    _script("restart", "the first token of a prompt that is in files"),
    _script("first_token", "the first token: plain SGLang, exact and sparse prefill"),
    _script("pool_scale", "what grows with the tokens of a host pool"),
    _script("int8_weights", "weights of 8 bits: answers and times of the public models", group="apart"),
    _script("same_file", "the same GGUF file in llama.cpp and here", group="apart"),
    _script("slices", "decode steps and prompts of large models, on a few of their layers", group="apart"),
    _script("stall", "what a long prompt does to others", group="apart"),
    _script("race", "the same model in llama.cpp, vLLM and others, which it installs", group="apart", continues=True),
    _script("gpu_link", "the link between CPU and GPU", group="apart"),
)

_GRID = ",".join(f"fixed:{blk}:{budget}" for blk in (16, 32, 64, 128) for budget in ("0.02", "0.05", "0.10", "0.25"))
_POLICIES = f"full,streaming,oracle:0.05,{_GRID},score95,output10,anchor,fluxion,labels:0.10"
_FEW = "full,streaming,fixed:16:0.05,anchor,fluxion"
_SPARSE = "full,streaming,oracle,fixed:16:0.05,fixed:32:0.02,anchor,fluxion"
_LARGE = "full,fixed:16:0.35,fixed:16:0.50,fixed:16:0.65,fixed:16:0.80,fluxion,fluxion:0.20"
_FAR = "niah_single_2,niah_multikey_1,niah_multikey_2,niah_multiquery,vt"
_SKETCH, _BOTH = f"full,{common.SKETCH}", f"full,fluxion,{common.SKETCH}"
_OTHER, _BF16 = ("--seed", "16", "--model", SECOND), ("--dtype", "bfloat16")
_SEED = ("--seed", "16")
# The curve of `sketch` on public checkpoints and real text (`make checkpoints`), beside other policies.
_PUBLIC = (
    "full,sketch,sketch:0.02,sketch:0.10,sketch:0.20,sketch:0.30,fixed:16:0.25,fixed:16:0.05,streaming,psa,hgca,lfps"
)


def _configured(seed: int, **config: object) -> tuple[str, ...]:
    return ("--seed", str(seed), *_BF16, "--fluxion-config", json.dumps(config))


_RUNS: Sequence[Sequence[Any]] = (
    ("ruler", "ruler", "4k,8k", 6, _POLICIES),
    (RIVALS.name, "ruler", ",".join(f"{n // 1024}k" for n in RIVALS.lengths), 6, ",".join(RIVALS.policies)),
    ("large", "ruler", "4k,8k", 12, _LARGE),
    ("sketch", "ruler", "4k,8k", 24, _BOTH, *_SEED),
    ("sketch_far", "ruler", "31k", 8, _SKETCH, *_SEED),
    ("sketch_extraction", "extraction", "4k,8k", 24, _BOTH, *_SEED),
    ("sketch_perplexity", "perplexity", "4k,8k", 24, _BOTH, *_SEED),
    ("sketch_bfloat16", "ruler", "4k,8k", 4, _BOTH, *_SEED, *_BF16),
    ("sketch_other", "ruler", "4k,8k", 24, _SKETCH, *_OTHER),
    ("sketch_other_far", "ruler", "31k", 4, _SKETCH, *_OTHER),
    ("sketch_other_bfloat16", "ruler", "4k,8k", 4, _SKETCH, *_OTHER, *_BF16),
    ("sketch_other_fwe", "ruler", "4k,8k", 96, _SKETCH, *_OTHER, "--tasks", "fwe"),
    ("sketch_other_extraction", "extraction", "4k,8k", 24, _SKETCH, *_OTHER),
    ("sketch_other_perplexity", "perplexity", "4k,8k", 24, _SKETCH, *_OTHER),
    # Labels: the smallest budget that each head needs, beside a fixed share for all.
    ("other", "ruler", "4k", 8, "full,labels,fixed:16:0.10", "--seed", "7", "--model", SECOND),
    ("far", "ruler", "16k,31k", 4, _FEW, "--tasks", _FAR),
    ("extraction", "extraction", "4k", 8, _SPARSE),
    ("perplexity", "perplexity", "4k", 8, _SPARSE),
    # A sparse prefill is measured in the dtype of its use.
    *((f"prefill_{b}", "ruler", "31k", 8, "full", *_configured(7, prefill_budget=b)) for b in (1.0, 0.15)),
    # Cost of KV in 8 bits: the same questions to both kinds of pools.
    *(
        (f"{name}_{dtype}", suite, lengths, 24, "full", *_configured(11, kv_dtype=dtype))
        for name, suite, lengths in (
            ("kv", "ruler", "4k,8k"),
            ("kv_far", "ruler", "31k"),
            ("kv_extraction", "extraction", "4k,8k"),
        )
        for dtype in ("auto", "int8")
    ),
)
QUALITY: Sequence[Benchmark] = tuple(_quality(*run, group="quality") for run in _RUNS)
_LONG, _YARDSTICKS = "full,sketch,sketch:0.10", "full,labels,oracle:0.05,anchor"


def _public(name: str, suite: str, lengths: str, samples: int, policies: str, *more: str) -> Quality:
    text = ("--model", name.partition("_")[0], "--data", "handbook", *_BF16)
    return _quality(name, suite, lengths, samples, policies, *text, *more, group="public")


PUBLIC: Sequence[Benchmark] = tuple(
    _public(*run)
    for run in (
        ("smollm2", "perplexity", "4096,8190", 16, _PUBLIC),
        ("gemma3", "perplexity", "8192", 16, _PUBLIC),
        ("gemma3_16k", "perplexity", "16384", 16, _PUBLIC),
        ("gemma3_32k", "perplexity", "32766", 16, _PUBLIC),
        ("smollm2_long", "long", "8190", 2, _LONG),
        ("gemma3_long", "long", "21845", 2, _LONG),
        ("smollm2_yardsticks", "perplexity", "8190", 8, _YARDSTICKS),
        ("gemma3_yardsticks", "perplexity", "8192", 8, _YARDSTICKS),
    )
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in (*SPEED, *QUALITY, *PUBLIC)}


def model_of(benchmark: Benchmark) -> Path:
    """Folder of the benchmark's model, which may be missing."""
    return Path(public(str(benchmark.model))) if benchmark.group == "public" else benchmark.model
