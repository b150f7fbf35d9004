"""The folder of a mixture: its manifest, the record of an unfinished build, and whether a new build
is the same one.

While it is built the folder holds build.json (what is being built) and parts/ (answers so far); the
manifest comes last and replaces them, so a folder with a manifest is complete.
"""

import platform
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from restorekv import __version__
from restorekv.errors import RestoreKVError
from restorekv.files import check_not_link, find_wrong_entry, read_json, write_json

FORMAT = "restorekv-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"
BUILD_FILE = "build.json"
PARTS_FOLDER = "parts"
LOCK_FILE = ".build.json.lock"
LIBRARIES = ("torch", "transformers", "datasets", "pyarrow")
# What the JSON files hold at least, by type.
Counts = dict[str, int]
FILE_HASH = {"name": str, "sha256": str}
MANIFEST = {
    "mixture": str,
    "model": dict[str, Any],
    "seed": int,
    "longest": int,
    "sources": dict[str, dict[str, Any]],
    "licenses": Counts,
}
SOURCE = {
    "title": str,
    "examples": int,
    "contexts": int,
    "licenses": Counts,
    "rows": int,
    "attempts": int,
    "dropped": Counts,
    "dropped_attempts": Counts,
    "from": dict[str, Any],
    "file": dict[str, Any],
}
HUB_ORIGIN = {"hub": str, "revision": str}
FILES_ORIGIN = {"files": [FILE_HASH]}
BUILD_RECORD = {
    "config": dict[str, Any],
    "sources": dict[str, dict[str, Any]],
    "exclude": [FILE_HASH],
    "model": dict[str, Any],
}


def list_versions() -> dict[str, str]:
    """Return the versions of what wrote the data; `datasets` is needed for the hub alone."""
    versions = {"restorekv": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a complete folder; refuse one that is missing, damaged or of another
    version.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        fix = "give a folder of restorekv data build"
        if (folder / BUILD_FILE).is_file():
            fix = "finish it with restorekv data build --resume"
        raise RestoreKVError(f"There is no {path}; {fix}.")
    manifest = read_json(path, str(path))
    if find_wrong_entry(manifest, {"format": str, "version": int}) or manifest["format"] != FORMAT:
        raise RestoreKVError(
            f"{path} is damaged or not a manifest of restorekv's data; give a folder of restorekv "
            "data build."
        )
    if manifest["version"] != VERSION:
        raise RestoreKVError(
            f"{path} has version {manifest['version']}, not {VERSION}; use another restorekv or "
            "build again."
        )
    problem = _find_manifest_fault(manifest)
    if problem:
        raise RestoreKVError(f"{path} is damaged ({problem}); build the data again.")
    return manifest


def _find_manifest_fault(manifest: dict) -> str | None:
    """Return what is wrong with a manifest, or None."""
    wrong = find_wrong_entry(manifest, MANIFEST)
    if wrong:
        return f"its {wrong}"
    for name, source in manifest["sources"].items():
        wrong = find_wrong_entry(source, SOURCE)
        if wrong is None:
            origin = source["from"]
            wrong = find_wrong_entry(origin, HUB_ORIGIN if "hub" in origin else FILES_ORIGIN)
        if wrong is None:
            wrong = find_wrong_entry(source["file"], FILE_HASH)
        if wrong is not None or source["examples"] < 1:
            return f"its sources.{name}.{wrong or 'examples'}"
        # Another name than the builder gives might lead out of the folder.
        if source["file"]["name"] != f"{name}.parquet":
            return f"its sources.{name}.file has another name"
    return None


def check_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, before a model is loaded."""
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give the name of a folder.")
    names = []
    if out.exists():
        names = sorted(path.name for path in out.iterdir())
    # A folder that this command did not begin may hold only what a killed one left.
    if read_earlier_build(out) is None:
        for name in names:
            # What a build that was killed at its very beginning may have left.
            if name.startswith(f".{BUILD_FILE}.") or _is_empty_parts(out / name):
                continue
            raise RestoreKVError(
                f"{out} is not empty and holds no such data ({name}); choose another folder."
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
        origins = {}
        for name, source in manifest["sources"].items():
            # What the manifest calls "from" is what a build calls a source.
            origin = dict(source["from"])
            origin.pop("given", None)
            origins[name] = origin
        return {
            "config": manifest.get("settings", {}),
            "sources": origins,
            "exclude": manifest.get("exclusion", {}).get("files", []),
            "model": manifest["model"],
        }
    if not (out / BUILD_FILE).exists():
        return None
    try:
        # A damaged record is refused below, like any other file.
        record = read_json(out / BUILD_FILE, "The record")
    except RestoreKVError:
        record = None
    if find_wrong_entry(record, BUILD_RECORD):
        raise RestoreKVError(
            f"{out / BUILD_FILE} is damaged or not written by restorekv; build into another folder."
        )
    return record


def begin_build(out: Path, before: dict | None, record: dict) -> None:
    """Write down what is being built, after checking that it is what was begun here.

    The sources' files may have been corrected since: answers are only reused for the texts they
    were made for.
    """
    # Files of a source may have been corrected since; their answers are checked one by one.
    compared = {key: value for key, value in record.items() if key != "sources"}
    check_same_build(out, before, compared)
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
    """Refuse whatever differs in `now` from what the folder was built with, naming both values.

    Args:
        out: The folder.
        before: What `read_earlier_build` returned; None for a new folder, which differs in nothing.
        now: The record of this build, or some of its keys: config, sources, exclude, model.
    """
    if before is None:
        return
    changes = _list_changed_values("--{}", before["config"], now.get("config", {}))
    # A model may have another name, but not other weights.
    changes += _list_changed_values("the model's {}", before["model"], now.get("model", {}))
    if "exclude" in now:
        changes += _list_changed_files("--exclude", before["exclude"], now["exclude"])
    for name, source in now.get("sources", {}).items():
        earlier = before["sources"].get(name, {})
        changes += _list_changed_files(f"--{name}", _list_files(earlier), _list_files(source))
    if changes:
        raise RestoreKVError(
            f"{out} was made with {', '.join(changes)}; give the same or another folder."
        )


def _list_changed_values(label: str, before: dict, now: dict) -> list[str]:
    """Return one text per change, as "--seed 0 (now 7)"; a model's name may change."""
    changes = []
    for name, value in now.items():
        if name != "name" and before.get(name) != value:
            option = label.format(name.replace("_", "-"))
            changes.append(f"{option} {before.get(name)} (now {value})")
    return changes


def _list_changed_files(option: str, before: list[dict], now: list[dict]) -> list[str]:
    """Return the text for files that are gone, new or in another order; nothing for the same."""
    if before == now:
        return []
    gone = [file for file in before if file not in now]
    new = [file for file in now if file not in before]
    if not gone and not new:  # the same files in another order
        gone = before
        new = now
    return [f"{option} {_join_file_names(gone)} (now {_join_file_names(new)})"]


def _list_files(source: dict) -> list[dict]:
    """Return a source's files; a dataset of the hub counts as one file with its commit as hash."""
    if "files" not in source and "hub" in source:
        return [{"name": source["hub"], "sha256": source["revision"]}]
    return source.get("files", [])


def _join_file_names(files: list[dict]) -> str:
    """Return up to three names with the beginning of their hashes, and how many more there are."""
    names = [f"{file['name']} {file['sha256'][:8]}" for file in files[:3]]
    if len(files) > 3:
        names.append(f"{len(files) - 3} more")
    return " and ".join(names) or "nothing"
