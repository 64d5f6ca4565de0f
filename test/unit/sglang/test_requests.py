"""Policies of requests, without a server: their assignment, refused requests, and tokens that stay out of the tree."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from fluxion_sglang.policy import Context, Policy, parse_spec
from fluxion_sglang.sglang import compat, plugin
from fluxion_sglang.sglang.containment.passes import FailureGuard, Failures
from fluxion_sglang.sglang.requests import requests as requests_module
from fluxion_sglang.sglang.requests.requests import RequestPolicies, forward_batch_generation


class Request(SimpleNamespace):
    """The fields of SGLang's request in use; `end` is the length of its answer."""

    __hash__ = object.__hash__

    def finished(self) -> bool:
        return len(self.output_ids) >= self.end


def request(params: Any = None, end: int = 100) -> Request:
    return Request(
        sampling_params=SimpleNamespace(custom_params=params), origin_input_ids=[1] * 50, output_ids=[], end=end,
        to_finish=None, skip_radix_cache_insert=False,
    )  # fmt: skip


def run(
    policies: RequestPolicies,
    requests: list[Request],
    mode: ForwardMode = ForwardMode.DECODE,
    guard: FailureGuard | None = None,
) -> list[str] | None:
    """The specs of a pass over `requests`; None if all follow the server's."""
    seen: list[list[str] | None] = []

    def original(worker: Any, batch: Any, word: str) -> str:
        current = policies.current
        seen.append(None if current is None else [policy.spec for policy in current])
        return word

    backend = SimpleNamespace(requests=policies, failures=guard or FailureGuard())
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    assert (
        forward_batch_generation(
            original, worker, SimpleNamespace(reqs=requests, forward_mode=mode, decoding_reqs=None), "logits"
        )
        == "logits"
    )
    assert policies.current is None
    return seen[0]


@pytest.fixture
def policies() -> RequestPolicies:
    return RequestPolicies(parse_spec("full"))


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 3}, {"fluxion_policy": None}, {"fluxion_policy": "full"}, "full"]
)
def test_requests_without_one_follow_the_server(policies: RequestPolicies, params: Any) -> None:
    assert run(policies, [request(params), request()]) is None


def test_a_batch_may_mix_policies(policies: RequestPolicies) -> None:
    specs = ["streaming", "full", "fixed:32:0.1", None, "streaming"]
    requests = [request(spec and {"fluxion_policy": spec}) for spec in specs]
    assert run(policies, requests) == ["streaming", "full", "fixed:32:0.1", "full", "streaming"]
    assert all(r.to_finish is None for r in requests)


def test_a_spec_is_parsed_once(policies: RequestPolicies, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Policy] = []
    for _ in range(3):
        with policies.of([request({"fluxion_policy": "fixed:16:0.05"})], True):
            found += policies.current or []
    assert len(found) == 3 and len({id(policy) for policy in found}) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ful", "policy 'ful' is not one"),
        ("", "policy '' is not one"),
        ("fixed:16:2", 'use "full", "streaming"'),
        ("y" * 10_000, "yyy..."),
        (3, "fluxion_policy is 3, but it takes a policy spec"),
        (True, "fluxion_policy is true"),
        (["full"], "fluxion_policy is a JSON list"),
        ({"policy": "x" * 1000}, "fluxion_policy is a JSON object"),
        (":" * 8_000_000, "policy ':::"),
        ("full" + " " * 125, "policy 'full  "),
    ],
)
def test_an_illegal_one_ends_its_request_alone(policies: RequestPolicies, value: Any, words: str) -> None:
    bad, good, plain = request({"fluxion_policy": value}), request({"fluxion_policy": "streaming"}), request()
    assert run(policies, [good, bad, plain]) == ["streaming", "full", "full"]
    assert good.to_finish is None and plain.to_finish is None
    error = bad.to_finish
    assert error is not None and error.status_code == 400 and bad.skip_radix_cache_insert
    assert words in error.message and "\n" not in error.message and error.message.endswith(".")
    assert len(error.message) < 700


