"""Runs a grid: answers the cells and contexts that a folder lacks, and none of them twice.

A cell is one measurement: a model, a benchmark, an evictor, a ratio and so on (`Cell` in grid.py).
A job is the cells with the same model, questions and evictor, which share prefill and scores. A
sample is a context with its questions.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from restorekv import spec, tasks
from restorekv.cache import quantized
from restorekv.compression.budget import parse_ratio
from restorekv.compression.eviction import make_compressor
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation import protocols
from restorekv.evaluation.grid import FULL, Cell, Job, group_jobs
from restorekv.evaluation.results import (
    SUMMARY,
    Result,
    identify_setup,
    is_finished,
    load_readable_cells,
    open_result,
)
from restorekv.evaluation.reuse import (
    EarlierLine,
    digest_sample,
    find_earlier_lines,
)
from restorekv.evaluation.rows import summarize_cell
from restorekv.evaluation.worker import AnsweredCell, Worker
from restorekv.files import folder_lock, write_json
from restorekv.generation.decoding import get_stop_ids
from restorekv.model.load import check_dtype
from restorekv.model.rope import count_positions
from restorekv.tasks.base import digest_samples

Identities = dict[Cell, dict]  # what decides the answers of each cell (`identify_cell`)
Digests = dict[str, str]  # what each sample asks, by its id
EarlierLines = dict[Cell, dict[str, EarlierLine]]  # by the id of their sample
Missing = list[tuple[str, list[Cell]]]  # ids of samples in order, each with the cells that lack it


@dataclass(frozen=True)
class GridProgress:
    """How far a grid is.

    Args:
        what: The running job, in words for people.
        job_index: Its number, counted from 0.
        jobs: How many jobs there are.
        done: How many of its contexts are answered.
        total: How many contexts it has.
    """

    what: str
    job_index: int
    jobs: int
    done: int
    total: int

    @property
    def share(self) -> float:
        """The share of all work that is done; every job counts equally."""
        return (self.job_index + self.done / max(self.total, 1)) / self.jobs


class WorkerPool(Protocol):
    """Runs jobs, in this process or in others."""

    def check_jobs(self, jobs: Sequence[Job]) -> None:
        """Raise RestoreKVError if the model of a job lacks what its cells need, or its method
        refuses the model.
        """
        ...

    def open_job(self, job: Job) -> tuple[Identities, Digests]:
        """Return the identity of every cell, and the digests of the samples in order."""
        ...

    def answer_contexts(self, job: Job, missing: Missing) -> Iterator[list[AnsweredCell]]:
        """Yield, for every entry of `missing` in its order, the answers of each cell."""
        ...


class LocalPool:
    """Runs jobs in this process; the job opened last stays open."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.worker: Worker | None = None

    def _get_worker(self, job: Job) -> Worker:
        """Return the worker of a job, which loads its model at the first call."""
        if self.worker is None or self.worker.job != job:
            self.worker = None  # frees the last job before the next one loads
            self.worker = Worker(job, self.device)
        return self.worker

    def check_jobs(self, jobs: Sequence[Job]) -> None:
        checked: set[tuple[str, ...]] = set()
        # The last ones first, so that the first job finds its model loaded.
        for job in reversed(jobs):
            worker = self._get_worker(job)
            first = job.representative
            key = (first.model, first.dtype, first.protocol, first.evictor)
            if key not in checked:
                worker.check_job_method()
                checked.add(key)

    def open_job(self, job: Job) -> tuple[Identities, Digests]:
        worker = self._get_worker(job)
        identities = {cell: identify_cell(worker, cell) for cell in job.cells}
        return identities, {sample.id: digest_sample(sample) for sample in worker.samples}

    def answer_contexts(self, job: Job, missing: Missing) -> Iterator[list[AnsweredCell]]:
        for sample_id, cells in missing:
            yield list(self._get_worker(job).answer_sample(sample_id, cells))


