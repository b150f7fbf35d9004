"""What a server's caches are made with; it decides their names in the store.

A cache that was made by an older version, or with an adapter or gate that has been replaced since,
is no longer found under its name: it is made again, and the disk quota drops the old file in time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import __version__
from restorekv.compression.adapters import name_model_with_adapters
from restorekv.compression.compressor import Compressor
from restorekv.compression.eviction import make_compressor
from restorekv.compression.method_check import check_before_reading
from restorekv.compression.presets import resolve_preset
from restorekv.errors import RestoreKVError
from restorekv.evictors import EVICTORS
from restorekv.files import read_bytes
from restorekv.model.identity import identify_model
from restorekv.model.names import SHIPPING, is_shipping_installed
from restorekv.model.prompt import get_default_separator
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.adapter_file import CARD
from restorekv.restore.shipped import find_shipped_adapter
from restorekv.seal import short_hash
from restorekv.serve.variants import Variant

REFUSED = ("", "")  # instead of the digests of an evictor that refuses the model


@dataclass(frozen=True)
class CacheOrigin:
    """What decides every cache of a server, besides the document and the variant.

    Args:
        common: The version of this package, the model, its dtype, template and separator, and
            settings of `compress` that are not the defaults.
        evictors: For each evictor, digests of its files and gate, and of its adapter.
    """

    common: Sequence[str]
    evictors: Mapping[str, Sequence[str]]

    @classmethod
    def describe(
        cls,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        adapter: RestoreAdapter | str | None = "auto",
    ) -> Self:
        """Return the origin of caches that this process would make now.

        Args:
            model: What reads the documents.
            tokenizer: Its tokenizer.
            settings: Settings of `compress` that are not the defaults.
            adapter: What restores the documents: "auto" for the one that ships for each evictor, or
                one for all, or None.
        """
        identity = identify_model(model, tokenizer)
        assert identity.template is not None  # since there is a tokenizer
        common = (
            __version__,
            identity.fingerprint,
            str(model.dtype),
            identity.template,
            get_default_separator(tokenizer),
            *(f"{name}={value}" for name, value in settings.items()),
        )
        # Once, and not for each evictor: it may read the weights.
        model_name = name_model_with_adapters(identity)
        named = None if adapter == "auto" else _digest_named_adapter(adapter)
        evictors = {
            name: _describe_evictor(name, model, tokenizer, model_name, named) for name in EVICTORS
        }
        return cls(common, evictors)

    @cached_property
    def digest(self) -> str:
        """A hash that distinguishes this origin from others."""
        return short_hash(json.dumps([*self.common, dict(self.evictors)], sort_keys=True))

    def has_method(self, name: str) -> bool:
        """Return whether an evictor or a preset works on the model."""
        evictor = resolve_preset(name)
        return tuple(self.evictors.get(evictor, REFUSED)) != REFUSED

    def make_key(self, sha256: str, variant: Variant) -> str:
        """Return the name of a cache: 32 hex digits of a hash of document, variant and origin."""
        own: Sequence[str] = ()
        if variant.method:
            code, adapter = self.evictors[resolve_preset(variant.method)]
            own = (code, adapter) if variant.restores else (code,)
        # Hashed as JSON, which keeps the parts apart: joined, "a" + "bc" would equal "ab" + "c".
        parts = json.dumps([sha256, variant.name, *self.common, *own])
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _describe_evictor(
    name: str,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    model_name: str,
    named: str | None,
) -> tuple[str, str]:
    """Return the identity of an evictor's scores, and a digest of its adapter.

    Args:
        name: The name of the evictor.
        model: What reads the documents.
        tokenizer: Its tokenizer.
        model_name: The name of the model that adapters ship for.
        named: The digest of the adapter for all evictors; None takes the one that ships.
    """
    try:
        compressor = make_compressor(name)
        check_before_reading(model, tokenizer, compressor)
        scores = f"{compressor.identity(model)} {compressor.digest_code()}"
        adapter = _digest_adapter(compressor, model_name) if named is None else named
        return scores, adapter
    except RestoreKVError:
        # It has no gate for this model, say. A request for it gets the error, and no cache.
        return REFUSED


def _digest_named_adapter(adapter: RestoreAdapter | str | None) -> str:
    """Return the digest of an adapter that is loaded; "" for None."""
    if adapter is None:
        return ""
    assert isinstance(adapter, RestoreAdapter)
    return short_hash(json.dumps(adapter.identity(), sort_keys=True))


def _digest_adapter(compressor: Compressor, model_name: str) -> str:
    """Return the digest of the adapter that ships for model and compressor; "" if none does."""
    # Asked here, since the search for an adapter warns of what is not installed, for each evictor.
    if model_name not in SHIPPING or not is_shipping_installed(model_name):
        return ""
    folder = find_shipped_adapter(model_name, compressor.spec, compressor.config.allocation_spec)
    if folder is None:
        return ""
    record = folder / CARD
    # The record has the checksums of all other files.
    content = read_bytes(record, str(record))
    return short_hash(content)