def test_others_specs_do_not_take_a_request_s_policy(policies: RequestPolicies) -> None:
    """A policy remembers its requests, so another instance would answer differently."""

    def policy_of(asked: Request) -> Policy:
        with policies.of([asked], True):
            assert policies.current is not None
            return policies.current[0]

    mine = request({"fluxion_policy": "hgca:0.5"})
    mine_from_the_start = policy_of(mine)
    for i in range(200):
        policy_of(request({"fluxion_policy": f"hgca:0.{i + 1000}"}))
    assert policy_of(mine) is mine_from_the_start


def test_a_long_spec_is_not_looked_at(policies: RequestPolicies) -> None:
    """Splitting 8 MB takes a second, during which every request waits."""

    class Long(str):
        def split(self, *_: Any) -> Any:
            raise AssertionError("it was split")

    bad = request({"fluxion_policy": Long(":" * 8_000_000)})
    assert run(policies, [bad]) is None and bad.to_finish is not None


def test_a_refused_request_is_looked_at_once_and_the_next_one_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipeline, a refused request continues to the end of its prefill. What its policy lacked, such as a
    predictor's file, may exist for the next one."""
    seen: list[str] = []

    def parse(spec: str, context: Context) -> Policy:
        seen.append(spec)
        if len(seen) == 1:
            raise ValueError("its file cannot be read.")
        return parse_spec("streaming", context)

    monkeypatch.setattr(requests_module, "parse_spec", parse)
    policies = RequestPolicies(parse_spec("full"))
    bad, good = (request({"fluxion_policy": "fluxion"}) for _ in range(2))
    for _ in range(3):
        assert run(policies, [bad]) is None and bad.to_finish.message == "its file cannot be read."
    assert policies.refused == 1 and seen == ["fluxion"]
    assert run(policies, [good]) == ["streaming"] and good.to_finish is None


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_what_one_rank_refuses_ends_on_all_of_them(
    policies: RequestPolicies, mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor's file may exist on one machine and not on another."""
    guard = FailureGuard()
    bad, ended = request({"fluxion_policy": "none such"}), request()
    ended.to_finish = "the client left"
    backend = SimpleNamespace(requests=policies, failures=guard)
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    parallel = SimpleNamespace(tp_size=1, tp_rank=0, pp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr(plugin, "enabled_here", lambda: True)
    batch = SimpleNamespace(reqs=[request(), ended, bad], forward_mode=mode, decoding_reqs=None)
    plugin.HOOKS[compat.RUN_BATCH](lambda *_: None, worker, batch)
    assert list(guard.found.lost) == [2] and guard.found.lost[2] == bad.to_finish.message
    with guard.containing():  # it continues to the end of its prefill, and is told once
        run(policies, [bad], mode, guard)
    assert guard.found == Failures(None, {})
    run(policies, [request({"fluxion_policy": "none such"})], mode, guard)  # outside of a scheduler there is no check
    assert guard.found == Failures(None, {})


def test_a_session_is_told_the_words_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next turn repeats the spec, whichever request named the policy first, in any notation."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(requests_module.sessions, "approximated", lambda _, spec, server: told.append((spec, server)))
    policies = RequestPolicies(parse_spec("anchor"))
    run(policies, [request({"fluxion_policy": "anchor:0.10"}), request()])
    assert told == [("anchor:0.10", "anchor"), ("anchor", "anchor")]


def test_a_turn_that_begins_with_approximated_kv_puts_nothing_into_the_tree(policies: RequestPolicies) -> None:
    """Not even its prompt, if it is aborted after its first token: the prompt contains the earlier conversation."""

    class Session(SimpleNamespace):
        __hash__ = object.__hash__

    session = Session(session_id="mine", streaming=True)
    first, second = (request({"fluxion_policy": "streaming"}) for _ in range(2))
    first.session = second.session = session
    run(policies, [first], ForwardMode.EXTEND)
    assert not first.skip_radix_cache_insert, "its prompt is exact"
    run(policies, [first], ForwardMode.DECODE)
    run(policies, [second], ForwardMode.EXTEND)
    assert second.skip_radix_cache_insert


def test_a_policy_that_fails_before_a_pass_ends_its_request_alone() -> None:
    class Broken(type(parse_spec("fixed:16:0.5"))):  # type: ignore[misc]
        @property
        def exact(self) -> bool:
            raise ZeroDivisionError("no heads")

    policies = RequestPolicies(server := parse_spec("fixed:16:0.5"))
    policies._named = lambda spec: Broken(16, 0.5) if spec == "broken" else server  # type: ignore[method-assign, assignment]
    asked = [request({"fluxion_policy": "broken"}), request()]
    assert run(policies, asked) == ["full", "fixed:16:0.5"] and asked[1].to_finish is None
    assert asked[0].to_finish.status_code == 500 and "ZeroDivisionError: no heads" in asked[0].to_finish.message


def test_a_folder_that_cannot_be_reached_ends_who_wants_a_record() -> None:
    def check(wish: object, tokens: int) -> None:
        raise PermissionError(13, "Permission denied")

    policies = RequestPolicies(parse_spec("full"), check=check)
    wants, plain = request({"fluxion_record": {"task": "t"}}), request()
    assert run(policies, [wants, plain], ForwardMode.EXTEND) is None
    assert plain.to_finish is None and wants.to_finish.status_code == 500
    assert "PermissionError" in wants.to_finish.message


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("x"), OverflowError()])
def test_whatever_a_policy_raises_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def parse(spec: str, context: Context) -> Policy:
        raise error

    monkeypatch.setattr(requests_module, "parse_spec", parse)
    bad, good = request({"fluxion_policy": "strange"}), request()
    assert run(RequestPolicies(parse_spec("full")), [bad, good]) is None
    assert good.to_finish is None
    assert bad.to_finish is not None and f"'strange' cannot be used ({type(error).__name__}" in bad.to_finish.message


