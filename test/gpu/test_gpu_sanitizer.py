"""The kernels of the CUDA library under NVIDIA's compute-sanitizer, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import skip

from fluxion_sglang.device.library import DeviceLibrary

pytestmark = [pytest.mark.gpu, pytest.mark.full]
KERNELS = Path(__file__).with_name("test_gpu_kernels.py")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_under(tool: str, cuda: DeviceLibrary) -> None:
    program = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or shutil.which("compute-sanitizer")
    if program is None:
        skip("no compute-sanitizer")
    # Exclude the test whose device times out: everything takes many times as long here.
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", str(KERNELS)]
    done = subprocess.run([*command, "-k", "not for_ever"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
