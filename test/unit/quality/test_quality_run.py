"""The loop of the quality harness, on a fake engine: requests, measurements, and second runs."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from effort import case
from quality_world import VOCABULARY, Echo, FakeEngine, Forced, Starter, World, model_folder

from fluxion_quality import plan as planning
from fluxion_quality import run
from fluxion_quality.base import MissingData, Sample
from fluxion_quality.model import Model
from fluxion_quality.plan import BadInput, Settings
from fluxion_quality.record import SAME
from fluxion_sglang.commands import provenance
from fluxion_sglang.scoring import serve
from fluxion_sglang.scoring.forced import NOTES
from fluxion_sglang.scoring.serve import EngineFailed, Needs, Reply, Request, RequestFailed, Server, options

POLICIES = ("streaming", "fixed:16:0.05", "oracle")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(planning, "suite_named", lambda name: World())
    monkeypatch.setattr(provenance, "commit", lambda paths: "abc")
    return Settings("world", model_folder(tmp_path / "model"), POLICIES, tmp_path / "out.json", (64, 128), samples=6)


@pytest.fixture
def few(settings: Settings) -> Settings:
    """Settings with one cell."""
    return dataclasses.replace(settings, tasks=("echo",), lengths=(64,))


def rows_of(data: dict[str, Any]) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}


def measure(settings: Settings, start: Starter | None = None) -> dict[str, Any]:
    return run.run(planning.make(settings), start or Starter())


def samples_of(settings: Settings) -> list[Sample]:
    """Samples of the first cell."""
    plan = planning.make(settings)
    return list(plan.samples(plan.cells[0]))


def test_every_cell_has_every_policy_and_full_is_the_reference(settings: Settings) -> None:
    rows = rows_of(measure(settings))
    policies = ("full", "streaming", "fixed:16:0.05", "oracle:0.05")
    assert list(rows) == [
        (task, length, policy) for task in ("echo", "alone", "forced") for length in (64, 128) for policy in policies
    ]
    full, streaming, fixed = (rows["echo", 64, policy] for policy in policies[:3])
    assert (full["score"], full["delta"], full["same"], full["kl"]) == (1.0, 0.0, 1.0, 0.0)
    assert (streaming["score"], streaming["delta"], streaming["same"]) == (0.0, -1.0, 0.0)
    assert (fixed["score"], fixed["same"]) == (1.0, 1.0)
    assert full["error_mean"] == 0 and full["read_fraction"] == pytest.approx(1.1)
    assert streaming["read_fraction"] == 0 and streaming["error_p99"] == 0.5
    # 10 bytes of tiles and 1 of metadata in each of two layers.
    assert fixed["bytes_per_token"] == 22
    assert fixed["read_fraction"] == pytest.approx(0.11)
    assert fixed["kl"] > 0
    # streaming's answer differs at step 1, which is compared; later steps are not.
    assert (streaming["kl_steps"], fixed["kl_steps"]) == (6, 12)
    assert full["documents"] == [0, 0, 1, 1, 2, 2]
    assert rows["alone", 64, "full"]["documents"] == [0, 1, 2, 3, 4, 5]
    assert len(full["samples"]) == 6


def test_a_document_is_prefilled_once_then_all_questions_of_all_policies_go_together(few: Settings) -> None:
    measure(few, start := Starter())
    (engine,) = start.engines
    assert [len(batch) for batch in engine.batches] == [1, 8] * 3
    warm, together = engine.batches[:2]
    assert warm[0]["max_new_tokens"] == 1
    assert all(request["ids"][:-1] == warm[0]["ids"][:-1] for request in together)
    asked = {(request["ids"][-1], request["custom_params"]["fluxion_policy"]) for request in together}
    assert len(asked) == 8
    assert engine.closed


def test_many_questions_are_asked_in_parts(few: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a document is prefilled again if a policy observes the prefill."""
    monkeypatch.setattr(Echo, "questions", 6)
    data = measure(dataclasses.replace(few, batch=4), start := Starter())
    assert [len(batch) for batch in start.engines[0].batches] == [1, 8, 8, 8]
    assert rows_of(data)["echo", 64, "full"]["documents"] == [0] * 6
    measure(dataclasses.replace(few, policies=("streaming", "lfps:0.10"), batch=3, fresh=True), start := Starter())
    sizes = [len(batch) for batch in start.engines[0].batches]
    assert sizes == [1, 4, 1, 1] * 3, "two questions: both others, then lfps twice"


