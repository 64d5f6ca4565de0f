"""`python -m benchmark [--quick]` (what `make bench` runs): every benchmark, then tables and plots."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `python -m benchmark` as for the scripts beside it
import common
import rivals

from fluxion_sglang.scoring.model_files import public

HERE = Path(__file__).parent
GRID = [f"fixed:{blk}:{budget}" for blk in (16, 32, 64, 128) for budget in ("0.02", "0.05", "0.10", "0.25")]
POLICIES = ",".join(
    ["full", "streaming", "oracle:0.05", *GRID, "score95", "output10", "anchor", "fluxion", "labels:0.10"]
)
# In the shape of the paper's Fig. 9: the criterion of the budgets, and what the selector may choose from.
ABLATIONS = ",".join(
    ["full", "labels:score95", "labels:output10", "labels:0.10"]
    + [f"{name}:0.10:{choice}" for name in ("labels", "fluxion") for choice in ("16:all", "32:all", "any:all", "any")]
)
FEW = "full,streaming,fixed:16:0.05,anchor,fluxion"
SPARSE = "full,streaming,oracle,fixed:16:0.05,fixed:32:0.02,anchor,fluxion"
FAR = "niah_single_2,niah_multikey_1,niah_multikey_2,niah_multiquery,vt"
LARGE = "full,fixed:16:0.35,fixed:16:0.50,fixed:16:0.65,fixed:16:0.80,fluxion,fluxion:0.20"
# PSA's Fig. 5: what is read at 98% of full quality, by threshold, against fixed top-k, by budget.
PSA = ",".join(
    ["full"]
    + [f"fixed:32:{budget}" for budget in ("0.01", "0.02", "0.05", "0.10", "0.20", "0.35", "0.50", "0.70", "0.90")]
    + [f"psa:{epsilon}:32" for epsilon in ("0.30", "0.50", "0.70", "0.80", "0.90", "0.95", "0.98", "0.99", "0.999")]
    + [f"psa:{epsilon}:32:quest" for epsilon in ("0.30", "0.50", "0.70", "0.90", "0.95", "0.99")]
)
GUARDED = "full,fixed:16:0.02,anchor,fluxion"
# In the shape of HGCA's Table 1: perplexity by beta, and by the share of a text of 4K that is resident.
HGCA = "full,hgca:0.25,hgca:0.5,hgca:0.75,hgca:1"
RESIDENT = {"0.08": 256, "0.25": 960, "0.50": 1984, "0.75": 3008}  # with 64 sinks
# A model of another shape, which `python -m benchmark.needle_model --recipe second --into build/second` makes.
SECOND = "build/second"
# Public checkpoints on real text (`make checkpoints`): the curve of `sketch`, and what else there is.
PUBLIC_POLICIES = ",".join(
    ["full", "sketch"]
    + [f"sketch:{eps}" for eps in ("0.02", "0.10", "0.20", "0.30")]
    + ["fixed:16:0.25", "fixed:16:0.05", "streaming", "psa", "hgca", "lfps"]
)
PUBLIC = {
    name: [
        *("--suite", suite, "--model", name.partition("_")[0], "--data", "handbook", "--lengths", lengths),
        *("--samples", samples, "--policies", policies, "--dtype", "bfloat16"),
        *(("--fluxion-config", '{"guard": 0.03}') if "guard" in name else ()),
    ]
    for name, suite, lengths, samples, policies in (
        ("smollm2", "perplexity", "4096,8190", "16", PUBLIC_POLICIES),
        ("gemma3", "perplexity", "8192", "16", PUBLIC_POLICIES),
        ("gemma3_16k", "perplexity", "16384", "16", PUBLIC_POLICIES),
        ("gemma3_32k", "perplexity", "32766", "16", PUBLIC_POLICIES),
        ("smollm2_long", "long", "8190", "2", "full,sketch,sketch:0.10"),
        ("gemma3_long", "long", "21845", "2", "full,sketch,sketch:0.10"),
        ("smollm2_yardsticks", "perplexity", "8190", "8", "full,labels,oracle:0.05,anchor"),
        ("gemma3_yardsticks", "perplexity", "8192", "8", "full,labels,oracle:0.05,anchor"),
        ("smollm2_guard", "perplexity", "8190", "8", "full,fixed:16:0.05"),
        ("gemma3_guard", "perplexity", "8192", "8", "full,fixed:16:0.05"),
    )
}
# What KV in 8 bits costs: the same questions to both pools.
STORED = {
    "kv": ["--suite", "ruler", "--lengths", "4k,8k", "--samples", "24"],
    "kv_far": ["--suite", "ruler", "--lengths", "31k", "--samples", "24"],
    "kv_extraction": ["--suite", "extraction", "--lengths", "4k,8k", "--samples", "24"],
}
# Result file: options of `fluxion bench quality`. In float32 where nothing is said: differences are the policies', not
# of rounding. A sparse prefill is compared in the type that it is for.
QUALITY = {
    "ruler": ["--suite", "ruler", "--lengths", "4k,8k", "--samples", "6", "--policies", POLICIES],
    rivals.NAME: rivals.quality_options(),
    "large": ["--suite", "ruler", "--lengths", "4k,8k", "--samples", "12", "--policies", LARGE],
    **{
        f"sketch{name}": [
            *("--suite", suite, "--lengths", lengths, "--samples", samples, "--seed", "16"),
            *("--policies", f"full,{others}{common.SKETCH}"),
            *(("--model", SECOND) if "other" in name else ()),
            *(("--dtype", dtype) if dtype else ()),
            *(("--tasks", "fwe") if "fwe" in name else ()),
        ]
        for name, suite, lengths, samples, others, dtype in (
            ("", "ruler", "4k,8k", "24", "fluxion,", ""),
            ("_far", "ruler", "31k", "8", "", ""),
            ("_extraction", "extraction", "4k,8k", "24", "fluxion,", ""),
            ("_perplexity", "perplexity", "4k,8k", "24", "fluxion,", ""),
            ("_other", "ruler", "4k,8k", "24", "", ""),
            ("_other_far", "ruler", "31k", "4", "", ""),
            ("_other_bfloat16", "ruler", "4k,8k", "4", "", "bfloat16"),
            ("_other_fwe", "ruler", "4k,8k", "96", "", ""),
            ("_other_extraction", "extraction", "4k,8k", "24", "", ""),
            ("_other_perplexity", "perplexity", "4k,8k", "24", "", ""),
            ("_bfloat16", "ruler", "4k,8k", "4", "fluxion,", "bfloat16"),
        )
    },
    # The least that its heads need, and a fixed share for each.
    "other": [
        *("--suite", "ruler", "--lengths", "4k", "--samples", "8", "--seed", "7"),
        *("--policies", "full,labels,fixed:16:0.10", "--model", SECOND),
    ],
    "psa": ["--suite", "ruler", "--lengths", "4k", "--samples", "8", "--policies", PSA],
    "ablations": ["--suite", "ruler", "--lengths", "4k", "--samples", "4", "--policies", ABLATIONS],
    "guard_0.03": [
        *("--suite", "ruler", "--lengths", "4k,8k", "--samples", "6", "--policies", GUARDED),
        *("--fluxion-config", '{"guard": 0.03}'),
    ],
    "far": ["--suite", "ruler", "--lengths", "16k,31k", "--samples", "4", "--tasks", FAR, "--policies", FEW],
    "extraction": ["--suite", "extraction", "--lengths", "4k", "--samples", "8", "--policies", SPARSE],
    **{
        f"hgca_{share}": [
            *("--suite", "perplexity", "--lengths", "4k", "--samples", "8", "--policies", HGCA),
            *("--fluxion-config", f'{{"window": {window}}}'),
        ]
        for share, window in RESIDENT.items()
    },
    **{
        f"prefill_{budget}": [
            *("--suite", "ruler", "--lengths", "31k", "--samples", "8", "--seed", "7", "--policies", "full"),
            *("--dtype", "bfloat16", "--fluxion-config", f'{{"prefill_budget": {budget}}}'),
        ]
        for budget in ("1.0", "0.15")
    },
    **{
        f"{name}_{dtype}": [
            *(*options, "--seed", "11", "--policies", "full", "--dtype", "bfloat16"),
            *("--fluxion-config", f'{{"kv_dtype": "{dtype}"}}'),
        ]
        for name, options in STORED.items()
        for dtype in ("auto", "int8")
    },
    "perplexity": ["--suite", "perplexity", "--lengths", "4k", "--samples", "8", "--policies", SPARSE],
    **PUBLIC,
}


def quality(name: str, results: Path, quick: bool, fresh: bool) -> list[str]:
    """The command that measures on the bundled model what is published as quality_NAME.json."""
    options = list(QUALITY[name])
    if quick:
        for option, value in (("--lengths", "2k"), ("--samples", "2")):
            options[options.index(option) + 1] = value
    out = results / (f"quality_{name}_quick.json" if quick else f"quality_{name}.json")
    options += [] if "--dtype" in options else ["--dtype", "float32"]
    options += ["--device", "cpu", "--out", str(out), *(["--fresh"] if fresh else [])]
    return [sys.executable, "-m", "fluxion_sglang.cli", "bench", "quality", *options]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark", description="Every benchmark, then the tables.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all of them run")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing result files")
    parser.add_argument(
        "--only", choices=["speed", "quality", "public"], help="one half; public: quality of public checkpoints alone"
    )
    args = parser.parse_args()
    results = common.RESULTS / common.machine_name()
    if args.only in (None, "speed"):
        passed = [flag for flag, on in (("--quick", args.quick), ("--fresh", args.fresh)) if on]
        for script in ("kernels.py", "attention.py", "one_batch.py", "schedulers.py", "speculation.py"):
            _run([sys.executable, str(HERE / script), *passed])
        for script in ("attention.py", "one_batch.py"):
            _run([sys.executable, str(HERE / script), *rivals.speed_options(args.quick), *passed])
        for script in (
            "forks.py",
            "peers.py",
            "linears.py",
            "step_graphs.py",
            "prefill.py",
            "lfps_selection.py",
            "fairness.py",
            "canary.py",
            "restart.py",
            "first_token.py",
            "pool_scale.py",
        ):  # nothing to continue
            _run([sys.executable, str(HERE / script), *passed[: args.quick]])
        _run([sys.executable, str(HERE / "forecast"), "measure", *passed[: args.quick]])
        if not args.quick:  # where steps were not foretold well enough, nothing is said of other machines
            _run([sys.executable, str(HERE / "forecast"), "machines"], must=False)
    if args.only != "speed":
        for name in PUBLIC if args.only == "public" else QUALITY:
            missing = SECOND if "other" in name else public(name.partition("_")[0]) if name in PUBLIC else "."
            if not Path(missing).is_dir():
                print(f"{name} is left out, because there is no {missing}")
                continue
            _run(quality(name, results, args.quick, args.fresh))
    if not args.quick:
        drawn = [results / f"quality_{name}.json" for name in ("ruler", "psa", rivals.NAME)]
        for path in filter(Path.exists, drawn):
            _run([sys.executable, "-m", "fluxion_quality.plot", str(path)])
        for script in ("tables.py", "plot.py"):
            _run([sys.executable, str(HERE / script)])


def _run(command: list[str], must: bool = True) -> None:
    print(f"$ {' '.join(common.relative(command))}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code and must:
        sys.exit(code)


if __name__ == "__main__":
    main()
