"""Spreads a grid over a Ray cluster: this process writes the files, workers open models and answer.

A worker is an actor: one process that keeps the job it has opened. Idle workers get contexts one by
one; answers come back in order, so the files equal those of a run in one process. If a worker dies
(killed, out of memory, node lost), its context goes to another worker, and a new worker starts
where there is room.
"""

import os
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from restorekv.cluster import LOCAL, connect_ray
from restorekv.errors import RestoreKVError, RestoreKVWarning, summarize_error, warn
from restorekv.evaluation.grid import Cell, Job
from restorekv.evaluation.results import describe_changes
from restorekv.evaluation.run import Digests, Identities, LocalPool, Missing, identify_cell
from restorekv.evaluation.worker import AnsweredCell
from restorekv.files import HOST

TRIES = 3  # workers that may die over one context
STORE = 128 * 2**20  # bytes of shared memory for results, which are short texts
Call = tuple[str, tuple]  # a method of `RayWorker` and its arguments


class WorkerProcess:
    """The methods that every worker's process has."""

    def set_up(self, threads: int, folder: str) -> None:
        """Use `threads` threads, and the driver's folder, so that relative paths mean the same."""
        if os.path.isdir(folder):
            os.chdir(folder)
        torch.set_num_threads(threads)

    def report_ready(self) -> int:
        """Return the process id, as soon as the process has started."""
        return os.getpid()


