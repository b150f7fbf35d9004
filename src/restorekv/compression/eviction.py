"""Eviction by scores, the compressor that `compress` makes unless told otherwise, and the adapter
that goes with it.

prepare    prefill, score every pair, append the restore cache while the full cache is still there
evict      B = floor(r * T_b * L * H) -> the evictor keeps the B - n*L*H best pairs, the rest is dropped
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import evictors, spec
from restorekv.compression.allocate import GLOBAL
from restorekv.compression.attention_matching.method import AttentionMatching
from restorekv.compression.budget import Budget, OnSmallBudget, PrefixPolicy, exact_ratio
from restorekv.compression.prepared import (
    CompressionConfig,
    Compressor,
    PreparedContext,
    Progress,
    RestoreFrom,
    ScoredContext,
    timed,
)
from restorekv.compression.streaming import StreamedContext, parts, read_part
from restorekv.errors import AdapterError, RestoreKVError, warn
from restorekv.model import support
from restorekv.model.identity import fingerprint_model
from restorekv.model.names import (
    SHIPPING,
    get_install_command,
    get_model_name,
    is_shipping_installed,
    shipped_path,
    to_canonical_name,
)
from restorekv.model.offload import make_offloaded_cache
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, make_context, warn_if_beyond_positions
from restorekv.model.shape import CacheShape
from restorekv.restore import publish
from restorekv.restore.adapter import RestoreAdapter

# How many adapters a model keeps loaded, and its attribute for them.
LOADED = 4
ADAPTERS = "_restorekv_adapters"
# Besides eviction by each of the evictors.
METHODS: dict[str, type[Compressor]] = {"am-fast": AttentionMatching}


@dataclass(frozen=True)
class Eviction(Compressor):
    """An evictor, and an adapter that restores what it loses; `streaming` reads so many tokens at a
    time.

    Without `scoring` every pair has the score 0, which is enough where all of them stay.
    """

    evictor: evictors.Evictor
    adapter: RestoreAdapter | None = None
    conventions: CompressionConfig = CompressionConfig()
    streaming: int | None = None
    scoring: bool = True
    restores: ClassVar[bool] = True
    any_config: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.adapter and self.conventions.offset:
            raise RestoreKVError(
                "An offset is a control without restore states; leave out the adapter or the offset."
            )
        if self.streaming is not None and not self.evictor.streams:
            why = f"{self.evictor.name} scores a context as a whole"
            raise RestoreKVError(f"{why}; leave out streaming or use another evictor.")

    @classmethod
    def make(
        cls,
        evictor: str,
        adapter: RestoreAdapter | None = None,
        *,
        prefix_policy: PrefixPolicy = "free",
        on_small_budget: OnSmallBudget = "error",
        allocation: str = "global",
        restore_from: RestoreFrom = "full",
        offset: int = 0,
    ) -> Eviction:
        """Makes an eviction from an evictor's spec and the settings of `CompressionConfig`."""
        if evictor.partition(":")[0] in METHODS:
            raise RestoreKVError(
                f"{evictor} is no evictor: it restores nothing, so there is nothing to train for it."
            )
        conventions = CompressionConfig(
            prefix_policy, on_small_budget, allocation, restore_from, offset
        )
        return cls(evictors.make_evictor(evictor), adapter, conventions)

    @property
    def spec(self) -> str:
        """The evictor's."""
        return self.evictor.spec

    def identity(self, model: PreTrainedModel) -> str:
        """Returns the evictor's identity."""
        return self.evictor.identity(model)

    def as_published(self, prefix: int) -> Eviction:
        """Returns the same eviction with the evictor's authors' settings."""
        return replace(self, evictor=self.evictor.as_published(prefix))

    def suited_to(self, context: Context, budget: Budget) -> Eviction:
        """Returns an eviction that does not stream a single part, and scores nothing where
        everything stays.
        """
        streams = (
            self.streaming is not None and len(parts(self.evictor, context, self.streaming)) > 1
        )
        scoring = budget.ratio < 1 or budget.restore_tokens > 0
        return replace(self, streaming=self.streaming if streams else None, scoring=scoring)

    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: str | Context,
        progress: Progress | None = None,
        offload: bool = False,
    ) -> PreparedContext:
        """Does prefill, scores and, with an adapter, the restore pass; a context that streams is
        left to `evict`.
        """
        tell = progress or (lambda phase: None)
        if isinstance(context, str):
            context = make_context(tokenizer, context)
        warn_if_beyond_positions(model, context.positions, "The context")
        if self.streaming is not None:
            if offload:
                raise RestoreKVError(
                    "streaming never holds the full cache that offload moves; leave out one of them."
                )
            how = self.evictor, self.conventions, self.streaming, self.adapter
            return StreamedContext(model, tokenizer, context, *how, tell)
        if offload and not self.evictor.offloads:
            raise RestoreKVError(
                f"{self.evictor.name} makes a full cache of its own in memory; leave out offload."
            )
        support.prepare_model(model)
        seconds: dict[str, float] = {}
        into = make_offloaded_cache(model, context.positions) if offload else None
        with torch.no_grad():
            if self.scoring:
                full, scores = read_part(
                    model, tokenizer, self.evictor, context, into, seconds, tell
                )
            else:
                tell("prefill")
                with timed(seconds, "prefill"):
                    full = prefill(model, context.ids, into=into)
                shape = CacheShape.from_model(model)
                scores = torch.zeros(shape.layers, shape.heads, context.tokens, device=model.device)
        prepared = ScoredContext(model, context, full, scores, self.conventions, seconds=seconds)
        if self.adapter is None:
            return prepared
        tell("restore")
        return prepared.with_restore_cache(self.adapter)


