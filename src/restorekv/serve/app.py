"""The HTTP surface: models, files, chat completions, health and figures, in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable

from fastapi import FastAPI, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from restorekv.errors import RestoreKVError
from restorekv.serve import replies
from restorekv.serve.engine import AwayError, BusyError
from restorekv.serve.page import PATHS, add_page
from restorekv.serve.requests import ChatRequest
from restorekv.serve.responses import add_responses
from restorekv.serve.service import ApiError, Service
from restorekv.serve.variants import Variant

LOG = logging.getLogger("restorekv.serve")
LOOPBACK = ("127.0.0.1", "::1")
OPEN = ("/health", "/ready", *PATHS)  # asked without a key


def make_app(service: Service, keys: list[str], ready: Callable[[], bool], lifespan: Callable | None = None) -> FastAPI:
    """Returns the application; with `keys`, every path but health and the page's files needs one of them."""
    app = FastAPI(title="restorekv", docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable) -> Response:
        """Checks the key, bounds the body, names the request and logs it without its text."""
        name, start = request.headers.get("x-request-id", "")[:64] or secrets.token_hex(8), time.perf_counter()
        if not at_home(request, keys):
            response: Response = problem(403, "Another site's page asks; open this server's own address.")
        elif request.url.path not in OPEN and keys and not allowed(request.headers.get("authorization", ""), keys):
            response = problem(401, "Give a key of this server: Authorization: Bearer KEY.", "invalid_api_key")
        elif int(request.headers.get("content-length") or 0) > service.limits.upload + (1 << 20):
            response = problem(413, f"The request is larger than {service.limits.upload:,} bytes; split it.")
        else:
            response = await call_next(request)
        response.headers["x-request-id"] = name
        seconds = round(time.perf_counter() - start, 4)
        line = {"id": name, "method": request.method, "path": request.url.path, "status": response.status_code}
        LOG.info(json.dumps({**line, "seconds": seconds}))
        return response

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

    @app.exception_handler(RestoreKVError)
    async def wrong(_: Request, error: RestoreKVError) -> Response:
        status = 404 if str(error).startswith("There is no model") else 400
        return problem(status, str(error), "model_not_found" if status == 404 else None)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return problem(400, f"{where}: {first['msg']}." if where else f"{first['msg']}.")

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")

    @app.exception_handler(TimeoutError)
    async def slow(_: Request, error: TimeoutError) -> Response:
        return problem(504, f"The answer took longer than {service.limits.seconds:g} seconds; ask for fewer tokens.")


def add_routes(app: FastAPI, service: Service, ready: Callable[[], bool]) -> None:
    """Adds every path."""

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/ready")
    async def is_ready() -> Response:
        return JSONResponse({"ready": ready()}, 200 if ready() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(replies.metrics(service.engine), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [replies.model(name) for name in (service.base, service.default.name)]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict:
        return replies.model(Variant.parse(name, service.base).name)

    @app.post("/v1/chat/completions")
    async def complete(request: Request, asked: ChatRequest) -> Response:
        return await service.complete(asked, request.is_disconnected)


def add_files(app: FastAPI, service: Service) -> None:
    """Adds the paths of uploads."""

    @app.post("/v1/files")
    async def create(request: Request, file: UploadFile, purpose: str = Form("user_data")) -> dict:
        form = await request.form()
        return replies.upload(await service.create(file, purpose, lifetime(form)))

    @app.get("/v1/files")
    async def listed() -> dict:
        return {"object": "list", "data": [replies.upload(each) for each in service.store.list()], "has_more": False}

    @app.get("/v1/files/{name}")
    async def retrieve(name: str) -> dict:
        return replies.upload(service.found(name))

    @app.get("/v1/files/{name}/content")
    async def content(name: str) -> Response:
        return Response(service.store.content(service.found(name).id), media_type="application/octet-stream")

    @app.get("/v1/files/{name}/cache")
    async def cache(name: str) -> Response:
        upload = service.found(name)
        path = service.store.find(service.engine.key(upload.sha256, service.default))
        if path is None:
            raise ApiError(404, f"{upload.id} is not compressed yet; wait until it is processed.")
        return Response(await asyncio.to_thread(path.read_bytes), media_type="application/octet-stream")

    @app.delete("/v1/files/{name}")
    async def delete(name: str) -> dict:
        upload = service.found(name)
        service.store.delete(upload.id)
        return {"id": upload.id, "object": "file", "deleted": True}


def lifetime(form: object) -> int | None:
    """Returns the seconds after which an upload expires, None for never."""
    given = form.get("expires_after[seconds]")
    if given is None:
        return None
    if not str(given).isdigit() or not 3600 <= int(given) <= 2592000:
        raise ApiError(400, "expires_after[seconds] is a number from 3600 to 2592000.")
    return int(given)


def at_home(request: Request, keys: list[str]) -> bool:
    """Whether a request without a key comes from no page of another site, which could read the documents here.

    Such a page sends its own Origin, or has made its name resolve to this machine, which the Host shows.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if keys:
        return True
    local = request.client is None or request.client.host in LOOPBACK
    name = host.rsplit(":", 1)[0].strip("[]")
    return (not local or name in (*LOOPBACK, "localhost", "testserver")) and (
        origin is None or origin.split("://", 1)[-1] == host
    )


def allowed(header: str, keys: list[str]) -> bool:
    """Compares the given key with every key, in constant time."""
    given = header.removeprefix("Bearer ").encode()
    return any([hmac.compare_digest(given, key.encode()) for key in keys])


def problem(status: int, message: str, code: str | None = None, headers: dict | None = None) -> Response:
    """Returns an error as OpenAI's API writes it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers)