def test_policies_that_hear_of_a_prompt_are_not_given_it_by_the_tree(few: Settings) -> None:
    measure(dataclasses.replace(few, policies=("lfps:0.10", "streaming", "lfps:0.20")), start := Starter())
    (engine,) = start.engines
    asked = [[request["custom_params"]["fluxion_policy"] for request in batch] for batch in engine.batches]
    one = [["full"], ["full", "streaming"] * 2, *([policy] for policy in ("lfps:0.10", "lfps:0.20") for _ in range(2))]
    assert asked == one * 3
    assert engine.forgotten == [at + 6 * document for document in range(3) for at in range(2, 6)]


def test_an_engine_is_asked_to_forget_until_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    engine = SimpleNamespace(flush_cache=lambda: SimpleNamespace(success=answers.pop(0)))
    Server(engine, 4).forget()
    assert not answers
    monkeypatch.setattr(serve, "IDLE_S", 0.05)
    with pytest.raises(RequestFailed, match="did not flush"):
        Server(SimpleNamespace(flush_cache=lambda: SimpleNamespace(success=False)), 4).forget()


def test_perplexity_is_of_forced_tokens_without_the_first(settings: Settings) -> None:
    data = measure(dataclasses.replace(settings, tasks=("forced",), lengths=(64,)), start := Starter())
    full, streaming = (rows_of(data)["forced", 64, policy] for policy in ("full", "streaming"))
    assert full["measure"] == "perplexity"
    assert full["score"] == pytest.approx((math.exp(6) + VOCABULARY - 1) / math.exp(6), rel=1e-4)
    assert streaming["score"] == pytest.approx((math.exp(2) + VOCABULARY - 1) / math.exp(2), rel=1e-4)
    assert streaming["delta"] == pytest.approx(streaming["score"] - full["score"])
    assert full["kl_steps"] == 6 * 3 and streaming["kl"] > 0
    assert full["same"] == 1 and 0 <= streaming["same"] <= 1
    assert full["loss_by_span"] == [], "three steps are fewer than the spans"
    first = start.engines[0].batches[1][0]
    assert len(first["ids"]) == 60 and first["max_new_tokens"] == 4 and len(first["custom_params"]["forced"]) == 4
    assert start.started[0][1].forced


def test_loss_and_divergence_by_the_distance_from_the_prompt() -> None:
    """Spans are relative to each sample, and samples have equal weight."""
    short, long = [1.0] * 8 + [3.0] * 8, [2.0] * 16 + [5.0] * 16
    assert run._by_span([short, long]) == [1.5] * 4 + [4.0] * 4
    assert run._by_span([long, [1.0] * 7]) == []


