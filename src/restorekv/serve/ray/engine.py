"""Replicas of Ray Serve as an engine: each holds some of the documents and answers the questions
about them.

Any replica can serve any document, since they share their caches. A request whose replica dies is
sent to another one, which repeats it: an answer's seed decides its tokens, so those that were sent
already are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from restorekv.cluster import LOCAL, connect_ray
from restorekv.errors import import_extra
from restorekv.files import HOST
from restorekv.serve.caches import key_of
from restorekv.serve.engine import (
    AwayError,
    Content,
    Document,
    Question,
    Reply,
    admit,
    settle,
    until_left,
)
from restorekv.serve.ray import options as ray_options
from restorekv.serve.ray.options import RayOptions
from restorekv.serve.run import Settings
from restorekv.serve.variants import Variant

TRIES = 3  # replicas that may die over one request
LOOK = 0.2  # seconds between two looks at whether somebody still waits for an answer
KNOWN = 100_000  # documents of which the sender remembers how long they are
SHARED_MEMORY = 512 << 20  # bytes, for uploads on their way
DRAIN = 2.0  # seconds for what is being done when the server ends
FAREWELL = 30.0  # seconds that the replicas may take to end


@dataclass(frozen=True)
class Sent(Document):
    """A document that a replica has, or had: `content` is for the one that takes its place."""

    content: Content = field(compare=False)


class RayEngine:
    """Sends documents and questions to replicas through a handle; at most `waiting` questions are
    on their way.
    """

    farewell = FAREWELL

    def __init__(self, handle: Any, waiting: int) -> None:
        self.handle = handle
        self.waiting = waiting
        self.replica = import_module("restorekv.serve.ray.replica")
        self.errors = import_module("ray.exceptions")
        self.tokenizer, self.stops, self.made_with = handle.described.remote().result()
        self.known: OrderedDict[str, int] = OrderedDict()  # tokens of documents, by key
        self.making: dict[str, str] = {}  # phases of those that are being made
        self.asking: set[asyncio.Task] = set()
        self.reports: dict[str, Any] = {}  # the last About of every replica

    def start(self) -> None:
        """The replicas have started."""

    def end(self) -> None:
        """See `Engine`; the replicas compress on, for other servers and the next start."""

    def close(self) -> None:
        """Waits until the questions that nobody waits for have been broken off."""
        end = time.monotonic() + DRAIN
        while self.asking and time.monotonic() < end:
            time.sleep(LOOK)

    def key(self, sha256: str, variant: Variant) -> str:
        """See `Engine`."""
        return key_of(sha256, variant, self.made_with)

    async def document(self, sha256: str, variant: Variant, content: Content) -> Sent:
        """See `Engine`; a document that was there is not asked for again until a question misses
        it.
        """
        tokens = self.known.get(self.key(sha256, variant))
        if tokens is not None:
            return Sent(sha256, variant, tokens, False, content)
        return await self.brought(Sent(sha256, variant, 0, False, content))

    async def brought(self, document: Sent, beside: Sent | None = None) -> Sent:
        """Has a replica load a document, or make it of its content: its own replica, or that of
        another document.
        """
        key, near = (self.key(each.sha256, each.variant) for each in (document, beside or document))
        self.making.setdefault(key, "waiting")
        try:
            try:
                tokens, fresh = await self.tried(lambda: self.placed(key, near, document, None))
            except self.replica.MissingError:
                content = await asyncio.to_thread(payload, document.content)
                tokens, fresh = await self.tried(lambda: self.placed(key, near, document, content))
        finally:
            self.making.pop(key, None)
        self.known[key] = tokens
        while len(self.known) > KNOWN:
            self.known.popitem(last=False)
        return Sent(document.sha256, document.variant, tokens, fresh, document.content)

    async def placed(
        self, key: str, near: str, document: Sent, content: str | bytes | None
    ) -> tuple[int, bool]:
        """Returns tokens and freshness of a document that a replica loaded or made, and notes its
        phases.
        """
        found = 0, False
        async for item in self.items(
            "document", near, (document.sha256, document.variant), content
        ):
            if isinstance(item, str):
                self.making[key] = item
            else:
                found = item
        return found

    async def items(self, method: str, key: str, *arguments: object) -> AsyncIterator[Any]:
        """Yields what a method of the replica yields to which a document's key belongs, but its
        reports.
        """
        chosen = self.handle.options(stream=True, multiplexed_model_id=key)
        stream = getattr(chosen, method).remote(*arguments)
        try:
            async for item in stream:
                if isinstance(item, self.replica.About):
                    self.reports[item.name] = item
                else:
                    yield item
        except self.errors.RayTaskError as error:  # it comes from our own code there
            raise error.cause from None
        finally:
            stream.cancel()

    async def tried(self, call: Callable[[], Awaitable]) -> Any:
        """Returns what a call returns, from another replica where one dies over it."""
        for _ in range(TRIES):
            with suppress(self.errors.RayError):
                return await call()
        raise AwayError(f"{TRIES} replicas ended while they did this; ask again in a moment.")

    def ask(self, question: Question) -> Future:
        """See `Engine`."""
        admit(self.asking, self.waiting, lambda: self.settle(question))
        return question.done

    async def settle(self, question: Question) -> None:
        """Answers a question, unless everybody who waited for it has gone."""
        answering = await until_left(question, self.answered(question), LOOK)
        if answering.cancelled():
            question.done.cancel()
        elif not question.done.cancelled():
            error = answering.exception()
            settle(question.done, None if error else answering.result(), error)

    async def answered(self, question: Question) -> Reply:
        """Returns the reply; brings documents that are not there any more."""
        sent: list[list[int]] = [[] for _ in range(question.decoding.samples)]
        for _ in range(TRIES):
            try:
                return await self.tried(lambda: self.written(question, sent))
            except self.replica.MissingError:
                for document in question.documents:
                    await self.brought(document, question.documents[0])
        raise AwayError(
            "The documents went away again and again before the question was read; ask again."
        )

    async def written(self, question: Question, sent: list[list[int]]) -> Reply:
        """Has a replica write the answers; passes on what is not among the tokens `sent` of each
        sample.
        """
        places = [(each.sha256, each.variant) for each in question.documents]
        counts = [0] * len(sent)
        reply = None
        async for item in self.items(
            "ask", self.key(*places[0]), places, self.replica.asked_of(question)
        ):
            if isinstance(item, Reply):
                reply = item
                continue
            for sample, token, *likely in item:
                counts[sample] += 1
                if counts[sample] > len(sent[sample]):
                    sent[sample].append(token)
                    question.on_token(sample, token, *likely)
                elif sent[sample][counts[sample] - 1] != token:
                    raise AwayError(
                        "A replica ended, and another one would go on differently; ask again."
                    )
        return reply

    def phase(self, sha256: str, variant: Variant) -> str:
        """See `Engine`."""
        key = self.key(sha256, variant)
        return self.making.get(key) or ("ready" if key in self.known else "waiting")

    async def kept(self, document: Sent, layer: int | None, head: int | None) -> dict:
        """See `Engine`."""
        place = document.sha256, document.variant

        async def shares() -> dict:
            return await anext(self.items("kept", self.key(*place), place, layer, head))

        try:
            return await self.tried(shares)
        except self.replica.MissingError:
            await self.brought(document)
            return await self.tried(shares)

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Engine`; of the replicas, as they were at their last answer."""
        alive = ray_options.REPLICAS
        total = {}
        now = {}
        for report in list(self.reports.values()):
            for name, value in report.counted.items():
                total[name] = total.get(name, 0) + value
            for name, value in report.now.items() if report.name in alive else ():
                now[name] = now.get(name, 0) + value
        return total, {**now, "questions_waiting": len(self.asking), "replicas": len(alive)}


