"""Bounds on what one request may make all others wait for: stop regexes, grammars, compilers."""

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
"""Seconds of this process that one search for a stop regex may take, over all threads. Every request waits for it."""

SHORT = 2000
"""Characters in which a pattern with a bound is searched by `re` itself, whose patterns are not all `regex`'s."""

GRAMMAR_S = 1.0
"""Seconds that a request's grammar may take to accept all tokens of its answer."""

GRAMMARS = 256
"""Compiled grammars that are kept."""

_spent: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
"""SGLang's grammar objects -> seconds spent in them."""


class StopRegex:
    """Stands in for the module `re` where SGLang looks for stop regexes: a search that needs one has a time limit.

    SGLang answers `error` with status 400, and ends that request alone.
    """

    error = re.error

    @staticmethod
    def search(pattern: str, text: str) -> object:
        """Raises error where the search takes longer than `STOP_REGEX_S`, or `pattern` is none."""
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
    """Whether a search for the pattern takes time that is at most the square of the text's length: it has at most one
    repeat, of something that matches in one way.

    Used where several ranks search at once: a time limit could end the search on one of them alone.
    """
    # The parser of `re`, as SGLang uses it: there is no public one.
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
    """AROUND XGrammarGrammar.accept_token: count the time. Ranks count differently: see `overspent`."""
    start = time.perf_counter()
    try:
        return original(grammar, token)
    finally:
        _spent[grammar] = _spent.get(grammar, 0.0) + time.perf_counter() - start


def overspent(requests: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Requests of a pass, by their place, whose grammar has taken more than its time, each with a sentence.

    Asked before a pass, of which all ranks learn what any of them has ended.
    """
    for place, request in enumerate(requests if _spent else ()):
        if (grammar := request.grammar) is None or request.to_finish is not None:
            continue
        # SGLang wraps the grammar of a model that reasons.
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
    """In the scheduler's process, before it takes requests.

    Args:
        compiles: the operator asked for torch.compile.
    """
    from sglang.srt.managers import schedule_batch

    schedule_batch.re = StopRegex
    if device == "cpu" and not compiles:
        # SGLang decorates functions of rare requests (repetition_penalty) with torch.compile. The first such request
        # would stop all others for seconds, and end the scheduler where there is no C++ compiler.
        import torch

        torch.compiler.set_stance("force_eager")
