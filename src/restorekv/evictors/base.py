"""The interface of evictors: they score every pair of a context without seeing a question."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import spec
from restorekv.errors import RestoreKVError
from restorekv.model.observer import Observer
from restorekv.model.prompt import Context

Model = PreTrainedModel
Cache = DynamicCache


@dataclass(frozen=True)
class Evictor(ABC):
    """A frozen dataclass whose fields are the method's hyperparameters."""

    name: ClassVar[str]
    # Scores of the parts of a context, each after the prefix, can be compared.
    streams: ClassVar[bool] = True
    offloads: ClassVar[bool] = True  # reads the full cache that it gets and makes none itself

    @property
    def spec(self) -> str:
        """The shortest spec of this evictor."""
        return spec.format_spec(self.name, self)

    def identity(self, model: Model) -> str:
        """Returns what determines the scores, for records: the spec, with a digest in place of a
        file's name.

        A class from outside this package has a digest of its source too.
        """
        return self.spec + spec.digest_source(type(self))

    def as_published(self, prefix: int) -> Self:
        """Returns the evictor with the settings of its authors' code where the spec leaves the
        defaults; `prefix` is the number S of the chat template's columns.
        """
        return self

    def count_pinned_tail(self, context: Context) -> int:
        """Returns how many columns at the end of `context` are always kept."""
        return 0

    def for_later_part(self, context: Context) -> Self:
        """Returns the evictor for every part of a text after the first, which pins no attention
        sinks.

        `context` is such a part after the prefix.
        """
        return self

    def make_observer(self, model: Model, context: Context) -> Observer | None:
        """Returns a new observer of the context's prefill, in chunks of any size, which `score`
        then gets; or None.
        """
        return None

    @abstractmethod
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: Any = None,
    ) -> Tensor:
        """Returns (L, H, T) float32, higher = keep, for the T tokens after the prefix; leaves
        `full` (S + T) alone.

        `observer` is what `make_observer` returned, after the prefill.
        """


def pin_columns(scores: Tensor, columns: Iterable[int]) -> Tensor:
    """Raises `columns` of the scores (L, H, T) above all others in every head, the last named
    highest.

    The order decides what is kept when a budget is smaller than what is pinned: the same columns in
    all heads.
    """
    columns = list(columns)
    scores = scores.clone()
    if columns:
        above = torch.arange(1, len(columns) + 1, dtype=scores.dtype, device=scores.device)
        highest = scores.max()
        # Above 2^24 adding 1 changes nothing.
        gap = torch.nextafter(highest, highest.new_tensor(torch.inf)) - highest
        scores[..., columns] = highest + above * (2 * gap).clamp_min(1)
    return scores


def check_not_negative(evictor: Evictor, *names: str) -> None:
    """Refuses negative settings."""
    for name in names:
        if getattr(evictor, name) < 0:
            raise RestoreKVError(f"{evictor.name} takes {name} >= 0, not {getattr(evictor, name)}.")
