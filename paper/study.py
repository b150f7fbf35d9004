"""Experiments that are no comparison of scores: what an analysis shows, or facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper.scores import JudgedClaim
from paper.setting import Setting
from restorekv.evaluation.report import Block

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Study:
    """`measure` leaves what is needed in OUT and goes on where it stopped; `show` makes blocks and
    claims of that.

    `minutes` is about how long measuring takes on the tiny model.
    """

    name: str
    number: str
    label: str
    title: str
    backbone: str
    show: Callable[[Setting, Path], tuple[Sequence[Block], Sequence[JudgedClaim]]]
    measure: Callable[[Setting, Path, Tell], None] | None = None
    note: str = ""
    minutes: float = 0.0


def load_figures(path: Path) -> dict | None:
    """The figures that an analysis has left there, if it has."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
