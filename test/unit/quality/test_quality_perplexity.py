"""Perplexity: windows of texts, and the targets at their ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from quality_characters import BOS, CharacterCodec

from fluxion_quality import MissingData, suite_named
from fluxion_sglang.commands import needle
from fluxion_sglang.commands.codec import SymbolicCodec

TEXT, SYMBOLIC = CharacterCodec(), SymbolicCodec()


def test_windows_of_a_file(tmp_path: Path):
    text = "".join(chr(0x4E00 + i) for i in range(1050))
    path = tmp_path / "book.txt"
    path.write_text(text, encoding="utf-8")
    suite = suite_named("perplexity")
    (task,) = suite.tasks(TEXT, path)
    samples = task.samples(TEXT, 201, 10, seed=0)
    assert suite.lengths and len(samples) == 5
    for i, sample in enumerate(samples):
        assert sample.prompt[0] == BOS and len(sample.prompt) == 201
        assert TEXT.decode(sample.prompt) == text[200 * i : 200 * (i + 1)]
        assert sample.meta["targets"] == sample.max_new_tokens == 64
        assert sample.references == () and sample.document == ""
    few = task.samples(TEXT, 201, 2, seed=1)
    assert len(few) == 2 and few == task.samples(TEXT, 201, 2, seed=1) and {s.id for s in few} < {s.id for s in samples}
    with pytest.raises(TypeError, match="not answers"):
        task.score(samples[0], "text")


def test_long_answers(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("a" * 1050)
    with pytest.raises(MissingData, match="--data"):
        suite_named("long").tasks(TEXT, None)
    short, long = suite_named("long").tasks(TEXT, path)
    assert (short.name, long.name) == ("short_prompt", "long_prompt")
    assert [task.samples(TEXT, 400, 1, 0)[0].meta["targets"] for task in (short, long)] == [300, 100]
    assert short.samples(TEXT, 400, 1, 0)[0].prompt == long.samples(TEXT, 400, 1, 0)[0].prompt


def test_windows_of_a_folder(tmp_path: Path):
    for name, size in (("a.txt", 300), ("b.txt", 450), ("short.txt", 10), ("notes.md", 900)):
        (tmp_path / name).write_text(name[0] * size)
    (task,) = suite_named("perplexity").tasks(TEXT, tmp_path)
    samples = task.samples(TEXT, 151, 100, seed=0)
    assert [s.id for s in samples] == ["a.txt-0", "a.txt-150", "b.txt-0", "b.txt-150", "b.txt-300"]
    with pytest.raises(ValueError, match="the longest has 450"):
        task.samples(TEXT, 1000, 1, 0)
    with pytest.raises(ValueError, match="128 tokens or more"):
        task.samples(TEXT, 100, 1, 0)


def test_symbolic_texts():
    words, answers = suite_named("perplexity").tasks(SYMBOLIC, None)
    for task in (words, answers):
        samples = task.samples(SYMBOLIC, 1024, 4, seed=3)
        assert len({s.prompt for s in samples}) == len({s.id for s in samples}) == 4
        assert all(len(s.prompt) == 1024 and s.prompt[0] == needle.BOS for s in samples)
        assert task.samples(SYMBOLIC, 1024, 2, seed=3) == samples[:2] != task.samples(SYMBOLIC, 1024, 2, seed=4)
    assert min(words.samples(SYMBOLIC, 1024, 1, 0)[0].prompt[1:]) >= needle.FIRST_WORD
    sample = answers.samples(SYMBOLIC, 1024, 1, 0)[0]
    targets = needle.to_text(sample.prompt[-sample.meta["targets"] :])
    assert targets.startswith("= k") and targets.count(";") == 10 and len(targets.split()) == 61
    # Only values count, not copies of the question or marks at fixed places.
    counted = [targets.split()[i] for i in sample.meta["counted"]]
    assert all(symbol.startswith("v") for symbol in counted)
    assert len(counted) == sum(symbol.startswith("v") for symbol in targets.split()) == 30
    assert "counted" not in words.samples(SYMBOLIC, 1024, 1, 0)[0].meta
    document = needle.to_text(sample.prompt)
    for fact in targets.removeprefix("= ").split(" ;")[:-1]:
        assert f"K {fact.strip()} ;" in document


def test_missing_data(tmp_path: Path):
    suite = suite_named("perplexity")
    with pytest.raises(MissingData, match=r"--data.*\*\.txt"):
        suite.tasks(TEXT, None)
    with pytest.raises(MissingData, match=r"no file .*gone"):
        suite.tasks(TEXT, tmp_path / "gone")
    with pytest.raises(MissingData, match="UTF-8"):
        suite.tasks(TEXT, tmp_path)
