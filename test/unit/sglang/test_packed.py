"""Packed weights: which modules get them, equal results of the layer, and unpacked rows for all other readers."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from effort import case
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers import linear
from sglang.srt.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.native import NativeLayers, Workers
from fluxion_sglang.sglang.containment.passes import FailureGuard
from fluxion_sglang.sglang.memory import disk
from fluxion_sglang.sglang.steps import layers, packed
from fluxion_sglang.sglang.steps.graphs import StepGraphs
from fluxion_sglang.sglang.steps.packed import PackedWeight

LAYERS = NativeLayers(Workers(2))
IN, OUT = 8192, 100
"""Enough inputs for the largest known nearest cache; four of the outputs are outside panels."""

pytestmark = pytest.mark.skipif(not LAYERS.panel, reason="this CPU has no instructions that weights are packed for")


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang forgets operations that are registered in the test."""
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})


def random(*size: int) -> torch.Tensor:
    return (torch.randn(size) / 64).to(torch.bfloat16)


def weighted(weight: torch.Tensor | None = None, module: nn.Module | None = None, method: Any = None) -> nn.Module:
    """A module as SGLang builds it: a method, and a weight with its loader."""
    module = nn.Module() if module is None else module
    module.quant_method = UnquantizedLinearMethod() if method is None else method
    module.weight = nn.Parameter(random(OUT, IN) if weight is None else weight, requires_grad=False)
    module.weight.weight_loader = default_weight_loader
    return module


def head() -> nn.Module:
    module = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(module)
    return weighted(None, module, UnquantizedEmbeddingMethod())


def install(*modules: nn.Module, native: layers.Contained | None = None, pack: bool = True) -> nn.Module:
    model = nn.ModuleList(modules)
    layers.install(model, native or layers.Contained(LAYERS), pack)
    return model


def packs(module: nn.Module) -> bool:
    return isinstance(module.weight, PackedWeight) and module.weight.memory.packed


def made() -> tuple[nn.Module, torch.Tensor]:
    """A module with a packed weight, and its unpacked rows."""
    module = weighted()
    rows = module.weight.detach().clone()
    install(module)
    assert packs(module) and not torch.equal(module.weight.memory.inner, rows)
    return module, rows


# --- Who is chosen ---


def test_the_parameter_stays_the_one_it_was() -> None:
    module = weighted()
    held, address = module.weight, module.weight.data_ptr()
    install(module)
    assert module.weight is held and packs(module) and held.memory.inner.data_ptr() == address
    assert isinstance(held, nn.Parameter) and held.weight_loader is default_weight_loader
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def test_a_head_that_no_embedding_shares() -> None:
    module = head()
    install(module)
    assert packs(module)


def _tied() -> list[nn.Module]:
    output, embedding = head(), weighted(method=UnquantizedEmbeddingMethod())
    output.weight = embedding.weight
    return [output, embedding]


def _same_memory() -> list[nn.Module]:
    first = weighted()
    return [first, weighted(first.weight.data)]


def _attribute() -> list[nn.Module]:
    """Some models keep parts of a projection that they multiply themselves."""
    module = weighted()
    module.part = module.weight.data[:8].t()
    return [module]


@pytest.mark.parametrize(
    "modules",
    [
        _tied(),
        _same_memory(),
        _attribute(),
        [weighted(method=UnquantizedEmbeddingMethod())],
        [weighted(random(OUT, 512))],
        [weighted(random(LAYERS.panel - 1, IN)) if LAYERS.panel else weighted()],
        [weighted(random(OUT, IN + 16))],
        [weighted(random(OUT, 2 * IN)[:, :IN])],
        [weighted(random(OUT, IN).float())],
    ],
    ids=["tied", "same memory", "attribute", "embedding", "few inputs", "no panel", "odd", "strided", "float32"],
)
def test_others_stay_in_rows(modules: list[nn.Module]) -> None:
    install(*modules)
    assert not any(isinstance(module.weight, PackedWeight) for module in modules)


def test_tensors_without_memory_are_no_hindrance() -> None:
    module, other = weighted(), nn.Module()
    other.sparse = torch.eye(3).to_sparse()
    other.packed, other.elsewhere = (
        PackedWeight(packed.PackedMemory(random(2, 32), packed.Packer(LAYERS))),
        torch.empty(3, device="meta"),
    )
    install(module, other)
    assert packs(module)