@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.DECODE])
def test_who_decodes_in_a_prefill_of_others_is_known(policies: RequestPolicies, mode: ForwardMode) -> None:
    requests = [request({"fluxion_policy": "streaming"}), request(), request()]
    seen: list[Any] = []
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=SimpleNamespace(requests=policies)))
    # SGLang may leave the list of an earlier pass on a batch of another kind.
    batch = SimpleNamespace(reqs=requests, forward_mode=mode, decoding_reqs=requests[1:])
    forward_batch_generation(lambda *_: seen.append(policies.riding), worker, batch)
    assert seen == [{1, 2} if mode is ForwardMode.MIXED else set()] and not policies.riding


@pytest.mark.parametrize("spec", ["oracle:0.1", "labels", "labels:0.05", "labels:0.05:16:all", "labels:score95"])
def test_a_policy_that_reads_everything_to_decide_is_for_measuring(policies: RequestPolicies, spec: str) -> None:
    own, plain = request({"fluxion_policy": spec}), request({"fluxion_policy": "streaming"})
    assert run(policies, [own, plain]) == ["full", "streaming"]
    message = own.to_finish.message
    assert repr(spec) in message and "option audit" in message and message.endswith(".") and "\n" not in message
    measuring = RequestPolicies(parse_spec("full"), yardsticks=True)
    own = request({"fluxion_policy": spec})
    assert run(measuring, [own]) == [spec] and own.to_finish is None
    # All requests follow the server's policy anyway.
    own = request({"fluxion_policy": spec})
    assert run(RequestPolicies(parse_spec(spec)), [own]) is None and own.to_finish is None


