"""Seconds and memory, measured alike on both sides of the benchmark.

Needs PyTorch alone: the other side's environment, in which restorekv need not be installed, imports this file too.
"""

import contextlib
import ctypes
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """`bytes`: the most memory held inside the block above what was resident before it; None where not on Linux."""

    bytes: int | None = None

    def __enter__(self) -> "Peak":
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory freed earlier would be used again, uncounted
        with contextlib.suppress(OSError):
            REFERENCES.write_text("5")  # the high-water mark starts from the present
            self.before = resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "before"):
            self.bytes = max(resident("VmHWM") - self.before, 0)


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Clock:
    """Call it after every generated token; the first call follows the question, every later one a single token."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, *_: object) -> None:
        self.times.append(time.perf_counter())

    def figures(self) -> dict[str, float]:
        """`question`: seconds to the first token; `token`: the median of the later ones but the first, a warm-up."""
        gaps = [late - early for early, late in zip(self.times, self.times[1:], strict=False)]
        return {"question": gaps[0], "token": median(gaps[2:]), "least": min(gaps[2:]), "most": max(gaps[2:])}


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Wall time of the block."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def serve(job_file: str, measure: Callable[[dict], dict]) -> None:
    """Reads the job, sets the threads, writes what `measure` finds to the file that the job names."""
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    with torch.no_grad():
        found = measure(job)
    Path(job["result"]).write_text(json.dumps(found))
