"""Metrics of one prediction and one reference, all in [0, 1]: LongBench's, and those of reading comprehension.

LongBench's (arXiv 2308.14508, github.com/THUDM/LongBench) equal kvpress 0.5.5's to the last bit
(tests/conformance/test_longbench_metric.py); `exact_match` and `longest_common_f1` are not among them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher

from restorekv.data.files import optional
from restorekv.errors import RestoreKVError

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WORDS = re.compile(r"[^\W_]+")
NUMBERS = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")


def normalised(text: str) -> str:
    """SQuAD's normalisation (arXiv 1606.05250): lower case, no ASCII punctuation, no a/an/the, single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the two bags of normalised words; 0 where they share none, even if both are empty."""
    said, wanted = normalised(prediction).split(), normalised(reference).split()
    common = (Counter(said) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def exact_match(prediction: str, reference: str) -> float:
    """1 where the two are equal once normalized, as in SQuAD's evaluator."""
    return float(normalised(prediction) == normalised(reference))


def longest_common_f1(prediction: str, reference: str) -> float:
    """ROUGE-L (Lin, 2004) of two texts as one sentence each: F1 of their longest common subsequence of words.

    Words are lower-case runs of letters and digits, not stemmed; no library, unlike `rouge_l`.
    """
    said, wanted = WORDS.findall(prediction.lower()), WORDS.findall(reference.lower())
    lengths = [0] * (len(wanted) + 1)  # what the words of `said` so far have in common with each start of `wanted`
    for word in said:
        before = 0
        for place, other in enumerate(wanted, 1):
            kept = lengths[place]
            lengths[place] = before + 1 if word == other else max(kept, lengths[place - 1])
            before = kept
    return 2 * lengths[-1] / (len(said) + len(wanted)) if lengths[-1] else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """F of the summary-level ROUGE-L of the library `rouge`: sentences end at ".", and each word counts once.

    0 where the library fails: on a text without a sentence and, as it recurses, on sentences of some 950 words.
    """
    scorer = optional("rouge", "eval").Rouge(metrics=["rouge-l"], stats=["f"])
    try:
        return scorer.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, reference: str, classes: Iterable[str]) -> float:
    """One over the number of `classes` named in the prediction, if the right one is among them.

    A class whose name is part of the right one's does not count; of two such in a row the official loop misses one.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)  # the list shrinks under the loop there too
    return 1 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """The share of the prediction's numbers that are the reference, digit for digit; 0 where it has none."""
    numbers = NUMBERS.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`count` with the number of a reference such as "Paragraph 7"."""
    found = PARAGRAPH.search(reference)
    if not found:
        raise RestoreKVError(f"The reference {reference!r} names no paragraph; fetch the data again.")
    return count(prediction, found[1])


def code_similarity(prediction: str, reference: str) -> float:
    """Likeness of the first line that is no comment or fence, in whole percents, by Ratcliff and Obershelp's measure.

    That is fuzzywuzzy's `ratio` without python-Levenshtein, which neither LongBench nor kvpress asks for; with it, or
    in rapidfuzz, it is another measure, that of the longest common subsequence.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100
