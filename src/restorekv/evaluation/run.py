"""Carries a grid out: whatever cells and contexts are missing in a folder, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from restorekv import tasks
from restorekv.cache import quantized
from restorekv.compression.budget import exact_ratio
from restorekv.compression.compressor import make_compressor
from restorekv.errors import RestoreKVError
from restorekv.evaluation.cell import FULL, Cell
from restorekv.evaluation.cell_facts import facts
from restorekv.evaluation.job import Job, jobs
from restorekv.evaluation.protocols import make
from restorekv.evaluation.results import CELLS, SUMMARY, Result, opened
from restorekv.evaluation.summary import summary
from restorekv.evaluation.worker import Line, Worker
from restorekv.files import locked, write_json
from restorekv.model.load import check_dtype

LOCK = ".lock"
Facts = dict[Cell, dict]
Missing = list[tuple[str, list[Cell]]]  # samples in order, each with the cells that lack it


@dataclass(frozen=True)
class Progress:
    """Job `turn` of `jobs`, counted from 0, is under way: `done` of its `total` contexts are answered."""

    what: str
    turn: int
    jobs: int
    done: int
    total: int

    @property
    def share(self) -> float:
        """Of all the work, jobs counted alike."""
        return (self.turn + self.done / max(self.total, 1)) / self.jobs


Tell = Callable[[Progress], None]


class Pool(Protocol):
    """Where jobs are worked on."""

    def open(self, job: Job) -> tuple[Facts, list[str]]:
        """What every cell is made with, and the names of the samples, in order."""

    def answers(self, job: Job, missing: Missing) -> Iterator[list[Line]]:
        """For every entry of `missing`, in its order, a line of each cell."""


class Here:
    """This process; the job opened last stays open."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.opened = device, None

    def worker(self, job: Job) -> Worker:
        if self.opened is None or self.opened.job != job:
            self.opened = None  # the old one goes before the new one comes
            self.opened = Worker(job, self.device)
        return self.opened

    def open(self, job: Job) -> tuple[Facts, list[str]]:
        worker = self.worker(job)
        return {cell: facts(worker, cell) for cell in job.cells}, [sample.id for sample in worker.samples]

    def answers(self, job: Job, missing: Missing) -> Iterator[list[Line]]:
        for name, cells in missing:
            yield list(self.worker(job).answers(name, cells))


def run(
    cells: Sequence[Cell], folder: Path, pool: Pool | None = None, tell: Tell = lambda progress: None
) -> list[Result]:
    """Every cell's result, in the order of `cells`; what `folder` already holds is neither asked nor changed.

    Raises RestoreKVError for cells that name nothing that exists, before any of them is worked on, and for a folder
    whose cells were made with something else or that another process is filling.
    """
    check(cells)
    with alone(folder):
        found = carried_out(jobs(cells), folder, pool or Here(), tell)
    return [found[cell] for cell in cells]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two runs would ask the same contexts, and both would add the answers. A run that opens no cell leaves nothing."""
    here = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK) as mine:
        if not mine:
            raise RestoreKVError(f"Another run is filling {folder}; wait until it ends or choose another folder.")
        try:
            yield
        finally:
            if not (folder / CELLS).exists():
                (folder / LOCK).unlink()
                if not here:
                    folder.rmdir()


def carried_out(todo: Sequence[Job], folder: Path, pool: Pool, tell: Tell) -> dict[Cell, Result]:
    """Job by job."""
    found: dict[Cell, Result] = {}
    for turn, job in enumerate(todo):
        tell(Progress(job.title, turn, len(todo), 0, 0))
        made, names = pool.open(job)
        if not names:
            raise RestoreKVError(f"The benchmark {job.first.benchmark} has no contexts; choose other settings.")
        results = {cell: opened(folder, cell, made[cell]) for cell in job.cells}
        missing = lacking(results, names)
        for done, lines in enumerate(pool.answers(job, missing), len(names) - len(missing) + 1):
            for cell, line, seconds in lines:
                results[cell].append(line, seconds)
            tell(Progress(job.title, turn, len(todo), done, len(names)))
        for result in results.values():
            if not result.done:
                write_json(result.folder / SUMMARY, summary(result))
        found |= results
    return found


def check(cells: Sequence[Cell]) -> None:
    """Refuses what could not be carried out, without loading anything."""
    if not cells:
        raise RestoreKVError("There is nothing to evaluate; name an evictor.")
    for cell in cells:
        tasks.make(cell.benchmark)
        exact_ratio(cell.ratio)
        quantized.check(cell.storage)
        check_dtype(cell.dtype)
        if cell.evictor != FULL:
            conventions = cell.conventions(make(cell.protocol).prefix_policy)
            make_compressor(cell.evictor, conventions, cell.streaming or None)


def lacking(results: dict[Cell, Result], names: Sequence[str]) -> Missing:
    """What is still to be answered. Raises RestoreKVError for answers to other samples than these."""
    answered = {cell: {line["sample"] for line in result.lines} for cell, result in results.items()}
    for cell, held in answered.items():
        if not held <= set(names):
            raise RestoreKVError(f"{results[cell].folder} has answers to other contexts; choose another folder.")
    missing = [(name, [cell for cell in results if name not in answered[cell]]) for name in names]
    return [(name, wanted) for name, wanted in missing if wanted]
