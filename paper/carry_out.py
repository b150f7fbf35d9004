"""Measures what experiments need, and reports which table is being measured and how long the rest
will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paper.plan import Experiment, list_cells, list_needs
from paper.setting import Setting
from paper.study import Study
from restorekv import tasks
from restorekv.compression.progress import OnProgress
from restorekv.errors import RestoreKVError
from restorekv.evaluation.frame import refuse_name_clashes
from restorekv.evaluation.grid import Cell, Job, group_jobs
from restorekv.evaluation.results import CELLS, SUMMARY, Result, load_results
from restorekv.evaluation.run import GridProgress, LocalPool, WorkerPool, check_cells, run_grid

# Costs of a preparation and of a cell of Attention Matching, as multiples of another cell's cost,
# which is CELL_SECONDS for one context (tiny model, CPU).
PREPARING = 10
MATCHING = 15
CELL_SECONDS = 0.08
UNKNOWN = 100  # contexts assumed for a benchmark that does not say how many it has
NAMED = 3


class Clock:
    """Progress over all work: reports what is being done, the time left and the share that is done.

    `parts` are (what, cost) in the order of work.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, float]],
        on_progress: OnProgress,
        now: Callable[[], float] = time.monotonic,
    ):
        self.parts = list(parts)
        self.on_progress = on_progress
        self.now = now
        self.begun = now()
        self.total_cost = sum(cost for _, cost in parts) or 1.0

    def report_at(self, turn: int, share: float) -> None:
        """Report that part number `turn` is done to a `share` (0 to 1)."""
        done = sum(cost for _, cost in self.parts[:turn]) + share * self.parts[turn][1]
        told = self.parts[turn][0]
        if done > 0:
            per_unit = (self.now() - self.begun) / done
            told += f", about {format_seconds((self.total_cost - done) * per_unit)} to go"
        self.on_progress(told, done / self.total_cost)


def format_seconds(seconds: float) -> str:
    """Return a duration such as "40 s", "12 min" or "1 h 40 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@dataclass
class Outcome:
    """What was measured, and what could not be.

    `results` are by cell. `failed` has the reason for each (benchmark's spec, evictor), or
    (study's name, ""), that could not be measured.
    """

    results: dict[Cell, Result] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    @contextmanager
    def unless_failed(self, what: tuple[str, str], strict: bool) -> Iterator[None]:
        """Note why the block failed, such as for lack of data or of a gate, and continue; `strict`
        raises instead.
        """
        try:
            yield
        except RestoreKVError as error:
            if strict:
                raise
            self.failed[what] = str(error)


def carry_out(
    experiments: Sequence[Experiment],
    setting: Setting,
    out: Path,
    on_progress: OnProgress,
    pool: WorkerPool | None = None,
) -> Outcome:
    """Measure the cells of all experiments, each once, then the studies; what `out` holds is not
    measured again.
    """
    wanted = list_cells(experiments, setting)
    if wanted:
        check_cells(wanted)
    work = group_jobs(wanted)
    studies = [study for study in experiments if isinstance(study, Study) and study.measure]
    parts = [(_name_cells(job, experiments, setting), estimate_cost(job, out)) for job in work]
    parts += [
        (f"{study.number}: {study.title}", study.minutes * 60 / CELL_SECONDS) for study in studies
    ]
    clock = Clock(parts, on_progress)
    done = Outcome()
    pool = pool or LocalPool(setting.setup.device)
    for turn, job in enumerate(work):
        shared = job.representative
        with done.unless_failed((shared.benchmark, shared.evictor), strict=setting.tiny):
            done.results |= zip(
                job.cells, run_grid(job.cells, out, pool, _make_listener(clock, turn)), strict=True
            )
    for turn, study in enumerate(studies, len(work)):
        clock.report_at(turn, 0.0)
        with done.unless_failed((study.name, ""), strict=setting.tiny):
            assert study.measure is not None, "`studies` has those that measure"
            study.measure(
                setting,
                out,
                lambda step, steps, _, turn=turn: clock.report_at(turn, step / max(steps, 1)),
            )
    return done


def load_done(experiments: Sequence[Experiment], setting: Setting, out: Path) -> Outcome:
    """Return what `out` holds, and measure nothing; what is missing counts as failed.

    Raises RestoreKVError if `out` has no cells, or cells that must not be in one table.
    """
    wanted = list_cells(experiments, setting)
    stored = {result.cell: result for result in load_results(out)} if wanted else {}
    found = Outcome()
    for cell in wanted:
        result = stored.get(cell)
        if result is not None and result.done:
            found.results[cell] = result
        else:
            found.failed[cell.benchmark, cell.evictor] = f"{cell.evictor} is not measured yet"
    refuse_name_clashes(list(found.results.values()))
    return found


def _make_listener(clock: Clock, turn: int) -> Callable[[GridProgress], None]:
    """Return a function that passes the progress of a job, part `turn` of the clock, on to it."""
    begun: list[int] = []  # one number: the contexts that an earlier run had answered

    def listen(progress: GridProgress) -> None:
        if progress.total == 0:
            clock.report_at(turn, 0.0)
            return
        if not begun:
            begun.append(progress.done - 1)
        clock.report_at(turn, (progress.done - begun[0]) / (progress.total - begun[0]))

    return listen


def _name_cells(job: Job, experiments: Sequence[Experiment], setting: Setting) -> str:
    """Return the names of the first few experiments that a job is for, and its evictor."""
    found = [
        experiment.number or experiment.title
        for experiment in experiments
        if not {need.cell for need in list_needs(experiment, setting)}.isdisjoint(job.cells)
    ]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{', '.join(found[:NAMED])}{more} ({job.representative.evictor})"


def estimate_cost(job: Job, out: Path) -> float:
    """Return the cost of a job's missing cells, in units of one cell on one context."""
    missing = [cell for cell in job.cells if not (out / CELLS / cell.name / SUMMARY).exists()]
    each = sum(MATCHING if cell.evictor.startswith("am-") else 1 for cell in missing)
    return (
        (PREPARING + each) * (tasks.make_benchmark(job.representative.benchmark).count or UNKNOWN)
        if missing
        else 0.0
    )
