"""The sources of both mixtures: how each is read, how long its contexts are, and when there is enough of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data import flan, longalpaca, open_papers, passages, pg19
from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped

Reader = Callable[[Iterator[dict], BuildConfig, Tokenizer], Iterator[Document | Dropped]]
LICENCES = {
    longalpaca.LICENCE, pg19.LICENCE, flan.LICENCE, *open_papers.LABELS.values(),
    passages.STORIES, passages.NOVELS, passages.SECTIONS,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """`name` is its setting in BuildConfig; `wanted` counts `unit`: documents, books, or examples if `asked_once`."""

    name: str
    title: str
    read: Reader
    wanted: Callable[[BuildConfig], int]
    shortest: Callable[[BuildConfig], int]
    unit: str = "documents"
    asked_once: bool = False


LONGALPACA = Source("longalpaca", "LongAlpaca", longalpaca.documents, lambda c: c.documents, lambda c: c.shortest)
PAPERS = Source("papers", "Open papers", open_papers.documents, lambda c: c.documents, lambda c: c.shortest)
PG19 = Source("pg19", "PG-19", pg19.documents, lambda c: c.books, lambda c: 1, "books")
FLAN = Source("flan", "Tulu-3 FLAN", flan.documents, lambda c: c.examples, lambda c: c.flan_shortest, "examples", True)
STORIES = Source(
    "stories", "FairytaleQA", passages.reader(passages.STORIES, lambda c: 1), lambda c: c.story_passages,
    lambda c: c.passage_shortest,
)  # fmt: skip
NOVELS = Source(
    "novels", "Novels", passages.reader(passages.NOVELS, lambda c: c.per_novel), lambda c: c.novel_passages,
    lambda c: c.passage_shortest,
)  # fmt: skip
SECTIONS = Source(
    "sections", "The World Factbook", passages.reader(passages.SECTIONS, lambda c: 1), lambda c: c.section_passages,
    lambda c: c.passage_shortest,
)  # fmt: skip
MIXTURES = {
    "paper": (LONGALPACA, PG19, FLAN),
    "permissive": (PAPERS, PG19, FLAN),
    "passages": (STORIES, NOVELS, SECTIONS),
}
ASKED_ONCE = {source.name for mixture in MIXTURES.values() for source in mixture if source.asked_once}


def sources(config: BuildConfig) -> tuple[Source, ...]:
    """Those of the mixture of which something is wanted."""
    return tuple(source for source in MIXTURES[config.mixture] if source.wanted(config))