def test_a_sample_says_which_of_its_targets_count(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(settings, tasks=("forced",), lengths=(64,), policies=())
    whole = rows_of(measure(few))["forced", 64, "full"]
    made = samples_of(few)
    assert planning.counted(made[0]) == range(1, 4)

    def samples(self: Forced, *args: Any) -> list[Sample]:
        return [dataclasses.replace(sample, meta={"targets": 4, "counted": [1, 3]}) for sample in made]

    def distribution(self: FakeEngine, token: int, policy: str) -> list[float]:
        rows.append(policy)
        logits = np.zeros(VOCABULARY)
        logits[token] = len(rows) % 4  # steps of a request: 1, 2, 3, 0
        return list(logits - np.log(np.exp(logits).sum()))

    rows: list[str] = []
    monkeypatch.setattr(Forced, "samples", samples)
    monkeypatch.setattr(FakeEngine, "_answer", _without_warmup(FakeEngine._answer))
    monkeypatch.setattr(FakeEngine, "_distribution", distribution)
    row = rows_of(measure(dataclasses.replace(few, fresh=True)))["forced", 64, "full"]
    want = [math.log(math.exp(size) + VOCABULARY - 1) - size for size in (2, 0)]
    assert row["score"] == pytest.approx(math.exp(np.mean(want)), rel=1e-4)
    assert (row["kl_steps"], whole["kl_steps"]) == (6 * 2, 6 * 3)
    assert row["prompts"] != whole["prompts"]


def _without_warmup(answer: Any) -> Any:
    """Answers requests for one token, whose results are not used, without a distribution."""

    def answered(self: FakeEngine, ids: list[int], params: dict[str, Any], *rest: Any) -> dict[str, Any]:
        if params["max_new_tokens"] > 1:
            return dict(answer(self, ids, params, *rest))
        meta = {"finish_reason": {"type": "length"}, "output_top_logprobs": [], "output_token_logprobs": []}
        return {"output_ids": [0], "meta_info": meta}

    return answered


def test_the_divergence_is_a_mean_over_samples_not_steps(few: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planning.make(few)
    answers = run._Answers(plan.codec, plan.cells[0].task, plan.samples(plan.cells[0])[:3])
    found = iter(([0.5], [0.1] * 9, []))  # the third has no step to compare
    monkeypatch.setattr(run.kl, "divergences", lambda *args: next(found))
    for i in range(3):
        answers.add(i, Reply([1], [], [0.0]), Reply([1], [], [0.0]))
    row = answers.row()
    assert (row["kl"], row["kl_steps"]) == (pytest.approx(0.3), 10)


def test_rows_say_which_haystack_they_are_of(few: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(few, policies=())
    assert rows_of(measure(few))["echo", 64, "full"]["haystack"] is None
    kinds = ["generated", "essay", "essay", "generated", "essay", "essay"]
    named = [dataclasses.replace(s, meta={"haystack": kind}) for s, kind in zip(samples_of(few), kinds, strict=True)]
    monkeypatch.setattr(Echo, "samples", lambda *args: named)
    assert rows_of(measure(dataclasses.replace(few, fresh=True)))["echo", 64, "full"]["haystack"] == "essay, generated"


def test_the_same_settings_give_the_same_file(settings: Settings, tmp_path: Path) -> None:
    settings = dataclasses.replace(settings, lengths=(64,))
    measure(settings)
    measure(dataclasses.replace(settings, out=tmp_path / "again.json"))
    assert settings.out.read_text() == (tmp_path / "again.json").read_text()
    measure(dataclasses.replace(settings, out=tmp_path / "other.json", seed=1))
    other = json.loads((tmp_path / "other.json").read_text())
    assert other["rows"][0]["prompts"] != json.loads(settings.out.read_text())["rows"][0]["prompts"]


def test_a_second_run_starts_no_engine_and_more_cells_only_add(few: Settings) -> None:
    first, start = measure(few), Starter()
    assert measure(few, start) == first
    assert start.engines == []
    more = measure(dataclasses.replace(few, lengths=(64, 128)), start)
    assert len(start.engines) == 1 and len(more["rows"]) == 8
    assert more["rows"][:4] == first["rows"]
    assert all(len(request["ids"]) == 128 for batch in start.engines[0].batches for request in batch)


def test_an_interrupted_run_loses_one_cell(settings: Settings) -> None:
    # Two calls per document of echo: 6 at length 64, then the interrupt comes in the second cell.
    with pytest.raises(KeyboardInterrupt):
        measure(settings, start := Starter(interrupt_at=9))
    assert start.engines[0].closed
    saved = json.loads(settings.out.read_text())
    assert {(row["task"], row["length"]) for row in saved["rows"]} == {("echo", 64)}
    start = Starter()
    assert list(rows_of(measure(settings, start))) == list(rows_of(measure(dataclasses.replace(settings, fresh=True))))
    assert len(start.engines[0].batches[0][0]["ids"]) == 128


def test_off_is_a_pass_of_its_own_with_its_own_engine(few: Settings) -> None:
    before = measure(few)
    row = rows_of(measure(dataclasses.replace(few, policies=(*POLICIES, "off")), start := Starter()))["echo", 64, "off"]
    assert [policy for policy, _ in start.started] == ["off"]
    assert all("custom_params" not in request for batch in start.engines[0].batches for request in batch)
    assert (row["score"], row["same"], row["delta"], row["kl"], row["read_fraction"]) == (1.0, 1.0, 0.0, None, None)
    assert json.loads(few.out.read_text())["rows"][:-1] == before["rows"]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"samples": 5}, "samples"), ({"seed": 3}, "seed"), ({"policies": ("streaming",)}, "policies")],
)
def test_a_file_of_another_run_is_refused(few: Settings, change: dict[str, Any], words: str) -> None:
    measure(few)
    with pytest.raises(BadInput, match=f"differs in {words};.*--fresh"):
        planning.make(dataclasses.replace(few, **change))
    assert planning.make(dataclasses.replace(few, fresh=True, **change)).results["rows"] == []


