"""The grammar of policy specs: legal specs are parsed correctly, and all others are refused in one sentence.

Specs come from clients. Parsing a string of any contents raises nothing but ValueError, and takes almost no time.
"""

from __future__ import annotations

import random
import string
import time
from contextlib import suppress

import pytest
from effort import examples as tries
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluxion_sglang import plugins
from fluxion_sglang.policy import BARE, Policy, check_spec, examples, legal, parse_spec
from fluxion_sglang.policy.specs import LONGEST
from fluxion_sglang.sglang.requests.requests import RequestPolicies
from fluxion_sglang.wishes import POLICY

MOST_S = 0.05
"""Processor time for one spec, in seconds."""
SENTENCE = 2000
"""Characters of a refusal: the legal forms and at most 60 characters of the illegal spec."""

plain = settings(max_examples=tries(400), deadline=None)

shares = st.builds(
    lambda value, form: form.format(value),
    st.floats(1e-6, 1, allow_subnormal=False),
    st.sampled_from(["{:.6f}", "{:.3e}", "{:.3E}", "{!r}", "{:.7g}"]),
).filter(lambda text: 0 < float(text) <= 1)
"""A fraction in common notations: 0.05, 5e-2, .5"""
shares |= st.sampled_from(["1", "1.0", ".5", "5.e-1", "1."])
blocks = st.sampled_from(["16", "32", "64", "128"])


def joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(":".join)


bare = st.sampled_from(["full", "streaming", "hgca", "psa", "lfps", "score95", "output10"])
good = (
    bare
    | joined(st.just("fixed"), blocks, shares)
    | joined(st.just("oracle"), shares)
    | joined(st.sampled_from(["anchor", "sketch"]), shares)
    | joined(st.just("anchor"), shares, blocks)
    | joined(st.just("labels"), shares, st.just("any"), st.just("all"))
    | joined(st.just("psa"), shares, blocks, st.sampled_from(["mean", "quest"]))
    | joined(st.just("lfps"), shares, shares, shares)
    | joined(st.just("hgca"), shares, shares)
)
"""Specs that need no predictor."""


def state(policy: Policy) -> dict[str, object]:
    """The arguments of a policy."""
    return {name: value for name, value in vars(policy).items() if isinstance(value, str | int | float | tuple)}


@plain
@given(good)
def test_legal_specs(spec: str) -> None:
    """Parsing, printing and parsing again gives the same policy."""
    check_spec(spec)
    policy = parse_spec(spec)
    assert policy.spec == spec
    again = parse_spec(policy.spec)
    assert type(again) is type(policy) and state(again) == state(policy)


def test_the_grammar_is_all_of_it() -> None:
    """Every form in a refusal begins like one that is tested here."""
    names = {form.partition(":")[0].partition("[")[0] for form in legal()}
    tried = {"full", "streaming", "hgca", "psa", "lfps", "score95", "output10"}
    tried |= {"fixed", "oracle", "anchor", "labels", "sketch"}
    assert names - tried == {"fluxion"}, "write a strategy for it; fluxion needs a predictor"


def refused(spec: str) -> str | None:
    """The refusal of a spec; None if it is legal. Asserts that it is one sentence and comes at once."""
    start = time.process_time()
    try:
        check_spec(spec)
        sentence = None
    except ValueError as error:
        sentence = str(error)
    spent = time.process_time() - start
    assert spent < MOST_S, f"{spent:.3f} s of a processor for {spec[:80]!r}"
    if sentence is not None:
        assert sentence.endswith(".") and "\n" not in sentence and len(sentence) <= SENTENCE, sentence
    return sentence


# Inputs that break parsers: other scripts' digits, signs, blanks, NUL, surrogates, formats, very long ones, many parts.
letters = st.text(alphabet=st.characters(), max_size=300)
odd = ["nan", "inf", "-0.5", "+0.5", "0x1p-1", "1_0", "\uff11", "\u0660.\u0665", "1e999999999", "1e-999999999", ""]
numbers = st.sampled_from([*odd, "0" * 120, "9" * 120])
nasty = (
    letters
    | joined(st.sampled_from(["fixed", "psa", "lfps", "hgca", "labels", "fluxion", "anchor"]), numbers, numbers)
    | st.integers(0, 5000).map(lambda n: ":" * n)
    | st.integers(0, 5000).map(lambda n: "fixed:16:0." + "0" * n + "1")
    | st.sampled_from(["%s%n", "{0.__class__}", "__import__('os')", "../../etc/passwd", "full\0", "\ud800", "full\n"])
)


@plain
@given(nasty)
@example("x" * 10_000_000)
@example(":" * LONGEST)
@example("fixed:16:" + "9" * (LONGEST - 9))
def test_hostile_strings(spec: str) -> None:
    if (sentence := refused(spec)) is not None:
        assert spec[61:] == "" or spec not in sentence, "a refusal repeats 60 characters at most"


@plain
@given(good, st.randoms(use_true_random=False))
def test_legal_specs_with_a_slip(spec: str, rng: random.Random) -> None:
    """One character added, removed or changed: legal or refused; a legal spec is usable."""
    at = rng.randrange(len(spec))
    new = rng.choice(string.printable)
    for slip in (spec[:at] + spec[at + 1 :], spec[:at] + new + spec[at:], spec[:at] + new + spec[at + 1 :]):
        if refused(slip) is None:
            with suppress(ValueError):  # there is no predictor here
                assert parse_spec(slip).spec == slip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


class Params:
    def __init__(self, custom: object) -> None:
        self.custom_params = custom


class Request:
    """The fields of SGLang's request that the processor reads."""

    def __init__(self, custom: object) -> None:
        self.sampling_params = Params(custom)
        self.skip_radix_cache_insert: object = False
        self.to_finish: object = None
        self.output_ids: list[int] = []

    def finished(self) -> bool:
        return False


@plain
@given(json_values | nasty, st.booleans())
def test_whatever_a_request_says(value: object, allowed: bool) -> None:
    """The result is the server's policy, a legal one, or a reason to end this request."""
    server = parse_spec("full")
    policies = RequestPolicies(server, allowed, BARE)
    requests = [Request({POLICY: value}), Request(value), Request(None)]
    with policies.of(requests, decoding=True):
        assert policies.current is None or all(isinstance(policy, Policy) for policy in policies.current)
    for request in requests[1:]:
        said = request.sampling_params.custom_params
        assert request.to_finish is None or (isinstance(said, dict) and POLICY in said)
    if not isinstance(value, str) and value is not None:
        assert requests[0].to_finish is not None, "no spec is anything but a string"


@pytest.mark.parametrize("spec", examples())
def test_examples_are_legal(spec: str) -> None:
    check_spec(spec)


def test_a_policy_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hgca" in plugins.named(plugins.POLICIES)
    monkeypatch.setattr(plugins, "named", lambda group: {})
    legal.cache_clear()
    said = str(refused("hgca:0.1"))
    assert "policy 'hgca:0.1' is not one" in said and said.endswith(
        "such as fluxion-lab (`make lab` in a checkout of Fluxion)."
    )
    assert '"oracle' not in said
    monkeypatch.undo()
    legal.cache_clear()
