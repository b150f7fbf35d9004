"""`restorekv compress FOLDER -o FOLDER`: a cache file for every document of a folder, here or on a
Ray cluster.

Next to the cache files, `.made/` has a record of what each was made of, so that a run that was
stopped continues.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.cli.errors import name_flags
from restorekv.cli.inputs import check_json_output, check_outputs_apart
from restorekv.cli.session import open_model
from restorekv.cli.terminal import notes, output, show_progress_share, write_figures
from restorekv.compression.adapters import load_adapter
from restorekv.compression.budget import parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.context import format_bytes
from restorekv.errors import RestoreKVError, make_printable, summarize_error
from restorekv.files import check_target, list_files, read_bytes, read_record, write_json
from restorekv.model.identity import identify_model
from restorekv.pipeline import compress
from restorekv.readers.extract import read_document
from restorekv.seal import digest_file
from restorekv.size_limits import TEXT_BYTES
from restorekv.storage.cache_file import open_cache_file

ENDINGS = {".txt", ".text", ".md", ".markdown", ".html", ".htm", ".pdf", ".docx"}
SHOWN_NAMES = 5  # of files that are left out, or that have no document any more
# What one document may raise without ending the others.
EXPECTED = (RestoreKVError, OSError, MemoryError, RuntimeError)


@dataclass(frozen=True)
class CompressionRecipe:
    """The model, and how it compresses texts: what `compress` takes."""

    model: str
    dtype: str
    device: str
    yarn: float | None
    evictor: str
    ratio: str | None
    tokens_per_head: int | None
    adapter: str | None
    config: CompressionConfig

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `compress` besides `config`."""
        return {
            "evictor": self.evictor,
            "ratio": self.ratio,
            "tokens_per_head": self.tokens_per_head,
            "adapter": self.adapter,
        }


@dataclass(frozen=True)
class DocumentResult:
    """What became of a document.

    Attributes:
        outcome: "wrote", "kept", or "failed" with the reason.
        held: Bytes of the small cache.
        full: Bytes of the full cache.
        reason: Why it failed.
        warning: What of the document could not be read.
    """

    outcome: str
    held: int = 0
    full: int = 0
    reason: str = ""
    warning: str = ""


class DocumentCompressor:
    """Compresses documents with a model that it opens once."""

    def __init__(self, recipe: CompressionRecipe) -> None:
        self.recipe = recipe
        self.model_and_tokenizer: tuple[PreTrainedModel, Tokenizer] | None = None
        # JSON of all that decides a cache file, except the document.
        self.recipe_identity = ""

    def open(self) -> None:
        """Open the model, at the first call, and record the identity of model and settings."""
        if self.model_and_tokenizer is None:
            recipe = self.recipe
            opened = open_model(recipe.model, recipe.dtype, recipe.device, recipe.yarn)
            self.recipe_identity = self._identify(*opened)
            self.model_and_tokenizer = opened

    def _identify(self, model: PreTrainedModel, tokenizer: Tokenizer) -> str:
        """Return JSON of what decides every cache file; refuse an adapter that does not fit."""
        recipe = self.recipe
        config = recipe.config
        compressor = make_compressor(recipe.evictor, config)
        identity = identify_model(model, tokenizer)
        separator = config.choose_separator(tokenizer)
        adapter = load_adapter(
            model,
            recipe.adapter,
            compressor,
            config.restore_tokens,
            separator,
            parse_ratio(recipe.ratio) if recipe.ratio else None,
            identity,
        )
        settings = {**recipe.get_options(), **vars(config), **config.to_json()}
        # The text that is used is listed below.
        del settings["separator"]
        deciding = [
            __version__,
            identity.fingerprint,
            identity.rope,
            identity.template,
            str(model.dtype),
            separator,
            compressor.identity(model),
            compressor.digest_code(),
            adapter and adapter.identity(),
            settings,
        ]
        return json.dumps(deciding, sort_keys=True, default=str)

    def compress_document(self, source: str, name: str, target: str) -> DocumentResult:
        """Write the cache file of a document, unless it is there already."""
        try:
            return self._compress(Path(source), name, Path(target))
        except EXPECTED as error:
            reason = summarize_error(error)
            if isinstance(error, RestoreKVError):
                reason = name_flags(str(error))
            return DocumentResult("failed", reason=reason or type(error).__name__)

    def _compress(self, source: Path, name: str, target: Path) -> DocumentResult:
        """Compress one document; raise what is wrong with it."""
        self.open()
        assert self.model_and_tokenizer is not None
        model, tokenizer = self.model_and_tokenizer
        content = read_bytes(source, name, TEXT_BYTES)
        record = _locate_record(target)
        digest = hashlib.sha256(self.recipe_identity.encode() + content).hexdigest()
        result = _find_existing(target, record, digest)
        if result is not None:
            return result
        target.parent.mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(exist_ok=True)
        extraction = read_document(name, content)
        compressed = compress(
            model,
            tokenizer,
            extraction.text,
            config=self.recipe.config,
            **self.recipe.get_options(),
        )
        # Without its seconds, a cache file has the same bytes, whoever makes it.
        manifest = replace(compressed.manifest, seconds={})
        # The record is deleted before the cache file is replaced and written afterwards, so that a
        # run that is killed in between leaves no record.
        record.unlink(missing_ok=True)
        replace(compressed, manifest=manifest).save(target)
        entries = {
            "of": digest,
            "file": digest_file(target),
            "seconds": compressed.manifest.seconds,
            "warning": extraction.warning,
        }
        write_json(record, entries, follow=False)
        return DocumentResult(
            "wrote", manifest.bytes_held, manifest.bytes_full, warning=extraction.warning
        )


