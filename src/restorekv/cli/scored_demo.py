"""`restorekv demo --full`: one document and a small benchmark for a model.

The questions about the document are answered from the full cache and from small ones.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import tasks
from restorekv.cache.ragged import RaggedCache
from restorekv.cli.loading import silence_transformers
from restorekv.cli.terminal import notes, output, show_progress_share, write_figures
from restorekv.compression.adapters import load_adapter
from restorekv.compression.compressor import time_phase
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.evaluation.frame import GridResults
from restorekv.evaluation.grid import SHIPPED, Grid
from restorekv.evaluation.grid_tables import make_tables
from restorekv.evaluation.rows import make_payload
from restorekv.evaluation.run import run_grid
from restorekv.evaluation.tables import Table, name_method
from restorekv.evaluation.worker import open_model
from restorekv.generation.answers import answer_questions
from restorekv.model.names import TINY, to_canonical_name
from restorekv.tasks.tiny import convert_question
from restorekv.tiny import suite

PHASES = ("prefill", "score", "restore", "evict", "ask")
FAMILIES = 3  # questions about the tiny world's document, each of a different family
COMMON = {"prefix_policy": "free"}  # as the shipped adapters were trained
# Title, cache, and the seconds of every phase that led to it.
NamedCache = tuple[str, RaggedCache, dict[str, float]]


@dataclass(frozen=True)
class DemoPlan:
    """What the demo of a model shows.

    Args:
        benchmark: The benchmark that is scored.
        evictors: The evictors, each alone and restored.
        ratios: The ratios at which it is scored.
        shown: The ratios at which the answers about one document are shown.
        count: How many contexts are scored.
    """

    benchmark: str
    evictors: tuple[str, ...]
    ratios: tuple[str, ...]
    shown: tuple[float, ...]
    count: int


WORLD = DemoPlan("tiny", ("kvzip", "kvzip+"), ("0.4", "0.2", "0.1", "0.05"), (0.05,), 52)
STORIES = DemoPlan(
    "fairytaleqa:length=768,questions=4", ("kvzip",), ("0.1", "0.05"), (0.1, 0.05), 7
)
STORY = "assipattle-and-the-mester-stoorworm"  # the validation story that is shown


def choose_plan(model: str) -> DemoPlan:
    """Return what to show: the tiny model knows only its own world, any other model reads
    stories.
    """
    return WORLD if model == TINY else STORIES


def run_scored_demo(model: str, count: int | None, json: Path | None) -> None:
    """Print the answers about one document and the scores of a benchmark.

    Args:
        model: The model's name.
        count: How many held-out documents to score; None takes the number of the model's plan.
        json: A file for the scores and their settings, or None.
    """
    start = time.perf_counter()
    model = to_canonical_name(model)
    show = choose_plan(model)
    silence_transformers()
    with notes.status(f"loading {model}"):
        # It stays in memory, so that the grid's cells do not load it again.
        loaded, tokenizer = open_model(model, "auto", "cpu", "kvpress")
    sample = choose_document(model, tokenizer)
    tokens, answers = answer_side_by_side(
        loaded, tokenizer, sample, dict.fromkeys(show.evictors, "auto"), show.shown
    )
    output.print(make_answers_table(sample, tokens, answers))
    output.print(make_seconds_table(answers))
    figures = _measure(model, show, count or show.count)
    output.print(f"{time.perf_counter() - start:.0f} seconds")
    if json:
        write_figures(json, figures)


def _measure(model: str, show: DemoPlan, count: int) -> dict:
    """Score the methods on held-out documents, print tables of the scores, and return the rows and
    what they were made with.
    """
    benchmark = replace(tasks.make_benchmark(show.benchmark), count=count).spec
    title = "asking held-out documents"
    methods = [(evictor, SHIPPED) for evictor in show.evictors]
    # The same grid as `restorekv eval` runs, in a folder that is deleted afterwards.
    cells = Grid([model], methods, [benchmark], ratios=show.ratios, common=COMMON).list_cells()
    with show_progress_share(title) as update, TemporaryDirectory() as folder:
        results = run_grid(
            cells, Path(folder), on_progress=lambda progress: update(title, progress.share)
        )
        tables = make_tables(GridResults(results))
        figures = make_payload(results)
        # Too long for a demo's file.
        del figures["answers"]
    for table in tables:
        output.print(table)
    return figures


@dataclass(frozen=True)
class CacheAnswers:
    """A cache's answers, the bytes it holds, and the seconds of every phase that led to them.

    Args:
        title: What the tables call the cache.
        nbytes: The bytes it holds.
        answers: Its answers.
        seconds: The seconds of every phase.
        cut: For each answer, whether its limit of tokens ended it.
    """

    title: str
    nbytes: int
    answers: list[str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    cut: list[bool] = field(default_factory=list)


def choose_document(model: str, tokenizer: Tokenizer) -> tasks.Sample:
    """Return the document that is shown, with its questions."""
    if choose_plan(model) is WORLD:
        drawn = suite.draw_held_out(
            "demo 0", "mixed", 1000, 1100, suite.make_sentence_counter(tokenizer)
        )
        # One question of each family, so that they differ.
        by_family = {question.family: question for question in drawn.questions}
        questions = [convert_question(family, each) for family, each in by_family.items()]
        return tasks.Sample("demo", drawn.text, tuple(questions[:FAMILIES]))
    stories = tasks.make_benchmark("fairytaleqa:length=1024,questions=4").choose_samples(
        tokenizer, "kvpress"
    )
    return next((each for each in stories if each.id.startswith(STORY)), stories[0])


@torch.no_grad()
def answer_side_by_side(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    sample: tasks.Sample,
    adapters: Mapping[str, str | None],
    ratios: Sequence[float],
) -> tuple[int, list[CacheAnswers]]:
    """Ask every cache of a document all of its questions.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        sample: The document and its questions.
        adapters: The adapter of every evictor; with one, the restored cache answers too.
        ratios: The ratios of the small caches.

    Returns:
        The number of the document's tokens, and the answers of the full cache and of every evictor
        and ratio.
    """
    answers: list[CacheAnswers] = []
    tokens = 0
    for evictor, source in adapters.items():
        eviction = Eviction.make(evictor)
        adapter = load_adapter(model, source, eviction)
        prepared = replace(eviction, adapter=adapter).prepare(model, tokenizer, sample.context)
        assert isinstance(prepared, ScoredContext), "the demo does not stream"
        tokens = prepared.context.text_tokens
        for named in evict_caches(prepared, evictor, ratios, with_full=not answers):
            answers.append(ask_cache(prepared, tokenizer, named, sample.questions))
    return tokens, answers


def evict_caches(
    prepared: ScoredContext, evictor: str, ratios: Sequence[float], with_full: bool
) -> Iterator[NamedCache]:
    """Yield title, cache and seconds at every ratio: without restoring and, if there is an adapter,
    also restored.

    Args:
        prepared: The document, which has been read and scored.
        evictor: The name of the evictor, for the titles.
        ratios: The ratios.
        with_full: Whether the full cache comes first.
    """
    if with_full:
        yield "full cache", prepared.evict(1, 0), {"prefill": prepared.seconds["prefill"]}
    for ratio in ratios:
        # Without an adapter there is only the evictor alone.
        for restored in (False, True) if prepared.restore_tokens else (False,):
            seconds = dict(prepared.seconds)
            if not restored:
                seconds.pop("restore", None)
            # The restore pass of an adapter that knows the ratio is part of this call.
            cache, took = prepared.evict_timed(ratio, None if restored else 0)
            yield f"{name_method(evictor, restored)}, r = {ratio:g}", cache, seconds | took


def ask_cache(
    prepared: ScoredContext,
    tokenizer: Tokenizer,
    named: NamedCache,
    questions: Sequence[tasks.Question],
) -> CacheAnswers:
    """Return a cache's greedy answers to all of the questions, in one batch."""
    title, cache, seconds = named
    requests = [(prepared.context, cache, question.text) for question in questions]
    limits = [question.max_new_tokens for question in questions]
    with time_phase(seconds, "ask"):
        answered = answer_questions(prepared.model, tokenizer, requests, limits)
    answers = [samples[0] for samples in answered]  # one sample of each question
    texts = [answer.text.strip() for answer in answers]
    cut = [answer.finish == "length" for answer in answers]
    return CacheAnswers(title, cache.nbytes, texts, seconds, cut)


