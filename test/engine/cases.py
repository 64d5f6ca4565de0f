"""Prompts on which plain SGLang and Fluxion must agree token for token, and plain SGLang's answers to them."""

from __future__ import annotations

import numpy as np

from fluxion_sglang.commands.needle import needle_prompt

LENGTHS = {50: 64, 300: 60, 2000: 64, 5000: 32, 20000: 24}
"""Prompt length -> new tokens. 300 + 60 wraps the ring; 5,000 is longer than every window together."""

LONG_PROMPT, LONG_NEW = 600, 2000
"""A long generation: decoded tokens leave the window and enter the middle."""

TURN_NEW, TURN_EXTRA = 40, 200
"""A second turn: this many tokens generated, then this many appended to the whole conversation."""


def prompt(length: int, seed: int) -> list[int]:
    """`length` token ids in the bundled model's language, a question at the end."""
    ids = needle_prompt(max(length, 640), 8, seed).token_ids()
    return ids[:1] + ids[len(ids) - length + 1 :]


def filler(length: int, seed: int) -> list[int]:
    """`length` ordinary symbols that differ between seeds from the first one on."""
    return [int(i) for i in np.random.default_rng(seed).integers(208, 500, length)]


def family() -> list[tuple[list[int], int]]:
    """Eight requests of mixed length. Six share a document and leave it at positions that are not block boundaries:
    1,040 = 8 * 128 + 16 diverges inside a 128-block, after its first page; 1,027 and 777 inside a page."""
    document = prompt(1400, 7)
    cuts = [1040, 1040, 1027, 777, 1400, 1391]
    shared = [(document[:cut] + filler(150 + 7 * i, 100 + i), 48) for i, cut in enumerate(cuts)]
    return [*shared, (prompt(90, 21), 48), (prompt(3000, 22), 48)]


def crowd() -> list[tuple[list[int], int]]:
    """Six requests that together need more than a host pool of 2,400 tokens."""
    return [(prompt(420, 40 + i), 40) for i in range(6)]


def relatives() -> list[tuple[list[int], int]]:
    """Three requests with prefixes of 800 and 480 tokens in common."""
    document = prompt(1000, 60)
    return [
        (document[:800] + filler(100, 61), 40),
        (document[:800] + filler(60, 62), 40),
        (document[:480] + filler(90, 63), 40),
    ]


def all_cases() -> dict[str, tuple[list[int], int]]:
    """Every single-turn case by name."""
    cases = {f"length-{n}": (prompt(n, n), new) for n, new in LENGTHS.items()}
    cases["long-generation"] = (prompt(LONG_PROMPT, 3), LONG_NEW)
    for name, group in {"family": family(), "crowd": crowd(), "relatives": relatives()}.items():
        cases.update({f"{name}-{i}": case for i, case in enumerate(group)})
    return cases


def second_turn(first: list[int], answer: list[int]) -> list[int]:
    """The conversation so far with the user's next message appended."""
    return first + answer + filler(TURN_EXTRA, 9)
