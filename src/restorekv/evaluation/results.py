"""The files of a run: a folder for every cell, whose answers grow context by context.

DIR/cells/<name>/cell.json      the cell and what it was made with, written first
                 answers.jsonl  one line a context
                 seconds.jsonl  how long each context took, kept apart because it differs from run to run
                 summary.json   figures, written last: the cell is done
"""

import json
import os
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from restorekv.compression.prepared import CompressionConfig
from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.stats import Answer
from restorekv.files import write_json
from restorekv.model.load import model_fingerprint, model_name, rope_fingerprint
from restorekv.model.shape import CacheShape

CELLS, CELL, ANSWERS, SECONDS, SUMMARY = "cells", "cell.json", "answers.jsonl", "seconds.jsonl", "summary.json"
PACKAGES = ("restorekv", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Result:
    """A cell as its folder holds it; `facts` say what it was made with (see `run.cell_facts`)."""

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
        """The contexts answered so far, in the order of their answers."""
        return list(complete_lines(self.folder / ANSWERS))

    @property
    def answers(self) -> list[Answer]:
        """The answer to every question, contexts in their order."""
        return answers_of((line["sample"], line) for line in self.lines)

    def append(self, line: dict, seconds: dict[str, float]) -> None:
        """Adds a context's answers; a line that a killed process left half-written is replaced."""
        append_line(self.folder / SECONDS, {"sample": line["sample"], **seconds})
        append_line(self.folder / ANSWERS, line)
        self.__dict__.pop("lines", None)


def answers_of(contexts: Iterable[tuple[Hashable, dict]]) -> list[Answer]:
    """Returns the answers in the lines of (a context's name, its line)."""
    return [
        Answer(name, answer["task"], answer["id"], answer["prediction"], answer["score"])
        for name, line in contexts
        for answer in line["answers"]
    ]


def complete_lines(path: Path) -> Iterator[dict]:
    """Yields the whole lines of a file of JSON lines; a half-written line at its end is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield parsed(path, line)


def parsed(path: Path, text: bytes) -> dict:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RestoreKVError(f"{path} is damaged ({error}); remove it and start again.") from error


def append_line(path: Path, line: dict) -> None:
    """Adds one line of JSON at the end of the file; it is on the disk before this returns."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def opened(folder: Path, cell: Cell, facts: dict) -> Result:
    """Opens the cell's folder, or creates it; raises RestoreKVError for a cell that was made with other facts."""
    path = folder / CELLS / cell.name
    if (path / CELL).exists():
        result = read(path)
        if changes := differences(result.facts, facts):
            raise RestoreKVError(f"{path} was made with {changes}; choose another folder or remove this one.")
        return result
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / CELL, {"cell": cell.to_dict(), "facts": facts})
    return Result(path, cell, facts)


def differences(before: dict, now: dict) -> str:
    """Names what changed, as "fingerprint 1f (now 2e)"; versions and threads are recorded, not compared."""
    now = json.loads(json.dumps(now))
    keys = [key for key in {**before, **now} if key not in ("versions", "threads") and before.get(key) != now.get(key)]
    return " and ".join(f"{key} {before.get(key)} (now {now.get(key)})" for key in keys)


def read(path: Path) -> Result:
    try:
        stored = json.loads((path / CELL).read_text(encoding="utf-8"))
        return Result(path, Cell.from_dict(stored["cell"]), stored["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RestoreKVError(f"{path} holds no cell of restorekv ({error}); remove it.") from error


def load(folder: Path) -> list[Result]:
    """Returns every cell of a run, done or not, by name. Raises RestoreKVError where there is none."""
    results = [read(path.parent) for path in sorted((folder / CELLS).glob(f"*/{CELL}"))]
    if not results:
        raise RestoreKVError(f"{folder} holds no results of restorekv; run `restorekv eval --out {folder}` first.")
    return results


def provenance(model: PreTrainedModel, conventions: CompressionConfig) -> dict:
    """Returns model, conventions, device and versions as JSON values; they decide whether two figures compare."""
    return {
        "model": model_name(model),
        "fingerprint": model_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rope": rope_fingerprint(model.config),
        "shape": asdict(CacheShape.of(model)),
        **conventions.described(),
        "budget": "B = floor(r T L H), exact",
        "decoding": "greedy",
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
    }
