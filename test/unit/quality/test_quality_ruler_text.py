"""RULER as English text, against the published definition: every prompt is decoded and parsed."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_tokenizer import TextCodec

from fluxion_quality.base import MissingData, Sample, Task
from fluxion_quality.prose import Prose, fit, generated_essay
from fluxion_quality.ruler import Ruler
from fluxion_quality.ruler_words import all_words, draw_words

CODEC = TextCodec()
TASKS = {task.name: task for task in Ruler().tasks(CODEC, None)}
WITHOUT_DATA = [name for name in TASKS if not name.startswith("qa")]
PARAGRAPH = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TO_GENERATE = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}

# haystack, kinds of keys and values, keys, values per key, keys per question: the published configuration.
SHAPES = {
    "niah_single_1": ("repeat", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", None, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", None, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
FORMS = {
    "words": r"\S.*-.*\S",
    "numbers": r"\d{7}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}

seeds = st.integers(0, 2**40)


def one(task: Task, length: int, seed: int) -> tuple[Sample, str, str]:
    """A sample, its user turn, and the beginning of its answer."""
    (sample,) = task.samples(CODEC, length, 1, seed)
    found = re.fullmatch(r"<user>(.*)<assistant>(.*)", CODEC.decode(sample.prompt), re.DOTALL)
    assert found
    return sample, found[1], found[2]


@settings(max_examples=examples(60))
@given(st.sampled_from(WITHOUT_DATA), st.integers(1400, 9000), seeds)
def test_prompt_and_answer_fill_the_length_to_one_percent(name: str, length: int, seed: int) -> None:
    sample, _, prefix = one(TASKS[name], length, seed)
    assert sample.max_new_tokens == TO_GENERATE[name.split("_")[0]]
    assert 0.99 * length <= len(sample.prompt) + sample.max_new_tokens <= length
    assert prefix.startswith(" ")
    assert TASKS[name].score(sample, "") == 0
    assert TASKS[name].score(sample, "So: " + ", ".join(sample.references).upper()) == 1
    json.dumps(dict(sample.meta))


@settings(max_examples=examples(60))
@given(st.sampled_from(list(SHAPES)), st.integers(700, 6000), seeds)
def test_needles_are_as_published(name: str, length: int, seed: int) -> None:
    haystack, key_kind, value_kind, keys, values, queries = SHAPES[name]
    sample, user, prefix = one(TASKS[name], length, seed)
    facts = re.findall(rf"One of the special magic {value_kind} for (.+?) is: ([-\w]+)\.", user)
    assert all(re.fullmatch(FORMS[key_kind], key) and re.fullmatch(FORMS[value_kind], value) for key, value in facts)
    counts = Counter(key for key, _ in facts)
    assert set(counts.values()) == {values}
    assert len({value for _, value in facts}) == len(facts)
    assert len(counts) == keys if keys else len(counts) > 2

    one_of_many = queries * values == 1
    kind = value_kind.removesuffix("s") if one_of_many else value_kind
    first, context, question = re.split(r"\n", user, maxsplit=1)[0], *user.split("\n", 1)[1].rsplit("\n", 1)
    assert first == (
        f"{'A' if one_of_many else 'Some'} special magic {kind} {'is' if one_of_many else 'are'} hidden within the"
        f" following text. Make sure to memorize it. I will quiz you about the {kind} afterwards."
    )
    asked = re.fullmatch(
        rf"What (is|are all) the special magic {kind} for (.+) mentioned in the provided text\?", question
    )
    assert asked
    query = asked[2]
    assert prefix == (
        f" The special magic {kind} for {query} mentioned in the provided text {'is' if one_of_many else 'are'}"
    )
    wanted = re.split(r", and |, ", query)
    assert len(set(wanted)) == len(wanted) == queries
    assert sorted(sample.references) == sorted(value for key, value in facts if key in wanted)

    others = re.sub(r"One of the special magic .+? is: [-\w]+\.", "\0", context)
    if haystack == "repeat":
        *lines, last = [line for line in others.split("\n") if line != "\0"]
        assert set(lines) <= {PARAGRAPH} and PARAGRAPH.startswith(last)
    elif haystack == "essay":
        assert sample.meta["haystack"] == "generated"
        assert set(sample.meta["depths"]) <= {round(100 * i / 39) for i in range(40)}
        assert len(set(sample.meta["depths"])) == len(facts)
        assert re.search(r"[a-z] [a-z]+ [a-z]+", others)
    else:
        assert re.fullmatch(r"\0(\n\0)*(\n[\w .\n]{0,180})?", others), "nothing but facts and a last line of noise"


@settings(max_examples=examples(30))
@given(st.integers(1400, 6000), seeds)
def test_a_chain_is_hidden_in_order_after_an_example(length: int, seed: int) -> None:
    sample, user, prefix = one(TASKS["vt"], length, seed)
    begin = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    _, example, text = user.split(begin)
    for shown, letters in ((example, 3), (text + prefix + " " + " ".join(sample.references), 5)):
        assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", shown)
        assert len(assigned) == 5
        value = assigned[0][1]
        assert re.fullmatch(r"\d{5}", value)
        assert [source for _, source in assigned[1:]] == [name for name, _ in assigned[:-1]]
        names = [name for name, _ in assigned]
        assert all(re.fullmatch(rf"[A-Z]{{{letters}}}", name) for name in names) and len(set(names)) == 5
        assert re.search(
            rf"\nQuestion: Find all variables that are assigned the value {value} in the text above\. Answer: According"
            rf" to the chain\(s\) of variable assignment in the text above, 5 variables are assgined the value {value},"
            rf" they are:  {' '.join(names)}\s*$",
            shown,
        )
        left = re.sub(r" *VAR \w+ = (VAR )?\w+ *", " ", shown.split("\nQuestion:")[0]).split()
        noise = PARAGRAPH.split()
        assert left == [noise[i % len(noise)] for i in range(len(left))]


@settings(max_examples=examples(30))
@given(st.integers(1400, 9000), seeds)
def test_common_words_occur_as_often_as_published(length: int, seed: int) -> None:
    sample, user, prefix = one(TASKS["cwe"], length, seed)
    begin = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
        " appear most often.\n"
    )
    asked = "\nQuestion: What are the 10 most common words in the above list?"
    ends = " Answer: The top 10 words that appear most often in the list are:"
    assert prefix == ends
    nothing, example, text = user.split(begin)
    assert nothing == "" and text.endswith(asked)
    frequencies = {6: 10, 1: None} if length < 4096 else {30: 10, 3: None}
    example_frequencies = {3: 10, 1: 10} if length < 4096 else {10: 10, 3: 30}
    example, said = example.split(asked + ends)
    answer = [word for _, word in re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n)", said)]
    for shown, top, expected in (
        (example, answer, example_frequencies),
        (text.removesuffix(asked), list(sample.references), frequencies),
    ):
        entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", shown)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        kinds = Counter(counts.values())
        assert set(kinds) == set(expected)
        assert all(kinds[often] == many for often, many in expected.items() if many)
        assert {word for word, _ in counts.most_common(10)} == set(top) and len(set(top)) == 10
        assert set(counts) <= set(all_words())


@settings(max_examples=examples(30))
@given(st.integers(1400, 9000), seeds)
def test_coded_words_have_zeta_frequencies(length: int, seed: int) -> None:
    sample, user, prefix = one(TASKS["fwe"], length, seed)
    found = re.fullmatch(
        r"Read the following coded text and track the frequency of each coded word\. Find the three most frequently"
        r" appeared coded words\. (.+)\nQuestion: Do not provide any explanation\. Please ignore the dots '\.\.\.\.'\."
        r" What are the three most frequently appeared words in the above coded text\?",
        user,
    )
    assert found
    assert prefix == " Answer: According to the coded text above, the three most frequently appeared words are:"
    words = found[1].split(" ")
    (dots, most), *ranks = Counter(words).most_common(5)
    assert dots == "..." and tuple(word for word, _ in ranks[:3]) == sample.references
    counts = [most, *(count for _, count in ranks)]
    assert sorted(set(counts), reverse=True) == counts
    assert all(re.fullmatch(r"[a-z]{6}", word) for word in words if word != "...")
    drawn = most * np.pi**2 / 6  # number of words without rounding down
    assert np.allclose(counts, drawn * 6 / np.pi**2 / np.arange(1, 6) ** 2, atol=1)


# Questions about documents.


def squad(articles: int = 12, parts: int = 5) -> dict[str, Any]:
    """A file in SQuAD's layout; every paragraph answers one question and cannot answer another one."""
    words = generated_essay(np.random.default_rng(1), 40_000)
    text = iter(" ".join(words.sentences(40_000)).split(". "))

    def paragraph(article: int, part: int) -> dict[str, Any]:
        name = f"Number {article}-{part}"
        sentences = [next(text) for _ in range(5 + (article + part) % 4)]
        answers = [{"text": f"{name}.", "answer_start": 0}] * 2 + [{"text": name, "answer_start": 0}]
        return {
            "context": f"{name}. " + ". ".join(sentences) + ".",
            "qas": [
                {"id": name, "question": f"What is {name}?", "is_impossible": False, "answers": answers},
                {"id": "x", "question": "What is not?", "is_impossible": True, "answers": []},
            ],
        }

    listed = [{"title": str(a), "paragraphs": [paragraph(a, p) for p in range(parts)]} for a in range(articles)]
    return {"version": "v2.0", "data": listed}


