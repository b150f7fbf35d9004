"""The quick demo: short questions about facts, answered by the full cache, by a small one and by a
restored one of the same size.

The questions that are shown are chosen by a rule: for each text, the first ones that the full cache
answers right. What the model gets wrong with the whole text says nothing about compression.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cli.loading import open_model
from restorekv.cli.scored_demo import CacheAnswers, ask_cache, choose_document, evict_caches
from restorekv.cli.terminal import notes, output, write_figures
from restorekv.compression.adapters import load_adapter
from restorekv.compression.budget import parse_ratio
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.context import format_bytes
from restorekv.evaluation.tables import fit_widths, measure_cells
from restorekv.model.names import TINY, to_canonical_name
from restorekv.tasks import Question, Sample
from restorekv.tasks.facts import load_facts
from restorekv.tasks.metrics import contains_reference

EVICTOR = "kvzip"
SHOWN = 6  # questions of every text, at most
CACHES = ("full cache", "KVzip", "restored")
ENDS = ".!?:;)\"'”’"  # of a sentence that is complete


@dataclass(frozen=True)
class ShownQuestion:
    """A question that the demo shows.

    Args:
        question: The question.
        truth: Its true answer.
        answers: What each of CACHES says.
        right: Whether that is right, for each of CACHES.
    """

    question: str
    truth: str
    answers: dict[str, str]
    right: dict[str, bool]


@dataclass(frozen=True)
class ShownText:
    """A text and what the caches say to its questions.

    Args:
        name: The title of the text.
        tokens: Its length.
        asked: How many questions there are.
        right_in_full: How many of them the full cache answers right.
        questions: Those that are shown.
        caches: The answers of every cache: the full one's to all questions, the others' to those
            that are shown. The seconds to answer are always for the questions that are shown.
    """

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
            text = ask_text(model, tokenizer, sample, ratio)
        shown.append(text)
        if text.questions:
            output.print(tabulate_answers(text))
    # No small caches are made of a text if the full cache answers none of its questions right.
    compared = [text for text in shown if text.questions]
    if compared:
        output.print(tabulate_costs(compared, ratio))
    else:
        output.print("The full cache answers none of the questions right.")
    seconds = time.perf_counter() - start
    output.print(make_note(compared, ratio, seconds), highlight=False)
    if json:
        texts = [asdict(each) for each in shown]
        write_figures(json, {"model": name, "ratio": ratio, "seconds": seconds, "texts": texts})


def make_note(compared: Sequence[ShownText], ratio: str, seconds: float) -> str:
    """Return a note that explains the tables.

    Args:
        compared: The texts with small caches.
        ratio: Their ratio.
        seconds: How long the demo took.
    """
    restored = "restored has as many, some of them written by RestoreKV."
    if compared and all(len(text.caches) < len(CACHES) for text in compared):
        restored = f"at r = {ratio} nothing is restored, because it would do harm there."
    return (
        "KVzip keeps the most important pairs of keys and values; "
        f"{restored} It took {seconds:.0f} s. Shown are the first {SHOWN} questions of each text "
        "that the full cache answers right, so the others can only be worse: this is a look at "
        "answers, too few to rank anything. docs/evaluation.md has hundreds of texts; restorekv "
        "demo --full scores a benchmark, and --ratio 0.1 is what compress keeps by default."
    )


@torch.no_grad()
def ask_text(model: PreTrainedModel, tokenizer: Tokenizer, sample: Sample, ratio: str) -> ShownText:
    """Ask the full cache everything, and the small ones what it answers right."""
    eviction = Eviction.make(EVICTOR)
    exact = parse_ratio(ratio)
    # If the adapter is known to do harm at this ratio, "auto" restores nothing.
    adapter = load_adapter(model, "auto", eviction, ratio=exact)
    prepared = replace(eviction, adapter=adapter).prepare(model, tokenizer, sample.context)
    assert isinstance(prepared, ScoredContext), "the demo does not stream"
    # The text is read once; each cache is made after the one before has answered.
    caches = evict_caches(prepared, EVICTOR, (float(exact),), with_full=True)
    title, cache, making = next(caches)
    full = ask_cache(prepared, tokenizer, (title, cache, dict(making)), sample.questions)
    right = find_right_answers(sample, full)
    shown = right[:SHOWN]
    answered = [full]
    # The small caches are asked only what the full one knows.
    if shown:
        questions = [sample.questions[index] for index in shown]
        # The full one is asked the same once more, for its seconds: in a larger batch a question
        # takes less time, and the first batch of all warms up the code.
        timed = ask_cache(prepared, tokenizer, (title, cache, making), questions)
        answered = [replace(full, seconds=timed.seconds)]
        answered += [ask_cache(prepared, tokenizer, each, questions) for each in caches]
    return ShownText(
        sample.id,
        prepared.context.text_tokens,
        len(sample.questions),
        len(right),
        compare_answers(sample, shown, answered),
        answered,
    )


def find_right_answers(sample: Sample, full: CacheAnswers) -> list[int]:
    """Return the indices of the questions that the full cache answers right."""
    return [
        index
        for index, question in enumerate(sample.questions)
        if contains_reference(_shorten(full.answers[index], full.cut[index]), _truths(question))
    ]


def compare_answers(
    sample: Sample, shown: Sequence[int], caches: Sequence[CacheAnswers]
) -> list[ShownQuestion]:
    """Return the questions at the indices `shown` with what every cache says.

    The first cache has answered all questions of the sample, the others only those at `shown`.
    """
    compared = []
    for number, index in enumerate(shown):
        question = sample.questions[index]
        answers = {}
        verdicts = {}
        for title, each in zip(CACHES, caches, strict=False):
            row = index if each is caches[0] else number
            answers[title] = _shorten(each.answers[row], each.cut[row])
            verdicts[title] = contains_reference(answers[title], _truths(question))
        compared.append(ShownQuestion(question.text, _truths(question)[0], answers, verdicts))
    return compared


def _truths(question: Question) -> tuple[str, ...]:
    """Return the true answers of a question; in the tiny world its fact `target` is the answer."""
    target = question.facts.get("target")
    return (str(target),) if target else question.answers


def _shorten(answer: str, cut: bool) -> str:
    """Return the first line of an answer, with an ellipsis if the limit of tokens has cut it.

    A limit that comes just after a sentence has cut nothing that a reader would miss.
    """
    line, line_break, _ = answer.strip().partition("\n")
    line = line.strip()
    ends_early = cut and not line_break and line and line[-1] not in ENDS
    return f"{line} …" if ends_early else line


def tabulate_answers(text: ShownText) -> Table:
    """Return a table with a row for each question."""
    title = (
        f"{text.name}: {text.tokens:,} tokens; the full cache answers {text.right_in_full} of "
        f"{text.asked} questions right"
    )
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    rows = []
    for each in text.questions:
        cells = [Text(each.question), Text(each.truth)]
        for cache, answer in each.answers.items():
            sign = "✓" if each.right[cache] else "✗"
            cells.append(Text(f"{sign} {answer}", style="" if each.right[cache] else "red"))
        rows.append(cells)

    # Choose widths that break no number; rich would break any word.
    names = ["question", "truth", *text.questions[0].answers]
    sizes = []
    for column, name in enumerate(names):
        sizes.append(measure_cells([name, *(cells[column].plain for cells in rows)]))
    widths = fit_widths(sizes, output.width - 3 * len(names) - 1)
    for name, width in zip(names, widths, strict=True):
        table.add_column(name, width=width, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def tabulate_costs(texts: Sequence[ShownText], ratio: str) -> Table:
    """Return a table with a row for each cache: right answers, bytes, seconds."""
    table = Table(title=f"All texts at r = {ratio}", title_justify="left", title_style="bold")
    table.add_column("cache")
    for name in ("right", "bytes held", "seconds to make", "seconds per question"):
        table.add_column(name, justify="right", no_wrap=True)
    count = sum(len(text.questions) for text in texts)
    # If nothing is restored, there are only two caches.
    for index, title in enumerate(CACHES[: len(texts[0].caches)]):
        caches = [text.caches[index] for text in texts]
        right = sum(each.right[title] for text in texts for each in text.questions)
        asking = sum(each.seconds.get("ask", 0.0) for each in caches)
        making = sum(sum(each.seconds.values()) for each in caches) - asking
        held = format_bytes(sum(each.nbytes for each in caches))
        table.add_row(title, f"{right}/{count}", held, f"{making:.1f}", f"{asking / count:.2f}")
    return table
