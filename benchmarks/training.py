"""`python -m benchmarks train`: time and memory of one training step on this machine, phase by
phase.

A model of random weights in the shape of Qwen3-0.6B (bfloat16, with a float32 adapter: n = 8, rank
8) takes one step on a context of T tokens with KVzip, after a step on a short text as a warm-up.
The context has a few questions, and their answers are given, as in a mixture that holds its
teacher's answers; here they are random ids. Each variant differs in one thing from the one before:

    copied            everything is computed; the restore pass copies the full cache, whatever its
                      size
    anew              everything is computed; the restore pass only refers to a large full cache
                      (`restorekv.model.attention.dispatch.MAX_COPY_BYTES`)
    scores stored     scores and teacher are read from a store, the prefill is computed
    prefill stored    the full cache is read from the store too
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.compress_cost import make_text
from benchmarks.each import measure_each
from benchmarks.measure import Peak
from benchmarks.timing import time_block
from restorekv.compression.budget import parse_ratio
from restorekv.compression.compressor import BeginPhase, ignore_phase
from restorekv.compression.full_cache import ScoredContext
from restorekv.context import format_bytes
from restorekv.errors import RestoreKVError
from restorekv.model.attention import dispatch
from restorekv.model.prompt import make_context
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.config import TrainConfig
from restorekv.train.draw import StepSample
from restorekv.train.examples import TrainingContext
from restorekv.train.loop import compute_sample_loss, make_initial_adapter
from restorekv.train.teacher_cache import TeacherCache

WARM_UP = 64  # tokens
PHASES = ("prefill", "score", "teacher", "restore", "student", "backward", "optimizer")


@dataclass(frozen=True)
class Variant:
    """A variant of the step: what it may read from a store, and whether the restore pass copies
    full caches of any size.
    """

    copied: bool = False
    store: bool = False
    store_prefill: bool = False


VARIANTS = {
    "copied": Variant(copied=True),
    "anew": Variant(),
    "scores stored": Variant(store=True),
    "prefill stored": Variant(store=True, store_prefill=True),
}


@dataclass(frozen=True)
class Options:
    """The options of `train`.

    `answer` is the number of ids of each answer; `shape` replaces fields of Qwen3-0.6B's config.
    """

    tokens: int = 2048
    questions: int = 4
    answer: int = 128
    ratio: float | str = "0.1"
    threads: int = 0
    seed: int = 0
    shape: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_ratio(self.ratio)
        if self.tokens < WARM_UP or min(self.questions, self.answer) < 1 or self.threads < 0:
            raise RestoreKVError(
                f"Measure at least {WARM_UP} tokens, 1 question, 1 answer id and 0 or more threads."
            )


@dataclass(frozen=True)
class Ready(ScoredContext):
    """A context that already has its restore cache, so that the restore pass is not run again with
    the student.
    """

    def with_restore_cache(
        self, adapter: RestoreAdapter, begin_phase: BeginPhase = ignore_phase
    ) -> Ready:
        return self


class Phases:
    """Seconds and memory of every phase: a context manager to call with the phase's name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, Peak] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with Peak() as self.peaks[name], time_block(self.seconds, name):
            yield

    def figures(self) -> dict:
        """Return the seconds by phase, and bytes above what was resident before the step.

        Bytes are the peak of all phases, the peaks by phase, and what the graph holds before
        backward; None if the system does not report memory.
        """
        above = {name: peak.bytes for name, peak in self.peaks.items() if peak.bytes is not None}
        if len(above) < len(self.peaks):
            return {"seconds": self.seconds, "peak": None, "peaks": None, "graph": None}
        start = self.peaks["prefill"].before
        peaks = {
            name: max(self.peaks[name].before + most - start, 0) for name, most in above.items()
        }
        graph = max(self.peaks["backward"].before - self.peaks["restore"].before, 0)
        return {
            "seconds": self.seconds,
            "peak": max(peaks.values()),
            "peaks": peaks,
            "graph": graph,
        }


def run_training(options: Options, progress: Callable[[str], None] = lambda phase: None) -> dict:
    """Measure every variant.

    Returns:
        Rows {variant, seconds (by phase), step, peak, peaks (by phase), graph, stored}, in seconds
        and bytes, the options, and facts of the model and the machine.
    """
    facts, rows = measure_each(
        VARIANTS,
        lambda model, tokenizer, title, folder: _measure_variant(
            model, tokenizer, VARIANTS[title], options, folder / title
        ),
        progress,
        kind="variant",
        changed=options.shape,
        seed=options.seed,
        threads=options.threads,
    )
    return {
        **facts,
        "tokens": options.tokens,
        "questions": options.questions,
        "answer": options.answer,
        "ratio": float(parse_ratio(options.ratio)),
        "rows": rows,
    }


