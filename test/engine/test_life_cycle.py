"""Every policy through the life of requests on a real server: abort, retract, evict, share, append, flush.

One server runs under pressure: its host pool holds a few of the prompts, and SGLang retracts a request in every third
step with more than one. A sparse request that is itself retracted may answer differently, because its decoded tokens
are prefilled again, exactly. Each test therefore disturbs others and asks afterwards: the answer equals the policy's
answer on an empty server. SGLang's leak check stays on. The server's own policy, and one of the requests' policies,
comes from another package, the worked example of docs/extend.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import policy_example
import pytest
import tiny_model
import tiny_predictor
import torch
from server import Completion, Server

from fluxion_lab.granularity import select_granularity
from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy import examples

NEW = 24
POOL = 3200
"""Tokens of the host pool: three of the prompts with their answers."""
CONTEXT = 3072
PROMPT = cases.filler(900, 71)
RELATIVE = PROMPT[:640] + cases.filler(200, 72)
TURN = cases.filler(150, 73)
OTHERS = [cases.filler(700, 80 + i) for i in range(4)]
FOREIGN = "taper:0.3:0.05:8"
MECHANISMS = ("fluxion", "lfps", "sketch", FOREIGN)
"""Policies of the quick tests: one decides by features, one by tables of a prefill, one by sketches of keys, and one is
code of another package."""
policies = pytest.mark.parametrize(
    "spec",
    [spec if spec in MECHANISMS else pytest.param(spec, marks=pytest.mark.full) for spec in [*examples(), FOREIGN]],
)


def answers(got: Completion, want: list[int], spec: str) -> bool:
    """Whether an answer is right. After a cache hit, a policy that uses several queries of a prefill (`lfps`) sees
    fewer of them; then any answer of full length counts."""
    if got.cached and spec.startswith("lfps"):
        return len(got.tokens) == NEW
    return got.tokens == want


class Asker:
    """The server, and its answers when idle."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.fresh: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def ask(self, ids: list[int], spec: str | None, new: int = NEW, **extra: Any) -> Completion:
        """spec: policy; None: the server's."""
        return self.server.generate(ids, new, spec, **extra)

    def alone(self, ids: list[int], spec: str) -> list[int]:
        """The answer of an empty server; this empties it."""
        key = (spec, tuple(ids))
        if key not in self.fresh:
            self.server.flush()
            self.fresh[key] = self.ask(ids, spec).tokens
            assert len(self.fresh[key]) == NEW
        return self.fresh[key]


@pytest.fixture(scope="module")
def asker(logs: Path) -> Iterator[Asker]:
    model = tiny_model.build(logs / "tiny-model-life-cycle", kv_heads=2)
    options = {
        "policy": "taper",
        "predictor": tiny_predictor.build(logs / "tiny-predictor", model),
        "host_tokens": POOL,
        "sketches": True,
        "canary": 1.0,
        "audit": str(logs / "life-cycle.npy"),  # an audited server accepts yardsticks too
    }
    foreign = policy_example.install(logs / "taper")
    with Server(
        "--chunked-prefill-size", "256", "--context-length", str(CONTEXT), model=model, fluxion=json.dumps(options),
        env={"SGLANG_TEST_RETRACT": "1", "PYTHONPATH": policy_example.search_path(foreign)},
        log=logs / "life-cycle.log",
    ) as server:  # fmt: skip
        asker = Asker(server)
        yield asker
        server.assert_clean()
        server.assert_sound()


@policies
def test_answers_after_an_abort_are_the_same(asker: Asker, spec: str) -> None:
    want = asker.alone(PROMPT, spec)
    asker.server.aborted(PROMPT[:700], 2000, "Decode batch", f"abort-{spec}", policy=spec)
    assert answers(asker.ask(PROMPT, spec), want, spec)


