"""Adapters on the Hugging Face hub: fetches them, finds the authors' own, publishes ours under a
license and a card.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalTokenNotFoundError

from restorekv.errors import AdapterError, reraise_as, summarize_error, warn
from restorekv.files import read_bytes, read_json
from restorekv.restore import adapter_file, model_card
from restorekv.restore.adapter_file import README, AdapterCard, StoredAdapter
from restorekv.restore.model_card import (
    UNKNOWN,
    find_noncommercial_license,
    forbids_commercial_use,
    inherit_license,
    normalize_license,
)

AUTHORS = "higokri/"
MODELS = ("Llama-3.1-8B-Instruct", "Qwen3-8B")
SUFFIXES = {"kvzip": "", "kvzip+": "_plus"}
PUBLISHED = {
    f"RestoreKV-{model}{suffix}": evictor
    for model in MODELS
    for evictor, suffix in SUFFIXES.items()
}
AUTHORS_LICENSE = "cc-by-nc-4.0"  # of all four, by their model cards
README_LIMIT = 1 << 20  # bytes
CONVENTIONS = ("prefix_policy", "allocation", "restore_from")
HELD = {"storage": "model", "streaming": 0}  # how a cell held its cache, and what is not told


def find_published_name(model: str, evictor: str) -> str:
    """Returns the authors' repository for `model` (by the last part of its name) and an evictor's
    spec.
    """
    name = f"RestoreKV-{Path(model).name}{SUFFIXES.get(evictor.partition(':')[0], ':none')}"
    if name not in PUBLISHED:
        raise AdapterError(
            f"There is no published adapter for {model} and {evictor}; there are adapters for {' and '.join(MODELS)}, "
            f"each for {' and '.join(SUFFIXES)}."
        )
    return AUTHORS + name


def fetch_adapter(
    name: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Returns the folder itself, or one with the adapter's files from the hub."""
    if Path(name).is_dir():
        if revision is not None:
            raise AdapterError(
                f"{name} is a folder and has no revision {revision!r}; leave it out or give a hub id."
            )
        return Path(name)
    try:
        files = [*adapter_file.FILES]
        folder = snapshot_download(
            str(name), revision=revision, token=token, cache_dir=cache_dir, allow_patterns=files
        )
    except (
        Exception
    ) as error:  # a malformed id, no network and no such repository raise a dozen kinds
        at = f" at revision {revision!r}" if revision else ""
        raise AdapterError(
            f"There is no adapter folder {str(name)!r}, nor can it be fetched from the hub{at}."
        ) from error
    return Path(folder)


def with_origin(card: AdapterCard, name: str | Path, folder: Path, bare: bool) -> AdapterCard:
    """Adds what only the place tells: the license in README.md and, to a `bare` adapter's card,
    whose copy it is.

    `bare`: the folder has no restorekv.json. A copy of an authors' adapter is recognized by a
    folder's name on its path: their repository's, or the one that the hub's cache makes of it.
    """
    readme = folder / README
    with reraise_as(AdapterError):
        text = (
            read_bytes(readme, str(readme), README_LIMIT).decode(errors="replace")
            if readme.is_file()
            else ""
        )
    license = model_card.parse_license(text) if text else None
    if forbids_commercial_use(license) or card.license is None:
        card = replace(card, license=license)
    if bare:
        parts = (
            Path(name).name if str(name).startswith(AUTHORS) else "",
            *reversed(folder.resolve().parts),
        )
        parts = [part.removeprefix("models--higokri--") for part in parts]
        if source := next((part for part in parts if part in PUBLISHED), None):
            license = card.license or AUTHORS_LICENSE
            card = replace(
                card, source=AUTHORS + source, evictor=PUBLISHED[source], license=license
            )
    return card


def warn_of_license(name: str | Path, card: AdapterCard) -> None:
    """Warns of a license that forbids commercial use, and of what the authors do not state about
    their adapters.
    """
    if (strict := find_noncommercial_license(card)) is None:
        return
    what = "is" if strict == card.license else "was trained on data"
    message = f"The adapter {name} {what} licensed {strict}: not for commercial use"
    if card.source and "Qwen3" in card.source:
        message += "; its authors do not state whether they trained it with YaRN, as their code does, or without it"
    warn(f"{message}.")