def _measure_variant(
    model: PreTrainedModel, tokenizer: Tokenizer, variant: Variant, options: Options, folder: Path
) -> dict:
    """Measure one variant: fill the store if there is one, warm up, take the step."""
    config = TrainConfig(questions=options.questions, warmup=0, seed=options.seed)
    short = replace(options, tokens=WARM_UP, answer=1)
    examples = [_make_example(model, short), _make_example(model, options)]

    def make_teacher_cache() -> TeacherCache:
        store = folder if variant.store else None
        return TeacherCache(model, tokenizer, examples, config, store, variant.store_prefill)

    for index in range(len(examples)) if variant.store else ():
        make_teacher_cache().get_context(index)
    bound, dispatch.MAX_COPY_BYTES = (
        dispatch.MAX_COPY_BYTES,
        sys.maxsize if variant.copied else dispatch.MAX_COPY_BYTES,
    )
    figures: dict = {}
    try:
        adapter = make_initial_adapter(model, tokenizer, config)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=config.lr)
        for index, ratio in enumerate(("0.5", str(options.ratio))):
            teachers = make_teacher_cache()
            sample = StepSample(
                index, tuple(range(options.questions)), ratio, config.restore_tokens
            )
            figures = _take_step(teachers, adapter, optimizer, sample)
    finally:
        dispatch.MAX_COPY_BYTES = bound
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {**figures, "step": sum(figures["seconds"].values()), "stored": held}


def _take_step(
    teachers: TeacherCache,
    adapter: RestoreAdapter,
    optimizer: torch.optim.Optimizer,
    sample: StepSample,
) -> dict:
    """Take one step over one context, as the training loop does, and measure its phases."""
    phase = Phases()
    example = teachers.examples[sample.index]
    with torch.no_grad():
        with phase("prefill"):
            prepared = teachers.prepare_context(
                make_context(teachers.tokenizer, example.context),
                teachers.evictions[sample.evictor],
            )
        with phase("teacher"):
            targets = teachers.load_or_compute_targets(prepared, example)
    with phase("restore"):
        ready = Ready(**vars(prepared.with_restore_cache(adapter)))
    with phase("student"):
        loss = compute_sample_loss(adapter, ready, targets, sample, teachers.config)
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    phase.seconds["score"] = prepared.seconds.get("score", 0.0)
    phase.seconds["prefill"] -= phase.seconds["score"]
    return phase.figures()


def _make_example(model: PreTrainedModel, options: Options) -> TrainingContext:
    """Return a training context: words of random letters, short questions, answers of
    random ids.
    """
    draw = random.Random(options.seed)
    ids = model.config.get_text_config().vocab_size
    questions = tuple(f"What does part {number + 1} say?" for number in range(options.questions))
    answers = []
    for _ in questions:
        answers.append(tuple(draw.randrange(ids) for _ in range(options.answer)))
    return TrainingContext(
        make_text(options.tokens, options.seed), questions, (None,) * len(questions), tuple(answers)
    )


def format_table(result: dict) -> str:
    """Return a table of the variants."""
    model = result["model"]
    machine = result["machine"]
    head = (
        f"T = {result['tokens']:,}, {result['questions']} questions with answers of "
        f"{result['answer']} ids, "
        f"r = {result['ratio']:g}, KVzip; random weights, {model['parameters'] / 1e6:,.0f} million "
        "parameters "
        f"({model['num_hidden_layers']} layers), {model['dtype']}, {machine['threads']} threads on "
        f"{machine['processor']}. Seconds; bytes above what was resident before the step.\n\n"
        f"| variant | {' | '.join(PHASES)} | step | peak | graph before backward | on disk |\n"
        f"|---|{'---|' * (len(PHASES) + 4)}\n"
    )
    rows = []
    for row in result["rows"]:
        seconds = [f"{row['seconds'][name]:.2f}" for name in PHASES] + [f"{row['step']:.2f}"]
        cells = [
            row["variant"],
            *seconds,
            _format_bytes(row["peak"]),
            _format_bytes(row["graph"]),
            format_bytes(row["stored"]),
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(rows)


def _format_bytes(count: int | None) -> str:
    """Format bytes; "unknown" if the system does not report memory."""
    return "unknown" if count is None else format_bytes(count)
