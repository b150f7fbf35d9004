"""SnapKV (arXiv:2404.14469), query-agnostic as in the paper's appendix: keeps what the end of the
context attends to.

With the last w positions of the context as observation window,

    score_i = mean over the window's queries j of softmax_i(scale q_j k_i),
              max-pooled over 7 neighboring columns,

and the window itself is always kept. Where later layers attend to the same pairs (Gemma 3n, Gemma
4), their query heads count like those of the layer itself. The scale is the model's own: 1 /
sqrt(D) in most, another number in Granite, where kvpress still divides by sqrt(D). Where the
appendix says nothing there are settings: `groups` reduces the query heads of a KV head before
pooling ("mean", as in the code that RestoreKV's authors published, or "max"); the first `sinks`
columns of the context are kept too (0; 4 in that code). The softmax is causal over every key,
prefix and window included, and the model's learned sinks, if it has any; the pool is over the
context's columns. kvpress's version is "snapkv:window=64,kernel=5,pool=avg".
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import REDUCTIONS, iterate_attention_blocks, reduce_groups
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer, pin_columns
from restorekv.model.cache_argument import pass_cache
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.prefill import read_only_view
from restorekv.model.shape import CacheShape, count_readers, get_backbone


@dataclass(frozen=True)
class SnapKV(Evictor):
    """The SnapKV evictor. It reads the last `window` tokens a second time, over the cache of the
    tokens before them.

    Args:
        window: How many of the last tokens ask, and always stay.
        kernel: Columns that are pooled together; odd.
        pool: "max" or "avg".
        groups: How the scores of the query heads of a KV head are reduced: "mean" or "max".
        sinks: How many of the first columns always stay.
    """

    name: ClassVar[str] = "snapkv"

    window: int = 32
    kernel: int = 7
    pool: str = "max"
    groups: str = "mean"
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel % 2 == 0 or not 1 <= self.kernel <= 1023:
            raise RestoreKVError(
                f"snapkv takes window >= 1 and an odd kernel from 1 to 1023, "
                f"not {self.window} and {self.kernel}."
            )
        if self.sinks < 0:
            raise RestoreKVError(f"snapkv takes sinks >= 0, not {self.sinks}.")
        if self.pool not in ("max", "avg") or self.groups not in REDUCTIONS:
            raise RestoreKVError(
                f"snapkv takes pool=max|avg and groups=max|mean, not {self.pool} and {self.groups}."
            )

    def count_pinned_tail(self, context: Context) -> int:
        return min(self.window, context.text_tokens)

    def for_later_part(self, context: Context) -> Self:
        return replace(self, sinks=0)

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T) with the window highest. If the budget is smaller than the window, the
        window's latest columns stay.
        """
        shape = CacheShape.from_model(model)
        # A text shorter than the window is all window, and every column is pinned.
        window = min(self.window, context.text_tokens)
        before_window = context.text_tokens - window  # columns
        start = context.num_tokens - window
        scores = torch.zeros(
            shape.layers, shape.heads, context.text_tokens, dtype=torch.float32, device=model.device
        )

        before = scores[..., :before_window]  # a view
        readers = count_readers(model.config)

        def on_layer(view: LayerView) -> None:
            weights = self._attend_window(view, context.prefix_length, start)
            # Layers that share pairs come one after the other with the same number.
            if self.groups == "max":
                before[view.layer] = torch.maximum(before[view.layer], weights)
            else:
                before[view.layer] += weights / readers[view.layer]

        if before_window:
            with observe_layers(model, on_layer, sharing=True):
                # The window's rows attend to everything before them; no other row is computed
                # again.
                backbone = get_backbone(model)
                backbone(
                    input_ids=context.ids[:, start:].to(model.device),
                    **pass_cache(backbone, read_only_view(full, start)),
                    use_cache=True,
                )
            before.copy_(self._pool(before))
        sinks = range(min(self.sinks, before_window))
        # Pinned columns are raised in order, so that the latest column of the window ranks highest.
        return pin_columns(scores, [*sinks, *range(before_window, context.text_tokens)])

    def _attend_window(self, view: LayerView, start: int, end: int) -> Tensor:
        """Return (H, end - start): the queries' attention to the columns [start, end), averaged and
        reduced over G.
        """
        heads, groups, rows, _ = view.query.shape
        total = torch.zeros(
            heads, groups, end - start, dtype=torch.float32, device=view.query.device
        )
        # Sums over blocks of the window's rows; dividing by the rows gives their mean.
        blocks = iterate_attention_blocks(
            view.query, view.key, view.scale, sinks=view.sinks, cap=view.cap
        )
        for _, _, weights in blocks:
            total += weights[..., start:end].sum(2)
        return reduce_groups(total / rows, self.groups)

    def _pool(self, weights: Tensor) -> Tensor:
        """Return every layer's weights (L, H, columns), pooled over neighboring columns."""
        # Half a kernel of padding on each side keeps the number of columns.
        if self.pool == "max":
            return F.max_pool1d(weights, self.kernel, stride=1, padding=self.kernel // 2)
        return F.avg_pool1d(weights, self.kernel, stride=1, padding=self.kernel // 2)
