"""The last context that was prefilled and scored, kept for caches of other ratios.

Prefill and scores take far longer than evicting. To compare several caches of one text, with and
without restoring and at several ratios, they are needed only once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.dense import list_dense_layers
from restorekv.cache.states import list_state_layers
from restorekv.compression.compressor import BeginPhase, Compressor, PreparedContext
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.model.identity import ModelIdentity
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape, is_latent_config
from restorekv.model.tokenize import hash_token_names


@dataclass(frozen=True)
class PreparedKey:
    """What a prepared context depends on."""

    model: int  # id() of the model; the prepared context holds it, so no other object gets the id
    weights: str  # its fingerprint, since weights may change
    dtype: str
    ids: bytes
    prefix: int
    suffix: bytes  # the ids that the template puts after a question, which KVzip reads
    tokens: str  # a hash of the tokens that the ids stand for, which depend on the tokenizer
    evictor: str  # with its settings

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        identity: ModelIdentity,
        tokenizer: Tokenizer,
        context: Context,
        compressor: Eviction,
    ) -> PreparedKey:
        """Return the key of what `compressor` prepares for `context` with the model."""
        return cls(
            model=id(model),
            weights=identity.fingerprint,
            dtype=identity.dtype,
            ids=context.ids.cpu().contiguous().numpy().tobytes(),
            prefix=context.prefix_length,
            suffix=context.suffix_ids.cpu().contiguous().numpy().tobytes(),
            tokens=hash_token_names(tokenizer, context.ids),
            evictor=compressor.identity(model),
        )


class PreparedContextCache:
    """Keeps the full cache of the last context and its scores, if the full cache is small enough.

    Args:
        max_bytes: The largest size of a full cache that is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.kept: tuple[PreparedKey, ScoredContext] | None = None

    @property
    def bytes_held(self) -> int:
        """Bytes of the full cache that is kept."""
        kept = self.kept
        if kept is None:
            return 0
        layers = list_dense_layers(kept[1].full)
        held = 0
        for layer in layers:
            held += layer.keys.nbytes
            # Latent attention has one tensor for both.
            if layer.values is not layer.keys:
                held += layer.values.nbytes
        for state_layer in list_state_layers(layers):
            held += sum(tensor.nbytes for tensor in state_layer.list_tensors())
        return held

    def clear(self) -> None:
        """Free the kept context."""
        self.kept = None

    def holds(self, prepared: PreparedContext) -> bool:
        """Return whether a context's full cache is the kept one, which must not be freed."""
        kept = self.kept
        return kept is not None and kept[1].full is prepared.full

    def prepare(
        self,
        model: PreTrainedModel,
        identity: ModelIdentity,
        tokenizer: Tokenizer,
        context: Context,
        compressor: Compressor,
        begin_phase: BeginPhase,
    ) -> PreparedContext:
        """Return what the compressor would prepare, from the kept context if possible.

        Args:
            model: The model that reads.
            identity: The model's current identity.
            tokenizer: Its tokenizer.
            context: The tokenized context.
            compressor: What prepares it, with its adapter if it restores.
            begin_phase: Called with the name of each phase.

        Returns:
            The prepared context. If the kept one was used, its `seconds` are those of the restore
            pass alone, since nothing was prefilled or scored.
        """
        # Keys and values, or latents that are both.
        bytes_each = model.dtype.itemsize * (1 if is_latent_config(model.config) else 2)
        if not isinstance(compressor, Eviction) or not self._can_keep(
            identity.shape, bytes_each, context, compressor.config
        ):
            return compressor.prepare(model, tokenizer, context, begin_phase)
        asked = PreparedKey.of(model, identity, tokenizer, context, compressor)
        prepared = self._find(asked, context, compressor)
        if prepared is None:
            # Free the old one before a new one is made, so that two are never in memory.
            self.clear()
            if not compressor.scoring:
                return compressor.prepare(model, tokenizer, context, begin_phase)
            # Without the adapter, so that what is kept also serves caches that are not restored.
            alone = replace(compressor, adapter=None)
            prepared = alone.prepare(model, tokenizer, context, begin_phase)
            assert isinstance(prepared, ScoredContext), "only streaming prepares another kind"
            self.kept = (asked, prepared)
        if compressor.adapter is None:
            return prepared
        return prepared.with_restore_cache(compressor.adapter, begin_phase)

    def _find(
        self, asked: PreparedKey, context: Context, compressor: Eviction
    ) -> ScoredContext | None:
        """Return the kept context under the compressor's config, if it is the one asked for."""
        kept = self.kept
        if kept is None:
            return None
        key, prepared = kept
        if not compressor.scoring:
            # Nothing competes, so it does not matter which evictor scored the kept context.
            asked = replace(asked, evictor=key.evictor)
        if key != asked:
            return None
        return replace(prepared, context=context, config=compressor.config, seconds={})

    def _can_keep(
        self, shape: CacheShape, bytes_each: int, context: Context, config: CompressionConfig
    ) -> bool:
        """Return whether a context's full cache is held in memory and is small enough to keep.

        `bytes_each` is what a pair takes for each number of its key.
        """
        # Layers with a window or a state hold little, and are left out.
        numbers = context.num_tokens * shape.layers * shape.heads * shape.head_dim
        fits = numbers * bytes_each <= self.max_bytes
        return fits and config.streaming_chunk is None and not config.offload
