"""The engine in this process: one thread owns the model; questions that arrive together share a batch.

A compression lets waiting questions be answered between its phases. Compressed documents stay in memory, the least
recently used go to disk first, and from there they are loaded, never computed again.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression import generate
from restorekv.compression.answers import Answer, answer_of
from restorekv.compression.chat import conversation_ids
from restorekv.compression.compressor import compress
from restorekv.compression.context import CompressedContext
from restorekv.compression.sampling import Decoding, Row, rows_of
from restorekv.compression.several import compose
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.model.load import model_fingerprint
from restorekv.model.prompt import template_hash
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant

GATHER = 0.004  # seconds in which further questions join a batch


class BusyError(RestoreKVError):
    """Too many requests wait."""


@dataclass
class Question:
    """A request for one answer or several; tokens go to `on_token` as (sample, id), the answers to `done`."""

    documents: Sequence[CompressedContext]
    turns: Sequence[tuple[str, str]]
    text: str
    system: str
    limit: int
    decoding: Decoding
    on_token: Callable[[int, int], None]
    done: Future = field(default_factory=Future)
    cancelled: bool = False


@dataclass(frozen=True)
class Reply:
    """The answers and what they cost: tokens of the question and of the documents, pairs, bytes and seconds."""

    answers: list[Answer]
    read: int
    document_tokens: int
    pairs: int
    bytes: int
    seconds: dict[str, float]


@dataclass
class Asked:
    """A question whose documents are at hand, with a row for each of its answers.

    `first` is when its first token was written, 0 before that.
    """

    question: Question
    context: CompressedContext
    prompt: Tensor
    rows: list[Row]
    started: float
    first: float = 0.0


class Engine:
    """Answers questions about documents, and compresses them. `memory` bounds the bytes of documents held."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, store: Store, memory: int, waiting: int) -> None:
        self.model, self.tokenizer, self.store, self.memory = model, tokenizer, store, memory
        self.held: OrderedDict[str, CompressedContext] = OrderedDict()
        self.questions: queue.Queue[Question | None] = queue.Queue(waiting)
        self.compressions: queue.Queue[tuple[tuple[str, str | Path], Variant, Future]] = queue.Queue()
        self.phase = ("", "")  # the cache that is being made, and what is done for it now
        self.counts = {"questions": 0, "tokens": 0, "compressed": 0, "loaded": 0, "hits": 0}
        self.fingerprint = model_fingerprint(model)
        self.stops = generate.stop_ids(model, tokenizer)
        self.closing, self.lock = False, threading.Lock()
        self.thread = threading.Thread(target=self.work, name="restorekv-engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """Answers what waits and ends."""
        self.closing = True
        self.questions.put(None)
        self.thread.join()

    def ask(self, question: Question) -> Future:
        """Returns the future Reply; raises BusyError where too many questions wait."""
        try:
            self.questions.put_nowait(question)
        except queue.Full:
            raise BusyError("Too many questions wait; ask again in a moment.") from None
        return question.done

    def compress(self, document: tuple[str, str | Path], variant: Variant) -> Future:
        """Loads a document, a SHA-256 and a text or a cache file, or compresses it, in the background.

        The future holds the CompressedContext and whether it was made now.
        """
        future: Future = Future()
        self.compressions.put((document, variant, future))
        with suppress(queue.Full):  # then the thread does not sleep
            self.questions.put_nowait(None)
        return future

    def find(self, sha256: str, variant: Variant) -> CompressedContext | None:
        """Returns a document that is in memory."""
        key = self.key(sha256, variant)
        with self.lock:
            if key not in self.held:
                return None
            self.counts["hits"] += 1
            self.held.move_to_end(key)
            return self.held[key]

    def work(self) -> None:
        """Runs in the thread: questions first, then one compression."""
        while not (self.closing and self.questions.empty()):
            if self.compressions.empty():
                self.answer_waiting(block=True)
            else:
                self.answer_waiting()
            try:
                document, variant, future = self.compressions.get_nowait()
            except queue.Empty:
                continue
            self.settle(future, lambda: self.context(document, variant))  # noqa: B023, run at once

    @staticmethod
    def settle(future: Future, act: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():  # whoever asked has gone
            return
        try:
            future.set_result(act())
        except Exception as error:  # it is the caller's, on another thread
            future.set_exception(error)

    def answer_waiting(self, block: bool = False) -> None:
        """Answers the questions that wait, in batches; with `block`, waits for the first."""
        waiting = [self.questions.get()] if block else []
        if any(waiting):
            time.sleep(GATHER)
        while len(waiting) < generate.BATCH:
            try:
                waiting.append(self.questions.get_nowait())
            except queue.Empty:
                break
        ready = []
        for question in filter(None, waiting):
            if not question.done.set_running_or_notify_cancel():
                continue
            try:
                ready.append(self.prepared(question))
            except Exception as error:  # of this request alone
                question.done.set_exception(error)
        if ready:
            self.answer(ready)

    def prepared(self, question: Question) -> Asked:
        """Returns the question with its documents as one, the ids that the model reads, and seeds for its answers."""
        started, several = time.perf_counter(), len(question.documents) > 1
        whole = compose(question.documents) if several else question.documents[0]
        prompt = conversation_ids(self.tokenizer, whole.context, question.turns, question.text, question.system)
        decoding, read = question.decoding, torch.cat([whole.context.ids[0], prompt])[None]
        seeds = [decoding.seed + number for number in range(decoding.samples)]
        rows = rows_of(decoding, self.tokenizer, [read] * len(seeds), seeds, self.stops, always=True)
        for row in rows:
            row.cancelled = lambda: question.cancelled
        return Asked(question, whole, prompt, rows, started)

    def answer(self, asked: Sequence[Asked]) -> None:
        """Writes the answers of a batch, in which every row has a seed and settings of its own."""
        owners = [(each, sample) for each in asked for sample in range(len(each.rows))]
        rows = [row for each in asked for row in each.rows]
        caches, prompts = [each.context.cache for each, _ in owners], [each.prompt for each, _ in owners]
        limits = [each.question.limit for each, _ in owners]
        try:
            for place, token in generate.tokens(self.model, self.tokenizer, caches, prompts, limits, rows=rows):
                each, sample = owners[place]
                each.first = each.first or time.perf_counter()
                each.question.on_token(sample, token)
        except Exception as error:  # such as memory that ran out: nobody waits in vain
            for each in asked:
                each.question.done.set_exception(error)
            return
        for each in asked:
            self.reply(each)

    def reply(self, asked: Asked) -> None:
        manifest, read, now = asked.context.manifest, len(asked.prompt), time.perf_counter()
        answers = [answer_of(self.tokenizer, row.answer, self.stops, read, row) for row in asked.rows]
        self.counts["questions"] += 1
        self.counts["tokens"] += sum(len(answer.ids) for answer in answers)
        seconds = {"first": (asked.first or now) - asked.started, "total": now - asked.started, **manifest.seconds}
        held = asked.context.context.positions, manifest.pairs_held, manifest.bytes_held
        asked.question.done.set_result(Reply(answers, read, *held, seconds))

    def context(self, document: tuple[str, str | Path], variant: Variant) -> tuple[CompressedContext, bool]:
        """Returns a compressed document from memory, from disk or made now, and whether it was made now."""
        sha256, text = document
        if held := self.find(sha256, variant):
            return held, False
        key = self.key(sha256, variant)
        loaded = self.loaded(key)
        fresh = loaded is None
        if fresh:
            loaded = self.made(text, variant, key)
            with self.store.writing(key, sha256) as path:
                loaded.save(path)
        self.hold(key, loaded)
        return loaded, fresh

    def key(self, sha256: str, variant: Variant) -> str:
        """Returns the name of a cache: 32 hex digits of all that decides it."""
        made_of = sha256, variant.name, self.fingerprint, str(self.model.dtype), template_hash(self.tokenizer)
        return hashlib.sha256(" ".join(made_of).encode()).hexdigest()[:32]

    def loaded(self, key: str) -> CompressedContext | None:
        """Returns a cache from the disk; a damaged one is set aside."""
        path = self.store.find(key)
        if path is None:
            return None
        try:
            context = CompressedContext.load(path, self.model, self.tokenizer)
        except CacheFileError as error:
            self.store.set_aside(key, error)
            return None
        self.counts["loaded"] += 1
        return context

    def made(self, text: str | Path, variant: Variant, key: str) -> CompressedContext:
        """Compresses a text, between whose phases waiting questions are answered; loads a cache file from a path."""
        if isinstance(text, Path):
            return CompressedContext.load(text, self.model, self.tokenizer)

        def on_phase(name: str) -> None:
            self.phase = key, name
            self.answer_waiting()

        try:
            made = compress(self.model, self.tokenizer, text, progress=on_phase, **variant.options)
        finally:
            self.phase = "", ""
        self.counts["compressed"] += 1
        return made

    def hold(self, key: str, context: CompressedContext) -> None:
        """Keeps a context in memory; those used least recently go, but never this one."""
        with self.lock:
            self.held[key] = context
            while len(self.held) > 1 and self.bytes_held > self.memory:
                self.held.popitem(last=False)

    @property
    def bytes_held(self) -> int:
        """Bytes of all documents in memory."""
        return sum(each.manifest.bytes_held for each in list(self.held.values()))
