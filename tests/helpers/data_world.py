"""Small hand-made files in the formats of the four sources, and settings that fit them."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from restorekv.data.config import BuildConfig
from restorekv.data.sources import MIXTURES

WORDS = (
    "market lantern river house garden teacher answers question winter stone letter window morning "
    "paper method result "
    "number light field engine captain island mirror copper forest bridge silver planet harbour "
    "winding"
).split()
BY = "Creative Commons - Attribution - https://creativecommons.org/licenses/by/4.0/"
BY_SA = (
    "Creative Commons - Attribution Share-Alike - https://creativecommons.org/licenses/by-sa/4.0/"
)
FLAN_SOURCE = "ai2-adapt-dev/flan_v2_converted"


def text(seed: object, words: int) -> str:
    """Return random words, the same ones for the same seed."""
    rng = random.Random(str(seed))
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


def paper(body: str) -> str:
    """Return the instruction of a LongAlpaca row about one paper."""
    return (
        "Below is a paper. Memorize the paper and answer my question after the paper.\n The paper "
        "begins. \n "
        f"{body} \n Now the paper ends. \nQuestion: Why does the method work?"
    )


def two_papers(one: str, other: str) -> str:
    return (
        "There are two papers. Memorize them and answer my question after the paper.\n The first "
        "paper begins. \n "
        f"{one} Now the first paper ends. \n The second paper begins. \n {other} Now the second "
        "paper ends.\n"
        "Compare the two."
    )


def book(body: str) -> str:
    return (
        "Below is some paragraphs in the book, Emma. Memorize the content and answer my question "
        "after the book.\n "
        f"{body} \n Now the material ends. Please summarize the book in one paragraph."
    )


def messages(user: str) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": "Yes."}]


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_sources(root: Path) -> dict[str, str]:
    """Write a file of each source and return the paths by the names of their settings.

    They are JSON, parquet, JSON lines and packed JSON lines.
    """
    long = [
        {"instruction": "Name three colours.", "input": "", "output": "Red, green, blue."},
        {"instruction": paper(text("a", 40)), "input": "", "output": "x"},
        {"instruction": paper(text("tiny", 2)), "input": "", "output": "x"},
        {
            "instruction": paper(text("a", 40)),
            "input": "",
            "output": "another question about the same paper",
        },
        {"instruction": book(text("b", 45)), "input": "", "output": "x"},
        {"instruction": paper(text("huge", 900)), "input": "", "output": "x"},
        {"instruction": two_papers(text("c", 20), text("d", 20)), "input": "", "output": "x"},
    ]
    (root / "LongAlpaca-12k.json").write_text(json.dumps(long))
    books = [
        {
            "short_book_title": f"Book {n}",
            "publication_date": 1900,
            "url": f"http://www.gutenberg.org/ebooks/{n}",
            "text": text(n, size),
        }
        for n, size in enumerate((130, 5, 120, 110))
    ]
    pq.write_table(pa.Table.from_pylist(books), root / "pg19.parquet")
    flan = [
        {"id": "f0", "messages": messages(text("f0", 30)), "source": FLAN_SOURCE},
        {
            "id": "other",
            "messages": messages(text("other", 30)),
            "source": "ai2-adapt-dev/no_robots_converted",
        },
        {"id": "short", "messages": messages("Is it?"), "source": FLAN_SOURCE},
        {"id": "f1", "messages": messages(text("f1", 33)), "source": FLAN_SOURCE},
        {"id": "f2", "messages": messages(text("f2", 36)), "source": FLAN_SOURCE},
    ]
    papers = [
        {
            "id": f"2106.{n}",
            "text": text(f"p{n}", 40),
            "source": "arxiv",
            "metadata": {"license": label, "url": "u"},
        }
        for n, label in enumerate((BY, BY_SA, "Some rights", "Public Domain", None))
    ]
    with gzip.open(root / "arxiv-papers-0000.json.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in papers)
    return {
        "longalpaca": str(root / "LongAlpaca-12k.json"),
        "pg19": str(root / "pg19.parquet"),
        "flan": str(write_jsonl(root / "flan.jsonl", flan)),
        "papers": str(root / "arxiv-papers-0000.json.gz"),
    }


def settings(files: dict[str, str], **changes: object) -> BuildConfig:
    """Return settings with which these files give a few contexts of every source, and hardly any
    answer is dropped.
    """
    tiny = {
        "documents": 3,
        "shortest": 170,
        "longest": 1000,
        "books": 2,
        "chunk": 96,
        "chunks": 2,
        "examples": 2,
        "flan_shortest": 40,
        "question_tokens": 8,
        "answer_tokens": 6,
        "flan_answer_tokens": 5,
        "question_characters": 1,
        "least_answer": 1,
    }
    return BuildConfig(**{**tiny, **files, **changes})


def flags(config: BuildConfig) -> list[object]:
    """Return the settings as flags, without the paths of sources of other mixtures."""
    own = {source.name for source in MIXTURES[config.mixture]}
    others = {source.name for sources in MIXTURES.values() for source in sources} - own
    parts: list[object] = []
    for name, value in vars(config).items():
        if name not in others:
            parts += [f"--{name.replace('_', '-')}", value]
    return parts
