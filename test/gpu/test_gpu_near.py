"""The near middle on a GPU reads the same as the CPU beside the same GPU would."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.extend(str(Path(__file__).parents[1] / "unit" / folder) for folder in ("", "device"))

from test_near import Make, both, counts, maker
from test_stream_device import Passes

from fluxion_sglang.device.library import DeviceLibrary

pytestmark = pytest.mark.gpu


@pytest.fixture
def passes(cuda: DeviceLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Passes] = []
    yield maker(monkeypatch, made, place="cuda")
    for one in made:
        one.device.close()
        one.pinned.release()


@pytest.mark.parametrize("union", [True, False])
@pytest.mark.parametrize("spec", ["fixed:16:0.1", "fixed:64:0.2", "full"])
@pytest.mark.parametrize("copies", [3, 60, 4000])
def test_it_reads_what_the_cpu_reads(passes: Make, spec: str, copies: int, union: bool) -> None:
    kw: dict[str, Any] = {"seed": 3, "policy": spec, "attend_union": union, "workers": 4}
    near, plain = passes(copies, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 1211, 2: 300, 3: 779, 4: 30})
        one.extend({2: 401})
    for _ in range(8):
        both(near, plain, [3, 1, 2, 4])
    hits, misses, _ = counts(near)
    assert (misses == 0) == (copies == 4000) and (hits > 0 or copies == 3)


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 128), (16, 256), (3, 48)])
def test_every_shape(passes: Make, group: int, dim: int) -> None:
    kw: dict[str, Any] = {"seed": 2, "policy": "fixed:32:0.15", "group": group, "dim": dim, "whole": True, "layers": 1}
    near, plain = passes(40, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 900, 2: 1500})
    for _ in range(3):
        both(near, plain, [2, 1])
    assert counts(near)[0] > 0 and counts(near)[1] > 0


def test_half_precision(passes: Make) -> None:
    kw: dict[str, Any] = {"seed": 2, "policy": "fixed:16:0.2", "dim": 128, "dtype": torch.bfloat16, "whole": True}
    near, plain = passes(60, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 1900, 2: 1500})
    for _ in range(20):
        both(near, plain, [2, 1])
