"""The sources of every mixture: how each is read, how long its contexts are, and how many are
wanted.

longalpaca  LongAlpaca-12k (arXiv 2309.12307, hub Yukang/LongAlpaca-12k, CC BY-NC 4.0): long
            documents without their questions. An `instruction` is a preface, a paper or part of a
            book, "Now the paper ends." (the second paper, the material), and a question. As in the
            released recipe, the context ends before that marker, or before the last "Question:"
            if there is no marker; the set's short instructions have neither.
papers      arXiv papers of the Common Pile (arXiv 2506.05209, hub
            common-pile/arxiv_papers_filtered) instead of LongAlpaca's: {id, text, metadata:
            {license, ...}}, each under the license that its authors chose.
pg19        PG-19 (arXiv 1911.05507; hub emozilla/pg19, Apache-2.0): books from before 1919, cut
            into disjoint chunks of `config.chunk` tokens; up to `config.chunks` of them are drawn.
            A chunk is tokenized again as a context, so it may have one token more or fewer (the
            paper's table: 3,071 to 3,072).
flan        FLAN v2 within the Tulu-3 mixture (arXiv 2411.15124; hub allenai/tulu-3-sft-mixture,
            ODC-BY 1.0): {id, messages: [{role, content}], source}. A long prompt is the context,
            without a separate question; the answer is the teacher's, not the one in the set.
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
from restorekv.data.corpus import CORPUS_LICENSES, OWN_TERMS, read_corpus
from restorekv.data.documents import (
    DropRow,
    Reader,
    SourceDocument,
    make_single_document,
    read_each_row,
    read_text_field,
)
from restorekv.data.factbook import refuse_evaluation_country
from restorekv.data.passages import (
    NOVELS_LICENSE,
    SECTIONS_LICENSE,
    STORIES_LICENSE,
    make_passage_reader,
)
from restorekv.model.tokenize import locate_tokens

LONGALPACA_LICENSE = "cc-by-nc-4.0"
PG19_LICENSE = "apache-2.0"
FLAN_LICENSE = "odc-by"
FLAN_SUBSET = "flan_v2"
END_MARKER = re.compile(r"Now the [a-z ]{1,30} ends\.", re.IGNORECASE)
CC_URL = "https://creativecommons.org/licenses/"
CC0_URL = "https://creativecommons.org/publicdomain/zero/1.0/"
# A paper's own words for its license, and the hub's identifier.
PAPER_LICENSES = {
    f"Creative Commons - Attribution - {CC_URL}by/4.0/": "cc-by-4.0",
    f"Creative Commons - Attribution - {CC_URL}by/3.0/": "cc-by-3.0",
    f"Creative Commons - Attribution Share-Alike - {CC_URL}by-sa/4.0/": "cc-by-sa-4.0",
    f"Creative Commons - Attribution Share-Alike - {CC_URL}by-sa/3.0/": "cc-by-sa-3.0",
    f"Creative Commons Zero - Public Domain - {CC0_URL}": "cc0-1.0",
    "Public Domain": "public-domain",
}


@read_each_row
def read_longalpaca(
    index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer
) -> list[SourceDocument]:
    """Return a row's document without its question; a row of a text file is a whole document."""
    # A text file is one document; a row of the set has an instruction that ends with a question.
    text = read_text_field(row, "text") or cut_before_question(read_text_field(row, "instruction"))
    return make_single_document(f"row {index}", text, LONGALPACA_LICENSE)


def cut_before_question(instruction: str) -> str:
    """Return the instruction without its question; "" if it holds no document."""
    ends = list(END_MARKER.finditer(instruction))
    # The last marker: a document may quote one.
    if ends:
        return instruction[: ends[-1].start()].rstrip()
    return instruction.rpartition("Question:")[0].rstrip()


@read_each_row
def read_paper(
    index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer
) -> list[SourceDocument]:
    """Return a paper under one of `config.allowed_licenses`; raise DropRow for any other."""
    label = read_license_label(row)
    license = PAPER_LICENSES.get(label)
    if label.lower() in PAPER_LICENSES.values():
        license = label.lower()
    if license not in config.allowed_licenses:
        raise DropRow(f"license {license or label[:60] or 'missing'}")
    return make_single_document(
        str(row.get("id") or f"row {index}"), read_text_field(row, "text"), license
    )


def read_license_label(row: dict) -> str:
    """Return the field `license` of the metadata, which may be JSON text, or else of the row."""
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except json.JSONDecodeError:
            metadata = {}
    if not isinstance(metadata, dict):
        metadata = {}
    return str(metadata.get("license") or row.get("license") or "").strip()


@read_each_row
def read_book(
    index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer
) -> Iterator[SourceDocument]:
    """Yield up to `config.chunks` chunks of a book, drawn at random; the caller stops only after
    the last one.
    """
    chunks = list(_cut_chunks(tokenizer, read_text_field(row, "text"), config.chunk))
    if not chunks:
        raise DropRow("no whole chunk")
    name = str(row.get("url") or row.get("short_book_title") or f"row {index}")
    rng = random.Random(f"{config.seed} {index}")
    drawn = sorted(rng.sample(range(len(chunks)), min(config.chunks, len(chunks))))
    for number in drawn:
        yield SourceDocument(
            f"{name} chunk {number}",
            chunks[number],
            PG19_LICENSE,
            book=f"row {index}",
            # A further chunk of this book follows, so the builder continues after it has enough.
            more=number != drawn[-1],
        )


