"""LongBench: reading its files, making its prompts, and scoring like the benchmark."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from quality_characters import BOS, CharacterCodec

from fluxion_quality import MissingData, suite_named
from fluxion_quality.longbench import PUBLISHED, TASKS, LongBench, LongBenchTask
from fluxion_sglang.commands.codec import SymbolicCodec

CODEC = CharacterCodec()

# Digests of the prompts in the benchmark's config/dataset2prompt.json.
DIGESTS = {
    "narrativeqa": "5178f383", "qasper": "0fbdd123", "multifieldqa_en": "20b4666a", "multifieldqa_zh": "344b3a4e",
    "hotpotqa": "9ec4ae30", "2wikimqa": "9ec4ae30", "musique": "9ec4ae30", "dureader": "ae53329f",
    "gov_report": "91c25d58", "qmsum": "dca23b67", "multi_news": "2af3f28c", "vcsum": "3e5d8241", "trec": "0eff8beb",
    "triviaqa": "00a802e6", "samsum": "a68d8842", "lsht": "f3edabdf", "passage_count": "986550b6",
    "passage_retrieval_en": "39b96b7f", "passage_retrieval_zh": "c1e2346e", "lcc": "6a1f24cf",
    "repobench-p": "ee9ec182",
}  # fmt: skip


def row(i: int, context: str, **other: Any) -> dict[str, Any]:
    fields = {"input": f"question {i}", "context": context, "answers": ["yes", "indeed"], "length": len(context)}
    return fields | {"dataset": "d", "language": "en", "all_classes": None, "_id": f"id{i}"} | other


def task(folder: Path, name: str, rows: list[dict[str, Any]], longer_than: int = 100) -> LongBenchTask:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    made = LongBench([name], longer_than).tasks(CODEC, folder)[0]
    assert isinstance(made, LongBenchTask)
    return made


def test_the_14_tasks_of_the_paper():
    assert len(set(TASKS)) == 14
    chinese = {"multifieldqa_zh", "passage_retrieval_zh", "dureader", "vcsum"}
    assert chinese < set(TASKS) and "lcc" in TASKS
    assert len(PUBLISHED) == 21


def test_prompts_are_the_published_ones():
    # An accidental edit would change the benchmark.
    def digest(name: str) -> str:
        return hashlib.sha256(PUBLISHED[name].prompt.encode()).hexdigest()[:8]

    assert {name: digest(name) for name in PUBLISHED} == DIGESTS
    assert {name: published.max_new_tokens for name, published in PUBLISHED.items()} == {
        "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64, "hotpotqa": 32, "2wikimqa": 32,
        "musique": 32, "dureader": 128, "gov_report": 512, "qmsum": 512, "multi_news": 512, "vcsum": 512, "trec": 64,
        "triviaqa": 32, "samsum": 128, "lsht": 64, "passage_count": 32, "passage_retrieval_en": 32,
        "passage_retrieval_zh": 32, "lcc": 64, "repobench-p": 64,
    }  # fmt: skip


def test_prompt_and_facts_of_a_sample(tmp_path: Path):
    context = "A fact in {braces}. " * 10
    sample = task(tmp_path, "qmsum", [row(0, context)]).samples(CODEC, None, 5, 0)[0]
    text = CODEC.decode(sample.prompt)
    assert text == f"<user>{PUBLISHED['qmsum'].prompt.format(context=context, input='question 0')}</user>"
    assert (sample.id, sample.references, sample.max_new_tokens) == ("qmsum-id0", ("yes", "indeed"), 512)
    assert sample.meta["tokens"] == len(sample.prompt)
    json.dumps(dict(sample.meta))


@pytest.mark.parametrize("name", ["triviaqa", "samsum", "trec", "lsht", "lcc", "repobench-p"])
def test_tasks_without_a_chat_template(tmp_path: Path, name: str):
    sample = task(tmp_path, name, [row(0, "text " * 30)]).samples(CODEC, None, 1, 0)[0]
    assert sample.prompt[0] == BOS
    assert CODEC.decode(sample.prompt) == PUBLISHED[name].prompt.format(context="text " * 30, input="question 0")


def test_only_long_samples_and_one_document_together(tmp_path: Path):
    rows = [row(i, f"{'AB'[i % 2]} " * 500) for i in range(8)] + [row(9, "short")]
    made = task(tmp_path, "qasper", rows, longer_than=1000)
    samples = made.samples(CODEC, None, 100, seed=3)
    assert {s.id for s in samples} == {f"qasper-id{i}" for i in range(8)}
    assert len({s.document for s in samples}) == 2
    assert [s.document for s in samples] == sorted((s.document for s in samples), key=samples[0].document.__ne__)
    assert made.samples(CODEC, None, 100, seed=3) == samples
    few = made.samples(CODEC, None, 3, seed=3)
    assert len(few) == 3 and {s.id for s in few} < {s.id for s in samples}
    assert any(made.samples(CODEC, None, 3, seed) != few for seed in range(4, 8))


@pytest.mark.parametrize("name", ["qasper", "lcc"])
def test_too_long_prompts_lose_their_middle(tmp_path: Path, name: str):
    codec = CharacterCodec(positions=1500)
    context = "begin" + "x" * 5000 + "end"
    sample = task(tmp_path, name, [row(0, context)]).samples(codec, None, 1, 0)[0]
    assert 1490 - sample.max_new_tokens <= len(sample.prompt) <= 1500 - sample.max_new_tokens
    text = codec.decode(sample.prompt)
    published = PUBLISHED[name].prompt.format(context=context, input="question 0")
    assert text.removeprefix("<user>").startswith(published[:100]) and "begin" in text
    assert text.removesuffix("</user>").endswith(published[-50:])
    assert sample.meta["tokens"] > 5000
    published_length = PUBLISHED[name].max_new_tokens + 1
    with pytest.raises(ValueError, match="too few for any prompt"):
        task(tmp_path, name, [row(0, context)]).samples(CharacterCodec(positions=published_length), None, 1, 0)


@pytest.mark.parametrize(
    ("name", "answers", "output", "want"),
    [
        ("triviaqa", ["Paris", "city of light"], "\nParis\nPassage: more", 1.0),
        ("hotpotqa", ["Paris"], "Paris\nLyon", 2 / 3),
        ("samsum", ["Ann meets Bob."], "Ann meets Bob.\n\nDialogue: again", 1.0),
        ("multifieldqa_zh", ["北京"], "北京。", 1.0),
        ("passage_retrieval_zh", ["段落3"], "段落3", 1.0),
        ("passage_count", ["7"], "7", 1.0),
        ("lcc", ["return x"], "\nreturn x\nreturn y", 1.0),
        ("vcsum", ["会议讨论了预算"], "", 0.0),
        ("dureader", ["会议讨论了预算"], "会议讨论了预算", 1.0),
    ],
)
def test_scores(tmp_path: Path, name: str, answers: list[str], output: str, want: float):
    made = task(tmp_path, name, [row(0, "text " * 30, answers=answers)])
    sample = made.samples(CODEC, None, 1, 0)[0]
    assert made.score(sample, output) == pytest.approx(want, abs=1e-6)


def test_classification_has_the_rows_classes(tmp_path: Path):
    made = task(tmp_path, "trec", [row(0, "text " * 30, answers=["city"], all_classes=["city", "state"])])
    sample = made.samples(CODEC, None, 1, 0)[0]
    assert made.score(sample, "city or state\ncity") == 0.5
    assert made.score(sample, "Type: city") == 1.0


def test_files_in_the_archives_folder(tmp_path: Path):
    (tmp_path / "data").mkdir()
    for name in TASKS:
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps(row(0, "text")))
    suite = suite_named("longbench")
    assert [t.name for t in suite.tasks(CODEC, tmp_path)] == list(TASKS) and not suite.lengths
    (tmp_path / "data" / "lcc.jsonl").unlink()
    with pytest.raises(MissingData, match=r"lcc\.jsonl.*THUDM/LongBench.*context"):
        suite.tasks(CODEC, tmp_path)


def test_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(MissingData, match=r"--data.*THUDM/LongBench"):
        LongBench().tasks(CODEC, None)
    with pytest.raises(ValueError, match="speaks neither"):
        LongBench().tasks(SymbolicCodec(), tmp_path)
    made = task(tmp_path, "qmsum", [row(0, "text")])
    made.path.write_text(json.dumps(row(0, "text")) + "\n\n{broken\n")
    with pytest.raises(MissingData, match=r"Line 3 of .*qmsum\.jsonl.*answers"):
        made.samples(CODEC, None, 1, 0)
