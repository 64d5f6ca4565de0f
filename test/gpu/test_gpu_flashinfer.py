"""The adapter of FlashInfer against attention in float64: FlashInfer itself on a GPU, its stand-in in torch
anywhere."""

from __future__ import annotations

import math

import fake_flashinfer
import pytest
import torch
from needs import skip

from fluxion_sglang.device import flashinfer as door
from fluxion_sglang.kv.placement import PAGE, Placement

pytestmark = pytest.mark.gpu
PLACEMENT = Placement(64, 256)
LENGTHS = [1, 63, 64, 65, 320, 321, 352, 5000]
KV_HEADS = 2


@pytest.fixture(params=[("stand-in", 64), ("cuda", 64), ("cuda", 128), ("cuda", 256)], ids=lambda p: f"{p[0]}-{p[1]}")
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.device, int]:
    """Device of FlashInfer, and the head dimension."""
    who, dim = request.param
    if who == "cuda":
        if not torch.cuda.is_available():
            skip("no CUDA device")
        return torch.device("cuda"), dim
    monkeypatch.setattr(door, "module", lambda: fake_flashinfer)
    return torch.device("cpu"), dim


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k and v [S, H, D]: o and the LSE of base 2, in float64; without keys 0 and -inf."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->ths", q.double(), k) * scale
    if causal:
        kept = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = scores.masked_fill(~kept.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("ths,shd->thd", (scores - lse.unsqueeze(-1)).exp().nan_to_num(), v), lse / math.log(2)


def check(o: torch.Tensor, lse: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.allclose(o.double(), want[0], atol=2e-2, rtol=2e-2)
    nothing = torch.isneginf(want[1])
    assert bool((lse[nothing] < -49000).all()), "csrc/cuda/resident.cu takes it for -inf"
    assert torch.allclose(lse[~nothing].double(), want[1][~nothing], atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])  # 5 and 7 use the prefill kernels
def test_residents(shape: tuple[torch.device, int], group: int, divided: bool) -> None:
    where, dim = shape
    torch.manual_seed(group * dim)
    kind = {"dtype": torch.bfloat16, "device": where}
    rows, lengths, scale = torch.arange(len(LENGTHS)).flip(0), torch.tensor(LENGTHS), dim**-0.5
    windows = torch.randn(KV_HEADS, len(LENGTHS) * PLACEMENT.slot_pages, 2, PAGE, dim).to(**kind)
    q = torch.randn(len(LENGTHS), group * KV_HEADS, dim).to(**kind)
    residents = door.Residents(
        PLACEMENT, len(LENGTHS), q_heads=group * KV_HEADS, kv_heads=KV_HEADS, head_dim=dim, scale=scale, **kind
    )
    residents.plan(rows, lengths, divided)
    o, lse = residents.run_divided(q, windows, scale / 2) if divided else residents.run(q, windows, scale / 2)
    for b, (row, n) in enumerate(zip(rows.tolist(), LENGTHS, strict=True)):
        sinks, window = range(min(PLACEMENT.sinks, n)), range(PLACEMENT.window_start(n), n)
        for part, positions in enumerate((sinks, window) if divided else ([*sinks, *window],)):
            slots = torch.tensor([PLACEMENT.slot(p) for p in positions], dtype=torch.int64) + row * PLACEMENT.slots
            k, v = (windows[:, slots // PAGE, i, slots % PAGE].transpose(0, 1) for i in (0, 1))
            got = (o[part, b], lse[part, b]) if divided else (o[b], lse[b])
            want = attention(q[b : b + 1], k, v, scale / 2)
            check(*got, (want[0][0], want[1][0]))


@pytest.mark.parametrize("group", [1, 4, 7])
def test_chunks_and_their_prefixes(shape: tuple[torch.device, int], group: int) -> None:
    where, dim = shape
    torch.manual_seed(group * dim)
    kind = {"dtype": torch.bfloat16, "device": where}
    q = torch.randn(400, group * KV_HEADS, dim).to(**kind)
    k, v = (torch.randn(400, KV_HEADS, dim).to(**kind) for _ in range(2))
    chunks = door.Chunks(q_heads=group * KV_HEADS, kv_heads=KV_HEADS, head_dim=dim, scale=0.1, **kind)
    chunks.plan([slice(0, 1), slice(1, 34), slice(34, 390)])
    out = torch.empty_like(q)
    lse = chunks.run(q, k, v, out)
    for first, stop in ((0, 1), (1, 34), (34, 390)):
        own = slice(first, stop)
        check(out[own], lse[own], attention(q[own], k[own], v[own], 0.1, causal=True))
    check(*door.prefill(q, k[:77], v[:77], 0.1), attention(q, k[:77], v[:77], 0.1))
