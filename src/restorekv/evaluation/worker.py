"""A job opened in a process: its model, contexts and adapters, and the answers of its cells."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv import tasks
from restorekv.cache.ragged import NO_LATENT_CODES, RaggedCache
from restorekv.compression.adapters import load_adapter
from restorekv.compression.compressor import Compressor, PreparedContext, time_phase
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.compression.full_cache import ScoredContext, make_zero_scores
from restorekv.compression.method_check import check_method
from restorekv.data.teacher import hash_tokenizer
from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols
from restorekv.evaluation.fidelity import FullAnswers
from restorekv.evaluation.grid import (
    DEFAULT_ON_SMALL_BUDGET,
    FULL,
    Cell,
    Job,
    group_by,
)
from restorekv.evaluation.reuse import describe_question, digest_text
from restorekv.generation.decoding import decode_answer, generate_ids, get_stop_ids
from restorekv.model import attention, support
from restorekv.model.identity import identify_model
from restorekv.model.load import load_model
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from restorekv.model.shape import is_latent_config
from restorekv.model.tokenize import check_model_and_tokenizer
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Sample

Seconds = dict[str, float]
# The model that was opened last, by name, dtype, device and protocol: one entry at most.
OPEN_MODELS: dict[tuple[str, str, str, str], tuple[PreTrainedModel, Tokenizer]] = {}
# The ids of the full cache's answers and the seconds that they took, by `_hash_asked`.
RememberedAnswers = dict[str, tuple[list[Tensor], float]]
# The cells of all evictors are compared with these answers, so each model writes them once.
FULL_ANSWERS: WeakKeyDictionary[PreTrainedModel, RememberedAnswers] = WeakKeyDictionary()
AnsweredCell = tuple[Cell, dict, Seconds]  # a cell, its line of one context, and the time it took
# Answers that are written at once. A step of a small model takes hardly longer for so many rows
# than for one.
MOST_ROWS = 64
MOST_BYTES = 1 << 30  # of the caches that are asked at once, so that a GPU has room for them


@dataclass(frozen=True)
class CellCache:
    """A cell's cache of one context, the prepared context that it was made from, and the seconds
    that both took.
    """

    cell: Cell
    prepared: PreparedContext
    cache: RaggedCache
    seconds: Seconds


class Worker:
    """Answers the cells of one job.

    Args:
        job: The cells, which share model, benchmark and protocol.
        device: Where the model runs.

    Raises:
        RestoreKVError: The model, the benchmark or an adapter cannot be opened, or the model has
            no codes of a cell's `kv_dtype`.
    """

    def __init__(self, job: Job, device: str = "cpu") -> None:
        first = job.representative
        self.job = job
        self.protocol = protocols.make_protocol(first.protocol)
        self.benchmark = tasks.make_benchmark(first.benchmark)
        self.model, self.tokenizer = open_model(first.model, first.dtype, device, first.protocol)
        support.prepare_model(self.model)
        # A wrong tokenizer is refused here, not by the first text that has a token too many.
        check_model_and_tokenizer(self.model, self.tokenizer)
        if is_latent_config(self.model.config):
            for cell in job.cells:
                if cell.kv_dtype != "model":
                    raise RestoreKVError(NO_LATENT_CODES)
        self.identity = identify_model(self.model)  # once, as it reads every weight
        self.adapters = {cell: self._load_adapter(cell) for cell in job.cells}
        # Some compressors fix the config, so all their cells need the same one.
        compressors = [self._make_compressor(cell) for cell in job.cells if cell.evictor != FULL]
        fixed = {compressor.config for compressor in compressors if not compressor.any_config}
        if len(fixed) > 1:
            raise RestoreKVError(
                f"{first.evictor} prepares a context with one config only; evaluate one config at "
                "a time."
            )

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples that the benchmark asks, in their order."""
        return self.benchmark.choose_samples(self.tokenizer, self.protocol.name)

    @cached_property
    def tokenizer_hash(self) -> str:
        """A hash that identifies the tokenizer; computed once, since it reads the vocabulary."""
        return hash_tokenizer(self.tokenizer)

    @cached_property
    def _samples_by_id(self) -> dict[str, Sample]:
        return {sample.id: sample for sample in self.samples}

    def make_config(self, cell: Cell) -> CompressionConfig:
        """Return the cell's config; for the full cache it consists of defaults."""
        if cell.evictor == FULL:
            # What a result records must not change with a default that the full cache ignores.
            return CompressionConfig(on_small_budget=DEFAULT_ON_SMALL_BUDGET)
        return cell.config(self.protocol.prefix_policy)

    def _make_compressor(self, cell: Cell) -> Compressor:
        return make_compressor(cell.evictor, self.make_config(cell))

    def _load_adapter(self, cell: Cell) -> RestoreAdapter | None:
        """Return a cell's adapter, checked against the evictor as the cell names it."""
        if cell.evictor == FULL or cell.adapter is None:
            return None
        adapter = load_adapter(
            self.model,
            cell.adapter,
            self._make_compressor(cell),
            cell.restore_tokens,
            identity=self.identity,
        )
        if adapter is None:
            raise RestoreKVError(
                f"No adapter for {cell.evictor} ships for {cell.model}; name an adapter, or "
                "evaluate the evictor without one."
            )
        return adapter

    def check_job_method(self) -> None:
        """Raise RestoreKVError if the job's method refuses the model."""
        first = self.job.representative
        if first.evictor == FULL:
            return

        def make_first_context() -> Context:
            context, _ = self.protocol.make_context(
                first.model, self.tokenizer, self.samples[0].context, first.max_context
            )
            return context

        check_method(
            self.model,
            self.tokenizer,
            self._make_compressor(first),
            make_first_context if self.samples else None,
        )

    def answer_sample(self, sample_id: str, cells: Sequence[Cell]) -> Iterator[AnsweredCell]:
        """Ask a sample's questions of every cell; expensive steps are done once, and only if
        needed.
        """
        sample = self._samples_by_id[sample_id]
        first = self.job.representative
        context, cut = self.protocol.make_context(
            first.model, self.tokenizer, sample.context, first.max_context
        )
        full_answers: FullAnswers | None = None
        full_seconds: Seconds = {}
        caches = self._make_caches(context, cells)
        for group in self._group_caches(context, caches):
            # The full cache answers once, even if no cell asks it: divergences are measured on its
            # answers.
            if full_answers is None:
                prepared = group[0].prepared
                full_answers = self._answer_from_full_cache(context, prepared, sample, full_seconds)
            written = self._ask_group(group, full_answers.prompts, sample)
            for made in group:
                seconds = made.seconds
                if made.cell.evictor == FULL:
                    # The full cache's divergence from itself is 0.
                    ids = full_answers.answers
                    answers = self._score_answers(sample, full_answers, ids, [0.0] * len(ids))
                    seconds["ask"] = full_seconds["ask"]
                else:
                    ids = written[made.cell]
                    with time_phase(seconds, "fidelity"):
                        divergences = full_answers.measure_divergences(self.model, made.cache)
                        answers = self._score_answers(sample, full_answers, ids, divergences)
                line = {
                    "sample": sample.id,
                    "context": digest_text(sample.context),
                    "cut": cut,
                    "tokens": context.text_tokens,
                    "prefix": context.prefix_length,
                    "restore_tokens": made.cache.restore_length,
                    "pairs": made.prepared.config.count_pairs(made.cache, context),
                    "pairs_with_prefix": made.cache.pairs_held,
                    "bytes": made.cache.nbytes,
                }
                yield made.cell, {**line, "answers": answers}, seconds

    def _group_caches(
        self, context: Context, caches: Iterable[CellCache]
    ) -> Iterator[list[CellCache]]:
        """Yield the caches in groups that are asked at once.

        A group's caches hold together at most as many pairs as the full cache, and at most
        MOST_BYTES, so that asking them at once takes little memory; a larger cache is a group of
        its own.
        """
        shape = self.identity.shape
        columns = context.prefix_length + context.text_tokens
        most_pairs = shape.layers * shape.heads * columns
        group: list[CellCache] = []
        pairs = 0
        size = 0
        for made in caches:
            pairs += made.cache.pairs_held
            size += made.cache.nbytes
            if group and (pairs > most_pairs or size > MOST_BYTES):
                yield group
                group = []
                pairs = made.cache.pairs_held
                size = made.cache.nbytes
            group.append(made)
        if group:
            yield group

    def _ask_group(
        self, group: Sequence[CellCache], prompts: Sequence[Tensor], sample: Sample
    ) -> dict[Cell, list[Tensor]]:
        """Return the ids of the answer to every question by cell, written for all cells at once;
        the full cache is not asked again.

        The time is charged to the first of the cells.
        """
        asked = [made for made in group if made.cell.evictor != FULL]
        if not asked:
            return {}
        with time_phase(asked[0].seconds, "ask"):
            written = self._ask([made.cache for made in asked], prompts, sample)
        return {made.cell: ids for made, ids in zip(asked, written, strict=True)}

    @torch.no_grad()
    def _make_caches(self, context: Context, cells: Sequence[Cell]) -> Iterator[CellCache]:
        """Yield the cache of every cell.

        One restore pass serves all cells with the same adapter and config, unless it depends on
        the ratio (an adapter that knows it, and restore_from="evicted"): then every eviction has
        one. One eviction serves those of them with the same ratio; each `kv_dtype` but the model's
        is a copy of that cache. The time of what several cells share is charged to the first of
        them.
        """
        prepared = self._prepare(context, only_full=all(cell.evictor == FULL for cell in cells))
        seconds = dict(prepared.seconds)
        for members in group_by(cells, self._get_restore_key).values():
            adapter = self.adapters[members[0]]
            variant = prepared.with_config(self.make_config(members[0]))
            variant = variant.with_restore_cache(adapter) if adapter else variant
            seconds |= {
                phase: took
                for phase, took in variant.seconds.items()
                if phase not in prepared.seconds
            }
            for ratio, group in group_by(members, lambda cell: cell.ratio).items():
                # The cells of a group differ in `kv_dtype` only, so one eviction serves them all.
                restore_tokens = None if group[0].restored else 0  # None: all of the adapter's
                plain, took = variant.evict_timed(ratio, restore_tokens)
                seconds |= took
                for cell in group:
                    cache = plain
                    if cell.kv_dtype != "model":
                        with time_phase(seconds, "evict"):
                            cache = plain.fork()
                            groups = self.identity.shape.groups
                            attention.quantize_context(cache, cell.kv_dtype, groups)
                    yield CellCache(cell, variant, cache, seconds)
                    # The time of shared steps has been charged to this cell.
                    seconds = {}

    def _get_restore_key(self, cell: Cell) -> tuple:
        """Return a key that is equal for cells that differ only in ratio and `kv_dtype`."""
        return (cell.evictor == FULL, cell.adapter, cell.restore_tokens, self.make_config(cell))

    def _prepare(self, context: Context, only_full: bool) -> PreparedContext:
        """Return the prepared context: its prefill and, unless only the full cache is asked, its
        scores.
        """
        if not only_full:
            method = self.protocol.adapt_method(
                self._make_compressor(self.job.representative), context.prefix_length
            )
            return method.prepare(self.model, self.tokenizer, context)
        seconds: Seconds = {}
        with time_phase(seconds, "prefill"):
            full_cache = prefill(self.model, context.ids)
        return self._make_zero_scored_context(context, full_cache, seconds)

    def _make_zero_scored_context(
        self, context: Context, full_cache: Cache, seconds: Seconds
    ) -> ScoredContext:
        """Return a prepared context with scores of 0, for a cache that keeps every pair."""
        scores = make_zero_scores(self.model, context)
        return ScoredContext(self.model, context, full_cache, scores, seconds=seconds)

    def _answer_from_full_cache(
        self, context: Context, prepared: PreparedContext, sample: Sample, seconds: Seconds
    ) -> FullAnswers:
        """Return what the full cache answers to the sample's questions; for this, a streamed
        context is prefilled whole.
        """
        full_cache = prepared.full
        # A streamed context never holds the full cache.
        if full_cache is None:
            full_cache = prefill(self.model, context.ids)
        cache = self._make_zero_scored_context(context, full_cache, {}).evict(1)
        prompts = [
            self.protocol.make_prompt(self.tokenizer, context, question)[0]
            for question in sample.questions
        ]
        remembered = FULL_ANSWERS.setdefault(self.model, {})
        key = self._hash_asked(context, prompts, sample)
        if key not in remembered:
            with time_phase(seconds, "ask"):
                ids = self._ask([cache], prompts, sample)[0]
            remembered[key] = ids, seconds["ask"]
        ids, seconds["ask"] = remembered[key]
        with time_phase(seconds, "fidelity"):
            return FullAnswers.from_answers(self.model, cache, prompts, ids)

    def _hash_asked(self, context: Context, prompts: Sequence[Tensor], sample: Sample) -> str:
        """Return a hash of all that a model's answers from the full cache depend on."""
        parts: list[object] = [self.protocol.first_may_stop, context.ids.tolist()]
        for prompt, question in zip(prompts, sample.questions, strict=True):
            parts += [prompt.tolist(), question.max_new_tokens]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _ask(
        self, caches: Sequence[RaggedCache], prompts: Sequence[Tensor], sample: Sample
    ) -> list[list[Tensor]]:
        """Return for each cache the ids of the answer to every question, written in batches."""
        limits = [question.max_new_tokens for question in sample.questions]
        written = generate_ids(
            self.model,
            self.tokenizer,
            [cache for cache in caches for _ in prompts],
            [*prompts] * len(caches),
            limits * len(caches),
            first_may_stop=self.protocol.first_may_stop,
            batch=MOST_ROWS,
        )
        # The answers of a cache follow each other.
        count = len(prompts)
        return [written[place * count : (place + 1) * count] for place in range(len(caches))]

    def _score_answers(
        self,
        sample: Sample,
        full_answers: FullAnswers,
        answers: Sequence[Tensor],
        divergences: Sequence[float],
    ) -> list[dict]:
        """Return every question's answer with its scores and its fidelity to the full cache's
        answer.
        """
        # Each entry has all that is needed to score the answer again without the benchmark.
        lines = []
        figures = zip(answers, full_answers.answers, divergences, strict=True)
        for question, (ids, full_ids, kl) in zip(sample.questions, figures, strict=True):
            text = self._decode_answer(ids)
            answer = {**describe_question(question), "prediction": text}
            answer |= self.benchmark.score_answer(question, text)
            lines.append(
                {
                    **answer,
                    "kl": kl,
                    "answer_tokens": len(full_ids),
                    "same": text == self._decode_answer(full_ids),
                }
            )
        return lines

    def _decode_answer(self, ids: Tensor) -> str:
        """Return an answer's text, without the ids that the protocol drops at its end."""
        return decode_answer(
            self.tokenizer,
            self.protocol.trim_answer(ids.tolist()),
            get_stop_ids(self.model, self.tokenizer),
        )


def open_model(
    name: str, dtype: str, device: str, protocol: str
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a model with the protocol's changes of RoPE; only the latest one stays in memory."""
    key = name, dtype, device, protocol
    if key not in OPEN_MODELS:
        OPEN_MODELS.clear()  # first, so that two models are never held at once
        OPEN_MODELS[key] = load_model(
            name, dtype, device, protocols.make_protocol(protocol).get_rope_changes(name)
        )
    return OPEN_MODELS[key]
