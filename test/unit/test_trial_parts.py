"""The parts of `fluxion try`, each by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from quality_characters import CharacterCodec

from fluxion_sglang.commands import needle
from fluxion_sglang.commands.here import program
from fluxion_sglang.commands.serving import Piece, Server
from fluxion_sglang.commands.trial import advice, pace, runs
from fluxion_sglang.commands.trial import facts as files
from fluxion_sglang.commands.trial.course import flags_and_config
from fluxion_sglang.commands.trial.quiz import Question, SymbolicQuiz, TextQuiz, open_quiz
from fluxion_sglang.commands.trial.results import Answers, Decode, Effort, ModelFacts, Plan, Results, TrialError

NEEDLE = Path(__file__).resolve().parents[2] / "models" / "needle"


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


# Questions.


@pytest.mark.parametrize("length", [1024, 2048])
def test_symbolic_needles_fill_the_length_and_share_their_document(length: int) -> None:
    quiz = SymbolicQuiz()
    document = quiz.document(length, 5, seed=3)
    assert len(document) == 5
    assert {len(question.prompt) for question in document} == {length - quiz.max_new}
    assert len({question.prompt[:-2] for question in document}) == 1
    right = [needle.VOCABULARY.index(symbol) for symbol in document[0].answer.split()]
    assert len(right) < quiz.max_new
    assert quiz.right(document[0], right)
    assert not quiz.right(document[0], [*right[:-2], right[-2] ^ 1, right[-1]])


@pytest.mark.parametrize("length", [2048, 8192])
def test_text_needles_lie_in_the_middle_and_fill_the_length(length: int) -> None:
    codec = CharacterCodec()
    quiz = TextQuiz(codec)
    document = quiz.document(length, 5, seed=3)
    prompts = [codec.decode(question.prompt) for question in document]
    for question, prompt in zip(document, prompts, strict=True):
        assert length - 200 < len(question.prompt) + quiz.max_new <= length
        place = prompt.index(f" is {question.answer}.")
        assert 64 < place < len(prompt) - 256
        assert prompt.endswith(" is")
    assert len({question.answer for question in document}) == len(document)
    # What a second question does not find in the cache is the question alone.
    assert prompts[0].partition("What is")[0] == prompts[1].partition("What is")[0]


def test_a_length_without_room_for_a_needle_is_refused() -> None:
    with pytest.raises(ValueError, match="hold no needle"):
        TextQuiz(CharacterCodec()).document(600, 1, seed=0)


@pytest.mark.parametrize(
    ("said", "right"),
    [(" 48213.", True), (" 48,213 and", True), (" 482", False), (" 12 48213", False), (" none", False)],
)
def test_the_first_number_of_an_answer_counts(said: str, right: bool) -> None:
    codec = CharacterCodec()
    assert TextQuiz(codec).right(Question((), "48213"), codec.encode(said)) is right


def test_the_bundled_model_gets_the_quiz_in_its_language(facts: ModelFacts) -> None:
    assert isinstance(open_quiz(facts), SymbolicQuiz)


# Times and counters.


class StreamingServer(Server):
    """Sends the pieces that it was given."""

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
    """Has two best tokens that are 0.25 nats apart, and remembers what it was asked."""

    def generate(self, sampling: Mapping[str, Any], **body: Any) -> dict[str, Any]:
        self.asked = body["input_ids"]
        return {"meta_info": {"output_top_logprobs": [[[-0.5, 7, None], [-0.75, 9, None]]]}}


def test_where_outputs_part_the_server_is_asked_how_near_the_tokens_were() -> None:
    server = ThinkingServer("")
    equal, apart = runs.compare(server, 1024, [[1, 2], [3]], [[5, 6, 7], [5, 6, 7]], [[5, 6, 7], [5, 8, 7]])
    assert (equal.agree, equal.gap) == (3, None)
    assert (apart.agree, apart.gap) == (1, 0.25)
    assert server.asked == [3, 5]


# Advice.


def _results(facts: ModelFacts, full: int, sparse: int, times: tuple[float, float], policy: str = "fluxion") -> Results:
    results = Results({}, "fluxion try", facts)
    results.plan = Plan([8192], ["full", policy], {}, Effort(4, 5, 24, 2), 100, 1)
    results.answers = [Answers(8192, "full", full, 20), Answers(8192, policy, sparse, 20)]
    results.decode = [Decode(8192, 4, "full", times[0], 9, 2), Decode(8192, 4, policy, times[1], 9, 2)]
    results.decode.append(Decode(8192, 4, "off", 50.0, 9, 2))
    return results


@pytest.mark.parametrize(
    ("full", "sparse", "times", "policy"),
    [
        (20, 20, (10, 8), "fluxion"),
        (20, 20, (10, 9.5), "full"),  # hardly faster
        (20, 19, (10, 5), "full"),  # an answer lost
        (4, 6, (10, 5), "full"),  # full cannot answer, so nothing was measured
    ],
)
def test_a_sparse_policy_is_recommended_where_it_answers_as_well_and_is_faster(
    facts: ModelFacts, full: int, sparse: int, times: tuple[float, float], policy: str
) -> None:
    found = advice.advise(_results(facts, full, sparse, times), ["--max-running-requests", "8"], {})
    assert found.policy == policy
    assert found.command.startswith(f"{program('python')} -m sglang.launch_server --model-path {facts.name} ")
    assert ('{"policy": "full"}' in found.command) is (policy == "full")
    assert found.reason.endswith(".")


def test_a_policy_that_is_not_the_default_is_named_in_the_command(facts: ModelFacts) -> None:
    found = advice.advise(_results(facts, 20, 20, (10, 5), "fixed:16:0.25"), [], {"tau": 0.2})
    assert '--fluxion-config \'{"tau": 0.2, "policy": "fixed:16:0.25"}\'' in found.command


def test_a_model_without_a_predictor_is_told_how_to_train_one(facts: ModelFacts) -> None:
    results = _results(facts, 20, 18, (10, 5), "fixed:16:0.25")
    assert results.plan is not None
    results.plan.refused["fluxion"] = "there is none"
    assert any("fluxion train --model" in note for note in advice.advise(results, [], {}).notes)


def test_it_is_said_where_the_flag_does_not_pay(facts: ModelFacts) -> None:
    results = _results(facts, 20, 20, (80, 79))
    assert any("Without the flag a token takes 50.0 ms" in note for note in advice.advise(results, [], {}).notes)
