"""A tiny model with an adapter, a benchmark made of plain words, and a grid over them; also run as
a program.

python -m tests.helpers.grid_world FOLDER LOG CONTEXTS KILL_AT    runs `resume`
"""

import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

import torch

from restorekv.evaluation import results
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.run import run_grid
from restorekv.evaluation.worker import Worker
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tasks import Benchmark, Question, Sample
from tests.helpers.models import build_model

WORDS = (
    "red house code seven blue door yellow key bread green who lives there since may open".split()
)


@dataclass(frozen=True)
class Plain(Benchmark):
    """A benchmark of `contexts` contexts of `words` words, each with `questions` questions of two
    tasks.
    """

    name: ClassVar[str] = "plain"
    title: ClassVar[str] = "Plain"

    contexts: int = 2
    questions: int = 3
    words: int = 60
    text: str = ""

    def load_samples(self, tokenizer, protocol: str) -> Iterable[Sample]:
        for index in range(self.contexts):
            said = self.text + " ".join(
                WORDS[(7 * index + turn * turn) % len(WORDS)] for turn in range(self.words)
            )
            asked = (
                Question(
                    f"{index}-{turn}",
                    f"task_{turn % 2}",
                    f"which {WORDS[turn % 16]}?",
                    ("seven", "a"),
                    4,
                )
                for turn in range(self.questions)
            )
            yield Sample(str(index), said, tuple(asked))

    def score(self, question: Question, prediction: str) -> float:
        return sum(answer in prediction for answer in question.answers) / len(question.answers)

    def to_json(self) -> dict[str, object]:
        return {"data": "made up"}


def save_world(root: Path, tokenizer, policy: str = "counted", adapters=("adapter",)) -> Path:
    """Save a tiny model and untrained adapters with the seeds 0, 1, ... into the folder `root`."""
    model = build_model("qwen3")
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    for seed, name in enumerate(adapters):
        adapter = RestoreAdapter.create(model, 3, rank=2, seed=seed)
        adapter.record_training(evictor="kvzip", prefix_policy=policy, ratio_range=(0.1, 0.9))
        adapter.save_pretrained(root / name)
    return root


def grid(
    model: str,
    benchmark: str,
    evictors=("kvzip",),
    ratios=("0.5", "0.3"),
    adapters=(None,),
    **common,
):
    """Return the cells of the full cache, and of every evictor at every ratio with every
    adapter.
    """
    shared = {"model": model, "benchmark": benchmark, **common}
    return [Cell.full_cache(**shared)] + [
        Cell(evictor=evictor, ratio=ratio, adapter=adapter, on_small_budget="fewer", **shared)
        for evictor in evictors
        for adapter in adapters
        for ratio in ratios
    ]


def tiny_grid(contexts: int) -> list[Cell]:
    benchmark = f"tiny:count={contexts},low=100,high=160"
    return grid("tiny", benchmark, ("kvzip", "streaming"), ("0.5", "0.25"), (None,))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all cells' files, except locks and the seconds that a cell took."""
    files = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (results.SECONDS, ".lock")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def log_asked(log: Path) -> None:
    """Make this process add a line to `log` for every context that it asks for a cell."""
    real = Worker.answer_sample

    def answers(self, name, cells):
        for line in real(self, name, cells):
            with log.open("a") as file:
                file.write(f"{line[0].name} {name}\n")
            yield line

    Worker.answer_sample = answers


def kill_at_write(number: int) -> None:
    """Make this process kill itself at its n-th write to a cell, counted from 0.

    Of a JSON line, half is on the disk by then; of a whole file, only its temporary copy.
    """
    real_line, real_replace, writes = results.append_line, os.replace, count()

    def append_line(path, line):
        if next(writes) == number:
            with path.open("ab") as file:
                text = json.dumps(line).encode()
                file.write(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real_line(path, line)

    def replace(source, target):
        if next(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real_replace(source, target)

    results.append_line, os.replace = append_line, replace


def resume(folder: Path, log: Path, contexts: int, kill_at: int) -> None:
    """Run the rest of the tiny grid, killed at write `kill_at`; -1 lets it finish."""
    log_asked(log)
    kill_at_write(kill_at)
    run_grid(tiny_grid(contexts), folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    resume(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
