"""Models in GGUF files, the format of llama.cpp: dequantized once into a cache folder, then loaded as any other.

The folder is `$RESTOREKV_CACHE`, else `restorekv` in `$XDG_CACHE_HOME` or `~/.cache`. In it a model is a transformers
folder in float32, named by a hash of its file, with MARKER, which is written last and lists what must be there.
"""

import hashlib
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, logging

from restorekv.errors import ModelError, RestoreKVWarning, first_sentence
from restorekv.files import HOST, alive, locked
from restorekv.model import gguf_tokenizer

MAGIC = b"GGUF"
MARKER, VERSION = "gguf.json", 1
SMALL = 2**24  # bytes; larger files of the cache are compared by size alone
NEWER = hasattr(transformers, "GgufConfig")  # versions that may keep weights packed, unless told not to
UNPACKED = {"quantization_config": transformers.GgufConfig(dequantize=True)} if NEWER else {}
ELSEWHERE = "give the model's own folder or hub id"


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata as Python values, and the names of its tensors."""

    fields: Mapping[str, object]
    tensors: frozenset[str]

    def of_model(self, key: str) -> object:
        """A field that has the architecture before its name, as llama.context_length."""
        return self.fields.get(f"{self.fields.get('general.architecture')}.{key}")


def find(name: str) -> Path | None:
    """The GGUF file that `name` stands for, itself or the one in a folder; None for anything else that has a name."""
    if os.path.isfile(name):
        with opened(Path(name)) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{name} is a file but not a GGUF file; give a model folder, a GGUF file or a hub id.")
        return Path(name)
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
        found = sorted(Path(name).glob("*.gguf"))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ModelError(f"The folder {name} holds {len(found)} GGUF files; name one of them: {names}.")
        return found[0] if found else None
    if name.endswith(".gguf"):
        raise ModelError(f"There is no GGUF file {name}; check the path.")
    return None


def opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise ModelError(f"Cannot read {file} ({error.strerror}); check its permissions.") from error


def installed(package: str) -> Path | None:
    """The GGUF file in a package's folder, which is found without importing the package."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def prepared(file: Path, name: str) -> Path:
    """The transformers folder made from a GGUF file, now if not before; `name` is what the user calls the model."""
    with opened(file) as content:
        key = f"{hashlib.file_digest(content, 'sha256').hexdigest()[:16]}-{VERSION}"
    root = cache_folder()
    if root is not None and whole(root / key):
        return root / key
    folder = (root if root is not None and writable(root) else Path(temporary(root).name)) / key
    try:
        with alone(folder):
            if not whole(folder):
                make(file, name, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot keep {name} in {folder.parent} ({first_sentence(error)}); free some space there or set "
            "RESTOREKV_CACHE to another folder."
        ) from error
    return folder


def description(folder: Path) -> str:
    """Which weights a prepared folder holds, as "GGUF Q4_1"."""
    return json.loads((folder / MARKER).read_text(encoding="utf-8"))["weights"]


def cache_folder() -> Path | None:
    """Where prepared models are kept; None where there is no home."""
    own, general = os.environ.get("RESTOREKV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or Path(general or "~/.cache") / "restorekv").expanduser()
    except RuntimeError:
        return None


def writable(root: Path) -> bool:
    """Whether something can be kept there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return True
    except OSError:
        return False


@cache
def temporary(root: Path | None) -> tempfile.TemporaryDirectory:
    """A folder for this process alone, which is removed when the process ends, with a warning."""
    where = "There is no home folder" if root is None else f"The cache folder {root} cannot be written"
    message = "the model is prepared again in every process; set RESTOREKV_CACHE to a folder that can be written"
    warnings.warn(f"{where}, so {message}.", RestoreKVWarning, stacklevel=4)
    return tempfile.TemporaryDirectory(prefix="restorekv-")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time prepares a folder; the others wait, then find it done."""
    while True:
        with locked(folder.with_name(f".{folder.name}.lock")) as mine:
            if mine:
                yield
                return
        time.sleep(0.2)


def whole(folder: Path) -> dict | None:
    """The marker of a folder that holds every file it lists, of its size and, unless it is large, its contents."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sound = marker["version"] == VERSION and all(
            (folder / name).stat().st_size == size and (size > SMALL or digest(folder / name) == expected)
            for name, (size, expected) in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return marker if sound else None


def digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def make(file: Path, name: str, folder: Path) -> None:
    """Writes the whole folder beside its place and puts it there, or leaves nothing."""
    if find_spec("gguf") is None:
        raise ModelError(f"Reading {file} needs the package gguf; run pip install 'restorekv[gguf]'.")
    size = file.stat().st_size / 1e6
    print(f"preparing {name} from its GGUF file ({size:,.0f} MB), once: about half a minute for a small model",
          file=sys.stderr, flush=True)  # fmt: skip
    header = read(file)
    begin = f".{folder.name}.{HOST}-"
    for left in folder.parent.glob(f"{begin}*"):  # of a process that was killed
        number = left.name.removeprefix(begin).partition("-")[0]
        if number.isdecimal() and not alive(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{begin}{os.getpid()}-") as place:
        fresh = Path(place) / "model"
        convert(file, header, fresh)
        if folder.exists() and not whole(folder):
            shutil.rmtree(folder)
        try:
            fresh.rename(folder)
        except OSError:  # a disk without locks, and another process was first
            if not whole(folder):
                raise


def read(file: Path) -> Header:
    """The header of a file that is whole and that transformers reads rightly; refuses others."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # whatever its parser stumbles over first
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
    """Model and tokenizer as transformers saves them, then MARKER."""
    longest = header.of_model("context_length") or 2048
    try:
        tokenizer = gguf_tokenizer.build(header.fields, int(longest))
        place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
        with hushed():
            config = AutoConfig.from_pretrained(**place)
            if hasattr(config, "head_dim"):  # of Qwen3's, transformers takes the one of its own default
                config.head_dim = header.of_model("attention.key_length") or config.head_dim
            model, found = AutoModelForCausalLM.from_pretrained(
                **place, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
                **UNPACKED,
            )  # fmt: skip
    except Exception as error:  # transformers raises a dozen kinds
        raise unreadable(file, first_sentence(error)) from error
    wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if wrong:  # transformers would draw them at random
        raise unreadable(file, f"it lacks {min(wrong)} or has it in a shape that its header does not tell")
    plain(model)
    with hushed():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {path.name: (path.stat().st_size, digest(path)) for path in sorted(folder.iterdir())}
    marker = {"version": VERSION, "file": file.name, "weights": weights(header), "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def unreadable(file: Path, reason: str, remedy: str = ELSEWHERE) -> ModelError:
    return ModelError(f"Cannot use the GGUF file {file}: {reason.rstrip('.')}; {remedy}.")


def plain(model: PreTrainedModel) -> None:
    """Takes off what marks the model as quantized: newer versions of transformers would not save it."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False


def weights(header: Header) -> str:
    """The file's kind of quantization, as "GGUF Q4_1"."""
    from gguf import LlamaFileType

    try:
        kind = LlamaFileType(header.fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return f"GGUF {kind.removeprefix('MOSTLY_').removeprefix('ALL_')}"


@contextmanager
def hushed() -> Iterator[None]:
    """Without the progress bars and remarks of transformers, some of which heed no setting."""
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
