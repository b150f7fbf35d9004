"""The sources of every mixture: how each is read, how long its contexts are, and how many are
wanted.

longalpaca  LongAlpaca-12k (arXiv 2309.12307, hub Yukang/LongAlpaca-12k, CC BY-NC 4.0): long documents without their
            questions. An `instruction` is a preface, a paper or part of a book, "Now the paper ends." (the second
            paper, the material), and a question. As in the released recipe, the context ends before that marker, or
            before the last "Question:" where there is none; the set's short instructions have neither.
papers      arXiv papers of the Common Pile (arXiv 2506.05209, hub common-pile/arxiv_papers_filtered) instead of
            LongAlpaca's: {id, text, metadata: {license, ...}}, each under the license that its authors chose.
pg19        PG-19 (arXiv 1911.05507; hub emozilla/pg19, Apache-2.0): books from before 1919, cut into disjoint chunks
            of `config.chunk` tokens, of which up to `config.chunks` are drawn. A chunk is tokenized again as a context,
            so it may have one token more or fewer (the paper's table: 3,071 to 3,072).
flan        FLAN v2 within the Tulu-3 mixture (arXiv 2411.15124; hub allenai/tulu-3-sft-mixture, ODC-BY 1.0):
            {id, messages: [{role, content}], source}. A long prompt is the context and asks itself; the answer is the
            teacher's, not the one in the set.
passages    stories, novels and fact sheets (`passages`).
corpus      passages of many genres and made-up material (`corpus`).
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.corpus import LICENSES as CORPUS_LICENSES
from restorekv.data.corpus import read_corpus
from restorekv.data.documents import Document, DropRow, Reader, row_by_row, text_of, whole
from restorekv.data.passages import (
    NOVELS_LICENSE,
    SECTIONS_LICENSE,
    STORIES_LICENSE,
    passage_reader,
)
from restorekv.model.tokenize import token_places

LONGALPACA_LICENSE = "cc-by-nc-4.0"
PG19_LICENSE = "apache-2.0"
FLAN_LICENSE = "odc-by"
FLAN_SUBSET = "flan_v2"
END = re.compile(r"Now the [a-z ]{1,30} ends\.", re.IGNORECASE)
DEED = "https://creativecommons.org/licenses/"
LABELS = {  # a paper's own words for its license
    f"Creative Commons - Attribution - {DEED}by/4.0/": "cc-by-4.0",
    f"Creative Commons - Attribution - {DEED}by/3.0/": "cc-by-3.0",
    f"Creative Commons - Attribution Share-Alike - {DEED}by-sa/4.0/": "cc-by-sa-4.0",
    f"Creative Commons - Attribution Share-Alike - {DEED}by-sa/3.0/": "cc-by-sa-3.0",
    "Creative Commons Zero - Public Domain - https://creativecommons.org/publicdomain/zero/1.0/": "cc0-1.0",
    "Public Domain": "public-domain",
}


@row_by_row
def longalpaca(index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer) -> list[Document]:
    """A row of a text file is a whole document."""
    text = text_of(row, "text") or before_question(text_of(row, "instruction"))
    return whole(f"row {index}", text, LONGALPACA_LICENSE)


def before_question(instruction: str) -> str:
    """Returns the instruction without its question; "" if it holds no document."""
    ends = list(END.finditer(instruction))
    if ends:
        return instruction[: ends[-1].start()].rstrip()
    return instruction.rpartition("Question:")[0].rstrip()


@row_by_row
def open_papers(index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer) -> list[Document]:
    """Takes papers under one of `config.allowed_licenses`."""
    label = license_label(row)
    license = LABELS.get(label)
    if license not in config.allowed_licenses:
        raise DropRow(f"license {license or label[:60] or 'missing'}")
    return whole(str(row.get("id") or f"row {index}"), text_of(row, "text"), license)


def license_label(row: dict) -> str:
    """Returns the field `license` of the metadata, which may be JSON text, or else of the row."""
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except json.JSONDecodeError:
            metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    return str(metadata.get("license") or row.get("license") or "").strip()


@row_by_row
def pg19(index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yields drawn chunks of a book; the caller stops after a book."""
    chunks = list(chunks_of(tokenizer, text_of(row, "text"), config.chunk))
    if not chunks:
        raise DropRow("no whole chunk")
    name = str(row.get("url") or row.get("short_book_title") or f"row {index}")
    rng = random.Random(f"{config.seed} {index}")
    drawn = sorted(rng.sample(range(len(chunks)), min(config.chunks, len(chunks))))
    for number in drawn:
        more = number != drawn[-1]
        yield Document(
            f"{name} chunk {number}", chunks[number], PG19_LICENSE, book=f"row {index}", more=more
        )