def make_compressor(
    text: str, conventions: CompressionConfig = CompressionConfig(), streaming: int | None = None
) -> Compressor:
    """Returns what a spec names: eviction by an evictor, or a method that makes a compact cache of
    its own.
    """
    named = spec.parse_spec(text, {**evictors.EVICTORS, **METHODS}, "evictor")
    if text.partition(":")[0] not in METHODS:
        return Eviction(named, None, conventions, streaming)
    if streaming is not None:
        raise RestoreKVError(
            f"{named.name} fits a cache to a full one in memory; leave out streaming."
        )
    return replace(named, conventions=conventions)


def load_adapter(
    model: PreTrainedModel,
    adapter: RestoreAdapter | str | Path | None,
    compressor: Compressor,
    restore_tokens: int | None = None,
    between: str | None = None,
    ratio: Fraction | None = None,
) -> RestoreAdapter | None:
    """Returns the adapter that `compress` is given or finds (see there), or its first
    `restore_tokens` as one.

    Where a `ratio` is given and nothing else asks for restoring, "auto" is None above the ratios of
    the training.

    "tiny:NAME" or "smollm2:NAME" is the one that ships for the evictor NAME, for use with another
    evictor. Warns where the adapter was trained for another use, which `between` is a part of.
    """
    conventions = compressor.conventions
    if not compressor.restores:
        if adapter not in (None, "auto"):
            raise AdapterError(f"{compressor.spec} restores nothing; leave out the adapter.")
        return None
    auto = adapter == "auto"
    asked = restore_tokens is not None or conventions.restore_from != "full"
    if isinstance(adapter, str):
        adapter = locate_adapter(model, adapter, compressor)
    if adapter is None:
        if conventions.restore_from != "full":
            raise RestoreKVError(
                "restore_from is about a restore pass, and there is no adapter; give one."
            )
        if restore_tokens is not None:
            raise RestoreKVError(
                "restore_tokens is about an adapter, and there is none; give one or leave it out."
            )
        return None
    if not isinstance(adapter, RestoreAdapter):
        try:
            adapter = loaded(model, adapter)
        except AdapterError as error:
            if not auto or conventions.restore_from != "full":
                raise
            warn(f"{error} Nothing is restored.")
            return None
    if (
        auto
        and not asked
        and ratio is not None
        and ratio > exact_ratio((adapter.card.ratio_range or (0, 1))[1])
    ):
        return None  # docs/concepts.md has the figures
    if adapter.model is not model:
        raise AdapterError("The adapter was made for another model object; load it for this one.")
    trained_for = (
        conventions.allocation.spec,
        conventions.restore_from,
        conventions.prefix_policy,
        between,
    )
    adapter.warn_of_other_use(compressor.identity(model), *trained_for)
    return adapter if restore_tokens is None else adapter.first(restore_tokens)


def loaded(model: PreTrainedModel, place: str | Path) -> RestoreAdapter:
    """Returns an adapter from a folder or the hub; contexts share that of a folder whose files stay
    as they are.
    """
    folder = Path(place)
    if not folder.is_dir():
        return RestoreAdapter.from_pretrained(model, place)
    statuses = (
        (path.name, path.stat() if path.exists() else path.lstat()) for path in folder.iterdir()
    )
    files = sorted((name, status.st_mtime_ns, status.st_size) for name, status in statuses)
    key = str(folder.resolve()), str(files), model.device, model.dtype, fingerprint_model(model)
    # No weak dictionary: an adapter has a reference to its model.
    known = vars(model).setdefault(ADAPTERS, {})
    if (adapter := known.get(key)) is None:
        adapter = known[key] = RestoreAdapter.from_pretrained(model, place)
        for old in list(known)[:-LOADED]:
            known.pop(old, None)  # another thread may have been first
    return adapter


def locate_adapter(model: PreTrainedModel, name: str, compressor: Compressor) -> str | Path | None:
    """Returns the folder or hub id that a name stands for, None where "auto" finds no adapter."""
    if name == "published":
        return publish.find_published_name(get_model_name(model), compressor.spec)
    if name != "auto":
        return shipped_adapter(*name.split(":", 1)) or name if ":" in name else name
    folder = shipped_adapter(
        get_model_name(model), compressor.spec, compressor.conventions.allocation.spec
    )
    if folder and compressor.conventions.offset:
        warn("An offset is a control without restoring: no adapter is used.")
        return None
    return folder


def shipped_adapter(model: str, evictor: str, allocation: str = GLOBAL.spec) -> Path | None:
    """Returns the folder that ships for the model of that name and this evictor, if one does.

    One trained with the allocation (its folder's name ends in it) goes before one trained with the
    global ranking.
    """
    name = to_canonical_name(model)
    if name not in SHIPPING or not evictor:
        return None
    if not is_shipping_installed(name):
        warn(
            f"The adapters for {name} are not installed, so nothing is restored; "
            f"{get_install_command(name)}, or pass adapter=None."
        )
        return None
    folders = (
        shipped_path(name, "adapters", each) for each in (f"{evictor}.{allocation}", evictor)
    )
    return next((folder for folder in folders if folder.is_dir()), None)
