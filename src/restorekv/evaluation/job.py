"""Cells that share a preparation: one prefill and one scoring pass of a context serve all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from restorekv.evaluation.cell import FULL, Cell


@dataclass(frozen=True)
class Job:
    """Cells of one model, benchmark, protocol and evictor; the full cache's rides with the first evictor."""

    cells: tuple[Cell, ...]

    @property
    def first(self) -> Cell:
        """The one that names what they have in common."""
        return next((cell for cell in self.cells if cell.evictor != FULL), self.cells[0])

    @property
    def title(self) -> str:
        return f"{self.first.benchmark}: {self.first.evictor}"


def jobs(cells: Iterable[Cell]) -> list[Job]:
    """Every cell in one job, in the order in which the preparations first appear."""
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in dict.fromkeys(cells):
        found.setdefault(cell.preparation, []).append(cell)
    for key in [key for key in found if key[-1] == FULL]:
        host = next((other for other in found if other[:-1] == key[:-1] and other != key), None)
        if host:
            found[host] += found.pop(key)  # last, so that what shares its scores bears their time
    return [Job(tuple(members)) for members in found.values()]
