"""What an evictor is: scores for every pair of a context, computed without seeing a question."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.prompt import Context


@dataclass(frozen=True)
class Evictor(ABC):
    """A frozen dataclass whose fields are the method's hyper-parameters."""

    name: ClassVar[str]

    @abstractmethod
    def score(self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache) -> Tensor:
        """(L, H, T) float32 for the T tokens after the prefix, higher = keep; `full` (S + T) stays as it is."""
