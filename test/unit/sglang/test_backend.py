"""Passes of the attention backend over a small world, without SGLang's model."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)
from world import World

from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.native import CorruptMemory
from fluxion_sglang.policy import LayerPlan, Needs, Policy, parse_spec
from fluxion_sglang.policy import base as policy
from fluxion_sglang.policy.base import TOLD, DecodeStep
from fluxion_sglang.predictor import anchors
from fluxion_sglang.sglang.containment.passes import FailureGuard, Failures
from fluxion_sglang.sglang.memory.pools import FluxionKVPool, enable_fused_set_kv_buffer
from fluxion_sglang.sglang.requests.predictors import norms
from fluxion_sglang.sglang.requests.requests import RequestPolicies
from fluxion_sglang.sglang.steps.backend import FluxionAttnBackend

NEW, RUNNING = 1, 2  # rows


class Request(SimpleNamespace):
    """The fields of SGLang's request that a prefill uses; like SGLang's, it supports weak references."""

    __hash__ = object.__hash__


class Backend(FluxionAttnBackend):
    """The backend after its start, with the world's pool and engine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = world.engine
        self.token_to_kv_pool: Any = SimpleNamespace(
            host=world.pool, windows=world.windows, layer_num=world.layers, size=world.tokens, disk=None, zone=None
        )  # fmt: skip
        self._places_of = {layer: layer for layer in range(world.layers)}
        slots = torch.zeros(world.rows, world.tokens, dtype=torch.int32)
        self.req_to_token_pool: Any = SimpleNamespace(
            req_to_token=slots, req_generation=torch.ones(world.rows, dtype=torch.int64)
        )
        self.requests = RequestPolicies(parse_spec("anchor"))
        self.failures = FailureGuard()
        self.device = HostDevice(world.pool, world.windows, world.engine)
        self.metrics, self._records = None, False
        self._counted, self._healed, self._first = True, 0, True
        self._chunks = []

    def forward(self, counts: dict[int, int], riding: list[int]) -> None:
        """A pass over `counts` new tokens of each row; rows in `riding` decode."""
        world, rows = self.world, list(counts)
        before = [world.length(row) for row in rows]
        lengths = [n + count for n, count in zip(before, counts.values(), strict=True)]
        for row, length in zip(rows, lengths, strict=True):
            pages = world.page_list(row, length)
            slots = (pages.unsqueeze(1) * 16 + torch.arange(16, dtype=torch.int32)).flatten()
            self.req_to_token_pool.req_to_token[row, : len(slots)] = slots
        batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,  # SGLang uses it for mixed passes too
            req_pool_indices=torch.tensor(rows),
            seq_lens_cpu=torch.tensor(lengths),
            extend_prefix_lens_cpu=before,
            extend_seq_lens_cpu=list(counts.values()),
        )
        params = SimpleNamespace(custom_params=None)
        requests = [
            Request(sampling_params=params, skip_radix_cache_insert=False, to_finish=None, row=row) for row in rows
        ]
        with self.requests.of(requests, False, [request for request in requests if request.row in riding]):
            self.init_forward_metadata(batch)
            for index in range(world.layers):
                layer: Any = SimpleNamespace(
                    layer_id=index, sliding_window_size=-1, tp_q_head_num=world.heads * world.group, head_dim=world.dim,
                    scaling=world.scale, logit_cap=0.0,
                )  # fmt: skip
                total = sum(counts.values())
                q = world.randn(total, world.heads * world.group, world.dim)
                k, v = (world.randn(total, world.heads, world.dim) for _ in range(2))
                self.forward_extend(q, k, v, layer, batch)
                for row, keys, values in zip(
                    rows, k.split(list(counts.values())), v.split(list(counts.values())), strict=True
                ):
                    for kept, new in ((world.keys, keys), (world.values, values)):
                        old = kept.setdefault(row, [new[:0]] * world.layers)
                        old[index] = torch.cat([old[index], new])


