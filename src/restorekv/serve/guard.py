"""What stands before every request: keys, other sites' pages, bodies that are too large or too
slow, and the log.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from asyncio import Transport
from collections.abc import Sequence
from contextlib import suppress

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from restorekv.serve import schemas
from restorekv.serve.engine import ENDING

LOG = logging.getLogger("restorekv.serve")
LOOPBACK = ("127.0.0.1", "::1")
AROUND = 1 << 20  # bytes of a body besides the file in it
PATIENCE = 30.0  # seconds that a client may stay silent
SLOWEST = 1 << 14  # bytes a second of a body, once it has taken longer than PATIENCE
AT_ONCE = 4  # largest bodies that may be in memory together
# Seconds in which the rest of a refused body is read, so that the client reads the answer.
DRAIN = 5.0


class RefusedError(Exception):
    """A body that is not read to its end."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class Ending:
    """Requests that are still there when the server ends."""

    def __init__(self) -> None:
        self.over = False
        self.requests: set[asyncio.Task] = set()

    def break_off(self) -> None:
        """Ends every request with a 503, or in the middle of its answer."""
        self.over = True
        for task in list(self.requests):
            task.cancel()


class Guard:
    """Checks each request's origin and key, bounds its body while it arrives, names it and logs it
    without its text.

    `largest` bounds a body in bytes; `open_paths` are asked without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        largest: int,
        open_paths: Sequence[str],
        ending: Ending | None = None,
    ) -> None:
        self.app = app
        self.keys = keys
        self.largest = largest
        self.open_paths = open_paths
        self.ending = ending or Ending()
        self.held = 0  # bytes in memory of all bodies that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        start = time.perf_counter()
        status = 500
        begun = False
        name = request.headers.get("x-request-id", "")[:64] or secrets.token_hex(8)

        async def named(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status = message["status"]
                begun = True
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", name.encode("latin-1"))],
                }
            await send(message)

        task = asyncio.current_task()
        self.ending.requests.add(task)
        try:
            if response := self.refusal(request):
                await response(scope, receive, named)
            else:
                await self.bounded(scope, receive, named)
        except asyncio.CancelledError:
            if not self.ending.over:
                raise
            task.uncancel()
            if not begun:
                await problem(503, ENDING, headers={"retry-after": "5", "connection": "close"})(
                    scope, receive, named
                )
        finally:
            self.ending.requests.discard(task)
            seconds = round(time.perf_counter() - start, 4)
            line = {"id": name, "method": request.method, "path": scope["path"], "status": status}
            LOG.info(json.dumps({**line, "seconds": seconds}))

    def refusal(self, request: Request) -> Response | None:
        """Returns the answer to a request that is refused for its headers."""
        length = request.headers.get("content-length", "0")
        if not at_home(request, self.keys):
            return problem(403, "Another site's page asks; open this server's own address.")
        # url.path may be what Host says.
        needs_key = self.keys and request.scope["path"] not in self.open_paths
        if needs_key and not allowed(request.headers.get("authorization", ""), self.keys):
            return problem(
                401, "Give a key of this server: Authorization: Bearer KEY.", "invalid_api_key"
            )
        if not re.fullmatch(r"[0-9]{1,18}", length):
            return problem(400, "content-length is a number of bytes; give one, or leave it out.")
        return None

    async def bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application; a body that is too large or too slow ends with an answer that says
        so.
        """
        headers = Request(scope).headers
        begun = False
        body = Body(receive, self)
        form = headers.get("content-type", "").startswith("multipart/form-data")
        body.spooled = form and scope["path"] == "/v1/files"

        async def passed(message: Message) -> None:
            nonlocal begun
            if body.refused is None or begun:
                begun = True
                await send(message)

        try:
            if int(headers.get("content-length", "0")) > self.largest:
                body.refused = self.too_large()
            else:
                await self.app(scope, body.piece, passed)
        except RefusedError:
            pass
        finally:
            self.held -= body.held
        if body.refused is not None and not begun:
            if not body.over and body.refused.status != 408 and "expect" not in headers:
                await drained(receive)
            closing = {**body.refused.headers, "connection": "close"}
            await problem(body.refused.status, str(body.refused), headers=closing)(
                scope, receive, send
            )

    def too_large(self) -> RefusedError:
        return RefusedError(
            413, f"The request is larger than {self.largest - AROUND:,} bytes; split it."
        )