class RayWorker(WorkerProcess, LocalPool):
    """The actor that runs in a worker's process."""

    def __init__(self, device: str, threads: int, folder: str) -> None:
        super().__init__(device)
        self.set_up(threads, folder)
        self.checked: Job | None = None

    def open_with_warnings(self, job: Job) -> tuple[tuple[Identities, Digests], list[str]]:
        """Open the job, and also return the warnings, which would be lost in this process."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RestoreKVWarning)
            opened = self.open_job(job)
        return opened, [
            str(each.message) for each in caught if issubclass(each.category, RestoreKVWarning)
        ]

    def answer_context(
        self, job: Job, sample: str, cells: list[Cell], identities: Identities
    ) -> list[AnsweredCell]:
        """Return a line of each cell for a context.

        Args:
            job: The job of the cells.
            sample: The id of the context.
            cells: What is asked.
            identities: What the job's cells are made with, according to the worker that opened it.

        Raises:
            RestoreKVError: This node would make them with something else.
        """
        # Identifying a model reads its weights, so a worker does it once for a job.
        if self.checked != job:
            self._refuse_other_setup(job, identities)
            self.checked = job
        return next(self.answer_contexts(job, [(sample, cells)]))

    def _refuse_other_setup(self, job: Job, identities: Identities) -> None:
        """Refuse to answer with a model, adapter, evictor or data other than the results record.

        Nodes find them by their names, which may mean something else on each.
        """
        worker = self._get_worker(job)
        for cell in job.cells:
            changes = describe_changes(identities[cell], identify_cell(worker, cell))
            if changes:
                raise RestoreKVError(
                    f"The worker on {HOST} differs from the one that opened the job: {changes}. "
                    "Give every node of the Ray cluster the same model, adapters, data and version "
                    "of restorekv."
                )


class RayWorkers:
    """Up to `workers` workers of `threads` threads each, with a GPU each on cuda; a context
    manager.

    `address` "local" starts a cluster on this machine; "auto", "host:port" or "ray://host:port"
    connect to a running one. Its nodes must have restorekv, and the models, adapters and data of
    the work under the same names. Each worker is a `kind`, constructed from `arguments`, a device,
    the number of threads and the driver's folder. Raises RestoreKVError if Ray, the cluster or its
    GPUs are missing.
    """

    def __init__(
        self,
        kind: type[WorkerProcess],
        arguments: tuple,
        workers: int,
        address: str,
        device: str,
        threads: int = 1,
    ) -> None:
        if workers < 1 or threads < 1:
            raise RestoreKVError(
                f"Ray needs at least 1 worker and 1 thread, not {workers} and {threads}."
            )
        gpus = int(device.startswith("cuda"))
        self.ray = connect_ray(address, workers * threads, STORE, {"CPU": threads, "GPU": gpus})
        # A worker sees only its own GPU, so the device needs no number.
        self.arguments = (*arguments, "cuda" if gpus else device, threads, os.getcwd())
        # Pending answer -> its worker and the number of its call (None: the worker's start)
        self.busy: dict[Any, tuple[Any, int | None]] = {}
        self.idle: deque[Any] = deque()
        self.actor = self.ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(kind)
        for _ in range(workers):
            self._start_worker()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ray.shutdown()

    def _start_worker(self) -> None:
        """Start a new worker; it becomes idle once its process has started."""
        worker = self.actor.remote(*self.arguments)
        self.busy[worker.report_ready.remote()] = worker, None

    def run_calls(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Yield what the calls return, in their order; raise a worker's error or bug here.

        Every idle worker gets the next call. The call of a worker that died goes first to another
        one, until TRIES workers have died over it.
        """
        # Calls of an earlier run may still be pending: their results are dropped (None is no
        # call's number), and their workers become idle when they end.
        self.busy = {answer: (worker, None) for answer, (worker, _) in self.busy.items()}
        waiting = deque(range(len(calls)))
        deaths: Counter[int | None] = Counter()
        done: dict[int | None, Any] = {}
        for turn in range(len(calls)):
            while turn not in done:
                # A worker takes a call as soon as it is idle, in the order of the calls.
                while self.idle and waiting:
                    worker = self.idle.popleft()
                    number = waiting.popleft()
                    name, arguments = calls[number]
                    self.busy[getattr(worker, name).remote(*arguments)] = worker, number
                for answer in self.ray.wait(list(self.busy))[0]:
                    worker, number = self.busy.pop(answer)
                    # A bug of ours is raised here; a dead worker is replaced and its call repeated.
                    try:
                        done[number] = self.ray.get(answer)
                        self.idle.append(worker)
                    except self.ray.exceptions.RayTaskError as error:
                        self.idle.append(worker)
                        if number is not None:
                            raise error.cause from error
                    except self.ray.exceptions.RayError as error:
                        self.ray.kill(worker)  # it may still run although its node is lost
                        self._start_worker()
                        deaths[number] += 1
                        if deaths[number] == TRIES:
                            reason = (
                                f"{TRIES} workers died over the same context; give a worker more "
                                f"memory or take shorter contexts ({summarize_error(error)})."
                            )
                            # A subclass may supply a call's result; if workers cannot even start,
                            # that is always an error.
                            giver = RayWorkers if number is None else type(self)
                            done[number] = giver.give_up(self, reason)
                        elif number is not None:
                            waiting.appendleft(number)
            yield done.pop(turn)

    def give_up(self, reason: str) -> Any:
        """Return a result for a call that killed TRIES workers, or raise."""
        raise RestoreKVError(reason)


class RayPool(RayWorkers):
    """Runs jobs on workers; answers do not depend on how many there are."""

    def __init__(
        self, workers: int = 2, address: str = LOCAL, device: str = "cpu", threads: int = 1
    ) -> None:
        super().__init__(RayWorker, (), workers, address, device, threads)
        self.identities: Identities = {}  # of the cells of the job that was opened last

    def check_jobs(self, jobs: Sequence[Job]) -> None:
        """Check the jobs on a worker: this machine may have no room for the model."""
        if jobs:
            next(self.run_calls([("check_jobs", (jobs,))]))

    def open_job(self, job: Job) -> tuple[Identities, Digests]:
        """Open the job on a worker: this machine may have no room for the model."""
        opened, messages = next(self.run_calls([("open_with_warnings", (job,))]))
        for text in messages:
            warn(text)
        self.identities, _ = opened
        return opened

    def answer_contexts(self, job: Job, missing: Missing) -> Iterator[list[AnsweredCell]]:
        identities = self.identities
        return self.run_calls(
            [("answer_context", (job, sample, cells, identities)) for sample, cells in missing]
        )
