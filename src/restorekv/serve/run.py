"""Starts the server: model, store, engine and a check of both, then HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.pipeline import compress
from restorekv.serve.app import make_app
from restorekv.serve.engine import Engine, explain_lack
from restorekv.serve.guard import Connection
from restorekv.serve.service import Limits, Service
from restorekv.serve.shared import SharedFolder
from restorekv.serve.store import UPLOADED, Store
from restorekv.serve.variants import Variant

ENGINES = {
    "embedded": "restorekv.serve.embedded:Embedded",
    "vllm": "restorekv.serve.with_vllm:Vllm",
}
HTTP = {  # without proxy headers, in which a client could name an address of its own
    "http": Connection,
    "proxy_headers": False,
    "access_log": False,
    "timeout_graceful_shutdown": 10,
}
LOG = logging.getLogger("restorekv.serve")
CLOSING = 0.5  # seconds in which requests send their last words, before they are broken off
LAST = 4.7  # seconds after a signal at which the process ends, whatever a thread of it still does
PROBE = "The code of the red house is seven, and the code of the blue house is nine. " * 8


@dataclass(frozen=True)
class Settings:
    """What to serve, and how; `memory` and `disk` bound the bytes of documents."""

    store: Path
    base: str
    default: str
    memory: int = 4 << 30
    disk: int = 100 << 30
    shared: str | None = None  # the address of a folder of caches that several servers use
    keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    engine: str = "embedded"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine


def find_engine_class(name: str) -> type[Engine]:
    """Returns the class of an engine; refuses unknown names."""
    if name not in ENGINES:
        raise RestoreKVError(f"An engine is one of {', '.join(ENGINES)}, not {name!r}.")
    module, _, kind = ENGINES[name].partition(":")
    return getattr(import_module(module), kind)


def build_app(model: PreTrainedModel, tokenizer: Tokenizer, settings: Settings) -> FastAPI:
    """Returns the application with the engine that the settings name."""
    store = open_store(settings)
    make = find_engine_class(settings.engine)
    engine = make(
        model, tokenizer, store, settings.memory, settings.limits.waiting, **settings.options
    )
    return build_engine_app(engine, store, settings, lambda: check_loading(model, tokenizer))


def open_store(settings: Settings) -> Store:
    return Store(
        settings.store, settings.disk, SharedFolder(settings.shared) if settings.shared else None
    )


def build_engine_app(
    engine: Engine, store: Store, settings: Settings, check: Callable[[], None] = bool
) -> FastAPI:
    """Returns the application, whose start-up checks itself and goes on with what was not
    processed.
    """
    default = Variant.parse(settings.default, settings.base)
    service = Service(engine, store, settings.base, default, settings.limits)
    state = {"ready": False}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await asyncio.to_thread(check)
            engine.start()
            for upload in store.list():
                if upload.status == UPLOADED:
                    service.begin(upload)
        except Exception as error:  # `serve_app` raises it again
            app.state.problem = error
            raise
        state["ready"] = True
        yield
        state["ready"] = False
        await asyncio.to_thread(engine.close)
        store.close()

    app = make_app(
        service, list(settings.keys), lambda: state["ready"] and not service.ending, lifespan
    )
    app.state.problem = None  # why it could not start
    app.state.exit_code = None  # once a signal has come
    return app


def check_loading(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Proves that a stored document is loaded, not read again: it counts the tokens that the model
    sees.

    A full disk for temporary files leaves this out, since stored documents can be asked all the
    same.
    """
    try:
        count_loading(model, tokenizer)
    except (OSError, RestoreKVError) as error:
        lack = explain_lack(error)
        if lack is None:
            raise
        LOG.warning(json.dumps({"problem": f"Loading was not checked. {lack[1]}"}))


def count_loading(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Raises RestoreKVError where a stored document is read again."""
    seen: list[int] = []
    with tempfile.TemporaryDirectory(prefix="restorekv-check-") as folder:
        path = Path(folder) / "probe.rkv"
        compress(model, tokenizer, PROBE, evictor="snapkv:window=8", adapter=None, ratio=0.5).save(
            path
        )
        counting = model.register_forward_pre_hook(
            lambda _module, _args, options: seen.append(options["input_ids"].shape[1]),
            with_kwargs=True,
        )
        try:
            answer = CompressedContext.load(path, model, tokenizer).ask(
                "Which code?", 2, details=True
            )
        finally:
            counting.remove()
    if sum(seen) != answer.read + len(answer.ids) - 1:
        raise RestoreKVError(
            f"A stored document was read again ({sum(seen)} tokens); please report this."
        )


class Server(uvicorn.Server):
    """Ends in order within a few seconds, and at once on a second signal.

    A request that has begun may be answered for GRACE seconds of service.py; then streams end with
    an error event, and whoever waits gets a 503. An upload that is compressed goes on after the
    next start.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self.application = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the end on the first signal."""
        if self.should_exit:
            os._exit(128 + sig)  # everything on disk is written whole or not at all
        super().handle_exit(sig, frame)
        state = self.application.state
        state.exit_code = 0 if sig == signal.SIGINT else 128 + sig
        last = threading.Timer(LAST + state.service.engine.farewell, os._exit, [state.exit_code])
        last.daemon = True
        last.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends requests while the connections are closed."""
        ending = asyncio.ensure_future(self.end_requests())
        await super().shutdown(sockets)
        await ending

    async def end_requests(self) -> None:
        """Has answers end, and breaks off what is left then, such as a body that still arrives."""
        await self.application.state.service.end()
        left = self.application.state.ending
        if left.requests:
            await asyncio.wait(list(left.requests), timeout=CLOSING)
        left.break_off()
        await asyncio.sleep(0.2)
        for connection in list(self.server_state.connections):
            if connection.transport.get_write_buffer_size():  # whose client reads nothing
                connection.transport.abort()


def serve_app(app: FastAPI, listeners: Sequence[socket.socket]) -> None:
    """Serves at sockets that listen, until a signal ends it; see `Server`. Raises why it could not
    start.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    server = Server(uvicorn.Config(app, log_level="warning", **HTTP), app)
    log = logging.getLogger("uvicorn.error")

    def is_wanted(_: logging.LogRecord) -> bool:
        return app.state.problem is None  # else a stack trace of what is raised below

    log.addFilter(is_wanted)
    try:
        server.run(list(listeners))
    except KeyboardInterrupt:
        pass
    except SystemExit:
        if app.state.problem:
            raise app.state.problem from None
        raise
    finally:
        log.removeFilter(is_wanted)


def exit_after_signal(app: FastAPI) -> None:
    """Ends the process after a signal without waiting for threads, of which one may still compute.

    Everything is closed by now. An engine with a farewell has processes that end in their own way.
    """
    if app.state.exit_code is not None and not app.state.service.engine.farewell:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(app.state.exit_code)
