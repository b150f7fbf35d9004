"""Bodies of requests, checked once before anything else reads them: JSON and small forms.

A body that passes has no lone surrogates (halves of characters), no numbers beyond 64 bits or that
are not finite, no key twice in an object, and few levels. So code that copies, compares, stores or
sends back what is in it cannot fail on it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from restorekv.errors import join_words
from restorekv.files import parse_float, parse_int, parse_object
from restorekv.readers.extract import printable_name
from restorekv.serve.engine import explain_resource_shortage
from restorekv.serve.guard import drain_body
from restorekv.serve.service import ApiError

DEPTH = 100  # levels of a body; the schema of an answer needs some 30
VALUES = 2_000_000  # commas and brackets of a body, so that it is parsed within a second
LARGE = 1 << 16  # bytes of a body that is parsed in a thread
FORM = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")  # fields of an upload
FIELD = 1024  # bytes of a field that is not a file


class CheckedRequest(Request):
    """A request whose body is checked while it is read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.body_ended = False

        async def receive_part() -> Message:
            message = await receive()
            self.body_ended = not message.get("more_body", False)
            return message

        super().__init__(scope, receive_part)

    async def drain(self) -> None:
        """Read the rest of a refused body, so that a client that still sends reads the answer."""
        if not self.body_ended:  # else there is nothing to wait for but the client's leaving
            await drain_body(self.receive)

    async def json(self) -> Any:
        """Return the body as JSON; raise ApiError."""
        # Parsed once, however many handlers ask.
        if not hasattr(self, "_checked"):
            raw = await self.body()
            # Parsing a large body would hold up the event loop, and with it all answers.
            if len(raw) > LARGE:
                self._checked = await asyncio.to_thread(parse_body, raw)
            else:
                self._checked = parse_body(raw)
        return self._checked

    # Starlette's can also be used as a context manager, which FastAPI does not do.
    async def form(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **_: object
    ) -> FormData:
        """Return the form of an upload, which has one file and small fields; raise ApiError."""
        try:
            form = await super().form(max_files=1, max_fields=len(FORM), max_part_size=FIELD)
        except HTTPException as error:
            # Starlette's own words for a form that is too large or not a form.
            await self.drain()
            raise _make_form_error(str(error.detail).rstrip(".")) from None
        except OSError as error:  # a large file goes to a temporary one
            shortage = explain_resource_shortage(error)
            if shortage is None:
                raise
            await self.drain()
            raise ApiError(*shortage) from None
        try:
            _check_form(form)
        except ApiError:
            # Removes the temporary file of the upload.
            await form.close()
            raise
        return form


class CheckedRoute(APIRoute):
    """A route that makes its requests checked ones and refuses unknown parameters of the query."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        known = {field.alias for field in self.dependant.query_params}

        async def handle(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    raise _make_query_error(name, sorted(known))
            return await handler(CheckedRequest(request.scope, request.receive))

        return handle


def _make_query_error(name: str, known: Sequence[str]) -> ApiError:
    """Return the error of a query with a parameter that would be ignored."""
    printable = printable_name(name)[:60]
    takes = f"takes {join_words(known, 'and')}" if known else "takes none"
    message = f"{printable} is not a parameter of this path, which {takes}; leave it out."
    return ApiError(400, message, "unknown_parameter", printable)


def _check_form(form: FormData) -> None:
    """Refuse unknown fields, those that come twice, a missing file, and a text instead of it."""
    counts = Counter(name for name, _ in form.multi_items())
    for name, count in counts.items():
        if name not in FORM:
            printable = printable_name(name)[:60]
            raise _make_form_error(
                f"there is no field {printable!r}", printable, "unknown_parameter"
            )
        if count > 1:
            raise _make_form_error(f"the field {name} comes {count} times", name)
    # A body of another content type, such as JSON, is a form without fields.
    if "file" not in counts:
        why = "no whole file is in it, or its Content-Type is not multipart/form-data"
        raise _make_form_error(why, "file")
    if isinstance(form.get("file"), str):
        why = "the field file has a text and not a file, which curl sends as file=@PATH"
        raise _make_form_error(why, "file")


def _make_form_error(why: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a form that is refused, which says what a form may have."""
    known = join_words(FORM[1:], "and")
    message = (
        f"The form cannot be used ({why}); send one file and, of at most {FIELD:,} bytes each, "
        f"{known}."
    )
    return ApiError(400, message, code, param)


def parse_body(raw: bytes) -> Any:
    """Return the JSON value of a body; raise ApiError if it is malformed or breaks a rule above."""
    # Counted in the bytes, since a small body can hold millions of values, which take minutes.
    marks = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if marks > VALUES:
        raise ApiError(
            400,
            f"The body has more than {VALUES:,} commas and brackets; send a document as a file.",
        )
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=parse_object,
            parse_constant=parse_float,
            parse_float=parse_float,
            parse_int=parse_int,
        )
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON (at character {error.pos}).") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8 (at byte {error.start}).") from None
    except RecursionError:
        raise _make_depth_error() from None
    except ValueError as error:  # of the hooks
        raise ApiError(400, f"The body cannot be used: {error}.") from None
    _check_value(value)
    return value


def _check_value(body: Any) -> None:
    """Refuse deep nesting and lone surrogates; the error names the field at the top level."""
    members = body.items() if isinstance(body, dict) else [(None, body)]
    for field, value in members:
        # One level after the other, since recursion itself could go too deep.
        level = [field, value]
        for _ in range(DEPTH):
            below: list[Any] = []
            for each in level:
                if isinstance(each, str):
                    _check_text(each, field)
                elif isinstance(each, dict):
                    below += each.keys()
                    below += each.values()
                elif isinstance(each, list):
                    below += each
            level = below
            if not level:
                break
        if level:
            raise _make_depth_error(field)


def _check_text(text: str, field: str | None) -> None:
    """Refuse a lone surrogate (half a character), such as "\\ud800" in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = field.encode(errors="replace").decode()[:60] if field else None
        where = f"The field {name}" if name else "The body"
        raise ApiError(
            400,
            f"{where} is not Unicode at character {error.start + 1} of a text; write whole "
            "characters, not halves of pairs.",
            param=name,
        ) from None


def _make_depth_error(field: str | None = None) -> ApiError:
    """Return the error of a body that is nested too deep."""
    name = None if field is None else field[:60]
    where = f"The field {name}" if name else "The body"
    return ApiError(400, f"{where} has more than {DEPTH} levels; send it with fewer.", param=name)
