"""Publishes an adapter: its license, its model card, its results, and the upload to the hub."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalTokenNotFoundError

from restorekv.errors import AdapterError, reraise_as, summarize_error, warn
from restorekv.files import parse_json, read_bytes
from restorekv.model.names import to_hub_id
from restorekv.restore import adapter_file, model_card
from restorekv.restore.adapter_file import README, AdapterCard, StoredAdapter
from restorekv.restore.licenses import (
    PERMISSIVE,
    UNKNOWN,
    find_base_license,
    find_noncommercial_license,
    forbids_commercial_use,
    inherit_license,
    normalize_license,
)
from restorekv.spec import split_specs

AUTHORS_LICENSE = "cc-by-nc-4.0"  # of all four published adapters, by their model cards
README_LIMIT = 1 << 20  # bytes
# Fields that a row of results has only if they are unusual: how the adapter was used, if not as in
# its training ...
CONVENTIONS = ("prefix_policy", "allocation", "restore_from")
# ... and how a cell held its cache, if not in the usual way, which these values are.
USUAL_SETTINGS = {"kv_dtype": "model", "streaming_chunk": 0, "max_context": 0}
# Fields that every row of results has, because none of their values is the usual one.
MEASURED_WITH = ("dtype", "on_small_budget")
# What `record_results` writes into a card.
MEASUREMENTS = ("results", "helps_up_to", "also_for", "helps_from")


# The license


def add_license(card: AdapterCard, folder: Path) -> AdapterCard:
    """Return the card with the license of the folder's README.md, if that license counts.

    It counts if the record has no license, or if it forbids commercial use. If neither has one, a
    copy of an authors' adapter has the authors' license.
    """
    license = None
    readme = folder / README
    if readme.is_file():
        with reraise_as(AdapterError):
            text = read_bytes(readme, str(readme), README_LIMIT).decode(errors="replace")
        license = model_card.parse_license(text)
    if card.license is None or forbids_commercial_use(license):
        card = replace(card, license=license)
    if card.license is None and card.source is not None:
        card = replace(card, license=AUTHORS_LICENSE)
    return card


def warn_if_noncommercial(card: AdapterCard) -> None:
    """Warn of a license that forbids commercial use."""
    license = find_noncommercial_license(card)
    if license is not None:
        what = "is" if license == card.license else "was trained on data"
        warn(f"The adapter {what} licensed {license}: not for commercial use.")


def decide_license(
    card: AdapterCard, license: str | None, readme: str | None = None
) -> AdapterCard:
    """Return the card under its publisher's license, or else its own; refuse one that allows more
    than the record.

    A license in `readme`, a card that a person wrote, is the publisher's and must agree with
    `license`.
    """
    # What forbids commercial use decides, whatever a card says.
    strict = find_noncommercial_license(card)
    fix = f"publish it under {strict}"
    if readme is not None:
        named = model_card.parse_license(readme)
        expected = strict if license is None else normalize_license(license)
        contradicts = license is not None and named != expected
        if contradicts or (named is None and strict):
            raise AdapterError(
                f"The README.md that someone wrote names {named or 'no license'}, not {expected}; "
                f"write `license: {expected}` there or remove it to get a new card."
            )
        license = named
        fix = "fix the license there"
    if not license:
        is_recorded = normalize_license(card.license or UNKNOWN) != UNKNOWN
        license = card.license
        if not is_recorded:
            license = inherit_license(card, card.data)
        license = license or UNKNOWN
    if strict and not forbids_commercial_use(license):
        raise AdapterError(
            f"The adapter is recorded as, or trained on, {strict}; {license} allows more, so {fix}."
        )
    base = find_base_license(card)
    if base and normalize_license(license) in PERMISSIVE:
        raise AdapterError(
            f"The base model is licensed {base}, whose terms adapters inherit; {license} allows "
            f"more, so publish it under {base}."
        )
    return replace(card, license=normalize_license(license))


# A folder


def save_adapter(folder: Path, stored: StoredAdapter) -> None:
    """Write the adapter with its model card; keep a README.md that a person wrote, with a warning.

    Without new results, the measurements recorded in the folder stay, if they are of the same
    weights and evictor.
    """
    card = stored.get_card()
    if card.results is None:
        card = replace(card, **_find_measurements(folder, stored))
        stored = replace(stored, card=card)
    readme = None
    if model_card.is_generated_card(folder / README):
        readme = model_card.render_card(card, stored.config)
    else:
        warn(
            f"Someone wrote or changed {folder / README}, so it stays as it is; remove it to get a "
            "new card."
        )
    adapter_file.write_adapter(folder, stored, readme)


def _find_measurements(folder: Path, stored: StoredAdapter) -> dict[str, Any]:
    """Return the measurements in the folder's record, if it is of the same weights and evictor, or
    else nothing.
    """
    if not (folder / adapter_file.CARD).is_file():
        return {}
    try:
        before = adapter_file.read_adapter(folder)
    except AdapterError:
        return {}  # a damaged adapter is replaced
    if before.card is None or before.card.evictor != stored.get_card().evictor:
        return {}
    if before.weights_hash() == stored.weights_hash():
        return {name: getattr(before.card, name) for name in MEASUREMENTS}
    return {}


# The hub


def prepare_upload(
    repo: str, stored: StoredAdapter, license: str | None = None, readme: str | None = None
) -> tuple[StoredAdapter, str]:
    """Return what `push_adapter` uploads, without a network.

    Args:
        repo: The name of the repository, OWNER/NAME.
        stored: The adapter.
        license: The publisher's license; the record decides unless given.
        readme: The user's own card, instead of a generated one.

    Returns:
        The adapter under its license, and its README.md.

    Raises:
        AdapterError: The name has a different form, or the license allows more than the record.
    """
    if not model_card.is_hub_name(repo):
        raise AdapterError(f"{repo!r} is not a name for a repository on the hub; pass OWNER/NAME.")
    card = decide_license(stored.get_card(), license, readme)
    warn_if_noncommercial(card)
    if not model_card.is_on_hub(card):
        warn(
            f"The base model is recorded as {card.model!r}, which others cannot load from the hub."
        )
    stored = drop_local_paths(replace(stored, card=card))
    if readme is None:
        readme = model_card.render_card(stored.get_card(), stored.config, repo)
    return stored, readme


def drop_local_paths(stored: StoredAdapter) -> StoredAdapter:
    """Return the adapter without the folders of this machine, which may name people and customers:
    of the path of a local model, gate, adapter or benchmark file, only the last part stays.
    """
    card = stored.get_card()
    config = stored.config
    name = to_hub_id(card.model)
    if not model_card.is_on_hub(card):
        name = _name_last_part(card.model)
        card = replace(card, model=name)
    # The config may still name the folder of the adapter that training began with.
    if config.base_model_name_or_path:
        config = copy.copy(config)
        config.base_model_name_or_path = name
    settings = card.settings
    if settings:
        settings = dict(settings)
        init = settings.get("init")
        if isinstance(init, str) and _is_local(init):
            settings["init"] = _name_last_part(init)
        if "evictor" in settings:
            settings["evictor"] = _shorten_paths(settings["evictor"])
    results = card.results
    if results:
        results = [
            row | {key: _shorten_paths(row[key]) for key in ("benchmark", "evictor") if key in row}
            for row in results
        ]
    also_for = card.also_for
    if also_for:
        also_for = [_shorten_paths(spec) for spec in also_for]
    helps_from = card.helps_from
    if helps_from:
        helps_from = {_shorten_paths(spec): ratio for spec, ratio in helps_from.items()}
    card = replace(
        card,
        evictor=_shorten_paths(card.evictor),
        settings=settings,
        results=results,
        also_for=also_for,
        helps_from=helps_from,
    )
    return replace(stored, config=config, card=card)


def _name_last_part(path: str) -> str:
    """Return the last part of a path of this or a different system, any other name unchanged."""
    return PureWindowsPath(path).name


def _is_local(name: str) -> bool:
    """Return whether a name is a path rather than the id of a repository on the hub."""
    return os.path.exists(name) or not model_card.is_hub_name(name)


def _shorten_paths(spec: Any) -> Any:
    """Return one or several specs, such as lines:path=/home/me/mine.jsonl, with every local path in
    their settings reduced to its last part.
    """
    if not isinstance(spec, str):
        return spec
    parts = []
    for part in spec.split(","):
        name, mark, value = part.partition("=")
        has_folder = "/" in value or "\\" in value
        if has_folder and _is_local(value):
            value = _name_last_part(value)
        parts.append(name + mark + value)
    return ",".join(parts)


def push_adapter(
    repo: str,
    stored: StoredAdapter,
    *,
    private: bool = False,
    token: str | None = None,
    license: str | None = None,
    readme: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload the adapter with its card; create the repository if needed.

    A card on the hub that a person wrote or changed stays, unless `readme` is given.

    Args:
        repo: The name of the repository, OWNER/NAME.
        stored: The adapter.
        private: Whether only the owner may see the repository.
        token: A token for the hub; the one of `hf auth login` unless given.
        license: The publisher's license; the record decides unless given.
        readme: The user's own card, instead of a generated one.
        commit_message: The message of the commit.

    Returns:
        The address of the commit.

    Raises:
        AdapterError: The hub refuses or cannot be reached, or the repository is public and
            `private` is asked for, or its card names another license and none is given; or as for
            `prepare_upload`.
    """
    stored, text = prepare_upload(repo, stored, license, readme)
    with tempfile.TemporaryDirectory() as folder, _explain_hub_errors(repo):
        adapter_file.write_adapter(Path(folder), stored, text)
        api = HfApi(token=token)
        api.create_repo(repo, private=private or None, exist_ok=True)
        # In a public repository, the files would be public at once.
        if private and not api.model_info(repo).private:
            raise AdapterError(
                f"{repo} exists and is public; make it private on the hub or choose another name."
            )
        uploads: list[str] = list(adapter_file.FILES)
        old_card = _download_card(api, repo, Path(folder))
        if readme is None and old_card.exists():
            old_text = old_card.read_text(encoding="utf-8", errors="replace")
            if not model_card.is_generated_card(old_card):
                # The card on the hub is the user's, so it decides about the license too.
                card = decide_license(stored.get_card(), license, old_text)
                adapter_file.write_adapter(Path(folder), replace(stored, card=card))
                warn(f"Someone wrote or changed the README.md of {repo}, so it stays as it is.")
                uploads.remove(README)
            elif license is None:
                _refuse_other_license(repo, old_text, stored.get_card())
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=commit_message or "Upload a restore adapter",
            allow_patterns=uploads,
        )
    return str(commit.commit_url)


