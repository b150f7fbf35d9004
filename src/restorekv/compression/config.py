"""`CompressionConfig`: the settings of a compression that are rarely changed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache import quantized
from restorekv.cache.ragged import RaggedCache
from restorekv.compression import allocate
from restorekv.compression.allocate import GLOBAL, Allocation
from restorekv.compression.arguments import explain_fields
from restorekv.compression.budget import (
    ON_SMALL_BUDGET,
    PREFIX_POLICIES,
    Budget,
    OnSmallBudget,
    PrefixPolicy,
)
from restorekv.errors import BudgetError, RestoreKVError, check_choice
from restorekv.files import check_option
from restorekv.model.position_limits import ON_LONG_TEXT
from restorekv.model.prompt import Context, get_default_separator
from restorekv.restore.choices import RESTORE_FROM, RestoreFrom

RatioOrBudget = float | str | Fraction | Budget
# The fields that decide which pairs a method keeps. Results, cache files and adapters record them.
RECORDED = ("prefix_policy", "on_small_budget", "allocation", "restore_from", "offset")


# The types of settings that have no list of choices, and these types in words.
TYPES: dict[str, tuple[object, str]] = {
    "allocation": (Allocation | str, "an Allocation or its spec, such as 'global'"),
    "offset": (int, "a whole number of positions"),
    "streaming_chunk": (int | None, "a whole number of tokens, or None"),
    "offload": (bool, "True or False"),
    "restore_tokens": (int | None, "a whole number of tokens, or None"),
    "separator": (str | None, "a text, or None"),
}
# What to write instead of arguments that other libraries have, or that belong elsewhere.
HINTS = {
    "chunk_size": "did you mean streaming_chunk?",
    "quantization": "did you mean kv_dtype?",
    "cache_dtype": "did you mean kv_dtype?",
    "system_prompt": "did you mean system?",
    "truncate": 'write on_long_text="cut".',
    "truncation": 'write on_long_text="cut".',
    "max_context": 'write on_long_text="cut".',
    "preset": 'pass it to compress as an evictor: compress(..., evictor="fast").',
    "window_size": 'it is a setting of the evictor: compress(..., evictor="snapkv:window=64").',
    "kernel_size": 'it is a setting of the evictor: compress(..., evictor="snapkv:kernel=5").',
    **{
        name: f"pass it to compress itself: compress(..., {name}=...)."
        for name in (
            "ratio",
            "tokens_per_head",
            "compression_ratio",
            "evictor",
            "adapter",
            "progress",
            "prepared_cache",
        )
    },
}


@explain_fields(HINTS, 'CompressionConfig(kv_dtype="int8")')
@dataclass(frozen=True)
class CompressionConfig:
    """The settings that decide a cache, and how it is made, in addition to the model, the text, the
    evictor, the adapter and the ratio.

    `compress` uses all fields. `Eviction` uses those up to `offload`: it tokenizes a text with the
    defaults of the others, and makes a cache that is not quantized.

    Args:
        prefix_policy: "free" keeps the chat prefix and does not count it; "counted" lets it compete
            with the context for the budget.
        on_small_budget: What to do when the restore tokens alone exceed the budget. "whole" keeps
            the whole text without restoring and warns; the record then says ratio 1. "error"
            refuses, "fewer" uses as many as fit, "clip" exceeds the budget, as kvpress does.
        allocation: Which pairs compete with which: an Allocation, or its spec, such as "global",
            "per-layer", "per-head" or "adakv:safeguard=0.3".
        restore_from: What the restore pass reads: the "full" cache, or the "evicted" one. The
            latter is a control of the paper, for adapters that were trained for it.
        offset: Start questions this many positions later, with no restore tokens. A control of the
            paper.
        streaming_chunk: Compress during the prefill, which reads this many tokens at a time, and
            never hold the full cache. An approximation (streaming.py). None holds the full cache.
        offload: Keep all but one layer of the full cache in a temporary file or, if the model is on
            a GPU, in the host's memory.
        restore_tokens: Use the first n of the adapter's restore tokens only. None uses all.
        kv_dtype: "model" holds the kept pairs in the model's dtype; "int8" and "fp8" hold them in 8
            bits a number.
        system: The system message before the text; "" leaves it to the chat template.
        separator: The text between the document and every question. None takes what the tokenizer's
            config names, or a blank line.
        on_long_text: "refuse" a text that is too long for the model's positions, or "cut" its end.

    Raises:
        RestoreKVError: A value is unknown, or two of them exclude each other.
    """

    prefix_policy: PrefixPolicy = "free"
    on_small_budget: OnSmallBudget = "whole"
    allocation: Allocation | str = GLOBAL
    restore_from: RestoreFrom = "full"
    offset: int = 0
    streaming_chunk: int | None = None
    offload: bool = False
    restore_tokens: int | None = None
    kv_dtype: str = "model"
    system: str | None = ""
    separator: str | None = None
    on_long_text: str = "refuse"

    def __post_init__(self) -> None:
        for name, (kind, wanted) in TYPES.items():
            check_option(name, getattr(self, name), kind, wanted)
        check_choice("prefix_policy", self.prefix_policy, PREFIX_POLICIES)
        check_choice("on_small_budget", self.on_small_budget, ON_SMALL_BUDGET)
        check_choice("restore_from", self.restore_from, RESTORE_FROM)
        check_choice("on_long_text", self.on_long_text, ON_LONG_TEXT)
        quantized.check_kv_dtype(self.kv_dtype)
        if self.offset < 0:
            raise RestoreKVError(f"offset must be at least 0 positions, not {self.offset}.")
        if self.streaming_chunk is not None and self.streaming_chunk < 1:
            raise RestoreKVError(
                f"streaming_chunk must be at least 1 token, not {self.streaming_chunk}."
            )
        if self.streaming_chunk is not None and self.offload:
            raise RestoreKVError(
                "With streaming_chunk there is no full cache for offload to move; leave out one of "
                "them."
            )
        # Later code needs the Allocation, not its spec. The dataclass is frozen, hence this call.
        if isinstance(self.allocation, str):
            object.__setattr__(self, "allocation", allocate.make_allocation(self.allocation))

    def to_json(self) -> dict[str, Any]:
        """Return the settings that results and cache files record."""
        recorded = {name: getattr(self, name) for name in RECORDED}
        return recorded | {"allocation": self.allocation_spec}

    @property
    def allocation_spec(self) -> str:
        return self._parsed_allocation.spec

    def mark_kept(self, scores: Tensor, pairs: int) -> Tensor:
        """Return which pairs the allocation keeps: a mask of the shape of scores (L, H, T) with
        `pairs` set.
        """
        return self._parsed_allocation(scores, pairs)

    @property
    def _parsed_allocation(self) -> Allocation:
        assert isinstance(self.allocation, Allocation), "__post_init__ parses a spec"
        return self.allocation

    def choose_separator(self, tokenizer: Tokenizer) -> str:
        """Return what separates the text from a question: `separator`, or the template's own."""
        if self.separator is None:
            return get_default_separator(tokenizer)
        return self.separator

    def first_competing_column(self, context: Context) -> int:
        """Return the first column that competes for the budget: S under "free", which keeps the
        prefix without counting it, and 0 under "counted".
        """
        if self.prefix_policy == "free":
            return context.prefix_length
        return 0

    def competing_columns(self, context: Context) -> int:
        """Return T_b: the columns that compete for the budget."""
        return context.num_tokens - self.first_competing_column(context)

    def make_budget(
        self,
        ratio: RatioOrBudget,
        context: Context,
        layers: int,
        heads: int,
        restore_tokens: int = 0,
    ) -> Budget:
        """Return the budget of a context.

        Args:
            ratio: The share of the pairs to hold. A Budget is checked and returned unchanged.
            context: The context, whose columns compete for the budget.
            layers: L of the model.
            heads: H, the KV heads of a layer.
            restore_tokens: n, the restore tokens to reserve room for.

        Raises:
            BudgetError: The Budget is for a different context, or the restore tokens do not fit.
        """
        columns = self.competing_columns(context)
        if not isinstance(ratio, Budget):
            return Budget.of_ratio(
                ratio,
                columns,
                layers,
                heads,
                restore_tokens,
                self.on_small_budget,
                whole_tokens=self._parsed_allocation.rectangular,
            )
        # A Budget of a different context would keep a different share of this one.
        if (ratio.tokens, ratio.layers, ratio.heads) != (columns, layers, heads):
            given = f"{ratio.tokens} tokens, {ratio.layers} layers and {ratio.heads} heads"
            raise BudgetError(
                f"The budget is for {given}, not {columns}, {layers} and {heads}; make a new one."
            )
        if self._parsed_allocation.rectangular and ratio.total % (layers * heads):
            raise BudgetError(
                "Heads of one length need whole tokens per head; make the budget with "
                "whole_tokens=True."
            )
        return ratio

    def count_pairs(self, cache: RaggedCache, context: Context) -> int:
        """Count the pairs that the budget bounds: all of them under "counted", all but the prefix's
        under "free".
        """
        uncounted = self.first_competing_column(context)
        return cache.pairs_held - cache.count_prefix_pairs(uncounted)
