"""A server with packed weights that receives new ones: readers get unpacked rows, and every answer is right."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
import zoo
from program import MARK

from fluxion_sglang.native import NativeLayers, Workers

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("updates.py")
NEEDED = "needs them in rows"


@pytest.mark.skipif(
    not NativeLayers(Workers(1)).panel, reason="this CPU has no instructions that weights are packed for"
)
def test_weights_that_are_read_and_updated(tmp_path: Path) -> None:
    """The kernels give identical bits for packed and unpacked weights: answers change only when the weights do."""
    folder = zoo.build("llama-wide", tmp_path)
    done = forked.run(str(PROGRAM), folder)
    assert MARK in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.split(MARK)[1].splitlines()[0])
    log = done.stdout + done.stderr
    assert log.count(NEEDED) == 1 and found.pop("as it was loaded")
    other, packed = found.pop("other weights"), found.pop("packed")
    assert other != packed
    assert all(answers == packed for answers in found.values()), [name for name in found if found[name] != packed]
