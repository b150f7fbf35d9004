"""Make the training texts that stand in recipes/smollm2/texts from a folder laid out as the project's ../shared/data.

    python recipes/smollm2/texts.py ../shared/data

Stories and sections that evaluation or the choice of variants uses are left out, as are two whole novels.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
KEPT_OUT = ("Burnett_Garden_1911", "Chesterton_Thursday_1908")  # the evaluation's haystack; the choice of variants
LETTERS = 150_000  # of every novel, from its beginning
SECTIONS = 120


def main() -> None:
    """Write stories.jsonl.gz, sections.jsonl.gz and novels/*.txt.gz."""
    source = Path(sys.argv[1])
    stories = rows(source / "fairytaleqa" / "train.jsonl")
    write_rows(TEXTS / "stories.jsonl.gz", [row for index, row in enumerate(stories) if index % 12 != 5])
    write_rows(TEXTS / "sections.jsonl.gz", sections(rows(source / "factbook" / "documents.jsonl")))
    for novel in sorted((source / "novels").glob("*.txt")):
        if novel.stem not in KEPT_OUT:
            text = novel.read_text(encoding="utf-8")
            write(TEXTS / "novels" / f"{novel.name}.gz", text[: text.rfind("\n", 0, LETTERS)])


def rows(path: Path) -> list[dict]:
    """Of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sections(found: list[dict]) -> list[dict]:
    """Some of the countries that are left to training, in an order that mixes them."""
    countries = sorted({row["id"].split("/")[0] for row in found})
    training = {country for index, country in enumerate(countries) if index % 8 > 1}
    chosen = [row for row in found if row["id"].split("/")[0] in training]
    random.Random(0).shuffle(chosen)
    return chosen[:SECTIONS]


def write_rows(path: Path, found: list[dict]) -> None:
    """A row a line: id, context and questions alone."""
    kept = [
        {
            "id": row["id"],
            "context": row["context"],
            "questions": [{"question": q["question"]} for q in row["questions"]],
        }
        for row in found
    ]
    write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def write(path: Path, text: str) -> None:
    """The same text gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
