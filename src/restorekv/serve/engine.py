"""What the server asks of an engine: embedded.py is the library in this process, with_vllm.py has
vLLM answer.

An engine compresses documents and answers questions about them. A new one is one file, and one line
in run.py.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.generation.answers import Answer
from restorekv.generation.sampling import Decoding
from restorekv.serve.variants import Variant

FULL = {errno.ENOSPC, errno.EDQUOT}
LOCKED = {errno.EROFS, errno.EACCES}  # the disk, or the folder, can only be read
LACKING = FULL | LOCKED | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EAGAIN}
# Gives a text or the path of a cache file, only where they are needed.
Content = Callable[[], str | Path]


ENDING = "The server ends; ask again when it is back."


class BusyError(RestoreKVError):
    """Too many requests wait."""

    def __init__(self) -> None:
        super().__init__("Too many questions wait; ask again in a moment.")


class AwayError(RestoreKVError):
    """What the engine needs does not answer; the request was right."""


def passing(error: BaseException | None) -> OSError | MemoryError | sqlite3.OperationalError | None:
    """Returns what the machine lacked for the moment, if that is why an error was raised."""
    while error is not None:
        if isinstance(error, MemoryError | sqlite3.OperationalError):
            return error
        if isinstance(error, OSError) and error.errno in LACKING:
            return error
        error = error.__cause__ or error.__context__
    return None


def explain_lack(error: BaseException) -> tuple[int, str] | None:
    """Returns a status and a sentence for an error where the machine lacked something, None for
    other errors.
    """
    lack = passing(error)
    if lack is None:
        return None
    # The rest says more of what SQLite was doing.
    code = getattr(lack, "sqlite_errorcode", 0) & 0xFF
    number = getattr(lack, "errno", None)
    why = getattr(lack, "strerror", None) or str(lack) or "no memory"
    if number in LOCKED or code == sqlite3.SQLITE_READONLY:
        return (
            507,
            f"The server cannot write to its disk ({why}); its operator has to make the store writable.",
        )
    waits = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
    if number in FULL or (isinstance(lack, sqlite3.OperationalError) and not waits):
        return (
            507,
            f"The server has no room for this on its disk ({why}); delete files, then try again.",
        )
    return 503, f"The server cannot do this now ({why}); ask again in a moment."


@dataclass(frozen=True)
class Document:
    """A document that can be asked, of so many tokens; `fresh` says that it was compressed for this
    request.
    """

    sha256: str
    variant: Variant
    tokens: int
    fresh: bool


@dataclass
class Question:
    """A request for one answer or several; tokens go to `on_token` as (sample, id, *Row.likely),
    answers to `done`.
    """

    documents: Sequence[Document]
    turns: Sequence[tuple[str, str]]
    text: str
    system: str
    limit: int
    decoding: Decoding
    on_token: Callable[..., None]
    done: Future = field(default_factory=Future)
    cancelled: bool = False


@dataclass(frozen=True)
class Reply:
    """The answers and what they cost: tokens of the question and of the documents, pairs, bytes and
    seconds.

    `computed` tokens of the documents came from no cache.
    """

    answers: list[Answer]
    read: int
    document_tokens: int
    pairs: int
    bytes: int
    seconds: dict[str, float]
    computed: int = 0


class Engine(Protocol):
    """Answers questions about documents. Its methods are called in the thread of the server's event
    loop.
    """

    tokenizer: Tokenizer
    stops: set[int]  # ids that end an answer
    farewell: float  # seconds that it needs to end after all requests have, beyond a moment

    def start(self) -> None: ...

    def end(self) -> None:
        """Begins no more questions and breaks compressions off, as the server is about to end;
        answers go on.
        """

    def close(self) -> None:
        """Ends; called in a thread, after `end`. Questions that are left get an AwayError."""

    def key(self, sha256: str, variant: Variant) -> str:
        """Returns the name of a cache: 32 hex digits of all that decides it."""

    async def document(self, sha256: str, variant: Variant, content: Content) -> Document:
        """Returns a document from memory, from disk or compressed now."""

    def ask(self, question: Question) -> Future:
        """Returns the future Reply; raises BusyError where too many questions wait."""

    def phase(self, sha256: str, variant: Variant) -> str:
        """Returns what is done now to make a cache: "waiting", a phase of `compress`, or "ready"."""

    async def kept(self, document: Document, layer: int | None, head: int | None) -> dict:
        """Returns which tokens of a document survive; see kept.py."""

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns what is counted since the start, and what is so now."""


def settle(future: Future, result: object = None, error: BaseException | None = None) -> None:
    """Sets a result or an error, unless the future has one: the server's end may come first."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def begin(engine: Engine, **asked: Any) -> tuple[Question, asyncio.Future[Reply], asyncio.Queue]:
    """Asks an engine from a coroutine, with the fields of `Question`.

    Returns the question, its reply, and a queue of what `on_token` gets, at whose end stands None.
    """
    loop = asyncio.get_running_loop()
    tokens = asyncio.Queue()

    def on_token(*item: Any) -> None:
        loop.call_soon_threadsafe(tokens.put_nowait, item)

    question = Question(**asked, on_token=on_token)
    future = asyncio.wrap_future(engine.ask(question))
    future.add_done_callback(lambda _: tokens.put_nowait(None))
    return question, future, tokens


def admit(tasks: set[asyncio.Task], waiting: int, answering: Callable[[], Coroutine]) -> None:
    """Begins to answer, unless so many are waiting already; raises BusyError."""
    if len(tasks) >= waiting:
        raise BusyError
    task = asyncio.get_running_loop().create_task(answering())
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def until_left(question: Question, writing: Coroutine, patience: float) -> asyncio.Task:
    """Waits for the writing and returns its task, broken off within `patience` seconds where nobody
    waits for it.
    """
    task = asyncio.ensure_future(writing)
    while not (await asyncio.wait([task], timeout=patience))[0]:
        if question.cancelled or question.done.cancelled():
            task.cancel()
    return task
