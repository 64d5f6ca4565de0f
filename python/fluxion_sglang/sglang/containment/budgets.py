"""Bounds the time that one request can delay all others through stop regexes, grammars and compilers."""

from __future__ import annotations

import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import regex

from fluxion_sglang.sglang.containment import counts

STOP_REGEX_S = 0.1
"""Time limit of one search for a stop regex in seconds, over all threads. Every request waits for the search."""

SHORT = 2000
"""Text length below which `re` searches a pattern of bounded cost; `regex` does not accept all its patterns."""

GRAMMAR_S = 1.0
"""Seconds that a request's grammar may take to accept all tokens of its answer."""

GRAMMARS = 256
"""Size of the cache of compiled grammars."""

_spent: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
"""Seconds spent in each of SGLang's grammar objects."""


class StopRegex:
    """Replaces the module `re` in SGLang's search for stop regexes, and adds a time limit.

    SGLang answers `error` with status 400, and ends that request alone.
    """

    error = re.error

    @staticmethod
    def search(pattern: str, text: str) -> object:
        """Raises error if the search takes longer than `STOP_REGEX_S`, or if `pattern` is invalid."""
        if len(text) < SHORT and _has_a_bound(pattern):
            return re.search(pattern, text)
        try:
            return regex.search(pattern, text, timeout=STOP_REGEX_S)
        except TimeoutError:
            counts.contained("budgets")
            why = f"looking for it took longer than {STOP_REGEX_S:g} s; use one without nested or ambiguous repeats"
        except regex.error as error:
            why = str(error)
        raise re.error(why)


def has_a_bound(pattern: str) -> bool:
    """Whether a search for the pattern takes at most quadratic time in the text's length: at most one repeat, of what
    matches in one way.

    Required when several ranks search at once, because a time limit could end the search on only one of them.
    """
    # The parser of `re`, as in SGLang; there is no public one.
    parser = re._parser  # type: ignore[attr-defined]
    operator = type(parser.LITERAL)
    repeats = {parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT}
    ambiguous = repeats | {parser.BRANCH, parser.GROUPREF, parser.GROUPREF_EXISTS}

    def operators(node: object) -> Iterator[tuple[Any, Any]]:
        for part in node if isinstance(node, list | tuple | parser.SubPattern) else ():
            if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], operator):
                yield part
            yield from operators(part)

    found = 0
    for kind, value in operators(parser.parse(pattern)):
        if kind in repeats and value[1] > 1:
            found += value[1] > value[0]
            if any(inner in ambiguous for inner, _ in operators(value[2])):
                return False
    return found <= 1


_has_a_bound = lru_cache(1024)(has_a_bound)


def accept_token(original: Callable[..., Any], grammar: Any, token: int) -> Any:
    """AROUND XGrammarGrammar.accept_token: add up the time. Ranks measure different times: see `overspent`."""
    start = time.perf_counter()
    try:
        return original(grammar, token)
    finally:
        _spent[grammar] = _spent.get(grammar, 0.0) + time.perf_counter() - start


def overspent(requests: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Requests of a pass, by batch index, whose grammar has exceeded its time, each with a sentence.

    Called before a pass. The pass then tells all ranks which requests were ended on any of them.
    """
    for place, request in enumerate(requests if _spent else ()):
        if (grammar := request.grammar) is None or request.to_finish is not None:
            continue
        # SGLang wraps the grammar of a reasoning model.
        spent = max(_spent.get(grammar, 0.0), _spent.get(getattr(grammar, "grammar", None) or grammar, 0.0))
        if spent > GRAMMAR_S:
            counts.contained("budgets")
            yield place, f"the grammar of this request took longer than {GRAMMAR_S:g} s; use a less ambiguous one."


def set_cache(original: Callable[..., None], backend: Any, key: Any, value: Any) -> None:
    """AROUND BaseGrammarBackend.set_cache: keep the newest `GRAMMARS`."""
    if not isinstance(backend.cache, OrderedDict):
        backend.cache = OrderedDict(backend.cache)
    original(backend, key, value)
    while len(backend.cache) > GRAMMARS:
        backend.cache.popitem(last=False)


def install(device: str, compiles: bool) -> None:
    """Install the bounds in the scheduler's process, before it takes requests.

    Args:
        compiles: the operator asked for torch.compile.
    """
    from sglang.srt.managers import schedule_batch

    schedule_batch.re = StopRegex
    if device == "cpu" and not compiles:
        # SGLang decorates functions of rare requests (repetition_penalty) with torch.compile. The first such request
        # would delay all others for seconds, and end the scheduler if there is no C++ compiler.
        import torch

        torch.compiler.set_stance("force_eager")
