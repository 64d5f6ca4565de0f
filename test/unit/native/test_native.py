"""The native library: loading it, its errors, its threads."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_world import NativeWorld

from fluxion_sglang import native
from fluxion_sglang.native import NativeLibraryError, NativePool, Workers, loading

Load = Callable[[Path], object]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the library from a path, bypassing the cached one."""

    def load_from(path: Path) -> object:
        monkeypatch.setenv("FLUXION_LIBRARY", str(path))
        return native.library.__wrapped__()

    return load_from


def one_sentence(error: pytest.ExceptionInfo[NativeLibraryError], path: Path) -> None:
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    assert text.endswith(".")
    assert "reinstall" in text


def test_a_missing_library(load: Load, tmp_path: Path) -> None:
    with pytest.raises(NativeLibraryError, match="does not exist") as error:
        load(tmp_path / "libfluxion.so")
    one_sentence(error, tmp_path / "libfluxion.so")


@pytest.mark.parametrize("content", [None, b"", b"no library"], ids=["missing", "empty", "text"])
def test_a_library_beside_it_that_cannot_be_loaded(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libfluxion_lab.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NativeLibraryError, match=r"cannot be loaded.*; build it with `make lab`\.$"):
        native.companion(path, "build it with `make lab`")


def test_a_library_beside_it_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(os.environ["FLUXION_DEVICE_LIBRARIES"]) / "libfluxion_probe.so"
    monkeypatch.setattr(loading, "ABI_VERSION", 3)
    monkeypatch.setattr(loading, "library", lambda: None)
    with pytest.raises(NativeLibraryError, match=r"and Fluxion has 3; build it\.$"):
        native.companion(path, "build it")


