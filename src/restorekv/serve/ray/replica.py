"""What runs in a replica of Ray Serve: the library as engine, with a folder of its own.

Items that a replica yields travel to engine.py, which is the engine of the process that speaks
HTTP.
"""

from __future__ import annotations

import asyncio
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
from restorekv.files import file_lock
from restorekv.generation import generate
from restorekv.model.load import load_model
from restorekv.serve.embedded import Embedded
from restorekv.serve.engine import Document, Question, begin
from restorekv.serve.ray.router import DocumentRouter
from restorekv.serve.run import check_loading
from restorekv.serve.shared import SharedFolder
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant

LOOK = 0.1  # seconds between two looks at the phase of a compression
Place = tuple[str, Variant]  # of a document: the SHA-256 of its content, and how it is held


class MissingError(RestoreKVError):
    """A document is neither here nor in the shared folder; its content is needed."""


@dataclass(frozen=True)
class Recipe:
    """How a replica is made; `folder` is where those of one machine have theirs, `shared` the
    address of all.
    """

    model: str
    dtype: str
    device: str
    threads: int
    folder: str
    shared: str
    memory: int
    disk: int


@dataclass(frozen=True)
class About:
    """What a replica says about itself with everything it settles: its name, what it counted and
    what is so now.
    """

    name: str
    counted: dict[str, int]
    now: dict[str, int]


class Replica:
    """Holds documents and answers questions about them."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(recipe.threads)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model, tokenizer = load_model(recipe.model, recipe.dtype, recipe.device)
        check_loading(model, tokenizer)
        self.lasting = ExitStack()
        folder = own_folder(Path(recipe.folder), self.lasting)
        self.store = Store(folder, recipe.disk, SharedFolder(recipe.shared))
        # Who sends bounds what waits.
        self.engine = Embedded(model, tokenizer, self.store, recipe.memory, 0)
        self.engine.start()

    def __del__(self) -> None:
        """Ray Serve calls it when a replica that is no longer needed has answered what it was
        asked.
        """
        if hasattr(self, "engine"):
            self.engine.close()
            self.store.close()
            self.lasting.close()

    async def described(self) -> tuple[Tokenizer, set[int], Sequence[str]]:
        """Returns what the sender needs of the model: its tokenizer, what ends answers, what caches
        are made with.
        """
        return self.engine.tokenizer, self.engine.stops, self.engine.made_with

    def about(self) -> About:
        counted, now = self.engine.figures()
        return About(serve.get_replica_context().replica_id.unique_id, dict(counted), now)

    async def held(self, place: Place) -> Document:
        """Returns a document that is in memory, here or in the shared folder."""
        if held := await self.engine.stored(*place):
            return held
        raise MissingError("The document is not here.")

    async def document(self, place: Place, content: str | bytes | None) -> AsyncIterator[object]:
        """Yields the phases of a compression, then (tokens, fresh) and About; without a content,
        for what is there.
        """
        with ExitStack() as stack:
            if isinstance(content, bytes):  # for all else the disk may be full
                folder = stack.enter_context(
                    tempfile.TemporaryDirectory(dir=self.store.folder, prefix=".upload-")
                )
                (path := Path(folder) / "upload.rkv").write_bytes(content)
                content = path
            task = asyncio.create_task(
                self.held(place)
                if content is None
                else self.engine.document(*place, lambda: content)
            )
            phase = ""
            while not (await asyncio.wait([task], timeout=LOOK))[0]:
                if phase != (phase := self.engine.phase(*place)):
                    yield phase
            held = task.result()
        yield held.tokens, held.fresh
        yield self.about()

    async def ask(self, places: Sequence[Place], asked: dict[str, Any]) -> AsyncIterator[object]:
        """Yields lists of tokens as they are written, then the Reply and About; who stops listening
        ends it.
        """
        documents = [await self.held(place) for place in places]
        question, future, tokens = begin(self.engine, documents=documents, **asked)
        try:
            while written := await together(tokens):
                yield written
            yield await future
            yield self.about()
        finally:
            question.cancelled = True

    async def kept(self, place: Place, layer: int | None, head: int | None) -> AsyncIterator[dict]:
        """Yields which tokens of a document survive."""
        yield await self.engine.kept(await self.held(place), layer, head)


def deployment(least: int, most: int, needed: Mapping[str, float]) -> serve.Deployment:
    """Returns what Ray Serve deploys; two batches are on their way to a replica before another one
    gets more.
    """
    resources = {"num_cpus": needed["CPU"], "num_gpus": needed["GPU"]}
    number: dict[str, Any] = {"num_replicas": least}
    if most > least:
        target = {"target_ongoing_requests": generate.BATCH}
        number = {"autoscaling_config": {"min_replicas": least, "max_replicas": most, **target}}
    return serve.deployment(
        Replica,
        name="documents",
        max_ongoing_requests=2 * generate.BATCH,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=DocumentRouter),
        **number,
    )


def asked_of(question: Question) -> dict[str, Any]:
    """Returns what `Replica.ask` is told of a question besides its documents."""
    names = ("turns", "text", "system", "limit", "decoding")
    return {name: getattr(question, name) for name in names}


async def together(tokens: asyncio.Queue[tuple | None]) -> list[tuple]:
    """Waits for a token and returns it with those that are there already; an empty list at the end."""
    written = [await tokens.get()]
    while written[-1] is not None and not tokens.empty():
        written.append(tokens.get_nowait())
    if written[-1] is None and len(written) > 1:
        tokens.put_nowait(None)
    return [each for each in written if each is not None]


def own_folder(folder: Path, lasting: ExitStack) -> Path:
    """Returns the first numbered folder that no other replica has, for as long as this process or
    `lasting` lasts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        trial = ExitStack()
        if trial.enter_context(file_lock(own / ".lock")):
            lasting.push(trial)
            return own
        trial.close()
    raise AssertionError