def chunks_of(tokenizer: Tokenizer, text: str, size: int) -> Iterator[str]:
    """Cuts the text into stretches of `size` tokens and drops the rest at the end."""
    places = token_places(tokenizer, text)
    for start in range(0, len(places) - size + 1, size):
        yield text[places[start][0] : places[start + size - 1][1]]


@row_by_row
def flan(index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer) -> list[Document]:
    """Takes the user's first message; a row of a text file is a whole prompt."""
    if FLAN_SUBSET not in (text_of(row, "source") or FLAN_SUBSET):
        raise DropRow("another subset")
    text = text_of(row, "text") or first_user_message(row.get("messages") or [])
    return whole(str(row.get("id") or f"row {index}"), text, FLAN_LICENSE, "no prompt")


def first_user_message(messages: object) -> str:
    if not isinstance(messages, list) or not all(isinstance(part, dict) for part in messages):
        raise DropRow("field messages is not text")
    return next((text_of(part, "content") for part in messages if part.get("role") == "user"), "")


@dataclass(frozen=True)
class Source:
    """`name` is its setting in BuildConfig; `wanted` counts `unit`: documents, books, or examples
    if `asked_once`.
    """

    name: str
    title: str
    read: Reader
    wanted: Callable[[BuildConfig], int]
    shortest: Callable[[BuildConfig], int]
    unit: str = "documents"
    asked_once: bool = False
    at_once: int = 1  # contexts whose answers are written in one batch


def passages_of(
    name: str, title: str, license: str, wanted: Callable, per_text: Callable = lambda c: 1
) -> Source:
    return Source(
        name, title, passage_reader(license, per_text), wanted, lambda c: c.passage_shortest
    )


LONGALPACA = Source(
    "longalpaca", "LongAlpaca", longalpaca, lambda c: c.documents, lambda c: c.shortest
)
PAPERS = Source("papers", "Open papers", open_papers, lambda c: c.documents, lambda c: c.shortest)
PG19 = Source("pg19", "PG-19", pg19, lambda c: c.books, lambda c: 1, "books")
FLAN = Source(
    "flan", "Tulu-3 FLAN", flan, lambda c: c.examples, lambda c: c.flan_shortest, "examples", True
)
STORIES = passages_of("stories", "FairytaleQA", STORIES_LICENSE, lambda c: c.story_passages)
NOVELS = passages_of(
    "novels", "Novels", NOVELS_LICENSE, lambda c: c.novel_passages, lambda c: c.per_novel
)
SECTIONS = passages_of(
    "sections", "The World Factbook", SECTIONS_LICENSE, lambda c: c.section_passages
)
CORPUS = Source(
    "corpus",
    "Corpus of many genres",
    read_corpus,
    lambda c: c.corpus_passages,
    lambda c: c.passage_shortest,
    at_once=8,
)
MIXTURES = {
    "paper": (LONGALPACA, PG19, FLAN),
    "permissive": (PAPERS, PG19, FLAN),
    "passages": (STORIES, NOVELS, SECTIONS),
    "corpus": (CORPUS,),
}
ASKED_ONCE = {
    source.name for mixture in MIXTURES.values() for source in mixture if source.asked_once
}
LICENSES = {
    LONGALPACA_LICENSE,
    PG19_LICENSE,
    FLAN_LICENSE,
    *LABELS.values(),
    STORIES_LICENSE,
    NOVELS_LICENSE,
    SECTIONS_LICENSE,
    *CORPUS_LICENSES.values(),
}


def sources(config: BuildConfig) -> tuple[Source, ...]:
    return tuple(source for source in MIXTURES[config.mixture] if source.wanted(config))
