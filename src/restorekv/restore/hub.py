"""Adapters on the Hugging Face hub: fetching them, the authors' own by the model's name, and publishing ours."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.restore import adapter_file, license, model_card
from restorekv.restore.adapter_file import README, Card, Stored

AUTHORS = "higokri/"
MODELS = ("Llama-3.1-8B-Instruct", "Qwen3-8B")
SUFFIXES = {"kvzip": "", "kvzip+": "_plus"}
PUBLISHED = {f"RestoreKV-{model}{suffix}": name for model in MODELS for name, suffix in SUFFIXES.items()}
LICENCE = "cc-by-nc-4.0"  # of all four, by their model cards


def published_name(model: str, evictor: str) -> str:
    """Where the paper's authors keep their adapter for `model` (by the last part of its name) and an evictor's spec."""
    name = f"RestoreKV-{Path(model).name}{SUFFIXES.get(evictor.partition(':')[0], ':none')}"
    if name not in PUBLISHED:
        raise AdapterError(
            f"There is no published adapter for {model} and {evictor}; there are adapters for {' and '.join(MODELS)}, "
            f"each for {' and '.join(SUFFIXES)}."
        )
    return AUTHORS + name


def fetch(
    name: str | Path, revision: str | None = None, token: str | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The folder itself, or one with the adapter's files from the hub."""
    if Path(name).is_dir():
        if revision is not None:
            raise AdapterError(f"{name} is a folder and has no revision {revision!r}; leave it out or give a hub id.")
        return Path(name)
    try:
        return Path(
            snapshot_download(
                str(name), revision=revision, token=token, cache_dir=cache_dir, allow_patterns=[*adapter_file.FILES]
            )
        )
    except Exception as error:  # a malformed id, no network and no such repository are a dozen kinds
        at = f" at revision {revision!r}" if revision else ""
        raise AdapterError(
            f"There is no adapter folder {str(name)!r}, nor can it be fetched from the hub{at}."
        ) from error


def with_origin(card: Card, name: str | Path, folder: Path, bare: bool) -> Card:
    """The card with what only the place tells: the licence in README.md and, of a `bare` one, whose copy it is.

    `bare`: the folder has no restorekv.json. A copy of the authors' adapters is known by the name of a folder on its
    way: their repository's, or the one that the hub's cache makes of it.
    """
    told = model_card.licence_of(folder)
    if license.non_commercial(told) or card.licence is None:
        card = replace(card, licence=told and license.identifier(told))
    if bare:
        parts = (Path(name).name if str(name).startswith(AUTHORS) else "", *reversed(folder.resolve().parts))
        found = [part for part in (part.removeprefix("models--higokri--") for part in parts) if part in PUBLISHED]
        if found:
            card = replace(
                card, source=AUTHORS + found[0], evictor=PUBLISHED[found[0]], licence=card.licence or LICENCE
            )
    return card


def tell_licence(name: str | Path, card: Card) -> None:
    """Warns of a licence that forbids commercial use, and of what the authors' adapters leave open."""
    strict = strictest(card)
    if not strict:
        return
    what = "is" if strict == card.licence else "was trained on data"
    message = f"The adapter {name} {what} licensed {license.title(strict)}: not for commercial use"
    if card.source and "Qwen3" in card.source:
        message += (
            "; not stated is whether it was trained with YaRN, as its authors' code does, or without, as in kvpress"
        )
    warnings.warn(f"{message}.", RestoreKVWarning, stacklevel=3)


def licensed(card: Card, licence: str | None, mend: str = "leave the licence out") -> Card:
    """The card with the licence that its publisher names, or what follows from the data."""
    if licence is None:
        return replace(card, licence=card.licence or license.of_data(license.of_rows(card.data)))
    strict = strictest(card)
    if strict and not license.non_commercial(licence):
        raise AdapterError(
            f"The adapter is recorded as, or trained on, {license.title(strict)}; {licence} allows more, so {mend}."
        )
    return replace(card, licence=license.identifier(licence))


def strictest(card: Card) -> str | None:
    """What forbids commercial use, the adapter's own licence or one of its data."""
    return next(filter(license.non_commercial, (card.licence, *license.of_rows(card.data))), None)


