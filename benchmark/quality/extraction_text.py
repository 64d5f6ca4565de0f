"""Extraction from English text: notes about people, ships and paintings; the answer is a table of one kind.

Everything is random: no data is needed, and no model has seen the records. Records of the three kinds lie scattered
among unrelated sentences. Each kind is asked for in turn; the other two are distractors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .base import Codec
from .extraction_records import KINDS, draw_records, pick

# Tokens of unrelated sentences at both ends of the notes, more than the sinks and the window hold.
_LEAD, _TAIL = 80, 320
_PARAGRAPH: Final = 6  # sentences

_SENTENCES: Final = (
    "The {thing} near the {place} was {state} again {when}.",
    "Nobody at the {place} could say why the {thing} had become so {state}.",
    "{when} the {place} was quiet, and only the {thing} looked {state}.",
    "Some said that the {thing} had always been {state}, at least {when}.",
    "A visitor to the {place} wrote about a {state} {thing} and little else.",
    "It rained {when}, so that the {thing} by the {place} stayed {state}.",
)
_WORDS: Final = {
    "thing": "bench,bicycle,clock,curtain,door,fence,fountain,hedge,kettle,ladder,lamp,piano,radio,roof,stove",
    "place": "bakery,cafe,chapel,courtyard,crossing,library,market,mill,park,pharmacy,pond,school,square",
    "state": "clean,cold,crooked,dark,dusty,empty,famous,heavy,loud,old,pale,quiet,small,strange,warm,wet",
    "when": "in the morning,in winter,after the holidays,at noon,on most days,late at night",
}


@dataclass(frozen=True)
class Extraction:
    """A question for all records of one kind.

    Attributes:
        kind: plural of the kind.
        answer: the records as the answer should list them, one JSON object each.
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[str, ...]
    max_new_tokens: int


def records_among_sentences(codec: Codec, length: int, asked: int, rng: np.random.Generator) -> list[Extraction]:
    """Notes with `asked` records of every kind, and the question for each kind.

    Prompt and answer have at most `length` tokens together, as close to it as whole sentences allow.

    Raises:
        ValueError: the length is too short.
    """
    records = draw_records(rng, asked)
    lines = {kind: tuple(map(json.dumps, found)) for kind, found in records.items()}
    # A quarter more than the reference, for spaces, quotes and a fence around the lines.
    room = {kind: len(codec.encode("\n".join(found))) * 5 // 4 + 16 for kind, found in lines.items()}
    budget = length - max(room.values())

    notes = [pick(rng, kind.sentences).format(**record) for kind, found in records.items() for record in found]
    notes = [notes[i] for i in rng.permutation(len(notes))]
    places = np.sort(rng.random(len(notes))).tolist()

    def prompts(fillers: Sequence[str], lead: int, tail: int) -> list[list[int]]:
        text = _paragraphs(_scattered(notes, places, fillers, lead, tail))
        return [codec.chat(f"Read these notes.\n\n{text}\n\n{kind.question}") for kind in KINDS]

    left = budget - max(map(len, prompts([], 0, 0)))
    fillers: list[str] = []
    ends: list[int] = []  # tokens of all sentences up to each
    for sentence in _fillers(rng):
        if (ends[-1] if ends else 0) > left:
            break
        fillers.append(sentence)
        ends.append((ends[-1] if ends else 0) + len(codec.encode(" " + sentence)))
    lead = sum(end < _LEAD for end in ends) + 1
    tail = sum(end < _TAIL for end in ends) + 2  # sentences differ in length
    while len(fillers) >= lead + tail:
        made = prompts(fillers, lead, tail)
        over = max(map(len, made)) - budget
        if over <= 0:
            return [
                Extraction(kind.plural, tuple(prompt), lines[kind], room[kind])
                for kind, prompt in zip(KINDS, made, strict=True)
            ]
        del fillers[-max(1, over * len(fillers) // ends[-1]) :]
    raise ValueError(f"Notes with {asked} records of each of {len(KINDS)} kinds do not fit into {length} tokens.")


def _scattered(
    notes: Sequence[str], places: Sequence[float], fillers: Sequence[str], lead: int, tail: int
) -> Iterator[str]:
    """Fillers with the notes in order among them; none among the first `lead` and the last `tail` fillers."""
    slots = [lead + int(place * (len(fillers) - lead - tail + 1)) for place in places]
    done = 0
    for note, slot in zip(notes, slots, strict=True):
        yield from fillers[done:slot]
        yield note
        done = slot
    yield from fillers[done:]


def _paragraphs(sentences: Iterator[str]) -> str:
    texts = list(sentences)
    return "\n".join(" ".join(texts[i : i + _PARAGRAPH]) for i in range(0, len(texts), _PARAGRAPH))


def _fillers(rng: np.random.Generator) -> Iterator[str]:
    """An endless iterator of sentences."""
    while True:
        words = {slot: pick(rng, choices.split(",")) for slot, choices in _WORDS.items()}
        sentence = pick(rng, _SENTENCES).format(**words)
        yield sentence[0].upper() + sentence[1:]
