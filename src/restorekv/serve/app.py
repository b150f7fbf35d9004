"""The HTTP surface: models, files, chat completions, health and metrics, in OpenAI's form."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Form, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from openai.types import FileDeleted, Model
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from restorekv.errors import RestoreKVError, TextTooLongError, UnlikeContextsError
from restorekv.serve import replies, schemas
from restorekv.serve.body import FORM, CheckedRoute
from restorekv.serve.completions import add_completions
from restorekv.serve.engine import (
    BusyError,
    DeletedError,
    UnavailableError,
    explain_resource_shortage,
)
from restorekv.serve.guard import AROUND, Guard, OpenRequests, make_problem_response
from restorekv.serve.index import Upload
from restorekv.serve.page import PATHS, add_page
from restorekv.serve.questions import Questions
from restorekv.serve.reference import PATH as REFERENCE_PATH
from restorekv.serve.reference import add_reference
from restorekv.serve.requests import ChatRequest
from restorekv.serve.responses import CHAT_NAMES, add_responses
from restorekv.serve.service import ApiError, Service, make_missing_error
from restorekv.serve.variants import UnknownModelError, Variant

LOG = logging.getLogger("restorekv.serve")
# Paths that need no key: they hold no data.
OPEN_PATHS = ("/health", "/ready", REFERENCE_PATH, "/openapi.json", *PATHS)
BYTES = "application/octet-stream"
# Requests call some options of `SamplingConfig` by other names.
OPTION_FIELDS = {"json_schema": "response_format", "samples": "n"}
# For paths with requests that become chat requests: their own names for the chat request's fields.
NAMES_OF_PATHS = {"/v1/responses": CHAT_NAMES, "/v1/completions": {"messages": "prompt"}}
LOCATIONS = ("body", "query")  # where FastAPI found a field
FORMS_OF_FIELDS = ("str", "int", "float", "bool")  # as pydantic names them
NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")  # pydantic's errors
# For fields that hold an object or a list of objects: an example of one, for errors.
OBJECTS = {
    "cache_control": '{"type": "ephemeral"}',
    "content": '{"type": "text", "text": "..."}',
    "file": '{"file_id": "file-..."}',
    "format": '{"type": "json_object"}',
    "input": '{"role": "user", "content": "..."}',
    "logit_bias": '{"50256": -100}',
    "messages": '{"role": "user", "content": "..."}',
    "prompt_cache_breakpoint": '{"mode": "explicit"}',
    "response_format": '{"type": "json_object"}',
    "stream_options": '{"include_usage": true}',
}
JSON_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
LISTED = 10_000  # files in one list, as in OpenAI's API
MIN_LIFETIME, MAX_LIFETIME = 3600, 2_592_000  # seconds of an upload, as in OpenAI's API
METRICS = "text/plain; version=0.0.4"

Responses = dict[int | str, dict[str, Any]]  # what `/openapi.json` says of answers, by status


def make_app(
    service: Service,
    keys: list[str],
    is_ready: Callable[[], bool],
    lifespan: Callable[..., Any] | None = None,
    host_names: Sequence[str] = (),
) -> FastAPI:
    """Return the application.

    Args:
        service: What it serves.
        keys: If there are any, every path except those of OPEN_PATHS needs one of them.
        is_ready: Whether requests can be answered.
        lifespan: What runs before and after the serving; see FastAPI.
        host_names: Names of this machine, in addition to localhost, that requests without a key may
            use.
    """
    app = FastAPI(
        title="restorekv",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=schemas.PROBLEMS,
    )
    app.router.route_class = CheckedRoute
    questions = Questions(service)
    app.state.service = service
    app.state.questions = questions
    app.state.open_requests = OpenRequests()
    requests = replies.RequestMetrics()
    app.add_middleware(
        Guard,
        keys=keys,
        largest=service.limits.upload + AROUND,
        open_paths=OPEN_PATHS,
        open_requests=app.state.open_requests,
        note=requests.note,
        host_names=host_names,
    )
    add_errors(app, service)
    add_routes(app, questions, is_ready, requests)
    add_files(app, service)
    add_completions(app, questions)
    add_responses(app, questions)
    add_page(app, service)
    add_reference(app)
    return app


def add_errors(app: FastAPI, service: Service) -> None:
    """Turn every error into a sentence with its status."""

    @app.exception_handler(ApiError)
    async def answer_api_error(_: Request, error: ApiError) -> Response:
        return make_problem_response(error.status_code, error.detail, error.code, param=error.param)

    @app.exception_handler(BusyError)
    async def answer_busy(_: Request, error: BusyError) -> Response:
        return make_problem_response(429, str(error), "rate_limit_exceeded", {"retry-after": "1"})

    @app.exception_handler(DeletedError)
    async def answer_deleted(_: Request, error: DeletedError) -> Response:
        return make_problem_response(404, str(error), "file_not_found", param=error.option or None)

    @app.exception_handler(UnavailableError)
    async def answer_away(_: Request, error: UnavailableError) -> Response:
        return make_problem_response(503, str(error), None, {"retry-after": "5"})

    @app.exception_handler(OSError)
    @app.exception_handler(MemoryError)
    @app.exception_handler(sqlite3.Error)
    async def answer_shortage(request: Request, error: Exception) -> Response:
        shortage = explain_resource_shortage(error)
        if shortage:
            return make_problem_response(*shortage)
        LOG.error("unexpected error", exc_info=error)
        return await answer_failure(request, error)

    @app.exception_handler(RestoreKVError)
    async def answer_refusal(request: Request, error: RestoreKVError) -> Response:
        shortage = explain_resource_shortage(error)
        if shortage:
            return make_problem_response(*shortage)
        option = error.option
        if not option and isinstance(error, TextTooLongError | UnlikeContextsError):
            option = "messages"  # all of them together
        names = NAMES_OF_PATHS.get(request.scope["path"], {})
        param = rename_field(OPTION_FIELDS.get(option, option), names) or None
        if isinstance(error, UnknownModelError):
            return make_problem_response(404, str(error), "model_not_found", param=param)
        # Clients look for this word, and shorten the conversation.
        code = "context_length_exceeded" if isinstance(error, TextTooLongError) else None
        return make_problem_response(400, str(error), code, param=param)

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def answer_malformed(
        request: Request, error: ValidationError | RequestValidationError
    ) -> Response:
        names = NAMES_OF_PATHS.get(request.scope["path"], {})
        return describe_validation_error(error, names)

    @app.exception_handler(HTTPException)
    async def answer_unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
        headers = error.headers
        if error.status_code == 405:
            # The framework names the methods of only one of the path's routes.
            methods = set()
            for route in app.routes:
                if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
                    methods |= route.methods or set()
            headers = {"allow": ", ".join(sorted(methods))}
            message = f"{message.removesuffix('.')}; use {' or '.join(sorted(methods))}."
        elif error.status_code == 404:
            message = f"{message.removesuffix('.')}; {_find_right_path(app, request)}."
        return make_problem_response(error.status_code, message, headers=headers)

    @app.exception_handler(TimeoutError)
    async def answer_timeout(_: Request, error: TimeoutError) -> Response:
        return make_problem_response(
            504,
            f"The answer took longer than {service.limits.seconds:g} seconds; ask for fewer "
            "tokens.",
            # Otherwise `openai` retries twice by itself, which takes as long again.
            headers={"x-should-retry": "false"},
        )

    @app.exception_handler(Exception)
    async def answer_failure(_: Request, error: Exception) -> Response:
        return make_problem_response(500, "The server failed on this; its log says why.")


def _find_right_path(app: FastAPI, request: Request) -> str:
    """Return a clause that says what to do about an unknown path."""
    path = request.scope["path"]
    # Clients add "/chat/completions" and the like to their base URL, which may lack /v1, have it
    # twice, or have something before it.
    right = f"/v1/{path.strip('/').rpartition('v1/')[2]}"
    scope = {**request.scope, "path": right}
    is_known = any(route.matches(scope)[0] is not Match.NONE for route in app.routes)
    if is_known and right != path:
        return f"use {right[:200]}, with a client whose base URL is this server's address and /v1"
    return f"{REFERENCE_PATH} lists the paths of this server"


def describe_validation_error(
    error: ValidationError | RequestValidationError, names: Mapping[str, str]
) -> Response:
    """Return the answer to a malformed request; it names one field that is at fault.

    Args:
        error: What pydantic found.
        names: The request's own names of fields, by the names that the error may have.
    """
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        position = problems[0]["loc"][-1]
        return make_problem_response(400, f"The body is not valid JSON (at character {position}).")

    def rank_problem(problem: Any) -> tuple[int, bool]:
        # If a field may have one of several types, the deepest problem is that of the type that
        # came closest. For a list that is too long, "too long" ranks above "not a string".
        return len(problem["loc"]), not problem["type"].endswith("_type")

    problem = max(problems, key=rank_problem)
    name = _format_field_name(problem["loc"])
    where = rename_field(name, names)
    context = problem.get("ctx") or {}
    if "param" in context:  # an error of fields.py, which names the field inside its object
        inner = f"{name}.{context['param']}" if name else context["param"]
        param = rename_field(inner, names)[:120]
        return make_problem_response(
            400, f"{param} {context['why']}.", problem["type"], param=param
        )
    if problem["type"] in NO_OBJECT:
        message = _explain_no_object(where, problem["input"])
        return make_problem_response(400, message, param=where[:120] or None)
    if problem["type"] == "missing" and problem["loc"] == ("body",):
        return make_problem_response(400, "The body is empty; send a JSON object.")
    message = problem["msg"].removeprefix("Value error, ").removesuffix(".")
    message = message.replace(" after validation", "")
    if where:
        message = f"{where}: {message}"
    return make_problem_response(400, f"{message}.", param=where[:120] or None)


def _format_field_name(location: Sequence[int | str]) -> str:
    """Return the name of a field, such as messages.0.role, from pydantic's location of it."""
    # The type that a field was read as, "str" or "list[str]", is not a part of its name. Names of
    # upload form fields may have brackets, too.
    names = []
    for part in map(str, location):
        is_form = "[" in part or part in FORMS_OF_FIELDS
        if part not in LOCATIONS and (part in FORM or not is_form):
            names.append(part)
    return ".".join(names)


