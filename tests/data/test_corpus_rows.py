"""Rows of a corpus of one's own: licenses as the hub writes them, rows without ids, wordings with
braces, and questions that were corrected.
"""

import random
from dataclasses import replace

import pytest

from restorekv.data.config import BuildConfig
from restorekv.data.corpus import identify_license, read_corpus
from restorekv.data.documents import DropRow, SourceDocument
from restorekv.data.gather import identify_document
from restorekv.data.passages import word_question
from restorekv.data.sources import LICENSES
from restorekv.restore.licenses import combine_licenses
from tests.helpers.models import build_tokenizer

TEXT = "The mill at Aldbury was built in 1871. Its owner was Ann Lee. " * 12


@pytest.mark.parametrize(
    "written, known",
    [
        ("CC0-1.0", "cc0-1.0"),
        ("CC-BY-4.0", "cc-by-4.0"),
        ("cc by 4.0", "cc-by-4.0"),
        ("MIT", "mit"),
    ],
)
def test_licenses_are_known_by_either_name(written, known):
    assert identify_license({"license": written}) == known


def test_texts_under_terms_of_ones_own_are_taken_and_say_so():
    """Their license is passed on: that of an adapter trained on them is not known."""
    license = identify_license({"license": "other"})
    assert license in LICENSES
    assert combine_licenses([license, "cc0-1.0"]) == "unknown"


def test_other_licenses_are_not():
    with pytest.raises(DropRow, match=r"license cc-by-nc-4\.0"):
        identify_license({"license": "CC-BY-NC-4.0"})


@pytest.mark.parametrize(
    "written",
    [
        "Public domain in the US only; CC BY-NC-SA elsewhere",
        "public domain, for non-commercial use",
        "Public domain (text); notes CC BY-SA 4.0",
        "Public domain; notes share-alike",
        "public-domain or GPLv3",
        "Public domain in the US; all rights reserved elsewhere",
    ],
)
def test_public_domain_with_another_license_is_not(written):
    with pytest.raises(DropRow, match=r"license public.domain"):
        identify_license({"license": written})


@pytest.mark.parametrize(
    "written",
    [
        "public domain",
        "Public-Domain",
        "public domain (US government), CC0 1.0",
        "public domain in the United States (Project Gutenberg); header and licence text removed",
    ],
)
def test_public_domain_is_known_by_its_first_words(written):
    assert identify_license({"license": written}) == "public-domain"


@pytest.mark.parametrize("ids", [{}, {"id": None}], ids=["missing", "null"])
def test_rows_without_ids_are_drawn_each_on_its_own(ids):
    rows = [
        {**ids, "genre": "history", "license": "CC0-1.0", "text": f"{number}. {TEXT}"}
        for number in range(4)
    ]
    config = BuildConfig(mixture="corpus", corpus="mine.jsonl")
    found = [
        each
        for each in read_corpus(iter(rows), config, build_tokenizer())
        if isinstance(each, SourceDocument) and each.name.startswith("passage")
    ]
    assert len({each.name for each in found}) == 4


def test_a_wording_may_have_braces():
    config = BuildConfig(wording='{"q": "{question}"}')
    worded = {word_question(random.Random(seed), "Who?", config) for seed in range(20)}
    assert worded == {"Who?", '{"q": "Who?"}'}


def test_a_corrected_question_makes_another_document():
    """So that a build that goes on asks the new one."""
    first = SourceDocument("a", TEXT, "cc0-1.0", asked=(("human", "Who?"),))
    assert identify_document(first) == identify_document(replace(first))
    assert identify_document(first) != identify_document(
        replace(first, asked=(("human", "When?"),))
    )
