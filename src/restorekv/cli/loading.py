"""Helpers for several commands: open a model or cache files, make the sampling."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, logging
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cli import options
from restorekv.cli.terminal import notes
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError, make_printable, summarize_error
from restorekv.files import read_json
from restorekv.generation.sampling import SamplingConfig
from restorekv.model.load import check_dtype, load_model
from restorekv.model.names import find_known_name
from restorekv.storage.cache_file import open_cache_file
from restorekv.storage.manifest import Manifest


def silence_transformers() -> None:
    """Hide transformers' messages and progress bars."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_model(
    name: str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    rope: Mapping[str, object] | float | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Call `load_model` without the messages that transformers prints."""
    check_dtype(dtype)
    silence_transformers()
    with notes.status(f"loading {name}"):
        return load_model(name, dtype, device, rope)


def open_documents(
    files: Sequence[Path], model: str | None, dtype: str | None, device: str
) -> list[CompressedContext]:
    """Load cache files of one model; refuse files that are wrong before the model is opened.

    Args:
        files: The cache files.
        model: The model; None takes the one that the first file names, if that is one of ours.
        dtype: The dtype of the model; None and "auto" take that of the first file.
        device: The device of the model.
    """
    # Every file is checked before the model is loaded, which takes long.
    stored = [open_cache_file(each) for each in files]
    first = stored[0].manifest
    chosen = getattr(torch, first.dtype) if dtype in (None, "auto") else dtype
    name = model or _find_model_of_file(files[0], first.model)
    loaded, tokenizer = open_model(name, chosen, device, _extract_yarn(first.rope))
    return [CompressedContext.load(each, loaded, tokenizer) for each in stored]


def _find_model_of_file(file: Path, name: str) -> str:
    """Return the model that a cache file names, if it is one of ours.

    Any other is refused: no model is opened just because a file names it.
    """
    known = find_known_name(name)
    if known is None:
        raise RestoreKVError(
            f"{file} says that its model is '{make_printable(name)}', which is not opened just "
            "because a file says so; if you know the model, pass its folder, GGUF file or hub id "
            "with --model."
        )
    return known


def _extract_yarn(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the YaRN that a cache was made with, for `load_model`, or None."""
    # In a hybrid model YaRN stretches the layers that see the whole text.
    rope = rope.get("full_attention", rope)
    # Other types of RoPE belong to the model itself and need no setting.
    if rope.get("rope_type") != "yarn":
        return None
    names = ("rope_type", "factor", "original_max_position_embeddings")
    return {name: rope[name] for name in names if name in rope}


def describe_method(m: Manifest) -> str:
    """Name the evictor, the adapter and every setting that is not the default."""
    settings = [
        m.evictor,
        f"n = {m.restore_tokens} restore tokens",
        f"adapter {m.adapter['hash'] if m.adapter else 'none'}",
    ]
    # Defaults are left out: what is named here differs from what `compress` does unasked.
    if m.allocation != "global":
        settings.append(f"allocation {m.allocation}")
    if m.restore_from != "full":
        settings.append(f"restored from the {m.restore_from} cache")
    if m.offset:
        settings.append(f"offset {m.offset}")
    if m.streaming_chunk:
        settings.append(f"streamed {m.streaming_chunk} tokens at a time")
    if m.parts:
        settings.append("1 text" if len(m.parts) == 1 else f"{len(m.parts)} texts")
    if m.kv_dtype != "model":
        settings.append(f"held in {m.kv_dtype}")
    return ", ".join(settings)


def make_sampling(flags: options.SamplingFlags) -> SamplingConfig:
    """Return the `SamplingConfig` of a command's options, with the schema read from its file."""
    settings = {name: value for name, value in vars(flags).items() if value is not None}
    if flags.json_schema is not None:
        settings["json_schema"] = json.dumps(_read_schema(flags.json_schema))
    return SamplingConfig.make(**settings)


def _read_schema(path: Path) -> Any:
    """Return the JSON of a schema's file, which a person wrote; refuse what is not JSON."""
    try:
        return read_json(path, str(path))
    except RestoreKVError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        raise RestoreKVError(
            f"{path} is not JSON ({summarize_error(error.__cause__)}); give a file with a JSON "
            "schema."
        ) from error
