"""RULER's needles and chains in text: the hidden facts, and the haystacks around them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from .prose import Prose, generated_essay
from .ruler_definitions import Asked, Chains, Draw, Needles, draw_depths
from .ruler_documents import FOLDERS
from .ruler_page import Page, Text
from .ruler_words import ESSAY_FILE, draw_compounds, read_essay

NOISE: Final = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# Words of noise around the example chain, which then has about five hundred tokens, as in the published benchmark.
_EXAMPLE_WORDS: Final = 10 * len(NOISE.split())


# Needles.


@dataclass(frozen=True)
class _Hidden:
    """The needles of one prompt."""

    task: Needles
    keys: list[str]
    values: dict[str, list[str]]
    asked: list[str]
    order: list[tuple[str, str]]  # key and value of every needle, in the order of the document

    @property
    def references(self) -> list[str]:
        return [value for key in self.asked for value in self.values[key]]

    def lines(self) -> list[str]:
        return [_needle(self.task, *fact) for fact in self.order]

    def text(self, context: str) -> Text:
        kind = self.task.value
        *others, last = self.asked
        query = f"{', '.join(others)}, and {last}" if others else last
        if self.task.queries * self.task.values > 1:
            return (
                f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz"
                f" you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query}"
                " mentioned in the provided text?",
                f" The special magic {kind} for {query} mentioned in the provided text are",
            )
        one = kind.removesuffix("s")
        return (
            f"A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you"
            f" about the {one} afterwards.\n{context}\nWhat is the special magic {one} for {query} mentioned in the"
            " provided text?",
            f" The special magic {one} for {query} mentioned in the provided text is",
        )


def _needle(task: Needles, key: str, value: str) -> str:
    return f"One of the special magic {task.value} for {key} is: {value}."


def _draw_names(rng: np.random.Generator, kind: str, count: int) -> list[str]:
    """`count` different keys or values."""
    if kind == "words":
        return draw_compounds(rng, count)
    names: dict[str, None] = {}
    while len(names) < count:
        if kind == "numbers":
            name = str(rng.integers(10**6, 10**7))
        else:
            name = str(uuid.UUID(bytes=rng.bytes(16), version=4))
        names[name] = None
    return list(names)


def _hide(task: Needles, rng: np.random.Generator, keys: list[str]) -> _Hidden:
    drawn = iter(_draw_names(rng, task.value, len(keys) * task.values))
    values = {key: [next(drawn) for _ in range(task.values)] for key in keys}
    facts = [(key, value) for key in keys for value in values[key]]
    asked = [keys[i] for i in rng.choice(len(keys), task.queries, replace=False)]
    return _Hidden(task, keys, values, asked, [facts[i] for i in rng.permutation(len(facts))])


def essay_needles(task: Needles, page: Page, data: Path | None) -> Asked:
    rng = page.draw.rng()
    hidden = _hide(task, rng, _draw_names(rng, task.key, task.keys))
    depths = draw_depths(rng, len(hidden.order))
    prose = _essay(page.draw, data)

    def text(words: int) -> Text:
        sentences = prose.sentences(words)
        places = [len(sentences) * depth // 100 for depth in depths]
        return hidden.text(" ".join(_inserted(sentences, places, hidden.lines())))

    words, prompt = page.fill(text)
    meta = {"haystack": prose.source, "words": words, "keys": hidden.keys, "depths": depths}
    return page.asked(prompt, hidden.references, meta)


def _essay(draw: Draw, data: Path | None) -> Prose:
    for folder in FOLDERS:
        if data is not None and (path := data / folder / ESSAY_FILE).is_file():
            return read_essay(path)
    return generated_essay(draw.rng("essay"), draw.length)


def repeated_needles(task: Needles, page: Page) -> Asked:
    rng = page.draw.rng()
    hidden = _hide(task, rng, _draw_names(rng, task.key, task.keys))
    depths = np.sort(rng.random(len(hidden.order))).tolist()

    def text(words: int) -> Text:
        lines = _noise(words)
        return hidden.text("\n".join(_inserted(lines, _places(lines, depths), hidden.lines())))

    words, prompt = page.fill(text, least=1)
    meta = {"haystack": "repeat", "words": words, "keys": hidden.keys, "depths": _percent(depths)}
    return page.asked(prompt, hidden.references, meta)


def needles_among_needles(task: Needles, page: Page) -> Asked:
    rng = page.draw.rng()
    most = page.draw.length // 10  # a fact has more than ten tokens beside key and value
    keys = _draw_names(rng, task.key, task.keys + most)
    hidden = _hide(task, rng, keys[: task.keys])
    taken = {value for values in hidden.values.values() for value in values}
    values = [value for value in _draw_names(rng, task.value, most + len(taken)) if value not in taken]
    others = [_needle(task, key, value) for key, value in zip(keys[task.keys :], values, strict=False)]
    depths = np.sort(rng.random(len(hidden.order))).tolist()

    def text(count: int, words: int = 0) -> Text:
        lines = others[:count]
        lines = _inserted(lines, _places(lines, depths), hidden.lines())
        return hidden.text("\n".join(lines + _noise(words)))

    count, prompt = page.fill(text, most=most)
    words = 0
    if len(prompt) < page.enough:  # one more fact is more than a percent
        words, prompt = page.fill(lambda words: text(count, words))
    meta = {"haystack": "needle", "distractors": count, "words": words}
    return page.asked(prompt, hidden.references, {**meta, "keys": hidden.keys, "depths": _percent(depths)})


def _noise(words: int) -> list[str]:
    """Whole paragraphs of noise, and the beginning of one more."""
    paragraph = NOISE.split()
    paragraphs, rest = divmod(words, len(paragraph))
    return [NOISE] * paragraphs + ([" ".join(paragraph[:rest])] if rest else [])


def _places(lines: list[str], depths: list[float]) -> list[int]:
    return [int(len(lines) * depth) for depth in depths]


def _percent(depths: list[float]) -> list[float]:
    return [round(100 * depth, 1) for depth in depths]


def _inserted(lines: list[str], places: list[int], more: list[str]) -> list[str]:
    """Insert each of `more` before the line of its place; places are ascending."""
    result: list[str] = []
    done = 0
    for place, line in zip(places, more, strict=True):
        result += [*lines[done:place], line]
        done = place
    return result + lines[done:]


# Chains.


@dataclass(frozen=True)
class _Chain:
    value: str
    variables: list[str]
    depths: list[float]

    def text(self, words: int) -> Text:
        links = [
            f"VAR {target} = {source}"
            for target, source in zip(
                self.variables, [self.value, *(f"VAR {name} " for name in self.variables)], strict=False
            )
        ]
        lines = [f"{line}\n" for line in _noise(words)]
        context = " ".join(_inserted(lines, _places(lines, self.depths), links))
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{context}\nQuestion: Find all variables that are assigned the value {self.value} in the text above.",
            " Answer: According to the chain(s) of variable assignment in the text above, "
            # The published prompt has this spelling; a prompt is data.
            f"{len(self.variables)} variables are assgined the value {self.value}, they are: ",
        )


def _draw_chain(rng: np.random.Generator, hops: int, letters: int) -> _Chain:
    names: dict[str, None] = {}
    while len(names) <= hops:
        names["".join(chr(ord("A") + i) for i in rng.integers(0, 26, letters))] = None
    depths = np.sort(rng.random(len(names))).tolist()
    return _Chain(str(rng.integers(10_000, 99_999)), list(names), depths)


def chains(task: Chains, page: Page) -> Asked:
    chain = _draw_chain(page.draw.rng(), task.hops, letters=5)
    example = _draw_chain(page.draw.rng("example"), task.hops, letters=3)
    shown = "".join(example.text(_EXAMPLE_WORDS)) + f" {' '.join(example.variables)}\n\n"

    def text(words: int) -> Text:
        user, prefix = chain.text(words)
        return shown + user, prefix

    words, prompt = page.fill(text, least=task.hops + 1)
    meta = {"haystack": "repeat", "words": words, "value": chain.value, "depths": _percent(chain.depths)}
    return page.asked(prompt, chain.variables, meta)
