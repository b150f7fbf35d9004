"""Experiments that do not compare scores: the results of an analysis, or facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper.scores import JudgedClaim
from paper.setting import Setting
from restorekv.compression.progress import OnStep
from restorekv.evaluation.report import Block


@dataclass(frozen=True)
class Study:
    """An experiment with its own way to measure and to show its result.

    `measure` writes what is needed to OUT, and continues there if it was stopped; `show` makes
    blocks and claims from it. `minutes` is roughly how long measuring takes on the tiny model.
    """

    name: str
    number: str
    label: str
    title: str
    backbone: str
    show: Callable[[Setting, Path], tuple[Sequence[Block], Sequence[JudgedClaim]]]
    measure: Callable[[Setting, Path, OnStep], None] | None = None
    note: str = ""
    minutes: float = 0.0


def load_figures(path: Path) -> dict | None:
    """Load the figures that an analysis wrote to a file, or return None if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
