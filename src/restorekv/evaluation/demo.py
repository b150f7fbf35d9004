"""One held-out document asked a few questions, answered side by side from the full cache and from small ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import tasks
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.compressor import Eviction, load_adapter
from restorekv.compression.generate import ask
from restorekv.compression.prepared import PreparedContext, timed
from restorekv.evaluation.tables import Table, TableRow, name, table
from restorekv.model.load import BUNDLED
from restorekv.tasks.bundled import question_of
from restorekv.tiny.suite import draw, measure

PHASES = ("prefill", "score", "restore", "evict", "ask")
FAMILIES = 3  # questions about the bundled world's document, each of another family


@dataclass(frozen=True)
class Show:
    """What a model's demo asks: a benchmark for the figures, a document for the eyes, and the methods compared."""

    benchmark: str
    evictors: tuple[str, ...]
    ratios: tuple[str, ...]  # of the figures
    shown: tuple[float, ...]  # of the document
    count: int  # contexts of the benchmark


WORLD = Show("bundled", ("kvzip", "kvzip+"), ("0.4", "0.2", "0.1", "0.05"), (0.05,), 52)
STORIES = Show("fairytaleqa:length=768,questions=4", ("kvzip",), ("0.1", "0.05"), (0.1, 0.05), 7)
STORY = "assipattle-and-the-mester-stoorworm"  # the validation story that is shown


def show_for(model: str) -> Show:
    """The bundled model knows its own world only; any other reads stories."""
    return WORLD if model == BUNDLED else STORIES


@dataclass(frozen=True)
class Answered:
    """A cache's answers, the bytes it holds, and the seconds of every phase that led to them."""

    title: str
    nbytes: int
    answers: list[str]
    seconds: Mapping[str, float] = field(default_factory=dict)


def document(model: str, tokenizer: Tokenizer) -> tasks.Sample:
    """The document that is shown, with its questions."""
    if show_for(model) is WORLD:
        drawn = draw("demo 0", "mixed", 1000, 1100, measure(tokenizer))
        asked = list({question.family: question for question in drawn.questions}.values())[:FAMILIES]
        return tasks.Sample("demo", drawn.text, tuple(question_of(each.family, each) for each in asked))
    stories = tasks.make("fairytaleqa:length=1024,questions=4").chosen(tokenizer, "kvpress")
    return next((each for each in stories if each.id.startswith(STORY)), stories[0])


@torch.no_grad()
def side_by_side(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    sample: tasks.Sample,
    adapters: Mapping[str, str | None],
    ratios: Sequence[float],
) -> tuple[int, list[Answered]]:
    """The document's tokens, and what the full cache, every evictor and its restored cache answer at each ratio."""
    found: list[Answered] = []
    for evictor, source in adapters.items():
        eviction = Eviction.make(evictor)
        adapter = load_adapter(model, source, eviction)
        prepared = replace(eviction, adapter=adapter).prepare(model, tokenizer, sample.context)
        if not found:
            reading = {"prefill": prepared.seconds["prefill"]}
            found.append(answered(prepared, tokenizer, sample, "full cache", prepared.at(1, restored=False), reading))
        for title, cache, seconds in caches(prepared, evictor, ratios):
            found.append(answered(prepared, tokenizer, sample, title, cache, seconds))
    return prepared.context.tokens, found


def caches(
    prepared: PreparedContext, evictor: str, ratios: Sequence[float]
) -> Iterator[tuple[str, RaggedCache, dict[str, float]]]:
    """Title, cache and seconds of every ratio, without restoring and, where there is an adapter, with it."""
    for ratio in ratios:
        for restored in (False, True) if prepared.restore_tokens else (False,):
            phases = ("prefill", "score", "restore") if restored else ("prefill", "score")
            seconds = {phase: prepared.seconds[phase] for phase in phases}
            with timed(seconds, "evict"):
                cache = prepared.at(ratio, restored=restored)
            yield f"{name(evictor, restored)}, r = {ratio:g}", cache, seconds


def answered(
    prepared: PreparedContext, tokenizer: Tokenizer, sample: tasks.Sample, title: str, cache: RaggedCache,
    seconds: dict[str, float],
) -> Answered:  # fmt: skip
    """The questions asked of one cache, in one batch."""
    questions, limits = zip(*((each.text, each.max_new_tokens) for each in sample.questions), strict=True)
    with timed(seconds, "ask"):
        told = ask(prepared.model, tokenizer, prepared.context, cache, questions, limits)
    return Answered(title, cache.nbytes, [answer.strip() for answer in told], seconds)


def answers_table(sample: tasks.Sample, tokens: int, found: Sequence[Answered]) -> Table:
    """Returns a block for each question: the reference answers, then every cache's answer with the bytes it holds."""
    rows = []
    for number, question in enumerate(sample.questions):
        asked = question.text.removeprefix("\n\n").removeprefix("Question: ").removesuffix("\nAnswer:")
        true = str(question.facts.get("target", "")) or " / ".join(dict.fromkeys(question.answers))
        rows += [TableRow(["question", "", asked], strong=True, rule=number > 0), TableRow(["true", "", true])]
        rows += [TableRow([each.title, f"{each.nbytes:,}", " ".join(each.answers[number].split())]) for each in found]
    return table("answers", f"One document of {tokens} tokens", ["cache", "bytes held", "answer"], rows, left=(0, 2))


def seconds_table(found: Sequence[Answered]) -> Table:
    """Returns what each phase took for the document that is shown."""
    phases = [phase for phase in PHASES if any(phase in each.seconds for each in found)]
    rows = [
        [each.title, *(f"{each.seconds[phase]:.2f}" if phase in each.seconds else "" for phase in phases)]
        for each in found
    ]
    note = "prefill and score serve every ratio; ask: all questions"
    return table("seconds", "Seconds of each phase", ["cache", *phases], rows, note)
