"""The library as an engine: one thread writes all answers; a question joins at the next token.

A question takes the steps that `Engine` (engine.py) lists: it gets one of BATCH slots in
`CacheEngine.answer`, is prepared in a thread of `prepare_executor`, and goes through the queue
`prepared` to the scheduler in the thread that answers. Other answers continue meanwhile. A
compression waits before a layer of the model while a token is being written.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.generation import decoding
from restorekv.generation.sampling import make_samplers
from restorekv.generation.scheduler import Request, Scheduler, StepOutput
from restorekv.model.observer import HOOKS_LOCK
from restorekv.model.position_limits import count_usable_positions
from restorekv.model.prefill import make_empty_cache
from restorekv.model.shape import get_backbone
from restorekv.restore.adapter import RestoreAdapter
from restorekv.serve.caches import (
    DOCUMENTS_TOO_LONG,
    NO_CACHE,
    SHUTDOWN_SECONDS,
    ActiveQuestion,
    CacheCost,
    CacheEngine,
)
from restorekv.serve.document_checks import check_size, compose_documents
from restorekv.serve.engine import ENDING, ServedQuestion, UnavailableError, settle_future
from restorekv.serve.store import Store

GATHER = 0.005  # seconds that the first question waits for others that come with it
SHARE = 0.25  # seconds that a compression gets for each second that answers take
SLICE = 0.05  # seconds that a compression gets at a time
PREPARING = 4  # questions that are prepared at the same time


@dataclass(kw_only=True)
class LocalQuestion(ActiveQuestion):
    """A question that the thread of this engine answers.

    Args:
        cache: The cache of all its documents.
        written: Done once the last token is written.
    """

    cache: RaggedCache
    written: Future[None] = field(default_factory=Future)


class EmbeddedEngine(CacheEngine[LocalQuestion]):
    """An engine that answers up to `decoding.BATCH` questions at a time, in this process.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        store: The documents on disk.
        memory: Bytes of documents in memory.
        max_waiting: How many more questions may wait for a slot; None means no limit. Waiting
            questions do not keep documents in memory.
        adapter: The adapter that restores documents, as `compress` takes it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        store: Store,
        memory: int,
        max_waiting: int | None,
        adapter: RestoreAdapter | str | None = "auto",
    ) -> None:
        super().__init__(model, tokenizer, store, memory, max_waiting, adapter=adapter)
        self.slots = asyncio.Semaphore(decoding.BATCH)
        self.prepare_executor = ThreadPoolExecutor(PREPARING, "restorekv-prepare")
        self.prepared: queue.SimpleQueue[LocalQuestion | None] = queue.SimpleQueue()
        self.scheduler = Scheduler(model, self.stop_ids)
        # All questions without a document continue this cache, so they share forward passes, too.
        self.empty_cache: RaggedCache | None = None
        self.empty_cache_lock = threading.Lock()  # while `empty_cache` is made
        self.idle = threading.Event()  # cleared while a pass of the model writes tokens
        self.idle.set()
        self.owed = 0.0  # seconds that a compression is to get
        self.answering = threading.Thread(
            target=self._answer_all, name="restorekv-answer", daemon=True
        )
        layers: Any = get_backbone(model).layers
        with HOOKS_LOCK:
            self.hooks = [
                layer.register_forward_pre_hook(self._yield_to_decoding) for layer in layers
            ]

    def start(self) -> None:
        """Start the thread that answers."""
        self.answering.start()

    def stop_asking(self) -> None:
        """Refuse the questions that have no slot yet."""
        super().stop_asking()
        # A question that has a slot is answered, if that takes no longer than the shutdown.
        for question in list(self.tasks.values()):
            if not question.started:
                settle_future(question.done, error=UnavailableError(ENDING))

    def close(self) -> None:
        """Shut down; questions that are still being answered get an error."""
        super().close()
        if self.prepare_executor:
            self.prepare_executor.shutdown(wait=False)
        # None ends the thread that answers.
        self.prepared.put(None)
        self.answering.join(SHUTDOWN_SECONDS)
        with HOOKS_LOCK:
            for hook in self.hooks:
                hook.remove()

    @asynccontextmanager
    async def acquire_slot(self, question: ServedQuestion) -> AsyncIterator[None]:
        """Wait for one of BATCH slots, in the order in which questions came."""
        async with self.slots:
            question.started = True
            yield

    def collect_metrics(self) -> tuple[dict[str, int], dict[str, int]]:
        counted, now = super().collect_metrics()
        counted = {**counted, "steps": self.scheduler.steps}
        now = {
            **now,
            "questions_answering": len(self.scheduler.active_requests),
            "longest_wait_steps": self.scheduler.longest_wait,
        }
        return counted, now

    # In a thread of `prepare_executor`, for each question.

    def prepare(self, question: ServedQuestion) -> LocalQuestion:
        """Return a question with its documents loaded and its prompt as ids."""
        started = time.perf_counter()
        max_positions = count_usable_positions(self.model)
        # Refuse what is far too long before it is tokenized.
        texts = [question.system, question.text, question.answer_prefix]
        for turn in question.turns:
            texts.extend(turn)
        check_size("".join(texts), self.tokenizer, max_positions)
        if question.documents:
            contexts = [self.load_document(document) for document in question.documents]
            joined = compose_documents(contexts)
            context = joined.context
            cache = joined.cache
            prompt = self.encode_question(question, context)
            manifest = joined.manifest
            cost = CacheCost(manifest.pairs_held, manifest.bytes_held, manifest.seconds)
            too_long = DOCUMENTS_TOO_LONG
        else:
            context, prompt = self.encode_plain(question, 0)
            cache = self._get_empty_cache()
            cost = NO_CACHE
            too_long = "The conversation is longer than {}; shorten it."
        # Restore tokens take positions, too. Without a document both numbers are 0.
        positions = max(context.num_tokens, cache.get_seq_length())
        self.limit_answer(question, positions + len(prompt), too_long)
        # One row of the scheduler for every sample.
        sampling = question.sampling
        ids = torch.cat([context.ids[0], prompt])[None]
        seeds = [sampling.seed + number for number in range(sampling.samples)]
        samplers = make_samplers(
            sampling, self.tokenizer, [ids] * len(seeds), seeds, self.stop_ids, always=True
        )
        assert samplers is not None
        return LocalQuestion(
            question=question,
            context=context,
            prompt=prompt,
            samplers=samplers,
            cost=cost,
            started=started,
            cache=cache,
        )

    def _get_empty_cache(self) -> RaggedCache:
        """Return the cache of a context without tokens."""
        # If the first questions come together, one of them makes it.
        with self.empty_cache_lock:
            if self.empty_cache is None:
                self.empty_cache = make_empty_cache(self.model)
            return self.empty_cache

    # In the event loop.

    async def write(self, active: LocalQuestion) -> None:
        """Hand a question to the thread that answers, and wait until it has."""
        self.prepared.put(active)
        await asyncio.wrap_future(active.written)

    # In the thread that answers.

    def _answer_all(self) -> None:
        """Run one step of the scheduler after another, until None is prepared."""
        while self._admit_prepared():
            self.idle.clear()
            started = time.perf_counter()
            try:
                for output in self.scheduler.step():
                    self._deliver(output)
            except Exception as error:  # otherwise its questions would wait forever
                self._give_up(error)
            self._yield_to_compression(time.perf_counter() - started)
        self._give_up(UnavailableError(ENDING))
        self.idle.set()

    def _admit_prepared(self) -> bool:
        """Admit the questions that are prepared; if no other is being answered, wait for one.

        Returns:
            Whether more may come.
        """
        if not self.scheduler.busy:
            self.idle.set()
            active = self.prepared.get()
            # Questions that come together are read together.
            while active is not None:
                self._admit(active)
                try:
                    active = self.prepared.get(timeout=GATHER)
                except queue.Empty:
                    return True
            return False
        while not self.prepared.empty():
            active = self.prepared.get()
            if active is None:
                return False
            self._admit(active)
        return True

    def _admit(self, active: LocalQuestion) -> None:
        """Hand a question to the scheduler."""
        question = active.question

        def is_cancelled() -> bool:
            # The client has disconnected, or the question was answered with an error.
            return question.cancelled or question.done.done()

        self.scheduler.admit(
            Request(
                active.cache,
                active.prompt,
                question.limit,
                active.samplers,
                label=active,
                cancelled=is_cancelled,
            )
        )

    def _deliver(self, output: StepOutput) -> None:
        """Pass a token on; with the last one, the question's task continues."""
        active = output.request.label
        assert isinstance(active, LocalQuestion)
        # The server's shutdown may settle a question before its rows have ended. The scheduler
        # drops it before its next step, and only that frees its slot.
        try:
            if output.error is None and output.token is not None:
                active.pass_token(output.sample, output.token, output.likely)
        except Exception as error:  # such as an event loop that has ended
            active.question.cancelled = True
            settle_future(active.question.done, error=error)
        if output.done:
            settle_future(active.written, error=output.error)

    def _give_up(self, error: Exception) -> None:
        """End all questions with an error."""
        for request in (*self.scheduler.active_requests, *self.scheduler.pending):
            assert isinstance(request.label, LocalQuestion)
            settle_future(request.label.written, error=error)
        self.scheduler = Scheduler(self.model, self.stop_ids)

    def _yield_to_compression(self, seconds: float) -> None:
        """Give a running compression its share of the time, after a step that took `seconds`."""
        if self.job is None:
            self.owed = 0.0
            return
        self.owed += SHARE * seconds
        if self.owed >= SLICE:
            self.idle.set()
            time.sleep(self.owed)
            self.owed = 0.0

    # In the thread that compresses, before each layer of the model.

    def _yield_to_decoding(self, *_: object) -> None:
        """Wait while a token is being written; abort the compression when the server ends."""
        # The hook runs in every pass of the model, but only a compression has to wait.
        if threading.get_ident() != self.compressing_thread:
            return
        if not self.ending:
            self.idle.wait()
        if self.ending:
            raise UnavailableError(ENDING)
