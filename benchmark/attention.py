"""Attention time of decode steps by policy, without a server: the engine on q, k and v of the bundled model.

    python benchmark/attention.py                    # the bundled model; some minutes on two cores
    python benchmark/attention.py --models random    # random KV in the shape of Llama-3.1-8B, two layers
    python benchmark/attention.py --quick

The requests share a document. Each has its own copy in the host pool, filled as prefill fills it, and asks its own
question. Steps decode the tokens of the right answer with the queries that the model has there, so all policies see the
same input. Policies take turns, so that drift of the machine affects all alike. The first step of a turn does not
count: it measures anchors (with a column of their own), evaluates prefills for policies with memory, and refills caches
that the previous policy displaced. Results go to attention.json in benchmark/results/<machine>, or with --name to
attention_NAME.json, cell by cell. An interrupted run continues there.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import common
from one_batch import BATCHES, BEST_FIXED, LENGTHS, QUICK_LENGTHS

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # as in serving; before torch is imported

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from fluxion_sglang.commands.needle import needle_prompt
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.workers import create_workers
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.policy import Context, Needs, Policy, parse_spec
from fluxion_sglang.predictor.artifact import load
from fluxion_sglang.predictor.features import NAMES

POLICIES = ("full", "fixed:16:0.05", "fixed:32:0.10", BEST_FIXED, "anchor", "fluxion")
MODELS = ("needle", "random")
TURNS = 15
RANDOM = KVShape(layers=2, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
RANDOM_GROUP = 4
RANDOM_STEPS = 6
HEARD = 32
"""Queries kept from the end of a document: prefill passes the last ones to policies (`policy.base.TOLD`)."""
COUNTS = ("tokens_read", "middle_tokens", "tile_bytes", "metadata_bytes")


class States(NamedTuple):
    """Inputs of one attention layer after RoPE, in the model's dtype.

    Attributes:
        q: [Hq, T, D] of the given tokens. k, v: [H, S, D], S >= T: tokens of the cache come first.
        scale: multiplies q.k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def capture(model: Any, tokens: list[int], cache: Any = None) -> list[States]:
    """States of every layer of a Transformers model for `tokens`.

    Args:
        cache: a Transformers cache whose tokens come first; `tokens` are added to it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scale = float(kwargs.get("scaling") or query.shape[-1] ** -0.5)
        found.append(States(query[0], key[0], value[0], scale))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("fluxion_capture", attention)
    # Transformers builds no mask for an attention name without a mask function. Tokens after a cache would then see
    # wrong ones.
    AttentionMaskInterface.register("fluxion_capture", sdpa_mask)
    model.set_attn_implementation("fluxion_capture")
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
    return found


@dataclass(frozen=True)
class Requests:
    """KV and queries of requests of `length` tokens: a shared document and a question each. Lists hold one entry a
    layer.

    Attributes:
        document: (k, v), [S, H, D] each.
        document_q: [HEARD, Hq, D], queries of the document's last tokens.
        tails: by request, (q [T, Hq, D], k, v [T, H, D]) of its question and of the answer that is decoded.
        scale: multiplies q.k.
    """

    length: int
    document: list[tuple[Tensor, Tensor]]
    document_q: list[Tensor]
    tails: list[list[tuple[Tensor, Tensor, Tensor]]]
    scale: float

    @property
    def shape(self) -> KVShape:
        k, _ = self.document[0]
        return KVShape(len(self.document), k.shape[1], k.shape[2], k.dtype)

    @property
    def q_heads(self) -> int:
        return self.tails[0][0][0].shape[1]

    @property
    def asked(self) -> int:
        """Tokens of a question."""
        return self.length - len(self.document[0][0])

    @property
    def steps(self) -> int:
        return len(self.tails[0][0][0]) - self.asked


def needle_requests(length: int, count: int) -> Requests:
    """`count` questions about one document with their right answers, as the bundled model computes them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(common.NEEDLE, dtype=torch.bfloat16).eval()
    prompt = needle_prompt(length)
    document, cache = list(prompt.document), DynamicCache()

    def rows(states: States, first: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.transpose(0, 1) for part in (states.q, states.k[:, first:], states.v[:, first:]))
        return q.clone(), k.clone(), v.clone()

    of_document = capture(model, document, cache)
    tails = []
    for question in prompt.questions[:count]:
        # The query of the answer's last token is not needed.
        tokens = [*question.token_ids, *question.answer_ids[:-1]]
        tails.append([rows(states, len(document)) for states in capture(model, tokens, cache)])
        cache.crop(-len(tokens))
    found = [rows(states, 0) for states in of_document]
    return Requests(length, [kv for _, *kv in found], [q[-HEARD:] for q, *_ in found], tails, of_document[0].scale)