def hotpotqa(questions: int = 8) -> list[dict[str, Any]]:
    """A file in HotpotQA's layout, with ten documents per question."""
    sentences = generated_essay(np.random.default_rng(2), 40_000).sentences(40_000)
    rows = []
    for q in range(questions):
        context = [[f"Title {q}-{d}", [f" {s}" for s in sentences[20 * q + 2 * d :][:3]]] for d in range(10)]
        facts = [[f"Title {q}-3", 0], [f"Title {q}-4", 0]]
        rows.append(
            {"_id": str(q), "question": f"Which, {q}?", "answer": f"answer {q}", "context": context}
            | {"supporting_facts": facts, "type": "bridge", "level": "hard"}
        )
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "dev-v2.0.json").write_text(json.dumps(squad()))
    (folder / "ruler").mkdir()
    (folder / "ruler" / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpotqa()))
    return folder


def with_data(name: str, data: Path | None) -> Task:
    return next(task for task in Ruler().tasks(CODEC, data) if task.name == name)


def shown_documents(user: str) -> tuple[list[str], str]:
    task = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    begin, end = f"{task}\n\nThe following are given documents.\n\n", f"\n\n{task}\n\nQuestion: "
    assert user.startswith(begin) and user.count(end) == 1
    context, question = user.removeprefix(begin).split(end)
    numbered = re.findall(r"Document (\d+):\n(.+?)(?=\n\nDocument \d+:\n|\Z)", context, re.DOTALL)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return [document for _, document in numbered], question


