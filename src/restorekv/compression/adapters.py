"""Which adapter a compression uses: the one given, or the one that ships for model and evictor."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from transformers import PreTrainedModel

from restorekv.compression.compressor import Compressor
from restorekv.errors import AdapterError, RestoreKVError, warn
from restorekv.model.identity import ModelIdentity, identify_model
from restorekv.model.names import SHIPPING
from restorekv.restore import hub
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.shipped import (
    find_named_adapter,
    find_shipped_adapter,
    recognize_weights,
)
from restorekv.restore.use_warnings import warn_of_other_use
from restorekv.spec import drop_gate

# How many adapters a model keeps loaded, and its attribute for them.
LOADED = 4
ADAPTERS = "_restorekv_adapters"


def load_adapter(
    model: PreTrainedModel,
    adapter: RestoreAdapter | str | Path | None,
    compressor: Compressor,
    restore_tokens: int | None = None,
    separator: str | None = None,
    ratio: Fraction | None = None,
    identity: ModelIdentity | None = None,
) -> RestoreAdapter | None:
    """Return the adapter to use, or None if nothing is restored.

    Warn if the adapter was trained for a different use.

    Args:
        model: The model whose caches are restored.
        adapter: What `compress` takes. "tiny:NAME" or "smollm2:NAME" is the adapter that ships for
            the evictor NAME, for use with a different evictor.
        compressor: The method that makes the caches, with its config.
        restore_tokens: Return the first n tokens of the adapter as an adapter; None returns all.
        separator: What separates text and question, which is part of an adapter's use.
        ratio: The share of the pairs to hold. "auto" restores nothing at a ratio at which the
            adapter does not help this evictor, by its measurements or else by the ratios of its
            training, unless `restore_tokens` or the config's `restore_from` asks for restoring.
            None skips this check.
        identity: The identity of `model`, if the caller has computed it.

    Raises:
        AdapterError: The adapter cannot be loaded, or does not fit the model or the method.
        RestoreKVError: The config asks for restoring, and there is no adapter.
    """
    if adapter == "none":
        raise AdapterError("'none' is a word of the command line; in Python pass adapter=None.")
    if adapter is not None and not isinstance(adapter, str | Path | RestoreAdapter):
        raise AdapterError(
            "adapter is 'auto', 'published', a folder, a hub id, a RestoreAdapter or None, not "
            f"{type(adapter).__name__}."
        )
    config = compressor.config
    if not compressor.restores:
        if adapter not in (None, "auto"):
            raise AdapterError(f"{compressor.spec} restores nothing; leave out the adapter.")
        return None
    # "auto" may find nothing, or nothing for this ratio; whatever a user names must be used.
    auto = adapter == "auto"
    wanted = restore_tokens is not None or config.restore_from != "full"
    if isinstance(adapter, str | Path):
        identity = identity or identify_model(model)
        if isinstance(adapter, str):
            # A name becomes a folder or a hub id, or None if "auto" finds nothing.
            model_name = name_model_with_adapters(identity) if auto else identity.name
            adapter = locate_adapter(adapter, model_name, compressor)
    if adapter is None:
        _refuse_restoring_without_adapter(config.restore_from, restore_tokens)
        return None
    if not isinstance(adapter, RestoreAdapter):
        assert identity is not None
        try:
            adapter = _load_shared(model, adapter, identity)
        except AdapterError as error:
            if not auto or config.restore_from != "full":
                raise
            warn(f"{error} Nothing is restored.")
            return None
    spec = drop_gate(compressor.spec)
    # At some ratios restoring is not worth its part of the budget: docs/evaluation.md has figures.
    if auto and not wanted and ratio is not None and not adapter.card.is_helpful_at(spec, ratio):
        return None
    # The LoRA layers wrap the weights of the adapter's own model object, so they would be wrong for
    # a different one.
    if adapter.model is not model:
        raise AdapterError(
            "The adapter was made for a different model object; load it for this one."
        )
    warn_of_other_use(
        adapter.card,
        compressor.identity(model),
        config.allocation_spec,
        config.restore_from,
        config.prefix_policy,
        separator,
    )
    if restore_tokens is None:
        return adapter
    return adapter.truncate(restore_tokens)


def _refuse_restoring_without_adapter(restore_from: str, restore_tokens: int | None) -> None:
    if restore_from != "full":
        raise RestoreKVError(
            f"restore_from={restore_from!r} needs an adapter; pass adapter=..., "
            "or drop restore_from."
        )
    if restore_tokens is not None:
        raise RestoreKVError(
            "restore_tokens needs an adapter; pass adapter=..., or drop restore_tokens."
        )


def _load_shared(
    model: PreTrainedModel, name: str | Path, identity: ModelIdentity
) -> RestoreAdapter:
    """Return an adapter from a folder or the hub.

    All contexts of a model share one adapter object for each folder, until its files change.
    """
    folder = Path(name)
    if not folder.is_dir():
        return RestoreAdapter.from_pretrained(model, name, identity=identity)
    # Size and time of every file identify the folder's contents without reading them again.
    files = []
    for path in folder.iterdir():
        # A broken link leads to no file; use the status of the link itself.
        status = path.stat() if path.exists() else path.lstat()
        files.append((path.name, status.st_mtime_ns, status.st_size))
    key = (
        str(folder.resolve()),
        str(sorted(files)),
        model.device,
        model.dtype,
        identity.fingerprint,
    )
    # Kept on the model: in a dictionary with weak keys it would never be freed, since an adapter
    # refers to its model.
    known = vars(model).setdefault(ADAPTERS, {})
    adapter = known.get(key)
    # Modules that were replaced may have the same weights, and so the same fingerprint.
    if adapter is None or not adapter.is_current:
        adapter = RestoreAdapter.from_pretrained(model, name, identity=identity)
        known[key] = adapter
        for old in list(known)[:-LOADED]:
            known.pop(old, None)  # another thread may have been first
    return adapter


def name_model_with_adapters(identity: ModelIdentity) -> str:
    """Return the name under which adapters ship for a model, or its own name if none do.

    A model that was loaded from elsewhere, such as a folder, is recognized by its weights.
    """
    if identity.name in SHIPPING:
        return identity.name
    return recognize_weights(identity) or identity.name


def locate_adapter(name: str, model_name: str, compressor: Compressor) -> str | Path | None:
    """Return the folder or hub id of the adapter with a name, or None if "auto" finds no adapter.

    `model_name` is the name of the model, for which an adapter is looked up.
    """
    if name == "published":
        return hub.find_published_name(model_name, compressor.spec)
    if name != "auto":
        return find_named_adapter(name) or name
    config = compressor.config
    folder = find_shipped_adapter(model_name, compressor.spec, config.allocation_spec)
    if folder and config.offset:
        warn("An offset is a control without restoring: no adapter is used.")
        return None
    return folder