def test_models_find_the_pools_and_may_not_write_to_them() -> None:
    """qwen3_moe and others do this before every RoPE."""
    backend = Backend(World(seed=3))
    pool = object.__new__(FluxionKVPool)
    backend.token_to_kv_pool = pool
    asked: list[ForwardMode] = []
    with forward_context(ForwardContext(attn_backend=backend)):
        assert get_token_to_kv_pool() is pool and get_req_to_token_pool() is backend.req_to_token_pool
        assert not enable_fused_set_kv_buffer(lambda mode: not asked.append(mode), ForwardMode.EXTEND)
        backend.token_to_kv_pool = "another pool"
        assert enable_fused_set_kv_buffer(lambda mode: not asked.append(mode), ForwardMode.EXTEND)
    assert asked == [ForwardMode.EXTEND], "SGLang's own answer counts where the pool is not ours"


def queries(world: World, row: int) -> torch.Tensor:
    return torch.stack([of_rows[row] for of_rows in world.engine.anchors.queries]).clone()


def test_a_token_that_rides_along_is_no_anchor(monkeypatch: Any) -> None:
    world = World(seed=3)
    backend = Backend(world)
    backend.forward({RUNNING: 900}, [])
    prefilled = queries(world, RUNNING)
    anchor = parse_spec("anchor")
    world.decode([RUNNING], [anchor])
    measured: list[int] = []
    measure = anchors.measure
    monkeypatch.setattr(anchors, "measure", lambda *args, **kept: measured.append(1) or measure(*args, **kept))
    backend.token_to_kv_pool.windows.mark(
        torch.tensor([RUNNING]), torch.ones(1, dtype=torch.int64), torch.tensor([901])
    )
    backend.forward({NEW: 700, RUNNING: 1}, [RUNNING])
    assert torch.equal(queries(world, RUNNING), prefilled)
    for got, want in world.decode([RUNNING], [parse_spec("full")]):
        assert torch.allclose(got.double(), want, atol=1e-4)
    world.decode([RUNNING], [anchor])
    assert not measured, "the middle was measured again"
    world.decode([NEW], [anchor])
    assert len(measured) == world.layers
    # A prefilled chunk of one token is a normal anchor.
    backend.forward({RUNNING: 1}, [])
    assert not torch.equal(queries(world, RUNNING), prefilled)


def test_a_prefix_from_files_that_is_corrupt_ends_its_request_alone() -> None:
    class Disk:
        def append(self, *_: object) -> None: ...

        def begin(self, pages: torch.Tensor, start: int, stop: int) -> None:
            if start == 400:
                raise CorruptMemory("layer 0, page 7")

        def stats(self) -> dict[str, int]:
            return {}

    world = World()
    backend = Backend(world)
    backend.token_to_kv_pool.disk = Disk()
    backend.forward({RUNNING: 400}, [])
    with backend.failures.containing():
        backend.forward({NEW: 16, RUNNING: 16}, [])
    assert backend.failures.found == Failures(None, {1: "layer 0, page 7"})


def test_a_row_that_another_request_took_over_has_no_anchor() -> None:
    """The request decodes in a mixed pass without a prefill in this row."""
    world = World(seed=4)
    backend = Backend(world)
    backend.forward({RUNNING: 900}, [])
    backend.req_to_token_pool.req_generation[RUNNING] = 2
    backend.forward({NEW: 700, RUNNING: 1}, [RUNNING])
    assert [lengths[RUNNING] for lengths in world.engine.anchors._lengths] == [0] * world.layers
    assert [lengths[NEW] for lengths in world.engine.anchors._lengths] == [700] * world.layers