@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_squad_questions_have_their_paragraph_and_those_of_its_article_first(data: Path, length: int) -> None:
    everything = {p["context"]: i for i, a in enumerate(squad()["data"]) for p in a["paragraphs"]}
    questions = set()
    for sample in with_data("qa_1", data).samples(CODEC, length, 6, seed=1):
        user, prefix = CODEC.decode(sample.prompt).removeprefix("<user>").split("<assistant>")
        documents, question = shown_documents(user)
        questions.add(question)
        assert prefix == " Answer:"
        assert sample.max_new_tokens == 32
        assert 0.99 * length <= len(sample.prompt) + 32 <= length
        name = question.removeprefix("What is ").removesuffix("?")
        assert sample.references == (f"{name}.", name)
        (gold,) = sample.meta["gold"]
        assert documents[gold - 1].startswith(f"{name}. ")
        whole = [document for document in documents if document in everything]
        cut = [document for document in documents if document not in everything]
        assert len(cut) <= 1 and bool(cut) == sample.meta["cut"]
        assert all(any(text.startswith(part) for text in everything) for part in cut)
        assert len(set(whole)) == len(whole)
        own = everything[documents[gold - 1]]
        assert len(documents) < 6 or sum(everything[document] == own for document in whole) == 5
    assert len(questions) == 6


def test_hotpotqa_questions_have_their_ten_documents(data: Path) -> None:
    task = with_data("qa_2", data)
    for sample in task.samples(CODEC, 3000, 4, seed=3):
        user, _ = CODEC.decode(sample.prompt).removeprefix("<user>").split("<assistant>")
        documents, question = shown_documents(user)
        (row,) = (row for row in hotpotqa() if row["question"] == question)
        gold = {documents[i - 1] for i in sample.meta["gold"]}
        assert gold == {f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]}
        assert sample.references == (row["answer"],)
        assert task.score(sample, f"It is {row['answer'].upper()}!") == 1
    with pytest.raises(ValueError, match="qa_2 does not fit into 300 tokens"):
        task.samples(CODEC, 300, 1, seed=3)
    with pytest.raises(ValueError, match=r"fill \d+ tokens, not 90000; ask for a shorter prompt"):
        task.samples(CODEC, 90_000, 1, seed=3)


