"""Who trains: one process, or several that share every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedModel


class Team(Protocol):
    """Processes that run the same steps on different contexts and average their gradients."""

    rank: int
    size: int

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every gradient becomes its mean over the processes; one that is missing counts as zero."""

    def mean(self, loss: float) -> float:
        """The mean over the processes."""

    def wait(self) -> None:
        """Until all are here."""

    def level(self, model: PreTrainedModel) -> Iterator[None]:
        """A block in which processes may run the backbone unequally often; afterwards all have run it equally often."""


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Its gradients are the mean."""

    def mean(self, loss: float) -> float:
        return loss

    def wait(self) -> None:
        """Nobody else is awaited."""

    @contextmanager
    def level(self, model: PreTrainedModel) -> Iterator[None]:
        yield


ALONE = Alone()