def identify_cell(worker: Worker, cell: Cell) -> dict:
    """Return everything that decides a cell's answers in addition to its fields: cells that agree
    in both have equal answers on one machine.
    """
    adapter = worker.adapters[cell]
    benchmark = worker.benchmark
    # Settings that depend on the protocol are part of the method's name.
    name = FULL
    code = ""
    if cell.evictor != FULL:
        context, _ = worker.protocol.make_context(cell.model, worker.tokenizer, "any text")
        compressor = worker.protocol.adapt_method(
            make_compressor(cell.evictor, worker.make_config(cell)), context.prefix_length
        )
        name = compressor.identity(worker.model)
        code = compressor.digest_code()
    unit = "questions"
    if benchmark.averages_contexts(worker.protocol.name):
        unit = "contexts"
    return {
        **identify_setup(worker.model, worker.identity, worker.make_config(cell)),
        "tokenizer": worker.tokenizer_hash,
        "stops": sorted(get_stop_ids(worker.model, worker.tokenizer)),
        "positions": count_positions(worker.model.config),
        # Where longer contexts are cut, which a tokenizer's config may say.
        "context_limit": protocols.get_context_limit(worker.tokenizer, cell.max_context),
        "method": name,
        "code": code,
        "adapter": adapter.identity() if adapter else None,
        "benchmark": {
            **benchmark.to_json(),
            "title": benchmark.describe_title(),
            "spec": benchmark.spec,
            "samples": len(worker.samples),
            "digest": digest_samples(worker.samples) + spec.digest_source(type(benchmark)),
            "questions": sum(len(sample.questions) for sample in worker.samples),
        },
        "protocol": worker.protocol.to_json(cell.model, worker.tokenizer),
        "score": f"mean over tasks of the mean over {unit} x 100",
        "interval": "95 %, bootstrap over contexts",
    }


def run_grid(
    cells: Sequence[Cell],
    folder: Path,
    pool: WorkerPool | None = None,
    on_progress: Callable[[GridProgress], None] = lambda progress: None,
    set_aside: bool = False,
) -> list[Result]:
    """Answer what a folder lacks; what it already holds is neither asked nor changed.

    Args:
        cells: What is asked.
        folder: The folder of the answers.
        pool: What answers; this process if None.
        on_progress: Called after every context.
        set_aside: Move cells whose stored answers have another identity, for example because an
            evictor's file has changed, to `set-aside` in the folder, and ask them again.

    Returns:
        Every cell's result, in the order of `cells`.

    Raises:
        RestoreKVError: A cell names something that does not exist, or a method refuses a model
            (both are raised before any cell runs), a cell of the folder has another identity or
            answers about other contexts, or another process is filling the folder.
    """
    check_cells(cells)
    # A second run would add every answer again.
    with folder_lock(folder):
        jobs = group_jobs(cells)
        pool = pool or LocalPool()
        _check_unfinished(jobs, folder, pool)
        results = _run_jobs(jobs, folder, pool, on_progress, set_aside)
    return [results[cell] for cell in cells]


def _check_unfinished(jobs: Sequence[Job], folder: Path, pool: WorkerPool) -> None:
    """Refuse what jobs that are not finished would refuse only after the first of them has run."""
    unfinished = [job for job in jobs if any(not is_finished(folder, cell) for cell in job.cells)]
    with warnings.catch_warnings():
        # Opening the jobs warns again.
        warnings.simplefilter("ignore", RestoreKVWarning)
        # The first job refuses before it has an answer.
        pool.check_jobs(unfinished[1:])