class Body:
    """A request's body as it arrives, which is neither too large nor too slow; `spooled` ones go to
    disk.
    """

    def __init__(self, receive: Receive, guard: Guard) -> None:
        self.receive = receive
        self.guard = guard
        self.spooled = False
        self.over = False
        self.bytes = 0
        self.held = 0
        self.start = time.monotonic()
        self.refused: RefusedError | None = None  # why it is not read to its end

    async def piece(self) -> Message:
        """Returns the next piece; raises RefusedError."""
        if self.over:  # what follows is only that the client has gone, which has no limit in time
            return await self.receive()
        try:
            async with asyncio.timeout(PATIENCE):
                message = await self.receive()
        except TimeoutError:
            message = None
        if refused := self.refusal(message):
            self.refused = refused
            raise refused
        return message

    def refusal(self, message: Message | None) -> RefusedError | None:
        """Counts a piece; returns why no more of the body is read, None if it goes on."""
        if message is None:
            return RefusedError(
                408, f"Nothing of the request came for {PATIENCE:g} seconds; send it again."
            )
        size = len(message.get("body", b""))
        self.over = message["type"] != "http.request" or not message.get("more_body", False)
        self.bytes += size
        if not self.spooled:
            self.held += size
            self.guard.held += size
        if self.bytes > self.guard.largest:
            return self.guard.too_large()
        if self.held > AROUND and self.guard.held > AT_ONCE * self.guard.largest:
            return RefusedError(
                429,
                "Too many large requests come at once; send it again in a moment.",
                {"retry-after": "1"},
            )
        if not self.over and self.bytes < SLOWEST * (time.monotonic() - self.start - PATIENCE):
            return RefusedError(
                408, f"The request comes slower than {SLOWEST:,} bytes a second; send it again."
            )
        return None


async def drained(receive: Receive) -> None:
    """Reads what a client still sends, for some seconds."""

    async def rest() -> None:
        while (message := await receive())["type"] == "http.request" and message.get(
            "more_body", False
        ):
            pass

    with suppress(TimeoutError):
        await asyncio.wait_for(rest(), DRAIN)


class Connection(H11Protocol):
    """A connection that ends when its client sends no whole request head, or reads nothing of an
    answer, for a time.

    That time is PATIENCE to twice that.
    """

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self.seen: tuple[object, int] = (None, 0)
        self.loop.call_later(PATIENCE, self.check)

    def check(self) -> None:
        """Ends a connection on which nothing has moved since the last check."""
        if self not in self.connections:
            return
        idle = self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size()
        if (idle or unread) and self.seen == (self.cycle, unread):
            self.transport.abort()
            return
        self.seen = self.cycle, unread
        self.loop.call_later(PATIENCE, self.check)


def at_home(request: Request, keys: Sequence[str]) -> bool:
    """Whether a request without a key comes from no page of another site, which could read the
    documents here.

    Such a page sends its own Origin, or has made its name resolve to this machine, which the Host
    shows.
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if keys:
        return True
    local = request.client is None or request.client.host in LOOPBACK
    name = host.rsplit(":", 1)[0].strip("[]").lower()
    return (not local or name in (*LOOPBACK, "localhost")) and (
        origin is None or origin.split("://", 1)[-1] == host
    )


def allowed(header: str, keys: Sequence[str]) -> bool:
    """Compares the given key with every key, in constant time."""
    given = header.removeprefix("Bearer ").encode()
    return any([hmac.compare_digest(given, key.encode()) for key in keys])  # noqa: C419


def problem(
    status: int,
    message: str,
    code: str | None = None,
    headers: dict | None = None,
    param: str | None = None,
) -> Response:
    """Returns an error as OpenAI's API writes it; `param` is the field of the request that is at
    fault.
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    # Half a character of the request cannot be sent back.
    message = message.encode(errors="replace").decode()
    param = param and param.encode(errors="replace").decode()
    return JSONResponse(
        schemas.to_json(schemas.problem_of(kind, message, code, param)), status, headers
    )
