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

from restorekv import __version__
from restorekv.errors import RestoreKVError, import_extra, make_printable
from restorekv.files import check_not_link, read_json, write_json

FORMAT = "restorekv-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"
BUILD_FILE = "build.json"
PARTS_FOLDER = "parts"
LOCK_FILE = ".build.json.lock"
LIBRARIES = ("torch", "transformers", "datasets", "pyarrow")


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
            f"{path} has version {make_printable(number)}, not {VERSION}; use another restorekv "
            "or build again."
        )
    schema = import_extra("restorekv.data.schema", "data")
    problem = schema.find_problem(schema.Manifest, manifest)
    if problem:
        raise RestoreKVError(f"{path} is damaged ({problem}); build the data again.")
    return manifest


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
            origin = dict(source.get("from", {}))
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
    schema = import_extra("restorekv.data.schema", "data")
    if schema.find_problem(schema.BuildRecord, record):
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