def test_a_policy_that_reads_sketches_takes_a_pool_that_has_them(policies: RequestPolicies) -> None:
    own = request({"fluxion_policy": "sketch:0.1"})
    assert run(policies, [own]) is None or own.to_finish is not None
    message = own.to_finish.message
    assert "'sketch:0.1'" in message and '{"sketches": true}' in message and message.endswith(".")
    own = request({"fluxion_policy": "sketch:0.1"})
    assert run(RequestPolicies(parse_spec("full"), sketched=True), [own]) == ["sketch:0.1"] and own.to_finish is None


def kept_of(policies: RequestPolicies, own: Request, overlap: bool, foreseen: bool) -> list[str]:
    """Entries that the radix tree gets during a request's life, in SGLang's order. With overlap, a pass is launched
    before the previous result is processed, unless the length shows beforehand that the answer ends there."""
    kept: list[str] = []
    decoded = False
    for number in count():
        if not (foreseen and number >= own.end):
            run(policies, [own], ForwardMode.DECODE if number else ForwardMode.EXTEND)
            decoded = number > 0
        if overlap and number == 0:
            continue
        own.output_ids.append(7)
        if own.finished():
            return kept if own.skip_radix_cache_insert else [*kept, "answer" if decoded else "prompt"]
        if len(own.output_ids) == 1 and not own.skip_radix_cache_insert:
            kept.append("prompt")
    raise AssertionError