def _run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    pool: WorkerPool,
    on_progress: Callable[[GridProgress], None],
    set_aside: bool,
) -> dict[Cell, Result]:
    """Run one job after the other and return every cell's result."""
    finished: dict[Cell, Result] = {}
    for job_index, job in enumerate(jobs):
        on_progress(GridProgress(job.title, job_index, len(jobs), 0, 0))
        identities, digests = pool.open_job(job)
        if not digests:
            raise RestoreKVError(
                f"The benchmark {job.representative.benchmark} has no contexts; "
                "choose other settings."
            )
        results = {
            cell: open_result(folder, cell, identities[cell], set_aside) for cell in job.cells
        }
        # What the folder lacks, context by context; what it has is never asked again.
        missing = _find_missing(results, list(digests))
        stored_cells = []
        if missing:
            stored_cells = load_readable_cells(folder)
        earlier: EarlierLines = {}
        for cell in {cell for _, cells in missing for cell in cells}:
            # If a finished cell has lost answers, its summary is no longer true.
            (results[cell].folder / SUMMARY).unlink(missing_ok=True)
            # Answers of other cells in the folder that are valid for this one too.
            earlier[cell] = find_earlier_lines(stored_cells, results[cell], digests)
        done = len(digests) - len(missing)
        for answered in _answer_missing(pool, job, missing, earlier):
            # Lines of a context are written together, when all its cells have answered.
            for cell, line, seconds in answered:
                results[cell].append(line, seconds)
            done += 1
            on_progress(GridProgress(job.title, job_index, len(jobs), done, len(digests)))
        # Written last: a cell without a summary is not finished.
        for result in results.values():
            if not result.done:
                result.put_in_order(list(digests))
                write_json(result.folder / SUMMARY, summarize_cell(result), follow=False)
        finished |= results
    return finished


def _answer_missing(
    pool: WorkerPool, job: Job, missing: Missing, earlier: EarlierLines
) -> Iterator[list[AnsweredCell]]:
    """Yield the answers of each cell for every entry of `missing`: an earlier line if there is
    one, else what the pool answers.

    Entries come in the order of `missing`, so that a cell's file does not depend on which of its
    contexts were answered earlier.
    """
    unanswered: Missing = []
    for sample_id, cells in missing:
        asked = [cell for cell in cells if sample_id not in earlier[cell]]
        if asked:
            unanswered.append((sample_id, asked))
    answers = iter(pool.answer_contexts(job, unanswered))
    for sample_id, cells in missing:
        answered = [
            (cell, *earlier[cell][sample_id]) for cell in cells if sample_id in earlier[cell]
        ]
        if len(answered) < len(cells):
            answered += next(answers)
        yield answered


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise RestoreKVError for cells that could not run, without loading anything."""
    if not cells:
        raise RestoreKVError("There is nothing to evaluate; name an evictor.")
    # Each call refuses a name or value that does not exist.
    for cell in cells:
        tasks.make_benchmark(cell.benchmark)
        parse_ratio(cell.ratio)
        quantized.check_kv_dtype(cell.kv_dtype)
        check_dtype(cell.dtype)
        if cell.offset and cell.restored:
            raise RestoreKVError(
                f"An offset is a control without restoring; evaluate {cell.evictor} without an "
                "adapter (@none on the command line), or leave out the offset."
            )
        if cell.evictor != FULL:
            config = cell.config(protocols.make_protocol(cell.protocol).prefix_policy)
            make_compressor(cell.evictor, config)


def _find_missing(results: dict[Cell, Result], sample_ids: Sequence[str]) -> Missing:
    """Return the samples that are not answered yet, each with the cells that lack it. Raises
    RestoreKVError if a cell has answers to other samples than these.
    """
    answered = {cell: {line["sample"] for line in result.lines} for cell, result in results.items()}
    for cell, ids in answered.items():
        if not ids <= set(sample_ids):
            raise RestoreKVError(
                f"{results[cell].folder} has answers to other contexts; choose another folder."
            )
    missing = []
    # A context is missing for the cells that have no line of it yet.
    for sample_id in sample_ids:
        cells = [cell for cell in results if sample_id not in answered[cell]]
        if cells:
            missing.append((sample_id, cells))
    return missing
