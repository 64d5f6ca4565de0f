"""Shared by all tests: which of them run, and where libraries for tests lie.

`make test` runs the quick tests. `--full`, which `make test-all` passes, adds those marked `full`.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

_library = os.environ.get("FLUXION_LIBRARY")
_build = Path(_library).parent if _library else Path(__file__).resolve().parents[1] / "build" / "native"
os.environ.setdefault("FLUXION_DEVICE_LIBRARIES", str(_build / "tests"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests that are marked full, too")


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that garbage collections in tests need not scan them."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
