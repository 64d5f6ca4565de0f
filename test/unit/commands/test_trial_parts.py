"""Unit tests of the parts of `fluxion try`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality_characters import CharacterCodec

from fluxion_sglang.commands.here import program
from fluxion_sglang.commands.serving import Piece, RequestRefused, Server
from fluxion_sglang.commands.trial import advice, pace, passages, runs
from fluxion_sglang.commands.trial import facts as files
from fluxion_sglang.commands.trial.course import flags_and_config
from fluxion_sglang.commands.trial.passages import Passage, Symbolic, Text, open_passages
from fluxion_sglang.commands.trial.results import Agreement, Decode, Effort, ModelFacts, Plan, Results, TrialError
from fluxion_sglang.scoring.forced import NOTES
from fluxion_sglang.scoring.kl import Distribution

NEEDLE = Path(__file__).resolve().parents[3] / "models" / "needle"


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return files.read(str(NEEDLE))


# The model.


def test_the_facts_are_those_of_the_configuration(facts: ModelFacts) -> None:
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (4, 8, 2, 64)
    assert facts.weights_bytes == (NEEDLE / "model.safetensors").stat().st_size
    assert facts.predictor


def test_a_token_s_kv_is_counted_over_all_layers_and_a_pool_takes_more(facts: ModelFacts) -> None:
    fit = files.fit(facts, "bfloat16", on_cpu=True)
    assert fit is not None
    assert fit.kv_bytes == 2 * 4 * 2 * 64 * 2
    assert fit.kv_bytes < fit.pool_bytes < 2 * fit.kv_bytes
    assert fit.context == min(fit.tokens, facts.positions)
    assert fit.tokens <= fit.most_tokens


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(TrialError, match=r"holds no config\.json"):
        files.read(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(TrialError, match="There is no folder"):
        files.read(name)


def test_a_configuration_that_nothing_can_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toaster"}')
    with pytest.raises(TrialError, match="cannot be read") as error:
        files.read(str(tmp_path))
    assert "\n" not in str(error.value)


# Passages.


@pytest.mark.parametrize("length", [1024, 2048])
def test_documents_of_the_bundled_model_fill_the_length(length: int) -> None:
    passage = Symbolic().passage(length, 128, seed=3)
    assert len(passage.prompt) == length - 128 and passage.following == ()
    with pytest.raises(ValueError, match="tokens"):
        Symbolic().passage(129, 128, seed=3)


@given(st.integers(300, 9_000), st.integers(1, 200), st.integers(0, 99))
def test_a_passage_is_a_piece_of_the_text(length: int, forced: int, seed: int) -> None:
    codec = CharacterCodec()
    text = "".join(chr(0x4E00 + i) for i in range(4_000))
    passage = Text(codec, text, "a book").passage(length, forced, seed)
    assert (len(passage.prompt), len(passage.following)) == (length - forced, forced)
    start = codec.plain("")
    assert list(passage.prompt[: len(start)]) == start
    assert codec.decode([*passage.prompt, *passage.following]) in text * 4
    other = Text(codec, text, "a book").passage(length, forced, seed + 100)
    assert passage.prompt[: len(start) + 16] != other.prompt[: len(start) + 16], "no cache has a part of it"


def test_the_default_text_is_long_and_real() -> None:
    text = passages._reference()
    assert len(text) > 300_000 and "assert_stmt" in text


def test_texts_that_cannot_be_read_are_one_sentence(
    tmp_path: Path, facts: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_passages(facts), Symbolic)
    with pytest.raises(TrialError, match="leave --text out"):
        open_passages(facts, "book.txt")
    monkeypatch.setattr(passages, "codec_of", lambda folder, trust: CharacterCodec())
    (tmp_path / "short.txt").write_text("few words")
    (tmp_path / "bytes.txt").write_bytes(b"\xff" * 4000)
    for name, said in (("none.txt", "No such file"), ("bytes.txt", "not in UTF-8"), ("short.txt", "too few")):
        with pytest.raises(TrialError, match=said):
            open_passages(facts, str(tmp_path / name))


# Times and counters.


class StreamingServer(Server):
    """Sends the given pieces."""

    def __init__(self, pieces: Sequence[tuple[int, float, int]]) -> None:
        super().__init__("")
        self.pieces = pieces
        self.sampling: dict[str, Any] = {}

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Iterator[Piece]:
        self.sampling = dict(sampling)
        for request, after, tokens in self.pieces:
            yield Piece(request, after, list(range(tokens)))


def test_steps_count_from_when_every_request_has_its_first_token() -> None:
    slow_start = [(0, 0.1, 1), (0, 5.0, 2), (1, 5.0, 1)]
    steady = [(i, 5.0 + 0.01 * step, step + 2 - i) for step in range(1, 21) for i in (0, 1)]
    run = runs.decode(StreamingServer([*slow_start, *steady]), [[1], [2]], "full", 22)
    assert run.first == 5.0
    assert runs.median_ms(run.steps) == pytest.approx(10)
    assert max(run.steps) == pytest.approx(0.01)
    assert [len(tokens) for tokens in run.tokens] == [22, 21]


def test_tokens_that_arrive_in_bunches_do_not_make_a_server_fast() -> None:
    pieces = [(0, 0.08 * (i // 4) + 1e-4 * (i % 4), i + 1) for i in range(40)]
    run = runs.decode(StreamingServer(pieces), [[1]], "full", 40)
    assert runs.median_ms(run.steps) == pytest.approx(20, rel=0.1)


def test_a_request_without_the_flag_names_no_policy() -> None:
    server = StreamingServer([(0, 0.1, 1)])
    runs.decode(server, [[1]], "off", 1)
    assert "custom_params" not in server.sampling
    runs.decode(server, [[1]], "fixed:16:0.25", 1)
    assert server.sampling["custom_params"] == {"fluxion_policy": "fixed:16:0.25"}


def test_counters_say_what_a_token_of_one_request_read() -> None:
    def values(n: float) -> dict[str, float]:
        names = ("layers", "middle_tokens", "read_tokens", "tile_bytes", "metadata_bytes")
        return {f"fluxion_{name}_total": n * each for name, each in zip(names, (8, 1000, 250, 4000, 400), strict=True)}

    counters = runs.Counters()
    counters.add(values(1), values(3))
    assert counters.share == 0.25
    assert counters.bytes_per_token(layers=4) == pytest.approx(2200)
    assert runs.Counters().share == 0
    assert runs.Counters().bytes_per_token(4) == 0


# Plans.


def test_two_probes_give_a_curve_through_both() -> None:
    curve = pace.through([(1024, 1.0), (2048, 3.0)], 0.01)
    assert curve.prefill(1024) == pytest.approx(1.0)
    assert curve.prefill(2048) == pytest.approx(3.0)
    assert pace.through([(1024, 2.0), (2048, 2.0)], 0.01).square == 0
    assert pace.through([(1024, 2.0)], 0.01).prefill(2048) > 4


@pytest.mark.parametrize("speed", [1e-5, 1e-4, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("seconds", [60, 600, 3600])
def test_what_is_chosen_fits_the_time_or_is_the_least_there_is(speed: float, seconds: float) -> None:
    curve = pace.Pace(speed, speed / 8192, speed * 50)
    lengths, effort = pace.choose(curve, seconds, lambda documents: 131072 // documents, 2)
    least = lengths == [pace.SHORTEST] and effort.documents == 1
    assert least or pace.cost(curve, lengths, effort, 2) <= seconds
    assert max(lengths) * effort.documents <= 131072
    assert min(lengths) >= pace.SHORTEST


def test_more_time_never_gives_shorter_prompts_at_the_same_effort() -> None:
    curve = pace.Pace(1e-4, 1e-8, 0.01)
    found = [pace.choose(curve, seconds, lambda documents: 65536, 2) for seconds in (100, 300, 1000, 3000)]
    same_effort = [max(lengths) for lengths, effort in found if effort == found[-1][1]]
    assert same_effort == sorted(same_effort)


def test_lengths_that_were_asked_for_are_kept_and_only_the_effort_shrinks() -> None:
    lengths, effort = pace.choose(pace.Pace(0.1, 0, 0.5), 600, lambda documents: 10**6, 2, asked=[1024, 8192])
    assert lengths == [1024, 8192]
    assert effort.documents == 1


def test_a_length_comes_with_a_quarter_and_a_sixteenth() -> None:
    assert pace.spread(32704) == [2048, 8192, 32704]
    assert pace.spread(4096) == [1024, 4096]
    assert pace.spread(1024) == [1024]


@pytest.mark.parametrize(("text", "lengths"), [("", []), ("2k,1500", [1500, 2048]), ("8K, 8192", [8192])])
def test_lengths_are_read(text: str, lengths: list[int]) -> None:
    assert pace.parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["0", "12", "k", "2m", "-4k", "1.5k"])
def test_other_lengths_are_one_sentence(text: str) -> None:
    with pytest.raises(TrialError, match="--lengths has"):
        pace.parse_lengths(text)


def test_the_flag_in_the_server_arguments_goes_to_one_server_only() -> None:
    config = json.dumps({"predictor": "/p", "policy": "anchor", "host_tokens": 5})
    words = ["--tp", "2", "--enable-fluxion", "--fluxion-config", config, "--log-level", "error"]
    assert flags_and_config(words) == (["--tp", "2", "--log-level", "error"], {"predictor": "/p"})
    with pytest.raises(TrialError, match="no JSON object"):
        flags_and_config(["--fluxion-config=nonsense"])


@pytest.mark.parametrize(
    "word", ["--port", "--port=5", "--por", "--host=0.0.0.0", "--model", "--model-p", "--dtype", "--api-key"]
)
def test_what_the_trial_sets_itself_is_refused_in_the_server_arguments(word: str) -> None:
    with pytest.raises(TrialError, match=rf"^--server-args has '{word}', but .+; .+\.$"):
        flags_and_config(["--tp", "2", word, "x"])


def test_options_that_only_begin_like_those_of_the_trial_are_the_user_s() -> None:
    words = ["--model-impl", "sglang", "--tp=2", "--model-checksum", "-h", "--"]
    assert flags_and_config(words) == (words, {})


# Same answers.


class ThinkingServer(Server):
    """Its two best tokens are 0.25 nats apart; it records its requests."""

    def generate(self, sampling: Mapping[str, Any], **body: Any) -> dict[str, Any]:
        self.asked = body["input_ids"]
        return {"meta_info": {"output_top_logprobs": [[[-0.5, 7, None], [-0.75, 9, None]]]}}


def test_where_outputs_part_the_server_is_asked_how_near_the_tokens_were() -> None:
    server = ThinkingServer("")
    equal, apart = runs.compare(server, 1024, [[1, 2], [3]], [[5, 6, 7], [5, 6, 7]], [[5, 6, 7], [5, 8, 7]])
    assert (equal.agree, equal.gap) == (3, None)
    assert (apart.agree, apart.gap) == (1, 0.25)
    assert server.asked == [3, 5]


# Agreement.


class ForcedServer(Server):
    """Returns a distribution of two tokens at every forced token; the first has `chance`, by policy."""

    def __init__(self, **chance: float) -> None:
        super().__init__("")
        self.chance = chance

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        replies = []
        for sampling in body["sampling_params"]:
            params = sampling["custom_params"]
            values = [math.log(p) for p in (self.chance[params["fluxion_policy"]],)]
            values.append(math.log(1 - math.exp(values[0])))
            notes = [[values[0], [5, 6][: params["top"]], values]] * (len(params["forced"]) - self.short)
            replies.append({"meta_info": {NOTES: notes, "finish_reason": {"type": "length"}}})
        return replies

    short = 0


def test_agreement_is_kl_and_the_most_probable_token_at_forced_steps() -> None:
    server = ForcedServer(full=0.6, sketch=0.6, streaming=0.3)
    told = [Passage((1, 2), (5,) * 65), Passage((3,), (5,) * 33)]
    found = {policy: runs.forced(server, told, policy, 2) for policy in ("full", "sketch", "streaming")}
    assert [len(steps) for steps in found["full"]] == [64, 32], "the first token comes from the prefill"
    near = runs.agreement(2048, "sketch", found["full"], found["sketch"])
    far = runs.agreement(2048, "streaming", found["full"], found["streaming"])
    assert (near.steps, near.kl, near.low, near.high, near.same) == (96, 0, 0, 0, 1)
    assert far.kl == pytest.approx(0.6 * math.log(0.6 / 0.3) + 0.4 * math.log(0.4 / 0.7)) and far.same == 0
    assert far.low == pytest.approx(far.high) == pytest.approx(far.kl), "all steps are alike"


def test_the_interval_of_the_agreement_holds_the_mean() -> None:
    rng = np.random.default_rng(1)
    ids = np.array([1, 2])

    def steps(shift: float) -> list[list[Distribution]]:
        p = np.clip(rng.uniform(0.3, 0.7, 200) + shift, 0.01, 0.99)
        return [[Distribution(ids, np.log([each, 1 - each])) for each in p]]

    row = runs.agreement(1024, "sketch", steps(0), steps(0.1))
    assert 0 < row.low < row.kl < row.high < 3 * row.kl


def test_forced_tokens_that_are_not_all_decoded_are_refused() -> None:
    server = ForcedServer(full=0.5)
    server.short = 1
    with pytest.raises(RequestRefused, match="7 tokens were decoded"):
        runs.forced(server, [Passage((1,), (5,) * 8)], "full", 2)


# Advice.


def _results(
    facts: ModelFacts, kl: float, times: tuple[float, float], policy: str = "fluxion", spread: float = 0.001
) -> Results:
    results = Results({}, "fluxion try", facts)
    results.plan = Plan([8192], ["full", policy], {}, Effort(4, 128, 24, 2), 100, 1)
    results.agreement = [
        Agreement(8192, "full", 500, 0.0, 0.0, 0.0, 1.0),
        Agreement(8192, policy, 500, kl, kl - spread, kl + spread, 0.95),
    ]
    results.decode = [Decode(8192, 4, "full", times[0], 9, 2), Decode(8192, 4, policy, times[1], 9, 2)]
    results.decode.append(Decode(8192, 4, "off", 50.0, 9, 2))
    return results


@pytest.mark.parametrize(
    ("kl", "times", "policy"),
    [
        (0.005, (10, 8), "fluxion"),
        (0.005, (10, 9.5), "full"),  # hardly faster
        (0.02, (10, 5), "full"),  # too far
        (0.0095, (10, 5), "full"),  # it may be too far
    ],
)
def test_a_sparse_policy_is_recommended_where_it_is_near_and_faster(
    facts: ModelFacts, kl: float, times: tuple[float, float], policy: str
) -> None:
    found = advice.advise(_results(facts, kl, times), ["--max-running-requests", "8"], {})
    assert found.policy == policy
    assert found.command.startswith(f"{program('python')} -m sglang.launch_server --model-path {facts.name} ")
    assert ('{"policy": "full"}' in found.command) is (policy == "full")
    assert found.reason.endswith(".")
    assert ("nats from full at 8,192" in found.reason) is (policy == "full" and times[1] == 5)


def test_the_fastest_of_those_that_are_near_is_recommended(facts: ModelFacts) -> None:
    results = _results(facts, 0.002, (10, 8))
    assert results.plan is not None
    results.plan.policies.extend(("sketch", "streaming"))
    results.agreement += [
        Agreement(8192, "sketch", 500, 0.003, 0.002, 0.004, 0.9),
        Agreement(8192, "streaming", 500, 0.9, 0.8, 1.0, 0.5),
    ]
    results.decode += [Decode(8192, 4, "sketch", 6, 9, 2), Decode(8192, 4, "streaming", 1, 9, 2)]
    assert advice.advise(results, [], {}).policy == "sketch"


def test_a_policy_that_is_not_the_default_is_named_in_the_command(facts: ModelFacts) -> None:
    found = advice.advise(_results(facts, 0.001, (10, 5), "fixed:16:0.25"), [], {"canary": 0.2})
    assert '--fluxion-config \'{"canary": 0.2, "policy": "fixed:16:0.25"}\'' in found.command


def test_a_model_without_a_predictor_is_told_how_to_train_one(facts: ModelFacts) -> None:
    results = _results(facts, 0.1, (10, 5), "sketch")
    assert results.plan is not None
    results.plan.refused["fluxion"] = "there is none"
    notes = advice.advise(results, [], {}).notes
    assert any("fluxion train --model" in note for note in notes)
    assert any("--policies sketch:0.02" in note for note in notes)


def test_it_is_said_where_the_flag_does_not_pay(facts: ModelFacts) -> None:
    results = _results(facts, 0.001, (80, 79))
    assert any("Without the flag a token takes 50.0 ms" in note for note in advice.advise(results, [], {}).notes)