@pytest.mark.parametrize("foreseen", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", [1, 2, 3, 20])
def test_an_answer_under_an_own_policy_stays_out_of_the_tree(
    policies: RequestPolicies, end: int, overlap: bool, foreseen: bool
) -> None:
    kept = kept_of(policies, request({"fluxion_policy": "streaming"}, end), overlap, foreseen)
    # Without decoded tokens, the prompt enters the tree at the request's end. A stop token that comes unexpectedly,
    # after another decode step, keeps its prompt out.
    assert kept == ([] if end == 1 and overlap and not foreseen else ["prompt"])
    assert kept_of(policies, request(None, 3), overlap, foreseen) == ["prompt", "answer"]


def test_only_what_is_exact_goes_into_the_tree() -> None:
    """`full` is full attention: requests build on no KV that another policy approximated."""
    sparse = RequestPolicies(parse_spec("fixed:16:0.05"))
    assert kept_of(sparse, request(None, 3), False, False) == ["prompt"]
    assert kept_of(sparse, request({"fluxion_policy": "fixed:16:0.05"}, 3), True, True) == ["prompt"]
    assert kept_of(sparse, request({"fluxion_policy": "full"}, 3), False, False) == ["prompt", "answer"]


def test_a_request_that_is_out_of_the_tree_already_stays_there(policies: RequestPolicies) -> None:
    own = request({"fluxion_policy": "streaming"})
    own.skip_radix_cache_insert = True
    run(policies, [own])
    assert own.skip_radix_cache_insert is True
    other = request({"fluxion_policy": "streaming"})
    run(policies, [other], ForwardMode.EXTEND)
    flag = other.skip_radix_cache_insert
    assert not flag
    run(policies, [other])
    assert other.skip_radix_cache_insert is flag and not flag, "one object, which knows of every pass"
    del other
    assert flag, "a request that is gone is asked for nothing"


def test_a_server_may_take_none() -> None:
    policies = RequestPolicies(parse_spec("full"), allowed=False)
    own, same, plain = request({"fluxion_policy": "streaming"}), request({"fluxion_policy": "full"}), request()
    assert run(policies, [own, same, plain]) is None
    assert same.to_finish is None and plain.to_finish is None
    assert own.to_finish.status_code == 400 and own.skip_radix_cache_insert is True
    assert own.to_finish.message.startswith("fluxion_policy is not taken") and own.to_finish.message.endswith(".")


def test_a_server_may_take_some() -> None:
    policies = RequestPolicies(parse_spec("fixed:16:0.5"), ["full", "streaming"])
    legal = [request({"fluxion_policy": spec}) for spec in ("full", "fixed:16:0.5", "streaming")]
    assert run(policies, [*legal, request()]) == ["full", "fixed:16:0.5", "streaming", "fixed:16:0.5"]
    assert all(r.to_finish is None for r in legal)
    for spec in ("psa:0.9999999:16:quest", "streaming ", "full:", "x" * 10_000):
        bad = request({"fluxion_policy": spec})
        assert run(policies, [bad, request()]) == ["full", "fixed:16:0.5"], "what is under way remembers nothing"
        message = bad.to_finish.message
        assert bad.to_finish.status_code == 400 and 'use "full", "streaming", or leave it out.' in message
        assert json.dumps(spec)[:40] in message and "\n" not in message and len(message) < 250


def test_wrong_wishes_end_their_request_alone_and_are_read_once() -> None:
    seen: list[Any] = []

    def check(wishes: Any, tokens: int) -> None:
        seen.append((wishes, tokens))
        if wishes != {"id": 3}:
            raise ValueError("It is no wish.")

    policies = RequestPolicies(parse_spec("full"), check=check)
    good, bad, plain = request({"fluxion_record": {"id": 3}}), request({"fluxion_record": [1]}), request()
    for _ in range(2):
        with policies.of([good, bad, plain], False):
            assert policies.recorded == [{"id": 3}, None, None]
    with policies.of([good, bad, plain], True):
        assert policies.recorded == [None, None, None]
    assert seen == [({"id": 3}, 50), ([1], 50)]
    assert good.to_finish is None and plain.to_finish is None
    assert bad.to_finish.status_code == 400 and bad.to_finish.message == "It is no wish."


def test_refusals_push_out_no_policy(policies: RequestPolicies) -> None:
    def policy_of(spec: str) -> Policy:
        with policies.of([request({"fluxion_policy": spec})], True):
            assert policies.current is not None
            return policies.current[0]

    mine = policy_of("streaming")
    for i in range(200):
        run(policies, [request({"fluxion_policy": f"nonsense:{i}"})])
    assert policy_of("streaming") is mine


def test_the_pool_is_checked_once_for_a_request() -> None:
    """Its prompt comes in chunks, then it decodes."""
    policies = RequestPolicies(parse_spec("full"), canary=True)
    own, other = request({"fluxion_check": True}), request()
    seen = []
    for decoding in (False, False, True):
        with policies.of([other, own], decoding):
            seen.append(policies.checks)
    assert seen == [[1], [], []]


@pytest.mark.parametrize("canary", [True, False])
def test_a_check_of_the_pool_needs_the_option(canary: bool) -> None:
    policies = RequestPolicies(parse_spec("full"), canary=canary)
    own, other = request({"fluxion_check": True}), request({"fluxion_check": 1})
    with policies.of([other, own], decoding=False):
        assert policies.checks == ([1] if canary else [])
    assert other.to_finish is None and (own.to_finish is None) == canary
    if not canary:
        assert own.to_finish.status_code == 400 and "needs a server with the option canary" in own.to_finish.message


def test_a_pass_without_a_batch_or_of_another_backend_is_left_alone(policies: RequestPolicies) -> None:
    for backend in (SimpleNamespace(requests=policies), SimpleNamespace()):
        worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
        assert forward_batch_generation(lambda w, b: (w, b), worker, None) == (worker, None)


def test_where_all_follow_one_policy_the_others_are_still_checked() -> None:
    """Every pass is exact, so decoded tokens may enter the tree, whatever policy a request names."""
    policies = RequestPolicies(parse_spec("full"), one=True)
    sparse, bad = request({"fluxion_policy": "streaming"}), request({"fluxion_policy": "nonsense"})
    assert run(policies, [sparse, bad]) is None
    assert not sparse.skip_radix_cache_insert and sparse.to_finish is None
    assert bad.to_finish is not None and "nonsense" in str(bad.to_finish.message)
