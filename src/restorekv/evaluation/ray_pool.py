"""Cells spread over a Ray cluster: this process keeps the files, workers open models and answer.

A worker is an actor: one process that keeps the job it has opened. Contexts are handed out one by one to whoever is
free and taken back in order, so the files are those of a run in this process. A context whose worker dies (killed,
out of memory, node lost) is given to another worker, and a new worker is started where there is room.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from restorekv.data.files import optional
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation.cell import Cell
from restorekv.evaluation.job import Job
from restorekv.evaluation.run import Facts, Here, Missing
from restorekv.evaluation.worker import Line

LOCAL = "local"
TRIES = 3  # workers that may die over one context
STORE = 128 * 2**20  # bytes of shared memory for results, which are short texts
ENVIRONMENT = {  # no reports to Ray's makers, workers as quick as this process, no words of its own
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}  # fmt: skip
Call = tuple[str, tuple]  # a method of `Hand` and its arguments


class Hand(Here):
    """What runs in a worker's process."""

    def __init__(self, device: str, threads: int, folder: str) -> None:
        super().__init__(device)
        if os.path.isdir(folder):  # so that relative paths mean what they mean to the driver
            os.chdir(folder)
        torch.set_num_threads(threads)

    def ready(self) -> int:
        """The number of the process, as soon as it is there."""
        return os.getpid()

    def told(self, job: Job) -> tuple[tuple[Facts, list[str]], list[str]]:
        """The job opened, and the warnings, which would be lost here."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RestoreKVWarning)
            found = self.open(job)
        return found, [str(each.message) for each in caught if issubclass(each.category, RestoreKVWarning)]

    def ask(self, job: Job, name: str, cells: Sequence[Cell]) -> list[Line]:
        """One context."""
        return next(self.answers(job, [(name, cells)]))


class RayPool:
    """Up to `workers` workers of `threads` threads, on a cuda device with a GPU each; a context manager.

    `address` "local" starts a cluster on this machine; "auto", "host:port" or "ray://host:port" connect to one that
    runs, whose nodes have restorekv, the models and the adapters under the same names. Answers do not depend on
    `workers`. Raises RestoreKVError where Ray, the cluster or its GPUs are missing.
    """

    def __init__(self, workers: int = 2, address: str = LOCAL, device: str = "cpu", threads: int = 1) -> None:
        if workers < 1 or threads < 1:
            raise RestoreKVError(f"Ray needs at least 1 worker and 1 thread, not {workers} and {threads}.")
        for name, value in ENVIRONMENT.items():  # read when Ray is imported
            os.environ.setdefault(name, value)
        self.ray = optional("ray", "ray")
        self.gpus = int(device.startswith("cuda"))
        self.given = ("cuda" if self.gpus else device, threads, os.getcwd())  # Ray shows a worker its own GPU alone
        self.busy: dict[Any, tuple[Any, int | None]] = {}  # what a worker is at: the call's number, None to start
        self.idle: deque[Any] = deque()
        self.connect(address, workers, threads)
        self.hand = self.ray.remote(num_cpus=threads, num_gpus=self.gpus, max_restarts=0)(Hand)
        for _ in range(workers):
            self.hire()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.ray.shutdown()

    def connect(self, address: str, workers: int, threads: int) -> None:
        """Starts or finds the cluster; Ray's own output stays away."""
        own = {"num_cpus": workers * threads, "include_dashboard": False, "object_store_memory": STORE}
        quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
        try:
            if ":" in address:  # which Ray would wait minutes for
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), timeout=10).close()
            self.ray.init(address, **quiet, **(own if address == LOCAL else {}))
        except Exception as error:  # unreachable, malformed, another version, one running in this process: many kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            mend = "start one, set RAY_AUTH_TOKEN if it asks for a token, or use local"
            raise RestoreKVError(f"There is no Ray cluster at {address} ({reason}); {mend}.") from error
        needed = {"CPU": threads, "GPU": self.gpus}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(kind, 0) >= count for kind, count in needed.items()) for node in nodes):
            self.ray.shutdown()
            raise RestoreKVError(f"No node of the Ray cluster has the {threads} CPUs and {self.gpus} GPUs of a worker.")

    def hire(self) -> None:
        """A new worker, which is idle once its process is there."""
        worker = self.hand.remote(*self.given)
        self.busy[worker.ready.remote()] = worker, None

    def open(self, job: Job) -> tuple[Facts, list[str]]:
        """On a worker: this machine may have no room for the model."""
        found, warned = next(self.work([("told", (job,))]))
        for text in warned:
            warnings.warn(text, RestoreKVWarning, stacklevel=2)
        return found

    def answers(self, job: Job, missing: Missing) -> Iterator[list[Line]]:
        return self.work([("ask", (job, name, cells)) for name, cells in missing])

    def work(self, calls: Sequence[Call]) -> Iterator[Any]:
        """What the calls return, in their order; a worker's mistake or bug is raised here."""
        self.busy = {answer: (worker, None) for answer, (worker, _) in self.busy.items()}  # nobody waits for those
        waiting, deaths, done = deque(range(len(calls))), Counter(), {}
        for turn in range(len(calls)):
            while turn not in done:
                while self.idle and waiting:
                    worker, number = self.idle.popleft(), waiting.popleft()
                    name, given = calls[number]
                    self.busy[getattr(worker, name).remote(*given)] = worker, number
                for answer in self.ray.wait(list(self.busy))[0]:
                    worker, number = self.busy.pop(answer)
                    try:
                        done[number] = self.ray.get(answer)
                        self.idle.append(worker)
                    except self.ray.exceptions.RayTaskError as error:
                        self.idle.append(worker)
                        if number is not None:
                            raise error.cause from error
                    except self.ray.exceptions.RayError as error:
                        self.replace(worker)
                        deaths[number] += 1
                        if deaths[number] == TRIES:
                            raise RestoreKVError(died(error)) from error
                        waiting.extendleft([] if number is None else [number])
            yield done.pop(turn)

    def replace(self, worker: Any) -> None:
        """Makes sure that a worker that was lost is gone, and hires another."""
        self.ray.kill(worker)
        self.hire()


def died(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return f"{TRIES} workers died over the same context; give a worker more memory or take shorter contexts ({reason})."