def _refuse_other_license(repo: str, old_text: str, card: AdapterCard) -> None:
    """Refuse to change the license of what the hub has already: it may have been given with
    `license` when it was published, and then the record does not know it.
    """
    published = model_card.parse_license(old_text)
    if published and card.license and published != card.license:
        raise AdapterError(
            f"{repo} was published as {published}, and this adapter's record says {card.license}; "
            "give the license under which to publish it."
        )


def _download_card(api: HfApi, repo: str, folder: Path) -> Path:
    """Return the repository's README.md, or a path to nothing."""
    try:
        # Into a separate folder, so that it cannot overwrite the card just written.
        return Path(api.hf_hub_download(repo, README, local_dir=folder / "hub"))
    except EntryNotFoundError:
        return folder / "hub" / README


@contextmanager
def _explain_hub_errors(repo: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into an AdapterError of one sentence."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        # Every version of the client raises different errors if there is no connection.
        raise AdapterError(_describe_hub_error(error, repo)) from error


def _describe_hub_error(error: Exception, repo: str) -> str:
    """Return the sentence for an error of the hub's client."""
    login = "log in with `hf auth login` or pass a token that may write"
    if isinstance(error, LocalTokenNotFoundError):
        return f"Cannot publish {repo} without a login; {login}."
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        reason = summarize_error(Exception(error.server_message or "no reason"))
        fix = "check the name and try again"
        if status in (401, 403):
            fix = login
        return f"The hub refuses {repo} ({status}: {reason}); {fix}."
    reason = summarize_error(error)
    if isinstance(error, ValueError):  # front matter that the hub does not take
        return f"The hub refuses the card of {repo} ({reason}); fix its README.md."
    return f"The hub cannot be reached ({reason}); check the network and try again."


# Results


def read_results(path: Path, stored: StoredAdapter) -> list[dict]:
    """Return what `restorekv eval --json` measured with this very adapter: one row per restored
    cell, in points.

    A row also has the conventions that differ from the adapter's own. Raise AdapterError for
    results of other weights, a different base model or a different evictor.
    """
    card = stored.get_card()
    weights = stored.weights_hash()
    served = _list_supported_evictors(card)
    what = f"The file of results {path}"
    with reraise_as(AdapterError):
        raw = read_bytes(path, what)
    try:
        rows = parse_json(raw, what)["rows"]
        # Rows of this model, then of this adapter: each rule has its own message.
        of_this_model = [row for row in rows if row["fingerprint"] == card.fingerprint]
        of_this_adapter = [row for row in of_this_model if row["adapter"] == weights]
        results = [
            _compare_to_baselines(row, rows, card)
            for row in of_this_adapter
            if not card.evictor or _name_evictor(row, card) in served
        ]
        model = rows[0]["model"]
        method = (of_this_adapter or rows)[0]["method"]
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise AdapterError(
            f"{path} is not what `restorekv eval --json` writes; pass its file."
        ) from error
    if not of_this_model:
        raise AdapterError(
            f"{path} was measured with a different base model ({model}); evaluate this one."
        )
    if not of_this_adapter:
        count = _find_truncation(of_this_model, stored)
        if count is not None:
            raise AdapterError(
                f"{path} was measured with the first {count} of the adapter's "
                f"{len(stored.embeddings)} restore tokens; evaluate it without --restore-tokens."
            )
        raise AdapterError(
            f"{path} has no results of this adapter ({weights}); evaluate it with SPEC@FOLDER."
        )
    if not results:
        raise AdapterError(
            f"{path} was measured with the evictor {method}; evaluate the adapter with "
            f"{' or '.join(served)}."
        )
    return results


def _find_truncation(rows: list[dict], stored: StoredAdapter) -> int | None:
    """Return k if a row was measured with only the adapter's first k restore tokens, or None.

    The hash of the weights differs for every k.
    """
    measured = [row["adapter"] for row in rows]
    for count in range(1, len(stored.embeddings)):
        ratio_vectors = stored.ratio_vectors
        if ratio_vectors is not None:
            ratio_vectors = ratio_vectors[:count]
        embeddings = stored.embeddings[:count]
        first = replace(stored, embeddings=embeddings, ratio_vectors=ratio_vectors)
        if first.weights_hash() in measured:
            return count
    return None


def _list_supported_evictors(card: AdapterCard) -> list[str]:
    """Return the specs of the evictors that an adapter is for."""
    return [*split_specs(card.evictor or ""), *(card.also_for or ())]


def _name_evictor(row: dict, card: AdapterCard) -> str:
    """Return the spec of a row's evictor as the card names it.

    That is the row's evictor, or else its method, which also has settings that a protocol chose,
    such as those of KVzip's authors.
    """
    if row["evictor"] in _list_supported_evictors(card):
        return row["evictor"]
    return row["method"]


def _compare_to_baselines(row: dict, rows: list[dict], card: AdapterCard) -> dict[str, Any]:
    """Return a row of results for a restored cell, with the scores of the evictor alone and of the
    full cache on the same questions.
    """
    question_keys = ("model", "fingerprint", "benchmark", "protocol", "dtype", "max_context")
    base_keys = (
        "evictor",
        "ratio",
        "offset",
        "on_small_budget",
        "prefix_policy",
        "allocation",
        *USUAL_SETTINGS,
    )
    # Scores can be compared only if the same model was asked the same questions.
    asked_the_same = [
        other for other in rows if all(other[key] == row[key] for key in question_keys)
    ]
    base = next(
        other
        for other in asked_the_same
        if not other["restored"] and all(other[key] == row[key] for key in base_keys)
    )
    full = next(other for other in asked_the_same if other["evictor"] == "full")

    result = {"benchmark": row["benchmark"], "ratio": row["ratio"]}
    evictor = _name_evictor(row, card)
    if card.evictor not in (None, evictor):  # one of several
        result["evictor"] = evictor
    if row["protocol"] != "kvpress":
        result["protocol"] = row["protocol"]
    for key in CONVENTIONS:
        if row[key] != getattr(card, key):
            result[key] = row[key]
    for key, usual in USUAL_SETTINGS.items():
        if row[key] != usual:
            result[key] = row[key]
    for key in MEASURED_WITH:
        result[key] = row[key]
    result["base"] = round(base["score"], 1)
    result["restored"] = round(row["score"], 1)
    # Over few documents there is no interval.
    if row["low"] is not None:
        result["low"] = round(row["low"], 1)
        result["high"] = round(row["high"], 1)
    result["gain"] = round(row["gain"], 1)
    result["full"] = round(full["score"], 1)
    result["questions"] = row["questions"]
    result["documents"] = row["samples"]
    return result


def merge_results(card: AdapterCard, results: list[dict]) -> AdapterCard:
    """Return the card with these rows, which replace older ones that were measured the same way."""

    conventions = (*CONVENTIONS, *USUAL_SETTINGS, *MEASURED_WITH)

    def kind_of(row: dict) -> list[Any]:
        return [row.get(key) for key in ("benchmark", "protocol", "ratio", "evictor", *conventions)]

    fresh = [kind_of(row) for row in results]
    others = [row for row in card.results or () if kind_of(row) not in fresh]
    return replace(card, results=others + results)
