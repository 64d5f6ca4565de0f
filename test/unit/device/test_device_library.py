"""Files of the device libraries: contents, dependencies, and errors without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import python

from fluxion_sglang.device import library
from fluxion_sglang.device.library import DeviceError, device_library_path, load

CUDA = device_library_path("cuda")
needs_cuda_library = pytest.mark.skipif(not CUDA.is_file(), reason="built without nvcc")


def cuobjdump() -> str | None:
    """NVIDIA's tool that lists the code in a file, from the toolkit or from Triton's wheel."""
    triton = Path(sys.prefix) / f"lib/python3.{sys.version_info.minor}/site-packages/triton/backends/nvidia/bin"
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=f"/usr/local/cuda/bin:{triton}")


@needs_cuda_library
@pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump")
def test_the_cuda_library_has_code_for_every_device_it_is_for() -> None:
    def listed(what: str) -> list[str]:
        done = subprocess.run([str(cuobjdump()), what, str(CUDA)], capture_output=True, text=True, check=True)
        return [line.rsplit(" ", 1)[1] for line in done.stdout.splitlines() if " file " in line]

    code, later = listed("-lelf"), listed("-lptx")
    for source in (
        "copies", "merge", "near_attend", "near_keep", "near_rank", "pages", "port", "publish", "resident", "take",
    ):  # fmt: skip
        assert f"{source}.sm_80.cubin" in code and f"{source}.sm_90a.cubin" in code and f"{source}.sm_90.ptx" in later


@needs_cuda_library
@pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump")
def test_kernels_have_the_registers_that_they_need() -> None:
    """Threads spill at most a few numbers to memory; in a loop, spills would dominate."""
    run = [str(cuobjdump()), "--dump-resource-usage", str(CUDA)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    kernels = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    assert len(kernels) > 80, "of two architectures"
    assert not [name for name, stack, local in kernels if int(stack) > 96 or int(local) > 0]


@needs_cuda_library
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_cuda_library_needs_nothing_of_cuda_to_be_loaded() -> None:
    done = subprocess.run(["readelf", "-d", str(CUDA)], capture_output=True, text=True, check=True)
    needed = [line.rsplit("[", 1)[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert "libtvm_ffi.so" in needed and not [name for name in needed if "cuda" in name]


@needs_cuda_library
def test_without_a_gpu_the_cuda_library_loads_and_says_so() -> None:
    code = (
        "from fluxion_sglang.device.library import DeviceError, load\n"
        "library = load('cuda')\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read(), 'the driver is loaded before it is asked for'\n"
        "for ask in (library.info, library.stream_create):\n"
        "    try:\n        ask()\n    except DeviceError as error:\n        print(error)"
    )
    sentences = python("-c", code, env={"CUDA_VISIBLE_DEVICES": ""}).stdout.splitlines()
    assert len(sentences) == 2 and all("no NVIDIA GPU" in s and s.endswith(".") for s in sentences)


def test_the_simulated_device_says_what_it_is() -> None:
    report = load("sim").info()
    assert report["backend"] == "simulated" and report["memory_bytes"] >= report["free_bytes"] > 0
    assert load("sim").device == "cpu"


def test_a_device_is_selected_by_its_number() -> None:
    load("sim").select(0)
    with pytest.raises(DeviceError, match="failed at selecting a device: invalid device ordinal"):
        load("sim").select(7)
    assert load("sim").info()["device"] == 0


def test_a_library_that_is_missing_broken_or_old_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device_library_path("sim")
    monkeypatch.setenv("FLUXION_LIBRARY", str(tmp_path / "libfluxion.so"))
    monkeypatch.delenv("FLUXION_DEVICE_LIBRARIES")
    with pytest.raises(DeviceError, match=r"libfluxion_cuda.so does not exist; build .* FLUXION_CUDA=on .*nvcc"):
        load.__wrapped__("cuda")
    with pytest.raises(DeviceError, match=r"libfluxion_sim.so does not exist; .*make native-tests"):
        load.__wrapped__("sim")
    broken = tmp_path / "libfluxion_sim.so"
    broken.write_bytes(real.read_bytes()[:5000])
    with pytest.raises(DeviceError, match="it is truncated"):
        load.__wrapped__("sim")
    shutil.copyfile(real, broken)
    monkeypatch.setattr(library, "ABI_VERSION", 0)
    with pytest.raises(DeviceError, match="this package needs 0"):
        load.__wrapped__("sim")
