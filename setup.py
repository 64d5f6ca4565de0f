"""Builds the native library with CMake and Ninja, and says where the packages are; the rest is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE = "fluxion_sglang._native"
# The host's, and CUDA's: FLUXION_CUDA says "on", "off" or "auto" (where nvcc and a GPU's driver are).
LIBRARIES = ("libfluxion", "libfluxion_cuda")

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel


class BuildNative(build_ext):
    """Runs CMake and Ninja for the libraries; they have a C ABI and no Python.h in them."""

    def get_ext_filename(self, fullname: str) -> str:
        # No cpython-311 in the name: a library is the same for every Python.
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self) -> None:
        if _skipped():
            # For work on the Python side alone: the package installs, `fluxion doctor` says that the library
            # is missing.
            print("FLUXION_SKIP_NATIVE=1: the native library is not built", file=sys.stderr)
            return
        build = Path(os.environ.get("FLUXION_BUILD_DIR", ROOT / "build" / "native"))
        build.mkdir(parents=True, exist_ok=True)
        # The cache remembers absolute paths, and pip's build environments live for one build only.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        for library in LIBRARIES[1:]:
            # An earlier build may have made one that this one will not.
            (build / f"{library}.so").unlink(missing_ok=True)
        configure = [_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-GNinja"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"]
        configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DFLUXION_CUDA={os.environ.get('FLUXION_CUDA') or 'auto'}"]
        _run([*configure, *os.environ.get("FLUXION_CMAKE_ARGS", "").split()])
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        _run([_tool("cmake"), "--build", str(build), "--parallel", jobs])
        for ext in list(self.extensions):
            built, target = build / f"{ext.name.split('.')[-1]}.so", Path(self.get_ext_fullpath(ext.name)).resolve()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if not built.exists():
                self.extensions.remove(ext)
                continue
            # Not copy2: the file must be younger than the sources for `make`, also when nothing had to be
            # compiled.
            shutil.copyfile(built, target)
            target.chmod(0o755)

    def copy_extensions_to_source(self) -> None:
        if not _skipped():
            # A fresh clone has no such folder, and setuptools copies without making one.
            folder = ROOT / "python" / Path(*NATIVE.split("."))
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob("*.so"):
                stale.unlink()
            super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [] if _skipped() else super().get_outputs()


class PlatformWheel(bdist_wheel):
    """One wheel a platform, for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def _skipped() -> bool:
    return os.environ.get("FLUXION_SKIP_NATIVE") == "1"


def _tool(name: str) -> str:
    """The tool on PATH, where a build environment puts its own, else the one beside this Python."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name) or (str(beside) if beside.exists() else None)
    if found is None:
        raise SystemExit(f"{name} was not found; install it with: {sys.executable} -m pip install {name}")
    return found


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"building the native library failed: {' '.join(command)}") from error


setup(
    # The quality harness stands beside the other benchmarks, and `fluxion bench quality` needs it where there is no
    # checkout.
    packages=[*find_packages("python", include=["fluxion_sglang*"]), "fluxion_quality"],
    package_dir={"": "python", "fluxion_quality": "benchmark/quality"},
    ext_modules=[Extension(f"{NATIVE}.{library}", sources=[]) for library in LIBRARIES],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
