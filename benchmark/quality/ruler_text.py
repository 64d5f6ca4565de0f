"""RULER's tasks as English text, for real models: the published prompts, at the length of the model's own tokenizer.

`fit` lengthens haystacks until prompt and answer fill 99 to 100% of the given length. Published RULER stops at coarser
steps (some hundred words, ten documents). Where a step here exceeds one percent, words of noise or a part of a document
fill the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from . import ruler_haystacks
from .base import Codec
from .ruler_definitions import Asked, Chains, CommonWords, Definition, Documents, Draw, FrequentWords, Needles
from .ruler_documents import Corpus, read_corpus
from .ruler_page import Page, Text
from .ruler_words import draw_words

# Below this length the published benchmark uses other frequencies for common words, and a smaller example.
_SHORT: Final = 4096


def write(definition: Definition, codec: Codec, draw: Draw, data: Path | None) -> Asked:
    """One prompt of the wanted length.

    Args:
        data: folder with the essays (optional) and the question files.

    Raises:
        MissingData: a file or package that the task needs is missing.
        ValueError: the length is too short for the task, or the data cannot fill it.
    """
    page = Page(codec, draw, definition.tokens_to_generate)
    match definition:
        case Needles(haystack="essay"):
            return ruler_haystacks.essay_needles(definition, page, data)
        case Needles(haystack="repeat"):
            return ruler_haystacks.repeated_needles(definition, page)
        case Needles():
            return ruler_haystacks.needles_among_needles(definition, page)
        case Chains():
            return ruler_haystacks.chains(definition, page)
        case CommonWords():
            return _common_words(definition, page)
        case FrequentWords():
            return _frequent_words(definition, page)
        case Documents():
            return _documents(page, read_corpus(definition.dataset, data))


# Words.


def _common_words(task: CommonWords, page: Page) -> Asked:
    short = page.draw.length < _SHORT
    frequency, other = (6, 1) if short else (task.frequency, task.other)
    # Three entries of the list, or one, for each of the others; an entry is three tokens at least.
    words = draw_words(page.draw.rng(), task.words + page.draw.length // 3 // other)
    common, rest = words[: task.words], words[task.words :]
    example = draw_words(page.draw.rng("example"), 20 if short else 40)
    frequencies = (3, 1) if short else (10, 3)
    shown = "".join(_listed(example[: task.words], example[task.words :], frequencies, page.draw.rng("example order")))
    shown += " ".join(f"{i}. {word}" for i, word in enumerate(example[: task.words], 1))

    def text(others: int) -> Text:
        user, prefix = _listed(common, rest[:others], (frequency, other), page.draw.rng("order"))
        return f"{shown}\n{user}", prefix

    others, prompt = page.fill(text, most=len(rest))
    meta = {"others": others, "frequencies": [frequency, other]}
    return page.asked(prompt, common, meta)


def _listed(common: list[str], rest: list[str], frequencies: tuple[int, int], rng: np.random.Generator) -> Text:
    words = common * frequencies[0] + rest * frequencies[1]
    context = " ".join(f"{i}. {words[place]}" for i, place in enumerate(rng.permutation(len(words)), 1))
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
        f" appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
    )


def _frequent_words(task: FrequentWords, page: Page) -> Asked:
    """Counts follow the distribution, rounded down (the published benchmark does not sample), plus one of the rarest
    word."""
    rng = page.draw.rng()
    words: dict[str, None] = {"...": None}
    for row in rng.integers(0, 26, (page.draw.length // 50, 6)):
        words["".join(chr(ord("a") + i) for i in row)] = None
    coded = list(words)
    parts = np.arange(1, len(coded) + 1) ** -task.alpha / _zeta(task.alpha)
    steps = 16  # a word

    def counts(size: int, more: int) -> np.ndarray:
        counted = (parts * (size / steps)).astype(int)
        counted[len(coded) - more :] += 1
        return counted

    def text(size: int, more: int = 0) -> Text:
        listed = np.repeat(np.arange(len(coded)), counts(size, more))
        context = " ".join(coded[i] for i in page.draw.rng("order").permutation(listed))
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently"
            f" appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots"
            " '....'. What are the three most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
        )

    size, prompt = page.fill(text, most=2 * steps * page.draw.length)
    more = 0
    if len(prompt) < page.enough:  # the counts of several words may rise in one step
        more, prompt = page.fill(lambda more: text(size, more), most=len(coded) - task.top - 2)
    first = counts(size, more)[: task.top + 2].tolist()
    if sorted(set(first), reverse=True) != first:
        raise ValueError(f"Task {page.draw.task} has ties among the most frequent words of {page.draw.length} tokens.")
    return page.asked(prompt, coded[1 : 1 + task.top], {"counts": first})


def _zeta(alpha: float) -> float:
    from scipy.special import zeta

    return float(zeta(alpha))


# Documents.


def _documents(page: Page, corpus: Corpus) -> Asked:
    rng = page.draw.rng()
    question = corpus.questions[page.draw.turn(len(corpus.questions))]
    nearest = rng.permutation(np.array(question.related, dtype=int)).tolist()
    taken = {*question.documents, *nearest}
    far = rng.permutation([i for i in range(len(corpus.documents)) if i not in taken]).astype(int).tolist()
    others = [*nearest, *far]
    places = rng.random(len(question.documents) + len(others))

    def text(count: int, words: int = 0) -> Text:
        shown = [corpus.documents[i] for i in [*question.documents, *others[:count]]]
        if words:
            shown.append(_first_words(corpus.documents[others[count]], words))
        order = np.argsort(places[: len(shown)])
        context = "\n\n".join(f"Document {i}:\n{shown[place]}" for i, place in enumerate(order, 1))
        task = (
            "Answer the question based on the given documents. Only give me the answer and do not output any other"
            " words."
        )
        return (
            f"{task}\n\nThe following are given documents.\n\n{context}\n\n{task}\n\nQuestion: {question.text}",
            " Answer:",
        )

    count, prompt = page.fill(text, most=len(others))
    words = 0
    if len(prompt) < page.enough:  # one more document is more than a percent
        if count == len(others):
            raise ValueError(
                f"The documents of task {page.draw.task} fill {len(prompt)} tokens, not {page.draw.length}; "
                "ask for a shorter prompt."
            )
        size = corpus.documents[others[count]].count(" ") + 1
        words, prompt = page.fill(lambda words: text(count, words), most=size)
    gold = [int(place) for place in np.argsort(np.argsort(places[: len(question.documents) + count + (words > 0)]))]
    meta = {
        "question": question.text,
        "documents": len(gold),
        "gold": [1 + place for place in gold[: len(question.documents)]],
        "cut": words > 0,
    }
    return page.asked(prompt, list(question.answers), meta)


def _first_words(text: str, words: int) -> str:
    return " ".join(text.split(" ")[:words])
