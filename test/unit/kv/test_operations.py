"""Random operations on pool, radix tree and policies (test/fuzz/operations.py): some thousands of them.

`make fuzz` runs a million under sanitizers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import examples
from fuzz.operations import ROWS, Machine, Request, Wrong, run


def test_random_operations() -> None:
    counts = run(examples(20_000), seed=1)
    happened = {"token", "chunk", "hit", "diverges", "retracted", "aborted", "evicted page", "healed", "compared"}
    assert happened <= counts.keys(), counts


def nothing_heals(machine: Machine) -> None:
    machine.windows.stale = lambda *args: []  # type: ignore[method-assign]


def a_free_page_is_used(machine: Machine) -> None:
    release = machine._release

    def early(request: Request) -> None:
        pages = request.pages[request.shared :]
        release(request)
        if pages and machine.running:
            other = machine.rng.choice(machine.running)
            if len(other.pages) > other.shared + 1:
                other.pages[other.shared] = pages[0]

    machine._release = early  # type: ignore[method-assign]


def a_page_is_lost(machine: Machine) -> None:
    give_back = machine._give_back
    machine._give_back = lambda page: None if page == 7 else give_back(page)  # type: ignore[method-assign]


def a_window_is_anothers(machine: Machine) -> None:
    """Read residents of a row from the next row."""
    fill = machine.windows.fill

    def wrong(layer: int, row: int, n: int, pages: torch.Tensor) -> None:
        fill(layer, row % (ROWS - 1) + 1, n, pages)

    machine.windows.fill = wrong  # type: ignore[method-assign]


def requests_read_pages_of_others(machine: Machine) -> None:
    begin = machine.device.begin_decode

    def wrong(rows: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, policies: object) -> None:
        begin(rows, lengths, pages.roll(1, 0), policies)  # type: ignore[arg-type]

    machine.device.begin_decode = wrong  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    "plant",
    [nothing_heals, a_free_page_is_used, a_page_is_lost, a_window_is_anothers, requests_read_pages_of_others],
    ids=lambda plant: plant.__name__,
)
def test_planted_mistakes_are_found(plant: Callable[[Machine], None]) -> None:
    with pytest.raises((Wrong, ValueError, RuntimeError)):
        for seed in range(20):
            machine = Machine(seed)
            plant(machine)
            for number in range(400):
                machine.step()
                if number % 50 == 0:
                    machine.audit()
            machine.drain()
