"""The records of the extraction tasks: employees, ships and paintings, drawn from lists of words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

Record = dict[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind of record.

    Attributes:
        sentences: templates of a note; each contains all fields.
    """

    plural: str
    fields: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def question(self) -> str:
        """The question for all records of this kind."""
        form = json.dumps(dict.fromkeys(self.fields, "..."))
        return (
            f"List all {self.plural} that the notes mention. Write one JSON object a line, with exactly these fields, "
            f"and copy the values as the notes have them: {form}\nWrite these lines and nothing else."
        )


KINDS: Final = (
    Kind(
        "employees",
        ("name", "department", "city", "badge", "year"),
        (
            "{name} joined the {department} department in {city} in {year} and wears badge {badge}.",
            "Badge {badge} belongs to {name}, who has worked in {city} for the {department} department since {year}.",
            "Since {year} the {department} department in {city} has had {name} on its list, with badge {badge}.",
        ),
    ),
    Kind(
        "ships",
        ("name", "flag", "cargo", "berth", "tonnage"),
        (
            "The ship {name} ({tonnage} tons) carries {cargo} under the flag of {flag} and lies at berth {berth}.",
            "At berth {berth} lies the ship {name}, {tonnage} tons, with the flag of {flag} and a cargo of {cargo}.",
            "With {cargo} on board, the ship {name} ({tonnage} tons, flag of {flag}) took berth {berth}.",
        ),
    ),
    Kind(
        "paintings",
        ("name", "painter", "room", "height", "price"),
        (
            "The painting {name} by {painter} hangs in room {room}, is {height} centimetres high and cost {price} "
            "crowns.",
            "For {price} crowns the museum bought the painting {name}, {height} centimetres high, by {painter}; "
            "it is in room {room}.",
            "In room {room} there is the painting {name}, which {painter} sold for {price} crowns; "
            "its height is {height} centimetres.",
        ),
    ),
)

_FIRST = "Ada Boris Clara Dmitri Elena Felix Greta Hugo Irene Jonas Karin Lukas Marta Nadia Oskar Paula"
_LAST = "Abel Brandt Castro Dorn Ekman Falk Gruber Holm Ivers Jansen Keller Lind Moreau Novak Orlov Petit"
_ADJECTIVES = "Amber Bright Crimson Distant Early Frozen Golden Hidden Iron Jade Lonely Misty Northern Open"
_NOUNS = "Anchor Bridge Candle Dawn Falcon Garden Harbour Island Lantern Meadow Orchard Pilgrim River Star"
_WORDS: Final = {
    "department": "accounting archive design legal logistics planning research safety training transport",
    "city": "Ankara Bergen Bogota Cairo Dublin Geneva Hanoi Krakow Lima Lisbon Nairobi Oslo Porto Quito Riga",
    "flag": "Brazil Canada Chile Denmark Egypt Finland Greece Iceland India Japan Kenya Malta Norway Panama",
    # Names that no employee has.
    "painter": "Almeida Bianchi Carracci Duarte Escher Fontana Goya Hokusai Ingres Kandel Lippi Morisot Ribera Sorolla",
    "cargo": "barley cement coffee copper cotton fertilizer furniture grain paper rice salt steel sugar timber",
}
_NUMBERS: Final = {
    "badge": (10000, 99999),
    "year": (1961, 2019),
    "tonnage": (1000, 9999),
    "room": (101, 199),
    "height": (40, 240),
    "price": (10000, 99999),
}


def draw_records(rng: np.random.Generator, count: int) -> dict[Kind, list[Record]]:
    """`count` records of every kind; all names differ."""
    employees, ships, paintings = KINDS
    people = _pairs(rng, _FIRST, _LAST)
    things = _pairs(rng, _ADJECTIVES, _NOUNS)
    names = {employees: people[:count], ships: things[:count], paintings: things[count : 2 * count]}
    return {
        kind: [{"name": name} | {field: _value(rng, field) for field in kind.fields[1:]} for name in names[kind]]
        for kind in KINDS
    }


def pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


def _pairs(rng: np.random.Generator, first: str, second: str) -> list[str]:
    pairs = [f"{a} {b}" for a in first.split() for b in second.split()]
    return [pairs[i] for i in rng.permutation(len(pairs))]


def _value(rng: np.random.Generator, field: str) -> str:
    if field in _NUMBERS:
        low, high = _NUMBERS[field]
        return str(rng.integers(low, high + 1))
    if field == "berth":
        return f"{pick(rng, 'ABCDEFGH')}{rng.integers(10, 100)}"
    return pick(rng, _WORDS[field].split())
