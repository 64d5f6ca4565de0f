"""L-Eval: documents with several instructions, its prompt, its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quality_characters import CharacterCodec

from fluxion_quality import MissingData, metrics, suite_named
from fluxion_quality.leval import TASKS, LEval, LEvalTask
from fluxion_sglang.commands.codec import SymbolicCodec

CODEC = CharacterCodec()


def row(document: str, questions: int = 3, evaluation: str = "f1") -> dict[str, Any]:
    return {
        "instructions": [f"Question {i}?" for i in range(questions)],
        "outputs": [f"answer number {i}" for i in range(questions)],
        "input": document,
        "source": "meeting",
        "evaluation": evaluation,
    }


def task(folder: Path, rows: list[dict[str, Any]], longer_than: int = 100) -> LEvalTask:
    path = folder / "financial_qa.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return LEvalTask("financial_qa", path, longer_than)


def test_prompt_is_the_published_one(tmp_path: Path):
    sample = task(tmp_path, [row("A {long} document.")]).samples(CODEC, None, 1, 0)[0]
    assert CODEC.decode(sample.prompt) == (
        "<user>Now you are given a very long document. Please follow the instruction after this document. These "
        "instructions may include summarizing a document, answering questions based on the document, or writing a "
        "required paragraph. \n\nDocument is as follows. A {long} document. Instruction: Question 0? \n"
        "Answer this question with 3 words.</user>"
    )
    assert (sample.references, sample.max_new_tokens) == (("answer number 0",), 512)
    json.dumps(dict(sample.meta))


def test_documents_stay_together(tmp_path: Path):
    rows = [row(f"{i}" * 1000) for i in range(5)] + [row("short")]
    made = task(tmp_path, rows, longer_than=900)
    samples = made.samples(CODEC, None, 100, seed=1)
    assert len(samples) == 15 and len({s.id for s in samples}) == 15
    assert [s.document for s in samples[::3]] == [s.document for s in samples[1::3]]
    shared = CODEC.decode(samples[0].prompt).index("Instruction:")
    assert samples[0].prompt[:shared] == samples[1].prompt[:shared]
    assert made.samples(CODEC, None, 4, seed=1) == samples[:4]
    assert any(made.samples(CODEC, None, 4, seed) != samples[:4] for seed in range(2, 6))


def test_rows_for_judges_are_left_out(tmp_path: Path):
    rows = [row("x" * 500, evaluation="human"), row("y" * 500, evaluation="LLM"), row("z" * 500, evaluation="ROUGE")]
    samples = task(tmp_path, rows).samples(CODEC, None, 100, 0)
    assert {s.document for s in samples} == {"financial_qa-2"}


def test_long_documents_lose_their_end_for_all_questions_alike(tmp_path: Path):
    made = task(tmp_path, [row("begin" + "x" * 5000 + "end")])
    codec = CharacterCodec(positions=2000)
    samples = made.samples(codec, None, 3, 0)
    assert max(len(s.prompt) for s in samples) == 2000 - 512
    texts = [codec.decode(s.prompt) for s in samples]
    assert all("begin" in text and "end " not in text for text in texts)
    assert len({text.split("Instruction:")[0] for text in texts}) == 1
    with pytest.raises(ValueError, match="too few for any document"):
        made.samples(CharacterCodec(positions=600), None, 3, 0)


def test_scores(tmp_path: Path):
    made = task(tmp_path, [row("x" * 500), row("y" * 500, evaluation="rouge")])
    samples = {s.meta["metric"]: s for s in made.samples(CODEC, None, 100, 0) if s.references == ("answer number 1",)}
    assert made.score(samples["f1"], "The answer: number 1.") == 1.0
    assert made.score(samples["f1"], "number") == 0.5
    assert made.score(samples["rouge"], "answer number 1") == pytest.approx(1)
    output = "The answer is number 1"
    assert made.score(samples["rouge"], output) == metrics.rouge_geometric_mean(output, "answer number 1") > 0
    assert made.score(samples["rouge"], "") == 0.0


@pytest.mark.parametrize("folder", ["", "Open-ended-tasks", "LEval-data/Open-ended-tasks", "LEval/Generation"])
def test_files_where_the_distributions_have_them(tmp_path: Path, folder: str):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name in TASKS:
        (tmp_path / folder / f"{name}.jsonl").write_text(json.dumps(row("text")))
    suite = suite_named("leval")
    assert [t.name for t in suite.tasks(CODEC, tmp_path)] == list(TASKS)
    assert len(TASKS) == 13 and not suite.lengths


def test_missing_data(tmp_path: Path):
    with pytest.raises(MissingData, match=r"financial_qa\.jsonl.*L4NLP/LEval.*instructions"):
        LEval().tasks(CODEC, tmp_path)
    with pytest.raises(ValueError, match="does not speak it"):
        LEval().tasks(SymbolicCodec(), tmp_path)
