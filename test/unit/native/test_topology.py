"""Resources that a process may use, read from the files of simulated machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.device.maker import Cuda
from fluxion_sglang.executor import workers
from fluxion_sglang.native import Workers, function, topology


class Machine:
    """Folders and files in Linux's format."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 600000 kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def v2(self, path: str = "/user/server") -> None:
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")

    def nodes(self, *cpulists: str) -> None:
        for i, cores in enumerate(cpulists):
            self.write(f"sys/devices/system/node/node{i}/cpulist", cores + "\n")

    def read(self, cores: int = 8) -> dict[str, Any]:
        return topology(str(self.root), range(cores))

    def interleaved(self, allowed: int, workers: list[int], touching: int) -> str:
        given = (torch.tensor(cores, dtype=torch.int32) for cores in (range(allowed), workers))
        return str(function("nodes_to_interleave")(str(self.root), *given, touching))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- CPU time ---


def test_no_control_group_is_no_quota(machine: Machine) -> None:
    assert machine.read()["cpu_quota"] == -1


@pytest.mark.parametrize(
    ("own", "parent", "top", "quota"),
    [
        ("max 100000", "max 100000", None, -1),
        ("250000 100000", "max 100000", None, 2.5),
        ("max 100000", "150000 50000", None, 3),
        ("400000 100000", "150000 100000", None, 1.5),
        ("max 100000", None, "60000 100000", 0.6),  # a container that sees its own group as the root
        ("", "nonsense", None, -1),
        ("100000 0", None, None, -1),
    ],
)
def test_the_tightest_quota_counts(
    machine: Machine, own: str, parent: str | None, top: str | None, quota: float
) -> None:
    machine.v2()
    for folder, text in (("user/server/", own), ("user/", parent), ("", top)):
        if text is not None:
            machine.write(f"sys/fs/cgroup/{folder}cpu.max", text + "\n")
    assert machine.read()["cpu_quota"] == pytest.approx(quota)


@pytest.mark.parametrize(
    ("most", "high", "limit"), [("max", "max", -1), ("500000000", "max", 5e8), ("max", "4096", 4096), ("9", "8", 8)]
)
def test_memory_above_which_the_kernel_makes_others_wait_is_a_limit(
    machine: Machine, most: str, high: str, limit: float
) -> None:
    """systemd's MemoryHigh, and Kubernetes' quality of service for memory."""
    machine.v2()
    for name, text in (("max", most), ("high", high), ("current", "0")):
        machine.write(f"sys/fs/cgroup/user/server/memory.{name}", text + "\n")
    assert machine.read()["cgroup_limit_bytes"] == limit


