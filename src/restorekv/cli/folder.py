"""`restorekv compress FOLDER -o FOLDER`: a cache file for every document of a folder, here or on a
Ray cluster.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from restorekv.cli.compress_text import NO_ADAPTER
from restorekv.cli.document_compressor import (
    CompressionRecipe,
    DocumentCompressor,
    DocumentResult,
    locate_record,
)
from restorekv.cli.errors import explain_interrupt
from restorekv.cli.inputs import check_json_output, check_output_kind, check_outputs_apart
from restorekv.cli.terminal import notes, output, show_progress_share, write_figures
from restorekv.compression.budget import parse_ratio
from restorekv.compression.eviction import make_compressor
from restorekv.context import format_bytes
from restorekv.errors import RestoreKVError, make_printable
from restorekv.files import check_target, list_files
from restorekv.readers.extract import DOCUMENT_ENDINGS

SHOWN_NAMES = 5  # of files that are left out, or that have no document any more
# Calls a method of a `DocumentCompressor` once for each tuple of arguments, and yields the results.
CallEach = Callable[[str, Iterable[tuple]], Iterator[Any]]


def _list_documents(folder: Path) -> list[Path]:
    """Return the documents below a folder, relative to it, in order, and report what is left out.

    Hidden files are skipped without being reported. Linked folders are followed.
    """
    documents = []
    others = []
    broken: list[Path] = []
    for path in list_files(folder, hidden=False, broken_links=broken):
        name = path.relative_to(folder)
        if name.suffix.lower() in DOCUMENT_ENDINGS:
            documents.append(name)
        else:
            others.append(name)
    if others:
        notes.print(
            f"Left out, because of the ending: {_name_some(others)}. "
            f"Endings that are read: {', '.join(sorted(DOCUMENT_ENDINGS))}.",
            highlight=False,
            soft_wrap=True,
        )
    if broken:
        notes.print(
            "Left out, because the link leads nowhere: "
            f"{_name_some([path.relative_to(folder) for path in broken])}.",
            highlight=False,
            soft_wrap=True,
        )
    if not documents:
        raise RestoreKVError(
            f"The folder {folder} has no document ({', '.join(sorted(DOCUMENT_ENDINGS))}); name a "
            "different one."
        )
    return documents


def _name_some(names: Sequence[Path]) -> str:
    """Return the first names of a list, and how many more there are."""
    named = ", ".join(make_printable(str(name)) for name in names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        named += f" and {len(names) - SHOWN_NAMES} more"
    return named


def _list_orphans(out: Path, targets: Collection[Path]) -> list[Path]:
    """Return the cache files of earlier runs, relative to `out`, that belong to none of the present
    documents: theirs were removed or renamed, or are in a different folder.

    A cache file without a record was not made by a run over a folder and is not listed.
    """
    orphans = []
    for path in list_files(out, hidden=False):
        is_target = path.resolve() in targets
        if path.suffix == ".rkv" and not is_target and locate_record(path).exists():
            orphans.append(path.relative_to(out))
    return orphans


def compress_folder(
    folder: Path,
    out: Path,
    recipe: CompressionRecipe,
    ray: str | None,
    workers: int,
    figures: Path | None,
    replace: bool,
) -> None:
    """Compress every document of a folder.

    Args:
        folder: The folder of documents.
        out: The folder of cache files, which is created if needed.
        recipe: The model, and how it compresses.
        ray: The address of a Ray cluster; None compresses in this process.
        workers: How many documents a Ray cluster compresses at the same time.
        figures: A JSON file for the figures, or None.
        replace: Whether cache files that other settings made are made again.

    Raises:
        RestoreKVError: At the end, if some documents could not be compressed; before any work, if
            there are cache files that other settings made and `replace` is not set.
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
    for _, _, target in work:
        check_output_kind(Path(target), "restorekv-cache")
    check_json_output(figures)

    start = time.perf_counter()
    with _open_compressors(recipe, ray, workers) as call_each:
        if not replace:
            _check_foreign_files(out, names, [target for _, _, target in work], call_each)
        with explain_interrupt(f"the same command continues what is in {out}"):
            results = _compress_all(names, work, folder, call_each)
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
        highlight=False,
        soft_wrap=True,
    )
    for sentence in _explain_caches(names, results, recipe):
        output.print(sentence, highlight=False, soft_wrap=True)
    if orphans:
        output.print(
            f"Cache files in {out} without a document in {folder}: {_name_some(orphans)}; delete "
            "those that you no longer need.",
            highlight=False,
            soft_wrap=True,
        )
    if counts["failed"]:
        what = "document" if len(names) == 1 else f"of {len(names)} documents"
        raise RestoreKVError(
            f"{counts['failed']} {what} could not be compressed; fix what is named above and run "
            "it again."
        )