def test_nothing_is_packed_where_torch_compiles() -> None:
    module = weighted()
    install(module, pack=False)
    assert not packs(module)


def test_a_parameter_that_cannot_be_replaced_stays(caplog: pytest.LogCaptureFixture) -> None:
    module = weighted()
    reference = weakref.ref(module.weight)
    with caplog.at_level(logging.INFO):
        install(module)
    assert reference() is module.weight and not packs(module) and "stay in rows" in caplog.text


def test_a_weight_that_cannot_be_packed_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = weighted()
    rows = module.weight.detach().clone()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("Memory ran out.")

    with monkeypatch.context() as patch:
        patch.setattr(LAYERS, "repack", broken)
        install(module)
    assert not packs(module) and torch.equal(module.weight + 0, rows)
    assert "stay in rows, because Memory ran out." in caplog.text
    x = random(3, IN)
    torch.testing.assert_close(module.quant_method.apply(module, x), F.linear(x, rows), atol=2e-2, rtol=2e-2)


def test_what_sglang_has_packed_is_left_alone() -> None:
    module = weighted()
    module.use_intel_amx_backend = True
    method = module.quant_method
    install(module)
    assert module.quant_method is method and not packs(module)


# --- What the layer computes ---


METHODS = pytest.mark.parametrize("build", [weighted, head])


@METHODS
def test_a_packed_layer_gives_what_it_gave(build: Callable[[], nn.Module]) -> None:
    for bias, shape in product(
        [False, True], [(1,), (8,), (layers.MAX_ROWS,), (layers.MAX_COPIED_ROWS + 1,), (2, 3), ()]
    ):
        with case(bias=bias, shape=shape):
            module = build()
            install(module, pack=False)
            x, b = random(*shape, IN), random(OUT) if bias else None
            want = module.quant_method.apply(module, x, b)
            again = weighted(
                module.weight.data.clone(), head() if build is head else None, type(module.quant_method).__base__()
            )
            install(again)
            assert packs(again)
            assert torch.equal(again.quant_method.apply(again, x, b), want)
            assert packs(again)


@METHODS
@pytest.mark.parametrize("rows", [layers.MAX_ROWS + 1, layers.MAX_COPIED_ROWS])
def test_more_rows_are_the_workers_while_it_is_packed(build: Callable[[], nn.Module], rows: int) -> None:
    module, x = build(), random(rows, IN)
    weight = module.weight.detach().clone()
    install(module)
    assert torch.equal(module.quant_method.apply(module, x), LAYERS.linear(x, weight)) and packs(module)
    module.weight[0].sum()
    assert torch.equal(module.quant_method.apply(module, x), F.linear(x, weight))