def save_adapter(folder: Path, stored: StoredAdapter) -> None:
    """Writes the adapter with its card, but keeps a README.md that is not ours, with a warning.

    Results in the folder stay, unless there are new ones, if they are of the same weights and
    evictor.
    """
    if stored.card.results is None and (folder / adapter_file.CARD).is_file():
        try:
            before = adapter_file.read_adapter(folder)
            if (
                before.card.evictor == stored.card.evictor
                and before.weights_hash() == stored.weights_hash()
            ):
                stored = replace(stored, card=replace(stored.card, results=before.card.results))
        except AdapterError:
            pass  # what is damaged is replaced
    ours = model_card.is_generated_card(folder / README)
    if not ours:
        warn(
            f"Someone wrote or changed {folder / README}, so it stays as it is; remove it to get a new card."
        )
    adapter_file.write_adapter(
        folder, stored, model_card.render_card(stored.card, stored.config) if ours else None
    )


def decide_license(
    card: AdapterCard, license: str | None, readme: str | None = None
) -> AdapterCard:
    """Returns the card under its publisher's license, or else its own; refuses one that allows more
    than the record.

    A license in `readme`, a card that a person wrote, is the publisher's and must agree with
    `license`.
    """
    strict = find_noncommercial_license(card)
    fix = f"publish it under {strict}"
    if readme is not None:
        named = model_card.parse_license(readme)
        expected = strict if license is None else normalize_license(license)
        if (license is not None and named != expected) or (named is None and strict):
            raise AdapterError(
                f"The README.md that someone wrote names {named or 'no license'}, not {expected}; "
                f"write `license: {expected}` there or remove it to get a new card."
            )
        license = named
        fix = "fix the license there"
    recorded = None if normalize_license(card.license or UNKNOWN) == UNKNOWN else card.license
    license = license or recorded or inherit_license(card, card.data) or UNKNOWN
    if strict and not forbids_commercial_use(license):
        raise AdapterError(
            f"The adapter is recorded as, or trained on, {strict}; {license} allows more, so {fix}."
        )
    return replace(card, license=normalize_license(license))


def prepare_upload(
    repo: str, stored: StoredAdapter, license: str | None = None, readme: str | None = None
) -> tuple[StoredAdapter, str]:
    """Returns what `push` uploads, without a network: the adapter under its license, and `readme`
    or a new card.
    """
    if not model_card.is_hub_name(repo):
        raise AdapterError(f"{repo!r} is no name for a repository on the hub; give OWNER/NAME.")
    card = decide_license(stored.card, license, readme)
    if not model_card.is_on_hub(card):
        warn(
            f"The base model is recorded as {card.model!r}, which others cannot load from the hub."
        )
    return replace(stored, card=card), model_card.render_card(
        card, stored.config, repo
    ) if readme is None else readme


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
    """Creates the repository unless it exists, uploads the adapter with its card, and returns the
    commit's address.

    `readme` is a card of the user's own, to upload instead of a generated one. A card on the hub
    that a person wrote or changed stays. Raises AdapterError when the hub refuses or cannot be
    reached.
    """
    stored, text = prepare_upload(repo, stored, license, readme)
    with tempfile.TemporaryDirectory() as folder, _explain_hub_errors(repo):
        adapter_file.write_adapter(Path(folder), stored, text)
        api = HfApi(token=token)
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise AdapterError(
                f"{repo} exists and is public; make it private on the hub or choose another name."
            )
        there = _download_card(api, repo, Path(folder))
        kept = None if readme is not None or model_card.is_generated_card(there) else README
        if kept:
            decide_license(stored.card, None, there.read_text(encoding="utf-8", errors="replace"))
            warn(f"Someone wrote or changed the README.md of {repo}, so it stays as it is.")
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=commit_message or "Upload a restore adapter",
            allow_patterns=[file for file in adapter_file.FILES if file != kept],
        )
    return str(commit.commit_url)


def _download_card(api: HfApi, repo: str, folder: Path) -> Path:
    """Returns the repository's README.md, or a path to nothing."""
    try:
        return Path(api.hf_hub_download(repo, README, local_dir=folder / "hub"))
    except EntryNotFoundError:
        return folder / "hub" / README


