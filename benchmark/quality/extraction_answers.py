"""Parse and score the answers of the extraction tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Triple = tuple[str, str, str]
"""Name of a record, field, value."""


def triples_f1(output: str, references: Sequence[str]) -> float:
    """F1 between the triples (record, field, value) of an output and those of the references (JSON objects)."""
    said = triples(objects(output))
    true = triples(json.loads(reference) for reference in references)
    common = len(said & true)
    return 2 * common / (len(said) + len(true)) if common else 0.0


def triples(found: Iterable[dict[str, Any]]) -> set[Triple]:
    """The triples of named objects. Case, surrounding space and quotes around numbers are ignored."""
    return {
        (_plain(thing["name"]), _plain(field), _plain(value))
        for thing in found
        for field, value in thing.items()
        if field != "name"
    }


def objects(text: str) -> list[dict[str, Any]]:
    """The named JSON objects in a text, in any arrangement: one per line, in an array, in an object, fenced.

    Truncated objects and invalid JSON are skipped; later objects count.
    """
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            end = at + 1
        else:
            found += _named(value)
        at = text.find("{", end)
    return found


def _named(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        if "name" in value:
            return [value]
        return [thing for inner in value.values() for thing in _named(inner)]
    if isinstance(value, list):
        return [thing for inner in value for thing in _named(inner)]
    return []


def _plain(value: Any) -> str:
    return " ".join(str(value).split()).casefold()
