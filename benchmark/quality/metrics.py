# ruff: noqa: RUF001 (Chinese punctuation)
"""The published metrics of the text suites. Every one compares an output with a reference and lies in [0, 1].

Scores are comparable with published ones only if they are counted in the same way, so each metric uses the library of
its benchmark:

- LongBench's ROUGE-L is the package `rouge`'s (its F value differs from that of `rouge-score`: it counts the longest
  common subsequence of whole summaries as a set of words), its Chinese words are `jieba`'s, and its code similarity is
  `fuzzywuzzy`'s ratio, which is `difflib`'s unless the optional python-Levenshtein is installed beside it. LongBench
  does not ask for that, so neither is needed here. `rapidfuzz` computes the Levenshtein variant, another number.
- L-Eval's ROUGE is `rouge-score`'s, without stemming.
- RULER's matching of strings needs no library.

Each metric imports its own library: a suite without Chinese does not load a dictionary.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

Metric = Callable[[str, str], float]
"""(output, reference) -> score in [0, 1]."""


def best(metric: Metric, output: str, references: Sequence[str]) -> float:
    """The highest score over all references; 0 without any."""
    return max((metric(output, reference) for reference in references), default=0.0)


# Words in common

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
# Fullwidth and halfwidth forms, brackets and quotation marks of Chinese text: LongBench's list.
_CHINESE_PUNCTUATION: Final = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_CHINESE_PUNCTUATION: Final = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def normalize_english(text: str) -> str:
    """SQuAD's form of an answer: lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def normalize_chinese(text: str) -> str:
    """LongBench's form of a Chinese word: lower case, without punctuation of either script and without spaces."""
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def exact_match(output: str, reference: str) -> float:
    """SQuAD's exact match: 1 where both have the same normalised form."""
    return float(normalize_english(output) == normalize_english(reference))


def f1_english(output: str, reference: str) -> float:
    """SQuAD's F1 over words (LongBench's qa_f1, and L-Eval's f1)."""
    return _f1(normalize_english(output).split(), normalize_english(reference).split())


def f1_chinese(output: str, reference: str) -> float:
    """F1 over jieba's words, normalised, empty ones left out (LongBench's qa_f1_zh)."""
    return _f1(_chinese_tokens(output), _chinese_tokens(reference))


def _chinese_tokens(text: str) -> list[str]:
    return [word for word in map(normalize_chinese, _jieba().cut(text, cut_all=False)) if word]


def _f1(output: Sequence[str], reference: Sequence[str]) -> float:
    common = (Counter(output) & Counter(reference)).total()
    if not common:
        return 0.0
    precision, recall = common / len(output), common / len(reference)
    return 2 * precision * recall / (precision + recall)


@functools.cache
def _jieba() -> Any:
    import jieba

    jieba.setLogLevel(logging.WARNING)  # it logs the place of its dictionary to stderr
    return jieba


# Summaries.


def rouge_l(output: str, reference: str) -> float:
    """F value of ROUGE-L at the level of summaries, by the package `rouge` (LongBench's rouge).

    An empty output has 0. If the package hits Python's recursion limit (a thousand words without a full stop),
    LongBench records 0; here the limit is raised, and the score is the package's.
    """
    with _recursion_of(len(output.split()) + len(reference.split())):
        try:
            scores = _rouge().get_scores([output], [reference], avg=True)
        except ValueError:  # only full stops, or nothing
            return 0.0
    # Its denominators carry an epsilon of 1e-8, never more: [0, 1] holds.
    return float(scores["rouge-l"]["f"])


def rouge_l_chinese(output: str, reference: str) -> float:
    """`rouge_l` of jieba's words (LongBench's rouge_zh)."""
    return rouge_l(" ".join(_jieba().cut(output, cut_all=False)), " ".join(_jieba().cut(reference, cut_all=False)))


def rouge_geometric_mean(output: str, reference: str) -> float:
    """Geometric mean of the F values of ROUGE-1, ROUGE-2 and ROUGE-L, by `rouge-score` (L-Eval's rouge).

    L-Eval takes the mean of the three averages of a task, this the mean of one answer's three, so that answers can be
    compared pairwise. The average of these is never above L-Eval's number.
    """
    parts = rouge_parts(output, reference)
    return float((parts[0] * parts[1] * parts[2]) ** (1 / 3))


def rouge_parts(output: str, reference: str) -> tuple[float, float, float]:
    """F values of ROUGE-1, ROUGE-2 and ROUGE-L by `rouge-score`, without stemming."""
    scores = _rouge_scorer().score(reference, output)
    return scores["rouge1"].fmeasure, scores["rouge2"].fmeasure, scores["rougeL"].fmeasure


@functools.cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)


@contextmanager
def _recursion_of(depth: int) -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


# Names, numbers, code.


def classification(output: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the output names, if the right one is among them; else 0 (LongBench).

    A class whose name is part of the right one's does not count as named. LongBench removes those from the list while
    it walks along it, which spares the class after each: so does this.
    """
    named = []
    spared = False
    for name in classes:
        if name in output:
            part = not spared and name != reference and name in reference
            if not part:
                named.append(name)
            spared = part
    return 1 / len(named) if reference in named else 0.0


def count(output: str, reference: str) -> float:
    """Share of the numbers in the output that are the right one (LongBench's count)."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(output: str, reference: str) -> float:
    """Share of the numbers in the output that are the paragraph's of the reference, "Paragraph 7"."""
    return _paragraph(r"Paragraph (\d+)", output, reference)


def retrieval_chinese(output: str, reference: str) -> float:
    """Share of the numbers in the output that are the paragraph's of the reference, "段落7"."""
    return _paragraph(r"段落(\d+)", output, reference)


def _paragraph(pattern: str, output: str, reference: str) -> float:
    found = re.search(pattern, reference)
    if found is None:
        raise ValueError(f"the reference {reference!r} names no paragraph; it should look like {pattern!r}")
    return count(output, found.group(1))


def code_similarity(output: str, reference: str) -> float:
    """Similarity of the first line of code and the reference (LongBench's code_sim).

    The first line without a backquote, "#" or "//" counts as code. If there is none, the empty string is compared.
    """
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100  # fuzzywuzzy's integer percent


# RULER.


def match_all(output: str, references: Sequence[str]) -> float:
    """Share of the references that the output contains, ignoring case (RULER's string_match_all)."""
    return _share([reference.lower() in output.lower() for reference in references])


def match_part(output: str, references: Sequence[str]) -> float:
    """Whether the output contains any of the references, ignoring case (RULER's string_match_part)."""
    return float(match_all(output, references) > 0)


def match_all_symbols(output: str, references: Sequence[str]) -> float:
    """`match_all` of symbolic text: a reference is a run of whole symbols ("v1" is not in "v12")."""
    return _share([_contains_symbols(output, reference) for reference in references])


def match_part_symbols(output: str, references: Sequence[str]) -> float:
    """`match_part` of symbolic text."""
    return float(match_all_symbols(output, references) > 0)


def _contains_symbols(output: str, reference: str) -> bool:
    return f" {' '.join(reference.split())} " in f" {' '.join(output.split())} "


def _share(found: Sequence[bool]) -> float:
    if not found:
        raise ValueError("there are no references to look for")
    return sum(found) / len(found)