def _locate_record(target: Path) -> Path:
    """Return where the record of a cache file is."""
    return target.parent / ".made" / f"{target.name}.json"


def _find_existing(target: Path, record: Path, digest: str) -> DocumentResult | None:
    """Return the result of an intact cache file of the same document and settings, or None."""
    if not target.exists() or not record.exists():
        return None
    try:
        entries = read_record(record, str(record))
        if entries.get("of") != digest:
            return None
        manifest = open_cache_file(target).manifest
        # Old records do not name the file's bytes.
        if entries.get("file") not in (None, digest_file(target)):
            return None
    except (RestoreKVError, AttributeError):  # damaged: it is made again
        return None
    # The document is not read again, and what it lacks is said again. Old records do not say it.
    warning = entries.get("warning", "")
    if not isinstance(warning, str) or not warning.isprintable():
        return None
    return DocumentResult("kept", manifest.bytes_held, manifest.bytes_full, warning=warning)


def _list_documents(folder: Path) -> list[Path]:
    """Return the documents below a folder, relative to it, in order, and say what is left out.

    Hidden files do not count and are not named. Folders that are linked there count.
    """
    documents = []
    others = []
    for path in list_files(folder, hidden=False):
        name = path.relative_to(folder)
        if name.suffix.lower() in ENDINGS:
            documents.append(name)
        else:
            others.append(name)
    if others:
        notes.print(
            f"Left out, because of the ending: {_name_some(others)}. "
            f"Endings that are read: {', '.join(sorted(ENDINGS))}.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if not documents:
        raise RestoreKVError(
            f"The folder {folder} has no document ({', '.join(sorted(ENDINGS))}); name another one."
        )
    return documents


def _name_some(names: Sequence[Path]) -> str:
    """Return the first names of a list, and how many more there are."""
    named = ", ".join(make_printable(str(name)) for name in names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        named += f" and {len(names) - SHOWN_NAMES} more"
    return named


def _list_orphans(out: Path, targets: Collection[Path]) -> list[Path]:
    """Return the cache files of earlier runs, relative to their folder, that are of none of the
    documents: those were removed or renamed, or are of another folder.

    A cache file without a record was not made by a run over a folder, and is not named.
    """
    orphans = []
    for path in list_files(out, hidden=False):
        is_target = path.resolve() in targets
        if path.suffix == ".rkv" and not is_target and _locate_record(path).exists():
            orphans.append(path.relative_to(out))
    return orphans


def compress_folder(
    folder: Path,
    out: Path,
    recipe: CompressionRecipe,
    ray: str | None,
    workers: int,
    figures: Path | None,
) -> None:
    """Compress every document of a folder.

    Args:
        folder: The folder of documents.
        out: The folder of cache files, which is created if needed.
        recipe: The model, and how it compresses.
        ray: A Ray cluster; None is this process.
        workers: How many documents at once, with `ray`.
        figures: A file for the figures.

    Raises:
        RestoreKVError: At the end, if some could not be compressed.
    """
    names = _list_documents(folder)
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is not a folder; the documents of a folder go into one.")
    out.mkdir(parents=True, exist_ok=True)
    check_target(out / "x.rkv")
    work = []
    for name in names:
        source = (folder / name).resolve()
        target = (out / f"{name}.rkv").resolve()
        work.append((str(source), str(name), str(target)))
    sources_and_targets = [path for source, _, target in work for path in (source, target)]
    check_outputs_apart([figures], sources_and_targets)
    check_json_output(figures)

    start = time.perf_counter()
    results = _compress_all(names, work, folder, recipe, ray, workers)
    seconds = time.perf_counter() - start

    counts = {"wrote": 0, "kept": 0, "failed": 0}
    for result in results:
        counts[result.outcome] += 1
    orphans = _list_orphans(out, {Path(target) for _, _, target in work})
    if figures:
        rows = {str(name): vars(each) for name, each in zip(names, results, strict=True)}
        content = {
            **counts,
            "seconds": seconds,
            "documents": rows,
            "without_document": [str(name) for name in orphans],
        }
        write_figures(figures, content)
    held = sum(result.held for result in results)
    full = sum(result.full for result in results)
    output.print(
        f"Cache files in {out}: {counts['wrote']} written, {counts['kept']} already there; "
        f"{format_bytes(held)} of {format_bytes(full)} in {seconds:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if orphans:
        output.print(
            f"Cache files in {out} without a document in {folder}: {_name_some(orphans)}; delete "
            "those that you no longer need.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if counts["failed"]:
        what = "document" if len(names) == 1 else f"of {len(names)} documents"
        raise RestoreKVError(
            f"{counts['failed']} {what} could not be compressed; fix what is named above and run "
            "it again."
        )


def _compress_all(
    names: list[Path],
    work: list[tuple[str, str, str]],
    folder: Path,
    recipe: CompressionRecipe,
    ray: str | None,
    workers: int,
) -> list[DocumentResult]:
    """Return what became of every document, in order; show progress by the sizes of the files."""
    sizes = [(folder / name).stat().st_size + 1 for name in names]
    results: list[DocumentResult] = []
    with (
        _open_compressors(recipe, ray, workers) as compress_each,
        show_progress_share("compressing") as update,
    ):
        update(str(names[0]), 0.0)
        for name, result in zip(names, compress_each(work), strict=True):
            results.append(result)
            if result.outcome == "failed":
                notes.print(
                    f"{name}: {result.reason}", markup=False, highlight=False, soft_wrap=True
                )
            if result.warning:
                notes.print(
                    f"warning: {result.warning}", markup=False, highlight=False, soft_wrap=True
                )
            done = len(results)
            next_name = names[min(done, len(names) - 1)]
            share = sum(sizes[:done]) / sum(sizes)
            update(f"{done} of {len(names)}, {next_name}", share)
    return results


@contextmanager
def _open_compressors(recipe: CompressionRecipe, ray: str | None, workers: int) -> Iterator[Any]:
    """Yield a function that takes (source, name, target) of every document and yields what became
    of each.
    """
    if ray is None:
        compressor = DocumentCompressor(recipe)
        compressor.open()
        yield lambda work: (compressor.compress_document(*each) for each in work)
        return
    from restorekv.cli.ray_folder import RayCompressorPool  # Ray is an optional extra

    with RayCompressorPool(recipe, workers, ray) as pool:
        next(pool.run_calls([("open", ())]))  # a model that cannot be opened ends all
        yield lambda work: pool.run_calls([("compress_document", each) for each in work])