def test_any_of_the_references_is_enough_for_documents_and_all_count_elsewhere(data: Path) -> None:
    asked = Sample("0", (1,), ("Number 1.", "number 1"), 32)
    assert with_data("qa_1", data).score(asked, "NUMBER 1") == 1
    assert with_data("qa_1", data).score(asked, "Number") == 0
    words = Sample("0", (1,), ("aa", "bb", "cc", "dd"), 50)
    assert TASKS["cwe"].score(words, "1. AA 2. xbbx 3. c") == 0.5


@pytest.mark.parametrize(("name", "file"), [("qa_1", "dev-v2.0.json"), ("qa_2", "hotpot_dev_distractor_v1.json")])
def test_missing_and_wrong_data_are_named(tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(MissingData, match=rf"{re.escape(file)} .*https?://.*as published"):
        with_data(name, None).samples(CODEC, 2000, 1, 0)
    with pytest.raises(MissingData, match=re.escape(file)):
        with_data(name, tmp_path).samples(CODEC, 2000, 1, 0)
    for content in ("no json", '{"text": 1}', '{"data": []}', "[]", '[{"question": 1}]'):
        folder = tmp_path / str(abs(hash(content)))
        folder.mkdir()
        (folder / file).write_text(content)
        with pytest.raises(MissingData, match=r"is not the file published|has no questions"):
            with_data(name, folder).samples(CODEC, 2000, 1, 0)


def test_essays_are_the_haystack_where_they_are_given(tmp_path: Path) -> None:
    sentences = [f"Sentence  {i} is\nhere." for i in range(400)]
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(sentences)}))
    sample, user, _ = one(with_data("niah_single_2", tmp_path), 6000, 0)
    assert sample.meta["haystack"] == "PaulGrahamEssays.json"
    context = re.sub(r"One of the special magic numbers for .+? is: \d+\. ?", "", user.split("\n")[1])
    words = " ".join(sentences).split()
    assert context.split() == [words[i % len(words)] for i in range(len(context.split()))]
    assert sample.meta["words"] > len(words), "the text starts over"
    (tmp_path / "ruler").mkdir()
    (tmp_path / "PaulGrahamEssays.json").rename(tmp_path / "essays")
    (tmp_path / "ruler" / "PaulGrahamEssays.json").write_text("[]")
    with pytest.raises(MissingData, match=r"PaulGrahamEssays\.json is not RULER's file of essays"):
        one(with_data("niah_single_2", tmp_path), 6000, 0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 60))
def test_prose_can_be_cut_after_any_word(sizes: list[int], words: int) -> None:
    sentences = [" ".join(f"a{i}b{j}" for j in range(size)) + "." for i, size in enumerate(sizes)]
    whole = " ".join(sentences).split()
    cut = Prose(" ".join(sentences), "test").sentences(words)
    assert " ".join(cut).split() == [whole[i % len(whole)] for i in range(words)]
    assert all(sentence in sentences for sentence in cut[:-1])


def test_words_go_on_where_the_lists_end() -> None:
    count = len(all_words()) + 500
    words = draw_words(np.random.default_rng(0), count)
    assert len(words) == len(set(words)) == count
    assert set(words[: len(all_words())]) == set(all_words())


# Lengths.


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=400), st.integers(1, 50), st.integers(0, 6000), st.integers(0, 60)
)
def test_fit_finds_a_prompt_that_is_long_enough_or_the_longest(
    steps: list[int], least: int, limit: int, slack: int
) -> None:
    lengths = np.cumsum([least, *steps])

    def prompt(size: int) -> list[int]:
        return [0] * int(lengths[size])

    if least > limit:
        with pytest.raises(ValueError, match=rf"{limit} tokens were left for a prompt that has at least {least}"):
            fit(prompt, 0, len(steps), limit - slack, limit)
        return
    size, tokens = fit(prompt, 0, len(steps), limit - slack, limit)
    assert len(tokens) == lengths[size] <= limit
    assert len(tokens) >= limit - slack or size == len(steps) or lengths[size + 1] > limit


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_long_prompts_are_made_without_tokenising_them_again_and_again(name: str) -> None:
    codec, length = TextCodec(), 65_536
    started = time.perf_counter()
    (sample,) = TASKS[name].samples(codec, length, 1, 0)
    assert time.perf_counter() - started < 5  # half a second on an idle machine
    assert 0.99 * length <= len(sample.prompt) + sample.max_new_tokens <= length
    assert codec.encoded <= 4 * length


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"cwe does not fit into 500 tokens, 120 of them for the answer: 380 tokens"):
        TASKS["cwe"].samples(CODEC, 500, 1, 0)
