"""Reading a mixture back: contexts with their questions and the teacher's answers, every row and checksum verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import sha256
from restorekv.data.manifest import check_model, read_manifest
from restorekv.data.passages import FACT, HUMAN, LISTED, REPEAT
from restorekv.data.selfstudy import KINDS, PROMPT
from restorekv.data.shard import COLUMNS, NUMBERS, TEXTS, parquet_rows
from restorekv.data.sources import ASKED_ONCE, LICENCES
from restorekv.errors import RestoreKVError


@dataclass(frozen=True)
class MixtureContext:
    """A context and what was asked about it.

    A question begins with the line breaks that part it from the context, or is "" where the context asks itself.
    `answer_ids` are the teacher's own, with the EOS that ended them; `tokens` is T, the length of the context.
    """

    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    answer_ids: tuple[tuple[int, ...], ...]
    source: str
    licence: str
    document: str
    tokens: int


def read_mixture(
    folder: str | Path,
    model: PreTrainedModel | None = None,
    tokenizer: Tokenizer | None = None,
    longest: int | None = None,
) -> tuple[list[MixtureContext], dict]:
    """The contexts in the sources' order, and the manifest.

    With `model` and `tokenizer` the data must be theirs. `longest` refuses contexts of more tokens, as does the limit
    they were made with. Raises RestoreKVError that names the file, and the row where one is bad (counted from 1).
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if model is not None and tokenizer is not None:
        check_model(manifest, model, tokenizer, folder)
    limit = manifest["longest"] if longest is None else min(longest, manifest["longest"])
    found: list[MixtureContext] = []
    for name, source in manifest["sources"].items():
        path = folder / source["file"]["name"]
        if not path.is_file():
            raise RestoreKVError(f"{path} is missing; get or build the data again.")
        # Rows first: a bad one is worth more to the reader than a checksum that does not fit.
        rows = list(checked(path, name, limit))
        if sha256(path) != source["file"]["sha256"] or len(rows) != source["examples"]:
            raise RestoreKVError(f"{path} is not the file that the manifest tells of; get or build the data again.")
        found += contexts(rows)
    return found, manifest


def record(manifest: dict) -> list[dict]:
    """A short account of every source for other records, as an adapter's card: plain JSON, without local paths.

    `dataset` is a hub id with `revision`, or a file's name with `sha256`; of several files it tells how many there are,
    and the hash is that of their hashes, in order.
    """
    told = []
    for name, source in manifest["sources"].items():
        origin, asked = source.get("from", {}), "answers" if name in ASKED_ONCE else "questions and answers"
        files = origin.get("files", [])
        if "hub" in origin:
            dataset = {"dataset": origin["hub"], "revision": origin["revision"]}
        elif len(files) == 1:
            dataset = {"dataset": files[0]["name"], "sha256": files[0]["sha256"]}
        else:
            joined = "".join(file["sha256"] for file in files)
            dataset = {"dataset": f"{len(files)} files", "sha256": hashlib.sha256(joined.encode()).hexdigest()}
        counts = {key: source[key] for key in ("contexts", "examples", "licences")}
        made = f"{asked} by the model itself"
        told.append({"source": source["title"], **dataset, "seed": manifest["seed"], **counts, "made": made})
    return told


def contexts(rows: list[dict]) -> Iterator[MixtureContext]:
    """Questions about one document stand together."""
    for _, group in groupby(rows, key=lambda row: (row["document"], row["context"])):
        asked = list(group)
        first = asked[0]
        yield MixtureContext(
            context=first["context"],
            questions=tuple(row["question"] for row in asked),
            answers=tuple(row["answer"] for row in asked),
            answer_ids=tuple(tuple(row["answer_ids"]) for row in asked),
            source=first["source"],
            licence=first["licence"],
            document=first["document"],
            tokens=first["context_tokens"],
        )


def checked(path: Path, source: str, limit: int) -> Iterator[dict]:
    """Rows without a fault."""
    for number, row in enumerate(parquet_rows(path, COLUMNS), 1):
        told = fault(row, source, limit)
        if told:
            raise RestoreKVError(f"{path}, row {number} {told}; mend the row or build the data again.")
        yield row


def fault(row: dict, source: str, limit: int) -> str | None:
    """What is wrong with a row, or None."""
    for name in TEXTS:
        if not isinstance(row[name], str):
            return f"has no text in the column {name}"
    for name in NUMBERS:
        if not isinstance(row[name], int):
            return f"has no whole number in the column {name}"
    ids = row["answer_ids"]
    problems = {
        f"belongs to {row['source']!r}, not {source!r}": row["source"] != source,
        f"has the unknown kind {row['kind']!r}": row["kind"] not in {*KINDS, PROMPT, HUMAN, FACT, REPEAT, LISTED},
        f"has the unknown licence {row['licence']!r}": row["licence"] not in LICENCES,
        "has an empty context": not row["context"].strip() or row["context_tokens"] < 1,
        "has an empty question": row["kind"] != PROMPT and not row["question"].strip(),
        "has an empty answer": not row["answer"].strip() or not ids,
        "has answer ids that are none": not isinstance(ids, list) or any(not isinstance(i, int) or i < 0 for i in ids),
        f"has a context of {row['context_tokens']} tokens, more than {limit}": row["context_tokens"] > limit,
    }
    return next((told for told, wrong in problems.items() if wrong), None)