def make_answers_table(sample: tasks.Sample, tokens: int, found: Sequence[CacheAnswers]) -> Table:
    """Return a block for each question: the reference answers, then every cache's answer with the
    bytes it holds.
    """
    rows: list[list[str]] = []
    strong: list[int] = []
    for number, question in enumerate(sample.questions):
        asked = (
            question.text.removeprefix("\n\n").removeprefix("Question: ").removesuffix("\nAnswer:")
        )
        true = str(question.facts.get("target", "")) or " / ".join(dict.fromkeys(question.answers))
        strong.append(len(rows))
        rows.append(["question", "", asked])
        rows.append(["true", "", true])
        for each in found:
            rows.append([each.title, f"{each.nbytes:,}", " ".join(each.answers[number].split())])
    title = f"One document of {tokens} tokens"
    columns = ["cache", "bytes held", "answer"]
    return Table("answers", title, columns, rows, left=(0, 2), strong=strong)


def make_seconds_table(found: Sequence[CacheAnswers]) -> Table:
    """Return a row for each cache with the seconds of every phase that any of them has."""
    phases = [phase for phase in PHASES if any(phase in each.seconds for each in found)]
    rows = []
    for each in found:
        row = [each.title]
        for phase in phases:
            row.append(f"{each.seconds[phase]:.2f}" if phase in each.seconds else "")
        rows.append(row)
    note = "prefill and score serve every ratio; ask: all questions"
    return Table("seconds", "Seconds of each phase", ["cache", *phases], rows, note)
