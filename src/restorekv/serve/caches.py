"""Engines that have their documents in memory and on disk, and the steps from a question to its
reply.

One thread compresses. The documents used least recently leave memory first; when they are needed
again, they are loaded from disk and not computed again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.config import CompressionConfig
from restorekv.compression.prepared_cache import PreparedContextCache
from restorekv.context import CompressedContext
from restorekv.errors import CacheFileError, OptionError, RestoreKVError, TextTooLongError
from restorekv.generation import decoding
from restorekv.generation.answers import Answer, make_answer
from restorekv.generation.chat import encode_conversation
from restorekv.generation.sampling import TokenSampler
from restorekv.model.position_limits import count_usable_positions
from restorekv.model.prompt import Context, encode_plain_chat, encode_whole_prompt
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from restorekv.serve.cache_origin import CacheOrigin
from restorekv.serve.document_checks import check_size, explain_length
from restorekv.serve.engine import (
    ENDING,
    READY,
    WAITING,
    CacheState,
    Content,
    DeletedError,
    Engine,
    Reply,
    ServedDocument,
    ServedQuestion,
    UnavailableError,
    find_resource_shortage,
    settle_future,
)
from restorekv.serve.store import Store
from restorekv.serve.survivors import describe_survivors
from restorekv.serve.variants import Variant

# Seconds that the shutdown waits for a thread. Files are written whole or not at all, so nothing
# half-written stays.
SHUTDOWN_SECONDS = 0.5
# The error of a question about documents; {} is the model's positions.
DOCUMENTS_TOO_LONG = "Documents and question are longer than {}; shorten them."


@dataclass(frozen=True)
class CacheCost:
    """What the caches of a question's documents hold, and the seconds that making them took."""

    pairs: int
    bytes: int
    seconds: Mapping[str, float]


NO_CACHE = CacheCost(0, 0, {})  # of a conversation without a document


@dataclass
class CompressionJob:
    """A document that is being compressed.

    Args:
        sha256: The hash of its content.
        key: The key of the cache that is being made.
        state: How far the cache is.
        is_abandoned: Whether the document was deleted meanwhile.
    """

    sha256: str
    key: str
    state: CacheState = WAITING
    is_abandoned: bool = False


@dataclass(kw_only=True)
class ActiveQuestion:
    """A question that is ready to be answered.

    Args:
        question: What was asked.
        context: The ids of its documents.
        prompt: The ids (q,) that the model reads after them.
        samplers: What chooses each answer's tokens, and collects them.
        cost: What the documents' caches cost.
        started: When it was begun, on `time.perf_counter`.
        first: When its first token was written; 0 before that.
        computed: Tokens of the documents that came from no cache.
    """

    question: ServedQuestion
    context: Context
    prompt: Tensor
    samplers: list[TokenSampler]
    cost: CacheCost
    started: float
    first: float = 0.0
    computed: int = 0

    def pass_token(self, sample: int, token: int, likely: Sequence[tuple]) -> None:
        """Hand a token to the caller that waits for the answer."""
        if not self.first:
            self.first = time.perf_counter()
        self.question.started = True
        self.question.on_token(sample, token, *likely)


Active = TypeVar("Active", bound=ActiveQuestion)


