"""Make a small version of the appendix's table of training data, from made-up texts.

    python -m recipes.tiny.mixture runs/mixture            (resumes and asks nothing twice)

Both mixtures are built for the tiny model. The script writes FOLDER/sources (files in the formats
of LongAlpaca, PG-19, Tulu-3 and the Common Pile's papers), FOLDER/paper and FOLDER/permissive (the
mixtures, as `restorekv data build` writes them), paper/results/data-table.md,
paper/results/data-table.json, and for `python -m paper` the rows of the mixture "paper" to
paper/mixture.json.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase as Tokenizer

from paper.experiments.training_data import MIXTURE
from recipes.run import make_parser, run_recipe
from restorekv.data.build import build_mixture
from restorekv.data.config import BuildConfig
from restorekv.data.files import read_parquet_rows
from restorekv.data.mixture import read_mixture
from restorekv.data.overlap import EvaluationIndex
from restorekv.data.self_study import QUESTION_PROMPTS
from restorekv.data.sources import PAPER_LICENSES
from restorekv.data.table import compute_figures, make_data_table, make_drops_table
from restorekv.files import replace_file, write_json
from restorekv.model.load import load_model
from restorekv.tiny import suite, world
from restorekv.tiny.world import DEEDS, PEOPLE, PLACES, TIMES

RESULTS = Path(__file__).parents[2] / "paper" / "results"
# How many test documents of the tiny suite are kept out: all that some table here is measured on.
# `data build` itself knows only the first 52.
TEST = 156


class Bounds(TypedDict):
    """Settings of `BuildConfig`, in tokens except `chunks`."""

    shortest: int
    longest: int
    chunk: int
    chunks: int
    flan_shortest: int
    question_tokens: int
    answer_tokens: int
    flan_answer_tokens: int


class Counts(TypedDict):
    """Settings of `BuildConfig`: how much of each source."""

    documents: int
    books: int
    examples: int


BOUNDS: Bounds = {
    "shortest": 512,
    "longest": 1800,
    "chunk": 768,
    "chunks": 4,
    "flan_shortest": 128,
    "question_tokens": 32,
    "answer_tokens": 64,
    "flan_answer_tokens": 64,
}
COUNTS: Counts = {"documents": 30, "books": 10, "examples": 90}
FRAMES = {
    "paper": (
        "Below is a paper. Memorize the paper and answer my question after the paper.\n "
        "The paper begins. \n ",
        " \n Now the paper ends. \n",
    ),
    "book": (
        "Below is some paragraphs in the book. Memorize the content and answer my question after "
        "the book.\n ",
        " \n Now the material ends. \n",
    ),
}
OTHERS = ("arXiv.org perpetual, non-exclusive license", None)  # licenses that must be refused


def draw_story(rng: random.Random, tokens: int, length: Callable[[str], int]) -> list[str]:
    """Return up to `tokens` tokens of sentences of the world's grammar, in a new order.

    The world's own stories are in all test documents, so texts with them would be refused.
    """
    lines = []
    used = 0
    while True:
        line = " ".join(rng.choice(part) for part in (PEOPLE, DEEDS, PLACES, TIMES)) + "."
        used += length(line)
        if used > tokens:
            return lines
        lines.append(line)


def draw_document(name: str, tokens: int, length: Callable[[str], int]) -> world.WorldDocument:
    """Return a document of about `tokens` tokens with facts of up to three families, and questions
    about them; the name is its seed.
    """
    rng = random.Random(name)
    parts = [world.draw_needles(rng, 3), world.draw_people(rng, 2), world.draw_links(rng, 1)]
    chosen = parts if tokens > 400 else parts[:1]
    facts = [list(part.sentences) for part in chosen]
    room = tokens - sum(length(sentence) for part in facts for sentence in part)
    text = world.mix_facts(rng, facts, draw_story(rng, room, length)) + "\n"
    return world.WorldDocument(
        text, "mixed", tuple(question for part in chosen for question in part.questions)
    )


def draw_long_alpaca(
    tokenizer: Tokenizer, count: int, test: list[world.WorldDocument]
) -> list[dict]:
    """Return rows {instruction, input, output} like LongAlpaca's.

    Most are documents in its frames. To test the build there are also a repeated document, a short
    instruction, and planted copies of test documents.
    """
    rng = random.Random("mixture papers")
    length = suite.make_sentence_counter(tokenizer)
    made = [
        draw_document(f"mixture papers {n}", rng.randint(450, 1900), length)
        for n in range(2 * count + 4)
    ]
    half = test[7].text[: len(test[7].text) // 2].replace(".", " ;")
    hidden = world.WorldDocument(
        f"{draw_document('mixture papers hiding', 600, length).text}{half}\n", "", test[7].questions
    )
    stories = suite.draw_held_out("mixture stories 0", "people", 900, 1200, length)
    made[1:1] = [test[3], hidden, test[TEST - 1], stories]
    made.insert(6, made[0])  # in the same frame as the first
    rows = [{"instruction": "Name three birds.", "input": "", "output": "Owl, swan, raven."}]
    for number, one in enumerate(made):
        (before, after), question = (
            FRAMES[("paper", "paper", "book")[number % 3]],
            rng.choice(one.questions),
        )
        instruction = f"{before}{one.text}{after}Question: {question.text}"
        rows.append({"instruction": instruction, "input": "", "output": question.target})
    return rows


def draw_pg19(tokenizer: Tokenizer, count: int, test: list[world.WorldDocument]) -> list[dict]:
    """Return rows like emozilla/pg19's, with a few chapters each.

    The second book begins with a test document, and the third is shorter than a chunk.
    """
    rng = random.Random("mixture books")
    length = suite.make_sentence_counter(tokenizer)
    rows = []
    for number in range(count + 2):
        lengths = [rng.randint(900, 1300) for _ in range(rng.randint(3, 5))]
        chapters = [
            draw_document(f"mixture books {number} {n}", each, length).text
            for n, each in enumerate(lengths)
        ]
        if number == 1:
            chapters = [test[3].text, *chapters[:2]]
        if number == 2:
            # Shorter than a chunk.
            chapters = [draw_document("mixture books leaflet", 300, length).text]
        rows.append(
            {
                "short_book_title": f"Made-up book {number}",
                "publication_date": 1900 + number,
                "url": f"made-up/{number}",
                "text": "\n\n".join(chapters),
            }
        )
    return rows


def draw_tulu(tokenizer: Tokenizer, count: int, test: list[world.WorldDocument]) -> list[dict]:
    """Return rows {id, messages, source} like Tulu-3's, each a text and a question about it.

    One in ten is from a subset other than FLAN, and one is a test document.
    """
    rng = random.Random("mixture flan")
    length = suite.make_sentence_counter(tokenizer)
    rows = []
    for number in range(2 * count + 6):
        one = (
            test[6]
            if number == 2
            else draw_document(f"mixture flan {number}", int(100 * 9 ** rng.random()), length)
        )
        asked = rng.choice(one.questions)
        said = [
            {"role": "user", "content": one.text + asked.text},
            {"role": "assistant", "content": asked.target},
        ]
        subset = "no_robots_converted" if number % 10 == 4 else "flan_v2_converted"
        rows.append(
            {"id": f"made-up-{number}", "messages": said, "source": f"ai2-adapt-dev/{subset}"}
        )
    return rows


def draw_open_papers(
    tokenizer: Tokenizer, count: int, test: list[world.WorldDocument]
) -> list[dict]:
    """Return rows {id, text, metadata} with made-up licenses, some of them share-alike, refused or
    missing; the first is a test document.
    """
    rng = random.Random("mixture open papers")
    length = suite.make_sentence_counter(tokenizer)
    claimed = [*PAPER_LICENSES, *OTHERS]
    texts = [
        draw_document(f"mixture open papers {n}", rng.randint(450, 1900), length).text
        for n in range(4 * count + 8)
    ]
    texts[0] = test[10].text
    return [
        {
            "id": f"made-up-{number}",
            "text": text,
            "source": "arxiv",
            "metadata": {"license": claimed[number % 8]},
        }
        for number, text in enumerate(texts)
    ]


def write_sources(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Write the sources, and as "exclude" all test documents; return the paths by setting.

    The files are the same in every run, byte for byte.
    """
    folder.mkdir(parents=True, exist_ok=True)
    test = suite.draw_documents(tokenizer, TEST)
    files = {
        "longalpaca": folder / "LongAlpaca.json",
        "pg19": folder / "pg19.parquet",
        "flan": folder / "tulu-3.jsonl",
        "papers": folder / "arxiv_papers.jsonl",
        "exclude": folder / "tiny-suite.jsonl",
    }
    write_json(files["longalpaca"], draw_long_alpaca(tokenizer, COUNTS["documents"], test))
    with replace_file(files["pg19"]) as path:
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(draw_pg19(tokenizer, COUNTS["books"], test)), path
        )
    lines = {
        "flan": draw_tulu(tokenizer, COUNTS["examples"], test),
        "papers": draw_open_papers(tokenizer, COUNTS["documents"], test),
        "exclude": [{"context": one.text} for one in test],
    }
    for name, rows in lines.items():
        with replace_file(files[name]) as path:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(path) for name, path in files.items()}


