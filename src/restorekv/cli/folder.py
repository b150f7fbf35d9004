"""`restorekv compress FOLDER -o FOLDER`: a cache file for every document of a folder, here or on a
Ray cluster.

Beside the cache files, `.made/` has a record of what each was made of, so that a run that was
stopped goes on.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from restorekv import __version__
from restorekv.bounds import TEXT_BYTES
from restorekv.cli.session import (
    check_outputs_apart,
    notes,
    open_model,
    output,
    show_progress_share,
)
from restorekv.compression.adapters import load_adapter
from restorekv.compression.budget import parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.context import format_bytes
from restorekv.errors import RestoreKVError, summarize_error
from restorekv.files import check_target, read_bytes, read_record, write_json
from restorekv.model.identity import identify_model
from restorekv.model.prompt import get_default_between
from restorekv.pipeline import compress
from restorekv.readers.extract import extract_text
from restorekv.seal import digest_file
from restorekv.storage.cache_file import read_cache

ENDINGS = {".txt", ".text", ".md", ".markdown", ".html", ".htm", ".pdf", ".docx"}
# What one document may raise without ending the others.
EXPECTED = (RestoreKVError, OSError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class CompressionRecipe:
    """The model and how texts are compressed; `options` and `config` are those of `compress`."""

    model: str
    dtype: str
    device: str
    yarn: float | None
    options: dict[str, Any]
    config: CompressionConfig


@dataclass(frozen=True)
class DocumentResult:
    """What became of a document: `done` is "wrote" or "kept", or "failed" with the reason."""

    done: str
    held: int = 0
    full: int = 0
    reason: str = ""


class DocumentCompressor:
    """Compress documents with a model that it opens once."""

    def __init__(self, recipe: CompressionRecipe) -> None:
        self.recipe = recipe
        self.opened = None

    def open(self) -> None:
        """Open the model and finds out what decides every cache file."""
        if self.opened:
            return
        recipe = self.recipe
        options = self.recipe.options
        model, tokenizer = open_model(recipe.model, recipe.dtype, recipe.device, recipe.yarn)
        how = make_compressor(options["evictor"], recipe.config)
        between = get_default_between(tokenizer)
        ratio = parse_ratio(options["ratio"]) if options["ratio"] else None
        identity = identify_model(model, tokenizer)
        adapter = load_adapter(
            model,
            options["adapter"],
            how,
            recipe.config.restore_tokens,
            between,
            ratio,
            identity,
        )
        settings = vars(recipe.config) | recipe.config.to_json()
        del settings["between"]  # which is a fact already
        facts = [
            __version__,
            identity.fingerprint,
            identity.rope,
            identity.template,
            str(model.dtype),
            between,
            how.identity(model),
            adapter and adapter.identity(),
            {**options, **settings},
        ]
        self.facts = json.dumps(facts, sort_keys=True, default=str)
        self.opened = (model, tokenizer)

    def make(self, source: str, name: str, target: str) -> DocumentResult:
        """Write the cache file of a document, unless it is there already."""
        try:
            return self.made(Path(source), name, Path(target))
        except EXPECTED as error:
            reason = str(error) if isinstance(error, RestoreKVError) else summarize_error(error)
            return DocumentResult("failed", reason=reason or type(error).__name__)

    def made(self, source: Path, name: str, target: Path) -> DocumentResult:
        """See `make`; raises what is wrong with the document."""
        self.open()
        content = read_bytes(source, name, TEXT_BYTES)
        record = _locate_record(target)
        digest = hashlib.sha256(self.facts.encode() + content).hexdigest()
        if (there := _find_existing(target, record, digest)) is not None:
            return there
        target.parent.mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(exist_ok=True)
        compressed = compress(
            *self.opened,
            extract_text(name, content),
            config=self.recipe.config,
            **self.recipe.options,
        )
        seconds = compressed.manifest.seconds
        plain = replace(compressed.manifest, seconds={})
        record.unlink(missing_ok=True)  # a run that ends between the two lines below leaves none
        replace(compressed, manifest=plain).save(target)  # the same bytes, whoever makes it
        write_json(
            record, {"of": digest, "file": digest_file(target), "seconds": seconds}, follow=False
        )
        return DocumentResult("wrote", plain.bytes_held, plain.bytes_full)


def _locate_record(target: Path) -> Path:
    return target.parent / ".made" / f"{target.name}.json"


def _find_existing(target: Path, record: Path, digest: str) -> DocumentResult | None:
    """Return what is there if it is whole and made of the same; old records do not name the file's
    bytes.
    """
    if not target.exists() or not record.exists():
        return None
    try:
        made = read_record(record, str(record))
        if made.get("of") != digest:
            return None
        manifest = read_cache(target).manifest
        if made.get("file") not in (None, digest_file(target)):
            return None
    except (RestoreKVError, AttributeError):  # damaged: it is made again
        return None
    return DocumentResult("kept", manifest.bytes_held, manifest.bytes_full)


def _list_documents(folder: Path) -> list[Path]:
    """Return the documents below a folder, relative to it, in order."""
    below = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    found = [
        path
        for path in below
        if path.suffix.lower() in ENDINGS and not any(p.startswith(".") for p in path.parts)
    ]
    if not found:
        raise RestoreKVError(
            f"The folder {folder} has no document ({', '.join(sorted(ENDINGS))}); name another one."
        )
    return found


def compress_folder(
    folder: Path,
    out: Path,
    recipe: CompressionRecipe,
    ray: str | None,
    workers: int,
    figures: Path | None,
) -> None:
    """Compress every document of a folder; raises RestoreKVError at the end if some could not be."""
    names = _list_documents(folder)
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is not a folder; the documents of a folder go into one.")
    out.mkdir(parents=True, exist_ok=True)
    check_target(out / "x.rkv")
    start = time.perf_counter()
    sizes = [(folder / name).stat().st_size + 1 for name in names]
    work = [
        (str((folder / name).resolve()), str(name), str((out / f"{name}.rkv").resolve()))
        for name in names
    ]
    check_outputs_apart(
        [figures], [each for source, _, target in work for each in (source, target)]
    )
    made: list[DocumentResult] = []
    with (
        _open_compressors(recipe, ray, workers) as each,
        show_progress_share("compressing") as update,
    ):
        update(str(names[0]), 0.0)
        for number, (name, one) in enumerate(zip(names, each(work), strict=True), 1):
            made.append(one)
            if one.done == "failed":
                notes.print(f"{name}: {one.reason}", markup=False, highlight=False, soft_wrap=True)
            update(
                f"{number} of {len(names)}, {names[min(number, len(names) - 1)]}",
                sum(sizes[:number]) / sum(sizes),
            )
    counts = {done: sum(one.done == done for one in made) for done in ("wrote", "kept", "failed")}
    if figures:
        rows = {str(name): vars(one) for name, one in zip(names, made, strict=True)}
        write_json(figures, {**counts, "seconds": time.perf_counter() - start, "documents": rows})
    held, full = (sum(getattr(one, part) for one in made) for part in ("held", "full"))
    output.print(
        f"Wrote {counts['wrote']} cache files to {out}, {counts['kept']} were there: {format_bytes(held)} of {format_bytes(full)} in "
        f"{time.perf_counter() - start:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if counts["failed"]:
        what = "document" if len(names) == 1 else f"of {len(names)} documents"
        raise RestoreKVError(
            f"{counts['failed']} {what} could not be compressed; mend what is named above and run it again."
        )


@contextmanager
def _open_compressors(recipe: CompressionRecipe, ray: str | None, workers: int) -> Iterator[Any]:
    """Yield a function that takes (source, name, target) of every document and yields what became
    of each.
    """
    if ray is None:
        maker = DocumentCompressor(recipe)
        maker.open()
        yield lambda work: (maker.make(*each) for each in work)
        return
    from restorekv.cli.ray_folder import RayCompressorPool  # Ray is an optional extra

    with RayCompressorPool(recipe, workers, ray) as pool:
        next(pool.run_calls([("open", ())]))  # a model that cannot be opened ends all
        yield lambda work: pool.run_calls([("make", arguments) for arguments in work])
