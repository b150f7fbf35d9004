"""Rows of a dataset through the library `datasets`: of the hub, pinned to a commit, or of local files of that form."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from restorekv.errors import RestoreKVError

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
FORMATS = ", ".join(READERS)


def optional(name: str) -> ModuleType:
    """A package of the extra `data`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RestoreKVError(f"This needs the package {name}; install 'restorekv[data]'.") from error


def suffix(path: Path) -> str:
    """The format's ending; ".jsonl" of "a.jsonl.gz"."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def local_files(path: Path) -> list[Path]:
    """The file itself, or the files below a folder, sorted."""
    if path.is_file():
        found = [path]
        if suffix(path) not in READERS:
            raise RestoreKVError(f"{path} is none of {FORMATS}; convert it first.")
    else:
        found = sorted(file for file in path.rglob("*") if file.is_file() and suffix(file) in READERS)
    if not found:
        raise RestoreKVError(f"The folder {path} has no file that ends in {FORMATS}; give another.")
    return found


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def identity(where: str) -> dict:
    """What was read: names and hashes of local files, or a hub id with the commit that it stands at now."""
    path = Path(where)
    if path.exists():
        return {"files": [{"name": file.name, "sha256": sha256(file)} for file in local_files(path)]}
    if path.is_absolute() or where.startswith(".") or suffix(path) in READERS or where.count("/") > 1:
        raise RestoreKVError(f"There is no file or folder {where}; check the path.")
    from huggingface_hub import HfApi

    name, _, revision = where.partition("@")
    try:
        return {"hub": name, "revision": HfApi().dataset_info(name, revision=revision or None).sha}
    except Exception as error:  # unreachable, unknown, gated: the hub's client raises many kinds
        raise unreadable(where, error) from error


def rows(where: str, known: dict) -> Iterator[dict]:
    """The rows of the split "train", one by one; a text file is one row {text}. `known` is the identity."""
    library = optional("datasets")
    library.logging.set_verbosity(library.logging.CRITICAL)
    library.disable_progress_bars()
    if "hub" in known:
        yield from guarded(library, where, path=known["hub"], revision=known["revision"])
        return
    for file in local_files(Path(where)):
        reader = READERS[suffix(file)]
        options = {"sample_by": "document"} if reader == "text" else {}
        yield from guarded(library, str(file), path=reader, data_files=[str(file)], **options)


def guarded(library: ModuleType, where: str, **options: object) -> Iterator[dict]:
    """Streams, so that a hub's dataset is fetched as far as it is needed."""
    try:
        yield from library.load_dataset(split="train", streaming=True, **options)
    except Exception as error:  # damaged, foreign, unreachable: the readers' errors have no common kind
        line = bad_line(Path(where))
        if line:
            raise RestoreKVError(f"{where}, line {line} is not JSON; mend the line.") from error
        raise unreadable(where, error) from error


def bad_line(path: Path) -> int | None:
    """Number of the first line of a plain .jsonl file that is no JSON object."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return number
            except ValueError:
                return number
    return None


def unreadable(where: str, error: Exception) -> RestoreKVError:
    """One sentence from whatever was raised."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")
    return RestoreKVError(f"Cannot read the dataset {where}; give a hub id that can be reached or a file ({reason}).")
