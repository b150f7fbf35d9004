"""On what and with what a benchmark ran, for the record in its results."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("restorekv", "torch", "transformers", "peft", "triton")


def described(threads: int) -> dict:
    """{date, versions, processor, threads, system}, and of a GPU its name as `device`."""
    made = {
        "date": datetime.now(UTC).date().isoformat(), "versions": versions(), "processor": processor(),
        "threads": threads, "system": platform.platform(),
    }  # fmt: skip
    return {**made, "device": torch.cuda.get_device_name()} if torch.cuda.is_available() else made


def versions() -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # extras
            continue
    return found


def processor() -> str:
    """The processor's name and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
