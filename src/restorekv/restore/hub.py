"""Where adapters come from: a folder, the Hugging Face hub, the authors of the paper."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download

from restorekv.errors import AdapterError
from restorekv.model.identity import ModelIdentity
from restorekv.restore.adapter_file import FILES, AdapterCard
from restorekv.restore.shipped import explain_unknown_adapter, find_named_adapter

AUTHORS = "higokri/"
MODELS = ("Llama-3.1-8B-Instruct", "Qwen3-8B")
SUFFIXES = {"kvzip": "", "kvzip+": "_plus"}
# The evictor of each of the authors' repositories.
PUBLISHED = {
    f"RestoreKV-{model}{suffix}": evictor
    for model in MODELS
    for evictor, suffix in SUFFIXES.items()
}


def find_published_name(model: str, evictor: str) -> str:
    """Return the authors' repository for `model` (by the last part of its name) and an evictor's
    spec.
    """
    suffix = SUFFIXES.get(evictor.partition(":")[0])
    name = f"RestoreKV-{Path(model).name}{suffix}"
    if suffix is None or name not in PUBLISHED:
        raise AdapterError(
            f"There is no published adapter for {model} and {evictor}; there are adapters for "
            f"{' and '.join(MODELS)}, each for {' and '.join(SUFFIXES)}."
        )
    return AUTHORS + name


def fetch_adapter(
    name: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    identity: ModelIdentity | None = None,
) -> Path:
    """Return the folder of an adapter: `name` itself, one that ships, or a copy from the hub.

    Args:
        name: A folder, a hub id, or MODEL:NAME for an adapter that ships, such as smollm2:kvzip.
        revision: A revision of the hub's repository; a folder has none.
        token: For a private repository.
        cache_dir: Where the hub's client keeps the files; its own cache unless given.
        identity: The model's identity, if known: the error for a wrong name then lists the right
            ones.

    Raises:
        AdapterError: `name` is none of these, or has no revisions and `revision` is given.
    """
    if os.path.isdir(name):  # False for a name too long for a path; pathlib would raise
        if revision is not None:
            raise AdapterError(
                f"{name} is a folder and has no revision {revision!r}; leave it out or pass a hub "
                "id."
            )
        return Path(name)
    shipped = find_named_adapter(str(name))
    if shipped is not None:
        if revision is not None:
            raise AdapterError(
                f"{name} ships with restorekv and has no revision {revision!r}; leave it out or "
                "pass a hub id."
            )
        return shipped
    try:
        folder = snapshot_download(
            str(name),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=[*FILES],
        )
    except Exception as error:
        # A malformed id, no network and no such repository raise a dozen kinds of errors.
        at = f" at revision {revision!r}" if revision else ""
        choices = explain_unknown_adapter(str(name), identity)
        raise AdapterError(
            f"There is no adapter folder {str(name)[:120]!r}, nor can it be fetched from the hub"
            f"{at}{choices}."
        ) from error
    return Path(folder)


def recognize_copy(card: AdapterCard, name: str | Path, folder: Path) -> AdapterCard:
    """Return the card of an adapter without a record, with source and evictor if the adapter is a
    copy of one of the authors'.

    A copy is recognized by the name of a folder on its path: the authors' repository, or the folder
    that the hub's cache makes of it.
    """
    # Deepest folder first: the repository's own name is nearest to the files.
    parts = list(reversed(folder.resolve().parts))
    # A hub id names the repository itself, wherever `cache_dir` put the files.
    if str(name).startswith(AUTHORS):
        parts.insert(0, Path(name).name)
    for part in parts:
        repository = part.removeprefix("models--higokri--")
        if repository in PUBLISHED:
            return replace(card, source=AUTHORS + repository, evictor=PUBLISHED[repository])
    return card
