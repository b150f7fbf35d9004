"""The files of a run: a folder for every cell, in which answers are added context by context.

DIR/cells/<name>/cell.json      the cell and what it was made with, written first
                 answers.jsonl  one line per context
                 seconds.jsonl  how long each context took; a separate file, as it differs by run
                 summary.json   figures, written last: the cell is done
DIR/set-aside/<name>-<n>/       a cell made with something else, moved here by a run with
                                --set-aside
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from restorekv.compression.config import CompressionConfig
from restorekv.errors import RestoreKVError, summarize_error
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.stats import ScoredAnswer
from restorekv.files import (
    append_line,
    check_not_link,
    find_wrong_entry,
    format_line,
    load_lines,
    parse_json,
    read_bytes,
    replace_file,
    write_json,
)
from restorekv.model.identity import ModelIdentity
from restorekv.model.shape import get_dtype_name
from restorekv.spec import list_versions

CELLS = "cells"
SET_ASIDE = "set-aside"
CELL = "cell.json"
ANSWERS = "answers.jsonl"
SECONDS = "seconds.jsonl"
SUMMARY = "summary.json"
# Schemas: the entries that the files must have, with their types.
CELL_SCHEMA = {"cell": dict[str, Any], "facts": dict[str, Any]}  # "facts": the identity
IDENTITY_SCHEMA = {
    "method": str,
    "adapter": dict[str, Any] | None,
    "fingerprint": str,
    "shape": dict[str, int],
    "dtype": str,
    "device": str,
    "prefix_policy": str,
    "on_small_budget": str,
    "allocation": str,
    "restore_from": str,
    "offset": int,
}
LINE_SCHEMA = {
    "sample": str | int,
    "context": str,
    "cut": int,
    "tokens": int,
    "prefix": int,
    "restore_tokens": int,
    "pairs": float,
    "pairs_with_prefix": float,
    "bytes": float,
    "answers": list[dict[str, Any]],
}
ANSWER_SCHEMA = {
    "id": str | int,
    "task": str,
    "question": str,
    "answer_prefix": str,
    "max_new_tokens": int,
    "references": list[str],
    "prediction": str,
    "score": float,
    "kl": float,
    "answer_tokens": int,
    "same": bool,
}
SUMMARY_SCHEMA = {
    "questions": int,
    "samples": int,
    "tasks": dict[str, dict[str, Any]],
    "groups": dict[str, dict[str, Any]],
    "pairs": float,
    "pairs_with_prefix": float,
    "bytes": float,
    "kept": float,
    "kept_with_prefix": float,
    "kl": float,
    "kl_low": float | None,
    "kl_high": float | None,
    "same": float,
    "answer_tokens": int,
}
# Keys of an identity that results of early versions lack, which does not count as a change.
LATER_KEYS = ("context_limit", "positions", "stops", "tokenizer")
PACKAGES = ("restorekv", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Result:
    """A cell as its folder holds it; `identity` says what it was made with (see
    `run.identify_cell`).
    """

    folder: Path
    cell: Cell
    identity: dict

    @property
    def done(self) -> bool:
        return _has_summary(self.folder)

    @cached_property
    def summary(self) -> dict:
        """Score, interval, tasks, groups, pairs and bytes; raises FileNotFoundError for a cell that
        is not done.
        """
        # Files of a run may have been edited or cut; every entry that is used is checked.
        _check_types(self.folder / CELL, self.identity, IDENTITY_SCHEMA)
        path = self.folder / SUMMARY
        figures = _parse_object(path, read_bytes(path, str(path)), SUMMARY_SCHEMA)
        for task in figures["tasks"].values():
            _check_types(path, task, {"score": float})
        if (figures["samples"], figures["questions"]) != (len(self.lines), len(self.answers)):
            raise RestoreKVError(
                f"{path} does not match {ANSWERS} next to it; remove it and start again."
            )
        return figures

    @cached_property
    def lines(self) -> list[dict]:
        """The contexts answered so far, in the order of their answers."""
        lines = list(load_lines(self.folder / ANSWERS))
        for line in lines:
            _check_types(self.folder / ANSWERS, line, LINE_SCHEMA)
            for answer in line["answers"]:
                _check_types(self.folder / ANSWERS, answer, ANSWER_SCHEMA)
        return lines

    @property
    def answers(self) -> list[ScoredAnswer]:
        """The answer to every question, contexts in their order."""
        return list_answers((line["sample"], line) for line in self.lines)

    def append(self, line: dict, seconds: dict[str, float]) -> None:
        """Add a context's line to the file; a line left half-written by a killed process is
        replaced.
        """
        append_line(self.folder / SECONDS, {"sample": line["sample"], **seconds})
        append_line(self.folder / ANSWERS, line)
        # The cached property is read again, with the new line.
        self.__dict__.pop("lines", None)

    def put_in_order(self, samples: Sequence[int | str]) -> None:
        """Rewrite the contexts in the order of `samples`, as other cells have them, if a context
        was lost and asked again after the others.
        """
        ranks = {sample: rank for rank, sample in enumerate(samples)}
        lines = sorted(self.lines, key=lambda line: ranks.get(line["sample"], len(ranks)))
        if [line["sample"] for line in lines] == [line["sample"] for line in self.lines]:
            return
        with replace_file(self.folder / ANSWERS, follow=False) as temporary:
            temporary.write_bytes(b"".join(map(format_line, lines)))
        self.__dict__.pop("lines", None)


def check_result(value: object) -> None:
    """Refuse what is not a Result, such as a cell's name or folder."""
    if not isinstance(value, Result):
        raise RestoreKVError(
            f"A cell must be a Result, as load_results(FOLDER) lists them, not "
            f"{type(value).__name__}."
        )