@METHODS
def test_many_rows_of_a_large_weight_go_in_slices(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build()
    rows, bias = module.weight.detach().clone(), random(OUT)
    x = random(layers.MAX_COPIED_ROWS + 9, IN)
    install(module)
    monkeypatch.setattr(packed, "_SLICE", 2 * LAYERS.panel * IN * 2 + 1)
    assert [(first, len(part)) for first, part in module.weight.memory.slices()] == [(0, 48), (48, 48), (96, 4)]
    for b in (None, bias):
        torch.testing.assert_close(module.quant_method.apply(module, x, b), F.linear(x, rows, b))
    assert packs(module)


def test_a_layer_that_fails_is_sglangs_and_its_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, module = FailureGuard(), weighted()
    rows, x = module.weight.detach().clone(), random(3, IN)
    install(module, native=layers.Contained(LAYERS, guard.run))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Memory ran out.")

    with monkeypatch.context() as patch, guard.containing():
        patch.setattr(LAYERS, "linear", broken)
        assert torch.equal(module.quant_method.apply(module, x), F.linear(x, rows))
        assert guard.reason == "Memory ran out." and packs(module)


# --- Readers get rows ---


def test_what_it_is_can_be_asked() -> None:
    module, rows = made()
    weight = module.weight
    assert weight.shape == rows.shape and weight.dtype is rows.dtype and weight.device == rows.device
    assert weight.stride() == rows.stride() and weight.is_contiguous() and weight.dim() == 2 and len(weight) == OUT
    assert weight.nbytes == rows.nbytes and weight.numel() == rows.numel() and not weight.requires_grad
    assert {weight: 1}[weight] == 1 and "packed=True" in repr(weight)
    assert isinstance(weight.data, PackedWeight) and isinstance(module.state_dict()["weight"], PackedWeight)
    assert isinstance(nn.Parameter(weight, requires_grad=False), PackedWeight)
    assert packs(module)


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda w: w.clone(),
    "a row": lambda w: w[3],
    "data": lambda w: w.data[3],
    "narrow": lambda w: w.narrow(0, 5, 2),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "bytes": lambda w: w.detach().view(torch.uint8),
    "float": lambda w: w.float(),
    "to": lambda w: w.to(torch.float64),
    "contiguous": lambda w: w.contiguous(),
    "cat": lambda w: torch.cat([w, w]),
    "product": lambda w: F.linear(torch.ones(2, IN, dtype=torch.bfloat16), w),
    "rows of words": lambda w: F.embedding(torch.tensor([99, 0]), w),
    "norm": lambda w: torch.linalg.vector_norm(w, dtype=torch.float32),
    "equal": lambda w: torch.equal(w, w.clone()),
    "list": lambda w: w[:, :2].tolist(),
    "list of all": lambda w: w.tolist(),
    "array": lambda w: w.view(torch.int16).numpy().copy(),
    "dlpack": lambda w: torch.from_dlpack(w),
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "storage": lambda w: torch.empty(0, dtype=w.dtype).set_(w.untyped_storage(), 0, w.shape, w.stride()),
    "shared": lambda w: w.share_memory_(),
    "iterated": lambda w: torch.stack(list(w)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_gets_rows(name: str) -> None:
    for mode in [torch.inference_mode, torch.no_grad, torch.enable_grad]:
        with case(mode=mode):
            module, rows = made()
            with mode():
                got, want = OPERATIONS[name](module.weight), OPERATIONS[name](rows)
            assert not packs(module) and torch.equal(module.weight.memory.inner, rows)
            if isinstance(want, torch.Tensor):
                assert not isinstance(got, PackedWeight) and torch.equal(got, want)
            else:
                assert (got == want).all() if name == "array" else got == want


def test_its_address_is_that_of_rows() -> None:
    module, _ = made()
    address = module.weight.memory.inner.data_ptr()
    assert module.weight.data_ptr() == address and not packs(module)


def test_modules_that_are_copied_or_cast_are_plain() -> None:
    module, rows = made()
    module.quant_method = None  # workers cannot be copied
    again = copy.deepcopy(module)
    assert type(again.weight) is nn.Parameter and torch.equal(again.weight, rows)
    again.weight.data.zero_()
    assert torch.equal(module.weight, rows)
    module, rows = made()
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["weight"], rows)
    module.float()
    assert type(module.weight) is nn.Parameter and torch.equal(module.weight, rows.float())


def test_what_was_unpacked_stays_in_rows_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    modules = [weighted() for _ in range(3)]
    install(*modules)
    with caplog.at_level(logging.INFO):
        for module in modules:
            module.weight[3].sum()
            module.quant_method.apply(module, random(4, IN))
            assert not packs(module)
    assert caplog.text.count("in rows") == 1 and "__getitem__" in caplog.text


def test_a_digest_leaves_it_packed() -> None:
    """The digest equals that of the unpacked weights."""
    module, rows = made()
    want = [disk.weights_digest(weighted(rows), whole) for whole in (False, True)]
    for _ in range(2):
        assert [disk.weights_digest(module, whole) for whole in (False, True)] == want and packs(module)
    module.weight.data.copy_(rows * 2)
    assert disk.weights_digest(module) == disk.weights_digest(weighted(rows * 2)) != want[1]


# --- Weights that a server updates ---


def _parts(module: nn.Module, new: torch.Tensor) -> None:
    for first in range(0, OUT, 30):
        part = new[first : first + 30]
        module.weight.data.narrow(0, first, len(part)).copy_(part)


UPDATES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "data": lambda module, new: module.weight.data.copy_(new),
    "parts": _parts,
    "loader": lambda module, new: module.weight.weight_loader(module.weight, new),
    "state": lambda module, new: module.load_state_dict({"weight": new}),
    "other memory": lambda module, new: setattr(module.weight, "data", new),
    "other parameter": lambda module, new: setattr(module, "weight", nn.Parameter(new, requires_grad=False)),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_a_weight_that_is_updated(update: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    for mode, rows in product([torch.inference_mode, torch.no_grad, torch.enable_grad], [4, 50]):
        with case(mode=mode, rows=rows):
            module, _ = made()
            x, new = random(rows, IN), random(OUT, IN)
            with mode():
                module.quant_method.apply(module, x)
                update(module, new.clone())
                assert torch.equal(module.weight, new)
                plain = weighted(new)
                install(plain, pack=False)
                for _ in range(2):
                    assert torch.equal(module.quant_method.apply(module, x), plain.quant_method.apply(plain, x))


def test_two_loaders_put_a_weight_into_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loads its half, on its own thread."""
    module, _ = made()
    repack, calls = LAYERS.repack, []

    def slow(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        time.sleep(0.2)  # the other thread arrives meanwhile
        repack(*args, **kwargs)

    monkeypatch.setattr(LAYERS, "repack", slow)
    new, half = random(OUT, IN), OUT // 2
    threads = [
        threading.Thread(target=lambda part=part: module.weight.data.narrow(0, *part).copy_(new.narrow(0, *part)))
        for part in ((0, half), (half, OUT - half))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and torch.equal(module.weight.memory.inner, new)


def test_an_alias_keeps_its_form_to_itself() -> None:
    module, rows = made()
    module.weight.data.t_()
    assert module.weight.shape == rows.shape and torch.equal(module.weight + 0, rows)


def test_data_of_another_form_is_refused() -> None:
    module, rows = made()
    for other in (rows[:3], rows.float()):
        with pytest.raises(RuntimeError, match="another shape or dtype"):
            module.weight.data = other
    assert packs(module)


def test_sglangs_own_layers_and_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: group)
    monkeypatch.setattr(linear, "get_group_rank_size", lambda _: (0, 1))
    given = {"bias": False, "params_dtype": torch.bfloat16}
    whole = ReplicatedLinear(IN, OUT, **given)
    merged = MergedColumnParallelLinear(IN, [40, 60], **given)
    for module in (whole, merged):
        module.weight.data.copy_(random(OUT, IN))
    model = install(whole, merged)
    assert packs(whole) and packs(merged)
    x = random(3, IN)
    new = random(OUT, IN)
    parameters = dict(model.named_parameters())
    for name, shards in (("0.weight", [()]), ("1.weight", [(0,), (1,)])):
        for shard, part in zip(shards, [new] if len(shards) == 1 else new.split([40, 60]), strict=True):
            parameters[name].weight_loader(parameters[name], part, *shard)
    for module in (whole, merged):
        assert torch.equal(module(x)[0], LAYERS.linear(x, new)) and not packs(module)


# --- Step graphs ---


class Backbone(nn.Module):
    def __init__(self, native: layers.Contained) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Parameter(random(16, IN), requires_grad=False)
        self.up, self.down = weighted(), weighted(random(IN, OUT))
        self.runs = 0
        layers.install(self, native)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        self.runs += 1
        x = F.embedding(input_ids, self.embedding)
        for _ in range(2):
            x = self.down.quant_method.apply(self.down, self.up.quant_method.apply(self.up, x)) + x
        return x


DECODE = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))


def test_a_graph_finds_the_weight_as_it_is() -> None:
    guard = FailureGuard()
    native = layers.Contained(LAYERS, guard.run)
    model, plain = Backbone(native), Backbone(layers.Contained(LAYERS))
    plain.up.weight[0].sum()
    StepGraphs(model, native, guard, SimpleNamespace(begin=lambda: False))
    assert packs(model.up) and not packs(plain.up) and not packs(model.down)
    ids, positions = torch.tensor([3, 0, 15]), torch.arange(3)

    def same(times: int) -> None:
        for shift in range(times):
            inputs = (ids + shift) % 16, positions
            assert torch.equal(model.forward(*inputs, DECODE), plain(*inputs, DECODE))

    with torch.inference_mode():
        same(5)
        assert model.runs == 2 and packs(model.up), "the others were replays"
        new = random(OUT, IN)
        for each in (model, plain):
            each.up.weight.data.narrow(0, 0, 50).copy_(new[:50])
        same(3)
        assert model.runs == 2 and not packs(model.up), "the graph reads rows now"
        for each in (model, plain):
            each.up.weight.data = new.clone()
        same(4)
        assert model.runs == 4, "other memory, another graph"
