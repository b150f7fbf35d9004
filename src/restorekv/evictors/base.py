"""What an evictor is: scores for every pair of a context, computed without seeing a question."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import spec
from restorekv.model.observer import LayerProbe
from restorekv.model.prompt import Context

Watch = Callable[[LayerProbe], None]
Watched = TypeVar("Watched")


@dataclass(frozen=True)
class Evictor(ABC):
    """A frozen dataclass whose fields are the method's hyper-parameters."""

    name: ClassVar[str]
    streams: ClassVar[bool] = True  # scores of parts of a context, each after the prefix, can be compared
    offloads: ClassVar[bool] = True  # reads the full cache that it is given, and makes none of its own

    @property
    def spec(self) -> str:
        """The shortest spec that makes this evictor."""
        return spec.write(self.name, self)

    def identity(self, model: PreTrainedModel) -> str:
        """What decides the scores of `model`, for records: the spec, with files told by what is in them."""
        return self.spec

    def as_published(self, prefix: int) -> Self:
        """Returns the evictor with the settings of its authors' code where the spec leaves the defaults; `prefix` is
        the number S of the chat template's columns."""
        return self

    def latest(self, context: Context) -> int:
        """How many columns at the end of `context` always stay, whatever they are."""
        return 0

    def later(self, context: Context) -> Self:
        """The evictor for a part of a text that does not begin it, which stands behind the prefix of `context`: what is
        pinned because the text begins with it is pinned in the first part alone."""
        return self

    def watch(self, model: PreTrainedModel, context: Context) -> Watch | None:
        """A fresh object that is called with every layer's probe while the context is prefilled, in chunks of any
        size, and then handed to `score`; None for methods that need no look at the prefill."""
        return None

    def seen(self, watched: Watched | None) -> Watched:
        """What `watch` returned, for methods that cannot score without it."""
        if watched is None:
            raise ValueError(f"{self.name} watches the prefill; pass what watch() returned")
        return watched

    @abstractmethod
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: Any = None
    ) -> Tensor:
        """(L, H, T) float32 for the T tokens after the prefix, higher = keep; `full` (S + T) stays as it is."""


def pin(scores: Tensor, columns: Iterable[int]) -> Tensor:
    """Scores (L, H, T) with `columns` above all others, in every head, the last named highest.

    The order decides what stays when a budget is smaller than what is pinned: the same columns in all heads.
    """
    columns = list(columns)
    scores = scores.clone()
    if columns:
        above = torch.arange(1, len(columns) + 1, dtype=scores.dtype, device=scores.device)
        highest = scores.max()
        gap = torch.nextafter(highest, highest.new_tensor(torch.inf)) - highest  # above 2^24 adding 1 changes nothing
        scores[..., columns] = highest + above * (2 * gap).clamp_min(1)
    return scores
