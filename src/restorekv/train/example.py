"""What is trained on: a context and what is asked about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Example:
    """A context, its questions, and what is known of their answers.

    A draft is a guess at the teacher's greedy answer; it is used where the teacher confirms it and replaced by the
    teacher's own words where not, so drafts save time and never change the training data.
    """

    context: str
    questions: tuple[str, ...]
    drafts: tuple[str | None, ...]
    answer_ids: tuple[tuple[int, ...], ...] | None = None  # of answers that this very model wrote
    source: str | None = None
    licence: str | None = None
    where: str = ""  # file and line or row, for messages


def sources(examples: Sequence[Example]) -> list[dict[str, object]]:
    """For the records: contexts and questions by source and licence; None where nobody has said it."""
    found: dict[tuple, list[Example]] = {}
    for example in examples:
        found.setdefault((example.source, example.licence), []).append(example)
    rows = []
    for (source, licence), own in found.items():
        row = {"source": source, "license": licence, "contexts": len(own)}
        row["examples"] = sum(len(example.questions) for example in own)
        if all(example.answer_ids is not None for example in own):
            row["answers"] = "written by this model when the data was built"
        rows.append(row)
    return rows


def digest(examples: Sequence[Example]) -> str:
    """16 hex digits of everything but where it was read from."""
    found = hashlib.sha256()
    for example in examples:
        found.update(json.dumps({**asdict(example), "where": ""}).encode())
    return found.hexdigest()[:16]
