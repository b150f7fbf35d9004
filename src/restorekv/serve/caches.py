"""Compressed documents in memory and on disk: the half that the engines of one machine share.

A thread of its own compresses. Those documents that were used least recently leave memory first;
they are loaded from disk again, never computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.config import CompressionConfig
from restorekv.context import CompressedContext
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.generation import generate
from restorekv.generation.answers import Answer, answer_of
from restorekv.generation.sampling import Row
from restorekv.model.identity import identify_model
from restorekv.model.prompt import count_usable_positions
from restorekv.pipeline import compress
from restorekv.serve import kept
from restorekv.serve.documents import check_size, told_to_clients
from restorekv.serve.engine import (
    ENDING,
    AwayError,
    Content,
    Document,
    Question,
    Reply,
    passing,
    settle,
)
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant

# Seconds for which the end waits for a thread; what is written is written whole, or not at all.
JOIN = 0.5


@dataclass(kw_only=True)
class Asked:
    """A question that is being answered: the ids that the model reads behind its documents, and a
    row for each answer.

    `started` and `first` are when it was begun and when its first token was written, 0 before that.
    """

    question: Question
    prompt: Tensor
    rows: list[Row]
    started: float
    first: float = 0.0


def key_of(sha256: str, variant: Variant, made_with: Sequence[str]) -> str:
    """Returns the name of a cache: 32 hex digits of the document, the variant and what it is made
    with.
    """
    # Not joined, so that no part can reach into the next.
    parts = json.dumps([sha256, variant.name, *made_with])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


class Caches:
    """Holds documents in memory up to `memory` bytes, and on disk in a store.

    `more` are fields of `CompressionConfig` beyond a variant's own; caches that differ in them have other
    keys.
    """

    more: ClassVar[Mapping[str, Any]] = {}
    farewell = 0.0

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, store: Store, memory: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.store = store
        self.memory = memory
        self.stops = generate.stop_ids(model, tokenizer)
        # By document and key.
        self.held: OrderedDict[tuple[str, str], CompressedContext] = OrderedDict()
        store.on_delete = self.forget
        # The key of the cache that is being made, and what is done for it now.
        self.making = ("", "")
        self.counts = {"questions": 0, "tokens": 0, "compressed": 0, "loaded": 0, "hits": 0}
        more = (f"{name}={value}" for name, value in self.more.items())
        identity = identify_model(model, tokenizer)
        self.made_with = identity.fingerprint, str(model.dtype), identity.template, *more
        self.lock = threading.Lock()
        self.loading = threading.Lock()
        self.orders: queue.Queue[tuple[str, Variant, Content, Future] | None] = queue.Queue()
        self.ending = False
        self.compressing = threading.Thread(
            target=self.work, name="restorekv-compress", daemon=True
        )

    @staticmethod
    def check(**options: object) -> None:
        """Refuses options of the engine that cannot work, before a model is loaded."""
        if options:
            raise RestoreKVError(
                "--vllm-url, --vllm-store and --vllm-options are for --engine vllm; add it or leave them out."
            )

    def start(self) -> None:
        self.compressing.start()

    def end(self) -> None:
        """See `Engine`."""
        self.ending = True

    def close(self) -> None:
        """Ends; what is still ordered is refused."""
        self.end()
        self.orders.put(None)
        self.compressing.join(JOIN)

    def key(self, sha256: str, variant: Variant) -> str:
        """See `Engine`."""
        return key_of(sha256, variant, self.made_with)

    async def document(self, sha256: str, variant: Variant, content: Content) -> Document:
        """Returns a document from memory or disk at once, or from the thread that compresses."""
        if held := await self.stored(sha256, variant):
            return held
        done: Future = Future()
        self.orders.put((sha256, variant, content, done))
        return await asyncio.wrap_future(done)

    async def stored(self, sha256: str, variant: Variant) -> Document | None:
        """Returns a document from memory or disk, if it is there."""
        key = self.key(sha256, variant)
        if context := self.find(sha256, key):
            self.counts["hits"] += 1
        else:
            context = await asyncio.to_thread(self.loaded, key, sha256)
        return context and Document(sha256, variant, context.context.positions, False)

    def context(self, document: Document) -> CompressedContext:
        """Returns a document's cache, which is loaded again if it has left memory."""
        context = self.loaded(self.key(document.sha256, document.variant), document.sha256)
        if context is None:
            raise AwayError("A document has gone while the question waited; ask again.")
        return context

    def find(self, sha256: str, key: str) -> CompressedContext | None:
        """Returns a document that is in memory."""
        place = sha256, key
        with self.lock:
            if place not in self.held:
                return None
            self.held.move_to_end(place)
            return self.held[place]

    def forget(self, sha256: str) -> None:
        """Takes a document that was deleted out of memory; a question that is being answered keeps
        it till its end.
        """
        with self.lock:
            for place in [each for each in self.held if each[0] == sha256]:
                del self.held[place]

    def work(self) -> None:
        """Runs in the thread: one order after the other."""
        while order := self.orders.get():
            *wanted, done = order
            if done.set_running_or_notify_cancel():  # else whoever asked has gone
                try:
                    if self.ending:
                        raise AwayError(ENDING)
                    settle(done, self.fetch(*wanted))
                except Exception as error:  # it is the caller's, on another thread
                    settle(done, error=error)

    def fetch(self, sha256: str, variant: Variant, content: Content) -> Document:
        """Returns a document from memory, from disk or made now."""
        key = self.key(sha256, variant)
        context = self.loaded(key, sha256)
        fresh = context is None
        if fresh:
            self.store.check_writable()
            context = self.made(content(), variant, key)
            with self.store.writing(key, sha256) as path:
                context.save(path)
            self.hold(sha256, key, context)
        return Document(sha256, variant, context.context.positions, fresh)

    def loaded(self, key: str, sha256: str) -> CompressedContext | None:
        """Returns a cache from memory, from disk or from the shared folder; damaged ones are set
        aside.
        """
        if context := self.find(sha256, key):  # without waiting for what another thread loads
            return context
        while True:
            with self.loading:  # a second thread finds it in memory
                if context := self.find(sha256, key) or self.from_disk(key, sha256):
                    return context
            # Which may take long, and others need not wait for it.
            if not self.store.fetch(key, sha256):
                return None

    def from_disk(self, key: str, sha256: str) -> CompressedContext | None:
        """Returns a cache from disk, unless it is damaged."""
        if (path := self.store.here(key)) is None:
            return None
        try:
            context = CompressedContext.load(path, self.model, self.tokenizer)
        except CacheFileError as error:
            if passing(error):
                raise
            self.store.set_aside(key, sha256)
            return None
        self.store.fetched.discard(key)
        self.counts["loaded"] += 1
        self.hold(sha256, key, context)
        return context

    def made(self, content: str | Path, variant: Variant, key: str) -> CompressedContext:
        """Compresses a text; loads a cache file from a path."""
        if isinstance(content, Path):
            return CompressedContext.load(content, self.model, self.tokenizer)
        check_size(content, self.tokenizer, count_usable_positions(self.model))
        try:
            with told_to_clients():
                made = compress(
                    self.model,
                    self.tokenizer,
                    content,
                    config=CompressionConfig(**variant.settings, **self.more),
                    progress=lambda name: self.on_phase(key, name),
                    **variant.options,
                )
        finally:
            self.on_phase("", "")
        self.counts["compressed"] += 1
        return made

    def on_phase(self, key: str, name: str) -> None:
        self.making = key, name

    def hold(self, sha256: str, key: str, context: CompressedContext) -> None:
        """Keeps a context in memory; those used least recently go, but never this one."""
        with self.lock:
            self.held[sha256, key] = context
            while len(self.held) > 1 and self.bytes_held > self.memory:
                self.held.popitem(last=False)

    @property
    def bytes_held(self) -> int:
        """Bytes of all documents in memory."""
        return sum(each.manifest.bytes_held for each in list(self.held.values()))

    def phase(self, sha256: str, variant: Variant) -> str:
        """See `Engine`."""
        key, (making, now) = self.key(sha256, variant), self.making
        if making == key:
            return now
        return "ready" if (sha256, key) in self.held or self.store.has(key) else "waiting"

    async def kept(self, document: Document, layer: int | None, head: int | None) -> dict:
        """See `Engine`."""
        return await asyncio.to_thread(lambda: kept.shares(self.context(document), layer, head))

    def replied(
        self,
        asked: Asked,
        tokens: int,
        pairs: int,
        size: int,
        seconds: Mapping[str, float],
        computed: int = 0,
    ) -> Reply:
        """Returns what was written about documents of so many tokens, pairs and bytes, and counts
        it.
        """
        read = len(asked.prompt)
        now = time.perf_counter()
        answers = [
            answer_of(self.tokenizer, row.answer, self.stops, read, row)
            if row.answer
            else Answer("", (), "stop", read)
            for row in asked.rows
        ]
        self.counts["questions"] += 1
        self.counts["tokens"] += sum(len(answer.ids) for answer in answers)
        taken = {"first": asked.first - asked.started, "total": now - asked.started, **seconds}
        return Reply(answers, read, tokens, pairs, size, taken, computed)

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Engine`."""
        return self.counts, {"documents_held": len(self.held), "bytes_held": self.bytes_held}