def build_and_read(folder: Path, mixture: str, files: dict[str, str]) -> tuple[list[dict], dict]:
    """Build or resume a mixture; return the figures of its table, and its manifest."""
    model, tokenizer = load_model("tiny")
    config = BuildConfig(
        mixture=mixture,
        longalpaca=files["longalpaca"],
        pg19=files["pg19"],
        flan=files["flan"],
        papers=files["papers"],
        **BOUNDS,
        **COUNTS,
    )

    def show(done: int, total: int, title: str) -> None:
        if done % 10 == 0 or done == total:
            print(f"{mixture}, {title}: {done} of {total}", flush=True)

    build_mixture(
        model, tokenizer, config, folder, [files["exclude"]], resume=folder.exists(), progress=show
    )
    found, manifest = read_mixture(folder, model, tokenizer)
    return compute_figures(found, manifest), manifest


def find_closest(folders: list[Path], test: list[world.WorldDocument]) -> tuple[int, float]:
    """Return how many different contexts were taken, and the largest share of 13-grams that one has
    in common with a test document.
    """
    tests = EvaluationIndex(((str(number), one.text) for number, one in enumerate(test)), 1e-6)
    texts = set()
    for folder in folders:
        for file in folder.glob("*.parquet"):
            texts.update(row["context"] for row in read_parquet_rows(file))
    largest = 0.0
    for text in texts:
        match = tests.find_match(text)
        if match is not None:
            largest = max(largest, match[1])
    return len(texts), largest


