"""Spreads a grid over a Ray cluster: this process writes the files, workers open models and answer.

A worker is an actor: one process that keeps the job it has opened. Idle workers get contexts one by one; answers come
back in order, so the files equal those of a run in one process. A context whose worker dies (killed, out of memory,
node lost) goes to another worker, and a new worker starts where there is room.
"""

import os
import socket
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from restorekv.data.files import optional
from restorekv.errors import RestoreKVError, RestoreKVWarning, first_sentence, warn
from restorekv.evaluation.grid import Cell, Job
from restorekv.evaluation.run import Facts, LocalPool, Missing
from restorekv.evaluation.worker import Line

LOCAL = "local"
TRIES = 3  # workers that may die over one context
STORE = 128 * 2**20  # bytes of shared memory for results, which are short texts
ENVIRONMENT = {  # no usage reports, workers at this process's priority, no log output
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}  # fmt: skip
Call = tuple[str, tuple]  # a method of `RayWorker` and its arguments


class RayWorker(LocalPool):
    """The actor that runs in a worker's process."""

    def __init__(self, device: str, threads: int, folder: str) -> None:
        super().__init__(device)
        if os.path.isdir(folder):  # relative paths then mean the same as in the driver
            os.chdir(folder)
        torch.set_num_threads(threads)

    def ready(self) -> int:
        """Returns the process id, as soon as the process has started."""
        return os.getpid()

    def open_with_warnings(self, job: Job) -> tuple[tuple[Facts, list[str]], list[str]]:
        """Opens the job and returns also the warnings, which would be lost in this process."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RestoreKVWarning)
            opened = self.open(job)
        return opened, [str(each.message) for each in caught if issubclass(each.category, RestoreKVWarning)]

    def ask(self, job: Job, sample: str, cells: Sequence[Cell]) -> list[Line]:
        return next(self.answers(job, [(sample, cells)]))


class RayPool:
    """Runs jobs on up to `workers` workers of `threads` threads each, with a GPU each on cuda; a context manager.

    `address` "local" starts a cluster on this machine; "auto", "host:port" or "ray://host:port" connect to a running
    one, whose nodes have restorekv, the models and the adapters under the same names. Answers do not depend on
    `workers`. Raises RestoreKVError where Ray, the cluster or its GPUs are missing.
    """

    def __init__(self, workers: int = 2, address: str = LOCAL, device: str = "cpu", threads: int = 1) -> None:
        if workers < 1 or threads < 1:
            raise RestoreKVError(f"Ray needs at least 1 worker and 1 thread, not {workers} and {threads}.")
        for name, value in ENVIRONMENT.items():  # Ray reads them when it is imported
            os.environ.setdefault(name, value)
        self.ray = optional("ray", "ray")
        self.gpus = int(device.startswith("cuda"))
        self.arguments = ("cuda" if self.gpus else device, threads, os.getcwd())  # a worker sees its own GPU alone
        self.busy: dict[Any, tuple[Any, int | None]] = {}  # pending answer -> worker, number of its call (None: start)
        self.idle: deque[Any] = deque()
        self.connect(address, workers, threads)
        self.actor = self.ray.remote(num_cpus=threads, num_gpus=self.gpus, max_restarts=0)(RayWorker)
        for _ in range(workers):
            self.hire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ray.shutdown()

    def connect(self, address: str, workers: int, threads: int) -> None:
        """Starts the cluster or connects to it, without Ray's own output."""
        own = {"num_cpus": workers * threads, "include_dashboard": False, "object_store_memory": STORE}
        quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
        try:
            if ":" in address:  # Ray would wait minutes for an address that nobody listens on
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), timeout=10).close()
            self.ray.init(address, **quiet, **(own if address == LOCAL else {}))
        except Exception as error:  # unreachable, malformed, another version, already running: many types
            fix = "start one, set RAY_AUTH_TOKEN if it asks for a token, or use local"
            raise RestoreKVError(f"There is no Ray cluster at {address} ({first_sentence(error)}); {fix}.") from error
        needed = {"CPU": threads, "GPU": self.gpus}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(kind, 0) >= count for kind, count in needed.items()) for node in nodes):
            self.ray.shutdown()
            raise RestoreKVError(f"No node of the Ray cluster has the {threads} CPUs and {self.gpus} GPUs of a worker.")

    def hire(self) -> None:
        """Starts a new worker; it becomes idle once its process has started."""
        worker = self.actor.remote(*self.arguments)
        self.busy[worker.ready.remote()] = worker, None

    def open(self, job: Job) -> tuple[Facts, list[str]]:
        """Opens the job on a worker: this machine may have no room for the model."""
        opened, messages = next(self.work([("open_with_warnings", (job,))]))
        for text in messages:
            warn(text)
        return opened

    def answers(self, job: Job, missing: Missing) -> Iterator[list[Line]]:
        return self.work([("ask", (job, sample, cells)) for sample, cells in missing])

    def work(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Yields what the calls return, in their order; raises a worker's error or bug here."""
        self.busy = {answer: (worker, None) for answer, (worker, _) in self.busy.items()}  # drops earlier answers
        waiting, deaths, done = deque(range(len(calls))), Counter(), {}
        for turn in range(len(calls)):
            while turn not in done:
                while self.idle and waiting:
                    worker, number = self.idle.popleft(), waiting.popleft()
                    name, arguments = calls[number]
                    self.busy[getattr(worker, name).remote(*arguments)] = worker, number
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
                        self.ray.kill(worker)  # it may still run although its node is lost
                        self.hire()
                        deaths[number] += 1
                        if deaths[number] == TRIES:
                            fix = "give a worker more memory or take shorter contexts"
                            reason = f"{TRIES} workers died over the same context; {fix} ({first_sentence(error)})."
                            raise RestoreKVError(reason) from error
                        waiting.extendleft([] if number is None else [number])
            yield done.pop(turn)
