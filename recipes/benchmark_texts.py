"""Make the texts that ship with the benchmarks from a folder of public data.

    python -m recipes.benchmark_texts --data ../shared/data --out src/restorekv/tasks/texts

The folder holds fairytaleqa/val.jsonl, novels/*.txt, factbook/documents.jsonl,
ruler-qa/{squad,hotpotqa}.json, corpus/ with passages of many genres, and the license files;
docs/evaluation.md names the sources. Equal data make equal files: gzip without a time stamp or
name, lines in the order of the source.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

from recipes.run import make_parser, run_recipe
from restorekv.data.exercises import (
    BLANK,
    MIN_WORDS,
    QUOTED_WORDS,
    WORDINGS,
    leave_gap,
    quote_words,
    split_pieces,
)
from restorekv.files import replace_file
from restorekv.tasks.metrics import token_f1
from restorekv.tasks.splits import EVALUATION, EVALUATION_NOVEL, split_corpus, split_factbook

# Bands of lengths in SmolLM2's tokens; each gives the same number of Factbook documents.
BANDS = (512, 1024, 1536, 2048, 4097)
DOCUMENTS = 60
COPIED = {  # from the data to the package
    "fairytaleqa/val.jsonl": "fairytaleqa/val.jsonl.gz",
    "fairytaleqa/LICENSE": "fairytaleqa/LICENSE",
    f"novels/{EVALUATION_NOVEL}.txt": f"novels/{EVALUATION_NOVEL}.txt.gz",
    "factbook/LICENSE.md": "factbook/LICENSE.md",
    "ruler-qa/squad.json": "share-alike/squad.json.gz",
    "ruler-qa/hotpotqa.json": "share-alike/hotpotqa.json.gz",
    "ruler-qa/LICENSE-CC-BY-SA-4.0.txt": "share-alike/LICENSE",
    "corpus/LICENSES.txt": "genres/LICENSES.txt",
}
PER_GENRE = 2  # passages
LONGEST_PASSAGE = 6000  # characters
QUESTIONS = 6  # of a passage
CHECKED = ("blank", "continue", "after", "before")  # exercises with an answer in the text
LEAST_PLACES = 2  # texts with fewer places to ask about get no exercises


def draw_checked_exercises(text: str, rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Draw exercises whose answer is in the text: how a sentence continues, what comes before or
    after it, and what was left out of it.

    Args:
        text: The context.
        rng: The source of every choice.
        count: How many exercises are wanted; a text with too few sentences or lines gives none.

    Returns:
        Kind, question and answer of each.
    """
    pieces = split_pieces(text)
    places = _find_checkable_places(pieces)
    if len(places) < LEAST_PLACES:
        return []
    exercises = []
    for number in range(count):
        kind = CHECKED[number % len(CHECKED)]
        place = rng.choice(places)
        words = pieces[place].split()
        quoted = min(rng.randint(*QUOTED_WORDS), len(words))
        gapped, missing = leave_gap(pieces[place], rng)
        quote = " ".join(words[:quoted])
        answers = {
            "continue": " ".join(words[quoted:]) or pieces[place + 1],
            "blank": missing,
            "after": pieces[place + 1],
            "before": pieces[place - 1],
        }
        question = rng.choice(WORDINGS[kind]).format(quote=quote, gapped=gapped)
        exercises.append((kind, question, answers[kind]))
    return exercises


def _find_checkable_places(pieces: list[str]) -> list[int]:
    """Return the indices of pieces that their first words identify, and with neighbors that can be
    answers.
    """
    beginnings = Counter(quote_words(piece, QUOTED_WORDS[0]) for piece in pieces)
    places = []
    # Neither the first nor the last, because "before" and "after" need a neighbor.
    for place in range(1, len(pieces) - 1):
        around = pieces[place - 1 : place + 2]
        long_enough = all(len(piece.split()) >= MIN_WORDS for piece in around)
        is_unique = beginnings[quote_words(pieces[place], QUOTED_WORDS[0])] == 1
        if long_enough and is_unique and BLANK not in pieces[place]:
            places.append(place)
    return places