def payload(content: Content) -> str | bytes:
    """Returns a text, or the bytes of a cache file."""
    given = content()
    return given.read_bytes() if isinstance(given, Path) else given


@contextmanager
def deploy_replicas(
    settings: Settings, spread: RayOptions, model: str, dtype: str, device: str
) -> Iterator[RayEngine]:
    """Yields an engine whose replicas have loaded the model; they end with the block.

    They share caches at `settings.shared`; each has a folder of its own in the store's folder on
    its machine.
    """
    most = max(spread.replicas, spread.max_replicas)
    needed = spread.needed(device)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray = connect_ray(spread.ray, spread.replica_cpus * most, SHARED_MEMORY, needed)
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray has its own
                signal.signal(number, handler)
        serve, replica = modules()
        own = settings.store.resolve()
        recipe = replica.Recipe(
            model,
            dtype,
            device,
            spread.replica_cpus,
            str(own / "replicas"),
            settings.shared,
            settings.memory,
            settings.disk,
        )
        name = f"restorekv-{hashlib.sha256(f'{HOST} {own}'.encode()).hexdigest()[:8]}"
        serve.start(
            proxy_location="Disabled",
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        try:
            made = replica.deployment(spread.replicas, most, needed)
            yield RayEngine(
                serve.run(made.bind(recipe), name=name, route_prefix=None), settings.limits.waiting
            )
        finally:
            if spread.ray != LOCAL:
                serve.delete(name)
    finally:
        ray.shutdown()


def modules() -> tuple[ModuleType, ModuleType]:
    """Returns Ray Serve, without its remarks, and what runs in a replica."""
    serve = import_extra("ray.serve", "serve-ray", "Ray Serve")
    replica = import_extra("restorekv.serve.ray.replica", "serve-ray", "Ray Serve")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return serve, replica