INTRO = """# The table of training data in small

`make data-table`: both mixtures of [`data build`](../../docs/training.md#training-data), made for
and by the tiny model, as `restorekv data show` prints them.
**The texts are made up**: no hub is reachable where this was made, so small files in
the true formats of the four sources are written from the grammar of the tiny world ({sizes}).
Licenses are what such files would claim.

Scaled to the model (in brackets the paper): {documents} documents (500) of {shortest:,} to \
{longest:,} tokens
(2,048 to 16,000), {books} books (50) with {chunks} chunks (10) of {chunk} (3,072),
{examples} examples of FLAN (1,500) from {flan_shortest} (512) on; questions of at most \
{question_tokens} tokens (64),
answers of at most {answer_tokens} (512), to FLAN {flan_answer_tokens} (256). The other settings \
are the defaults.
Figures and manifests: [data-table.json](data-table.json).
"""
OVERLAP = """
## Refused as evaluation texts

All {tests} test documents of the tiny suite are kept out. Copies of some are planted in every \
source; LongAlpaca's
row 3 hides half of one behind another text, with other punctuation. Row 5 is no test document \
but one of another split
of the suite: the suite's filler is {stories} stories that never change, so its documents share \
most 13-grams and all
would be refused. The texts here therefore have sentences of the same grammar in an order of \
their own, and the
threshold stays at the default ({share:g}). By the same measure the closest to the tests of the \
{contexts} contexts
taken has {closest:.1%} in common with them.

| mixture | document | found in | share of 13-grams |
|---|---|---|---:|
"""
STUDY = """
## What the model asks

The tiny model was never trained to write questions: what it writes is mostly a piece of the \
text. The
filters look at lengths only and keep most of it. Of {all} questions of both mixtures {marks} end \
with a question mark.
As teacher data this is fit for testing the pipeline and for nothing else.

| kind | kept | different | with "?" | a question | its answer |
|---|---:|---:|---:|---|---|
"""
FLAN = """
FLAN's prompts hold their question themselves, of a form that the model knows: of {all} answers \
taken {same} are word
for word that of the made-up source. Its shortest right answers are dropped as short.
"""


