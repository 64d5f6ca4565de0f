"""Extraction: documents full of records, questions for many of them, and parsing of answers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality_characters import CharacterCodec

from fluxion_quality import Codec, suite_named
from fluxion_quality.extraction import ASKED
from fluxion_quality.extraction_answers import objects, triples, triples_f1
from fluxion_quality.extraction_records import KINDS
from fluxion_quality.ruler_definitions import seeded
from fluxion_sglang.commands import needle
from fluxion_sglang.commands.codec import SymbolicCodec

TEXT, SYMBOLIC = CharacterCodec(), SymbolicCodec()
LENGTHS = [(TEXT, 20_000), (TEXT, 60_000), (SYMBOLIC, 1024), (SYMBOLIC, 4096)]


@pytest.mark.parametrize(("codec", "length"), LENGTHS)
def test_samples(codec: Codec, length: int):
    suite = suite_named("extraction")
    assert suite.lengths
    tasks = suite.tasks(codec, None)
    assert len({task.name for task in tasks}) == len(ASKED)
    for task, asked in zip(tasks, ASKED, strict=True):
        samples = task.samples(codec, length, 5, seed=7)
        assert len(samples) == 5 == len({s.id for s in samples})
        longest = max(len(s.prompt) + s.max_new_tokens for s in samples)
        assert longest == length if codec.symbolic else longest > length - 250
        assert all(len(s.prompt) + s.max_new_tokens <= length for s in samples)
        assert all(len(s.references) == asked for s in samples)
        assert task.samples(codec, length, 5, seed=7) == samples
        assert task.samples(codec, length, 3, seed=7) == samples[:3]
        assert task.samples(codec, length, 5, seed=8) != samples
        first = [s.prompt for s in samples if s.document == samples[0].document]
        if len(first) > 1:  # only the question differs
            same = next(i for i, (a, b) in enumerate(zip(*first[:2], strict=False)) if a != b)
            assert same > 0.9 * len(first[0])
        json.dumps([dict(s.meta) for s in samples])


def test_notes_have_the_records_in_the_middle():
    task = suite_named("extraction").tasks(TEXT, None)[1]
    samples = task.samples(TEXT, 20_000, 3, seed=0)
    assert {s.meta["kind"] for s in samples} == {kind.plural for kind in KINDS}
    assert len({s.document for s in samples}) == 1
    for sample in samples:
        text = TEXT.decode(sample.prompt)
        notes = text[: text.index("List all")]
        for reference in sample.references:
            values = list(json.loads(reference).values())
            sentence = next(line for line in notes.replace(". ", ".\n").split("\n") if values[0] in line)
            assert all(value in sentence for value in values)
            assert 80 < notes.index(sentence) < len(notes) - 320
        assert task.score(sample, "\n".join(sample.references)) == 1.0
        assert task.score(sample, "") == 0.0
        assert len("\n".join(sample.references)) < sample.max_new_tokens


def test_symbolic_facts():
    task = suite_named("extraction").tasks(SYMBOLIC, None)[0]
    samples = task.samples(SYMBOLIC, 2048, 6, seed=1)
    assert [s.document for s in samples] == ["facts_8-0"] * 4 + ["facts_8-1"] * 2
    asked = [key for s in samples[:4] for key in s.meta["keys"]]
    assert len(set(asked)) == 32  # all questions differ
    for sample in samples:
        text = needle.to_text(sample.prompt)
        assert text.startswith("<bos> ") and len(sample.prompt) + sample.max_new_tokens == 2048
        for key, fact in zip(sample.meta["keys"], sample.references, strict=True):
            assert fact.startswith(f"{key} v") and len(fact.split()) == needle.WORD_KEY + needle.NUMBER
            at = text.split(f"K {fact} ;")[0].count(" ")
            assert needle.LEAD < at < 2048 - sample.max_new_tokens - needle.TAIL
        assert text.endswith(f"Q {' '.join(sample.meta['keys'])}")
        assert task.score(sample, sample.meta["answer"]) == 1.0
        assert task.score(sample, f"= {sample.references[0]} ;") == 1 / 8
        # Every value occurs, but with the key of another.
        keys = sample.meta["keys"]
        values = [fact.removeprefix(f"{key} ") for key, fact in zip(keys, sample.references, strict=True)]
        wrong = " ; ".join(f"{key} {value}" for key, value in zip(keys[1:] + keys[:1], values, strict=True))
        assert task.score(sample, f"= {wrong} ;") == 0.0


@pytest.mark.parametrize(("codec", "length"), [(TEXT, 20_000), (SYMBOLIC, 2048)])
def test_tasks_have_documents_of_their_own(codec: Codec, length: int):
    facts = {
        task.name: {fact for sample in task.samples(codec, length, 8, seed=0) for fact in sample.references}
        for task in suite_named("extraction").tasks(codec, None)
    }
    few, _, many = facts.values()
    # Names come from short lists, so two documents may share some by chance; here both documents shared all of them.
    assert len(few & many) <= 0.1 * len(few)


def test_seeds_are_not_those_of_numpy_lists():
    # default_rng([1, 0]) equals default_rng(1), so one seed's first document would equal another stream's.
    task = suite_named("extraction").tasks(SYMBOLIC, None)[0]
    first = [task.samples(SYMBOLIC, 1024, 1, seed)[0].prompt for seed in range(4)]
    assert len(set(first)) == 4
    assert np.array_equal(np.random.default_rng([1, 0]).random(4), np.random.default_rng(1).random(4))
    draws = [seeded(*parts).random() for parts in ((1,), (1, 0), ("1",), (0, 1), (1, 0, 0))]
    assert len(set(draws)) == 5


def test_lengths_that_hold_nothing():
    for codec, length in ((TEXT, 3000), (SYMBOLIC, 600)):
        with pytest.raises(ValueError, match="24"):
            suite_named("extraction").tasks(codec, None)[2].samples(codec, length, 1, 0)
    with pytest.raises(ValueError, match="give one"):
        suite_named("extraction").tasks(TEXT, None)[0].samples(TEXT, None, 1, 0)


REFERENCES = [
    '{"name": "Ada Abel", "city": "Oslo", "badge": "17"}',
    '{"name": "Boris Falk", "city": "Riga", "badge": "18"}',
]


@pytest.mark.parametrize(
    ("output", "want"),
    [
        ("\n".join(REFERENCES), 1.0),
        (f"```json\n[{', '.join(REFERENCES)}]\n```", 1.0),
        (f'{{"employees": [{", ".join(REFERENCES)}]}}', 1.0),
        ('{"name": " ada  ABEL", "City": "oslo", "badge": 17}', 2 * 2 / (2 + 4)),
        ('{"name": "Ada Abel", "city": "Riga", "badge": "17"}', 2 * 1 / (2 + 4)),  # another record's city
        (REFERENCES[0] + '\n{"name": "Boris Falk", "city": "Ri', 2 * 2 / (2 + 4)),  # cut off
        ('[{"name": "Ada Abel", "city": "Oslo", "badge": "17"}, {"name": "Bo', 2 * 2 / (2 + 4)),
        (f'{{"list": [{REFERENCES[0]}, {{"name": "Bo', 2 * 2 / (2 + 4)),
        ("{broken\n" + REFERENCES[1], 2 * 2 / (2 + 4)),
        ("\n".join(REFERENCES * 3), 1.0),  # repetition changes nothing
        ("\n".join([*REFERENCES, '{"name": "Carl", "city": "Bonn", "badge": "1"}']), 2 * 4 / (6 + 4)),
        ('{"city": "Oslo", "badge": "17"}', 0.0),
        ('{"name": "Ada Abel"}', 0.0),
        ("Ada Abel, Oslo, 17", 0.0),
        ("", 0.0),
    ],
)
def test_answers(output: str, want: float):
    assert triples_f1(output, REFERENCES) == pytest.approx(want)


def test_nesting_without_end():
    assert objects('{"a":' * 20_000) == []


@given(st.text(st.sampled_from('{}[]":,name abc1\n'), max_size=60))
def test_any_output_has_a_score(output: str):
    assert 0 <= triples_f1(output, REFERENCES) <= 1
    assert triples(objects(output + REFERENCES[0])) >= set() and isinstance(objects(output), list)
