"""Models in GGUF files, the format of llama.cpp: dequantized once into a cache folder, then loaded like any other.

The cache is `$RESTOREKV_CACHE`, else `restorekv` in `$XDG_CACHE_HOME` or `~/.cache`. A model there is a transformers
folder in float32, named by a hash of its file. MARKER is written last and lists the folder's files.
"""

import io
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, logging

from restorekv.errors import ModelError, first_sentence, warn
from restorekv.files import HOST, cache_folder, locked, sweep
from restorekv.model import gguf_tokenizer
from restorekv.seal import file_digest

MAGIC = b"GGUF"
MARKER, VERSION = "gguf.json", 1
SMALL = 2**24  # bytes; of larger files in the cache only the size is checked
NEWER = hasattr(transformers, "GgufConfig")  # versions that may keep weights packed by default
UNPACKED = {"quantization_config": transformers.GgufConfig(dequantize=True)} if NEWER else {}
ELSEWHERE = "give the model's own folder or hub id"


@dataclass(frozen=True)
class Header:
    """The metadata of a GGUF file as Python values, and the names of its tensors."""

    fields: Mapping[str, object]
    tensors: frozenset[str]

    def of_model(self, key: str) -> object:
        """Returns a field whose name starts with the architecture, such as llama.context_length."""
        return self.fields.get(f"{self.fields.get('general.architecture')}.{key}")