def print_tables(*tables: Table) -> str:
    """Return tables as a terminal of 110 columns shows them."""
    output = io.StringIO()
    console = Console(file=output, width=110, color_system=None)
    console.print(*tables)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "\n".join(["```", *lines, "```", ""])


def summarize_self_study(folders: list[Path], contexts: int) -> str:
    """Return the section on the questions that the model wrote for both mixtures, with a row for
    each kind of question.
    """
    rows = []
    for folder in folders:
        for name in ("longalpaca", "papers", "pg19"):
            file = folder / f"{name}.parquet"
            if file.exists():
                rows += read_parquet_rows(file)
    marks = sum(row["question"].rstrip().endswith("?") for row in rows)
    text = STUDY.format(all=f"{len(rows):,}", marks=marks)
    for kind in QUESTION_PROMPTS:
        own = [row for row in rows if row["kind"] == kind]
        asked = Counter(row["question"].strip() for row in own)
        marked = sum(count for question, count in asked.items() if question.endswith("?"))
        cells = [kind, f"{len(own)} of {contexts}", len(asked), marked]
        for name in ("question", "answer"):
            cells.append(" ".join(own[0][name].split())[:80] if own else "")
        text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def write_page(
    folder: Path, files: dict[str, str], results: dict[str, tuple[list[dict], dict]]
) -> str:
    """Return the page paper/results/data-table.md."""
    test = [json.loads(line)["context"] for line in Path(files["exclude"]).read_text().splitlines()]
    sizes = ", ".join(
        f"{Path(path).name} {Path(path).stat().st_size / 1e3:.0f} kB" for path in files.values()
    )
    text = INTRO.format(sizes=sizes, **BOUNDS, **COUNTS)
    for mixture, (rows, manifest) in results.items():
        tables = print_tables(make_data_table(rows, manifest), make_drops_table(manifest))
        text += f"\n## The {mixture} mixture\n\n{tables}"
    folders = [folder / mixture for mixture in results]
    count, share = find_closest(folders, [world.WorldDocument(one, "", ()) for one in test])
    text += OVERLAP.format(
        tests=len(test),
        stories=world.STORIES,
        share=BuildConfig.overlap,
        contexts=count,
        closest=share,
    )
    told = [source for _, manifest in results.values() for source in manifest["sources"].values()]
    for mixture, (_, manifest) in results.items():
        for source in manifest["sources"].values():
            for one in source["refused"]:
                document = f"{source['title']}, {one['document']}"
                text += f"| {mixture} | {document} | {one['found in']} | {one['share']:.1%} |\n"
    text += summarize_self_study(
        folders,
        sum(source["contexts"] for source in told if source["attempts"] > source["contexts"]),
    )
    right = {
        row["id"]: row["messages"][1]["content"]
        for row in map(json.loads, Path(files["flan"]).read_text().splitlines())
    }
    answers = list(read_parquet_rows(folders[0] / "flan.parquet"))
    same = sum(row["answer"].strip() == right[row["document"]] for row in answers)
    return text + FLAN.format(all=len(answers), same=same)


def main() -> None:
    """Write the sources, both mixtures and the page."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    files = write_sources(folder / "sources", load_model("tiny")[1])
    results = {
        mixture: build_and_read(folder / mixture, mixture, files)
        for mixture in ("paper", "permissive")
    }
    kept = {
        mixture: {"rows": rows, "manifest": manifest}
        for mixture, (rows, manifest) in results.items()
    }
    text = write_page(folder, files, results)
    write_json(RESULTS / "data-table.json", kept)
    write_json(MIXTURE, {"mixture": "paper", "rows": kept["paper"]["rows"]})
    with replace_file(RESULTS / "data-table.md") as path:
        path.write_text(text)


if __name__ == "__main__":
    run_recipe(main)
