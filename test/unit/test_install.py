"""tools/install.py, where it decides; that it installs is for `make` on a fresh machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "install.py"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, for an empty checkout."""
    spec = importlib.util.spec_from_file_location("install", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


@pytest.mark.parametrize(
    ("cache", "builds"),
    [
        (None, 1),
        ("CMAKE_CXX_COMPILER:FILEPATH=/usr/bin/c++\n", 1),
        ("CMAKE_CUDA_COMPILER:FILEPATH=CMAKE_CUDA_COMPILER-NOTFOUND\n", 1),
        ("CMAKE_CUDA_COMPILER:FILEPATH=/usr/local/cuda/bin/nvcc\n", 2),
    ],
)
def test_the_cuda_library_is_built_once_more_when_flashinfer_is_there(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str | None, builds: int
) -> None:
    if cache is not None:
        (tmp_path / "build" / "native").mkdir(parents=True)
        (tmp_path / "build" / "native" / "CMakeCache.txt").write_text(cache)
    watched: list[list[str]] = []
    for name, stub in {
        "make_venv": lambda: None,
        "installer": lambda: ["pip"],
        "packages": lambda *_: "packages",
        "native": lambda: "native",
        "watch": lambda tasks: watched.append(list(tasks)),
    }.items():
        monkeypatch.setattr(install, name, stub)
    install.install_everything("")
    assert watched[0] == ["packages", "native"] and watched[1:] == [["native"]] * (builds - 1)


def test_who_builds_sees_the_compilers_warnings(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "csrc/a.cc:94:19: warning: loop variable creates a copy [-Wrange-loop-construct]"
    command = ["printf", f"[1/2] a.o\n{said}\n  94 | for\nwarning: uv has news\n[2/2] lib.so\n"]
    install.watch({install.Task("building", command, tmp_path / "log", {}): install.native_progress})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == said and sum("warning" in line for line in lines) == 1
