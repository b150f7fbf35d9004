"""Checks of a model's folder before transformers reads it: no pickles, no special files, no other
model.

transformers opens files by their names, whatever they are: a FIFO would never end, a pickle may run
code when it is loaded, and a LoRA adapter's config names a base model, which would be loaded in
place of the one that the user named.
"""

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from restorekv.errors import (
    ModelError,
    RestoreKVError,
    make_printable,
    reraise_as,
    summarize_error,
)
from restorekv.files import check_elements, open_regular_file, read_bytes
from restorekv.size_limits import JSON_BYTES, JSON_ELEMENTS, TEXT_BYTES

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
_SAFE = ".safetensors"
ADAPTER = "adapter_config.json"
CONFIG = "config.json"
# The only folder in it from which transformers reads.
_TEMPLATE_FOLDER = "additional_chat_templates"
_SUFFIXES_READ_WHOLE = (".json", ".jinja", ".txt", ".model")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")  # which may be larger than other JSON
INDEX = "model.safetensors.index.json"  # which names the files of the weights
TOKENIZER_CONFIG = "tokenizer_config.json"  # which may name files of the tokenizer
# Arguments of every call that loads a model or a tokenizer. The model's own Python code is never
# run, and the user is never asked whether to run it: the answer might come from a pipe.
NO_CODE = {"trust_remote_code": False}
NO_PICKLES = {"use_safetensors": True}


def check_model_folder(folder: Path, weights: bool = True) -> None:
    """Refuse a folder that transformers must not read.

    That is one with special files, with an adapter, with a file that names files elsewhere and, if
    `weights` are to be loaded, one that has no config or has its weights only as pickles.
    """
    names = []
    for directory in (folder, folder / _TEMPLATE_FOLDER):
        if directory.is_dir():
            # transformers reads one level deep, and only from this one folder.
            for path in sorted(directory.iterdir()):
                names += _check_file(path)
    if ADAPTER in names:
        raise ModelError(explain_adapter(str(folder)))
    if weights and CONFIG not in names:
        raise ModelError(
            f"Cannot load the model {str(folder)!r}: the folder has no {CONFIG}, so it is not a "
            "model's; give one that save_pretrained of a model wrote."
        )
    if TOKENIZER_CONFIG in names:
        _check_tokenizer(folder)
    if weights and INDEX in names:
        _check_index(folder / INDEX, names)
    # A folder may hold both; then transformers takes the safetensors.
    pickle = next((name for name in names if name.endswith(_PICKLES)), None)
    if weights and pickle and not any(name.endswith(_SAFE) for name in names):
        raise ModelError(
            f"{folder} has its weights in {pickle} alone, and loading a pickle may run code; "
            "convert them to safetensors, or give a folder that has them."
        )


def _check_file(path: Path) -> list[str]:
    """Return [name] for a regular file and [] for a folder or a broken link; refuse others."""
    try:
        # Follows links: a link to a regular file is one.
        status = path.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ModelError(
            f"Cannot read {path} ({error.strerror}); check its permissions."
        ) from error
    if stat.S_ISDIR(status.st_mode):
        return []
    if not stat.S_ISREG(status.st_mode) or (status.st_size == 0 and _is_proc_file(path)):
        raise ModelError(
            f"{path.parent} has {path.name}, which is neither a file nor a folder, so it is no "
            "model's folder; give one that has a config.json."
        )
    # These are read whole into memory.
    limit = TEXT_BYTES if path.name in _TOKENIZER_FILES else JSON_BYTES
    if path.suffix in _SUFFIXES_READ_WHOLE and status.st_size > limit:
        raise ModelError(
            f"{path} has {status.st_size:,} bytes, more than the {limit:,} of such a file; "
            "fetch it again."
        )
    return [path.name]


def _is_proc_file(path: Path) -> bool:
    """Return whether a file of size 0 has content all the same, as files in /proc do.

    Some of these wait for more content, as a FIFO does.
    """
    try:
        with open_regular_file(path, str(path)) as file:
            # None means that the file waits, b"" that it is empty.
            return file.raw.read(1) != b""
    except RestoreKVError:
        return False  # transformers can't open it either
    except OSError:
        return True


def _check_index(path: Path, names: list[str] | None = None) -> None:
    """Refuse an index of weights that names anything but safetensors in its folder.

    `names` are the files of the folder, None if they are not known.
    """
    weights = _load_json_object(path).get("weight_map")
    if not isinstance(weights, dict):
        raise ModelError(f"{path} names no files of weights; fetch it again.")
    for name in weights.values():
        # transformers would open a path into another folder, or a file of another kind.
        inside = isinstance(name, str) and name.endswith(_SAFE) and name == PurePosixPath(name).name
        if not inside or (names is not None and name not in names):
            raise ModelError(
                f"{path} names '{make_printable(name)}', which is not a safetensors file next to "
                "it; fetch it again."
            )


def _check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer's config that names files of other folders, which would be read."""
    path = folder / TOKENIZER_CONFIG
    entries = _load_json_object(path)
    named = entries.get("fast_tokenizer_files") or []
    if not isinstance(named, list):
        named = [named]
    # Every entry that names a file, whatever transformers calls it today.
    named = named + [value for key, value in entries.items() if key.endswith("_file")]
    for value in named:
        if value is None:
            continue
        # Older tokenizers name paths on their author's machine. Nothing exists at such a path here,
        # so nothing would be read.
        is_inside = isinstance(value, str) and (
            Path(value).name == value or not _is_outside_folder(value, folder)
        )
        if not is_inside:
            raise ModelError(
                f"{path} names the file '{make_printable(value)}', which is not in its folder; "
                "remove that entry."
            )


def _is_outside_folder(name: str, folder: Path) -> bool:
    """Return whether transformers would find the file `name` outside of the model's folder."""
    try:
        # transformers tries the name from the working folder, and inside the model's folder.
        for path in (Path(name), folder / name):
            if os.path.lexists(path) and not path.resolve().is_relative_to(folder.resolve()):
                return True
        return False
    except (OSError, ValueError, RuntimeError):  # a circle of links, or a name that no file has
        return True


def _load_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    `read_json` would refuse 10^30, which transformers writes for "no limit".
    """
    with reraise_as(ModelError):
        raw = read_bytes(path, str(path))
        check_elements(raw, str(path), JSON_ELEMENTS)
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is damaged ({summarize_error(error)}); fetch it again."
        ) from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path} is not a JSON object; fetch it again.")
    return entries


def check_hub(name: str, local: bool) -> None:
    """Refuse a repository of the hub that is an adapter, or that has an index of weights which
    names anything but its own safetensors.
    """
    # transformers would load the base model that the adapter names.
    if find_adapter_config_file(name, local_files_only=local) is not None:
        raise ModelError(explain_adapter(name))
    # None if the weights are not split over several files.
    index = cached_file(
        name,
        INDEX,
        local_files_only=local,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if index is not None:
        _check_index(Path(index))


def explain_adapter(name: str) -> str:
    """Return why a folder or repository with an adapter is not a model, as a sentence."""
    return (
        f"{name} holds a LoRA adapter ({ADAPTER}), which names another model to be loaded; "
        "give that model, or a folder into which the adapter was merged."
    )