def find(name: str) -> Path | None:
    """Returns the GGUF file that `name` is or that the folder `name` holds; None for other models."""
    if os.path.isfile(name):
        with opened(Path(name)) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{name} is a file but not a GGUF file; give a model folder, a GGUF file or a hub id.")
        return Path(name)
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
        files = sorted(Path(name).glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(path.name for path in files)
            raise ModelError(f"The folder {name} holds {len(files)} GGUF files; name one of them: {names}.")
        return files[0] if files else None
    if name.endswith(".gguf"):
        raise ModelError(f"There is no GGUF file {name}; check the path.")
    return None


def opened(file: Path) -> BinaryIO:
    """Opens a file to read its bytes."""
    try:
        return file.open("rb")
    except OSError as error:
        raise ModelError(f"Cannot read {file} ({error.strerror}); check its permissions.") from error


def installed(package: str) -> Path | None:
    """Returns the GGUF file in a package's folder without importing the package."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def prepared(file: Path, name: str) -> Path:
    """Returns the transformers folder made from a GGUF file, now or before; messages call the model `name`."""
    key = f"{file_digest(file)[:16]}-{VERSION}"
    root = cache_folder()
    if root is not None and marker_of(root / key):
        return root / key
    folder = (root if root is not None and writable(root) else Path(temporary(root).name)) / key
    try:
        with alone(folder):
            if not marker_of(folder):
                make(file, name, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot keep {name} in {folder.parent} ({first_sentence(error)}); free some space there or set "
            "RESTOREKV_CACHE to another folder."
        ) from error
    return folder


def description(folder: Path) -> str:
    """Returns the quantization of the GGUF file that a folder was made from, such as "GGUF Q4_1"."""
    return json.loads((folder / MARKER).read_text(encoding="utf-8"))["weights"]


def writable(root: Path) -> bool:
    """Returns whether files can be created there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return True
    except OSError:
        return False


@cache
def temporary(root: Path | None) -> tempfile.TemporaryDirectory:
    """Makes a folder that is removed when the process ends, and warns that nothing will be kept."""
    reason = "There is no home folder" if root is None else f"The cache folder {root} cannot be written"
    effect = "the model is prepared again in every process; set RESTOREKV_CACHE to a folder that can be written"
    warn(f"{reason}, so {effect}.")
    return tempfile.TemporaryDirectory(prefix="restorekv-")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time prepare a folder; the others wait."""
    while True:
        with locked(folder.with_name(f".{folder.name}.lock")) as acquired:
            if acquired:
                yield
                return
        time.sleep(0.2)


def marker_of(folder: Path) -> dict | None:
    """Returns the marker of a folder if every file that it lists has the right size and, unless large, contents."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sound = marker["version"] == VERSION and all(
            (folder / name).stat().st_size == size and (size > SMALL or file_digest(folder / name) == expected)
            for name, (size, expected) in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return marker if sound else None


def make(file: Path, name: str, folder: Path) -> None:
    """Writes the folder under a temporary name and renames it, or leaves nothing."""
    if find_spec("gguf") is None:
        raise ModelError(f"Reading {file} needs the package gguf; run pip install 'restorekv[gguf]'.")
    size = file.stat().st_size / 1e6
    print(f"preparing {name} from its GGUF file ({size:,.0f} MB), once: about half a minute for a small model",
          file=sys.stderr, flush=True)  # fmt: skip
    header = read(file)
    sweep(folder)
    prefix = f".{folder.name}.{HOST}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as parent:
        fresh = Path(parent) / "model"
        convert(file, header, fresh)
        if folder.exists() and not marker_of(folder):
            shutil.rmtree(folder)
        try:
            fresh.rename(folder)
        except OSError:  # on a disk without locks, another process was first
            if not marker_of(folder):
                raise


def read(file: Path) -> Header:
    """Reads the header; refuses damaged files and those that transformers would read incorrectly."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # its parser raises many kinds
        raise ModelError(
            f"The GGUF file {file} is damaged or cut short; fetch it again ({first_sentence(error)})."
        ) from error
    header = Header(fields, frozenset(tensor.name for tensor in reader.tensors))
    if (fields.get("split.count") or 1) > 1:
        raise unreadable(file, f"it is one of {fields['split.count']} parts", "join them with llama-gguf-split --merge")
    scaling = header.of_model("rope.scaling.type")
    if scaling not in (None, "none") or header.tensors & {"rope_freqs.weight", "rope_factors_long.weight"}:
        raise unreadable(file, "transformers does not read its RoPE scaling from GGUF files")
    return header


def convert(file: Path, header: Header, folder: Path) -> None:
    """Writes model and tokenizer as transformers saves them, then MARKER."""
    longest = header.of_model("context_length") or 2048
    try:
        tokenizer = gguf_tokenizer.build(header.fields, int(longest))
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
        with hushed():
            config = AutoConfig.from_pretrained(**source)
            if hasattr(config, "head_dim"):  # for Qwen3, transformers takes its own default
                config.head_dim = header.of_model("attention.key_length") or config.head_dim
            model, report = AutoModelForCausalLM.from_pretrained(
                **source, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
                **UNPACKED,
            )  # fmt: skip
    except Exception as error:  # transformers raises many kinds
        raise unreadable(file, first_sentence(error)) from error
    wrong = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if wrong:  # transformers would draw them at random
        raise unreadable(file, f"it lacks {min(wrong)} or has it in a shape that its header does not give")
    if hasattr(model.config, "quantization_config"):  # newer versions would not save a model marked as quantized
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    with hushed():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {path.name: (path.stat().st_size, file_digest(path)) for path in sorted(folder.iterdir())}
    marker = {"version": VERSION, "file": file.name, "weights": weights(header), "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def unreadable(file: Path, reason: str, remedy: str = ELSEWHERE) -> ModelError:
    return ModelError(f"Cannot use the GGUF file {file}: {reason.rstrip('.')}; {remedy}.")


def weights(header: Header) -> str:
    """Returns the file's quantization, such as "GGUF Q4_1"."""
    from gguf import LlamaFileType

    try:
        kind = LlamaFileType(header.fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return f"GGUF {kind.removeprefix('MOSTLY_').removeprefix('ALL_')}"


@contextmanager
def hushed() -> Iterator[None]:
    """Silences the progress bars and messages of transformers, some of which no setting turns off."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
