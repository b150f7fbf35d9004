"""Metrics of one prediction and one reference, all in [0, 1], and the reading of a letter from an
answer.

LongBench's metrics (arXiv 2308.14508, github.com/THUDM/LongBench) equal kvpress 0.5.5's to the last
bit (tests/conformance/test_longbench_metric.py): `token_f1`, `rouge_l` but for very long sentences,
`score_class`, `score_numbers`, `score_paragraph` and `compare_code`.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

import numpy as np

from restorekv.errors import RestoreKVError

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WORDS = re.compile(r"[^\W_]+")
NUMBERS = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")
DIGITS = {
    word: str(digit)
    for digit, word in enumerate("zero one two three four five six seven eight nine".split())
}
DIGIT_WORD = re.compile(rf"\b(?:{'|'.join(DIGITS)})\b")


def normalize(text: str) -> str:
    """Normalize as SQuAD does (arXiv 1606.05250): lower case, no ASCII punctuation, no a/an/the,
    single spaces.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def token_f1(prediction: str, reference: str) -> float:
    """Return F1 of the two bags of normalized words; 0 if they share none, even if both are
    empty.
    """
    said = normalize(prediction).split()
    wanted = normalize(reference).split()
    # Words in common, each as often as both have it.
    common = (Counter(said) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision = common / len(said)
    recall = common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def contains_words(prediction: str, reference: str) -> float:
    """Return 1 if the prediction has the normalized words of the reference in a row, else 0.

    A reference without words, such as an article alone, is never found.
    """
    words = normalize(reference)
    return float(words != "" and f" {words} " in f" {normalize(prediction)} ")


def contains_reference(prediction: str, references: Iterable[str]) -> bool:
    """Return whether the prediction contains the words of one of the references."""
    return any(contains_words(prediction, reference) for reference in references)


def match_exactly(prediction: str, reference: str) -> float:
    """Return 1 if the two are equal after normalization, as SQuAD's evaluator does."""
    return float(normalize(prediction) == normalize(reference))


def longest_common_f1(prediction: str, reference: str) -> float:
    """Return ROUGE-L (Lin, 2004) of two single sentences: F1 of their longest common subsequence of
    words.

    Words are lower-case runs of letters and digits, not stemmed. `rouge_l` is a different measure.
    """
    said = WORDS.findall(prediction.lower())
    wanted = WORDS.findall(reference.lower())
    common = len(longest_common_subsequence(said, wanted))
    return 2 * common / ((len(said) + len(wanted)) or 1)


def rouge_l(prediction: str, reference: str) -> float:
    """Return F1 of the summary-level ROUGE-L (Lin, 2004) over distinct words, as the library
    `rouge` 1.0.1 does.

    Sentences end at ".". A sentence of the reference has in common with the prediction the words of
    its longest common subsequences with each of the prediction's sentences. All these words, each
    counted once, are divided by the distinct words of the prediction (precision) and of the
    reference (recall). A text without a sentence scores 0.

    The library fails on a sentence of some 950 words, at a depth of recursion that depends on the
    process, and LongBench then counts 0. Here every sentence is scored.
    """
    said = split_sentences(prediction)
    wanted = split_sentences(reference)
    if not said or not wanted:
        return 0.0
    common: set[str] = set()
    for wanted_sentence in wanted:
        for said_sentence in said:
            common.update(longest_common_subsequence(wanted_sentence, said_sentence))
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in said for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def split_sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; a sentence of spaces alone has one empty word, as in the
    library `rouge`.
    """
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the words of the longest common subsequence; of several, the one that the library
    `rouge` finds.

    The library walks back from both ends: if the last words differ, it drops the one of `second`,
    unless dropping the one of `first` leaves a longer subsequence.
    """
    # Words as numbers, so that NumPy compares a row at once.
    numbers = {word: number for number, word in enumerate(dict.fromkeys(second))}
    second_ids = np.array([numbers[word] for word in second])
    # lengths[i, j] is the length of the longest common subsequence of first[:i] and second[:j].
    lengths = np.zeros((len(first) + 1, len(second) + 1), dtype=np.int32)
    for row, word in enumerate(first, 1):
        above = lengths[row - 1]
        with_this_word = np.where(second_ids == numbers.get(word, -1), above[:-1] + 1, above[1:])
        lengths[row, 1:] = np.maximum.accumulate(with_this_word)
    found = []
    row = len(first)
    column = len(second)
    # Walk back through the table from its end.
    while row and column:
        if first[row - 1] == second[column - 1]:
            row -= 1
            column -= 1
            found.append(first[row])
        elif lengths[row - 1, column] > lengths[row, column - 1]:
            row -= 1
        else:
            column -= 1
    return found[::-1]


def score_class(prediction: str, reference: str, classes: Iterable[str]) -> float:
    """Return one over the number of `classes` named in the prediction, if the right one is among
    them.

    A class with a name that is part of the right one's is not counted. If two such classes follow
    each other, the official loop misses the second one, and so does this one.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)  # while iterating, as in the official loop
    return 1 / len(named) if reference in named else 0.0


def score_numbers(prediction: str, reference: str) -> float:
    """Return the share of the prediction's numbers that equal the reference digit for digit; 0 if
    it has none.
    """
    numbers = NUMBERS.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def score_paragraph(prediction: str, reference: str) -> float:
    """Return `score_numbers` with the number of a reference such as "Paragraph 7"."""
    paragraph = PARAGRAPH.search(reference)
    if not paragraph:
        raise RestoreKVError(
            f"The reference {reference!r} names no paragraph; fetch the data again."
        )
    return score_numbers(prediction, paragraph[1])


def compare_code(prediction: str, reference: str) -> float:
    """Return Ratcliff and Obershelp's similarity of the reference and the prediction's first line
    without a comment or fence, rounded to whole percents.

    This is fuzzywuzzy's `ratio` without python-Levenshtein, which neither LongBench nor kvpress
    requires. With that package, and in rapidfuzz, `ratio` is a different measure, based on the
    longest common subsequence.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def write_digits(text: str) -> str:
    """Normalize as SQuAD does, then write zero to nine as digits."""
    return DIGIT_WORD.sub(lambda word: DIGITS[word[0]], normalize(text))


def contains_text(prediction: str, reference: str) -> float:
    """Return whether the normalized prediction contains the normalized reference, inside words too
    (KVzip's).
    """
    return float(write_digits(reference) in write_digits(prediction))


def find_letter(answer: str) -> str:
    """Return the letter of an option that an answer means, or "" if there is none.

    It is the first character if that is one of A to E in either case, else the first such capital
    in brackets, else the first that stands alone; an answer that opens with a word counts as its
    first letter ("Because ..." is B). This is the rule of RestoreKV's own evaluation
    (cvsp-lab/RestoreKV d591d4d, data/wrapper.py).
    """
    answer = answer.strip()
    if answer and answer[0].upper() in "ABCDE":
        return answer[0].upper()
    capital = re.search(r"\(([A-E])\)", answer) or re.search(r"\b([A-E])\b", answer)
    return capital[1] if capital else ""
