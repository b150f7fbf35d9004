"""The page at `/`: its static files, and the three endpoints that it needs besides OpenAI's.

`/v1/variants` says which methods work on the model, `/v1/files/{id}/progress` how far a compression
is, and `/v1/files/{id}/kept` which tokens survive it.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from restorekv.compression.presets import PRESETS
from restorekv.evictors import EVICTORS
from restorekv.serve import schemas
from restorekv.serve.engine import WAITING
from restorekv.serve.index import FAILED
from restorekv.serve.service import ApiError, Service
from restorekv.serve.variants import Variant

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
PATHS = ("/", *(f"/page/{name}" for name in FILES))
METHODS = [*PRESETS, *(name for name in EVICTORS if name not in {*PRESETS.values(), "kvpress"})]
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'none'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, service: Service) -> None:
    """Add the page and its endpoints."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return send_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return send_file(name)

    @app.get("/v1/variants", response_model=schemas.Variants)
    async def variants() -> dict:
        default = service.default_variant
        return {
            "base": service.model_name,
            "default": {"method": default.method, "ratio": float(default.ratio)},
            "methods": [name for name in METHODS if service.engine.has_method(name)],
            "max_tokens": service.limits.tokens,
        }

    @app.get("/v1/files/{name}/progress", response_model=schemas.CompressionProgress)
    async def progress(name: str, model: str) -> dict:
        upload = service.find_upload(name)
        variant = service.choose_variant(upload, Variant.parse(model, service.model_name))
        state = service.engine.get_state(upload.sha256, variant)
        if state == WAITING and upload.status == FAILED:
            return {"phase": FAILED, "share": 0.0}
        return {"phase": state.phase, "share": state.share}

    @app.get("/v1/files/{name}/kept", response_model=schemas.Kept)
    async def kept(
        name: str, model: str, layer: int | None = None, head: int | None = None
    ) -> dict:
        document = await service.get_uploaded(name, Variant.parse(model, service.model_name))
        return await service.engine.find_survivors(document, layer, head)


def send_file(name: str) -> Response:
    """Return a file of the page; refuse all other names."""
    if name not in FILES:
        raise ApiError(404, "The page has no such file.")
    path = FILES[name]
    return Response(
        path.read_bytes(), media_type=f"{TYPES[path.suffix]}; charset=utf-8", headers=HEADERS
    )
