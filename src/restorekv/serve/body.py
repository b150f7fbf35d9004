"""Bodies of requests, checked once before anything else reads them: JSON that is data, and forms
that are small.

What passes has no half characters, no numbers beyond 64 bits or that are not finite, no key twice,
and few levels, so that whatever copies, compares, remembers or sends it back cannot fail on it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from restorekv.files import _parse_float, _parse_int, _parse_object
from restorekv.readers.extract import printable_name
from restorekv.serve.engine import explain_lack
from restorekv.serve.guard import drained

DEPTH = 100  # levels of a body; the schema of an answer needs some 30
VALUES = 2_000_000  # commas and brackets of a body, so that it is parsed within a second
LARGE = 1 << 16  # bytes of a body that is parsed in a thread
FORM = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")  # fields of an upload
FIELD = 1024  # bytes of a field that is no file


class BodyError(HTTPException):
    """A body that is refused; `param` is the field at fault, where there is one."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.message = message
        self.param = param
        self.code = code


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
        """Reads the rest of a refused body, so that a client that still sends reads the answer."""
        if not self.body_ended:  # else there is nothing to wait for but the client's leaving
            await drained(self.receive)

    async def json(self) -> Any:
        """Returns the body as JSON; raises BodyError."""
        if not hasattr(self, "_checked"):
            raw = await self.body()
            self._checked = (
                await asyncio.to_thread(parse_body, raw) if len(raw) > LARGE else parse_body(raw)
            )
        return self._checked

    async def form(self, **_: object) -> FormData:
        """Returns the form of an upload, which has one file and small fields; raises BodyError."""
        try:
            made = await super().form(max_files=1, max_fields=len(FORM), max_part_size=FIELD)
        except HTTPException as error:
            await self.drain()
            raise form_error(str(error.detail).rstrip(".")) from None
        except OSError as error:  # a large file goes to a temporary one
            if (lack := explain_lack(error)) is None:
                raise
            await self.drain()
            raise BodyError(*lack) from None
        try:
            check_form(made)
        except BodyError:
            await made.close()
            raise
        return made


class CheckedRoute(APIRoute):
    """A route whose requests are checked ones."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(CheckedRequest(request.scope, request.receive))

        return handle


def check_form(form: FormData) -> None:
    """Refuses fields that an upload does not have, and those that come twice."""
    for name, count in Counter(name for name, _ in form.multi_items()).items():
        if name not in FORM:
            raise form_error(
                f"there is no field {printable_name(name)[:60]!r}",
                printable_name(name)[:60],
                "unknown_parameter",
            )
        if count > 1:
            raise form_error(f"the field {name} comes {count} times", name)


def form_error(why: str, param: str | None = None, code: str | None = None) -> BodyError:
    known = f"{', '.join(FORM[1:-1])} and {FORM[-1]}"
    message = f"The form cannot be used ({why}); send one file and, of at most {FIELD:,} bytes each, {known}."
    return BodyError(400, message, param, code)


def parse_body(raw: bytes) -> Any:
    """Returns the JSON value of a body; raises BodyError for what a program should not compute
    with.
    """
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > VALUES:
        raise BodyError(
            400,
            f"The body has more than {VALUES:,} commas and brackets; send a document as a file.",
        )
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=_parse_object,
            parse_constant=_parse_float,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except json.JSONDecodeError as error:
        raise BodyError(400, f"The body is not valid JSON (at character {error.pos}).") from None
    except UnicodeDecodeError as error:
        raise BodyError(400, f"The body is not UTF-8 (at byte {error.start}).") from None
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:  # of the hooks
        raise BodyError(400, f"The body cannot be used: {error}.") from None
    check_value(value)
    return value


def check_value(body: Any) -> None:
    """Refuses deep nesting and half characters, and names the field at its top in which they are."""
    for field, value in body.items() if isinstance(body, dict) else [(None, body)]:
        level = [field, value]
        for _ in range(DEPTH):
            below: list[Any] = []
            for each in level:
                if isinstance(each, str):
                    check_text(each, field)
                elif isinstance(each, dict):
                    below += each.keys()
                    below += each.values()
                elif isinstance(each, list):
                    below += each
            level = below
            if not level:
                break
        if level:
            raise too_deep(field)


def check_text(text: str, field: str | None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = field.encode(errors="replace").decode()[:60] if field else None
        where = f"The field {name}" if name else "The body"
        why = f"is not Unicode at character {error.start + 1} of a text; write whole characters, not halves of pairs"
        raise BodyError(400, f"{where} {why}.", name) from None


def too_deep(field: str | None = None) -> BodyError:
    where = f"The field {field[:60]}" if field else "The body"
    return BodyError(
        400, f"{where} has more than {DEPTH} levels; send it with fewer.", field and field[:60]
    )