def list_answers(contexts: Iterable[tuple[int | str, dict]]) -> list[ScoredAnswer]:
    """Return the answers of `contexts`, which are pairs of a context's name and its line."""
    return [
        ScoredAnswer(name, answer["task"], answer["id"], answer["prediction"], answer["score"])
        for name, line in contexts
        for answer in line["answers"]
    ]


def _parse_object(path: Path, text: bytes, hints: dict[str, Any]) -> dict:
    """Return the JSON object of a file or line, which has entries of these types."""
    parsed = parse_json(text, str(path))
    _check_types(path, parsed, hints)
    return parsed


def _check_types(path: Path, value: object, hints: dict[str, Any]) -> None:
    """Refuse a JSON value that is not an object with entries of these types."""
    wrong = find_wrong_entry(value, hints)
    if wrong:
        raise RestoreKVError(
            f"{path} is damaged ({wrong} is missing or has the wrong type); remove it and start "
            "again."
        )


def is_finished(folder: Path, cell: Cell) -> bool:
    """Return whether the folder of a run has all answers of a cell."""
    return _has_summary(_find_cell_folder(folder, cell))


def _find_cell_folder(folder: Path, cell: Cell) -> Path:
    """Return the folder of a cell in the folder of a run."""
    return folder / CELLS / cell.name


def _has_summary(path: Path) -> bool:
    """Return whether a cell's folder has the summary, which is written after the last answer."""
    return (path / SUMMARY).exists()


def open_result(folder: Path, cell: Cell, identity: dict, set_aside: bool = False) -> Result:
    """Open the cell's folder, or create it.

    Args:
        folder: The folder of the run.
        cell: What is asked.
        identity: What it would be made with now.
        set_aside: Move a cell with a different identity out of the way, and start again.

    Raises:
        RestoreKVError: The cell has a different identity, and may not be set aside.
    """
    path = _find_cell_folder(folder, cell)
    # A link would lead the answers into some other folder.
    for each in (folder / CELLS, path):
        check_not_link(each)
    if (path / CELL).exists():
        result = load_result(path)
        changes = describe_changes(result.identity, identity)
        if not changes:
            return result
        if not set_aside:
            raise RestoreKVError(
                f"{path} was made with {changes}; choose another folder, or pass --set-aside "
                "(set_aside=True in Python) to keep what is there in "
                f"{folder / SET_ASIDE} and start again."
            )
        _move_aside(folder, path)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / CELL, {"cell": cell.to_dict(), "facts": identity}, follow=False)
    return Result(path, cell, identity)


