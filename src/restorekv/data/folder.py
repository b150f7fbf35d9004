"""The folder of a mixture while it is made: begun, gone on with, finished, or left as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from restorekv.data.manifest import NAME, RECORD, read_manifest
from restorekv.errors import RestoreKVError
from restorekv.files import write_json

PARTS = "parts"


def check_folder(out: Path, resume: bool) -> None:
    """Refuses a folder that holds something else, before a model is loaded."""
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give the name of a folder.")
    held = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if earlier(out) is None:
        foreign = [name for name in held if not name.startswith(f".{RECORD}.") and not empty(out / name, PARTS)]
        if foreign:
            raise RestoreKVError(f"{out} is not empty and holds no such data ({foreign[0]}); choose another folder.")
    if held and not resume:
        raise RestoreKVError(f"{out} already holds a data set; go on with --resume or choose another folder.")


def empty(path: Path, name: str) -> bool:
    """Whether this is the folder of that name, with nothing in it."""
    return path.name == name and path.is_dir() and not any(path.iterdir())


def earlier(out: Path) -> dict | None:
    """What was made or is being made here, if anything; refuses other programs' files of these names."""
    if (out / NAME).exists():
        made = read_manifest(out)
        known = {
            name: {key: value for key, value in source.get("from", {}).items() if key != "given"}
            for name, source in made["sources"].items()
        }
        kept_out = made.get("exclusion", {}).get("files", [])
        return {"config": made.get("settings", {}), "sources": known, "exclude": kept_out, "model": made["model"]}
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        record = None
    if not isinstance(record, dict) or not {"config", "sources", "exclude", "model"} <= set(record):
        raise RestoreKVError(f"{out / RECORD} is damaged or not of restorekv; build into another folder.")
    return record


def start(out: Path, before: dict | None, record: dict) -> None:
    """Writes down what is being made, after checking that what was begun here is the same.

    Files of the sources may have been mended meanwhile: answers are only taken over for the texts they were made for.
    """
    check_same(out, before, {key: value for key, value in record.items() if key != "sources"})
    (out / PARTS).mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, record)


def finished(out: Path, before: dict, record: dict) -> dict:
    """The manifest of a complete folder, if that is what was asked for again, of the same files."""
    check_same(out, before, record)
    clear(out)
    return read_manifest(out)


def check_same(out: Path, before: dict | None, now: dict) -> None:
    """Refuses what differs in `now` from what the folder was made with, with both values."""
    told = [] if before is None else differences(before, now)
    if told:
        raise RestoreKVError(f"{out} was made with {', '.join(told)}; give the same or another folder.")


def differences(before: dict, now: dict) -> list[str]:
    """By flag: "--seed 0 (now 7)"."""
    told = []
    for key, what in (("config", "--{}"), ("model", "the model's {}")):
        was, is_now = before[key], now.get(key, {})
        told += [
            f"{what.format(name.replace('_', '-'))} {was.get(name)} (now {value})"
            for name, value in is_now.items() if name != "name" and was.get(name) != value
        ]  # fmt: skip
    if "exclude" in now:
        told += changed("--exclude", before["exclude"], now["exclude"])
    for name, known in now.get("sources", {}).items():
        told += changed(f"--{name}", marks(before["sources"].get(name, {})), marks(known))
    return told


def marks(known: dict) -> list[dict]:
    """A source's files, or its hub id and commit as one."""
    hub = [{"name": known["hub"], "sha256": known["revision"]}] if "hub" in known else []
    return known.get("files", hub)


def changed(flag: str, before: list[dict], now: list[dict]) -> list[str]:
    """The files that are not the same in both."""
    if before == now:
        return []
    was, is_now = ([f"{file['name']} {file['sha256'][:8]}" for file in files] for files in (before, now))
    gone, new = [x for x in was if x not in is_now], [x for x in is_now if x not in was]
    if not gone and not new:
        gone, new = was, is_now  # in another order
    return [f"{flag} {listed(gone)} (now {listed(new)})"]


def listed(names: list[str]) -> str:
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return " and ".join([*names[:3], *more]) or "nothing"


def abandon(out: Path) -> None:
    """Leaves nothing behind where nothing has been asked yet."""
    if not any((out / PARTS).iterdir()):
        clear(out)
    if not any(out.iterdir()):
        out.rmdir()


def clear(out: Path) -> None:
    """Removes what only the making needed."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / RECORD).unlink(missing_ok=True)
