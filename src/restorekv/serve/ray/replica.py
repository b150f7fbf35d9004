"""What runs in a replica of Ray Serve: the library as engine, with a separate folder.

What its methods yield travels to ray/engine.py, the engine of the process that speaks HTTP.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import logging

from restorekv.errors import RestoreKVError
from restorekv.files import HOST, file_lock
from restorekv.generation import decoding
from restorekv.model.load import load_model
from restorekv.serve.cache_origin import CacheOrigin
from restorekv.serve.embedded import EmbeddedEngine
from restorekv.serve.engine import (
    CacheState,
    ServedDocument,
    ServedQuestion,
    UnavailableError,
    ask_engine,
    find_resource_shortage,
)
from restorekv.serve.ray.router import DocumentRouter
from restorekv.serve.run import check_loading, open_adapter
from restorekv.serve.shared import SharedFolder
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant

UPLOAD = ".upload-"  # prefix of the temporary folders for uploads that are being received
CHECK_INTERVAL = 0.1  # seconds between two checks of how far a compression is
# What identifies a document: the SHA-256 of its content, and how it is compressed.
DocumentKey = tuple[str, Variant]


class MissingError(RestoreKVError):
    """A document is neither here nor in the shared folder; its content is needed."""


@dataclass(frozen=True)
class ReplicaConfig:
    """How a replica is made.

    Args:
        model: The name of the model.
        dtype: The dtype of its weights.
        device: Where it runs.
        threads: Threads of PyTorch.
        folder: Where the replicas of one machine have their folders.
        shared: The address of the caches that all share.
        memory: Bytes of documents in memory.
        disk: Bytes of documents on disk.
        default: The model id of uploads, such as smollm2:fast-0.1.
        base: The name of the model in such ids.
        adapter: The name of the adapter that restores documents, as `compress` takes it.
    """

    model: str
    dtype: str
    device: str
    threads: int
    folder: str
    shared: str
    memory: int
    disk: int
    default: str
    base: str
    adapter: str | None


@dataclass(frozen=True)
class ReplicaReport:
    """The metrics of a replica, which it sends after a document or an answer.

    Args:
        name: Its name.
        counted: Metrics that only grow.
        now: Metrics of the moment.
    """

    name: str
    counted: dict[str, int]
    now: dict[str, int]


class Replica:
    """Holds documents and answers questions about them."""

    def __init__(self, config: ReplicaConfig) -> None:
        torch.set_num_threads(config.threads)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model, tokenizer = load_model(config.model, config.dtype, config.device)
        check_loading(model, tokenizer)
        # Two replicas of a machine must not write to one index.
        self.exit_stack = ExitStack()
        folder = lock_folder(Path(config.folder), self.exit_stack)
        # Uploads that a killed replica was still receiving.
        for left in folder.glob(f"{UPLOAD}*"):
            shutil.rmtree(left, ignore_errors=True)
        self.store = Store(folder, config.disk, SharedFolder(config.shared))
        # The sender bounds how many questions wait.
        default = Variant.parse(config.default, config.base)
        adapter = open_adapter(model, config.adapter, default)
        self.engine = EmbeddedEngine(
            model, tokenizer, self.store, config.memory, max_waiting=None, adapter=adapter
        )
        self.engine.start()

    def __del__(self) -> None:
        """End the engine; Ray Serve calls this when a replica that it stops has answered all."""
        # A replica that could not start has no engine.
        if hasattr(self, "engine"):
            self.engine.close()
            self.store.close()
            self.exit_stack.close()

    async def describe_model(self) -> tuple[Tokenizer, set[int], CacheOrigin]:
        """Return the tokenizer, the ids that end answers, and the origin of caches."""
        return self.engine.tokenizer, self.engine.stop_ids, self.engine.origin

    def refuse_other_origin(self, origin: str) -> None:
        """Raise UnavailableError if this replica's caches differ from those of the others.

        Nodes find the model by its name, which may mean a different model on each. A document's
        answers would then come from different models.

        Args:
            origin: The digest of the origin of the caches that the sender expects.
        """
        if origin != self.engine.origin.digest:
            raise UnavailableError(
                f"The replicas of this server differ, such as the one on {HOST}: give every node "
                "the same model, adapters and version of restorekv, and start the server again."
            )

    # Calls of the engine; each names the origin of its caches.

    async def get_document(
        self, document_key: DocumentKey, content: str | bytes | None, *, origin: str
    ) -> AsyncIterator[object]:
        """Yield the states of a compression, then (tokens, fresh), then a report.

        Without a content, the document is loaded; raises MissingError if it cannot be found.
        """
        self.refuse_other_origin(origin)
        source: str | Path = ""
        with ExitStack() as stack:
            if content is None:
                getting = self._find_document(document_key)
            else:
                if isinstance(content, bytes):
                    # Only cache files need room on the disk; for everything else it may be full.
                    folder = stack.enter_context(
                        tempfile.TemporaryDirectory(dir=self.store.folder, prefix=UPLOAD)
                    )
                    source = Path(folder) / "upload.rkv"
                    source.write_bytes(content)
                else:
                    source = content
                getting = self.engine.get_document(*document_key, lambda: source)
            # Yielding states meanwhile also shows the sender that this replica is alive.
            task = asyncio.ensure_future(getting)
            state: CacheState | None = None
            while not task.done():
                await asyncio.wait([task], timeout=CHECK_INTERVAL)
                now = self.engine.get_state(*document_key)
                if not task.done() and now != state:
                    state = now
                    yield state
            try:
                document = task.result()
            except RestoreKVError as error:
                raise make_portable_error(error, source) from None
        yield document.tokens, document.fresh
        yield self._make_report()

    async def ask(
        self, document_keys: Sequence[DocumentKey], packed: dict[str, Any], *, origin: str
    ) -> AsyncIterator[object]:
        """Yield lists of tokens as they are written, then the Reply, then a report.

        A caller that stops listening ends the writing.
        """
        self.refuse_other_origin(origin)
        documents = [await self._find_document(document_key) for document_key in document_keys]
        question = ServedQuestion(documents=documents, **packed)
        reply, tokens = ask_engine(self.engine, question)
        try:
            while written := await take_tokens(tokens):
                yield written
            yield await reply
            yield self._make_report()
        finally:
            # The generator is closed when the client has disconnected.
            question.cancelled = True

    async def find_survivors(
        self, document_key: DocumentKey, layer: int | None, head: int | None, *, origin: str
    ) -> AsyncIterator[dict]:
        """Yield which tokens of a document survive."""
        self.refuse_other_origin(origin)
        document = await self._find_document(document_key)
        yield await self.engine.find_survivors(document, layer, head)

    async def _find_document(self, document_key: DocumentKey) -> ServedDocument:
        """Return a document from memory, disk or the shared folder; else raise MissingError."""
        document = await self.engine.find_document(*document_key)
        if document is None:
            raise MissingError("The document is not here.")
        return document

    def _make_report(self) -> ReplicaReport:
        """Return this replica's name and metrics."""
        counted, now = self.engine.collect_metrics()
        name = serve.get_replica_context().replica_id.unique_id
        return ReplicaReport(name, dict(counted), now)


