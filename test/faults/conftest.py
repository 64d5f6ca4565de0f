"""Fixtures of this folder: servers in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults.child import Child

Serve = Callable[..., Child]


@pytest.fixture(scope="class")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers for a class, with the canary on every page; they end with the class."""
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:

        def start(*flags: str, config: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Child:
            log = folder / f"server-{len(list(folder.iterdir()))}.log"
            child = Child(*flags, log=Path(log), env=env, config={"canary": 1.0, **(config or {})})
            return stack.enter_context(child)

        yield start


@pytest.fixture(scope="class")
def server(request: pytest.FixtureRequest, serve: Serve) -> Child:
    """A server with the flags that the class names in `FLAGS`."""
    return serve(*getattr(request.cls, "FLAGS", ()))
