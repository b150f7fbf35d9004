"""What happens around every request: checks of keys, of pages of other sites and of the size and
speed of bodies, and the log.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from restorekv.readers.extract import printable_name
from restorekv.serve import schemas
from restorekv.serve.engine import ENDING

LOG = logging.getLogger("restorekv.serve")
KINDS = {429: "rate_limit_error"}  # types of errors by status; other ones are the request's fault
LOOPBACK = ("127.0.0.1", "::1")
AROUND = 1 << 20  # bytes of a body besides the file in it
IDLE_TIMEOUT = 30.0  # seconds that a client may stay silent
SLOWEST = 1 << 14  # bytes a second of a body, once it has taken longer than IDLE_TIMEOUT
AT_ONCE = 4  # largest bodies that may be in memory together
DRAIN = 5.0  # seconds in which the rest of a refused body is read, so its client reads the answer


class RefusedError(Exception):
    """The reason why a body is not read to its end."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class OpenRequests:
    """The requests that are being answered; the server's shutdown aborts them."""

    def __init__(self) -> None:
        self.aborted = False
        self.tasks: set[asyncio.Task] = set()

    def abort_all(self) -> None:
        """End every request with a 503, or in the middle of its answer."""
        self.aborted = True
        for task in list(self.tasks):
            task.cancel()


