"""Reading contexts and questions from JSON lines; whatever is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.restore.model_card import KNOWN, identifier
from restorekv.train.example import Example

KEYS = ("context", "questions", "answers", "source", "licence", "license", "meta")  # meta: whatever the user likes


def from_lines(path: Path) -> list[Example]:
    """`{"context": text, "questions": [text, ...]}`, with "answers" (one each), "source" and "licence" if known."""
    if not path.is_file():
        raise RestoreKVError(f"There is no training file {path}; give a JSON-lines file, a mixture or 'bundled'.")
    examples = []
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            examples.append(parsed(line, f"{path}, line {number}"))
    if not examples:
        raise RestoreKVError(f"The training file {path} has no examples; write one JSON object a line.")
    return examples


def lines(path: Path) -> list[str]:
    """Of a UTF-8 file; U+2028 and its like do not end a line of JSON."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RestoreKVError(f"The training file {path} is not UTF-8 text; convert it first.") from error


def parsed(line: str, where: str) -> Example:
    """One line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RestoreKVError(
            f"{where} is no JSON ({error.msg} at character {error.pos + 1}); mend the line."
        ) from error
    wrong = fault(row)
    if wrong:
        raise RestoreKVError(f"{where} {wrong}; mend the line.")
    licence = row.get("licence") or row.get("license")
    if licence is not None and (licence := identifier(licence)) not in KNOWN:
        raise RestoreKVError(
            f"{where} has the license {licence!r}, which is not known here; give a name as on the Hugging Face hub, "
            "or none for a text of your own."
        )
    drafts = tuple(row.get("answers") or [None] * len(row["questions"]))
    return Example(row["context"], tuple(row["questions"]), drafts, None, row.get("source"), licence, where)


def fault(row: object) -> str | None:
    """What is wrong with a line's object, or None."""
    if not isinstance(row, dict):
        return 'is no object {"context": ..., "questions": [...]}'
    strange = [key for key in row if key not in KEYS]
    if strange:
        return f"has the unknown key {strange[0]!r} (known: {', '.join(KEYS)})"
    if not filled(row.get("context")):
        return 'has no text in "context"'
    for name in ("questions", "answers"):
        told = row.get(name)
        if name == "questions" or told:
            if not isinstance(told, list) or not told:
                return f'has no list in "{name}"'
            empty = next((number for number, text in enumerate(told, 1) if not filled(text)), None)
            if empty:
                return f'has no text in "{name}", number {empty}'
    if row.get("answers") and len(row["answers"]) != len(row["questions"]):
        return f"has {len(row['questions'])} questions and {len(row['answers'])} answers"
    told = next((name for name in KEYS[3:6] if row.get(name) is not None and not filled(row[name])), None)
    return f'has no text in "{told}"' if told else None


def filled(text: object) -> bool:
    """Text with at least one letter or sign."""
    return isinstance(text, str) and bool(text.strip())
