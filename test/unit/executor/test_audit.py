"""Audit files of an engine, against actual reads and exact attention; and the file format."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import python
from world import World, counts

from fluxion_sglang.policy import parse_spec
from fluxion_sglang.scoring.audit import head_errors
from fluxion_sglang.scoring.audit_file import AuditLog, read, record_dtype

SPECS = ["full", "streaming", "fixed:16:0.1", "fixed:64:0.1", "oracle:0.1", "full"]
LENGTHS = [900, 900, 900, 700, 1200, 60]


@pytest.mark.parametrize(
    ("dtype", "executors"),
    [
        (torch.float32, "cpu+torch"),
        (torch.bfloat16, "cpu"),
        pytest.param(torch.float32, "cpu", marks=pytest.mark.full),
        pytest.param(torch.bfloat16, "cpu+torch", marks=pytest.mark.full),
    ],
)
def test_every_layer_of_every_request_is_recorded(dtype: torch.dtype, executors: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.npy"
    settings = {"executors": executors, "dtype": dtype, "rows": 8, "workers": 2 if executors == "cpu" else 1}
    world, twin = World(audit=path, **settings), World(**settings)  # type: ignore[arg-type]
    rows = list(range(1, len(SPECS) + 1))
    policies = [parse_spec(spec) for spec in SPECS]
    for row, length in zip(rows, LENGTHS, strict=True):
        world.extend(row, length)
        twin.extend(row, length)
    offset = 0
    for _ in range(20):  # a page fills on the way
        results, plain = world.decode(rows, policies), twin.decode(rows, policies)
        for (got, _), (want, _) in zip(results, plain, strict=True):
            assert torch.equal(got, want), "an audit changes nothing"
        (step,), offset = read(path, offset)
        check_step(world, step, results)
    for layer in range(world.layers):
        for name in ("tiles", "meta0", "meta1", "meta3", "tag1", "moments"):
            assert torch.equal(world.pool.tensor(name, layer), twin.pool.tensor(name, layer)), name
    assert counts(world) == counts(twin), "the audit's own reads are not in the statistics"
    assert world.engine.native.stats()["layers"] == 2 * twin.engine.native.stats()["layers"]


def check_step(world: World, step: np.ndarray, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    assert step.dtype == record_dtype(world.heads * world.group)
    assert len(step) == world.layers * len(SPECS)
    pair = 2 * world.dim * world.dtype.itemsize
    for layer, (got, want) in enumerate(results):
        for b, spec in enumerate(SPECS):
            (record,) = step[(step["layer"] == layer)][b : b + 1]
            assert record["policy"] == spec.encode() and record["length"] == world.length(b + 1)
            middle = world.placement.middle(world.length(b + 1))
            assert record["middle"] == middle
            everything = middle * world.heads * pair
            assert record["kv_bytes"] == everything
            fraction = record["tile_bytes"] / max(everything, 1)
            per_head = float((got[b].double() - want[b]).norm(dim=-1)[0] / want[b].norm(dim=-1).max())
            rounding = 1e-5 if world.dtype == torch.float32 else 6e-3
            assert abs(float(record["error"][0]) - per_head) < rounding
            if middle == 0 or spec == "full":
                assert fraction == (middle > 0) and record["error"].max() < 1e-5
                continue
            assert record["error"].max() > 1e-3
            if spec == "streaming":
                assert record["tile_bytes"] == record["metadata_bytes"] == 0
            elif spec == "oracle:0.1":
                k = int(np.ceil(0.1 * middle - 1e-4))
                assert k * world.heads * pair <= record["tile_bytes"] <= k * world.group * world.heads * pair
                assert record["metadata_bytes"] == 0
            else:
                assert 0.1 <= fraction <= 0.7 and record["metadata_bytes"] > 0
    order = {spec: step["error"][step["policy"] == spec.encode()].mean() for spec in SPECS}
    assert order["full"] < order["oracle:0.1"] < order["streaming"]


def test_without_own_policies_the_servers_is_named(tmp_path: Path) -> None:
    world = World(audit=tmp_path / "a.npy", policy="fixed:16:0.05", layers=1)
    world.extend(1, 500)
    world.decode([1])
    ((step,), _) = read(tmp_path / "a.npy")
    assert step["policy"].tolist() == [b"fixed:16:0.05"]


def test_a_failed_layer_leaves_no_record_and_the_next_step_does(tmp_path: Path) -> None:
    world = World(audit=tmp_path / "a.npy")
    world.extend(1, 700)
    good, world.pages[1][10] = world.pages[1][10], world.pool.pages + 5
    with pytest.raises(RuntimeError, match="page"):
        world.decode([1])
    assert read(tmp_path / "a.npy") == ([], 0)
    world.pages[1][10] = good
    world.decode([1])
    assert len(read(tmp_path / "a.npy")[0]) == 1


def test_errors_are_relative_to_the_layers_largest_head() -> None:
    want = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    got = want.clone()
    got[0, 1, 0] = 2.0
    assert head_errors(got, want).tolist() == [[0.0, pytest.approx(0.4)], [0.0, 0.0]]
    got[1, 0, 0] = 1.0
    assert head_errors(got, want)[1].tolist() == [float("inf"), 0.0]


def arrays() -> list[np.ndarray]:
    found = []
    for i in range(3):
        found.append(np.zeros(i + 1, record_dtype(4)))
        found[-1]["length"] = i
    return found


@given(cut=st.integers(0, 4000))
def test_half_an_array_waits_for_the_rest(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    buffer = io.BytesIO()
    ends = [0]
    for array in arrays():
        np.save(buffer, array)
        ends.append(buffer.tell())
    path = tmp_path_factory.mktemp("audit") / "a.npy"
    path.write_bytes(buffer.getvalue()[:cut])
    first, offset = read(path)
    assert offset == max(end for end in ends if end <= cut) and len(first) == ends.index(offset)
    path.write_bytes(buffer.getvalue())
    rest, offset = read(path, offset)
    assert offset == ends[-1] and [int(a["length"][0]) for a in first + rest] == [0, 1, 2]
    assert read(path, offset) == ([], offset)


def test_a_log_appends_to_what_is_there(tmp_path: Path) -> None:
    for array in arrays():
        AuditLog(tmp_path / "a.npy").append(array)
    assert [len(a) for a in read(tmp_path / "a.npy")[0]] == [1, 2, 3]


def test_a_log_cuts_off_half_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for array in arrays():
        AuditLog(path).append(array)
    whole = path.read_bytes()
    sizes = [len(a) for a in read(path)[0]]
    assert sizes == [1, 2, 3]
    for missing in (1, 50, 150, 230):  # in the data, and in the header
        path.write_bytes(whole[:-missing])
        log = AuditLog(path)
        log.append(arrays()[0])
        found, offset = read(path)
        assert [len(a) for a in found] == [1, 2, 1] and offset == path.stat().st_size
    path.write_bytes(whole[:7])
    AuditLog(path)
    assert path.read_bytes() == b""


def test_a_reader_may_empty_the_file(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a.npy")
    for array in arrays():
        log.append(array)
        ((found,), _) = read(tmp_path / "a.npy")
        assert len(found) == len(array)
        os.truncate(tmp_path / "a.npy", 0)


def test_good_arrays_before_bad_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    AuditLog(path).append(arrays()[1])
    end = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"garbage")
    found, offset = read(path)
    assert len(found) == 1 and offset == end
    with pytest.raises(ValueError, match=f"no array at byte {end}"):
        read(path, offset)


PART_OF_IT = """
import resource, signal, sys
from pathlib import Path
from fluxion_sglang.scoring.audit_file import AuditLog, read
from test_audit import arrays
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
log = AuditLog(path)
log.append(arrays()[0])
end = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (end + 100, resource.RLIM_INFINITY))
try:
    log.append(arrays()[2])