@contextmanager
def _explain_hub_errors(repo: str) -> Iterator[None]:
    """Turns whatever the hub's client raises into an AdapterError of one sentence."""
    login = "log in with `hf auth login` or give a token that may write"
    try:
        yield
    except AdapterError:
        raise
    except (
        Exception
    ) as error:  # every version of the client has other kinds where there is no connection
        reason = summarize_error(error)
        message = "The hub cannot be reached ({}); check the network and try again."
        if isinstance(error, LocalTokenNotFoundError):
            message = f"Cannot publish {repo} without a login; {login}."
        elif isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            reason = summarize_error(Exception(error.server_message or "no reason"))
            fix = login if status in (401, 403) else "check the name and try again"
            message = f"The hub refuses {repo} ({status}: {{}}); {fix}."
        elif isinstance(error, ValueError):  # front matter that the hub does not take
            message = f"The hub refuses the card of {repo} ({{}}); fix its README.md."
        raise AdapterError(message.format(reason)) from error


def read_results(path: Path, stored: StoredAdapter) -> list[dict]:
    """Reads what `restorekv eval --json` measured with this very adapter: one row per restored
    cell, in points.

    Conventions other than the adapter's own are in the rows. Raises AdapterError for results of
    other weights, another base model or another evictor.
    """
    card = stored.card
    weights = stored.weights_hash()
    try:
        rows = read_json(path, f"The file of results {path}")["rows"]
        same = [row for row in rows if row["fingerprint"] == card.fingerprint]
        mine = [row for row in same if row["adapter"] == weights]
        results = [
            _pair_with_baselines(row, rows, card)
            for row in mine
            if card.evictor in (None, row["method"])
        ]
        model = rows[0]["model"]
        method = (mine or rows)[0]["method"]
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise AdapterError(
            f"{path} is not what `restorekv eval --json` writes; give its file."
        ) from error
    if not same:
        raise AdapterError(
            f"{path} was measured with another base model ({model}); evaluate this one."
        )
    if not mine:
        raise AdapterError(
            f"{path} has no results of this adapter ({weights}); evaluate it with SPEC@FOLDER."
        )
    if not results:
        raise AdapterError(
            f"{path} was measured with the evictor {method}; evaluate the adapter with {card.evictor}."
        )
    return results


def _pair_with_baselines(row: dict, rows: list[dict], card: AdapterCard) -> dict:
    """Returns a restored cell with the scores of its base and of the full cache, which were asked
    the same.
    """
    asked = "model", "fingerprint", "benchmark", "protocol", "dtype"
    base = "evictor", "ratio", "offset", "on_small_budget", *CONVENTIONS[:2], *HELD
    same = [other for other in rows if all(other[key] == row[key] for key in asked)]
    alone = next(
        each for each in same if not each["restored"] and all(each[key] == row[key] for key in base)
    )
    full = next(each for each in same if each["evictor"] == "full")
    scores = {
        "base": alone["score"],
        "restored": row["score"],
        "low": row["low"],
        "high": row["high"],
    }
    scores |= {"gain": row["gain"], "full": full["score"]}
    kind = {"benchmark": row["benchmark"], "ratio": row["ratio"]}
    kind |= {} if row["protocol"] == "kvpress" else {"protocol": row["protocol"]}
    kind |= {key: row[key] for key in CONVENTIONS if row[key] != getattr(card, key)}
    kind |= {key: row[key] for key, usual in HELD.items() if row[key] != usual}
    counts = {"questions": row["questions"], "documents": row["samples"]}
    return kind | {name: round(score, 1) for name, score in scores.items()} | counts


def merge_results(card: AdapterCard, results: list[dict]) -> AdapterCard:
    """Adds rows, in place of older ones of the same kind."""
    kinds = ("benchmark", "protocol", "ratio", *CONVENTIONS, *HELD)
    fresh = [[row.get(key) for key in kinds] for row in results]
    return replace(
        card,
        results=[row for row in card.results or () if [row.get(key) for key in kinds] not in fresh]
        + results,
    )