@pytest.mark.parametrize("content", [b"", b"no library", None], ids=["empty", "text", "truncated"])
def test_a_corrupted_library(load: Load, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libfluxion.so"
    path.write_bytes(native.library_path().read_bytes()[:5000] if content is None else content)
    with pytest.raises(NativeLibraryError, match="cannot be loaded") as error:
        load(path)
    one_sentence(error, path)


def build(source: str, path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source.encode(), check=True)


def test_another_library(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "libother.so"
    build("int nothing;", path)
    with pytest.raises(NativeLibraryError, match="cannot be loaded") as error:
        load(path)
    one_sentence(error, path)


def test_another_abi_version(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "libfluxion.so"
    source = """
    #include <stdint.h>
    typedef struct { int32_t type; int32_t padding; int64_t value; } Any;
    int __tvm_ffi_abi_version(void* self, const Any* args, int32_t n, Any* result) {
      result->type = 1; result->padding = 0; result->value = 999; return 0;
    }"""
    build(source, path)
    with pytest.raises(NativeLibraryError, match="ABI version 999 and this package needs") as error:
        load(path)
    one_sentence(error, path)


def test_blocking_functions_release_the_gil() -> None:
    for name in sorted(loading._BLOCKING):
        assert native.function(name).release_gil
    assert not native.function("engine_queue_pop").release_gil


def test_topology() -> None:
    report = native.topology()
    assert sorted(report["cores"]) == sorted(os.sched_getaffinity(0))
    assert sorted(core for node in report["numa"] for core in node["cores"]) == sorted(report["cores"])
    assert report["isas"][0] == "scalar"
    assert report["isa"] in report["isas"]
    caches = [path.parent for path in Path(f"/sys/devices/system/cpu/cpu{report['cores'][0]}/cache").glob("*/level")]
    of_data = [cache for cache in caches if (cache / "type").read_text().strip() != "Instruction"]
    last = max(of_data, key=lambda cache: int((cache / "level").read_text()), default=None)
    kib = int((last / "size").read_text().strip().removesuffix("K")) if last else 0
    threads = (last / "shared_cpu_map").read_text().replace(",", "") if last else "1"
    assert report["last_cache_bytes_per_thread"] == kib * 1024 // int(threads, 16).bit_count()
    assert 0 < report["available_bytes"] <= report["mem_available_bytes"] <= report["mem_total_bytes"]
    if report["cgroup_limit_bytes"] >= 0:
        assert report["available_bytes"] <= report["cgroup_available_bytes"] <= report["cgroup_limit_bytes"]


def tiny_pool(isa: str | None = None) -> NativePool:
    return NativePool(
        Workers(1), layers=1, kv_heads=1, pages=2, head_dim=32, dtype=torch.float32, sink_pages=0, isa=isa
    )


def test_a_wrong_isa_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'"mmx"; choose one of scalar'):
        tiny_pool("mmx")
    monkeypatch.setenv("FLUXION_ISA", "mmx")
    with pytest.raises(RuntimeError, match=r"mmx.*scalar") as error:
        tiny_pool()
    report = native.topology()
    assert report["isa"] == ""
    assert report["isa_error"] == str(error.value)


def test_the_isa_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUXION_ISA", "scalar")
    assert tiny_pool().isa == native.topology()["isa"] == "scalar"


def python(code: str, **environment: str) -> str:
    """Standard output of a fresh Python that must exit normally."""
    path = os.pathsep.join([str(Path(native.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_AFFINITIES = """
import ctypes, glob, os, platform, struct, sys, time
from fluxion_sglang.native import Workers
number = {"x86_64": 203, "aarch64": 122}[platform.machine()]  # of sched_setaffinity
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]  # 1: EPERM
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
    sys.exit(print("no filters here"))
try:
    os.sched_setaffinity(0, {0})
    raise AssertionError("the filter is not in place")
except PermissionError:
    workers = Workers(3)
names = []
while sum(name.startswith("fluxion-") for name in names) < 2:  # they name themselves
    time.sleep(0.01)
    names = [open(comm).read() for comm in glob.glob("/proc/self/task/*/comm")]
print("both")
"""


def test_workers_start_where_they_may_not_choose_their_cores() -> None:
    """A service manager's sandbox may forbid pinning: then the kernel places them."""
    answer = python(NO_AFFINITIES).split("\n")[0]
    if answer == "no filters here":
        pytest.skip("this kernel takes no seccomp filter")
    assert answer == "both"


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_a_bad_number_of_workers(count: int) -> None:
    with pytest.raises(ValueError, match=f"number of workers is {count}|must be between 1 and 4096"):
        Workers(count)


def native_threads() -> dict[str, str]:
    """Thread id -> allowed cores of this process's native workers."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:  # it has ended
            continue
        if fields["Name"].strip().startswith("fluxion-"):
            found[status.parent.name] = fields["Cpus_allowed_list"].strip()
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_workers_are_pinned_and_end() -> None:
    before = set(native_threads())
    affinity = os.sched_getaffinity(0)
    core = min(affinity)
    workers = Workers(4, torch.tensor([core], dtype=torch.int32))
    assert workers.cores == [core]
    assert eventually(lambda: len(set(native_threads()) - before) == 3)
    started = set(native_threads()) - before
    assert {native_threads()[thread] for thread in started} == {str(core)}
    assert os.sched_getaffinity(0) == affinity, "the caller is never pinned"
    del workers
    assert eventually(lambda: not started & set(native_threads()))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the caller has nowhere else to go")
def test_a_caller_on_the_core_of_a_worker_leaves_it() -> None:
    affinity = os.sched_getaffinity(0)
    here, there = sorted(affinity)[:2]
    core_of_caller = ctypes.CDLL(None).sched_getcpu
    world = NativeWorld(workers=2, cores=(there, here))
    requests = [world.add(500)]
    left = 0
    try:
        for allowed in [affinity] * 20 + [{here}]:
            os.sched_setaffinity(0, {here})
            os.sched_setaffinity(0, allowed)
            world.begin_step(requests)
            world.begin_layer(requests, 0, world.plan(requests))
            left += core_of_caller() != here
            assert os.sched_getaffinity(0) == allowed, "the caller is never pinned"
            world.engine.layer_finish()
    finally:
        os.sched_setaffinity(0, affinity)
    assert left > 15  # the scheduler may decide otherwise


def test_a_core_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match="Core 100000 is not among the cores"):
        Workers(2, torch.tensor([100000], dtype=torch.int32))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("layers", 0, "0 layers"), ("kv_heads", 0, "0 KV heads"), ("pages", 1, "1 pages"),
        ("head_dim", 16, "head_dim is 16"), ("head_dim", 72, "head_dim is 72"), ("head_dim", 512, "head_dim is 512"),
        ("sink_pages", -1, "is -1"), ("dtype", torch.float16, "torch.float16"),
    ],
)  # fmt: skip
def test_pools_that_cannot_be(field: str, value: object, sentence: str) -> None:
    shape = {"layers": 1, "kv_heads": 1, "pages": 4, "head_dim": 64, "dtype": torch.bfloat16, "sink_pages": 0}
    with pytest.raises(ValueError, match=sentence):
        NativePool(Workers(1), **{**shape, field: value})


def test_a_pool_too_large_for_the_machine_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"needs .* GiB and .* GiB of memory are available; lower host_tokens"):
        NativePool(Workers(1), layers=64, kv_heads=64, pages=1 << 24, head_dim=128, dtype=torch.bfloat16, sink_pages=4)


def test_handles_of_another_kind_are_refused() -> None:
    workers = Workers(1)
    with pytest.raises(TypeError, match=r"fluxion\.HostPool"):
        native.function("pool_tensor")(workers.handle, "tiles", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_computes_and_exits() -> None:
    """The child has none of the threads: the caller does everything, and the exit does not wait."""
    world = NativeWorld(workers=3)
    request = world.add(300)
    pages = torch.tensor(request.pages, dtype=torch.int32)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            world.pool.gather(0, pages)
            world.begin_step([request])
            _, q, out = world.begin_layer([request], 0, world.plan([request]))
            world.engine.layer_finish()
            world.check(out, world.expected([request], 0, q, world.everything([request])))
            workers = world.pool.workers
            del world.engine, world.pool, workers
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_ends_with_everything_alive() -> None:
    """Views, an open layer and spinning workers at exit."""
    code = """
import torch
from fluxion_sglang.native import AttentionLayer, NativeEngine, NativePlan, NativePool, Workers
w = Workers(4)
p = NativePool(w, layers=1, kv_heads=1, pages=9, head_dim=32, dtype=torch.bfloat16, sink_pages=0)
view = p.tensor("tiles", 0)
sizes = dict(q_heads=1, sinks=0, window=16, max_requests=1, max_pages=1)
e = NativeEngine(w, p, **sizes, attend_union=True, share_prefixes=False)
e.step(*(torch.tensor(x, dtype=torch.int32) for x in ([0], [100], [[1, 2, 3, 4, 5, 6, 7]])))
q = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
windows = torch.zeros(1, 2, 2, 16, 32, dtype=torch.bfloat16)
one = torch.ones(1, 1)
plan = NativePlan(torch.full((1, 1), 16, dtype=torch.int32), one, one)
e.layer_begin(plan, AttentionLayer(e, 0, 1.0, windows), q, q, q, q)
print("ok")
"""
    assert python(code).strip() == "ok"
