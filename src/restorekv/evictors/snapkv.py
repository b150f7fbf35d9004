"""SnapKV (arXiv:2404.14469), query-agnostic as in the paper's appendix: what the end of the context looks at.

With the last w positions of the context as observation window,

    score_i = mean over the window's queries j of softmax_i(q_j k_i / sqrt(D)), max-pooled over 7 neighbouring columns,

and the window itself always stays. The appendix is silent on the rest, so it is a setting: `groups` reduces the query
heads of a KV head before pooling ("mean", as in the code RestoreKV's authors published, or "max"); `sinks` first
columns of the context stay too (0; 4 in that code). The softmax runs over every key a query sees, prefix and window
included, causally; the pool runs over the context's columns. kvpress's own version is
"snapkv:window=64,kernel=5,pool=avg".
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import REDUCTIONS, attention_blocks, over_groups
from restorekv.evictors.base import Evictor, pin
from restorekv.model.observer import LayerProbe, probing
from restorekv.model.prefill import passing
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape, decoder


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Reads the window once more over the cache of what stands before it: 32 tokens of work."""

    name: ClassVar[str] = "snapkv"

    window: int = 32
    kernel: int = 7
    pool: str = "max"
    groups: str = "mean"
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel % 2 == 0 or self.kernel > 1023:
            raise RestoreKVError(
                f"snapkv takes window >= 1 and an odd kernel up to 1023, not {self.window} and {self.kernel}."
            )
        if self.pool not in ("max", "avg") or self.groups not in REDUCTIONS:
            raise RestoreKVError(f"snapkv takes pool=max|avg and groups=max|mean, not {self.pool} and {self.groups}.")

    def latest(self, context: Context) -> int:
        return min(self.window, context.tokens)

    def later(self, context: Context) -> Self:
        return replace(self, sinks=0)

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: None = None
    ) -> Tensor:
        """The window's own columns come last and highest; of a budget smaller than the window the latest stay."""
        shape, window = CacheShape.of(model), min(self.window, context.tokens)
        scores = torch.zeros(shape.layers, shape.heads, context.tokens, device=model.device)
        start = context.positions - window

        def see(probe: LayerProbe) -> None:
            scores[probe.layer, :, : context.tokens - window] = self.observed(probe, context.prefix, start)

        if start > context.prefix:
            ids = context.ids[:, start:].to(model.device)
            with probing(model, see):
                decoder(model)(input_ids=ids, past_key_values=passing(full, start), use_cache=True)
        sinks = range(min(self.sinks, context.tokens - window))
        return pin(scores, [*sinks, *range(context.tokens - window, context.tokens)])

    def observed(self, probe: LayerProbe, first: int, last: int) -> Tensor:
        """(H, last - first): attention of the probe's queries to these columns, averaged, reduced over G, pooled."""
        total = sum(weights[..., first:last].sum(2) for _, _, weights in attention_blocks(probe.query, probe.key))
        looked = over_groups(total / probe.query.shape[2], self.groups)
        pool = F.max_pool1d if self.pool == "max" else F.avg_pool1d
        return pool(looked, self.kernel, stride=1, padding=self.kernel // 2)