def select_factbook(path: Path) -> bytes:
    """Return DOCUMENTS evaluation documents, evenly spaced within every band of lengths."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    splits = split_factbook(row["id"] for row in rows)
    held_out = [row for row in rows if splits[row["id"]] == EVALUATION]
    share = DOCUMENTS // (len(BANDS) - 1)
    chosen = set()
    for low, high in pairwise(BANDS):
        band = [row["id"] for row in held_out if low <= row["tokens_smollm2"] < high]
        chosen |= {band[index * len(band) // share] for index in range(share)}
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in held_out if row["id"] in chosen]
    return "".join(lines).encode()


def select_genres(folder: Path) -> bytes:
    """Return PER_GENRE passages of every genre's evaluation half, preferably with questions by
    people.

    Genres with fewer evaluation documents give fewer; the largest genres make up for them.
    """
    by_genre: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        held_out = [row for row in rows if split_corpus(row["split"], row["id"]) == EVALUATION]
        # Some documents, such as tables of single words, give no questions.
        held_out = [row for row in held_out if make_passage(row)["questions"]]
        random.Random(f"genres {path.name}").shuffle(held_out)
        held_out.sort(key=lambda row: not row.get("questions"))
        by_genre[path.name] = held_out
    chosen = [row for rows in by_genre.values() for row in rows[:PER_GENRE]]
    spare = [
        row
        for rows in sorted(by_genre.values(), key=len, reverse=True)
        for row in rows[PER_GENRE : PER_GENRE + 1]
    ]
    chosen += spare[: PER_GENRE * len(by_genre) - len(chosen)]
    return "".join(
        json.dumps(make_passage(row), ensure_ascii=False) + "\n" for row in chosen
    ).encode()


def make_passage(row: dict) -> dict:
    """Return a row of the benchmark of genres: a passage with people's questions and exercises."""
    text = row["text"]
    if len(text) > LONGEST_PASSAGE:
        text = text[
            : text.rindex("\n" if "\n" in text[:LONGEST_PASSAGE] else " ", 0, LONGEST_PASSAGE)
        ]
    # An answer that is not in the text, such as "Not mentioned", is only kept if the text was not
    # cut.
    whole = len(text) == len(row["text"])
    people = [
        each
        for each in row.get("questions") or []
        if whole or each["answer"].lower() in text.lower()
    ]
    asked = [
        {"question": each["question"], "answers": [each["answer"]]} for each in people[:QUESTIONS]
    ]
    drawn = draw_checked_exercises(text, random.Random(f"genres {row['id']}"), 3 * QUESTIONS)
    asked += [{"question": question, "answers": [answer]} for _, question, answer in drawn]
    # The metric ignores articles and punctuation; an answer of only those could never be right.
    asked = [each for each in asked if token_f1(each["answers"][0], each["answers"][0]) == 1][
        :QUESTIONS
    ]
    names = ("id", "genre", "source", "license", "title")
    return {**{name: row[name] for name in names}, "context": text, "questions": asked}


def pack_text(content: bytes) -> bytes:
    """Return a gzip file without a time stamp and name."""
    target = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=9, mtime=0) as file:
        file.write(content)
    return target.getvalue()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    files = {target: (given.data / source).read_bytes() for source, target in COPIED.items()}
    files["factbook/evaluation.jsonl.gz"] = select_factbook(given.data / "factbook/documents.jsonl")
    files["genres/evaluation.jsonl.gz"] = select_genres(given.data / "corpus")
    for target, content in files.items():
        path = given.out / target
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary:
            temporary.write_bytes(pack_text(content) if path.suffix == ".gz" else content)


if __name__ == "__main__":
    run_recipe(main)