def _cut_chunks(tokenizer: Tokenizer, text: str, size: int) -> Iterator[str]:
    """Cut the text into stretches of `size` tokens and drop the rest at the end."""
    spans = locate_tokens(tokenizer, text)
    for start in range(0, len(spans) - size + 1, size):
        yield text[spans[start][0] : spans[start + size - 1][1]]


@read_each_row
def read_flan_prompt(
    index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer
) -> list[SourceDocument]:
    """Return the user's first message as a document; a row of a text file is a whole prompt."""
    if FLAN_SUBSET not in (read_text_field(row, "source") or FLAN_SUBSET):
        raise DropRow("another subset")
    # A text file is one prompt; a row of the set has messages.
    text = read_text_field(row, "text") or _find_user_message(row.get("messages") or [])
    return make_single_document(
        str(row.get("id") or f"row {index}"), text, FLAN_LICENSE, "no prompt"
    )


def _find_user_message(messages: object) -> str:
    """Return the first message of the user, or "" if there is none."""
    if not isinstance(messages, list) or not all(isinstance(part, dict) for part in messages):
        raise DropRow("field messages is not text")
    for part in messages:
        if part.get("role") == "user":
            return read_text_field(part, "content")
    return ""


@dataclass(frozen=True)
class Source:
    """One source of a mixture. `name` is its setting in BuildConfig; `wanted` is how many to gather
    of `unit`: documents, books, or examples if `asked_once`. `asked_once` means that a context is
    itself the prompt. `length_setting` is the setting that says how many tokens a context needs.
    """

    name: str
    title: str
    read: Reader
    wanted: Callable[[BuildConfig], int]
    shortest: Callable[[BuildConfig], int]
    length_setting: str
    unit: str = "documents"
    asked_once: bool = False
    at_once: int = 1  # contexts whose answers are written in one batch


def _make_passage_source(
    name: str,
    title: str,
    license: str,
    wanted: Callable[[BuildConfig], int],
    per_text: Callable[[BuildConfig], int] = lambda config: 1,
    check_row: Callable[[dict, str], None] | None = None,
) -> Source:
    """Return a source of passages; `per_text` is how many of them one text may give, and
    `check_row` drops what must not be trained on.
    """
    return Source(
        name=name,
        title=title,
        read=make_passage_reader(license, per_text, check_row),
        wanted=wanted,
        shortest=lambda config: config.passage_shortest,
        length_setting="passage_shortest",
    )


LONGALPACA = Source(
    name="longalpaca",
    title="LongAlpaca",
    read=read_longalpaca,
    wanted=lambda config: config.documents,
    shortest=lambda config: config.shortest,
    length_setting="shortest",
)
PAPERS = Source(
    name="papers",
    title="Open papers",
    read=read_paper,
    wanted=lambda config: config.documents,
    shortest=lambda config: config.shortest,
    length_setting="shortest",
)
PG19 = Source(
    name="pg19",
    title="PG-19",
    read=read_book,
    wanted=lambda config: config.books,
    shortest=lambda config: 1,
    length_setting="chunk",  # of a book, exactly
    unit="books",
)
FLAN = Source(
    name="flan",
    title="Tulu-3 FLAN",
    read=read_flan_prompt,
    wanted=lambda config: config.examples,
    shortest=lambda config: config.flan_shortest,
    length_setting="flan_shortest",
    unit="examples",
    asked_once=True,
)
STORIES = _make_passage_source(
    "stories", "FairytaleQA", STORIES_LICENSE, lambda config: config.story_passages
)
NOVELS = _make_passage_source(
    "novels",
    "Novels",
    NOVELS_LICENSE,
    lambda config: config.novel_passages,
    lambda config: config.per_novel,
)
SECTIONS = _make_passage_source(
    "sections",
    "The World Factbook",
    SECTIONS_LICENSE,
    lambda config: config.section_passages,
    check_row=refuse_evaluation_country,
)
CORPUS = Source(
    name="corpus",
    title="Corpus of many genres",
    read=read_corpus,
    wanted=lambda config: config.corpus_passages,
    shortest=lambda config: config.passage_shortest,
    length_setting="passage_shortest",
    at_once=8,
)
MIXTURES = {
    "paper": (LONGALPACA, PG19, FLAN),
    "permissive": (PAPERS, PG19, FLAN),
    "passages": (STORIES, NOVELS, SECTIONS),
    "corpus": (CORPUS,),
}
# Sources with contexts that are themselves the prompts: only the answers are the model's.
ASKED_ONCE = {FLAN.name}
LICENSES = {
    LONGALPACA_LICENSE,
    PG19_LICENSE,
    FLAN_LICENSE,
    *PAPER_LICENSES.values(),
    STORIES_LICENSE,
    NOVELS_LICENSE,
    SECTIONS_LICENSE,
    *CORPUS_LICENSES.values(),
    OWN_TERMS,
}


def select_sources(config: BuildConfig) -> tuple[Source, ...]:
    """Return the sources of a mixture, without those whose count is 0."""
    return tuple(source for source in MIXTURES[config.mixture] if source.wanted(config))
