"""The protocol between device, server, workers and foreign executor, in a million interleavings (test/fuzz).

More interleavings, by hand, with other seeds:
    cmake -S test/fuzz -B build/fuzz -GNinja && cmake --build build/fuzz
    build/fuzz/protocol_fuzz --random 10000000 --seed 2 --threads 2
    build/fuzz/protocol_fuzz --exhaustive 1000000000 --deviations 3 --threads 2
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from places import ROOT

FOLDER = ROOT / "build" / "fuzz"
# Minutes: this compiles the programs with every mistake that the fuzzer must find.
full = pytest.mark.full
_MUTANT = re.compile(r"^mutant\((\w+) (\S+)\s+\[==\[(.*?)\]==\]\s+\[==\[(.*?)\]==\]\)", re.MULTILINE | re.DOTALL)
MUTANTS = {name: changes for name, *changes in _MUTANT.findall((ROOT / "test/fuzz/mutants.cmake").read_text())}
"""By name: the file of a mistake, the text there, and its replacement."""


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name) or (str(beside) if beside.exists() else None)
    assert found is not None, name
    return found


@pytest.fixture(scope="module")
def folder() -> Path:
    """The built programs. There is a compiler, because the native library was built."""
    configure = [tool("cmake"), "-S", str(ROOT / "test/fuzz"), "-B", str(FOLDER), "-GNinja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE="]
    for command in (configure, [tool("cmake"), "--build", str(FOLDER)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return FOLDER


def run(program: Path, *options: object) -> tuple[int, str]:
    done = subprocess.run([program, *map(str, options)], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_changes_what_is_there(name: str) -> None:
    file, there, instead = MUTANTS[name]
    assert (ROOT / file).read_text().count(there) == 1 and there != instead


@full
def test_a_million_interleavings(folder: Path) -> None:
    """All interleavings with at most two deviations from the ordinary one, of four small passes; and random ones of
    large passes."""
    options = ["--exhaustive", 1 << 40, "--deviations", 2, "--random", 250_000, "--seed", 1, "--threads", 2]
    status, said = run(folder / "protocol_fuzz", *options)
    assert status == 0, said
    numbers = dict(zip(said.split()[::2], map(float, said.split()[1::2]), strict=True))
    assert numbers["distinct"] >= 1_000_000, said
    assert numbers["faults"] > 100_000, said


@full
def test_the_fuzzer_finds_what_is_wrong(folder: Path) -> None:
    def find(name: str) -> tuple[int, str]:
        # A run ends at the first finding: within 50,000 runs, except after 162,771 for the two that forget a queue's
        # round.
        return run(folder / f"mutant_{name}", "--random", 200_000, "--seed", 1)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(MUTANTS, pool.map(find, MUTANTS), strict=True))
    assert len(found) >= 20
    missed = {name: outcome for name, outcome in found.items() if outcome[0] != 1 or "FAILED" not in outcome[1]}
    assert not missed, missed


@full
@pytest.mark.parametrize("program", ["protocol_stress", "protocol_stress_thread"])
def test_the_same_on_real_threads(folder: Path, program: str) -> None:
    status, said = run(folder / program, 3)
    assert status == 0, said
    assert int(said.split()[1]) > 0, said