@policies
def test_answers_after_retraction_and_eviction_are_the_same(asker: Asker, spec: str) -> None:
    want = asker.alone(PROMPT, spec)
    before = len(asker.server.log())
    with ThreadPoolExecutor(len(OTHERS) + 1) as pool:
        got = list(pool.map(lambda ids: asker.ask(ids, spec).tokens, [*OTHERS, PROMPT]))
    assert all(len(tokens) == NEW for tokens in got)
    assert re.search(r"Testing retraction|Retract requests", asker.server.log()[before:]), "nothing was retracted"
    assert answers(asker.ask(PROMPT, spec), want, spec)


@policies
def test_a_shared_beginning_changes_no_answer(asker: Asker, spec: str) -> None:
    """A prompt with a shared prefix finds it in the tree, during the decode of the other prompt and afterwards."""
    want, relative = asker.alone(PROMPT, spec), asker.alone(RELATIVE, spec)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda ids: asker.ask(ids, spec), [PROMPT, RELATIVE]))
    for ids, answer in ((RELATIVE, relative), (PROMPT, want)):
        again = asker.ask(ids, spec)
        assert again.cached >= 640 and answers(again, answer, spec)


@policies
def test_the_next_turn_answers_as_from_nothing(asker: Asker, spec: str) -> None:
    """The next turn of a conversation reuses the tree."""
    turn = PROMPT + asker.alone(PROMPT, spec) + TURN
    want = asker.alone(turn, spec)
    asker.server.flush()
    asker.ask(PROMPT, spec)
    again = asker.ask(turn, spec)
    assert again.cached >= 896 and answers(again, want, spec)


@policies
def test_a_flushed_server_answers_the_same(asker: Asker, spec: str) -> None:
    want = asker.alone(PROMPT, spec)
    asker.ask(OTHERS[0], spec)
    asker.server.flush()
    again = asker.ask(PROMPT, spec)
    assert again.cached == 0 and answers(again, want, spec)


@pytest.mark.parametrize("short", [0, 1])
def test_an_answer_fills_the_context(asker: Asker, short: int) -> None:
    ids = cases.filler(CONTEXT - NEW - short, 74)
    assert len(asker.alone(ids, "full")) == NEW


def test_the_servers_policy(asker: Asker) -> None:
    """Requests without a policy follow the server's; its arguments spelled out give the same answer."""
    want = asker.alone(PROMPT, "taper:0.5:0.05:64")
    assert want not in (asker.alone(PROMPT, "full"), asker.alone(PROMPT, FOREIGN))
    asker.server.flush()
    assert asker.ask(PROMPT, None).tokens == want


def test_the_predictor_decides(asker: Asker) -> None:
    """Some groups stream and have no task; others read a part of the middle."""
    before = asker.server.metrics()
    asker.alone(PROMPT[::-1], "fluxion")
    after = asker.server.metrics()
    names = ("layers_total", 'tasks_total{executor="cpu"}', "read_tokens_total", "middle_tokens_total")
    layers, tasks, read, middle = (after[f"fluxion_{name}"] - before.get(f"fluxion_{name}", 0) for name in names)
    assert 0 < tasks < 2 * layers and 0 < read < middle


def test_the_predictor_decides_by_what_it_sees() -> None:
    """Heads that vary as in the tiny model either stream, or have budgets of all sizes in blocks of every size."""
    found = tiny_predictor.predictor()
    mean, std = found.network.mean, found.network.std
    heads = mean + std * torch.randn(400, len(mean), generator=torch.Generator().manual_seed(0))
    middle = torch.full((100,), 576, dtype=torch.int32)
    plan = select_granularity(found.network(heads), middle, 2, found.threshold, found.margins[0])
    assert set(plan.blk.flatten().tolist()) == {0, *BLOCKS}
    assert 0.1 < (plan.budget == 0).float().mean() < 0.5 and plan.budget.unique().numel() > 100


def test_something_was_evicted(asker: Asker) -> None:
    assert sum(value for name, value in asker.server.metrics().items() if "evicted_tokens_total" in name) > 0
