"""Attention Matching (Zweiger et al., arXiv:2602.16284): kept keys, a bias and fitted values for
every head.

The model reads the article once more, as the answer to "repeat it", on top of the full cache. The
queries of that pass are the reference; `matching` chooses the keys they attend to most and fits a
bias to the attention mass and values to the attention outputs that they get from the whole article.
Keys keep their RoPE; later positions continue at S + T.

RestoreKV compares with "AM-fast" and does not define it. Here it is what the authors call
AM-HighestAttnKeys-fast: repetition queries of the full cache ("repeat", not on-policy), RMS
attention, two projected-gradient steps in the box [-3, 3], least squares without ridge, the whole
context at once. Where this differs from the authors' conversation:

- They close the user's turn after the article and ask in a second one. A context here leaves its
  turn open, since questions follow in it, so the instruction does too: article, "\\n\\n",
  instruction, end of turn, assistant's opener, article. All tokens after the article are reference
  queries, as theirs are.
- With more reference queries than `queries`, one random subset (`seed`) serves all heads.
- Matrix products are float32; the bias is stored in the model's dtype like theirs, but before the
  values are fitted.
- Totals are exact: B = floor(r T L H) pairs, where they round each head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from restorekv import spec
from restorekv.cache.dense import list_full_attention
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.cache.tail import KeysValues
from restorekv.compression.allocate import GLOBAL, UNIFORM, HeadShares, load_shares
from restorekv.compression.attention_matching.matching import Targets, fit_head, observe_layer
from restorekv.compression.budget import Budget
from restorekv.compression.compressor import (
    BeginPhase,
    Compressor,
    ignore_phase,
    time_phase,
)
from restorekv.compression.config import CompressionConfig
from restorekv.compression.full_cache import ScoredContext
from restorekv.errors import AdapterError, RestoreKVError
from restorekv.model import support
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.prefill import CHUNK, prefill
from restorekv.model.prompt import Context, encode_text, make_context
from restorekv.model.shape import CacheShape, is_latent_config
from restorekv.model.support import refuse_beyond_exact
from restorekv.restore.adapter import RestoreAdapter

INSTRUCTION = "Repeat the previous context verbatim."


@dataclass(frozen=True)
class AttentionMatching(Compressor):
    """The settings of the method, and the config of the cache that it makes.

    `queries` caps the reference queries of a KV head; `steps` and `box` belong to the bias; `heads`
    is "uniform" or a JSON file of head budgets. The chat prefix stays as it is, so only the prefix
    policy "free" is known.
    """

    name: ClassVar[str] = "am-fast"
    restores: ClassVar[bool] = False
    any_config: ClassVar[bool] = False

    queries: int = 50_000
    steps: int = 2
    box: float = 3.0
    instruction: str = INSTRUCTION
    heads: str = UNIFORM
    seed: int = 0
    config: CompressionConfig = CompressionConfig()

    def __post_init__(self) -> None:
        if self.queries < 1 or self.steps < 0 or not 0 <= self.box <= 20:
            raise RestoreKVError(
                "am-fast takes queries >= 1, steps >= 0 and a box from 0 to 20, "
                f"not {self.queries}, {self.steps} and {self.box}."
            )
        # Records write settings as one line with commas between them.
        if (
            "," in self.instruction + self.heads
            or not (self.instruction + self.heads).isprintable()
        ):
            raise RestoreKVError(
                "am-fast's instruction and file of head budgets are one line without commas."
            )
        if self.config.prefix_policy != "free":
            raise RestoreKVError(
                "am-fast compresses the article alone; use the prefix policy free."
            )
        if self.config.restore_from != "full":
            raise RestoreKVError("am-fast has no restore pass; leave out restore_from.")
        if self.config.restore_tokens is not None:
            raise RestoreKVError("am-fast has no restore pass; leave out restore_tokens.")
        for name in ("streaming_chunk", "offload"):
            if getattr(self.config, name):
                raise RestoreKVError(
                    f"am-fast fits a cache to a full one in memory; leave out {name}."
                )
        if self.config.allocation != GLOBAL:
            raise RestoreKVError(
                "am-fast divides the budget among heads itself; set heads=FILE, not an allocation."
            )
        # Refuse a damaged file before the model runs for minutes.
        if self.heads != UNIFORM:
            load_shares(self.heads)

    @property
    def spec(self) -> str:
        """The method's name and the settings that are not the defaults."""
        return spec.format_spec(self.name, self)

    def count_passes(self) -> int:
        return 2

    def with_config(self, config: CompressionConfig) -> AttentionMatching:
        return replace(self, config=config)

    @torch.no_grad()
    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: str | Context,
        begin_phase: BeginPhase = ignore_phase,
    ) -> MatchedContext:
        """Prefill, and read the article once more for queries, masses and outputs."""
        support.prepare_model(model)
        if is_latent_config(model.config):
            raise RestoreKVError(
                f"{self.name} fits new values to the keys that stay, and latent attention has one "
                "vector for both; use an evictor, such as kvzip."
            )
        shape = CacheShape.from_model(model)
        # HeadShares needs L and H to know the names that a file must have.
        config = replace(
            self.config, allocation=HeadShares.of(self.heads, shape.layers, shape.heads)
        )
        if isinstance(context, str):
            context = make_context(tokenizer, context)
        seconds: dict[str, float] = {}
        begin_phase("prefill")
        with time_phase(seconds, "prefill"):
            full = prefill(model, context.ids)
        begin_phase("score")
        with time_phase(seconds, "score"):
            # The article as the model's answer to the instruction, in the turn that stays open:
            # article, blank line, instruction, end of turn, assistant's opener, article.
            article = context.ids[:, context.prefix_length :]
            ids = torch.cat(
                [encode_text(tokenizer, "\n\n" + self.instruction), context.suffix_ids, article], -1
            )
            # Reference queries are numbered row by row with the G query heads of a row together.
            chosen = sample_numbers(ids.shape[-1] * shape.groups, self.queries, self.seed)
            columns = slice(context.prefix_length, context.num_tokens)
            # Targets depend on the article's keys and values alone, since only the article is
            # compressed.
            observed = [
                observe_layer(
                    query,
                    layer.keys[0, :, columns],
                    layer.values[0, :, columns],
                    scale,
                    cap=cap,
                )
                for (query, scale, cap), layer in zip(
                    collect_reference_queries(model, full, ids, chosen),
                    list_full_attention(full),
                    strict=True,
                )
            ]
        targets, scores = zip(*observed, strict=True)
        return MatchedContext(
            model,
            context,
            full,
            torch.stack(scores),
            config=config,
            seconds=seconds,
            targets=targets,
            method=self,
        )


