"""Replicas of Ray Serve as an engine: each holds some of the documents and answers about them.

Any replica can serve any document, since they share their caches. If a replica dies, its requests
are sent to another one, which repeats them. An answer's seed decides its tokens, so those that the
client has already are skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import signal
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from restorekv.cluster import LOCAL, connect_ray
from restorekv.errors import RestoreKVError, import_extra
from restorekv.files import HOST
from restorekv.serve.engine import (
    READY,
    WAITING,
    CacheState,
    Content,
    Engine,
    Reply,
    ServedDocument,
    ServedQuestion,
    UnavailableError,
    run_while_wanted,
    settle_future,
)
from restorekv.serve.ray import options as ray_options
from restorekv.serve.ray.options import RayOptions
from restorekv.serve.run import Settings
from restorekv.serve.variants import Variant

TRIES = 3  # how often a request is sent to a replica that dies over it
CHECK_INTERVAL = 0.2  # seconds between two checks whether the client still waits for an answer
REMEMBERED = 100_000  # documents whose lengths the sender remembers
SHARED_MEMORY = 512 << 20  # bytes, for uploads on their way
DRAIN = 2.0  # seconds for questions that are still being answered when the server ends
SHUTDOWN_GRACE = 30.0  # seconds that the replicas may take to end


class RayEngine(Engine):
    """An engine that sends documents and questions to replicas through a handle.

    At most `max_waiting` questions have no token yet.
    """

    shutdown_grace = SHUTDOWN_GRACE

    def __init__(self, handle: Any, max_waiting: int | None) -> None:
        super().__init__(max_waiting)
        self.handle = handle
        self.replica = import_module("restorekv.serve.ray.replica")
        self.errors = import_module("ray.exceptions")
        self.tokenizer, self.stop_ids, self.origin = handle.describe_model.remote().result()
        # Tokens of documents, by the hash of their content and the key of their cache.
        self.lengths: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.states: dict[str, CacheState] = {}  # of the documents that are being made, by key
        self.reports: dict[str, Any] = {}  # the last ReplicaReport of every replica

    def close(self) -> None:
        """Wait until the questions whose clients have left have been aborted.

        The replicas continue to compress, for other servers and the next start.
        """
        self.wait_for_tasks(DRAIN)

    def make_key(self, sha256: str, variant: Variant) -> str:
        return self.origin.make_key(sha256, variant)

    def has_method(self, name: str) -> bool:
        return self.origin.has_method(name)

    # Documents.

    async def get_document(self, sha256: str, variant: Variant, content: Content) -> ServedDocument:
        """Return a document that a replica has, or makes now.

        A document that was found once is not looked for again until a question misses it.
        """
        tokens = self.lengths.get((sha256, self.make_key(sha256, variant)))
        if tokens is not None:
            return ServedDocument(sha256, variant, tokens, fresh=False, content=content)
        document = ServedDocument(sha256, variant, 0, fresh=False, content=content)
        return await self._load_or_compress(document, document)

    async def _load_or_compress(
        self, document: ServedDocument, neighbor: ServedDocument
    ) -> ServedDocument:
        """Have the replica of `neighbor` load a document, or compress its content."""
        key = self.make_key(document.sha256, document.variant)
        route = self.make_key(neighbor.sha256, neighbor.variant)
        self.states.setdefault(key, WAITING)
        try:
            try:
                tokens, fresh = await self._try_replicas(
                    lambda: self._load_at_replica(key, route, document, None)
                )
            except self.replica.MissingError:
                assert document.content is not None  # `get_document` gave it
                content = await asyncio.to_thread(read_payload, document.content)
                tokens, fresh = await self._try_replicas(
                    lambda: self._load_at_replica(key, route, document, content)
                )
        finally:
            self.states.pop(key, None)
        self.lengths[document.sha256, key] = tokens
        while len(self.lengths) > REMEMBERED:
            self.lengths.popitem(last=False)
        return ServedDocument(
            document.sha256, document.variant, tokens, fresh, content=document.content
        )

    async def _load_at_replica(
        self, key: str, route: str, document: ServedDocument, content: str | bytes | None
    ) -> tuple[int, bool]:
        """Have a replica load or make a document, and note how far it is.

        Returns:
            The document's tokens, and whether it was compressed now.
        """
        found = (0, False)
        document_key = (document.sha256, document.variant)
        async for item in self._stream_from_replica("get_document", route, document_key, content):
            if isinstance(item, CacheState):
                self.states[key] = item
            else:
                found = item
        return found

    def forget_document(self, sha256: str) -> None:
        """Forget that replicas had a deleted document, so that they are asked again if it returns.

        They forget the document itself on their own, through the shared folder.
        """
        for length_key in list(self.lengths):
            if length_key[0] == sha256:
                self.lengths.pop(length_key, None)

    def write_held_cache(self, sha256: str, variant: Variant) -> None:
        """Do nothing: the replicas hold the caches, and write them to the shared folder."""

    def get_state(self, sha256: str, variant: Variant) -> CacheState:
        key = self.make_key(sha256, variant)
        if key in self.states:
            return self.states[key]
        return READY if (sha256, key) in self.lengths else WAITING

    async def find_survivors(
        self, document: ServedDocument, layer: int | None, head: int | None
    ) -> dict:
        document_key = (document.sha256, document.variant)

        async def call_replica() -> dict:
            route = self.make_key(*document_key)
            return await anext(
                self._stream_from_replica("find_survivors", route, document_key, layer, head)
            )

        try:
            return await self._try_replicas(call_replica)
        except self.replica.MissingError:
            await self._load_or_compress(document, document)
            return await self._try_replicas(call_replica)

    # Questions.

    async def answer(self, question: ServedQuestion) -> None:
        """Answer a question, unless its client has disconnected."""
        task = await run_while_wanted(question, self._ask_replicas(question), CHECK_INTERVAL)
        if task.cancelled():
            question.done.cancel()
        elif not question.done.cancelled():
            error = task.exception()
            settle_future(question.done, None if error else task.result(), error)

    async def _ask_replicas(self, question: ServedQuestion) -> Reply:
        """Return the reply; have documents that the replica no longer has loaded or made again."""
        sent: list[list[int]] = [[] for _ in range(question.sampling.samples)]
        for _ in range(TRIES):
            try:
                return await self._try_replicas(lambda: self._ask_replica(question, sent))
            except self.replica.MissingError:
                for index, document in enumerate(question.documents):
                    brought = await self._load_or_compress(document, question.documents[0])
                    # A document that was compressed for this question counts as fresh, even if it
                    # was dropped meanwhile and is now loaded.
                    fresh = brought.fresh or document.fresh
                    question.documents[index] = replace(brought, fresh=fresh)
        raise UnavailableError(
            "The documents were repeatedly dropped before the question was read; ask again."
        )

    async def _ask_replica(self, question: ServedQuestion, sent: list[list[int]]) -> Reply:
        """Have a replica write the answers.

        Args:
            question: What is asked.
            sent: The tokens of each sample that were passed on before, from a different replica.
                This one repeats them; only what follows is passed on.
        """
        document_keys = [(document.sha256, document.variant) for document in question.documents]
        counts = [0] * len(sent)
        reply = None
        # Without a document, any replica is as good as another.
        route = self.make_key(*document_keys[0]) if document_keys else secrets.token_hex(16)
        packed = self.replica.pack_question(question)
        async for item in self._stream_from_replica("ask", route, document_keys, packed):
            if isinstance(item, Reply):
                reply = item
                continue
            question.started = True
            for sample, token, *likely in item:
                counts[sample] += 1
                if counts[sample] > len(sent[sample]):
                    sent[sample].append(token)
                    question.on_token(sample, token, *likely)
                elif sent[sample][counts[sample] - 1] != token:
                    raise UnavailableError(
                        "A replica ended, and another one would continue differently; ask again."
                    )
        assert reply is not None
        return reply

    # Calls of replicas.

    async def _stream_from_replica(
        self, method: str, route: str, *arguments: object
    ) -> AsyncIterator[Any]:
        """Call a method at the replica to which the key `route` belongs, and yield its items.

        The replica's reports are noted, not yielded.
        """
        handle = self.handle.options(stream=True, multiplexed_model_id=route)
        # Any replica may get the call, but only one of them has described its model, so the others
        # check that their own model makes the same caches.
        stream = getattr(handle, method).remote(*arguments, origin=self.origin.digest)
        try:
            async for item in stream:
                if isinstance(item, self.replica.ReplicaReport):
                    self.reports[item.name] = item
                else:
                    yield item
        except self.errors.RayTaskError as error:  # it comes from our own code there
            raise error.cause from None
        finally:
            stream.cancel()

    async def _try_replicas(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a call; if a replica dies over it, try another one."""
        for _ in range(TRIES):
            with suppress(self.errors.RayError):
                return await call()
        raise UnavailableError(
            f"{TRIES} replicas ended while they did this; ask again in a moment."
        )

    def collect_metrics(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the replicas' counters, and their gauges at their last answer."""
        alive = ray_options.REPLICAS
        counted: dict[str, int] = {}
        now: dict[str, int] = {}
        for report in list(self.reports.values()):
            for name, value in report.counted.items():
                counted[name] = counted.get(name, 0) + value
            if report.name not in alive:
                continue
            for name, value in report.now.items():
                now[name] = now.get(name, 0) + value
        # The figures of replicas do not count the questions that Ray still holds back.
        waiting = self.count_waiting()
        now["questions_waiting"] = waiting
        now["questions_answering"] = len(self.tasks) - waiting
        now["replicas"] = len(alive)
        return counted, now


def read_payload(content: Content) -> str | bytes:
    """Return a text, or the bytes of a cache file."""
    given = content()
    return given.read_bytes() if isinstance(given, Path) else given


@contextmanager
def deploy_replicas(
    settings: Settings, options: RayOptions, model: str, dtype: str, device: str
) -> Iterator[RayEngine]:
    """Yield an engine whose replicas have loaded the model; they end with the block.

    Args:
        settings: What is served. The replicas share caches at `settings.shared`; each has its own
            folder in the store's folder on its machine.
        options: How many replicas there are, and where.
        model: The name of the model.
        dtype: The dtype of its weights.
        device: Where it runs.
    """
    max_replicas = max(options.replicas, options.max_replicas)
    resources = options.find_resources(device)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    address = options.ray or LOCAL
    ray = connect_ray(address, options.replica_cpus * max_replicas, SHARED_MEMORY, resources)
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray has set its own
                signal.signal(number, handler)
        serve, replica = import_modules()
        folder = settings.store.resolve()
        config = replica.ReplicaConfig(
            model=model,
            dtype=dtype,
            device=device,
            threads=options.replica_cpus,
            folder=str(folder / "replicas"),
            shared=settings.shared,
            memory=settings.memory,
            disk=settings.disk,
            default=settings.default,
            base=settings.base,
            adapter=settings.adapter,
        )
        name = f"restorekv-{hashlib.sha256(f'{HOST} {folder}'.encode()).hexdigest()[:8]}"
        serve.start(
            proxy_location="Disabled",
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        try:
            deployment = replica.make_deployment(options.replicas, max_replicas, resources)
            try:
                handle = serve.run(deployment.bind(config), name=name, route_prefix=None)
            except RuntimeError as error:
                raise explain_failed_start(serve.status(), name) or error from None
            yield RayEngine(handle, settings.limits.max_waiting)
        finally:
            if address != LOCAL:
                serve.delete(name)
    finally:
        ray.shutdown()


def explain_failed_start(status: Any, name: str) -> RestoreKVError | None:
    """Return why the replicas of an application did not start; None if no error of ours says it.

    Args:
        status: The status of Ray Serve's applications.
        name: The name of the application.
    """
    application = status.applications.get(name)
    # It quotes the stack trace of a replica, which ends with the error.
    texts = [each.message for each in application.deployments.values()] if application else []
    sentences = re.findall(r"^restorekv\.errors\.\w+: (.+)$", "\n".join(texts), re.MULTILINE)
    return RestoreKVError(sentences[-1]) if sentences else None


def import_modules() -> tuple[ModuleType, ModuleType]:
    """Import Ray Serve, without its remarks in the log, and the module that runs in a replica."""
    serve = import_extra("ray.serve", "serve-ray", "Ray Serve")
    replica = import_extra("restorekv.serve.ray.replica", "serve-ray", "Ray Serve")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return serve, replica
