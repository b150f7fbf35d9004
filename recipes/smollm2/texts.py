"""Make the training texts in recipes/smollm2/texts from a folder laid out like the project's
../shared/data.

    python -m recipes.smollm2.texts ../shared/data

They are the texts of the split "training" (restorekv.tasks.splits), without those that evaluation
or the choice of variants uses. docs/evaluation.md names the sources and their licenses.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from recipes.run import make_parser, run_recipe
from restorekv.tasks.splits import TRAINING, split_factbook, split_fairytale, split_novel

TEXTS = Path(__file__).parent / "texts"
LETTERS = 150_000  # characters that are taken from the beginning of every novel
SECTIONS = 120


def main(args: Sequence[str] | None = None) -> None:
    """Write stories.jsonl.gz, sections.jsonl.gz and novels/*.txt.gz."""
    parser = make_parser(__doc__)
    parser.add_argument("source", type=Path, help="The folder of the texts.")
    source = parser.parse_args(args).source
    if not source.is_dir():
        parser.error(f"There is no folder {source}; name the folder of the texts.")
    stories = read_rows(source / "fairytaleqa" / "train.jsonl")
    training = [
        row for index, row in enumerate(stories) if split_fairytale("train", index) == TRAINING
    ]
    write_rows(TEXTS / "stories.jsonl.gz", training)
    write_rows(
        TEXTS / "sections.jsonl.gz",
        select_sections(read_rows(source / "factbook" / "documents.jsonl")),
    )
    for novel in sorted((source / "novels").glob("*.txt")):
        if split_novel(novel.stem) == TRAINING:
            text = novel.read_text(encoding="utf-8")
            write_packed(
                TEXTS / "novels" / f"{novel.name}.gz", text[: text.rfind("\n", 0, LETTERS)]
            )


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def select_sections(found: list[dict]) -> list[dict]:
    """Return some of the training split's countries, shuffled."""
    splits = split_factbook(row["id"] for row in found)
    chosen = [row for row in found if splits[row["id"]] == TRAINING]
    random.Random(0).shuffle(chosen)
    return chosen[:SECTIONS]


def write_rows(path: Path, found: list[dict]) -> None:
    """Write id, context and questions of every row as a JSON line."""
    kept = [
        {
            "id": row["id"],
            "context": row["context"],
            "questions": [{"question": q["question"]} for q in row["questions"]],
        }
        for row in found
    ]
    write_packed(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def write_packed(path: Path, text: str) -> None:
    """Write gzipped text; the same text gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    run_recipe(main)