@dataclass(frozen=True)
class MatchedContext(ScoredContext):
    """A context with its full cache: `scores` are RMS attention, `targets` what each layer has to
    reproduce.

    The targets hold n queries in the model's dtype and n outputs in float32 for every KV head.
    """

    targets: tuple[Targets, ...] = ()
    method: AttentionMatching = AttentionMatching()

    def with_config(self, config: CompressionConfig) -> MatchedContext:
        """Return the same context: its allocation is the method's own."""
        return self

    def with_restore_cache(
        self, adapter: RestoreAdapter, begin_phase: BeginPhase = ignore_phase
    ) -> MatchedContext:
        """Refuses: there is no restore cache to add."""
        raise AdapterError("am-fast restores nothing; leave out the adapter.")

    @torch.no_grad()
    def _gather_pairs(
        self, budget: Budget, restore_cache: Sequence[KeysValues], consume: bool
    ) -> RaggedCache:
        """Return the kept keys of each head with bias and fitted values; a head that loses nothing
        is unchanged.
        """
        cache = super()._gather_pairs(budget, restore_cache, consume)
        for layer, targets in zip(cache.full_attention, self.targets, strict=True):
            self.match(layer, targets)
        return cache

    def match(self, layer: RaggedLayer, targets: Targets) -> None:
        """Write bias and values; a loop over heads, because least squares of different sizes do
        not batch.
        """
        keys = layer.context_keys
        values = layer.context_values
        assert isinstance(keys, Tensor) and isinstance(values, Tensor), "quantized afterwards"
        bias = keys.new_zeros(len(keys))
        for head in range(layer.heads):
            # The prefix of a head is kept as it is; only the rows of the article are fitted.
            rows = slice(layer.bounds[head] + self.context.prefix_length, layer.bounds[head + 1])
            # Nothing to fit where a head kept no pair of the article or all of them.
            if 0 < rows.stop - rows.start < self.context.text_tokens:
                fitted = fit_head(targets, head, keys[rows], self.method.steps, self.method.box)
                bias[rows], values[rows] = fitted
        if not values.isfinite().all():
            raise RestoreKVError(
                "The fitted values are too large for float16; load the model in bfloat16 or "
                "float32."
            )
        layer.bias = bias if bias.any() else None


def collect_reference_queries(
    model: PreTrainedModel, full: Cache, ids: Tensor, chosen: Tensor
) -> list[tuple[Tensor, float, float | None]]:
    """Read ids (1, Q) over `full`, which stays as it is; return each layer's queries (H, n, D)
    after RoPE, its scale and its cap.

    Queries are counted row by row, the G heads of a group within a row; `chosen` (n,) of these Q *
    G are kept.
    """
    # A copy of the cache and of its layers: the pass appends to the copies, and each append makes
    # new tensors.
    refuse_beyond_exact(
        model,
        full.get_seq_length() + ids.shape[-1],
        "Attention matching, which reads the text a second time,",
    )
    reading = copy.copy(full)
    reading.layers = [copy.copy(layer) for layer in full.layers]
    layers = len(list_full_attention(full))
    queries: list[list[Tensor]] = [[] for _ in range(layers)]
    scales = [0.0] * layers
    caps: list[float | None] = [None] * layers
    chosen = chosen.to(model.device)
    columns = full.get_seq_length()

    def on_layer(view: LayerView) -> None:
        # (H, Q, G, D) flattened: query g of row j has the number j * G + g.
        pool = view.query.transpose(1, 2).flatten(1, 2)
        # Numbers count from the first row of the first chunk; this chunk begins where the keys
        # before it end.
        here = chosen - (view.key.shape[1] - view.query.shape[2] - columns) * view.query.shape[1]
        queries[view.layer].append(pool[:, here[(here >= 0) & (here < pool.shape[1])]])
        scales[view.layer] = view.scale
        caps[view.layer] = view.cap

    with observe_layers(model, on_layer):
        prefill(model, ids, CHUNK, into=reading)
    joined = [torch.cat(pieces, 1) for pieces in queries]
    return list(zip(joined, scales, caps, strict=True))


def sample_numbers(count: int, most: int, seed: int) -> Tensor:
    """Return up to `most` of the numbers below `count`, ascending, the same on every device."""
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values
