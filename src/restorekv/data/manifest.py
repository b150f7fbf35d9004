"""The folder of a mixture: its manifest, the record of an unfinished build, and whether a new build
is the same one.

While it is built the folder holds build.json (what is being built) and parts/ (answers so far); the
manifest comes last and replaces them, so a folder with a manifest is complete.
"""

import hashlib
import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.errors import RestoreKVError, import_extra, make_printable
from restorekv.files import check_not_link, read_json, write_json
from restorekv.model.identity import identify_model
from restorekv.model.tokenize import tokenize_text

FORMAT = "restorekv-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"
BUILD_FILE = "build.json"
PARTS_FOLDER = "parts"
LOCK_FILE = ".build.json.lock"
LIBRARIES = ("torch", "transformers", "datasets", "pyarrow")
PROBE = "Kv 0123456789: naïve, “tabs”\t\n\n日本 😀 What? Yes! (a; b) 'c' - d/e."
_SAME_MODEL = {"fingerprint": "model", "template": "chat template", "tokenizer": "tokenizer"}


def describe_model(model: PreTrainedModel, tokenizer: Tokenizer) -> dict:
    """Return what identifies the teacher, its answers and their ids."""
    identity = identify_model(model, tokenizer)
    return {
        "name": identity.name,
        "fingerprint": identity.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "template": identity.template,
        "tokenizer": hash_tokenizer(tokenizer),
        "rope": identity.rope,
    }


