"""Adapters that ship in distributions of this repository: by the evictor, or as MODEL:NAME."""

from __future__ import annotations

import os
from pathlib import Path

from restorekv.errors import AdapterError, join_words, warn
from restorekv.files import read_record
from restorekv.model.base_weights import find_made_for
from restorekv.model.identity import ModelIdentity
from restorekv.model.names import (
    SHIPPING,
    get_install_command,
    is_shipping_installed,
    shipped_path,
    to_canonical_name,
)
from restorekv.restore.adapter_file import CARD
from restorekv.spec import drop_gate, find_near_name, split_specs


def find_shipped_adapter(model: str, evictor: str, allocation: str = "global") -> Path | None:
    """Return the folder that ships for the model of that name and this evictor, if one does.

    An adapter trained with the allocation (its folder's name ends in it) is preferred to one
    trained with the global ranking, and one for this evictor alone to one for several evictors.
    Warn and return None if the model's adapters are not installed.
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
    # Compared with the names that exist, so that no name leads out of the folder.
    names = list_names(name)
    for each in (f"{evictor}.{allocation}", evictor):
        if each in names:
            return shipped_path(name, "adapters", each)
    for each in names:
        folder = shipped_path(name, "adapters", each)
        if evictor in _list_evictors(folder):
            return folder
    return None


def recognize_weights(identity: ModelIdentity) -> str | None:
    """Return which of the models that adapters ship for this one is a copy of, or None.

    Its weights decide, so it is recognized wherever it was loaded from, even if they were rounded
    or trained a little further.
    """
    candidates = []
    for name in SHIPPING:
        for each in list_names(name):
            path = shipped_path(name, "adapters", each) / CARD
            record = read_record(path, str(path))
            candidates.append((name, record.get("fingerprint"), record.get("weights")))
    return find_made_for(identity, candidates)


def find_named_adapter(name: str) -> Path | None:
    """Return the folder of the adapter that ships as MODEL:NAME; None for all other names.

    NAME is the name of the adapter's folder or the spec of an evictor.

    Raises:
        AdapterError: The model is one that adapters ship for, but none has that name, or they are
            not installed.
    """
    model, colon, adapter = name.partition(":")
    model = to_canonical_name(model)
    if not colon or model not in SHIPPING:
        return None
    if not is_shipping_installed(model):
        raise AdapterError(
            f"The adapters for {model} are not installed; {get_install_command(model)}."
        )
    folder = find_shipped_adapter(model, adapter)
    if folder is None:
        names = list_names(model)
        hint = _hint_near_adapter(adapter[:60], model, names)
        raise AdapterError(
            f"No adapter {adapter[:60]!r} ships for {model}{hint}; use one of {', '.join(names)}."
        )
    return folder


def explain_unknown_adapter(name: str, identity: ModelIdentity | None) -> str:
    """Return what a name that is not an adapter may mean, and what to use instead.

    Args:
        name: What a user took for an adapter.
        identity: The model's identity; None if it is not known.
    """
    if os.sep in name or "/" in name:
        return "; use a folder or a hub id that is there"
    model = ""
    if identity is not None:
        model = to_canonical_name(identity.name)
        if model not in SHIPPING:
            model = recognize_weights(identity) or ""
    names = list_names(model) if model else []
    # A user may have left out the model's name and the colon.
    hint = _hint_near_adapter(name.rpartition(":")[2], model, names)
    choices = [*(f"{model}:{each}" for each in names), "a folder", "a hub id"]
    return f"{hint}; use {join_words(choices, 'or')}"


def _hint_near_adapter(name: str, model: str, names: list[str]) -> str:
    """Return " (did you mean MODEL:NAME?)" with the adapter that is most like a name, or ""."""
    near = find_near_name(name, names)
    if near is None:
        return ""
    return f" (did you mean {model}:{near}?)"


def list_names(model: str) -> list[str]:
    """Return the names of a model's adapters."""
    folder = shipped_path(model, "adapters")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _list_evictors(folder: Path) -> list[str]:
    """Return the specs of the evictors that an adapter is for, as users name them; none if it was
    not trained with the global ranking.
    """
    path = folder / CARD
    record = read_record(path, str(path))
    if record.get("allocation", "global") != "global":
        return []
    settings = record.get("settings") or {}
    trained = split_specs(settings.get("evictor") or "")
    return trained + [drop_gate(spec) for spec in record.get("also_for") or ()]