def random_requests(length: int, count: int) -> Requests:
    """Requests of normal random numbers: attention without structure, for times only."""
    torch.manual_seed(0)
    shape, tokens = RANDOM, 1 + RANDOM_STEPS

    def randn(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, shape.head_dim, dtype=shape.dtype)

    layers = range(shape.layers)
    document = [(randn(length - 1, shape.kv_heads), randn(length - 1, shape.kv_heads)) for _ in layers]
    document_q = [randn(HEARD, shape.kv_heads * RANDOM_GROUP) for _ in layers]
    heads = (shape.kv_heads * RANDOM_GROUP, shape.kv_heads, shape.kv_heads)
    tails = [[tuple(randn(tokens, h) for h in heads) for _ in layers] for _ in range(count)]
    return Requests(length, document, document_q, tails, shape.head_dim**-0.5)  # type: ignore[arg-type]


SOURCES: dict[str, Callable[[int, int], Requests]] = {"needle": needle_requests, "random": random_requests}


def policies_of(model: str, specs: Sequence[str]) -> dict[str, Policy]:
    """Policies by spec. Random numbers would mislead anchors and predictors, so only `needle` gets policies that need
    them."""
    context = Context(predictor=lambda tau: load(common.PREDICTOR, features=NAMES, tau=tau))
    found = {spec: parse_spec(spec, context) for spec in specs}
    return {spec: policy for spec, policy in found.items() if model == "needle" or policy.needs is Needs.NOTHING}


