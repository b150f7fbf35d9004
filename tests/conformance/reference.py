"""kvpress's own benchmark code, which its wheel lacks: `make conformance` unpacks the source
archive beside it.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

UNPACKED = Path(sys.prefix) / "src" / "kvpress-0.5.5" / "evaluation"


def evaluation() -> Path:
    """The folder `evaluation` of kvpress 0.5.5's source."""
    return Path(os.environ.get("KVPRESS_EVALUATION", UNPACKED))


def scorer(benchmark: str) -> ModuleType:
    """What scores a benchmark's answers."""
    return script(benchmark, "calculate_metrics")


def script(benchmark: str, name: str) -> ModuleType:
    """`benchmarks/<benchmark>/<name>.py`; skips the test where the folder is missing."""
    file = evaluation() / "benchmarks" / benchmark / f"{name}.py"
    if not file.is_file():
        reason = (
            f"{file} is missing; `make conformance` unpacks kvpress's evaluation, "
            f"KVPRESS_EVALUATION names another"
        )
        pytest.skip(reason, allow_module_level=True)
    made = importlib.util.spec_from_file_location(f"kvpress_{benchmark}_{name}", file)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module
