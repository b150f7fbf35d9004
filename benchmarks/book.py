"""The benchmark `book`: many questions about one book, which transformers prefills as a whole and
restorekv compresses at once or in parts.

Short sentences that each contain a number are put between the paragraphs of a novel, at equal
distances. Each question asks for one of the numbers and is worded so that a base model can continue
it. Every way is measured in its own process: seconds to prefill and to answer, peak memory above
the weights, bytes of the cache that is kept, and how many numbers the answers get right.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.compress_cost import measure_apart
from benchmarks.workload import check_novel, describe_machine, load_novel
from restorekv.evaluation.tables import Table
from restorekv.files import write_json
from restorekv.model.load import load_model
from restorekv.model.tokenize import decode_ids, tokenize_text

PLACES = (
    "mill harbor bakery chapel stable library orchard tannery forge brewery lighthouse dairy "
    "quarry school theater market bridge castle garden inn"
).split()
TRANSFORMERS = "transformers"
AT_ONCE = "at once"
IN_PARTS = "in parts"
WAYS = (TRANSFORMERS, AT_ONCE, IN_PARTS)
ANSWER_PREFIX = "Answer: The number of the"


@dataclass(frozen=True)
class Options:
    """The options of `book`, which the command's --help explains."""

    model: str
    tokens: int
    evictor: str
    ratios: tuple[str, ...]
    part: int
    answer: int
    seed: int = 0


@dataclass(frozen=True)
class Book:
    """A text, questions about the sentences that were put into it, and their numbers."""

    text: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def make_book(tokenizer: Tokenizer, tokens: int, seed: int) -> Book:
    """Return a book of about `tokens` tokens: the start of a novel, with a sentence about each
    place.
    """
    rng = random.Random(f"book {seed}")
    numbers = rng.sample(range(1000, 10_000), len(PLACES))
    places = rng.sample(PLACES, len(PLACES))
    facts = [
        f"The number of the {place} is {number}."
        for place, number in zip(places, numbers, strict=True)
    ]
    budget = tokens - len(tokenize_text(tokenizer, "\n\n".join(facts)))
    novel = load_novel().replace("\r\n", "\n")
    ids = tokenize_text(tokenizer, novel)
    check_novel(len(ids), budget, f"a book of {tokens:,}")
    paragraphs = decode_ids(tokenizer, ids[:budget]).split("\n\n")
    # One fact in the middle of each twentieth of the paragraphs. Insert from the end, so that
    # the places of the facts before stay valid.
    count = len(paragraphs)
    for number, fact in reversed(list(enumerate(facts))):
        paragraphs.insert((2 * number + 1) * count // (2 * len(facts)), fact)
    questions = tuple(f"Question: What is the number of the {place}?" for place in places)
    return Book("\n\n".join(paragraphs), questions, tuple(map(str, numbers)))


def run_book(options: Options, tell: Callable[[str], None], threads: int, folder: Path) -> dict:
    """Return a row for each way and ratio; rows are kept in `folder`, where a later run
    continues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _, tokenizer = load_model(options.model)
    book = make_book(tokenizer, options.tokens, options.seed)
    (folder / "book.json").write_text(json.dumps(vars(book)), "utf-8")
    rows: list[dict] = []
    for way in WAYS:
        ratios = ("1",) if way == TRANSFORMERS else options.ratios
        for ratio in ratios:
            job = {
                "model": options.model,
                "tokens": options.tokens,
                "seed": options.seed,
                "book": str(folder / "book.json"),
                "way": way,
                "ratio": ratio,
                "evictor": options.evictor,
                "part": options.part,
                "answer": options.answer,
                "threads": threads,
            }
            rows.append(measure_way(folder, job, tell))
    whole = rows[0]
    for row in rows:
        row["right"] = count_right(row["texts"], book.answers)
        pairs = zip(row["texts"], whole["texts"], strict=True)
        row["same"] = sum(own == other for own, other in pairs)
    return {
        "model": options.model,
        "tokens": options.tokens,
        "evictor": options.evictor,
        "part": options.part,
        "questions": list(book.questions),
        "answers": list(book.answers),
        "machine": describe_machine(threads),
        "rows": rows,
    }


def measure_way(folder: Path, job: dict, tell: Callable[[str], None]) -> dict:
    """Return the row of one way and ratio, measured now or kept by an earlier run of the
    same job.
    """
    way = job["way"]
    place = folder / f"{way.replace(' ', '-')}-{job['ratio']}.json"
    if place.exists():
        found = json.loads(place.read_text("utf-8"))
        if found["job"] == job:
            return found["row"]
    tell(f"{way}, r = {job['ratio']}")
    command = [sys.executable, "-m", "benchmarks.book_side"]
    what = f"The measurement of {way} at r = {job['ratio']}"
    row = {"way": way, **measure_apart(command, job, folder, what)}
    write_json(place, {"job": job, "row": row})
    return row


def count_right(texts: Sequence[str], answers: Sequence[str]) -> int:
    """Return how many texts contain the right answer in their first line."""
    pairs = zip(texts, answers, strict=True)
    return sum(answer in text.strip().partition("\n")[0] for text, answer in pairs)


def make_table(result: dict) -> Table:
    """Return the result as a table."""
    asked = len(result["questions"])
    figures = []
    for row in result["rows"]:
        figures.append({**row, "asked": asked})
    columns: dict[str, Callable[..., str]] = {
        "how": lambda row: row["way"],
        "r": lambda row: row["ratio"],
        "seconds to read": lambda row: f"{row['read']:.0f}",
        "seconds per question": lambda row: f"{row['ask'] / row['asked']:.2f}",
        "peak above weights": lambda row: f"{row['peak'] / 2**20:,.0f} MiB",
        "held": lambda row: f"{row['held'] / 2**20:,.1f} MiB",
        "numbers found": lambda row: f"{row['right']} of {row['asked']}",
        "as transformers": lambda row: f"{row['same']} of {row['asked']}",
    }
    note = (
        f"{result['model']}, a novel of {result['tokens']:,} tokens, {result['evictor']}, parts of "
        f"{result['part']:,} tokens."
    )
    return Table.from_figures("book", "A book and its questions", figures, columns, note, keys=2)
