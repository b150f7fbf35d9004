"""Peak memory, the processor's name and the form of a job, for both sides of a benchmark.

The only import from outside the standard library is PyTorch: kvpress's environment, where restorekv
is not installed, imports this file too.
"""

import contextlib
import ctypes
import gc
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
REFERENCES = Path("/proc/self/clear_refs")


class Peak:
    """The peak memory of a `with` block.

    `bytes` is the most that the block held above what was resident before it, in bytes; None if the
    system is not Linux.
    """

    bytes: int | None = None

    def __enter__(self) -> "Peak":
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            # Otherwise the block could reuse memory freed earlier, which would not be counted.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError):
            REFERENCES.write_text("5")  # resets the high-water mark to the present
            self.before = read_memory("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "before"):
            self.bytes = max(read_memory("VmHWM") - self.before, 0)


def read_memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def serve_job(job_file: str, measure: Callable[[dict], dict]) -> None:
    """Read the job in a file, set its threads, and write what `measure` returns to the file that
    the job names.
    """
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    with torch.no_grad():
        figures = measure(job)
    Path(job["result"]).write_text(json.dumps(figures))


def name_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