@pytest.mark.parametrize(("quota", "expected"), [("-1", -1), ("350000", 3.5)])
def test_a_quota_of_the_first_version(machine: Machine, quota: str, expected: float) -> None:
    machine.write("proc/self/cgroup", "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/box\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", quota + "\n")
    machine.write("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    report = machine.read()
    assert report["cpu_quota"] == expected and report["cgroup_version"] == 1


def test_idle_workers_spin_only_without_a_quota(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUXION_SPIN_US", raising=False)
    assert machine.read()["spin_us"] == 30
    machine.v2("/")
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert machine.read()["spin_us"] == 0
    monkeypatch.setenv("FLUXION_SPIN_US", "70")
    assert machine.read()["spin_us"] == 70


@given(st.integers(1, 256), st.floats(0.01, 300), st.integers(1, 16))
def test_workers_stay_within_the_quota(cores: int, quota: float, ranks: int) -> None:
    count = workers.within_quota(cores, quota, ranks)
    assert 1 <= count <= cores
    assert count == 1 or count * ranks <= quota
    assert count == cores or (count + 1) * ranks > quota, "all that there is time for"
    assert workers.within_quota(cores, -1, ranks) == cores


def test_a_server_has_as_many_workers_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = topology()
    monkeypatch.setattr(workers, "topology", lambda: here | {"cpu_quota": 1.5})
    assert workers.create_workers(FluxionConfig()).count == 1
    assert workers.create_workers(FluxionConfig(workers=3)).count == 3, "who names a number gets it"


@pytest.mark.parametrize(
    ("quota", "config", "pinned"),
    [(-1.0, {}, True), (1.5, {}, False), (2.0, {}, True), (1.5, {"cores": "0-1"}, True), (1.5, {"workers": 2}, False)],
)
def test_servers_that_share_a_machine_by_quotas_do_not_pin_to_its_first_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float, config: dict[str, Any], pinned: bool
) -> None:
    """Another container would pin its workers to the same cores, and each would get half of them."""
    here, found = topology() | {"cores": [0, 1], "numa": []}, []
    monkeypatch.setattr(workers, "topology", lambda: here | {"cpu_quota": quota})
    monkeypatch.setattr(workers, "Workers", lambda *given: found.append(given))
    workers.create_workers(FluxionConfig(**config))
    assert found[0][3] is pinned


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is nothing to choose")
@pytest.mark.parametrize("pinned", [True, False])
def test_who_is_not_pinned_may_run_on_all_of_its_cores(pinned: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    pool = Workers(len(cores), torch.tensor(cores, dtype=torch.int32), pinned=pinned)
    tasks = set(os.listdir("/proc/self/task")) - before
    masks = [sorted(os.sched_getaffinity(int(task))) for task in tasks]
    assert sorted(masks) == ([[core] for core in cores[1:]] if pinned else [cores] * (len(cores) - 1))
    assert pool.cores == cores


def test_workers_leave_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    here = topology()
    monkeypatch.setattr(workers, "share_of_machine", lambda machine, rank, ranks: machine["cores"][:1] * 8)
    monkeypatch.setattr(workers, "topology", lambda: here | {"cpu_quota": -1.0})
    for busy, count in ((0, 8), (2, 6), (9, 1)):
        assert workers.create_workers(FluxionConfig(), beside=workers.Beside(busy)).count == count
    assert workers.create_workers(FluxionConfig(workers=8), beside=workers.Beside(2)).count == 8
    assert Cuda.__new__(Cuda).beside().busy == 2


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        # Eight physical cores with two threads each in Linux's numbering: second threads come after all first ones.
        (["0-3,8-11", "4-7,12-15"], 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        (["0-3,8-11", "4-7,12-15"], 4, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (["0-3,8-11", "4-7,12-15"], 3, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13]]),
        # Cores alternate between nodes.
        (["0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"], 2, [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]),
        (["0-15"], 1, [list(range(16))]),
        (["0-15"], 9, [[core] for core in range(9)]),
    ],
)
def test_ranks_divide_physical_cores(machine: Machine, nodes: list[str], ranks: int, expected: list[list[int]]) -> None:
    machine.nodes(*nodes)
    for core in range(16):
        machine.write(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 8},{core % 8 + 8}\n")
    found = machine.read(16)
    assert [list(workers.share_of_machine(found, rank, ranks, machine.root)) for rank in range(ranks)] == expected


# --- Memory of several nodes ---


@pytest.mark.parametrize(
    ("nodes", "dealt", "touching", "expected"),
    [
        (["0-7"], range(8), 1, ""),  # one node
        (["0-3", "4-7"], range(8), 8, ""),  # all workers touch memory
        (["0-3", "4-7"], range(8), 4, "0,1"),  # four KV heads: the first four workers touch, all on node 0
        (["0-3", "4-7"], range(8), 1, "0,1"),
        (["0-3", "4-7"], [0, 4, 1, 5], 2, ""),  # one on each node
        (["0-3", "4-7"], range(4), 1, ""),  # the rank's cores are on one node, and so is its memory
        (["0-1", "2-3", "", "4-7"], [0, 2, 4], 2, "0,1,3"),  # no core reads from a node without cores
    ],
)
def test_memory_that_few_would_touch_is_interleaved(
    machine: Machine, nodes: list[str], dealt: list[int], touching: int, expected: str
) -> None:
    machine.nodes(*nodes)
    assert machine.interleaved(8, list(dealt), touching) == expected


@given(
    cores=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    touching=st.integers(1, 12),
)
def test_nodes_are_left_out_only_if_nobody_has_cores_there(
    tmp_path_factory: pytest.TempPathFactory, cores: list[int], order: Any, touching: int
) -> None:
    """cores: the node of each core."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.nodes(*(",".join(str(c) for c, node in enumerate(cores) if node == n) for n in range(4)))
    dealt = list(range(len(cores)))
    order.shuffle(dealt)
    there, touched = set(cores), {cores[core] for core in dealt[:touching]}
    got = machine.interleaved(len(cores), dealt, touching)
    assert got == ("" if touched == there else ",".join(map(str, sorted(there))))


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_no_page_is_left_out_of_what_nodes_touch_in_turn(nodes: int) -> None:
    """Sizes that are no multiples of huge pages, and more nodes than huge pages."""
    faults = tvm_ffi.load_module(Path(os.environ["FLUXION_DEVICE_LIBRARIES"]) / "libfluxion_faults.so")
    for bytes_ in (4096, (2 << 20) - 4096, 4 << 20, (7 << 20) + 8192):
        core = int(topology()["cores"][0])
        assert faults.get_function("touched_in_turn")(bytes_, nodes, core) == bytes_