class Guard:
    """A middleware that checks each request's origin and key, bounds its body as it arrives, and
    logs it.

    The log has no text of requests.

    Args:
        app: What answers.
        keys: The keys that clients may use; an empty list asks for none.
        largest: The most bytes that a body may have.
        open_paths: Paths that need no key.
        open_requests: Where requests are noted while they are answered.
        note: Called after every request, with its path as its route has it, status and seconds.
        host_names: Names of this machine, in addition to localhost, that requests without a key may
            use.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        largest: int,
        open_paths: Sequence[str],
        open_requests: OpenRequests | None = None,
        note: Callable[[str, int, float], None] = lambda path, status, seconds: None,
        host_names: Sequence[str] = (),
    ) -> None:
        self.app = app
        self.keys = keys
        self.largest = largest
        self.open_paths = open_paths
        self.open_requests = open_requests or OpenRequests()
        self.note = note
        self.host_names = host_names
        self.held = 0  # bytes in memory of all bodies that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; give it an id, and log how it ended."""
        # The lifespan of the application, which has no headers to check.
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        start = time.perf_counter()
        # What the log says if the application fails before it begins to answer.
        status = 500
        begun = False
        request_id = request.headers.get("x-request-id", "")[:64] or secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status = message["status"]
                begun = True
                header = (b"x-request-id", request_id.encode("latin-1"))
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self.open_requests.tasks.add(task)
        try:
            refusal = self.check_headers(request)
            if refusal:
                await refusal(scope, receive, send_with_id)
            else:
                await self._run_app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # Cancelled by someone else than the end of the server: not ours to answer.
            if not self.open_requests.aborted:
                raise
            # Without this the next await would raise again, and no answer could be sent.
            task.uncancel()
            if not begun:
                headers = {"retry-after": "5", "connection": "close"}
                answer = make_problem_response(503, ENDING, headers=headers)
                await answer(scope, receive, send_with_id)
        finally:
            self.open_requests.tasks.discard(task)
            seconds = time.perf_counter() - start
            # Paths of no route count together, since clients may make up any number of them.
            self.note(getattr(scope.get("route"), "path", "other"), status, seconds)
            line = {
                "id": request_id,
                "method": request.method,
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
            }
            LOG.info(json.dumps(line))

    def check_headers(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused for its headers."""
        length = request.headers.get("content-length", "0")
        if not is_same_site(request, self.keys, self.host_names):
            return make_problem_response(
                403,
                "Refused a request from another site's page, or to another host's name; call this "
                "server localhost or 127.0.0.1, or start it with API keys.",
            )
        # Read from the scope, because a Host header can change url.path.
        needs_key = self.keys and request.scope["path"] not in self.open_paths
        if needs_key and not has_key(request.headers.get("authorization", ""), self.keys):
            return make_problem_response(
                401,
                "Give a key of this server: Authorization: Bearer KEY.",
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
        if not re.fullmatch(r"[0-9]{1,18}", length):
            return make_problem_response(
                400, "content-length must be a number of bytes; correct it, or leave it out."
            )
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            # Read undecoded, a compressed body would be refused as bad JSON, which would not help.
            return make_problem_response(
                415,
                f"The body is compressed ({printable_name(coding)}), which this server does not "
                "undo; send it uncompressed, without the header Content-Encoding.",
                headers={"accept-encoding": "identity"},
            )
        return None

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; if the body is too large or too slow, answer with an error."""
        headers = Request(scope).headers
        begun = False
        body = Body(receive, self)
        is_form = headers.get("content-type", "").startswith("multipart/form-data")
        body.spooled = is_form and scope["path"] == "/v1/files"

        async def send_unless_refused(message: Message) -> None:
            nonlocal begun
            if body.refused is None or begun:
                begun = True
                await send(message)

        try:
            # Refused before a byte is read. A length may be a lie, so bytes are counted, too.
            if int(headers.get("content-length", "0")) > self.largest:
                body.refused = self.make_size_error()
            else:
                await self.app(scope, body.receive_piece, send_unless_refused)
        # Raised out of `receive_piece`, through the application, to end it.
        except RefusedError:
            pass
        finally:
            self.held -= body.held
        if body.refused is not None and not begun:
            # A client that is still sending would see a reset connection instead of the answer.
            if not body.over and body.refused.status != 408 and "expect" not in headers:
                await drain_body(receive)
            answer = make_problem_response(
                body.refused.status,
                str(body.refused),
                headers={**body.refused.headers, "connection": "close"},
            )
            await answer(scope, receive, send)

    def make_size_error(self) -> RefusedError:
        """Return the error of a body that is too large."""
        return RefusedError(
            413, f"The request is larger than {self.largest - AROUND:,} bytes; split it."
        )


class Body:
    """A request's body as it arrives, which is neither too large nor too slow.

    A `spooled` body goes to disk. `refused` says why a body is not read to its end.
    """

    def __init__(self, receive: Receive, guard: Guard) -> None:
        self.receive = receive
        self.guard = guard
        self.spooled = False
        self.over = False
        self.bytes = 0
        self.held = 0  # bytes in memory
        self.start = time.monotonic()
        self.refused: RefusedError | None = None

    async def receive_piece(self) -> Message:
        """Return the next piece; raise RefusedError."""
        if self.over:  # only a disconnect can follow, which has no limit in time
            return await self.receive()
        try:
            async with asyncio.timeout(IDLE_TIMEOUT):
                message = await self.receive()
        except TimeoutError:
            self.refused = RefusedError(
                408, f"Nothing of the request came for {IDLE_TIMEOUT:g} seconds; send it again."
            )
            raise self.refused from None
        refused = self._count_piece(message)
        if refused:
            self.refused = refused
            raise refused
        return message

    def _count_piece(self, message: Message) -> RefusedError | None:
        """Count a piece; return why no more of the body is read, or None to continue."""
        size = len(message.get("body", b""))
        self.over = message["type"] != "http.request" or not message.get("more_body", False)
        # The framework spools the parts of forms to disk, so these bytes are not in memory.
        self.bytes += size
        if not self.spooled:
            self.held += size
            self.guard.held += size
        if self.bytes > self.guard.largest:
            return self.guard.make_size_error()
        # Small requests always pass: it is the large ones that fill the memory together.
        if self.held > AROUND and self.guard.held > AT_ONCE * self.guard.largest:
            return RefusedError(
                429,
                "Too many large requests come at the same time; send it again in a moment.",
                {"retry-after": "1"},
            )
        # A drip of single bytes would otherwise keep a connection forever.
        slow_seconds = time.monotonic() - self.start - IDLE_TIMEOUT
        if not self.over and self.bytes < SLOWEST * slow_seconds:
            return RefusedError(
                408, f"The request comes slower than {SLOWEST:,} bytes a second; send it again."
            )
        return None


async def drain_body(receive: Receive) -> None:
    """Read what a client still sends, for some seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN):
            while True:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


class Connection(H11Protocol):
    """A connection that ends when its client is silent for a time.

    That is a client that sends no whole request head, or reads nothing of an answer, for
    IDLE_TIMEOUT to twice that.
    """

    def connection_made(self, transport: Transport) -> None:
        """Begin to check for silence, every IDLE_TIMEOUT seconds."""
        super().connection_made(transport)
        self.seen: tuple[object, int] = (None, 0)
        self.loop.call_later(IDLE_TIMEOUT, self.check)

    def check(self) -> None:
        """End a connection on which nothing has moved since the last check."""
        if self not in self.connections:
            return
        # A request that is being answered may take its time; silence then is the server's own.
        idle = self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size()
        if (idle or unread) and self.seen == (self.cycle, unread):
            self.transport.abort()
            return
        self.seen = (self.cycle, unread)
        self.loop.call_later(IDLE_TIMEOUT, self.check)


def is_same_site(request: Request, keys: Sequence[str], host_names: Sequence[str]) -> bool:
    """Return whether a request does not come from a page of another site; with keys, always true.

    Without keys, such a page in a browser on this machine could read the documents here. Its
    requests have its own Origin, or, if it made its name resolve to this machine, that name as
    their Host. `host_names` are names of this machine that a page of another site cannot have.
    """
    if keys:
        return True
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    # Browsers send Origin with every request of a page to another origin.
    if origin is not None and origin.split("://", 1)[-1] != host:
        return False
    # DNS rebinding: the page's own name resolves to 127.0.0.1, but its Host header shows it.
    is_local = request.client is None or request.client.host in LOOPBACK
    # Without its port, which may be missing (if it is 80); an IPv6 address has colons itself.
    name = re.sub(r":[0-9]*$", "", host).strip("[]").lower()
    return not is_local or name in (*LOOPBACK, "localhost", *host_names)


def has_key(header: str, keys: Sequence[str]) -> bool:
    """Return whether a header has one of the keys; each is compared, in constant time."""
    # The name of a scheme may be written in any case (RFC 9110).
    scheme, _, rest = header.partition(" ")
    given = (rest.strip(" ") if scheme.lower() == "bearer" else header).encode()
    # A list, so that `any` does not stop early: the time would reveal which key matched.
    return any([hmac.compare_digest(given, key.encode()) for key in keys])  # noqa: C419


def make_problem_response(
    status: int,
    message: str,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> Response:
    """Return an error as OpenAI's API writes it.

    Args:
        status: The status of the response.
        message: What is wrong, and how to fix it.
        code: OpenAI's name for it.
        headers: The headers of the response.
        param: The field of the request that is at fault.
    """
    kind = "server_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    # A lone surrogate from the request cannot be encoded.
    message = message.encode(errors="replace").decode()
    if param is not None:
        param = param.encode(errors="replace").decode()
    problem = schemas.make_problem(kind, message, code, param)
    return JSONResponse(schemas.to_json(problem), status, headers)