except OSError:
    assert path.stat().st_size == end, "a part of it stayed"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.append(arrays()[1])
    print([len(a) for a in read(path)[0]])
"""


def test_an_array_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    done = python("-c", PART_OF_IT, str(tmp_path / "a.npy"))
    assert done.stdout.strip() == "[1, 2]", done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_audit_that_cannot_be_written_ends_and_decoding_does_not(caplog: pytest.LogCaptureFixture) -> None:
    world, twin = World(audit=Path("/dev/full")), World()
    for each in (world, twin):
        each.extend(1, 700)
    for _ in range(3):
        for (got, _), (want, _) in zip(world.decode([1]), twin.decode([1]), strict=True):
            assert torch.equal(got, want)
    assert [record.message for record in caplog.records if "the audit ends here" in record.message] == [
        "Fluxion: the audit ends here, because its file cannot be written ([Errno 28] No space left on device); "
        "serving goes on"
    ]
    assert counts(world) == counts(twin)
    assert world.engine.native.stats()["layers"] == (3 + 1) * world.layers, "later steps are computed once"


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("policy,layer")
    with pytest.raises(ValueError, match="no array at byte 0"):
        read(tmp_path / "a.txt")
    with pytest.raises(OSError, match="No such file"):
        read(tmp_path / "none.npy")
    with pytest.raises(OSError, match="directory"):
        AuditLog(tmp_path)
    np.save(tmp_path / "b.npy", np.arange(5))
    for name in ("a.txt", "b.npy"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ValueError, match="a file of another kind"):
            AuditLog(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_a_full_file_makes_room_for_a_new_one(tmp_path: Path) -> None:
    path, array = tmp_path / "a.npy", arrays()[0]
    AuditLog(path).append(array)
    size = path.stat().st_size
    log = AuditLog(path, limit=3 * size)
    offset = 0
    for count in range(2, 12):
        log.append(array)
        found, offset = read(path, offset)
        assert found, "a reader that follows the file misses no line"
        assert path.stat().st_size == size * ((count - 1) % 3 + 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "a.npy.1"]
    assert len(read(tmp_path / "a.npy.1")[0]) == 3