class CacheEngine(Engine, Generic[Active]):
    """An engine that has documents in memory, up to `memory` bytes, and on disk in a store.

    `compress_settings` are fields of `CompressionConfig` that are not the defaults, and `adapter`
    restores documents; caches that differ in them have different keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        store: Store,
        memory: int,
        max_waiting: int | None,
        compress_settings: Mapping[str, Any] | None = None,
        adapter: RestoreAdapter | str | None = "auto",
    ) -> None:
        super().__init__(max_waiting)
        self.compress_settings = compress_settings or {}
        self.adapter = adapter
        self.model = model
        self.tokenizer = tokenizer
        self.store = store
        self.memory = memory
        self.stop_ids = decoding.get_stop_ids(model, tokenizer)
        self.origin = CacheOrigin.describe(model, tokenizer, self.compress_settings, adapter)
        # Caches in memory by document hash and key, the least recently used ones first.
        self.held: OrderedDict[tuple[str, str], CompressedContext] = OrderedDict()
        self.lock = threading.Lock()  # of `held`
        # The full cache of the last document, while memory has room for it in addition to the
        # documents: the page compares three caches of one document, which is then read only once.
        self.prepared_cache = PreparedContextCache(memory)
        self.loading_lock = threading.Lock()  # while a cache is read from disk
        store.on_delete = self.forget_document
        # The job of the thread that compresses. Other threads read it, and mark it as abandoned.
        self.job: CompressionJob | None = None
        self.counts = {"questions": 0, "tokens": 0, "compressed": 0, "loaded": 0, "hits": 0}
        self.compress_executor = ThreadPoolExecutor(
            1, "restorekv-compress", initializer=self._note_compressing_thread
        )
        self.compressing_thread = 0  # its ident, once it runs
        # The threads that prepare questions; None is the event loop's own.
        self.prepare_executor: ThreadPoolExecutor | None = None

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        """Refuse options of the engine that cannot work, before a model is loaded."""
        if options:
            raise RestoreKVError(
                "--vllm-url, --vllm-store, --vllm-options, --vllm-documents and --documents-memory "
                "are for --engine vllm; add it or leave them out."
            )

    def close(self) -> None:
        """Shut down; documents that wait to be compressed get an UnavailableError."""
        self.stop_asking()
        # One thread works the queue off in order, so a job that does nothing ends after all others.
        wait([self.compress_executor.submit(lambda: None)], timeout=SHUTDOWN_SECONDS)
        self.compress_executor.shutdown(wait=False)

    # Questions: each is prepared in a thread, written by the engine, and settled with a reply.

    async def answer(self, question: ServedQuestion) -> None:
        """Prepare a question, have its answers written, and settle it with the reply."""
        try:
            async with self.acquire_slot(question):
                # The client may have left, or the server's shutdown may have settled the question.
                # From here on `done` cannot be cancelled; `cancelled` says whether the client has
                # left.
                if question.done.done() or not question.done.set_running_or_notify_cancel():
                    return
                if self.ending:
                    raise UnavailableError(ENDING)
                loop = asyncio.get_running_loop()
                # Loading a cache and tokenizing take long enough to hold up other requests.
                active = await loop.run_in_executor(self.prepare_executor, self.prepare, question)
                await self.write(active)
                if not question.done.done():  # the server's shutdown may have come first
                    settle_future(question.done, self.make_reply(active))
        except Exception as error:  # it is this question's alone
            settle_future(question.done, error=error)

    def encode_plain(self, question: ServedQuestion, first: int) -> tuple[Context, Tensor]:
        """Return a conversation without a document, or a prompt, cut in two after its first tokens.

        Args:
            question: What is asked.
            first: Number of tokens that count as the context; -k leaves the last k to the prompt.

        Returns:
            A context, and the ids (q,) that follow it.
        """
        if question.prompt:
            ids = torch.tensor(self._encode_prompt(question.prompt), dtype=torch.long)
        else:
            ids = encode_plain_chat(
                self.tokenizer,
                question.turns,
                question.text,
                question.system,
                question.answer_prefix,
            )
        nothing = torch.empty(1, 0, dtype=torch.long)
        context = Context(ids[None, :first], prefix_length=0, suffix_ids=nothing)
        return context, ids[first:]

    def encode_question(self, question: ServedQuestion, context: Context) -> Tensor:
        """Return the ids (q,) that follow the documents, including a given start of the answer."""
        return encode_conversation(
            self.tokenizer,
            context,
            question.turns,
            question.text,
            question.system,
            question.answer_prefix,
        )

    def _encode_prompt(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Return the ids of a prompt without a chat template; refuse what the model cannot read."""
        max_tokens = count_usable_positions(self.model)
        if isinstance(prompt, str):
            check_size(prompt, self.tokenizer, max_tokens)
            ids = encode_whole_prompt(self.tokenizer, prompt)
        elif all(0 <= token < len(self.tokenizer) for token in prompt):
            ids = prompt
        else:
            raise OptionError(
                f"The ids of a prompt must be from 0 to {len(self.tokenizer) - 1}; send a text.",
                "prompt",
            )
        if len(ids) >= max_tokens:
            raise TextTooLongError(
                f"The prompt has {len(ids):,} tokens, and the model {max_tokens:,} positions for "
                "prompt and answer; shorten it."
            )
        return ids

    def limit_answer(self, question: ServedQuestion, positions: int, too_long: str) -> None:
        """Shorten a question's answers to the positions that the model has left.

        Args:
            question: The question; its `limit` may become smaller.
            positions: The positions of its documents, restore tokens included, and its prompt.
            too_long: The sentence if none are left; {} in it is the model's positions.

        Raises:
            TextTooLongError: None are left.
        """
        max_positions = count_usable_positions(self.model)
        if positions >= max_positions:
            raise TextTooLongError(too_long.format(f"the model's {max_positions:,} positions"))
        question.limit = min(question.limit, max_positions - positions)

    def acquire_slot(self, question: ServedQuestion) -> AbstractAsyncContextManager[None]:
        """Wait until a question may be prepared and answered; an engine may bound how many are."""
        return nullcontext()

    @abstractmethod
    def prepare(self, question: ServedQuestion) -> Active:
        """Return a question with its documents loaded and its prompt as ids; runs in a thread."""

    @abstractmethod
    async def write(self, active: Active) -> None:
        """Write the answers into the samplers, until all have ended or the client has left."""

    def make_reply(self, active: ActiveQuestion) -> Reply:
        """Return the reply to a question, and count it."""
        read = len(active.prompt)
        answers = []
        for sampler in active.samplers:
            if sampler.answer:
                answer = make_answer(
                    self.tokenizer,
                    sampler.answer,
                    self.stop_ids,
                    read,
                    sampler,
                    active.question.continues_text,
                )
                answers.append(answer)
            else:
                # The client left before this sample's first token.
                answers.append(Answer("", (), "stop", read))
        self.counts["questions"] += 1
        self.counts["tokens"] += sum(len(answer.ids) for answer in answers)
        seconds = {"total": time.perf_counter() - active.started, **active.cost.seconds}
        # 0 if the client left before the first token.
        if active.first:
            seconds["first"] = active.first - active.started
        return Reply(
            answers=answers,
            read=read,
            document_tokens=active.context.num_tokens,
            pairs=active.cost.pairs,
            bytes=active.cost.bytes,
            seconds=seconds,
            computed=active.computed,
        )

    # Documents: from memory, from disk, from the shared folder, or compressed.

    def make_key(self, sha256: str, variant: Variant) -> str:
        return self.origin.make_key(sha256, variant)

    def has_method(self, name: str) -> bool:
        return self.origin.has_method(name)

    async def get_document(self, sha256: str, variant: Variant, content: Content) -> ServedDocument:
        """Return a document from memory or disk, else have it compressed."""
        # A document that is already there skips the queue of documents to compress.
        document = await self.find_document(sha256, variant)
        if document is None:
            making = self.compress_executor.submit(self.make_document, sha256, variant, content)
            document = await asyncio.wrap_future(making)
        return document

    async def find_document(self, sha256: str, variant: Variant) -> ServedDocument | None:
        """Return a document that is in memory, on disk or in the shared folder."""
        key = self.make_key(sha256, variant)
        compressed = self._find_in_memory(sha256, key)
        if compressed:
            self.counts["hits"] += 1
        else:
            compressed = await asyncio.to_thread(self.load_cache, key, sha256)
        if compressed is None:
            return None
        return ServedDocument(sha256, variant, compressed.context.num_tokens, fresh=False)

    def make_document(self, sha256: str, variant: Variant, content: Content) -> ServedDocument:
        """Return a document; compress it unless its cache has appeared in the meantime.

        Runs in the thread that compresses.
        """
        if self.ending:
            raise UnavailableError(ENDING)
        # Two requests for one new document queue twice; the second finds what the first made.
        key = self.make_key(sha256, variant)
        compressed = self.load_cache(key, sha256)
        fresh = compressed is None
        if compressed is None:
            # Notice a disk that takes nothing before minutes of work, not after.
            self.store.check_writable()
            self.job = CompressionJob(sha256, key)
            try:
                compressed = self.make_cache(content(), variant, self.job)
            finally:
                self.job = None
            with self.store.write_cache_file(key, sha256) as path:
                compressed.save(path)
            self._hold(sha256, key, compressed)
        return ServedDocument(sha256, variant, compressed.context.num_tokens, fresh)

    def make_cache(
        self, content: str | Path, variant: Variant, job: CompressionJob
    ) -> CompressedContext:
        """Compress a text, or load the cache file if the content is a path."""
        if isinstance(content, Path):
            return CompressedContext.load(content, self.model, self.tokenizer)
        # Checked by its characters first, so that a huge text is never tokenized.
        check_size(content, self.tokenizer, count_usable_positions(self.model))

        def note_progress(phase: str, share: float) -> None:
            job.state = CacheState(phase, share)
            if job.is_abandoned:
                raise DeletedError

        self.prepared_cache.max_bytes = self.memory - self.bytes_held
        with explain_length():
            compressed = compress(
                self.model,
                self.tokenizer,
                content,
                progress=note_progress,
                prepared_cache=self.prepared_cache,
                config=CompressionConfig(**self.compress_settings),
                **variant.make_options(self.adapter),
            )
        self.counts["compressed"] += 1
        return compressed

    def load_document(self, document: ServedDocument) -> CompressedContext:
        """Return a document's cache, which is loaded again if it has left memory."""
        key = self.make_key(document.sha256, document.variant)
        compressed = self.load_cache(key, document.sha256)
        if compressed is None:
            raise UnavailableError(
                "A document was dropped while the question waited; ask again. If it happens often, "
                "give the server more memory or disk for documents."
            )
        return compressed

    def load_cache(self, key: str, sha256: str) -> CompressedContext | None:
        """Return a cache from memory, from disk or from the shared folder, if it is there."""
        # First without the lock, so as not to wait for what another thread loads.
        compressed = self._find_in_memory(sha256, key)
        if compressed:
            # What is asked from memory is in use on disk, too: files leave in the same order.
            self.store.note_use(key)
            return compressed
        while True:
            with self.loading_lock:
                # If two threads want one cache, the second finds it in memory.
                compressed = self._find_in_memory(sha256, key) or self._read_from_disk(key, sha256)
            if compressed:
                return compressed
            # Fetching may take long, so it happens outside the lock. A fetched file may be
            # damaged: then it is set aside, and the next fetch finds none.
            if not self.store.fetch_if_missing(key, sha256):
                return None

    def write_held_cache(self, sha256: str, variant: Variant) -> None:
        key = self.make_key(sha256, variant)
        compressed = self._find_in_memory(sha256, key)
        if compressed and not self.store.has_cache(key):
            with self.store.write_cache_file(key, sha256) as path:
                compressed.save(path)

    def forget_document(self, sha256: str) -> None:
        """Take a deleted document out of memory.

        If it is being compressed, that ends at the next report of progress. Questions that are
        being answered keep it until they end.
        """
        self.prepared_cache.clear()
        job = self.job  # which may end meanwhile
        if job and job.sha256 == sha256:
            job.is_abandoned = True
        with self.lock:
            for held_key in list(self.held):
                if held_key[0] == sha256:
                    del self.held[held_key]

    def get_state(self, sha256: str, variant: Variant) -> CacheState:
        key = self.make_key(sha256, variant)
        job = self.job
        if job and job.key == key:
            return job.state
        # Without the lock: the answer may be old by the time it arrives anyway.
        is_here = (sha256, key) in self.held or self.store.has_cache(key)
        return READY if is_here else WAITING

    async def find_survivors(
        self, document: ServedDocument, layer: int | None, head: int | None
    ) -> dict:

        def describe() -> dict:
            return describe_survivors(self.load_document(document), layer, head)

        return await asyncio.to_thread(describe)

    def collect_metrics(self) -> tuple[dict[str, int], dict[str, int]]:
        waiting = self.count_waiting()
        now = {
            "documents_held": len(self.held),
            "bytes_held": self.bytes_held,
            "bytes_prepared": self.prepared_cache.bytes_held,
            "questions_waiting": waiting,
            "questions_answering": len(self.tasks) - waiting,
        }
        return self.counts, now

    @property
    def bytes_held(self) -> int:
        """Bytes of all documents in memory."""
        # A copy, because another thread may hold or drop a document meanwhile.
        return sum(compressed.manifest.bytes_held for compressed in list(self.held.values()))

    def _note_compressing_thread(self) -> None:
        self.compressing_thread = threading.get_ident()

    def _find_in_memory(self, sha256: str, key: str) -> CompressedContext | None:
        held_key = (sha256, key)
        with self.lock:
            if held_key not in self.held:
                return None
            self.held.move_to_end(held_key)
            return self.held[held_key]

    def _read_from_disk(self, key: str, sha256: str) -> CompressedContext | None:
        """Return a cache from disk; if it is damaged, set it aside and return None."""
        path = self.store.find_cache_file(key)
        if path is None:
            return None
        try:
            compressed = CompressedContext.load(path, self.model, self.tokenizer)
        except CacheFileError as error:
            if find_resource_shortage(error):  # the file may be sound
                raise
            self.store.quarantine_cache(key, sha256)
            return None
        self.store.mark_verified(key)
        self.counts["loaded"] += 1
        self._hold(sha256, key, compressed)
        return compressed

    def _hold(self, sha256: str, key: str, compressed: CompressedContext) -> None:
        """Keep a cache in memory; those used least recently go, but never this one."""
        with self.lock:
            self.held[sha256, key] = compressed
            if self.bytes_held + self.prepared_cache.bytes_held > self.memory:
                self.prepared_cache.clear()
            # Oldest first: `_find_in_memory` moves what is used to the end.
            while len(self.held) > 1 and self.bytes_held > self.memory:
                self.held.popitem(last=False)
