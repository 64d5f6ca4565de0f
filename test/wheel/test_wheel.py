"""The wheel of `make wheel`: its contents, the systems that it fits, and that it serves without a checkout.

FLUXION_WHEEL names a prebuilt wheel, FLUXION_WHEEL_PYTHON the Python of an environment with it installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.full

TOOL = ROOT / "tools" / "wheel.py"
LIBRARY = "fluxion_sglang/_native/libfluxion.so"
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}

SERVE = """
import sys
from fluxion_sglang.commands import needle, serving

document = needle.needle_prompt(2048, 4, 5)
flags = "--served-model-name needle --device cpu --skip-server-warmup --enable-metrics --max-running-requests 4"
command = serving.launch_command(sys.argv[1], port := serving.free_port(), *flags.split(), fluxion={})
assert command[-1] == "--enable-fluxion", command
with serving.running_server(command, port, {"CUDA_VISIBLE_DEVICES": ""}) as server:
    said = server.openai().completions.create(model="needle", prompt=document.text(0), max_tokens=16, temperature=0)
    layers = server.metrics()["fluxion_layers_total"]
print("said", said.choices[0].text, "for", document.questions[0].answer)
assert needle.score(document.questions[0].answer, said.choices[0].text) and layers > 0, layers
print("fluxion layers", layers)
"""


def run(command: list[str], cwd: Path | None = None, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FLUXION_LIBRARY")}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    if not (given := os.environ.get("FLUXION_WHEEL")):
        run([sys.executable, str(TOOL)])
        (given,) = map(str, (ROOT / "dist").glob("*.whl"))
    return Path(given).resolve()


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    with zipfile.ZipFile(wheel) as packed:
        return packed.extract(LIBRARY, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Python of a fresh environment into which pip installed the wheel with all dependencies."""
    if given := os.environ.get("FLUXION_WHEEL_PYTHON"):
        yield given
        return
    folder = tmp_path_factory.mktemp("installed")
    try:
        run([sys.executable, "-m", "venv", str(folder)])
        run([str(folder / "bin" / "pip"), "install", "--progress-bar", "off", str(wheel)])
        yield str(folder / "bin" / "python")
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # 11 GB, which pytest would keep


def test_auditwheel_says_manylinux(wheel: Path) -> None:
    name = re.fullmatch(r"fluxion_sglang-[\d.]+-py3-none-(manylinux_2_\d+_x86_64)\.whl", wheel.name)
    assert name, f"{wheel.name} is not one wheel for every Python 3 on a manylinux system"
    assert f'consistent with the following platform tag: "{name[1]}"' in run(
        [sys.executable, str(TOOL), "--audit", str(wheel)]
    )


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        files = {name for name in packed.namelist() if not name.endswith("/")}
    found = {name for name in files if ".dist-info/" not in name}
    wanted = {LIBRARY}
    for folder, package in (
        (ROOT / "python/fluxion_sglang", "fluxion_sglang"),
        (ROOT / "benchmark/quality", "fluxion_quality"),
    ):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in (".so", ".pyc"):
                wanted.add(f"{package}/{path.relative_to(folder).as_posix()}")
    assert found == wanted, f"too much: {sorted(found - wanted)}; missing: {sorted(wanted - found)}"
    assert "fluxion_sglang/py.typed" in found
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_the_library_is_stripped_and_hardened(library: str) -> None:
    dynamic = run(["readelf", "-dW", library])
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert needed <= SYSTEM, f"the system has no {needed - SYSTEM}"
    assert "BIND_NOW" in dynamic and not re.search(r"RPATH|RUNPATH|TEXTREL", dynamic)
    segments = run(["readelf", "-lW", library])
    assert "GNU_RELRO" in segments
    assert re.search(r"GNU_STACK .* RW +0x", segments), "the stack is executable"
    assert not re.search(r"\.(symtab|debug_\w+)", run(["readelf", "-SW", library]))
    symbols = run(["readelf", "--dyn-syms", "-W", library])
    assert "__stack_chk_fail" in symbols and re.search(r"__\w+_chk@", symbols)


def test_the_library_loads_after_tvm_ffi_alone(library: str) -> None:
    program = "import sys, tvm_ffi; print(tvm_ffi.load_module(sys.argv[1]).get_function('abi_version')())"
    assert int(run([sys.executable, "-c", program, library]).split()[-1]) > 0


def test_the_installed_package_is_the_wheel(python: str, tmp_path: Path) -> None:
    where = run([python, "-c", "import fluxion_sglang; print(fluxion_sglang.__file__)"], cwd=tmp_path)
    assert "site-packages" in where.splitlines()[-1]
    assert "instruction set" in run([str(Path(python).with_name("fluxion")), "doctor"], cwd=tmp_path)


def test_the_installed_package_serves(python: str, tmp_path: Path) -> None:
    """Serve the bundled model from a folder outside the checkout."""
    model = shutil.copytree(ROOT / "models" / "needle", tmp_path / "needle")
    (tmp_path / "elsewhere").mkdir()
    assert "fluxion layers" in run([python, "-c", SERVE, str(model)], cwd=tmp_path / "elsewhere")


def test_the_demo_says_that_it_needs_a_model(python: str, tmp_path: Path) -> None:
    command = [python, "-m", "fluxion_sglang", "ask", "--demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "There is no folder" in done.stderr and "Traceback" not in done.stderr
