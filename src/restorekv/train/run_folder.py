"""The files in the folder of a training run, and which folders a run refuses; needs no PyTorch."""

import csv
import os
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.files import check_target, read_bytes

CHECKPOINT_FILE = "checkpoint.safetensors"
LOG_FILE = "loss.csv"
HEADER = "step,loss,lr,seconds\n"


def check_folders(folder: Path, resume: bool = False, store: Path | None = None) -> None:
    """Refuse paths that no run can use, and a folder that holds other files or, unless `resume`, a
    run.

    Nothing is made or changed.
    """
    for path in (folder, store):
        if path is not None:
            _check_folder(path)
    if folder.exists():
        check_target(folder / CHECKPOINT_FILE)
    if os.path.lexists(folder / CHECKPOINT_FILE):
        if not resume:
            raise RestoreKVError(
                f"{folder} already holds a run; continue it with --resume or choose another folder."
            )
        return
    names: set[str] = set()
    if folder.exists():
        names = {path.name for path in folder.iterdir() if not _is_leftover(path.name)}
    # Checking the setup, before there is a log, may have filled a store inside the folder.
    if store is not None and folder.absolute() in store.absolute().parents:
        names.discard(store.absolute().relative_to(folder.absolute()).parts[0])
    # A run that was killed before its first checkpoint leaves only a log; a new run may use its
    # folder.
    if names and (LOG_FILE not in names or read_log_lines(folder / LOG_FILE) is None):
        raise RestoreKVError(
            f"{folder} holds other files, not a run; choose an empty or a new folder."
        )


def _is_leftover(name: str) -> bool:
    """Return whether a file may be one that a killed run began to write, or the folder's lock."""
    begins = tuple(f".{written}." for written in (LOG_FILE, CHECKPOINT_FILE))
    return name == ".lock" or (name.startswith(begins) and name.endswith(".tmp"))


def _check_folder(folder: Path) -> None:
    """Refuse what is not a folder and what cannot become one."""
    paths = (folder, *folder.absolute().parents)
    existing = next(path for path in paths if path.exists())
    if not existing.is_dir():
        raise RestoreKVError(f"{existing} is a file; give the name of a folder.")
    if existing != folder:
        # The first folder that would be made.
        missing = folder.absolute().relative_to(existing.absolute()).parts[0]
        check_target(existing / missing)


def read_log_lines(path: Path) -> list[str] | None:
    """Return the lines of a run's log, [] without a file, or None for any other file."""
    if not os.path.lexists(path):
        return []
    text = read_bytes(path, f"The log {path}").decode(errors="replace")
    if not HEADER.startswith(text[: len(HEADER)]):
        return None
    return text.splitlines()[1:]


def read_losses(folder: Path) -> list[float]:
    """Return the loss of every step in a run's log."""
    text = read_bytes(folder / LOG_FILE, "The log").decode()
    return [float(row["loss"]) for row in csv.DictReader(text.splitlines())]
