# ruff: noqa: RUF001 (Chinese punctuation)
"""The published metrics against their libraries and against hand-counted cases."""

from __future__ import annotations

import difflib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxion_quality import metrics as m

TEXTS = st.text(st.sampled_from("ab.,! \n#天地，。１"), max_size=30)


def test_normalization():
    assert m.normalize_english("The  Cat's\ta AN dog-house!") == "cats doghouse"
    assert m.normalize_english("Theory of a banana") == "theory of banana"
    assert m.normalize_chinese("（北京）， Ａbc！ “天”") == "北京ａbc天"
    assert m.normalize_chinese("？！。") == ""


@pytest.mark.parametrize(
    ("output", "reference", "want"),
    [
        ("the Eiffel Tower", "Eiffel tower!", 1.0),
        ("in Paris, France", "Paris", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("yes yes", "yes", 2 * 0.5 / 1.5),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),  # both normalise to nothing: no common word
        ("Lyon", "Paris", 0.0),
    ],
)
def test_f1_english(output: str, reference: str, want: float):
    assert m.f1_english(output, reference) == pytest.approx(want)


def test_exact_match():
    assert m.exact_match("The answer.", "answer") == 1.0
    assert m.exact_match("an answer of sorts", "answer") == 0.0


def test_f1_chinese():
    assert m.f1_chinese("他来到北京，清华大学。", "他来到北京清华大学") == 1.0
    # jieba: 他 / 来到 / 北京 and 北京: one word of three, one of one.
    assert m.f1_chinese("他来到北京", "北京") == pytest.approx(0.5)
    assert m.f1_chinese("，。！", "北京") == 0.0
    assert m.f1_chinese("", "北京") == 0.0


def test_rouge_l_is_the_package_rouge():
    from rouge import Rouge

    pairs = [
        ("the cat sat on the mat. it slept.", "a cat slept on the mat. the dog did not."),
        ("one two three", "one two three"),
        ("no word in common", "quite another text"),
    ]
    for output, reference in pairs:
        want = Rouge().get_scores([output], [reference], avg=True)["rouge-l"]["f"]
        assert m.rouge_l(output, reference) == want
    # ROUGE-L counts sets of words, so a repetition adds nothing.
    assert m.rouge_l("a a a a", "a") == pytest.approx(1.0, abs=1e-6)
    assert m.rouge_l("a b", "a c") == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("output", ["", ".", "...", "   "])
def test_rouge_of_nothing_is_zero(output: str):
    assert m.rouge_l(output, "a reference") == 0.0
    assert m.rouge_l_chinese(output, "一个参考") == 0.0
    assert m.rouge_geometric_mean(output, "a reference") == 0.0


def test_rouge_l_of_a_thousand_words():
    limit = sys.getrecursionlimit()
    words = " ".join(f"w{i}" for i in range(700))
    assert m.rouge_l(words, words) == pytest.approx(1.0, abs=1e-6)
    assert sys.getrecursionlimit() == limit


def test_rouge_l_chinese():
    # jieba: 会议 / 讨论 / 了 / 预算 and 会议 / 通过 / 了 / 预算: three of four.
    assert m.rouge_l_chinese("会议讨论了预算", "会议通过了预算") == pytest.approx(0.75, abs=1e-6)


def test_rouge_geometric_mean():
    # 1-grams 3 of 4 and 3 of 3, 2-grams 2 of 3 and 2 of 2, longest common subsequence 3.
    one, two, longest = m.rouge_parts("The cat sat down", "the cat sat")
    assert (one, two, longest) == pytest.approx((6 / 7, 4 / 5, 6 / 7))
    assert m.rouge_geometric_mean("The cat sat down", "the cat sat") == pytest.approx(
        (6 / 7 * 4 / 5 * 6 / 7) ** (1 / 3)
    )
    assert m.rouge_parts("cats", "cat") == (0.0, 0.0, 0.0)  # no stemming


CLASSES = ["city", "capital city", "state", "country", "big capital city"]


