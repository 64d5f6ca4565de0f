"""Builds the native library with CMake and Ninja, and locates the packages; the rest is in pyproject.toml."""

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
# The host's and CUDA's library. FLUXION_CUDA is "on", "off" or "auto" (if there are nvcc and a GPU's driver).
LIBRARIES = ("libfluxion", "libfluxion_cuda")

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel


class BuildNative(build_ext):
    """Runs CMake and Ninja for the libraries, which have a C ABI and do not include Python.h."""

    def get_ext_filename(self, fullname: str) -> str:
        # No cpython-311 in the name: a library is the same for every Python.
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self) -> None:
        if _skipped():
            # For work on Python code only: the package installs, and `fluxion doctor` reports the missing library.
            print("FLUXION_SKIP_NATIVE=1: the native library is not built", file=sys.stderr)
            return
        build = Path(os.environ.get("FLUXION_BUILD_DIR", ROOT / "build" / "native"))
        build.mkdir(parents=True, exist_ok=True)
        # The cache contains absolute paths, but pip's build environments exist for one build only.
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        for library in LIBRARIES[1:]:
            # Remove a library of an earlier build that this one may not make.
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
            # Not copy2: for `make` the file must be newer than the sources, even if nothing was compiled.
            shutil.copyfile(built, target)
            target.chmod(0o755)

    def copy_extensions_to_source(self) -> None:
        if not _skipped():
            # A fresh clone lacks this folder, and setuptools does not create it.
            folder = ROOT / "python" / Path(*NATIVE.split("."))
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob("*.so"):
                stale.unlink()
            super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [] if _skipped() else super().get_outputs()


class PlatformWheel(bdist_wheel):
    """One wheel per platform, for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def _skipped() -> bool:
    return os.environ.get("FLUXION_SKIP_NATIVE") == "1"


def _tool(name: str) -> str:
    """The tool on PATH, which includes a build environment's tools; else the one beside this Python."""
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
    # The quality harness is in benchmark/, but `fluxion bench quality` needs it without a checkout.
    packages=[*find_packages("python", include=["fluxion_sglang*"]), "fluxion_quality"],
    package_dir={"": "python", "fluxion_quality": "benchmark/quality"},
    ext_modules=[Extension(f"{NATIVE}.{library}", sources=[]) for library in LIBRARIES],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
