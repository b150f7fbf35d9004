"""The folder of a mixture: its manifest, the record of an unfinished build, and the check that a
resumed build is the same one.

During a build the folder holds build.json (what is being built) and parts/ (answers so far); the
manifest comes last and replaces them, so a folder with a manifest is complete.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from restorekv.errors import RestoreKVError
from restorekv.files import check_not_link, find_wrong_entry, read_json, write_json

FORMAT = "restorekv-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"
BUILD_FILE = "build.json"
PARTS_FOLDER = "parts"
LOCK_FILE = ".build.json.lock"
# The entries that the JSON files must have, with their types.
Counts = dict[str, int]
FILE_HASH = {"name": str, "sha256": str}
MANIFEST = {
    "mixture": str,
    "model": dict[str, Any],
    "seed": int,
    "longest": int,
    "sources": dict[str, dict[str, Any]],
    "licenses": Counts,
    "settings": dict[str, Any],
    "exclusion": dict[str, Any],
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


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a complete folder; refuse one that is missing, damaged or of a
    different version.
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
            f"{path} has version {manifest['version']}, not {VERSION}; use the restorekv that "
            "wrote it or build again."
        )
    problem = _find_manifest_fault(manifest)
    if problem:
        raise RestoreKVError(f"{path} is damaged ({problem}); build the data again.")
    return manifest


def _find_manifest_fault(manifest: dict) -> str | None:
    """Return what is wrong with a manifest, or None."""
    wrong = find_wrong_entry(manifest, MANIFEST)
    if wrong is None and find_wrong_entry(manifest["exclusion"], FILES_ORIGIN):
        wrong = "exclusion"
    if wrong is not None:
        return f"its {wrong}"
    for name, source in manifest["sources"].items():
        wrong = find_wrong_entry(source, SOURCE)
        if wrong is None:
            origin = HUB_ORIGIN if "hub" in source["from"] else FILES_ORIGIN
            wrong = find_wrong_entry(source["from"], origin)
        if wrong is None:
            wrong = find_wrong_entry(source["file"], FILE_HASH)
        if wrong is not None or source["examples"] < 1:
            return f"its sources.{name}.{wrong or 'examples'}"
        # A name other than the builder's might lead out of the folder.
        if source["file"]["name"] != f"{name}.parquet":
            return f"its sources.{name}.file has the wrong name"
    return None


def check_build_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else or, unless `resume`, a data set; called before a
    model is loaded.
    """
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give the name of a folder.")
    names = []
    if out.exists():
        names = sorted(path.name for path in out.iterdir())
    # Without the record of a build, any file but these is someone else's.
    if read_earlier_build(out) is None:
        for name in names:
            # What a build that was killed at its very beginning may have left.
            if name.startswith(f".{BUILD_FILE}.") or _is_empty_parts(out / name):
                continue
            raise RestoreKVError(f"{out} holds other files ({name}); choose another folder.")
    if names and not resume:
        raise RestoreKVError(
            f"{out} already holds a data set; continue with --resume or choose another folder."
        )


def check_outside_sources(out: Path, places: Sequence[str]) -> None:
    """Refuse a folder inside one that the build reads: its files would be read as texts."""
    for place in places:
        folder = Path(place)
        if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise RestoreKVError(
                f"{out} is in {place}, whose files are read; choose a folder outside of it."
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
            "config": manifest["settings"],
            "sources": origins,
            "exclude": manifest["exclusion"]["files"],
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


def check_not_overtaken(out: Path, before: dict | None) -> None:
    """Refuse a folder if another build started or finished in it since `before` was read;
    continuing would overwrite that build's work.

    `before` is the unfinished build that was found then, or None.
    """
    if (out / MANIFEST_FILE).exists() or read_earlier_build(out) != before:
        raise RestoreKVError(
            f"Another build has used {out} meanwhile; continue it with --resume or choose another "
            "folder."
        )


def begin_build(out: Path, before: dict | None, record: dict) -> None:
    """Record in the folder what is being built, after checking that it continues the build that was
    begun there, if any.
    """
    # Sources are not compared, since their files may have been corrected: answers are only reused
    # for the texts that they were made for.
    compared = {key: value for key, value in record.items() if key != "sources"}
    check_same_build(out, before, compared)
    check_not_link(out / PARTS_FOLDER)
    (out / PARTS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(out / BUILD_FILE, record, follow=False)


def discard_empty_build(out: Path) -> None:
    """Delete the files of a build that failed before anything was asked."""
    if not any((out / PARTS_FOLDER).iterdir()):
        delete_build_files(out)


def delete_build_files(out: Path) -> None:
    """Delete what only an unfinished build needs."""
    shutil.rmtree(out / PARTS_FOLDER, ignore_errors=True)
    (out / BUILD_FILE).unlink(missing_ok=True)


def is_compared(key: str, before: dict[str, Any]) -> bool:
    """Return whether this key of a model's description, which `before` may lack, must be the same
    as in `before`.
    """
    # A model may have a different name, but not different weights.
    if key == "name":
        return False
    # Records of earlier versions do not say which ids end an answer.
    return key in before or key != "stops"


def check_same_build(out: Path, before: dict | None, now: dict) -> None:
    """Refuse a build that differs from the one in the folder; name both values of each difference.

    Args:
        out: The folder.
        before: What `read_earlier_build` returned; None for a new folder, which differs in nothing.
        now: The record of this build, or some of its keys: config, sources, exclude, model.
    """
    if before is None:
        return
    compared = []
    for name, value in now.get("config", {}).items():
        compared.append((f"--{name.replace('_', '-')}", before["config"].get(name), value))
    for name, value in now.get("model", {}).items():
        if is_compared(name, before["model"]):
            compared.append((f"the model's {name}", before["model"].get(name), value))
    if "exclude" in now:
        excluded = [_describe_origin({"files": each["exclude"]}) for each in (before, now)]
        compared.append(("--exclude", *excluded))
    for name, source in now.get("sources", {}).items():
        earlier = before["sources"].get(name, {})
        compared.append((f"--{name}", _describe_origin(earlier), _describe_origin(source)))
    changes = []
    for option, earlier, value in compared:
        if earlier != value:
            changes.append(f"{option} {earlier} (now {value})")
    if changes:
        raise RestoreKVError(
            f"{out} was made with {', '.join(changes)}; give the same or choose another folder."
        )


def _describe_origin(origin: dict) -> str:
    """Return the name of a source with the beginning of its hash or revision."""
    if not origin.get("hub") and not origin.get("files"):
        return "nothing"
    name, digest = identify_dataset(origin).values()
    return f"{name} {digest[:16]}"


def identify_dataset(origin: dict) -> dict[str, str]:
    """Return a source's name, with its revision or hash; for several files, their number and the
    hash of their hashes in order.
    """
    if "hub" in origin:
        return {"dataset": origin["hub"], "revision": origin["revision"]}
    files = origin["files"]
    if len(files) == 1:
        return {"dataset": files[0]["name"], "sha256": files[0]["sha256"]}
    joined = "".join(file["sha256"] for file in files)
    digest = hashlib.sha256(joined.encode()).hexdigest()
    return {"dataset": f"{len(files)} files", "sha256": digest}
