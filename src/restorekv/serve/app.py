"""The HTTP surface: models, files, chat completions, health and figures, in OpenAI's form."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from openai.types import FileDeleted, Model
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from restorekv.errors import RestoreKVError
from restorekv.serve import replies, schemas
from restorekv.serve.body import BodyError, CheckedRoute
from restorekv.serve.engine import AwayError, BusyError, explain_lack
from restorekv.serve.guard import AROUND, Ending, Guard, problem
from restorekv.serve.page import PATHS, add_page
from restorekv.serve.requests import ChatRequest
from restorekv.serve.responses import add_responses
from restorekv.serve.service import ApiError, Service
from restorekv.serve.variants import Variant

LOG = logging.getLogger("restorekv.serve")
OPEN = ("/health", "/ready", *PATHS)  # asked without a key
BYTES = "application/octet-stream"
FIGURES = "text/plain; version=0.0.4"


def make_app(
    service: Service, keys: list[str], ready: Callable[[], bool], lifespan: Callable | None = None
) -> FastAPI:
    """Returns the application; with `keys`, every path but health and the page's files needs one of
    them.
    """
    app = FastAPI(
        title="restorekv",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=schemas.PROBLEMS,
    )
    app.router.route_class = CheckedRoute
    app.state.service, app.state.ending = service, Ending()
    app.add_middleware(
        Guard,
        keys=keys,
        largest=service.limits.upload + AROUND,
        open_paths=OPEN,
        ending=app.state.ending,
    )
    add_errors(app, service)
    add_routes(app, service, ready)
    add_files(app, service)
    add_responses(app, service)
    add_page(app, service)
    return app


def add_errors(app: FastAPI, service: Service) -> None:
    """Turns every error into a sentence with its status."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return problem(error.status, error.message, error.code, error.headers)

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> Response:
        return problem(429, str(error), "rate_limit_exceeded", {"retry-after": "1"})

    @app.exception_handler(AwayError)
    async def away(_: Request, error: AwayError) -> Response:
        return problem(503, str(error), None, {"retry-after": "5"})

    @app.exception_handler(OSError)
    @app.exception_handler(MemoryError)
    @app.exception_handler(sqlite3.Error)
    async def lacking(request: Request, error: Exception) -> Response:
        if lack := explain_lack(error):
            return problem(*lack)
        LOG.error("unexpected error", exc_info=error)
        return await failed(request, error)

    @app.exception_handler(RestoreKVError)
    async def wrong(_: Request, error: RestoreKVError) -> Response:
        if lack := explain_lack(error):
            return problem(*lack)
        status = 404 if str(error).startswith("There is no model") else 400
        return problem(status, str(error), "model_not_found" if status == 404 else None)

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: ValidationError | RequestValidationError) -> Response:
        if (broken := error.errors()[0])["type"] == "json_invalid":
            return problem(400, f"The body is not valid JSON (at character {broken['loc'][-1]}).")
        # Of a choice, what came closest.
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        if param := (first.get("ctx") or {}).get("param"):  # of fields.py
            return problem(400, f"{first['msg']}.", first["type"], param=param)
        where = ".".join(
            str(part) for part in first["loc"] if part != "body" and "[" not in str(part)
        )
        message = first["msg"].removeprefix("Value error, ").removesuffix(".")
        return problem(
            400, f"{where}: {message}." if where else f"{message}.", param=where[:120] or None
        )

    @app.exception_handler(BodyError)
    async def unusable(_: Request, error: BodyError) -> Response:
        return problem(error.status_code, error.message, error.code, param=error.param)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
        headers = error.headers
        # The framework names the methods of one of the path's routes only.
        if error.status_code == 405:
            fitting = [
                route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE
            ]
            headers = {
                "allow": ", ".join(sorted({each for route in fitting for each in route.methods}))
            }
        return problem(error.status_code, message, headers=headers)

    @app.exception_handler(TimeoutError)
    async def slow(_: Request, error: TimeoutError) -> Response:
        return problem(
            504,
            f"The answer took longer than {service.limits.seconds:g} seconds; ask for fewer tokens.",
        )

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return problem(500, "The server failed on this; its log says why.")


def add_routes(app: FastAPI, service: Service, ready: Callable[[], bool]) -> None:
    """Adds every path but those of files, responses and the page."""
    not_yet = {503: {"model": schemas.Ready, "description": "The server still starts or ends"}}

    @app.get("/health")
    async def health() -> schemas.Status:
        return schemas.Status(status="ok")

    @app.get("/ready", response_model=schemas.Ready, responses=not_yet)
    async def is_ready() -> Response:
        return JSONResponse({"ready": ready()}, 200 if ready() else 503)

    @app.get("/metrics", response_class=Response, responses=schemas.content("text/plain"))
    async def metrics() -> Response:
        return Response(replies.metrics(service.engine), media_type=FIGURES)

    @app.get("/v1/models", response_model_exclude_unset=True)
    async def models() -> schemas.Models:
        known = [replies.model(name) for name in (service.base, service.default.name)]
        return schemas.Models(object="list", data=known)

    @app.get("/v1/models/{name:path}", response_model_exclude_unset=True)
    async def one_model(name: str) -> Model:
        return replies.model(Variant.parse(name, service.base).name)

    @app.post("/v1/chat/completions", responses=schemas.streamed(schemas.Completion))
    async def complete(request: Request, asked: ChatRequest) -> Response:
        return await service.complete(asked, request.is_disconnected)


def add_files(app: FastAPI, service: Service) -> None:
    """Adds the paths of uploads."""
    full = {507: {"model": schemas.Problem, "description": "The server's disk is full"}}

    @app.post("/v1/files", response_model_exclude_unset=True, responses=full)
    async def create(
        file: UploadFile,
        purpose: str = Form("user_data", max_length=64),
        seconds: int | None = Form(None, alias="expires_after[seconds]", ge=3600, le=2592000),
    ) -> schemas.File:
        return replies.upload(await service.create(file, purpose, seconds))

    @app.get("/v1/files", response_model_exclude_unset=True)
    async def listed() -> schemas.Files:
        uploads = [replies.upload(each) for each in service.store.list()]
        return schemas.Files(object="list", data=uploads, has_more=False)

    @app.get("/v1/files/{name}", response_model_exclude_unset=True)
    async def retrieve(name: str) -> schemas.File:
        return replies.upload(service.found(name))

    @app.get("/v1/files/{name}/content", response_class=Response, responses=schemas.content(BYTES))
    async def content(name: str) -> Response:
        return await sent(service.store.file(service.found(name).id), f"{name} was deleted.")

    @app.get("/v1/files/{name}/cache", response_class=Response, responses=schemas.content(BYTES))
    async def cache(name: str) -> Response:
        upload = service.found(name)
        key = service.engine.key(upload.sha256, service.default)
        path = await asyncio.to_thread(service.store.find, key, upload.sha256)
        return await sent(path, f"{upload.id} is not compressed yet; wait until it is processed.")

    @app.delete("/v1/files/{name}", response_model_exclude_unset=True)
    async def delete(name: str) -> FileDeleted:
        upload = service.found(name)
        service.store.delete(upload.id)
        return FileDeleted(id=upload.id, object="file", deleted=True)


async def sent(path: Path | None, otherwise: str) -> Response:
    """Returns the bytes of a file, or 404 and a sentence where it is not there, or no longer."""
    try:
        if path is not None:
            return Response(await asyncio.to_thread(path.read_bytes), media_type=BYTES)
    except FileNotFoundError:
        pass
    raise ApiError(404, otherwise)
