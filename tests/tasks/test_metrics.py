"""LongBench's metrics on cases worked out by hand."""

import random
import sys

import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks.metrics import (
    compare_code,
    normalize,
    rouge_l,
    score_class,
    score_numbers,
    score_paragraph,
    token_f1,
)

CLASSES = ["Number", "Number of something", "Other number", "Date", "Food"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The  Quick,\n(brown) fox.", "quick brown fox"),
        ("An apple a day; the end", "apple day end"),
        ("theatre, another, Ana", "theatre another ana"),  # articles are whole words
        ("U.S.A. 3.5%", "usa 35"),
        ("it's “quoted” 中文。", "its “quoted” 中文。"),  # only ASCII punctuation goes
        ("a.b", "ab"),  # punctuation goes before articles
        ("...", ""),
    ],
)
def test_normalized(text, found):
    assert normalize(text) == found


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("The cat sat.", "a cat sat down", 4 / 5),  # precision 2/2, recall 2/3
        ("red red red", "red blue", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),  # one "red" is common
        ("Unanswerable", "unanswerable.", 1),
        ("yes", "no", 0),
        ("", "word", 0),
        ("the", "a", 0),  # both are empty when normalized
    ],
)
def test_token_f1(prediction, reference, score):
    assert token_f1(prediction, reference) == pytest.approx(score, abs=1e-15)


@pytest.mark.parametrize(
    ("prediction", "reference", "precision", "recall"),
    [
        ("the cat sat", "the cat sat on it", 3 / 3, 3 / 5),
        ("cat the sat", "the cat sat", 2 / 3, 2 / 3),  # order counts: "the sat" or "cat sat"
        # Lin 2004.
        (
            "one two six seven eight. one three eight nine five",
            "one two three four five",
            4 / 8,
            4 / 5,
        ),
        ("so so so", "so it is", 1 / 1, 1 / 3),  # words count once
        ("Cat", "cat", 0, 0),  # case counts
    ],
)
def test_rouge_l(prediction, reference, precision, recall):
    expected = 2 * precision * recall / (precision + recall + 1e-8)
    assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("text", ["", "...", "."])
def test_rouge_l_is_zero_for_a_text_without_a_sentence(text):
    assert rouge_l(text, "the cat sat") == 0
    assert rouge_l("the cat sat", text) == 0


def test_rouge_l_scores_long_sentences_whatever_the_recursion_limit():
    """The library `rouge` recurses over the words of a sentence and fails at a depth that the
    process decides.
    """
    words = [str(number) for number in range(3000)]
    sentence = " ".join(words)
    every_second = " ".join(words[::2])
    precision, recall = 1.0, 0.5
    expected = 2 * precision * recall / (precision + recall + 1e-8)
    limit = sys.getrecursionlimit()
    scores = []
    try:
        for depth in (limit, 100 * limit):
            sys.setrecursionlimit(depth)
            scores.append(rouge_l(every_second, sentence))
    finally:
        sys.setrecursionlimit(limit)
    assert scores == [expected, expected]


def test_rouge_l_equals_the_library_to_the_last_bit():
    """Repeated words, empty sentences, odd spaces, and texts whose longest common subsequence is
    not unique.
    """
    library = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"], stats=["f"])
    rng = random.Random(5)
    pieces = ["a", "b", "c", "d", "e", "A", ".", ". ", " . ", "..", "\n", "\t", "  ", "中", "u.s."]
    compared = 0
    for _ in range(2000):
        said, wanted = (" ".join(rng.choices(pieces, k=rng.randint(0, 30))) for _ in range(2))
        try:
            expected = library.get_scores([said], [wanted], avg=True)["rouge-l"]["f"]
        except ValueError:  # a text without a sentence
            expected = 0.0
        else:
            compared += 1
        assert rouge_l(said, wanted) == expected, (said, wanted)
    assert compared > 1500


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("Date", "Date", 1),
        ("Date or Food", "Date", 1 / 2),
        ("Food", "Date", 0),
        ("food", "Food", 0),  # case counts
        # "Number" is part of it and does not count.
        ("Number of something", "Number of something", 1),
        ("Number of something", "Number", 1 / 2),  # the longer name counts beside the shorter
        ("", "Date", 0),
    ],
)
def test_classification(prediction, reference, score):
    assert score_class(prediction, reference, CLASSES) == score


def test_classification_passes_over_the_class_after_a_dropped_one():
    """Both "ab" and "b" are parts of the right name; the official loop drops "ab" and never looks
    at "b".
    """
    assert score_class("abc", "abc", ["ab", "b", "abc"]) == 1 / 2
    assert score_class("abc", "abc", ["ab", "abc", "b"]) == 1


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("17", "17", 1),
        ("17 of 30, so 17", "17", 2 / 3),
        ("017", "17", 0),
        ("3.5", "5", 1 / 2),
        ("none", "0", 0),
    ],
)
def test_count(prediction, reference, score):
    assert score_numbers(prediction, reference) == score


def test_retrieval_counts_the_paragraphs_number():
    assert score_paragraph("Paragraph 7", "Paragraph 7") == score_paragraph("7", "Paragraph 7") == 1
    assert score_paragraph("Paragraph 7 or 8", "Paragraph 7") == 1 / 2
    assert score_paragraph("Paragraph 71", "Paragraph 7") == score_paragraph("", "Paragraph 7") == 0
    with pytest.raises(RestoreKVError, match="names no paragraph"):
        score_paragraph("7", "7")


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("abcd", "bcde", 0.75),  # 2 * 3 / 8
        ("\n# a comment\n```python\n// another\nx = 1\ny = 2", "x = 1", 1),
        ("# only a comment", "x = 1", 0),
        ("", "", 1),
        ("qabxcd", "abycdf", 0.67),  # 2 * 4 / 12, rounded to whole percents
        ("abcdxxxx", "xxxxabcd", 0.5),
        # 2 * 2 / 13: nothing is left of the longest run; by common subsequence 2 * 3 / 13.
        ("axbxcx__", "__abc", 0.31),
    ],
)
def test_code_similarity(prediction, reference, score):
    assert compare_code(prediction, reference) == score
