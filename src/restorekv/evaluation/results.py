"""What is on disk of a run: a folder for every cell, whose answers grow context by context.

DIR/cells/<name>/cell.json      the cell and what it was made with, written first
                 answers.jsonl  one line a context, appended whole
                 seconds.jsonl  what each took; apart, because it differs from run to run
                 summary.json   figures, written last: the cell is done
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.evaluation.cell import Cell
from restorekv.evaluation.stats import Answer
from restorekv.files import write_json

CELLS, CELL, ANSWERS, SECONDS, SUMMARY = "cells", "cell.json", "answers.jsonl", "seconds.jsonl", "summary.json"


@dataclass(frozen=True)
class Result:
    """A cell as it stands in a folder. `facts` are what it was made with (see `grid.run.facts`)."""

    folder: Path
    cell: Cell
    facts: dict

    @property
    def done(self) -> bool:
        return (self.folder / SUMMARY).exists()

    @cached_property
    def summary(self) -> dict:
        """Score, interval, tasks, groups, pairs and bytes; raises FileNotFoundError for a cell that is not done."""
        return parsed(self.folder / SUMMARY, (self.folder / SUMMARY).read_bytes())

    @cached_property
    def lines(self) -> list[dict]:
        """The contexts answered so far, in the order they were."""
        return list(complete_lines(self.folder / ANSWERS))

    @property
    def answers(self) -> list[Answer]:
        """Every question's answer, contexts in their order."""
        return answers_of(self.lines)

    def append(self, line: dict, seconds: dict[str, float]) -> None:
        """Adds a context's answers; a line that a killed process left half-written goes first."""
        append_line(self.folder / SECONDS, {"sample": line["sample"], **seconds})
        append_line(self.folder / ANSWERS, line)
        self.__dict__.pop("lines", None)


def answers_of(lines: Sequence[dict]) -> list[Answer]:
    """Flat, as `stats` takes them."""
    return [
        Answer(line["sample"], told["task"], told["id"], told["prediction"], told["score"])
        for line in lines
        for told in line["answers"]
    ]


def complete_lines(path: Path) -> Iterator[dict]:
    """Whole lines of JSON; the end of a file that was being written is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield parsed(path, line)


def parsed(path: Path, text: bytes) -> dict:
    """JSON of a file; where it is damaged the file may go, since what it held can be made again."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RestoreKVError(f"{path} is damaged ({error}); remove it and start again.") from error


def append_line(path: Path, line: dict) -> None:
    """One line of JSON at the end of the file, on the disk before this returns."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def opened(folder: Path, cell: Cell, facts: dict) -> Result:
    """The cell's place, made if it is not there. Refuses one that was made with something else."""
    place = folder / CELLS / cell.name
    if (place / CELL).exists():
        found = read(place)
        told = differences(found.facts, facts)
        if told:
            raise RestoreKVError(f"{place} was made with {told}; choose another folder or remove this one.")
        return found
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / CELL, {"cell": cell.told, "facts": facts})
    return Result(place, cell, facts)


def differences(before: dict, now: dict) -> str:
    """What decides figures and is not the same: "fingerprint 1f (now 2e)". Versions are recorded, not compared."""
    now = json.loads(json.dumps(now))
    keys = [key for key in {**before, **now} if key not in ("versions", "threads") and before.get(key) != now.get(key)]
    return " and ".join(f"{key} {before.get(key)} (now {now.get(key)})" for key in keys)


def read(place: Path) -> Result:
    """A cell's folder."""
    try:
        told = json.loads((place / CELL).read_text(encoding="utf-8"))
        return Result(place, Cell.parse(told["cell"]), told["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RestoreKVError(f"{place} holds no cell of restorekv ({error}); remove it.") from error


def load(folder: Path) -> list[Result]:
    """Every cell of a run, done or not, by name. Raises RestoreKVError where there is none."""
    found = [read(path.parent) for path in sorted((folder / CELLS).glob(f"*/{CELL}"))]
    if not found:
        raise RestoreKVError(f"{folder} holds no results of restorekv; run `restorekv eval --out {folder}` first.")
    return found
