"""What the server expects of an engine, and what all engines share: a bounded number of questions.

An engine gives documents and answers questions about them. `embedded.py` is the library in this
process, `vllm_engine.py` has vLLM answer, and `ray/engine.py` sends everything to replicas. A new
engine is one file, and one line in run.py.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.generation.answers import Answer
from restorekv.generation.sampling import SamplingConfig
from restorekv.model.prompt import Context
from restorekv.serve.variants import Variant

# Errors of an operating system that lacks something now and may have it again later.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
READ_ONLY = {errno.EROFS, errno.EACCES}  # the disk, or only the folder
OTHER_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EAGAIN}
SHORTAGES = DISK_FULL | READ_ONLY | OTHER_SHORTAGES

ENDING = "The server is shutting down; retry when it is back."

ResourceShortage = OSError | MemoryError | sqlite3.OperationalError


class CacheState(NamedTuple):
    """How far a document's cache is: "waiting", a phase of `compress`, or "ready", and the share
    of the compression that is done.
    """

    phase: str
    share: float


WAITING = CacheState("waiting", 0.0)
READY = CacheState("ready", 1.0)

# Returns a text, or the path of a cache file. It is called only if the content is needed.
Content = Callable[[], str | Path]


class BusyError(RestoreKVError):
    """Too many requests are waiting."""

    # It takes the message as an argument because unpickling an error passes its arguments again.
    def __init__(self, message: str = "Too many questions are waiting; retry in a moment.") -> None:
        super().__init__(message)


class UnavailableError(RestoreKVError):
    """Something that the engine needs does not answer; nothing was wrong with the request."""


class DeletedError(RestoreKVError):
    """A document was deleted while it was compressed."""

    def __init__(self, message: str = "The file was deleted while it was compressed.") -> None:
        super().__init__(message)


def find_resource_shortage(error: BaseException | None) -> ResourceShortage | None:
    """Return the error in a chain of causes that comes from a lack of memory, disk space or the
    like; None if there is none.
    """
    while error is not None:
        if isinstance(error, MemoryError | sqlite3.OperationalError):
            return error
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return error
        error = error.__cause__ or error.__context__
    return None


def explain_resource_shortage(
    error: BaseException, subject: str = "The server", again: str = "try again"
) -> tuple[int, str] | None:
    """Return an HTTP status and a sentence if the machine lacked something, else None.

    `subject` begins the sentence, and `again` says what to do when there is room.
    """
    shortage = find_resource_shortage(error)
    if shortage is None:
        return None
    # The higher bits of SQLite's code say what it was doing.
    code = getattr(shortage, "sqlite_errorcode", 0) & 0xFF
    number = getattr(shortage, "errno", None)
    why = getattr(shortage, "strerror", None) or str(shortage) or "no memory"
    if number in READ_ONLY or code == sqlite3.SQLITE_READONLY:
        return (
            507,
            f"{subject} cannot write to its disk ({why}); its operator has to make the store "
            "writable.",
        )
    is_temporary = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
    if number in DISK_FULL or (isinstance(shortage, sqlite3.OperationalError) and not is_temporary):
        return (
            507,
            f"{subject} has no room for this on its disk ({why}); delete files, then {again}.",
        )
    return 503, f"{subject} cannot do this now ({why}); ask again in a moment."


@dataclass(frozen=True)
class ServedDocument:
    """A document that questions can be about.

    Args:
        sha256: The hash of its content.
        variant: How it is held.
        tokens: Its length.
        fresh: Whether it was compressed for this request.
        context: Its ids, if the engine reads the whole text itself.
        content: A function that returns its content, if the engine may have to send it again.
    """

    sha256: str
    variant: Variant
    tokens: int
    fresh: bool
    context: Context | None = None
    content: Content | None = field(default=None, compare=False)


@dataclass(eq=False)
class ServedQuestion:
    """A question to an engine, for one answer or several.

    Args:
        documents: What it is about. An engine that has to compress one of them again puts the new
            one into this list, so that the usage counts it.
        turns: Earlier questions with their answers.
        text: The question.
        system: The system message, or "".
        answer_prefix: The beginning of the answer, which the client has and the model continues.
        limit: How many tokens an answer may have.
        sampling: How the answers are written.
        on_token: Called with (sample, id, *TokenSampler.latest_logprobs) for every token, from any
            thread.
        done: The `Reply`, or an error.
        started: Whether it no longer waits: in the library's engine since it got its slot; with
            vLLM or replicas, which schedule questions themselves, since its first token.
        cancelled: Whether the client has disconnected.
        prompt: A text or token ids that the model reads instead of documents, turns, text and
            system. The answer then keeps any space that it begins with.
        has_seed: Whether the client gave the seed of `sampling`, which is random otherwise.
    """

    documents: list[ServedDocument]
    turns: Sequence[tuple[str, str]]
    text: str
    system: str
    limit: int
    sampling: SamplingConfig
    on_token: Callable[..., object] = lambda *_: None
    done: Future[Reply] = field(default_factory=Future)
    started: bool = False
    cancelled: bool = False
    prompt: str | Sequence[int] = ""
    answer_prefix: str = ""
    has_seed: bool = False

    @property
    def continues_text(self) -> bool:
        """Whether the answer continues a text, so that a space at its start belongs to it."""
        return bool(self.prompt or self.answer_prefix)


@dataclass(frozen=True)
class Reply:
    """The answers to a question, and what they cost.

    Args:
        answers: One for each sample.
        read: Tokens of the question.
        document_tokens: Tokens of the documents.
        pairs: KV pairs of the documents' caches.
        bytes: Their size.
        seconds: By phase.
        computed: Tokens of the documents that came from no cache.
    """

    answers: list[Answer]
    read: int
    document_tokens: int
    pairs: int
    bytes: int
    seconds: dict[str, float]
    computed: int = 0


class Engine(ABC):
    """Base class of engines, which answer questions about documents.

    Unless a method says otherwise, the server calls it in the thread of its event loop.

    A question goes through these steps, and at each of the first two it may have to wait:

    1. `ask` refuses it if `max_waiting` questions wait already, and makes it a task of the event
       loop.
    2. The task waits for a slot: in the library's engine at a semaphore (`acquire_slot`), elsewhere
       inside vLLM or Ray, which schedule what they get.
    3. It is prepared in a thread, which may load documents from disk.
    4. It is written. In the library's engine a queue leads to the thread that runs the scheduler,
       which gives the question rows at its next step: there are no more questions than slots, so
       this takes no longer than other questions' fair share.
    5. Its future `done` gets the `Reply`.

    Args:
        max_waiting: How many questions may wait; more are refused. None means no limit.
    """

    tokenizer: Tokenizer
    stop_ids: set[int]  # ids that end an answer
    # Seconds that the engine needs to shut down after all requests have ended, if that is more than
    # a moment.
    shutdown_grace: float = 0.0

    def __init__(self, max_waiting: int | None) -> None:
        self.max_waiting = max_waiting
        self.tasks: dict[asyncio.Task, ServedQuestion] = {}  # questions that are not answered yet
        self.ending = False

    def ask(self, question: ServedQuestion) -> Future[Reply]:
        """Begin to answer a question; return the future `Reply`.

        Raises:
            BusyError: Too many questions wait.
            UnavailableError: The server ends.
        """
        if self.ending:
            raise UnavailableError(ENDING)
        if self.max_waiting is not None and self.count_waiting() >= self.max_waiting:
            raise BusyError
        task = asyncio.get_running_loop().create_task(self.answer(question))
        self.tasks[task] = question
        task.add_done_callback(self.tasks.pop)
        return question.done

    def count_waiting(self) -> int:
        """Return how many questions wait. Those that are being answered do not, nor do those whose
        client has disconnected.
        """
        return sum(not (question.started or question.cancelled) for question in self.tasks.values())

    def wait_for_tasks(self, seconds: float) -> None:
        """Block until no question is being answered, for at most `seconds`.

        Never call this in the event loop, which it would block.
        """
        deadline = time.monotonic() + seconds
        while self.tasks and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop_asking(self) -> None:
        """Take no more questions and abort compressions, because the server is about to end.

        Answers that are being written continue.
        """
        self.ending = True

    def start(self) -> None:  # noqa: B027  (some engines have nothing to start)
        """Start what runs alongside the event loop; by default nothing."""

    @abstractmethod
    def close(self) -> None:
        """Shut down, after `stop_asking`; called in a thread. Questions that remain get an
        UnavailableError.
        """

    @abstractmethod
    async def answer(self, question: ServedQuestion) -> None:
        """Write the answers to a question and set its `done`, whatever happens."""

    @abstractmethod
    def make_key(self, sha256: str, variant: Variant) -> str:
        """Return the name of a cache: 32 hex digits of all that decides what is in it."""

    @abstractmethod
    def has_method(self, name: str) -> bool:
        """Return whether an evictor or a preset works on the model."""

    @abstractmethod
    async def get_document(self, sha256: str, variant: Variant, content: Content) -> ServedDocument:
        """Return a document from memory, from disk, or compressed now."""

    @abstractmethod
    def forget_document(self, sha256: str) -> None:
        """Take a deleted document out of memory; questions being answered keep it to their end."""

    @abstractmethod
    def write_held_cache(self, sha256: str, variant: Variant) -> None:
        """Write a cache that this process holds in memory to disk, if its file is gone."""

    @abstractmethod
    def get_state(self, sha256: str, variant: Variant) -> CacheState:
        """Return how far a cache is."""

    @abstractmethod
    async def find_survivors(
        self, document: ServedDocument, layer: int | None, head: int | None
    ) -> dict:
        """Return which tokens of a document survive; see survivors.py."""

    @abstractmethod
    def collect_metrics(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return counters since the start, and gauges of the moment."""


