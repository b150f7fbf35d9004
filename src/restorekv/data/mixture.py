"""The files of a mixture: contexts, questions and the teacher's answers, verified row by row when
they are read.

Every source is a parquet file with a row per question; a repeated context is stored once.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data import exercises, made
from restorekv.data.build_folder import identify_dataset, read_manifest
from restorekv.data.files import read_parquet_rows
from restorekv.data.passages import FACT, HUMAN, LISTED, REPEAT
from restorekv.data.self_study import PROMPT, QUESTION_PROMPTS
from restorekv.data.sources import ASKED_ONCE, LICENSES
from restorekv.data.teacher import check_model
from restorekv.errors import RestoreKVError, import_extra
from restorekv.files import find_wrong_entry, read_bytes, replace_file

TEXT_COLUMNS = ("source", "document", "context", "kind", "question", "answer", "license")
NUMBER_COLUMNS = ("context_tokens", "question_tokens", "answer_tokens")
ROW: dict[str, Any] = {
    **dict.fromkeys(TEXT_COLUMNS, str),
    **dict.fromkeys(NUMBER_COLUMNS, int),
    "answer_ids": list[int],
}
KNOWN_KINDS = {
    *QUESTION_PROMPTS,
    PROMPT,
    HUMAN,
    FACT,
    REPEAT,
    LISTED,
    *exercises.EXERCISE_KINDS,
    *made.MADE_KINDS,
}
FILE_BYTES = 4 * 2**30  # most bytes of a file
DICTIONARY_BYTES = 256 * 2**20  # bytes of a dictionary page: all contexts of a file


@dataclass(frozen=True)
class MixtureContext:
    """A context and what was asked about it.

    A question begins with the line breaks that separate it from the context, or is "" if the
    context is itself the prompt. `answer_ids` are the teacher's own, with the EOS that ended them;
    `tokens` is T, the length of the context.
    """

    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    answer_ids: tuple[tuple[int, ...], ...]
    source: str
    license: str
    document: str
    tokens: int


def write_examples(path: Path, rows: list[dict]) -> None:
    """Write a source's file whole or not at all; the same rows give the same bytes."""
    arrow = import_extra("pyarrow", "data")
    parquet = import_extra("pyarrow.parquet", "data")
    columns = [(name, arrow.string()) for name in TEXT_COLUMNS]
    columns += [(name, arrow.int32()) for name in NUMBER_COLUMNS]
    columns.append(("answer_ids", arrow.list_(arrow.int32())))
    # An explicit schema: inferred types would depend on the rows.
    schema = arrow.schema(columns)
    table = arrow.Table.from_pylist(rows, schema=schema)
    with replace_file(path, follow=False) as temporary:
        parquet.write_table(
            table,
            temporary,
            compression="zstd",
            use_dictionary=list(TEXT_COLUMNS),
            dictionary_pagesize_limit=DICTIONARY_BYTES,
        )


def read_mixture(
    folder: str | Path, model: PreTrainedModel | None = None, tokenizer: Tokenizer | None = None
) -> tuple[list[MixtureContext], dict]:
    """Return the contexts, source by source, and the manifest.

    Data of a model other than `model` with `tokenizer` are refused, and so are contexts with more
    tokens than the manifest's limit. The RestoreKVError names the file and, if a row is bad, its
    number (from 1).
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if model is not None and tokenizer is not None:
        check_model(manifest, model, tokenizer, folder)
    contexts: list[MixtureContext] = []
    for name, source in manifest["sources"].items():
        path = folder / source["file"]["name"]
        if not path.exists():
            raise RestoreKVError(f"{path} is missing; get or build the data again.")
        raw = read_bytes(path, str(path), FILE_BYTES)
        # Rows come first: a bad row is a more useful message than a checksum that does not match.
        rows = list(_read_checked_rows(path, raw, name, manifest["longest"], source["examples"]))
        same_bytes = hashlib.sha256(raw).hexdigest() == source["file"]["sha256"]
        if not same_bytes or len(rows) != source["examples"]:
            raise RestoreKVError(
                f"{path} is not the file that the manifest describes; get or build the data again."
            )
        contexts += _group_rows(rows)
    return contexts, manifest


def _read_checked_rows(
    path: Path, raw: bytes, source: str, limit: int, count: int
) -> Iterator[dict]:
    """Yield the rows of a source's file, at most one more than `count`; refuse a faulty row."""
    # One row more than the manifest names, to notice that there are more.
    for number, row in enumerate(islice(read_parquet_rows(path, raw), count + 1), 1):
        problem = _find_row_fault(row, source, limit)
        if problem:
            raise RestoreKVError(
                f"{path}, row {number} {problem}; fix the row or build the data again."
            )
        yield row


def _find_row_fault(row: dict, source: str, limit: int) -> str | None:
    """Return what is wrong with a row, or None."""
    wrong = find_wrong_entry(row, ROW)
    if wrong:
        return f"lacks a valid {wrong}"
    ids = row["answer_ids"]
    if row["source"] != source:
        return f"belongs to {row['source']!r}, not {source!r}"
    if row["kind"] not in KNOWN_KINDS:
        return f"has the unknown kind {row['kind']!r}"
    if row["license"] not in LICENSES:
        return f"has the unknown license {row['license']!r}"
    if not row["document"].strip():
        return "has no document"
    if not row["context"].strip() or row["context_tokens"] < 1:
        return "has an empty context"
    if row["kind"] != PROMPT and not row["question"].strip():
        return "has an empty question"
    if not row["answer"].strip() or not ids:
        return "has an empty answer"
    if min(ids) < 0:
        return "has an answer id below 0"
    if len(ids) != row["answer_tokens"]:
        return "does not have the number of answer ids that it says"
    if row["context_tokens"] > limit:
        return f"has a context of {row['context_tokens']} tokens, more than {limit}"
    return None


def _group_rows(rows: list[dict]) -> Iterator[MixtureContext]:
    """Yield a context for adjacent rows about the same context of one document, in the order in
    which they were asked.
    """
    for _, group in groupby(rows, key=lambda row: (row["document"], row["context"])):
        asked = list(group)
        first = asked[0]
        yield MixtureContext(
            context=first["context"],
            questions=tuple(row["question"] for row in asked),
            answers=tuple(row["answer"] for row in asked),
            answer_ids=tuple(tuple(row["answer_ids"]) for row in asked),
            source=first["source"],
            license=first["license"],
            document=first["document"],
            tokens=first["context_tokens"],
        )


def summarize_sources(manifest: dict) -> list[dict]:
    """Return a short account of every source for other records, such as an adapter's card, without
    local paths.

    `dataset` is a hub id with `revision`, or a file's name with `sha256`; for several files it is
    their number, with the hash of their hashes in order.
    """
    accounts = []
    for name, source in manifest["sources"].items():
        written = "questions and answers"
        if name in ASKED_ONCE:
            written = "answers"
        account = {
            "source": source["title"],
            **identify_dataset(source["from"]),
            "seed": manifest["seed"],
            "contexts": source["contexts"],
            "examples": source["examples"],
            "licenses": source["licenses"],
            "made": f"{written} by the model itself",
        }
        accounts.append(account)
    return accounts
