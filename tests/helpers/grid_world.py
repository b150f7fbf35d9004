"""A tiny model with an adapter, a benchmark made of plain words, and a grid over them; also run as a program.

python -m tests.helpers.grid_world FOLDER LOG COUNT    runs the bundled grid and logs what is asked and written
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from restorekv.evaluation import results
from restorekv.evaluation.cell import Cell
from restorekv.evaluation.run import LOCK, run
from restorekv.evaluation.worker import Worker
from restorekv.tasks import Benchmark, Question, Sample

WORDS = "red house code seven blue door yellow key bread green who lives there since may open".split()


@dataclass(frozen=True)
class Plain(Benchmark):
    """`contexts` of `words` words, each with `questions` questions of two tasks."""

    name: ClassVar[str] = "plain"
    title: ClassVar[str] = "Plain"

    contexts: int = 2
    questions: int = 3
    words: int = 60
    text: str = ""

    def samples(self, tokenizer, protocol: str) -> Iterable[Sample]:
        for index in range(self.contexts):
            said = self.text + " ".join(WORDS[(7 * index + turn * turn) % len(WORDS)] for turn in range(self.words))
            asked = (
                Question(f"{index}-{turn}", f"task_{turn % 2}", f"which {WORDS[turn % 16]}?", ("seven", "a"), 4)
                for turn in range(self.questions)
            )
            yield Sample(str(index), said, tuple(asked))

    def score(self, question: Question, prediction: str) -> float:
        return sum(answer in prediction for answer in question.answers) / len(question.answers)

    def described(self) -> dict[str, object]:
        return {"data": "made up"}


def grid(model: str, benchmark: str, evictors=("kvzip",), ratios=("0.5", "0.3"), adapters=(None,), **common):
    """The full cache, and every evictor at every ratio with every adapter."""
    shared = {"model": model, "benchmark": benchmark, **common}
    return [Cell.full(**shared)] + [
        Cell(evictor=evictor, ratio=ratio, adapter=adapter, on_small_budget="fewer", **shared)
        for evictor in evictors
        for adapter in adapters
        for ratio in ratios
    ]


def bundled_grid(count: int) -> list[Cell]:
    benchmark = f"bundled:count={count},low=100,high=160"
    return grid("bundled", benchmark, ("kvzip", "streaming"), ("0.5", "0.25"), (None,))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of every cell, but for the seconds it took."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (results.SECONDS, LOCK))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def logged(log: Path) -> None:
    """From now on a line for every context that a cell is asked (`asked`) and for every one on the disk (`done`)."""
    ask, append = Worker.answers, results.Result.append

    def tell(word: str, cell: Cell, sample: str) -> None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{word} {cell.name} {sample}\n".encode())
        os.close(file)

    def answers(self, name, cells):
        for line in ask(self, name, cells):
            tell("asked", line[0], name)
            yield line

    def appended(self, line, seconds):
        append(self, line, seconds)
        tell("done", self.cell, line["sample"])

    Worker.answers, results.Result.append = answers, appended


if __name__ == "__main__":
    torch.set_num_threads(1)
    logged(Path(sys.argv[2]))
    run(bundled_grid(int(sys.argv[3])), Path(sys.argv[1]))