class Diary(Policy):
    """Reads everything, and records its calls."""

    needs = Needs.RESIDENTS

    def __init__(self) -> None:
        self.full = parse_spec("full")
        self.told: list[tuple[Any, ...]] = []

    def bind(self, world: policy.World) -> None:
        super().bind(world)
        self.told.append(("bound",))

    def begin_step(self, step: DecodeStep) -> None:
        assert step.page_table is not None and step.page_table.shape[0] == step.batch
        self.full.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: policy.Observed = policy.UNSEEN) -> LayerPlan:
        self.told.append(("plan", layer, q.clone(), observed.scale))
        return self.full.plan(layer, q)

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        self.told.append(("prefilled", layer, row, length, queries.shape[0]))

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self.told.append(("decoded", layer, q.clone(), out.clone()))

    def released(self, row: int) -> None:
        self.told.append(("released", row))

    def read(self) -> list[tuple[Any, ...]]:
        told, self.told = self.told, []
        return told


def test_a_policy_hears_of_prefills_of_its_own_requests_and_of_rows_that_change_hands() -> None:
    world = World(seed=5)
    backend, diary = Backend(world), Diary()
    backend.requests = RequestPolicies(diary)
    backend.engine.policy = diary
    backend.forward({RUNNING: 700}, [])
    told = [("prefilled", layer, RUNNING, 700, TOLD) for layer in range(world.layers)]
    assert diary.read() == [("bound",), *told], "the row is new"
    backend.forward({RUNNING: 2}, [])
    assert diary.read() == [("prefilled", layer, RUNNING, 702, 2) for layer in range(world.layers)]
    backend.forward({NEW: 400, RUNNING: 1}, [RUNNING])
    told = diary.read()
    steps = ("plan", "decoded")
    assert [entry[:2] for entry in told if entry[0] in steps] == [
        (step, at) for at in range(world.layers) for step in steps
    ]
    assert [entry for entry in told if entry[0] not in steps] == [
        ("released", NEW), *(("prefilled", layer, NEW, 400, TOLD) for layer in range(world.layers))
    ]  # fmt: skip
    backend.req_to_token_pool.req_generation[RUNNING] = 2
    backend.forward({RUNNING: 50}, [])
    assert diary.read()[0] == ("released", RUNNING)
    backend.engine.forget(NEW)
    assert diary.read() == [("released", NEW)]
    kept = weakref.ref(diary)
    del diary, backend.requests
    backend.engine.policy = parse_spec("full")
    backend.engine._policy, backend.engine._policies = backend.engine.policy, ()
    assert kept() is None, "a policy without requests is not kept"


def test_a_policy_in_a_mixture_hears_of_its_own_requests() -> None:
    world = World(seed=6)
    for row in (1, 2, 3):
        world.extend(row, 400 + 50 * row)
    diary = Diary()
    world.decode([1, 2, 3], [parse_spec("full"), diary, diary])
    told = diary.read()
    assert [entry[:2] for entry in told] == [
        ("bound",),
        *((name, layer) for layer in range(world.layers) for name in ("plan", "decoded")),
    ]
    for _, layer, q, *rest in told[1:]:
        assert torch.equal(q, world.queries[layer][1:])
        if isinstance(rest[0], float):
            assert rest[0] == world.scale
        else:
            assert rest[0].shape == q.shape
    other = World(seed=6)
    other.extend(1, 400)
    other.decode([1], [diary])
    assert diary.read()[0] == ("bound",), "another engine"


def test_a_predictor_is_of_the_weights_that_were(caplog: pytest.LogCaptureFixture) -> None:
    """It does not fit other weights that the server receives; the log says so once for each update."""
    backend = Backend(World(seed=3))
    backend._model = torch.nn.Module()
    backend._model.register_parameter("norm", torch.nn.Parameter(torch.ones(4)))
    backend._weights = norms(backend._model)
    backend._predictor = None
    torch.nn.init.constant_(backend._model.norm, 2.0)
    backend._flushed()
    assert not caplog.records, "there is none"
    backend._predictor = Path("/models/it/fluxion")
    backend._flushed()
    assert not caplog.records, "the same weights"
    torch.nn.init.constant_(backend._model.norm, 3.0)
    for _ in range(2):
        backend._flushed()
    assert len(caplog.records) == 1 and "/models/it/fluxion is that of the old ones" in caplog.text