def settle_future(
    future: Future, result: object = None, error: BaseException | None = None
) -> None:
    """Set a result or an error, unless the future has one: the shutdown may have come first."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def ask_engine(
    engine: Engine, question: ServedQuestion
) -> tuple[asyncio.Future[Reply], asyncio.Queue[tuple | None]]:
    """Ask an engine from a coroutine.

    Returns:
        The reply, and a queue of what `on_token` gets, with None at its end.
    """
    loop = asyncio.get_running_loop()
    tokens: asyncio.Queue[tuple | None] = asyncio.Queue()

    def pass_token(*item: Any) -> None:
        loop.call_soon_threadsafe(tokens.put_nowait, item)

    # Tokens and the reply come from other threads, through the same loop, hence in order: None
    # comes after the last token.
    question.on_token = pass_token
    reply = asyncio.wrap_future(engine.ask(question))
    reply.add_done_callback(lambda _: tokens.put_nowait(None))
    return reply, tokens


async def run_while_wanted(
    question: ServedQuestion, writing: Coroutine, patience: float
) -> asyncio.Task:
    """Wait for a coroutine that answers a question; return its task, which has ended.

    Once the client has disconnected, the task is cancelled within `patience` seconds.
    """
    task = asyncio.ensure_future(writing)
    while True:
        done, _ = await asyncio.wait([task], timeout=patience)
        if done:
            return task
        if question.cancelled or question.done.cancelled():
            task.cancel()
