"""The files of a mixture: contexts, questions and the teacher's answers, verified row by row when
they are read.

Every source is a parquet file with a row per question; a repeated context is stored once.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data import exercises, made
from restorekv.data.files import read_parquet_rows
from restorekv.data.manifest import check_model, read_manifest
from restorekv.data.passages import FACT, HUMAN, LISTED, REPEAT
from restorekv.data.self_study import PROMPT, QUESTION_PROMPTS
from restorekv.data.sources import ASKED_ONCE, LICENSES
from restorekv.errors import RestoreKVError, import_extra
from restorekv.files import read_bytes, replace_file

TEXT_COLUMNS = ("source", "document", "context", "kind", "question", "answer", "license")
NUMBER_COLUMNS = ("context_tokens", "question_tokens", "answer_tokens")
COLUMNS = (*TEXT_COLUMNS, *NUMBER_COLUMNS, "answer_ids")
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
FILE_BYTES = 4 << 30  # bytes of a file
DICTIONARY_BYTES = 256 * 2**20  # bytes of a dictionary page: all contexts of a file


@dataclass(frozen=True)
class MixtureContext:
    """A context and what was asked about it.

    A question begins with the line breaks that separate it from the context, or is "" where the
    context asks itself. `answer_ids` are the teacher's own, with the EOS that ended them; `tokens`
    is T, the length of the context.
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
    kinds = {
        **dict.fromkeys(TEXT_COLUMNS, arrow.string()),
        **dict.fromkeys(NUMBER_COLUMNS, arrow.int32()),
    }
    schema = arrow.schema({**kinds, "answer_ids": arrow.list_(arrow.int32())})
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

    Refuses data of another model than `model` and `tokenizer`, and contexts of more tokens than the
    limit they were made with. Raises RestoreKVError that names the file, and the row where one is
    bad (from 1).
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
        # Rows first: a bad row tells the reader more than a checksum that does not match.
        rows = list(_read_checked_rows(path, raw, name, manifest["longest"], source["examples"]))
        if (
            hashlib.sha256(raw).hexdigest() != source["file"]["sha256"]
            or len(rows) != source["examples"]
        ):
            raise RestoreKVError(
                f"{path} is not the file that the manifest describes; get or build the data again."
            )
        contexts += _group_rows(rows)
    return contexts, manifest


def _read_checked_rows(
    path: Path, raw: bytes, source: str, limit: int, count: int
) -> Iterator[dict]:
    """Yield at most one row more than `count`."""
    for number, row in enumerate(islice(read_parquet_rows(path, raw), count + 1), 1):
        if missing := [name for name in COLUMNS if name not in row]:
            raise RestoreKVError(f"{path} lacks the column {missing[0]}; build the data again.")
        if problem := _find_row_fault(row, source, limit):
            raise RestoreKVError(
                f"{path}, row {number} {problem}; fix the row or build the data again."
            )
        yield row


def _find_row_fault(row: dict, source: str, limit: int) -> str | None:
    """Return what is wrong with a row, or None."""
    for names, kind, what in ((TEXT_COLUMNS, str, "text"), (NUMBER_COLUMNS, int, "whole number")):
        for name in names:
            if not isinstance(row[name], kind):
                return f"has no {what} in the column {name}"
    ids = row["answer_ids"]
    problems = {
        f"belongs to {row['source']!r}, not {source!r}": row["source"] != source,
        f"has the unknown kind {row['kind']!r}": row["kind"] not in KNOWN_KINDS,
        f"has the unknown license {row['license']!r}": row["license"] not in LICENSES,
        "has no document": not row["document"].strip(),
        "has an empty context": not row["context"].strip() or row["context_tokens"] < 1,
        "has an empty question": row["kind"] != PROMPT and not row["question"].strip(),
        "has an empty answer": not row["answer"].strip() or not ids,
        "has invalid answer ids": not isinstance(ids, list)
        or any(not isinstance(i, int) or i < 0 for i in ids),
        "has another number of answer ids than it says": isinstance(ids, list)
        and len(ids) != row["answer_tokens"],
        f"has a context of {row['context_tokens']} tokens, more than {limit}": row["context_tokens"]
        > limit,
    }
    return next((problem for problem, wrong in problems.items() if wrong), None)


def _group_rows(rows: list[dict]) -> Iterator[MixtureContext]:
    """Yield one context for the rows about one document, which are adjacent."""
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

    `dataset` is a hub id with `revision`, or a file's name with `sha256`; of several files it is
    their number, with the hash of their hashes in order.
    """
    accounts = []
    for name, source in manifest["sources"].items():
        origin = source.get("from", {})
        written = "answers" if name in ASKED_ONCE else "questions and answers"
        files = origin.get("files", [])
        if "hub" in origin:
            dataset = {"dataset": origin["hub"], "revision": origin["revision"]}
        elif len(files) == 1:
            dataset = {"dataset": files[0]["name"], "sha256": files[0]["sha256"]}
        else:
            joined = "".join(file["sha256"] for file in files)
            dataset = {
                "dataset": f"{len(files)} files",
                "sha256": hashlib.sha256(joined.encode()).hexdigest(),
            }
        counts = {key: source[key] for key in ("contexts", "examples", "licenses")}
        made = f"{written} by the model itself"
        accounts.append(
            {"source": source["title"], **dataset, "seed": manifest["seed"], **counts, "made": made}
        )
    return accounts
