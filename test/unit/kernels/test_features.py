"""The features of the predictor: their table, and the native kernel of every ISA against the reference in torch."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from effort import examples
from features_reference import decode_features
from hypothesis import given, settings
from hypothesis import strategies as st
from places import CSRC, python

from benchmark.probe import library
from fluxion_sglang.predictor.features import ANCHOR, EMPTY_LSE, FEATURES, INDEX, PARTS
from fluxion_sglang.predictor.kernel import features

ISAS = str(library().isas()).split(",")
DTYPES = [torch.float32, torch.bfloat16]
NAN, INF = math.nan, math.inf


def make(seed: int, B: int, H: int, G: int, D: int, dtype: torch.dtype, lengths: list[int]) -> dict[str, Any]:
    """Arguments of a call, with more anchor rows than requests and NaN in unused rows."""
    random = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    rows = B + 3
    parts = randn(B, H * G, len(PARTS))
    parts[..., 2:] = parts[..., 2:].abs()
    chosen = torch.randperm(rows, generator=random)[:B]
    unused = torch.ones(rows, dtype=torch.bool)
    unused[chosen] = False
    anchor, anchor_q = randn(rows, H * G, len(ANCHOR)), randn(rows, H * G, D).to(dtype)
    mean_k = randn(rows, H, D)
    for tensor in (anchor, anchor_q, mean_k):
        tensor[unused] = NAN
    return {
        # Rows of one fused projection, as in a model.
        "q": randn(B, H * G + 2 * H, D).to(dtype)[:, : H * G],
        "parts": parts,
        "rows": chosen.to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "anchor": anchor,
        "anchor_q": anchor_q,
        "mean_k": mean_k,
        "layer": 7,
        "first_head": 0,
        "sinks": 64,
        "window": 256,
        "scale": D**-0.5,
        "out": torch.full((B, H * G, len(FEATURES)), NAN),
    }


def check(args: dict[str, Any]) -> torch.Tensor:
    """Every ISA matches the reference, and all give equal bits, which are returned."""
    want = torch.full_like(args["out"], NAN)
    decode_features(**{**args, "out": want})
    outs = []
    for isa in ISAS:
        out = torch.full_like(want, NAN)
        features(**{**args, "out": out}, isa=isa)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
        assert torch.equal(out[..., list(ANCHOR)], args["anchor"][args["rows"].long()])
        outs.append(out.view(torch.int32))
    assert all(torch.equal(outs[0], out) for out in outs)
    again = torch.full_like(want, NAN)
    features(**{**args, "out": again})
    assert torch.equal(again.view(torch.int32), outs[0])
    return again


LENGTHS = st.sampled_from([1, 5, 63, 64, 65, 320, 335, 336, 337, 351, 352, 1000, 131072, 2**31 - 1])


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**31 - 1), H=st.integers(1, 4), G=st.integers(1, 8), D=st.sampled_from(range(32, 257, 16)),
    dtype=st.sampled_from(DTYPES), lengths=st.lists(LENGTHS, max_size=4), data=st.data(),
)  # fmt: skip
def test_the_kernel_is_the_reference(
    seed: int, H: int, G: int, D: int, dtype: torch.dtype, lengths: list[int], data: st.DataObject
) -> None:
    args = make(seed, len(lengths), H, G, D, dtype, lengths)
    for b, row in enumerate(args["rows"].tolist()):
        head = data.draw(st.integers(0, H * G - 1))
        for case in data.draw(st.sets(st.sampled_from(["sinks", "window", "q", "anchor", "mean", "same", "opposite"]))):
            match case:
                case "sinks":
                    args["parts"][b, head, [0, 2]] = torch.tensor([-INF, 0.0])
                case "window":
                    args["parts"][b, head, [1, 3]] = torch.tensor([-INF, 0.0])
                case "q":
                    args["q"][b, head] = 0
                case "anchor":
                    args["anchor_q"][row, head] = 0
                case "mean":
                    args["mean_k"][row] = 0
                case "same":
                    args["anchor_q"][row, head] = args["q"][b, head]
                case "opposite":
                    args["anchor_q"][row, head] = -args["q"][b, head]
    out = check(args)
    assert out.isfinite().all()


def test_what_the_numbers_are() -> None:
    """One head, computed by hand: q = 3 e0, q' = 2 (e0 + e1), mean key = 4 e0 + 5 e1, 672 tokens in the middle."""
    args = make(0, 1, 1, 2, 32, torch.float32, [1000])
    row = int(args["rows"][0])
    for name in ("q", "anchor_q", "mean_k"):
        args[name].zero_()
    args["q"][0, 1, 0] = 3
    args["anchor_q"][row, 1, :2] = 2
    args["mean_k"][row, 0, :2] = torch.tensor([4.0, 5.0])
    args["scale"] = 0.5
    args["anchor"][row, 1, ANCHOR.index(INDEX["z_var"])] = 0.25
    args["parts"][0] = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0], [-INF, -40.0, 0.0, 6.0, 7.0]])
    out = check(args)[0, 1]
    want = {
        "layer": 7,
        "head": 1,
        "cpu_tokens": math.log(673),
        "gpu_tokens": math.log(329),
        "q_mean_k": 4 * 0.5,
        "lse_sink": EMPTY_LSE,
        "lse_cpu": math.log(672) + 3 * 2 + 0.5 * 9 * 0.25,
        "lse_local": -40,  # a real value, however small, stays
        "o_sink_norm": 0,
        "o_local_norm": 6,
        "q_norm": 3,
        "q_cosine": 0.5**0.5,
        "o_resident_max": 9,
    }
    assert {name for name in INDEX if FEATURES[INDEX[name]].part != "anchor"} == set(want)
    for name, number in want.items():
        assert float(out[INDEX[name]]) == pytest.approx(number, rel=1e-6), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_number_their_heads_as_the_whole_model_does(dtype: torch.dtype) -> None:
    """Two halves of the heads equal the rows of all heads, except for features that depend on the other heads."""
    whole = make(3, 2, 4, 2, 64, dtype, [1000, 5000])
    want = check(whole)
    halves = []
    for first in (0, 4):
        half = {**whole, "first_head": first, "out": torch.full_like(want[:, :4], NAN)}
        for name, heads in (("q", 4), ("parts", 4), ("anchor", 4), ("anchor_q", 4), ("mean_k", 2)):
            at = first * heads // 4
            half[name] = whole[name][:, at : at + heads]
            if name != "q":
                half[name] = half[name].contiguous()
        halves.append(check(half))
    got = torch.cat(halves, 1)
    largest = INDEX["o_resident_max"]
    kept = [i for i in range(len(FEATURES)) if i != largest]
    assert torch.equal(got[..., kept], want[..., kept])
    assert want[0, :, INDEX["head"]].tolist() == list(range(8))
    of_a_half = whole["parts"][..., PARTS.index("o_resident_norm")].view(2, 2, 4).amax(-1)
    assert torch.equal(got[..., largest], of_a_half.repeat_interleave(4, 1))


