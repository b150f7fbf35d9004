"""A separate process that reads damaged files, so that a file that kills or hangs its reader does
not end the campaign.
"""

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path

SECONDS = 60  # for a case
# More for the first one, before which a process imports everything and loads a model.
STARTING = 600


class Judge:
    """A process that runs `serve(connection, *arguments)` and gets each case; it is restarted if it
    dies.
    """

    def __init__(self, method: str, serve: Callable, *arguments: object) -> None:
        self.context, self.serve, self.arguments = (
            multiprocessing.get_context(method),
            serve,
            arguments,
        )
        self.process = None

    def __call__(self, *case: object) -> str:
        seconds = SECONDS + (STARTING if self.process is None else 0)
        if self.process is None:
            self.ours, theirs = self.context.Pipe()
            self.process = self.context.Process(
                target=self.serve, args=(theirs, *self.arguments), daemon=True
            )
            self.process.start()
            theirs.close()  # so that the death of the process closes the pipe
        try:
            self.ours.send(case)
            if not self.ours.poll(seconds):
                self.end()
                return "hang"
            return self.ours.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            return f"died: exit code {code}"

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process.join()
            self.process = None


def bound_memory(spare: int) -> None:
    """Limit this process to `spare` bytes of address space more than it uses now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, used + spare))
