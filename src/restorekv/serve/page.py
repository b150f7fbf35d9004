"""The page at `/`: its static files, and the three endpoints that it needs besides OpenAI's.

`/v1/variants` says which methods there are, `/v1/files/{id}/progress` how far a compression is, and
`/v1/files/{id}/kept` which tokens survive it.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.compressor import PRESETS
from restorekv.compression.context import CompressedContext
from restorekv.evictors import EVICTORS
from restorekv.serve.service import ApiError, Service
from restorekv.serve.store import FAILED
from restorekv.serve.variants import Variant

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
PATHS = ("/", *(f"/page/{name}" for name in FILES))
METHODS = [*PRESETS, *(name for name in EVICTORS if name not in {*PRESETS.values(), "kvpress"})]
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache",
}  # fmt: skip
LONGEST = 8  # tokens that one character may take


def add_page(app: FastAPI, service: Service) -> None:
    """Adds the page and its endpoints."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return static("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return static(name)

    @app.get("/v1/variants")
    async def variants() -> dict:
        default = service.default
        chosen = {"method": default.method, "ratio": float(default.ratio)}
        return {"base": service.base, "default": chosen, "methods": METHODS, "max_tokens": service.limits.tokens}

    @app.get("/v1/files/{name}/progress")
    async def progress(name: str, model: str) -> dict:
        return {"phase": phase(service, name, Variant.parse(model, service.base))}

    @app.get("/v1/files/{name}/kept")
    async def kept(name: str, model: str, layer: int | None = None, head: int | None = None) -> dict:
        context, _ = await service.document("file", name, Variant.parse(model, service.base))
        return await asyncio.to_thread(survivors, context, layer, head)


def static(name: str) -> Response:
    """Returns a file of the page; a name that is none of them is refused, whatever it is."""
    if name not in FILES:
        raise ApiError(404, "The page has no such file.")
    path = FILES[name]
    return Response(path.read_bytes(), media_type=f"{TYPES[path.suffix]}; charset=utf-8", headers=HEADERS)


def phase(service: Service, name: str, variant: Variant) -> str:
    """Returns what is done now to make a cache: "waiting", a phase of `compress`, "error" or "ready"."""
    upload, engine = service.found(name), service.engine
    key, (making, now) = engine.key(upload.sha256, variant), engine.phase
    if making == key:
        return now
    if upload.status == FAILED:
        return FAILED
    return "ready" if key in engine.held or service.store.find(key) else "waiting"


def survivors(context: CompressedContext, layer: int | None, head: int | None) -> dict:
    """Returns the text in pieces, each with the share of heads that hold it, and what the cache holds.

    `layer` and `head` count those heads alone; None is all of them.
    """
    kept, manifest, start = context.kept, context.manifest, context.context.prefix
    layers, heads, columns = kept.shape
    chosen = kept[within("layer", layer, layers), within("head", head, heads), start:]
    shares = chosen.float().mean((0, 1))
    pieces = pieces_of(context.tokenizer, tuple(context.context.ids[0, start:].tolist()))
    edges = [0]
    for _, tokens in pieces:
        edges.append(edges[-1] + tokens)
    spans = zip(pieces, edges[:-1], edges[1:], strict=True)
    return {
        "layers": layers, "heads": heads, "tokens": manifest.tokens, "surviving": int((shares > 0).sum()),
        "restore_tokens": manifest.restore_tokens, "evictor": manifest.evictor, "seconds": manifest.seconds,
        "pairs": {"before": layers * heads * columns, "after": manifest.pairs_held},
        "bytes": {"before": manifest.bytes_full, "after": manifest.bytes_held},
        "pieces": [[text, round(float(shares[first:last].mean()), 4)] for (text, _), first, last in spans],
    }  # fmt: skip


def within(name: str, index: int | None, size: int) -> slice:
    """Returns the slice of one layer or head, or of all."""
    if index is not None and not 0 <= index < size:
        raise ApiError(400, f"{name} is a number from 0 to {size - 1}; leave it out for all of them.")
    return slice(None) if index is None else slice(index, index + 1)


@lru_cache(maxsize=8)
def pieces_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[tuple[str, int]]:
    """Returns the text of each token, and of several where only together they make whole characters."""
    pieces: list[tuple[str, int]] = []
    before, start = 0, 0  # decoding from an earlier token keeps the space between words
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(ids[before:start])
        text = tokenizer.decode(ids[before:end])
        if text.endswith("\ufffd") and end - start < LONGEST and end < len(ids):
            continue
        whole = text.startswith(known)  # a tokenizer that cleans spaces may change it
        pieces.append((text[len(known) :] if whole else tokenizer.decode(ids[start:end]), end - start))
        before, start = start, end
    return pieces