def test_an_empty_middle_has_no_statistics() -> None:
    """Whatever its mean holds."""
    args = make(1, 2, 2, 2, 32, torch.float32, [335, 336])
    out = check(args)
    none, some = out[0, 0], out[1, 0]
    assert none[INDEX["cpu_tokens"]] == none[INDEX["q_mean_k"]] == 0
    assert none[INDEX["lse_cpu"]] == EMPTY_LSE
    assert some[INDEX["cpu_tokens"]] > 0 and some[INDEX["q_mean_k"]] != 0 and some[INDEX["lse_cpu"]] != EMPTY_LSE


def test_the_table() -> None:
    assert len(FEATURES) == len(INDEX) == 41
    assert (*range(4, 16), 17, 18, 19, 20, 24, 25, 26, 29, 30, 31, 33, 35, 36, 37, 38, 40) == ANCHOR
    assert [INDEX[name] for name in ("k_norm_mean", "v_norm_kurt", "q_mean_k", "z_var", "lse_cpu")] == [
        8, 15, 16, 18, 22,
    ]  # fmt: skip
    assert [INDEX[name] for name in ("anchor_lse_cpu", "q_cosine", "anchor_budget_16", "anchor_budget_128")] == [
        25,
        34,
        35,
        38,
    ]
    text = (CSRC / "kernels" / "feature_index.h").read_text()
    numbers = re.search(r"kAnchorFeature\[kAnchorFeatures\] = {([^}]*)}", text)
    assert numbers is not None
    assert tuple(int(number) for number in numbers[1].split(",")) == ANCHOR


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("q", lambda t: t[:, :3], "q has 3 heads of 32 numbers and mean_k has 2"),
        ("rows", lambda t: t + 5, "has the row"),
        ("seq_lens", lambda t: t * 0, "Request 0 has the row 1 and 0 tokens"),
        ("anchor", lambda t: t[:-1], "anchor has the shape"),
        ("sinks", lambda n: n + 1, "sinks is 65"),
        ("window", lambda n: -n, "window is -256"),
    ],
)
def test_wrong_arguments_are_refused(name: str, wrong: Any, sentence: str) -> None:
    args = make(2, 2, 2, 2, 32, torch.float32, [10, 1000])
    out = args["out"]
    with pytest.raises(ValueError, match=sentence):
        features(**{**args, name: wrong(args[name])})
    assert out.isnan().all()


def test_the_predictor_does_not_import_sglang() -> None:
    code = "import sys, fluxion_sglang.predictor.kernel; sys.exit('sglang' in sys.modules)"
    assert python("-c", code).returncode == 0