def as_in(readme: str, card: Card, licence: str | None = None) -> Card:
    """The card with the licence that a person's README.md names, not against `licence` nor allowing more."""
    told, strict = model_card.licence_in(readme), strictest(card)
    asked = strict if licence is None else license.identifier(licence)
    if (licence is not None and told != asked) or (told is None and strict):
        raise AdapterError(
            f"The README.md that someone wrote names {told or 'no licence'}, not {asked}; "
            f"write `license: {asked}` there or remove it to get a new card."
        )
    return licensed(card, told, "mend the license there")


def prepare(repo: str, stored: Stored, licence: str | None = None, readme: str | None = None) -> tuple[Stored, str]:
    """What `push` uploads: the adapter under its licence and its card, `readme` if there is one. Needs no network."""
    with one_sentence(repo):
        validate_repo_id(repo)
        if "/" not in repo:
            raise HFValidationError(repo)
    card = licensed(stored.card, licence) if readme is None else as_in(readme, stored.card, licence)
    if not model_card.is_hub_id(card):
        message = f"The base model is recorded as {card.model!r}, which others cannot load from the hub."
        warnings.warn(message, RestoreKVWarning, stacklevel=4)
    return replace(stored, card=card), model_card.text(card, stored.config, repo) if readme is None else readme


def push(
    repo: str,
    stored: Stored,
    *,
    private: bool = False,
    token: str | None = None,
    licence: str | None = None,
    readme: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Creates the repository unless it is there, uploads the adapter with its card, and returns the address.

    `readme` is a card of the user's own, to go up instead of a generated one. A card on the hub that a person has
    written or changed stays. Raises AdapterError when the hub refuses or cannot be reached.
    """
    stored, text = prepare(repo, stored, licence, readme)
    with tempfile.TemporaryDirectory() as folder:
        adapter_file.write(Path(folder), stored, text)
        with one_sentence(repo):
            api = HfApi(token=token)
            api.create_repo(repo, private=private or None, exist_ok=True)
            if private and not api.model_info(repo).private:
                raise AdapterError(f"{repo} exists and is public; make it private on the hub or choose another name.")
            there = card_on_hub(api, repo, Path(folder))
            kept = None if readme is not None or model_card.is_ours(there) else README
            if kept:
                as_in(there.read_text(encoding="utf-8", errors="replace"), stored.card)
                message = f"The README.md of {repo} was written or changed by someone and stays as it is."
                warnings.warn(message, RestoreKVWarning, stacklevel=3)
            message = commit_message or "Upload a restore adapter"
            done = api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=message,
                allow_patterns=[file for file in adapter_file.FILES if file != kept],
            )  # fmt: skip
    return str(done.commit_url)


def card_on_hub(api: HfApi, repo: str, folder: Path) -> Path:
    """The repository's README.md, or a name where nothing is."""
    try:
        return Path(api.hf_hub_download(repo, README, local_dir=folder / "hub"))
    except EntryNotFoundError:
        return folder / "hub" / README


@contextmanager
def one_sentence(repo: str) -> Iterator[None]:
    """Whatever the hub's client raises becomes an AdapterError with one sentence."""
    login = "log in with `hf auth login` or give a token that may write"
    try:
        yield
    except AdapterError:
        raise
    except HFValidationError as error:
        raise AdapterError(f"{repo!r} is no name for a repository on the hub; give OWNER/NAME.") from error
    except LocalTokenNotFoundError as error:
        raise AdapterError(f"Cannot publish {repo} without a login; {login}.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        mend = login if status in (401, 403) else "check the name and try again"
        raise AdapterError(f"The hub refuses {repo} ({status}: {first_line(error.server_message)}); {mend}.") from error
    except ValueError as error:  # front matter that the hub does not take
        raise AdapterError(
            f"The hub refuses the card of {repo} ({first_line(str(error))}); mend its README.md."
        ) from error
    except Exception as error:  # no connection, which every version of the client tells by other kinds
        reason = first_line(str(error)) or type(error).__name__
        raise AdapterError(f"The hub cannot be reached ({reason}); check the network and try again.") from error


def first_line(message: str | None) -> str:
    """Up to the end of the first sentence."""
    return (message or "no reason given").strip().split("\n")[0].split(". ")[0].rstrip(".")