def hash_tokenizer(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits of the vocabulary and of how a text full of traps is split."""
    facts = [sorted(tokenizer.get_vocab().items()), tokenize_text(tokenizer, PROBE)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def list_versions() -> dict[str, str]:
    own = {"restorekv": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in LIBRARIES}


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a complete folder; refuse one that is missing, damaged or of another
    version.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        unfinished = (folder / BUILD_FILE).is_file()
        fix = (
            "finish it with restorekv data build --resume"
            if unfinished
            else "give a folder of restorekv data build"
        )
        raise RestoreKVError(f"There is no {path}; {fix}.")
    try:
        manifest = read_json(path, "It")
        number = manifest["version"]
        known = manifest["format"] == FORMAT and {"model", "sources"} <= set(manifest)
    except (RestoreKVError, KeyError, TypeError) as error:
        raise RestoreKVError(
            f"{path} is damaged or not a manifest of restorekv; build the data again."
        ) from error
    if not known:
        raise RestoreKVError(
            f"{path} is not a manifest of restorekv's data; give a folder of restorekv data build."
        )
    if number != VERSION:
        raise RestoreKVError(
            f"{path} has version {make_printable(number)}, not {VERSION}; use another restorekv or build again."
        )
    if problem := _schema().find_problem(_schema().Manifest, manifest):
        raise RestoreKVError(f"{path} is damaged ({problem}); build the data again.")
    return manifest


def check_model(manifest: dict, model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Refuse answers of another model: they are not this teacher's, and their ids may mean other
    words.
    """
    now = describe_model(model, tokenizer)
    before = manifest["model"]
    for key, what in _SAME_MODEL.items():
        if now[key] != before.get(key):
            raise RestoreKVError(
                f"The data in {folder} was made by the model {make_printable(before.get('name'))} with another {what} "
                f"({make_printable(before.get(key))}, not {now[key]}); build it for this model."
            )


def check_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, before a model is loaded."""
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give the name of a folder.")
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if read_earlier_build(out) is None:
        foreign = [
            name
            for name in names
            if not name.startswith(f".{BUILD_FILE}.") and not _is_empty_parts(out / name)
        ]
        if foreign:
            raise RestoreKVError(
                f"{out} is not empty and holds no such data ({foreign[0]}); choose another folder."
            )
    if names and not resume:
        raise RestoreKVError(
            f"{out} already holds a data set; continue with --resume or choose another folder."
        )


def _is_empty_parts(path: Path) -> bool:
    return path.name == PARTS_FOLDER and path.is_dir() and not any(path.iterdir())


def read_earlier_build(out: Path) -> dict | None:
    """Return what was built or is being built in the folder, or None; refuse other programs'
    files.
    """
    if (out / MANIFEST_FILE).exists():
        manifest = read_manifest(out)
        known = {
            name: {key: value for key, value in source.get("from", {}).items() if key != "given"}
            for name, source in manifest["sources"].items()
        }
        excluded = manifest.get("exclusion", {}).get("files", [])
        settings = manifest.get("settings", {})
        return {
            "config": settings,
            "sources": known,
            "exclude": excluded,
            "model": manifest["model"],
        }
    if not (out / BUILD_FILE).exists():
        return None
    try:
        record = read_json(out / BUILD_FILE, "The record")
    except RestoreKVError:
        record = None
    if _schema().find_problem(_schema().BuildRecord, record):
        raise RestoreKVError(
            f"{out / BUILD_FILE} is damaged or not written by restorekv; build into another folder."
        )
    return record


def begin_build(out: Path, before: dict | None, record: dict) -> None:
    """Write down what is being built, after checking that it is what was begun here.

    The sources' files may have been corrected since: answers are only reused for the texts they
    were made for.
    """
    check_same_build(out, before, {key: value for key, value in record.items() if key != "sources"})
    check_not_link(out / PARTS_FOLDER)
    (out / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(out / BUILD_FILE, record, follow=False)


def discard_empty_build(out: Path) -> None:
    """Leave nothing behind after a failure if nothing has been asked yet."""
    if not any((out / PARTS_FOLDER).iterdir()):
        delete_build_files(out)
    if all(path.name == LOCK_FILE for path in out.iterdir()):
        shutil.rmtree(out, ignore_errors=True)


def delete_build_files(out: Path) -> None:
    """Delete what only an unfinished build needs."""
    shutil.rmtree(out / PARTS_FOLDER, ignore_errors=True)
    (out / BUILD_FILE).unlink(missing_ok=True)


def check_same_build(out: Path, before: dict | None, now: dict) -> None:
    """Refuse whatever differs in `now` from what the folder was built with, naming both values."""
    changes = [] if before is None else _list_differences(before, now)
    if changes:
        raise RestoreKVError(
            f"{out} was made with {', '.join(changes)}; give the same or another folder."
        )


def _list_differences(before: dict, now: dict) -> list[str]:
    """Return one text per change, as "--seed 0 (now 7)"."""
    changes = [
        f"{label.format(name.replace('_', '-'))} {before[key].get(name)} (now {value})"
        for key, label in (("config", "--{}"), ("model", "the model's {}"))
        for name, value in now.get(key, {}).items()
        if name != "name" and before[key].get(name) != value
    ]
    files = [("--exclude", before["exclude"], now["exclude"])] if "exclude" in now else []
    for name, source in now.get("sources", {}).items():
        files.append(
            (f"--{name}", _list_files(before["sources"].get(name, {})), _list_files(source))
        )
    for flag, was, is_now in files:
        gone, new = (
            [x for x in one if x not in other] for one, other in ((was, is_now), (is_now, was))
        )
        if gone or new:
            changes.append(f"{flag} {_join_file_names(gone)} (now {_join_file_names(new)})")
        elif was != is_now:  # the same files in another order
            changes.append(f"{flag} {_join_file_names(was)} (now {_join_file_names(is_now)})")
    return changes


def _list_files(source: dict) -> list[dict]:
    """Return a source's files; a dataset of the hub counts as one file with its commit as hash."""
    hub = [{"name": source["hub"], "sha256": source["revision"]}] if "hub" in source else []
    return source.get("files", hub)


def _join_file_names(files: list[dict]) -> str:
    names = [f"{file['name']} {file['sha256'][:8]}" for file in files]
    return (
        " and ".join([*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])])
        or "nothing"
    )


def _schema() -> ModuleType:
    """Return the module that checks entries, which needs pydantic and so the extra `data`."""
    return import_extra("restorekv.data.schema", "data")