def _explain_caches(
    names: Sequence[Path], results: Sequence[DocumentResult], recipe: CompressionRecipe
) -> Iterator[str]:
    """Yield sentences about what a user may not expect: texts that are cut or kept whole, and that
    nothing is restored.
    """
    # Documents that failed have `full` = 0.
    there = [(name, each) for name, each in zip(names, results, strict=True) if each.full]
    cut = [name for name, result in there if result.cut]
    if cut:
        tokens = sum(result.cut for _, result in there)
        yield f"The end was cut, {tokens:,} tokens in all, of: {_name_some(cut)}."
    if recipe.ratio is None or parse_ratio(recipe.ratio) < 1:
        whole = [name for name, result in there if result.whole]
        if whole:
            yield f"Kept whole, because they are too short: {_name_some(whole)}."
    evicted = [result for _, result in there if not result.whole]
    compressor = make_compressor(recipe.evictor, recipe.config)
    may_restore = recipe.adapter == "auto" and compressor.restores and not recipe.config.offset
    if may_restore and evicted and not any(result.restored for result in evicted):
        yield f"Nothing is restored: {NO_ADAPTER}."


def _check_foreign_files(
    out: Path, names: Sequence[Path], targets: Sequence[str], call_each: CallEach
) -> None:
    """Refuse to replace cache files that other settings made, or that no run over a folder made."""
    given = [(target,) for target in targets]
    foreign = []
    for name, is_foreign in zip(names, call_each("is_foreign_file", given), strict=True):
        if is_foreign:
            foreign.append(Path(f"{name}.rkv"))
    if foreign:
        raise RestoreKVError(
            f"The folder {out} has cache files that these settings did not make: "
            f"{_name_some(foreign)}. Name a different folder, or pass --replace to make them again."
        )


def _compress_all(
    names: list[Path], work: list[tuple[str, str, str]], folder: Path, call_each: CallEach
) -> list[DocumentResult]:
    """Return the result of every document, in order; show progress by the sizes of the files."""
    sizes = [(folder / name).stat().st_size + 1 for name in names]
    results: list[DocumentResult] = []
    with show_progress_share("compressing") as update:
        update(str(names[0]), 0.0)
        for name, result in zip(names, call_each("compress_document", work), strict=True):
            results.append(result)
            if result.outcome == "failed":
                notes.print(f"{name}: {result.reason}", highlight=False, soft_wrap=True)
            if result.warning:
                notes.print(f"warning: {result.warning}", highlight=False, soft_wrap=True)
            done = len(results)
            next_name = names[min(done, len(names) - 1)]
            share = sum(sizes[:done]) / sum(sizes)
            update(f"{done} of {len(names)}, {next_name}", share)
    return results


@contextmanager
def _open_compressors(
    recipe: CompressionRecipe, ray: str | None, workers: int
) -> Iterator[CallEach]:
    """Yield a function that calls a method of a compressor for each document, here or on a Ray
    cluster.
    """
    if ray is None:
        compressor = DocumentCompressor(recipe)
        compressor.open()
        yield lambda method, given: (getattr(compressor, method)(*each) for each in given)
        return
    from restorekv.cli.ray_folder import RayCompressorPool  # Ray is an optional extra

    with RayCompressorPool(recipe, workers, ray) as pool:
        pool.open()
        yield pool.call_each
