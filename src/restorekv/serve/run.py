"""Start the server: the store, the engine, a check that stored documents load, then HTTP."""

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

from restorekv.compression.adapters import locate_adapter
from restorekv.compression.eviction import make_compressor
from restorekv.compression.method_check import check_before_reading
from restorekv.compression.presets import DEFAULT_EVICTOR, resolve_preset
from restorekv.context import CompressedContext
from restorekv.errors import GateError, RestoreKVError
from restorekv.generation.answers import Answer
from restorekv.model.identity import identify_model
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from restorekv.serve.app import make_app
from restorekv.serve.caches import CacheEngine
from restorekv.serve.engine import Engine, explain_resource_shortage
from restorekv.serve.guard import Connection
from restorekv.serve.requests import AnswerDefaults
from restorekv.serve.service import Limits, Service
from restorekv.serve.shared import SharedFolder
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant

ENGINES = {
    "embedded": "restorekv.serve.embedded:EmbeddedEngine",
    "vllm": "restorekv.serve.vllm_engine:VllmEngine",
}
HTTP: dict[str, Any] = {
    "http": Connection,
    "proxy_headers": False,  # a client could put any address into them
    "access_log": False,
    "timeout_graceful_shutdown": 10,
    # By default, uvicorn and httpx (and so `openai`) both end an idle connection after 5 seconds.
    # If they do so at the same moment, a request on it fails, so the server waits longer.
    "timeout_keep_alive": 20,
}
LOG = logging.getLogger("restorekv.serve")
CLOSING = 0.5  # seconds in which requests send their last words, before they are aborted
LAST = 4.7  # seconds after a signal at which the process ends, whatever a thread of it still does
# The text of the check at the start: long enough to evict half of its pairs.
PROBE = "The code of the red house is seven, and the code of the blue house is nine. " * 8


@dataclass(frozen=True)
class Settings:
    """What to serve, and how.

    Args:
        store: The folder of documents.
        base: The name of the model.
        default: The variant of uploads, such as smollm2:fast-0.1.
        adapter: The name of the adapter that restores documents, as `compress` takes it.
        memory: Bytes of documents in memory.
        disk: Bytes of documents on disk.
        shared: The address of a folder of caches that several servers use.
        keys: The keys of clients; if there are none, a request needs no key.
        host_names: Names of this machine, in addition to localhost, that requests without a key may
            use.
        limits: What a request may cost.
        defaults: Settings of answers, for requests that do not give them.
        engine: The name of the engine.
        options: Options of the engine.
    """

    store: Path
    base: str
    default: str
    adapter: str | None = "auto"
    memory: int = 4 << 30
    disk: int = 100 << 30
    shared: str | None = None
    keys: tuple[str, ...] = ()
    host_names: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    defaults: AnswerDefaults = field(default_factory=AnswerDefaults)
    engine: str = "embedded"
    options: Mapping[str, Any] = field(default_factory=dict)


def find_engine_class(name: str) -> type[CacheEngine]:
    """Return the class of an engine; refuse unknown names."""
    # Imported by name, so that an engine's own libraries are needed only if it runs.
    if name not in ENGINES:
        raise RestoreKVError(f"--engine must be one of {', '.join(ENGINES)}, not {name!r}.")
    module, _, kind = ENGINES[name].partition(":")
    return getattr(import_module(module), kind)


def build_app(model: PreTrainedModel, tokenizer: Tokenizer, settings: Settings) -> FastAPI:
    """Return the application with the engine that the settings name."""
    default = Variant.parse(settings.default, settings.base)
    check_default_method(model, tokenizer, default)
    adapter = open_adapter(model, settings.adapter, default)
    store = open_store(settings)
    engine = find_engine_class(settings.engine)(
        model,
        tokenizer,
        store,
        settings.memory,
        settings.limits.max_waiting,
        adapter=adapter,
        **settings.options,
    )
    return build_engine_app(engine, store, settings, lambda: check_loading(model, tokenizer))


def open_store(settings: Settings) -> Store:
    """Return the store at the settings' folder."""
    shared = SharedFolder(settings.shared) if settings.shared else None
    return Store(settings.store, settings.disk, shared)


def build_engine_app(
    engine: Engine, store: Store, settings: Settings, check: Callable[[], object] = lambda: None
) -> FastAPI:
    """Return the application with an engine.

    Its start-up runs `check`, and continues with uploads that were not processed.
    """
    default = Variant.parse(settings.default, settings.base)
    # An engine with a store has done this itself; Ray's engine has no store in this process.
    store.on_delete = engine.forget_document
    service = Service(engine, store, settings.base, default, settings.limits, settings.defaults)
    started = False

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal started
        try:
            # In a thread: the check runs the model, and signals must be heard meanwhile.
            await asyncio.to_thread(check)
            engine.start()
            service.resume_processing()
        except Exception as error:  # `serve_app` raises it again
            app.state.problem = error
            raise
        started = True
        yield
        started = False
        await asyncio.to_thread(engine.close)
        store.close()

    def is_ready() -> bool:
        return started and not service.ending

    app = make_app(service, list(settings.keys), is_ready, lifespan, settings.host_names)
    app.state.problem = None  # why it could not start
    app.state.exit_code = None  # once a signal has come
    return app


