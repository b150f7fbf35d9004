"""Measure which wording of a question a model answers best: token F1 of the full cache's answers.

    python -m recipes.smollm2.wording --model MODEL --data ../shared/data

The passages are training documents only (tasks/splits.py): the first sections of FairytaleQA
stories in which sections can be identified, and the first lines of Factbook documents, up to LENGTH
tokens each, with five questions. The wording with the highest mean of the two columns is the one
that the benchmarks use (tasks/reading.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from recipes.run import make_parser, run_recipe
from restorekv.compression.full_cache import ScoredContext
from restorekv.generation.decoding import decode_answer, generate_ids, get_stop_ids
from restorekv.model import attention
from restorekv.model.load import load_model
from restorekv.model.prefill import prefill
from restorekv.model.prompt import encode_question, make_context
from restorekv.model.shape import CacheShape
from restorekv.tasks.metrics import token_f1
from restorekv.tasks.splits import TRAINING, split_factbook, split_fairytale

LENGTH = 512
QUESTIONS = 5
NEW_TOKENS = 32
SENTENCE = "Answer the following question about the text in one short sentence."
WORDS = "Answer the question about the text in a few words."
WORDINGS = [  # what follows the text, and how the answer begins
    ("\n\n{q}", ""),
    ("\n\nQuestion: {q}\nAnswer:", ""),
    ("\n\nQuestion: {q}", "Answer:"),
    (f"\n\n{SENTENCE}\n\n{{q}}", ""),
    (f"\n\n{SENTENCE}\n\n{{q}}", "Answer:"),
    (f"\n\n{WORDS}\n\n{{q}}", ""),
    (f"\n\n{WORDS}\n\nQuestion: {{q}}", ""),
    (f"\n\n{WORDS}\n\nQuestion: {{q}}", "Answer:"),
    (f"\n\n{WORDS}\n\nQuestion: {{q}}\nAnswer:", ""),
    (f"\n\n{SENTENCE}\n\nQuestion: {{q}}\nAnswer:", ""),
    ("\n\nQuestion: {q}\nAnswer in a few words:", ""),
]
Passage = tuple[str, list[dict]]


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_fairytales(folder: Path, tokenizer) -> Iterator[Passage]:
    """Yield the first sections of training stories in which every block of text is one section,
    with questions about them.
    """
    for index, row in enumerate(read_rows(folder / "fairytaleqa/train.jsonl")):
        blocks = row["context"].split("\n\n")
        named = {
            int(each) for question in row["questions"] for each in question["sections"].split(",")
        }
        if split_fairytale("train", index) != TRAINING or max(named) != len(blocks):
            continue
        kept = fit_pieces(blocks, "\n\n", tokenizer)
        inside = [
            each
            for each in row["questions"]
            if max(map(int, each["sections"].split(","))) <= len(kept)
        ]
        yield "\n\n".join(kept), inside


def read_factbook(folder: Path, tokenizer) -> Iterator[Passage]:
    """Yield the first lines of training documents, with the questions that they answer."""
    found = read_rows(folder / "factbook/documents.jsonl")
    splits = split_factbook(row["id"] for row in found)
    for row in found:
        if splits[row["id"]] == TRAINING:
            text = "\n".join(fit_pieces(row["context"].split("\n"), "\n", tokenizer))
            yield text, [each for each in row["questions"] if each["answers"][0] in text]


def fit_pieces(pieces: list[str], joint: str, tokenizer) -> list[str]:
    """Return as many of the first pieces as have at most LENGTH tokens together."""
    count = len(pieces)
    while len(tokenizer.encode(joint.join(pieces[:count]))) > LENGTH:
        count -= 1
    return pieces[:count]


def pick_evenly(items: list, count: int) -> list:
    """Return `count` items, evenly spaced."""
    return [items[index * len(items) // count] for index in range(count)]


@torch.no_grad()
def score_wordings(model, tokenizer, passage: Passage) -> list[float]:
    """Return the mean token F1 over a passage's questions under every wording."""
    text, questions = passage
    context = make_context(tokenizer, text)
    shape = CacheShape.from_model(model)
    unscored = torch.zeros(shape.layers, shape.heads, context.text_tokens)
    cache = ScoredContext(model, context, prefill(model, context.ids), unscored).evict(1)
    asked = pick_evenly(questions, QUESTIONS)
    prompts = [
        encode_question(tokenizer, context, wording.format(q=each["question"]), opening)
        for wording, opening in WORDINGS
        for each in asked
    ]
    answers = generate_ids(model, tokenizer, cache, prompts, NEW_TOKENS)
    said = [
        decode_answer(tokenizer, ids.tolist(), get_stop_ids(model, tokenizer)) for ids in answers
    ]
    best = [
        max(token_f1(text, answer) for answer in each["answers"])
        for text, each in zip(said, asked * len(WORDINGS), strict=True)
    ]
    return [
        sum(best[start : start + len(asked)]) / len(asked)
        for start in range(0, len(best), len(asked))
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=15)
    parser.add_argument("--documents", type=int, default=6)
    given = parser.parse_args()
    model, tokenizer = load_model(given.model)
    attention.install_attention(model)
    columns = []
    for source, count in ((read_fairytales, given.stories), (read_factbook, given.documents)):
        every = [each for each in source(given.data, tokenizer) if len(each[1]) >= QUESTIONS]
        measured = [score_wordings(model, tokenizer, each) for each in pick_evenly(every, count)]
        columns.append([100 * sum(column) / count for column in zip(*measured, strict=True)])
    print("FairytaleQA  Factbook  wording, opening of the answer")
    for wording, story, fact in zip(WORDINGS, *columns, strict=True):
        print(f"{story:11.1f}  {fact:8.1f}  {wording[0]!r}, {wording[1]!r}")


if __name__ == "__main__":
    run_recipe(main)
