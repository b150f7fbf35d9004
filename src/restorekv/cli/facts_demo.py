"""The quick demo: short questions about facts, answered by the full cache, by a small one and by a
restored one of the same size.

The questions that are shown are chosen by a rule: of every text, the first ones that the full cache
answers right. What the model gets wrong with the whole text says nothing of compression.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from restorekv.cli.scored_demo import CacheAnswers, answer_side_by_side, choose_document
from restorekv.cli.session import open_model
from restorekv.cli.terminal import notes, output, write_figures
from restorekv.context import format_bytes
from restorekv.model.names import TINY, to_canonical_name
from restorekv.tasks import Question, Sample
from restorekv.tasks.facts import load_facts
from restorekv.tasks.metrics import contains_reference

EVICTOR = "kvzip"
SHOWN = 6  # questions of every text, at most
CACHES = ("full cache", "KVzip", "restored")


@dataclass(frozen=True)
class ShownQuestion:
    """A question, its true answer, and what each of CACHES says with whether it is right."""

    question: str
    truth: str
    answers: dict[str, str]
    right: dict[str, bool]


@dataclass(frozen=True)
class ShownText:
    """A text, how many of its questions the full cache answers right, and those that are shown."""

    name: str
    tokens: int
    asked: int
    right_in_full: int
    questions: list[ShownQuestion]
    caches: list[CacheAnswers]


def run_facts_demo(name: str, ratio: str, json: Path | None) -> None:
    """Ask about every text and print a table of answers, and one of bytes and seconds."""
    start = time.perf_counter()
    name = to_canonical_name(name)
    model, tokenizer = open_model(name)
    samples = [choose_document(name, tokenizer)] if name == TINY else load_facts()
    shown = []
    for sample in samples:
        with notes.status(f"reading and asking {sample.id}"):
            tokens, caches = answer_side_by_side(
                model, tokenizer, sample, {EVICTOR: "auto"}, (float(ratio),)
            )
        text = choose_questions(sample, tokens, caches)
        shown.append(text)
        if text.questions:
            output.print(tabulate_answers(text))
    output.print(tabulate_costs(shown, ratio))
    seconds = time.perf_counter() - start
    output.print(
        f"{seconds:.0f} seconds. Shown are the first {SHOWN} questions of each text that the full "
        "cache answers right; restorekv demo --full scores a benchmark.",
        highlight=False,
    )
    if json:
        texts = [asdict(each) for each in shown]
        write_figures(json, {"model": name, "ratio": ratio, "seconds": seconds, "texts": texts})


def choose_questions(sample: Sample, tokens: int, caches: Sequence[CacheAnswers]) -> ShownText:
    """Return the first questions of a text that the full cache, the first of `caches`, answers
    right.
    """
    right = []
    for index, question in enumerate(sample.questions):
        answers = {}
        for title, each in zip(CACHES, caches, strict=False):
            answers[title] = _shorten(each.answers[index])
        verdicts = {
            title: contains_reference(answer, _truths(question))
            for title, answer in answers.items()
        }
        if verdicts[CACHES[0]]:
            right.append(ShownQuestion(question.text, _truths(question)[0], answers, verdicts))
    return ShownText(
        sample.id, tokens, len(sample.questions), len(right), right[:SHOWN], list(caches)
    )


def _truths(question: Question) -> tuple[str, ...]:
    """Return the true answers of a question; one about the tiny world names it in its facts."""
    target = question.facts.get("target")
    return (str(target),) if target else question.answers


def _shorten(answer: str) -> str:
    """Return the first line of an answer."""
    return answer.strip().partition("\n")[0].strip()


def tabulate_answers(text: ShownText) -> Table:
    """Return a table with a row for each question."""
    title = (
        f"{text.name}: {text.tokens:,} tokens; the full cache answers {text.right_in_full} of "
        f"{text.asked} questions right"
    )
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("question", ratio=3)
    table.add_column("truth", ratio=2)
    for cache in text.questions[0].answers:
        table.add_column(cache, ratio=3)
    for each in text.questions:
        cells = []
        for cache, answer in each.answers.items():
            sign = "✓" if each.right[cache] else "✗"
            cells.append(Text(f"{sign} {answer}", style="" if each.right[cache] else "red"))
        table.add_row(Text(each.question), Text(each.truth), *cells)
    return table


def tabulate_costs(texts: Sequence[ShownText], ratio: str) -> Table:
    """Return a table with a row for each cache: right answers, bytes, seconds."""
    table = Table(title=f"All texts at r = {ratio}", title_justify="left", title_style="bold")
    table.add_column("cache")
    for name in ("right", "bytes held", "seconds to make", "seconds to ask"):
        table.add_column(name, justify="right", no_wrap=True)
    count = sum(len(text.questions) for text in texts)
    for index, title in enumerate(CACHES[: len(texts[0].caches)]):
        caches = [text.caches[index] for text in texts]
        right = sum(each.right[title] for text in texts for each in text.questions)
        asking = sum(each.seconds["ask"] for each in caches)
        making = sum(sum(each.seconds.values()) for each in caches) - asking
        held = format_bytes(sum(each.nbytes for each in caches))
        table.add_row(title, f"{right}/{count}", held, f"{making:.1f}", f"{asking:.1f}")
    return table
