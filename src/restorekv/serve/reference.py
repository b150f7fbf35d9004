"""The page at `/docs`: every path of `/openapi.json` as plain HTML, which loads nothing."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from restorekv.serve.page import HEADERS

PATH = "/docs"
REFERENCE = "#/components/schemas/"
METHODS = ("get", "post", "put", "patch", "delete")


def add_reference(app: FastAPI) -> None:
    """Add the page."""

    @app.get(PATH, include_in_schema=False)
    async def reference() -> Response:
        content = render_reference(app.openapi())
        return Response(content, media_type="text/html; charset=utf-8", headers=HEADERS)


def render_reference(description: dict[str, Any]) -> str:
    """Return an OpenAPI description as an HTML page."""
    sections = []
    for path, operations in description["paths"].items():
        for method in METHODS:
            if method in operations:
                sections.append(_render_operation(path, method, operations[method]))
    schemas = []
    for name, schema in description.get("components", {}).get("schemas", {}).items():
        schemas.append(_render_schema(name, schema))
    title = escape(description["info"]["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}: API</title><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="page/style.css"></head><body><main>'
        f"<h1>{title}: API</h1>"
        '<p>OpenAI\'s API, and paths of this server. The same as JSON: <a href="openapi.json">'
        "/openapi.json</a>.</p>"
        f"{''.join(sections)}<h2>Objects</h2>{''.join(schemas)}</main></body></html>\n"
    )


def _render_operation(path: str, method: str, operation: dict[str, Any]) -> str:
    """Return the section of a method of a path."""
    rows = []
    for parameter in operation.get("parameters", []):
        kind = _describe_type(parameter["schema"])
        rows.append(_render_row(parameter["name"], kind, parameter["in"]))
    for media, body in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(_render_row("body", _describe_type(body["schema"]), escape(media)))
    for status, response in operation.get("responses", {}).items():
        kinds = []
        for media, content in response.get("content", {}).items():
            kinds.append(f"{escape(media)} {_describe_type(content.get('schema', {}))}")
        rows.append(_render_row(status, ", ".join(kinds), escape(response["description"])))
    return (
        f"<section class=card><h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<table>{''.join(rows)}</table></section>"
    )


def _render_schema(name: str, schema: dict[str, Any]) -> str:
    """Return the section of an object, with its fields."""
    required = schema.get("required", ())
    rows = []
    for field, kind in schema.get("properties", {}).items():
        need = "required" if field in required else ""
        rows.append(_render_row(field, _describe_type(kind), need))
    about = escape(schema.get("description", ""))
    anchor = escape(name, quote=True)
    return (
        f'<section class=card id="{anchor}"><h3><code>{anchor}</code></h3>'
        f"<p>{about}</p><table>{''.join(rows)}</table></section>"
    )


def _render_row(name: str, kind: str, about: str) -> str:
    return f"<tr><th scope=row><code>{escape(name)}</code></th><td>{kind}</td><td>{about}</td></tr>"


def _describe_type(schema: dict[str, Any]) -> str:
    """Return the kind of a value as HTML; an object's name is a link to its fields."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REFERENCE), quote=True)
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_describe_type(each) for each in schema[several])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_describe_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))