class Clock:
    """Seconds spent in methods, by their names."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    def watch(self, owner: object, *names: str) -> None:
        """Time these methods of this object from now on."""
        for name in names:
            setattr(owner, name, partial(self._timed, name, getattr(owner, name)))

    def _timed(self, name: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **named)
        finally:
            self.spent[name] += time.perf_counter() - start


class Bench:
    """A batch of `batch` requests with pool, windows and engine, configured as in a server with default options."""

    def __init__(self, requests: Requests, batch: int) -> None:
        self.requests, self.batch = requests, batch
        config, shape = FluxionConfig(), requests.shape
        pages = -(-(requests.length + requests.steps) // PAGE)
        self.pool = HostPool(
            shape, batch * pages * PAGE, Placement(config.sinks, config.window), create_workers(config)
        )
        self.windows = Windows(self.pool, batch, "cpu")
        self.engine = DecodeEngine(
            self.pool,
            self.windows,
            parse_spec("full"),
            [],
            config,
            q_heads=requests.q_heads,
            max_requests=batch,
            max_tokens=pages * PAGE,
        )
        self.device = HostDevice(self.pool, self.windows, self.engine)
        self.rows = torch.arange(batch)
        self.table = (1 + torch.arange(batch * pages, dtype=torch.int32)).view(batch, pages)
        self.clock = Clock()
        self.clock.watch(self.engine.native, "layer_resident", "layer_begin", "layer_finish")
        self.clock.watch(self.engine.anchors, "refresh")
        self.clock.watch(self.engine, "_observe")
        asked = requests.asked
        for layer, (k, v) in enumerate(requests.document):
            for row in range(batch):
                _, tail_k, tail_v = requests.tails[row][layer]
                self.pool.append(layer, self.table[row], 0, k, v)
                self.pool.append(layer, self.table[row], len(k), tail_k[:asked], tail_v[:asked])
        # [step][layer]: q, k, v of the batch.
        self.tokens = [
            [
                tuple(torch.stack([tail[layer][part][step] for tail in requests.tails[:batch]]) for part in range(3))
                for layer in range(shape.layers)
            ]
            for step in range(asked, asked + requests.steps)
        ]

    def rewind(self, policy: Policy) -> None:
        """Restore the state after a prefill under this policy: windows without the answer, nothing measured or
        remembered."""
        length, asked = self.requests.length, self.requests.asked
        for row in range(self.batch):
            self.engine.forget(row)
            self.windows.heal(row, length, self.table[row])
            for layer, (q, _, _) in enumerate(self.requests.tails[row]):
                queries = torch.cat([self.requests.document_q[layer], q[:asked]])
                self.engine.prefilled(layer, row, length, queries, policy)

    def step(self, index: int, policy: Policy, outputs: list[Tensor] | None = None) -> None:
        """Decode token `index` of the answers; append [B, Hq, D] float32 of every layer to `outputs`."""
        lengths = torch.full((self.batch,), self.requests.length + index + 1)
        self.engine.begin_step(self.rows, lengths, self.table, [policy] * self.batch)
        for layer, (q, k, v) in enumerate(self.tokens[index]):
            self.device.decode(layer, q, k, v, self.requests.scale)
            if outputs is not None:
                outputs.append(torch.empty(q.shape, dtype=torch.float32))
                self.engine.native.result(outputs[-1])

    def exact(self) -> Tensor:
        """Full attention by torch, [steps, layers, B, Hq, D] float32."""
        requests, asked = self.requests, self.requests.asked
        see = torch.ones(requests.steps, requests.length + requests.steps, dtype=torch.bool).tril(requests.length)
        layers = []
        for layer, document in enumerate(requests.document):
            found = []
            for tail in requests.tails[: self.batch]:
                q, *new = tail[layer]
                k, v = (torch.cat(pair).transpose(0, 1)[None].float() for pair in zip(document, new, strict=True))
                q = q[asked:].transpose(0, 1)[None].float()
                o = F.scaled_dot_product_attention(q, k, v, see, scale=requests.scale, enable_gqa=True)
                found.append(o[0].transpose(0, 1))
            layers.append(torch.stack(found, 1))
        return torch.stack(layers, 1)

    def errors(self, policy: Policy, exact: Tensor) -> Tensor:
        """|o_h - exact_h| / max over heads h' of |exact_h'| (Fluxion, Eq. 2): [steps, layers, B, Hq]."""
        outputs: list[Tensor] = []
        self.rewind(policy)
        for index in range(self.requests.steps):
            self.step(index, policy, outputs)
        got = torch.stack(outputs).view_as(exact)
        return (got - exact).norm(dim=-1) / exact.norm(dim=-1).amax(-1, keepdim=True)

    def turn(self, policy: Policy) -> list[dict[str, float]]:
        """Decode the answers; for every step, seconds by phase and the increments of `DecodeEngine.stats`."""
        self.rewind(policy)
        found = []
        for index in range(self.requests.steps):
            before, spent = self.engine.stats(), self.clock.spent
            spent.clear()
            start = time.perf_counter()
            self.step(index, policy)
            whole = time.perf_counter() - start
            parts = {
                "resident": spent["layer_resident"],
                "features": spent["_observe"],
                "plan": spent["plan"] + spent["decoded"],
                "queue": spent["layer_begin"] + spent["layer_finish"],
            }
            other = whole - sum(parts.values())
            seconds = {"attention": whole, **parts, "other": other, "anchor": spent["refresh"]}
            found.append(seconds | {name: count - before[name] for name, count in self.engine.stats().items()})
        return found


def measure(requests: Requests, batch: int, policies: dict[str, Policy], turns: int) -> list[dict[str, Any]]:
    """One row a policy. Times (ms) and bytes are per step and layer; times are medians over the steps.

    attention: the whole step. Its parts are: resident and features, for policies that see the heads first (else
    resident attention is in queue); plan, for `fluxion` the network and the choice of blocks, and what a policy learns
    from a finished layer; queue, with the merge; other, the begin of the step and Python. anchor: what the first step
    spends on each request.
    """
    bench = Bench(requests, batch)
    exact = bench.exact()
    errors = {}
    for spec, policy in policies.items():
        bench.clock.watch(policy, "plan", "decoded")
        errors[spec] = bench.errors(policy, exact)
    turned: dict[str, list[list[dict[str, float]]]] = {spec: [] for spec in policies}
    for _, (spec, policy) in itertools.product(range(turns), policies.items()):
        turned[spec].append(bench.turn(policy))
    layers = requests.shape.layers
    rows = []
    for spec, taken in turned.items():
        steps = [step for steps in taken for step in steps[1:]]
        ms = {name: median(step[name] for step in steps) * 1e3 / layers for name in common.PHASES}
        read = {name: sum(step[name] for step in steps) for name in COUNTS}
        tile_bytes, metadata_bytes = (round(read[name] / len(steps) / layers) for name in COUNTS[2:])
        anchored, first = policies[spec].needs is Needs.FEATURES, median(steps[0]["anchor"] for steps in taken)
        rows.append(
            {
                "policy": spec,
                "batch": batch,
                **{f"{name}_ms": round(value, 4) for name, value in ms.items()},
                "anchor_ms": round(first * 1e3 / layers / batch, 4) if anchored else None,
                "read": round(read["tokens_read"] / max(read["middle_tokens"], 1), 5),
                "tile_bytes": tile_bytes,
                "metadata_bytes": metadata_bytes,
                "gb_per_s": round((tile_bytes + metadata_bytes) / ms["attention"] / 1e6, 2),
                "error_mean": float(f"{errors[spec].mean():.3g}"),
                "error_max": float(f"{errors[spec].max():.3g}"),
                "layers": layers,
                "steps": len(steps),
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']} {row['length']:>6,} x{row['batch']} {row['policy']:14}{row['attention_ms']:8.3f} ms/layer  "
        f"read {row['read']:6.1%}  {row['gb_per_s']:5.1f} of {row['memory_read_gb_per_s']:.0f} GB/s  "
        f"error {row['error_mean']:.1e} (max {row['error_max']:.1e})"
    )


def main() -> None:
    parser = common.arguments(__doc__, "2K and 4K", fresh=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=("needle",))
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--name", help="of a list of policies whose results are apart, in attention_NAME.json")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--turns", type=int, default=TURNS, help="of each policy in each cell")
    args = parser.parse_args()
    lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    turns = min(args.turns, 3) if args.quick else args.turns
    path = common.result_path(args, f"attention_{args.name}" if args.name else "attention")
    settings = {"turns": turns, "policies": list(args.policies)}
    data = common.resume(path, {**common.header("attention"), **settings}, (*common.SAME, *settings), args.fresh)
    done = {(row["model"], row["length"], row["batch"]) for row in data["rows"]}
    with tqdm(total=len(args.models) * len(lengths) * len(args.batches), unit="cell") as bar:
        for model, length in itertools.product(args.models, lengths):
            missing = [batch for batch in args.batches if (model, length, batch) not in done]
            bar.update(len(args.batches) - len(missing))
            requests = SOURCES[model](length, max(missing)) if missing else None
            for batch in missing:
                bar.set_description(f"{model} {length} x{batch}")
                load_before = os.getloadavg()[0]
                cell = {"model": model, "length": length, "load_before": round(load_before, 2)}
                cell["memory_read_gb_per_s"] = common.memory_read_gb_per_s(data["machine"]["cores"])
                assert requests is not None
                rows = [{**cell, **row} for row in measure(requests, batch, policies_of(model, args.policies), turns)]
                data["rows"] += rows
                common.save(path, data)
                tqdm.write("\n".join(map(line, rows)))
                bar.update()
    print(f"{path.relative_to(common.ROOT)}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
