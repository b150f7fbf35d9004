"""Decides which documents are for training, development and evaluation, for training data and
benchmarks alike.

Variants are chosen on development documents, results are reported on evaluation documents, and
training sees neither. SQuAD and HotpotQA are for evaluation only.
"""

import hashlib
from collections.abc import Iterable
from typing import Literal

Split = Literal["training", "development", "evaluation"]
TRAINING: Split = "training"
DEVELOPMENT: Split = "development"
EVALUATION: Split = "evaluation"

EVALUATION_NOVEL = "Burnett_Garden_1911"
DEVELOPMENT_NOVEL = "Chesterton_Thursday_1908"


def split_novel(name: str) -> Split:
    """Return the split of a novel; `name` is its file name without ".txt"."""
    if name == EVALUATION_NOVEL:
        return EVALUATION
    if name == DEVELOPMENT_NOVEL:
        return DEVELOPMENT
    return TRAINING


def split_fairytale(file: str, index: int) -> Split:
    """Return the split of a story; `file` is "train" or "val", and `index` counts its stories from
    0.
    """
    if file == "val":
        return EVALUATION
    return DEVELOPMENT if index % 12 == 5 else TRAINING


def split_factbook(ids: Iterable[str]) -> dict[str, Split]:
    """Return the split of every document; all documents of a country, the part of the id before
    "/", share one.

    `ids` are those of the whole collection: the rule counts its distinct countries in alphabetical
    order.
    """
    countries = {name: name.partition("/")[0] for name in ids}
    rank = {country: index for index, country in enumerate(sorted(set(countries.values())))}
    by_rank: dict[int, Split] = {0: EVALUATION, 1: DEVELOPMENT}
    return {name: by_rank.get(rank[country] % 8, TRAINING) for name, country in countries.items()}


def split_corpus(split: str, name: str) -> Split:
    """Return the split of a passage of the corpus of many genres.

    Half of the corpus' development documents serve to choose variants, the other half to report
    results.

    Args:
        split: The corpus' own, "train" or "development".
        name: The passage's id, GENRE/DOCUMENT/pNofM; all passages of a document share a split.
    """
    if split == "train":
        return TRAINING
    document = name.rpartition("/")[0]
    reports = hashlib.sha256(document.encode()).digest()[0] % 2
    return EVALUATION if reports else DEVELOPMENT