def make_portable_error(error: RestoreKVError, source: str | Path) -> Exception:
    """Return an error that keeps its message in a different process.

    Args:
        error: What was raised.
        source: The content that was given. The message must not name its path on this machine,
            which would mean nothing to the client.
    """
    # An error is pickled without its causes. If the cause is a lack of memory or disk space, which
    # the sender must recognize, that error is sent itself.
    shortage = find_resource_shortage(error)
    if shortage is not None:
        return shortage
    if isinstance(source, Path) and str(source) in str(error):
        return type(error)(str(error).replace(str(source), "The file"))
    return error


def make_deployment(
    min_replicas: int, max_replicas: int, resources: Mapping[str, float]
) -> serve.Deployment:
    """Return the deployment of replicas.

    A replica holds at most two batches of requests; further ones go to another replica.
    """
    number: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas > min_replicas:
        autoscaling = {
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": decoding.BATCH,
        }
        number = {"autoscaling_config": autoscaling}
    router: Any = DocumentRouter  # Ray's annotation lacks classes
    deployment: Any = serve.deployment(
        Replica,
        name="documents",
        max_ongoing_requests=2 * decoding.BATCH,
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources["GPU"]},
        request_router_config=RequestRouterConfig(request_router_class=router),
        **number,
    )
    return deployment


def pack_question(question: ServedQuestion) -> dict[str, Any]:
    """Return the fields of a question that travel to a replica; its documents go as keys."""
    return {
        "turns": question.turns,
        "text": question.text,
        "system": question.system,
        "limit": question.limit,
        "sampling": question.sampling,
        "prompt": question.prompt,
        "answer_prefix": question.answer_prefix,
    }


async def take_tokens(tokens: asyncio.Queue[tuple | None]) -> list[tuple]:
    """Wait for a token; return it with those that have come since; an empty list at the end."""
    taken: list[tuple] = []
    item = await tokens.get()
    while item is not None:
        taken.append(item)
        if tokens.empty():
            return taken
        item = tokens.get_nowait()
    if taken:  # the end is for the next call
        tokens.put_nowait(None)
    return taken


def lock_folder(folder: Path, stack: ExitStack) -> Path:
    """Lock and return the first numbered folder that no other replica has locked.

    It stays locked for as long as this process runs or `stack` is open.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        # Close a lock that was not acquired; keep the first that was.
        trial = ExitStack()
        if trial.enter_context(file_lock(own / ".lock")):
            stack.push(trial)
            return own
        trial.close()
    raise AssertionError