def check_default_method(model: PreTrainedModel, tokenizer: Tokenizer, default: Variant) -> None:
    """Refuse a model on which the method of uploads does not work, as without its gate."""
    if not default.method:
        return
    try:
        check_before_reading(model, tokenizer, make_compressor(resolve_preset(default.method)))
    except GateError as error:
        raise GateError(f"{error} Or serve with --preset best, which needs no gate.") from error


def open_adapter(
    model: PreTrainedModel, name: str | None, default: Variant
) -> RestoreAdapter | str | None:
    """Return the adapter for every document: None, "auto", or the one of this name, loaded.

    It is loaded once, so that no cache is restored by files that were replaced meanwhile. Every
    method uses it; "published" means the one for the method of uploads.

    Raises:
        AdapterError: It is missing, damaged or made for a different model.
    """
    if name is None or name == "auto":
        return name
    identity = identify_model(model)
    compressor = make_compressor(resolve_preset(default.method or DEFAULT_EVICTOR))
    located = locate_adapter(name, identity.name, compressor)
    assert located is not None  # only "auto" finds none
    return RestoreAdapter.from_pretrained(model, located, identity=identity)


def check_loading(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Check that a stored document is loaded and not computed again.

    If the disk has no room for temporary files, only a warning is logged, since documents that are
    stored can be queried anyway.
    """
    try:
        _check_read_tokens(model, tokenizer)
    except (OSError, RestoreKVError) as error:
        shortage = explain_resource_shortage(error)
        if shortage is None:
            raise
        LOG.warning(json.dumps({"problem": f"Loading was not checked. {shortage[1]}"}))


def _check_read_tokens(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Check how many tokens the model reads for a question to a stored document.

    Raises:
        RestoreKVError: It reads more than the question and the answer.
    """
    read: list[int] = []

    def note_tokens(_module: object, _args: object, options: dict) -> None:
        read.append(options["input_ids"].shape[1])

    with tempfile.TemporaryDirectory(prefix="restorekv-check-") as folder:
        path = Path(folder) / "probe.rkv"
        probe = compress(
            model, tokenizer, PROBE, evictor="snapkv:window=8", adapter=None, ratio=0.5
        )
        probe.save(path)
        # Every pass of the model is counted from here on.
        hook = model.register_forward_pre_hook(note_tokens, with_kwargs=True)
        try:
            context = CompressedContext.load(path, model, tokenizer)
            answer = context.ask("Which code?", 2, details=True)
            assert isinstance(answer, Answer)
        finally:
            hook.remove()
    # Every token of the answer is read once, except the last one.
    if sum(read) != answer.prompt_tokens + len(answer.ids) - 1:
        raise RestoreKVError(
            f"A stored document was read again ({sum(read)} tokens); please report this."
        )


class Server(uvicorn.Server):
    """A uvicorn server that ends in order within a few seconds, and immediately on a second signal.

    Requests that have begun have GRACE seconds (questions.py) to be answered; then streams end with
    an error event, and other requests get a 503. An upload that is being compressed is compressed
    again after the next start.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self.application = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down on the first signal."""
        if self.should_exit:
            os._exit(128 + sig)  # everything on disk is written whole or not at all
        super().handle_exit(sig, frame)
        # 128 + the signal's number is what shells expect; Ctrl+C is the usual end of a server.
        state = self.application.state
        state.exit_code = 0 if sig == signal.SIGINT else 128 + sig
        seconds = LAST + state.service.engine.shutdown_grace
        # A thread that computes in C cannot be stopped; this timer ends the process in any case.
        timer = threading.Timer(seconds, os._exit, [state.exit_code])
        timer.daemon = True
        timer.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End requests while the connections are closed."""
        ending = asyncio.ensure_future(self._end_requests())
        await super().shutdown(sockets)
        await ending

    async def _end_requests(self) -> None:
        """Let answers end, then abort the rest, such as a body that is still arriving."""
        state = self.application.state
        await state.questions.end()
        if state.open_requests.tasks:
            await asyncio.wait(list(state.open_requests.tasks), timeout=CLOSING)
        state.open_requests.abort_all()
        await asyncio.sleep(0.2)
        for connection in list(self.server_state.connections):
            # A client that reads nothing would keep the connection open forever.
            if connection.transport.get_write_buffer_size():
                connection.transport.abort()


def serve_app(app: FastAPI, listeners: Sequence[socket.socket]) -> None:
    """Serve at sockets that listen, until a signal ends it; raise why it could not start."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    server = Server(uvicorn.Config(app, log_level="warning", **HTTP), app)
    log = logging.getLogger("uvicorn.error")

    def is_wanted(_: logging.LogRecord) -> bool:
        # If the start failed, uvicorn would log a stack trace of the error that is raised below.
        return app.state.problem is None

    log.addFilter(is_wanted)
    try:
        server.run(list(listeners))
    except KeyboardInterrupt:
        pass
    except SystemExit:
        # uvicorn exits if the start failed; the error itself says more.
        if app.state.problem:
            raise app.state.problem from None
        raise
    finally:
        log.removeFilter(is_wanted)


def exit_after_signal(app: FastAPI) -> None:
    """End the process after a signal, without waiting for a thread that may still compute.

    Everything is closed by now. An engine with a `shutdown_grace` has processes that end in their
    own way.
    """
    if app.state.exit_code is not None and not app.state.service.engine.shutdown_grace:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(app.state.exit_code)
