"""Memory of a process and the machine, measured alike on both sides of a benchmark.

Imports PyTorch alone: the other side's environment, in which restorekv need not be installed,
imports this file too.
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
    """`bytes`: the most memory that the block held above what was resident before it; None where
    not on Linux.
    """

    bytes: int | None = None

    def __enter__(self) -> "Peak":
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            # Else memory freed earlier would be used again, uncounted.
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
    """Read the job, sets its threads and write what `measure` returns to the file that the job
    names.
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
