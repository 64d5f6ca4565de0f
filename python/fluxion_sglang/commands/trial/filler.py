"""Sentences that say nothing, and names for keys: words of our own, so that no package or file is needed."""

from __future__ import annotations

from typing import Final

import numpy as np

_PEOPLE: Final = (
    "baker|captain|carpenter|clerk|cook|doctor|driver|farmer|fisher|gardener|guard|judge|librarian|miller|musician|"
    "nurse|painter|pilot|poet|printer|sailor|singer|student|tailor|teacher|visitor|weaver|writer"
)
_QUALITIES: Final = (
    "careful|cheerful|clever|curious|famous|friendly|gentle|honest|lonely|modest|nervous|patient|proud|quiet|sleepy|"
    "stubborn|tall|thoughtful|tired|young"
)
_DEEDS: Final = (
    "carried a basket|closed the shutters|cleaned the lamps|counted the boats|fed the horses|folded the letters|"
    "listened to the rain|looked for a map|mended a fence|opened a window|painted a door|planted some herbs|"
    "read an old book|repaired a clock|sang a short song|sharpened the tools|sold a few apples|stacked the firewood|"
    "swept the floor|waited for a train|watched the clouds|wrote a long note"
)
_PLACES: Final = (
    "at the harbour|at the market|behind the mill|beside the canal|in the courtyard|in the kitchen|in the library|"
    "in the old town|in the orchard|near the bridge|near the chapel|on the hill|on the square|outside the station|"
    "under the oak|by the river"
)
_TIMES: Final = (
    "before noon|after the storm|all morning|early that day|every Tuesday|for an hour|in late spring|in the evening|"
    "last winter|on a cold day|once again|that afternoon|without a word|while the others slept"
)

_COLOURS: Final = (
    "amber|azure|bronze|copper|coral|crimson|emerald|golden|indigo|ivory|jade|olive|pearl|purple|scarlet|silver"
)
_THINGS: Final = (
    "anchor|arrow|beacon|candle|compass|crown|dragon|falcon|harp|kettle|ladder|lantern|mirror|saddle|tower|violin"
)


def sentences(rng: np.random.Generator, count: int) -> list[str]:
    columns = [text.split("|") for text in (_QUALITIES, _PEOPLE, _DEEDS, _PLACES, _TIMES)]
    drawn = [rng.integers(0, len(words), count).tolist() for words in columns]
    return [
        "The {} {} {} {} {}.".format(*(words[i] for words, i in zip(columns, row, strict=True)))
        for row in zip(*drawn, strict=True)
    ]


def keys(rng: np.random.Generator, count: int) -> list[str]:
    """Different names, such as "the amber lantern"; no two share a noun while there are enough of those."""
    colours, things = _COLOURS.split("|"), _THINGS.split("|")
    nouns = rng.permutation(len(things)).tolist()
    return [f"the {colours[int(rng.integers(len(colours)))]} {things[nouns[i]]}" for i in range(count)]
