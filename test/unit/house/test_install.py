"""Decisions of tools/install.py; `make` on a fresh machine shows that it installs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from places import ROOT

SOURCE = ROOT / "tools" / "install.py"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, for an empty checkout."""
    spec = importlib.util.spec_from_file_location("install", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_who_builds_sees_the_compilers_warnings(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "csrc/a.cc:94:19: warning: loop variable creates a copy [-Wrange-loop-construct]"
    command = ["printf", f"[1/2] a.o\n{said}\n  94 | for\nwarning: uv has news\n[2/2] lib.so\n"]
    install.watch({install.Task("building", command, tmp_path / "log", {}): install.native_progress})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == said and sum("warning" in line for line in lines) == 1