def _move_aside(folder: Path, path: Path) -> None:
    """Move a cell's folder to the first free name in SET_ASIDE."""
    aside = folder / SET_ASIDE
    check_not_link(aside)
    aside.mkdir(exist_ok=True)
    number = 1
    while (aside / f"{path.name}-{number}").exists():
        number += 1
    path.rename(aside / f"{path.name}-{number}")


def describe_changes(before: dict, now: dict) -> str:
    """Name what changed, as "fingerprint 1f (now 2e)"; versions and threads are recorded, not
    compared.
    """
    # A stored identity was read from JSON. Both go through JSON here, so that tuples become lists.
    before = flatten_identity(json.loads(json.dumps(before)))
    now = flatten_identity(json.loads(json.dumps(now)))
    changed = []
    for key in {**before, **now}:
        if key == "threads" or key.startswith("versions."):
            continue
        if key in LATER_KEYS and key not in before:
            continue
        if before.get(key) != now.get(key):
            changed.append(key)
    return " and ".join(f"{key} {before.get(key)} (now {now.get(key)})" for key in changed)


def flatten_identity(identity: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the nested values of an identity under names such as "benchmark.digest"; RoPE stays
    one value.
    """
    names: dict[str, object] = {}
    for key, value in identity.items():
        # RoPE's own entries differ from kind to kind; as one value they are compared whole.
        if isinstance(value, Mapping) and key != "rope":
            names |= flatten_identity(value, f"{prefix}{key}.")
        else:
            names[prefix + key] = value
    return names


def load_result(path: Path) -> Result:
    file = path / CELL
    try:
        stored = _parse_object(file, read_bytes(file, str(file)), CELL_SCHEMA)
        _check_types(file, stored["facts"], IDENTITY_SCHEMA)
        return Result(path, Cell.from_dict(stored["cell"]), stored["facts"])
    except (ValueError, KeyError, TypeError) as error:
        raise RestoreKVError(
            f"{path} holds no cell of restorekv ({summarize_error(error)}); remove it."
        ) from error


def load_results(folder: str | Path) -> list[Result]:
    """Return every cell of a run, done or not, sorted by name. Raises RestoreKVError if there is
    none.
    """
    return [load_result(path) for path in _list_cell_folders(Path(folder))]


def load_readable_cells(folder: Path) -> list[Result]:
    """Return the cells of a run as `load_results` does, without those whose record is damaged."""
    cells = []
    for path in _list_cell_folders(folder):
        # A damaged cell of another run must not stop the caller.
        with suppress(RestoreKVError, OSError):
            cells.append(load_result(path))
    return cells


def _list_cell_folders(folder: Path) -> list[Path]:
    """Return the folders of a run's cells, by name. Raises RestoreKVError if there is none."""
    paths = [file.parent for file in sorted((folder / CELLS).glob(f"*/{CELL}"))]
    if not paths:
        raise RestoreKVError(
            f"{folder} holds no results of restorekv; run `restorekv eval --out {folder}` first."
        )
    return paths


def identify_setup(
    model: PreTrainedModel, identity: ModelIdentity, config: CompressionConfig
) -> dict:
    """Return model, config, device and versions as JSON values: what a figure depends on, whatever
    the benchmark.
    """
    return {
        "model": identity.name,
        "fingerprint": identity.fingerprint,
        "dtype": get_dtype_name(model.dtype),
        "rope": identity.rope,
        "shape": asdict(identity.shape),
        **config.to_json(),
        "budget": "B = floor(r T L H), exact",
        "decoding": "greedy",
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": list_versions(PACKAGES),
    }