def test_a_file_that_differs_in_anything_is_refused(few: Settings) -> None:
    measure(few)
    saved = json.loads(few.out.read_text())
    for key in (*planning.SETTINGS, *SAME):
        with case(key=key):
            few.out.write_text(json.dumps({**saved, key: "another"}))
            words = "no result file" if key == "benchmark" else rf"differs in {key};.*--fresh"
            with pytest.raises(BadInput, match=words):
                planning.make(few)
            few.out.write_text(json.dumps({name: value for name, value in saved.items() if name != key}))
            if key not in ("device", "predictor"):  # None means absent
                with pytest.raises(BadInput):
                    planning.make(few)


def test_rows_of_other_questions_are_refused(few: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(few)
    made = samples_of(few)
    other: list[dict[str, Any]] = [{"references": ("v1",)}, {"max_new_tokens": 2}, {"prompt": (1, 2)}, {"document": ""}]
    for change in (*other, {"meta": {"targets": 3}}):
        with case(change=change):
            changed = [*made[:-1], dataclasses.replace(made[-1], **change)]
            monkeypatch.setattr(Echo, "samples", lambda *args, changed=changed: changed)
            with pytest.raises(BadInput, match=r"answers to other questions of task 'echo'; .*--fresh to start over.$"):
                planning.make(few)
            planning.make(dataclasses.replace(few, fresh=True))


def test_another_model_is_another_run(few: Settings) -> None:
    (few.model / "chat.jinja").write_text("template")
    (few.model / "generation_config.json").write_text("{}")
    measure(few)
    (few.model / "README.md").write_text("says what it is")
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json", "chat.jinja"):
        planning.make(few)
        content = (few.model / name).read_bytes()
        (few.model / name).write_bytes(content + b" ")
        with case(name=name), pytest.raises(BadInput, match="differs in model;"):
            planning.make(few)
        (few.model / name).write_bytes(content)


def test_a_digest_of_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "package"
    shutil.copytree(Path(provenance.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(provenance, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: found)))
    monkeypatch.setattr(provenance, "CHECKOUT", False)
    digest = provenance.sources.__wrapped__
    digests = [digest()]
    (folder / "notes.txt").write_text("nothing that runs")
    assert digest() == digests[0]
    (folder / "ask.py").write_text((folder / "ask.py").read_text() + "\n")
    digests.append(digest())
    (folder / "deep").mkdir()
    (folder / "deep" / "native.so").write_bytes(b"library")
    digests.append(digest())
    (folder / "deep" / "native.so").rename(folder / "deep" / "other.so")
    digests.append(digest())
    monkeypatch.setattr(provenance, "CHECKOUT", True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert digest() == digests[-1], "a checkout without benchmarks"
    (tmp_path / "benchmark" / "racers").mkdir(parents=True)
    for number in (3, 4):
        (tmp_path / "benchmark" / "racers" / "driver.py").write_text(f"WARM = {number}\n")
        digests.append(digest())
    assert len(set(digests)) == 6


@pytest.mark.parametrize(
    "content", ["hello", "{}", "[]", "3", '{"benchmark": "one_batch", "rows": []}', '{"benchmark": "quality"}']
)
def test_a_file_that_is_something_else_is_refused(settings: Settings, content: str) -> None:
    settings.out.write_text(content)
    with pytest.raises(BadInput, match="no result file"):
        planning.make(settings)
    assert planning.make(dataclasses.replace(settings, fresh=True)).results["rows"] == []


def test_places_that_cannot_be_written_are_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, words in (
        (tmp_path, "names the folder"),
        (tmp_path / "file" / "below" / "out.json", "lies below .*file, which is a file"),
    ):
        for fresh in (False, True):
            with pytest.raises(BadInput, match=words):
                planning.make(dataclasses.replace(settings, out=out, fresh=fresh))
    planning.make(dataclasses.replace(settings, out=tmp_path / "new" / "folder" / "out.json"))


class TestPolicies:
    def test_full_comes_first_and_each_once(self) -> None:
        assert planning.expand(("fixed:16:0.05", "full", "fixed:16:0.05")) == (("full", "fixed:16:0.05"), False)
        assert planning.expand(()) == (("full",), False)

    def test_a_bare_oracle_takes_the_budgets_of_the_others(self) -> None:
        specs = ("oracle", "fixed:16:0.05", "fixed:64:0.05", "fixed:16:0.1", "off")
        assert planning.expand(specs) == (
            ("full", "oracle:0.05", "oracle:0.1", "fixed:16:0.05", "fixed:64:0.05", "fixed:16:0.1"),
            True,
        )
        assert planning.expand(("oracle", "streaming"))[0] == ("full", "oracle:0.05", "streaming")
        assert planning.expand(("oracle", "oracle:0.1"))[0] == ("full", "oracle:0.05", "oracle:0.1")

    def test_what_the_audit_cannot_tell_apart_is_refused(self) -> None:
        long = "fixed:16:0.0500000000000000000000"
        assert len(long) == 33
        with pytest.raises(ValueError, match=r"alike in their first 32 bytes.*apart"):
            planning.expand((long, long[:-1] + "1"))
        assert planning.expand((long[:-1], long[:-2] + "1"))[0] == ("full", long[:-1], long[:-2] + "1")

    @pytest.mark.parametrize("spec", ["best", "fixed", "fixed:16", "fixed:17:0.05", "oracle:2", ""])
    def test_an_unknown_spec_is_refused(self, spec: str) -> None:
        with pytest.raises(ValueError, match="polic"):
            planning.expand((spec,))


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"samples": 0}, "--samples is 0"),
            ({"batch": -1}, "--batch is -1"),
            ({"seed": -1}, "--seed is -1"),
            ({"data": Path("/nowhere")}, "no /nowhere, which --data names"),
            ({"lengths": (8192,)}, "8,192 tokens do not fit the 4,096 positions .*; give 1 to 4,094"),
            ({"lengths": (4095,)}, "4,095 tokens do not fit"),
            ({"lengths": (0,)}, "0 tokens do not fit"),
            ({"lengths": (4092,)}, "4,095 tokens for sample '0' and its answer.*gives them 4,094 of the 4,096"),
            ({"tasks": ("echo", "sing")}, "no task 'sing'; it has echo, alone, forced"),
            ({"policies": ("best",)}, "policy 'best'"),
            ({"policies": ("fluxion:0.10",)}, "'fluxion' needs a predictor, and .*fluxion has none"),
            ({"model": Path("/nowhere")}, "no model in /nowhere"),
        ],
    )
    def test_one_sentence(self, settings: Settings, change: dict[str, Any], words: str) -> None:
        with pytest.raises(BadInput, match=words) as caught:
            planning.make(dataclasses.replace(settings, **change))
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")

    def test_the_longest_prompt_that_sglang_answers_whole(self, settings: Settings) -> None:
        assert planning.make(dataclasses.replace(settings, tasks=("echo",), lengths=(4091,))).needs.tokens > 4094
        # No pass follows the last forced token, but SGLang counts it as generated.
        assert planning.make(dataclasses.replace(settings, tasks=("forced",), lengths=(4094,))).needs.forced
        assert Model.read(settings.model).room == 4094

    def test_missing_weights_data_and_packages(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = (settings.model / "model.safetensors").rename(settings.model / "elsewhere")
        with pytest.raises(BadInput, match="no weights"):
            planning.make(settings)
        weights.rename(settings.model / "model.safetensors")
        with monkeypatch.context() as patch:
            patch.setattr(World, "tasks", Mock(side_effect=MissingData("There is no file x.")))
            with pytest.raises(BadInput, match="no file x"):
                planning.make(settings)
        lacking = ModuleNotFoundError("No module named 'rouge'", name="rouge")
        monkeypatch.setattr(Echo, "score", Mock(side_effect=lacking))
        with pytest.raises(BadInput, match="needs the Python package 'rouge'"):
            planning.make(settings)

    def test_lengths_of_a_suite_without(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(World, "lengths", False)
        with pytest.raises(BadInput, match="leave --lengths out"):
            planning.make(settings)
        assert [cell.length for cell in planning.make(dataclasses.replace(settings, lengths=())).cells] == [None] * 3


def test_the_engine_has_room_for_a_document_and_as_many_answers_as_run(few: Settings) -> None:
    small = planning.make(few).needs
    # 63 shared tokens; eight times a question, its answer and two pages in progress; and a chunk.
    assert small.tokens == 63 + 8 * (1 + 3 + 32) + 4096
    assert planning.make(dataclasses.replace(few, lengths=(1024, 64))).needs.tokens == small.tokens + 960
    assert not small.forced


def test_engine_options(tmp_path: Path) -> None:
    with_flag = options(tmp_path, "float32", "cpu", Needs(5001, 4, True), tmp_path / "audit", {"spread": 0.5})
    config = json.loads(with_flag["fluxion_config"])
    audit = {"file": str(tmp_path / "audit"), "every": serve.FORCED_AUDITED}
    assert config == {"policy": "full", "host_tokens": 5008, "audit": audit, "spread": 0.5}
    assert with_flag["enable_fluxion"] and with_flag["enable_custom_logit_processor"]
    assert with_flag["disable_overlap_schedule"]
    without = options(tmp_path, "auto", None, Needs(5001, 4, False), None, {})
    assert without["max_total_tokens"] == 5008
    assert not {"enable_fluxion", "fluxion_config", "device"} & set(without)


def test_a_request_that_the_engine_refuses_ends_the_run(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    refusal = {"meta_info": {"finish_reason": {"type": "abort", "message": "no such policy"}}, "output_ids": []}
    monkeypatch.setattr(FakeEngine, "_answer", lambda *args: refusal)
    with pytest.raises(RequestFailed, match="no such policy"):
        measure(settings, start := Starter())
    assert start.engines[0].closed

    monkeypatch.setattr(FakeEngine, "_answer", Mock(side_effect=ValueError("too long")))
    with pytest.raises(RequestFailed, match="too long"):
        measure(settings)


@pytest.mark.parametrize("cut", ["notes", "tokens"])
def test_forced_tokens_that_are_not_all_there_end_the_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    answer = FakeEngine._answer

    def short(self: FakeEngine, *args: Any) -> dict[str, Any]:
        reply = answer(self, *args)
        if NOTES in reply["meta_info"]:
            reply["meta_info"][NOTES] = reply["meta_info"][NOTES][: 2 if cut == "notes" else None]
            reply["output_ids"] = reply["output_ids"][: 2 if cut == "tokens" else None]
        return reply

    monkeypatch.setattr(FakeEngine, "_answer", short)
    with pytest.raises(RequestFailed, match="was to decode 4 given tokens, and decoded"):
        measure(dataclasses.replace(settings, tasks=("forced",)))
    assert not settings.out.exists()


def test_an_answer_that_was_prefilled_again_ends_the_run(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {"finish_reason": {"type": "stop"}, "output_top_logprobs": [], "output_token_logprobs": []}
    meta["num_retractions"] = 0
    monkeypatch.setattr(FakeEngine, "_answer", lambda *args: {"output_ids": [], "meta_info": meta})
    request = Request((1, 2), "streaming", 3)
    assert Server(FakeEngine(), VOCABULARY).generate([request])[0].tokens == []
    meta["num_retractions"] = 1
    with pytest.raises(RequestFailed, match=r"'streaming' was retracted.*smaller --batch"):
        Server(FakeEngine(), VOCABULARY).generate([request])


def test_an_engine_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock(side_effect=RuntimeError("no such device\nand a trace"))
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=engine))
    monkeypatch.setattr(serve.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "audit"))
    (tmp_path / "audit").mkdir()
    with pytest.raises(EngineFailed, match=r"^The engine did not start: RuntimeError: no such device$"):
        serve.starter(tmp_path, 4, "auto")("full", Needs(100, 2, False))
    assert not (tmp_path / "audit").exists()


def test_nothing_is_read_from_an_engine_without_an_audit() -> None:
    server = Server(FakeEngine(), VOCABULARY)
    assert server.audited() == [] and server.generate([]) == []