def rename_field(name: str, names: Mapping[str, str]) -> str:
    """Return a field's name with its beginning replaced, if `names` has a different one."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def _explain_no_object(where: str, value: Any) -> str:
    """Return the sentence about a value that is not an object; the body itself has no name."""
    if where:
        field = [part for part in where.split(".") if not part.isdecimal()][-1]
        example = f" such as {OBJECTS[field]}" if field in OBJECTS else ""
        return f"{where} must be an object{example}, not {JSON_TYPES.get(type(value), 'null')}."
    # Without the header the body arrives as bytes.
    if isinstance(value, bytes):
        return (
            "The body is not read as JSON; send a JSON object with the header "
            "Content-Type: application/json."
        )
    return "The body is JSON, but not an object; send one."


def add_routes(
    app: FastAPI,
    questions: Questions,
    is_ready: Callable[[], bool],
    requests: replies.RequestMetrics,
) -> None:
    """Add every path but those of files, responses and the page."""
    service = questions.service
    start = int(time.time())  # since when the models are here
    not_yet: Responses = {
        503: {"model": schemas.Ready, "description": "The server still starts or ends"}
    }

    # Load balancers ask with HEAD.
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> schemas.Status:
        return schemas.Status(status="ok")

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=schemas.Ready, responses=not_yet)
    async def ready() -> Response:
        ready = is_ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    @app.get("/metrics", response_class=Response, responses=schemas.describe_content("text/plain"))
    async def metrics() -> Response:
        return Response(replies.format_metrics(service.engine, requests), media_type=METRICS)

    @app.get("/v1/models", response_model_exclude_unset=True)
    async def models() -> schemas.Models:
        names = (service.model_name, service.default_variant.name)
        known = [replies.describe_model(name, start) for name in names]
        return schemas.Models(object="list", data=known)

    @app.get("/v1/models/{name:path}", response_model_exclude_unset=True)
    async def one_model(name: str) -> Model:
        return replies.describe_model(Variant.parse(name, service.model_name).name, start)

    @app.post("/v1/chat/completions", responses=schemas.describe_stream(schemas.Completion))
    async def complete(request: Request, asked: ChatRequest) -> Response:
        return await questions.complete_chat(asked, request.is_disconnected)


def add_files(app: FastAPI, service: Service) -> None:
    """Add the paths of uploads."""
    full: Responses = {507: {"model": schemas.Problem, "description": "The server's disk is full"}}
    binary = schemas.describe_content(BYTES)

    @app.post("/v1/files", response_model_exclude_unset=True, responses=full)
    async def create(
        file: UploadFile,
        purpose: str = Form("user_data", max_length=64),
        anchor: Literal["created_at"] | None = Form(None, alias="expires_after[anchor]"),
        seconds: int | None = Form(
            None, alias="expires_after[seconds]", ge=MIN_LIFETIME, le=MAX_LIFETIME
        ),
    ) -> schemas.File:
        if anchor is not None and seconds is None:
            raise ApiError(400, "expires_after has no seconds; add them, or leave it out.")
        return replies.describe_upload(await service.add_upload(file, purpose, seconds))

    @app.get("/v1/files", response_model_exclude_unset=True)
    async def list_files(
        after: str | None = None,
        limit: int = Query(LISTED, ge=1, le=LISTED),
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> schemas.Files:
        uploads = select_uploads(service, after, order, purpose)
        files = [replies.describe_upload(upload) for upload in uploads[:limit]]
        return schemas.Files(object="list", data=files, has_more=len(uploads) > limit)

    @app.get("/v1/files/{name}", response_model_exclude_unset=True)
    async def retrieve(name: str) -> schemas.File:
        return replies.describe_upload(service.find_upload(name))

    @app.get("/v1/files/{name}/content", response_class=Response, responses=binary)
    async def content(name: str) -> Response:
        upload = service.find_upload(name)
        try:
            payload = await asyncio.to_thread(service.store.read_upload, upload)
        except RestoreKVError:
            # If it was deleted meanwhile, that explains the error best.
            service.find_upload(name)
            raise
        return make_download(payload, upload.name)

    @app.get("/v1/files/{name}/cache", response_class=Response, responses=binary)
    async def cache(name: str, model: str | None = None) -> Response:
        upload = service.find_upload(name)
        variant = service.default_variant
        if model is not None:
            variant = service.choose_variant(upload, Variant.parse(model, service.model_name))
        key = service.engine.make_key(upload.sha256, variant)
        # The quota may have dropped the file of a cache that is still in memory.
        await asyncio.to_thread(service.engine.write_held_cache, upload.sha256, variant)
        path = await asyncio.to_thread(service.store.find_or_fetch_file, key, upload.sha256)
        return await send_bytes(
            path,
            f"{upload.name}.rkv",
            f"{upload.id} is not compressed as {variant.name} yet; wait until it is processed, or "
            "query it as that model.",
        )

    @app.delete("/v1/files/{name}", response_model_exclude_unset=True)
    async def delete(name: str) -> FileDeleted:
        upload = service.find_upload(name)
        service.store.delete_upload(upload.id)
        return FileDeleted(id=upload.id, object="file", deleted=True)


def select_uploads(
    service: Service, after: str | None, order: str, purpose: str | None
) -> list[Upload]:
    """Return the uploads that a list asks for; raise ApiError if there is no upload `after`."""
    uploads = service.store.list_uploads()
    if order == "asc":
        uploads.reverse()
    if after is not None:
        ids = [upload.id for upload in uploads]
        if after not in ids:
            raise make_missing_error(after)
        uploads = uploads[ids.index(after) + 1 :]
    return [upload for upload in uploads if purpose in (None, upload.purpose)]


async def send_bytes(path: Path | None, name: str, otherwise: str) -> Response:
    """Return a file as a download with a name; raise ApiError 404 with the sentence `otherwise` if
    there is no file, or no longer.
    """
    if path is None:
        raise ApiError(404, otherwise)
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except FileNotFoundError:
        raise ApiError(404, otherwise) from None
    return make_download(content, name)


def make_download(content: bytes, name: str) -> Response:
    """Return bytes as a download with a name."""
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}
    return Response(content, media_type=BYTES, headers=headers)
