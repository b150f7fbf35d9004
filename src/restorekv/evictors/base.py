"""The interface of evictors: they score every pair of a context without seeing a question."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv import spec
from restorekv.errors import RestoreKVError
from restorekv.model.observer import Observer
from restorekv.model.prompt import Context

Model = PreTrainedModel


@dataclass(frozen=True)
class Evictor(ABC):
    """A frozen dataclass whose fields are the method's hyperparameters."""

    name: ClassVar[str]
    # Whether scores of the parts of a context, each scored after the prefix alone, can be compared.
    streams: ClassVar[bool] = True
    # Whether it only reads the full cache that it gets, which may then lie in host memory.
    offloads: ClassVar[bool] = True
    # How many times scoring reads the context again, after the prefill.
    rereads: ClassVar[int] = 0

    @property
    def spec(self) -> str:
        """The shortest spec of this evictor."""
        return spec.format_spec(self.name, self)

    def identity(self, model: Model) -> str:
        """Return what determines the scores, for records: the spec, with a digest in place of a
        file's name.

        A class from outside this package has a digest of its source too.
        """
        # The source of an evictor from elsewhere is part of its identity: a cache of another
        # version is another cache.
        return self.spec + spec.digest_source(type(self))

    def as_published(self, prefix: int) -> Self:
        """Return the evictor with the settings of its authors' code where the spec leaves the
        defaults; `prefix` is the number S of the chat template's columns.
        """
        return self

    def count_pinned_tail(self, context: Context) -> int:
        """Return how many columns at the end of `context` are always kept."""
        return 0

    def for_later_part(self, context: Context) -> Self:
        """Return the evictor for every part of a text after the first, which pins no attention
        sinks.

        `context` is such a part after the prefix.
        """
        return self

    def make_observer(self, model: Model, context: Context) -> Observer | None:
        """Return a new observer of the context's prefill, in chunks of any size, which `score`
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
        """Return (L, H, T) float32, higher = keep, for the T tokens after the prefix. L counts the
        layers that see the whole text. Infinity pins a pair (see `pin_columns`, which also orders
        what it pins); NaN is refused.

        Args:
            model: The model that prefilled the context.
            tokenizer: The model's tokenizer.
            context: The prefix and the context's tokens.
            full: The full cache of S + T columns, which must not change. Its layers of L are those
                of `list_full_attention(full)`; layers with a window are not scored.
            observer: What `make_observer` returned, after it saw the prefill.
        """


def pin_columns(scores: Tensor, columns: Iterable[int]) -> Tensor:
    """Raise `columns` of the scores (L, H, T) above all others in every head, the last named
    highest.

    The order decides what is kept when a budget is smaller than what is pinned: the same columns in
    all heads.
    """
    columns = list(columns)
    # The caller's scores stay as they are, since one observer can serve several budgets.
    scores = scores.clone()
    if columns:
        above = torch.arange(1, len(columns) + 1, dtype=scores.dtype, device=scores.device)
        highest = scores.max()
        # Steps of 1, or of two gaps between neighboring floats: adding 1 to 2^24 changes nothing.
        gap = torch.nextafter(highest, highest.new_tensor(torch.inf)) - highest
        scores[..., columns] = highest + above * (2 * gap).clamp_min(1)
    return scores


def check_not_negative(evictor: Evictor, *names: str) -> None:
    """Refuse negative settings."""
    for name in names:
        value = getattr(evictor, name)
        if value < 0:
            raise RestoreKVError(f"{evictor.name} takes {name} >= 0, not {value}.")