@pytest.mark.parametrize(
    ("output", "reference", "want"),
    [
        ("state", "state", 1.0),
        ("state or country", "state", 0.5),
        ("state", "country", 0.0),
        ("", "country", 0.0),
        ("capital city", "capital city", 1.0),  # "city" is part of it
        ("big capital city", "big capital city", 0.5),  # "city" is removed, which skips "capital city"
    ],
)
def test_classification(output: str, reference: str, want: float):
    assert m.classification(output, reference, CLASSES) == want


@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6, unique=True), st.data())
def test_classification_removes_while_walking(output: str, classes: list[str], data: st.DataObject):
    reference = data.draw(st.sampled_from(classes))
    named = [name for name in classes if name in output]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)  # as published
    assert m.classification(output, reference, classes) == (1 / len(named) if reference in named else 0.0)


def test_count_and_retrieval():
    assert m.count("There are 7 paragraphs, or 8.", "7") == 0.5
    assert m.count("seven", "7") == 0.0
    assert m.count("17", "7") == 0.0
    assert m.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert m.retrieval("12 or 3 or 4", "Paragraph 3") == pytest.approx(1 / 3)
    assert m.retrieval("", "Paragraph 3") == 0.0
    assert m.retrieval_chinese("段落12", "段落12") == 1.0
    assert m.retrieval_chinese("答案是：段落２", "段落2") == 0.0  # a fullwidth digit is another string
    with pytest.raises(ValueError, match="names no paragraph"):
        m.retrieval("1", "段落1")


def test_code_similarity_is_fuzzywuzzys(monkeypatch: pytest.MonkeyPatch):
    from fuzzywuzzy import fuzz

    # fuzzywuzzy would use python-Levenshtein if installed; LongBench does not require it.
    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)

    @given(TEXTS, TEXTS)
    def agree(output: str, reference: str) -> None:
        lines = output.lstrip("\n").split("\n")
        code = next((line for line in lines if "`" not in line and "#" not in line and "//" not in line), "")
        assert m.code_similarity(output, reference) == fuzz.ratio(code, reference) / 100

    agree()


def test_code_similarity_by_hand():
    assert m.code_similarity("```python\n# a comment\nx = 1\ny = 2", "x = 1") == 1.0
    assert m.code_similarity("\n\nabcd", "bcde") == 0.75  # bcd, twice three of eight
    assert m.code_similarity("", "x") == 0.0
    assert m.code_similarity("# only a comment", "") == 1.0  # as fuzzywuzzy: two equal texts
    # rapidfuzz, and fuzzywuzzy with python-Levenshtein, give 0.75: difflib matches the longest block first, here "aa".
    assert m.code_similarity("aaaa", "abaa") == 0.5


def test_matches_of_ruler():
    assert m.match_all("The numbers are 123 and 456.", ["123", "789"]) == 0.5
    assert m.match_all("ALPHA beta", ["alpha", "Beta"]) == 1.0
    assert m.match_all("", ["123"]) == 0.0
    assert m.match_part("so 456 it is", ["123", "456"]) == 1.0
    assert m.match_part("", ["123", "456"]) == 0.0
    with pytest.raises(ValueError, match="no references"):
        m.match_all("text", [])


def test_symbols_match_whole():
    assert m.match_all("v12 v3", ["v1 v3", "v12"]) == 1 / 2
    assert m.match_all_symbols("= k1 k2 v12 v3 ;", ["v1", "v12 v3"]) == 0.5
    assert m.match_all_symbols("v12  v3", ["v12 v3"]) == 1.0
    assert m.match_all_symbols("xv12 v3", ["v12"]) == 0.0
    assert m.match_part_symbols("v1 v2", ["v9", "v2"]) == 1.0
    assert m.match_part_symbols("", ["v9"]) == 0.0


@given(TEXTS, TEXTS)
def test_every_score_is_a_share(output: str, reference: str):
    for metric in (m.exact_match, m.f1_english, m.f1_chinese, m.rouge_l, m.rouge_l_chinese, m.rouge_geometric_mean,
                   m.count, m.code_similarity):  # fmt: skip
        assert 0 <= metric(output, reference) <= 1
        assert m.best(metric, output, [reference, "b"]) >= metric(output, reference)
    assert m.best(m.f1_english, output, []) == 0


def test_libraries_are_loaded_late():
    late = {"jieba", "rouge", "rouge_score", "sglang"}
    code = f"import sys, fluxion_quality.metrics; print(sorted({late} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
