"""Models in GGUF files, the format of llama.cpp: dequantized once into a cache folder, then loaded
like any other.

The cache is `$RESTOREKV_CACHE`, else `restorekv` in `$XDG_CACHE_HOME` or `~/.cache`. A model there
is a transformers folder in float32, named by a hash of its file. MARKER is written last and lists
the folder's files.
"""

import io
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, logging

from restorekv.errors import ModelError, describe_missing_extra, reraise_as, summarize_error, warn
from restorekv.files import (
    HOST,
    file_lock,
    find_cache_folder,
    open_with_size,
    read_record,
    remove_stale_files,
)
from restorekv.model import gguf_header, gguf_tokenizer
from restorekv.model.model_folder import ADAPTER, NO_CODE, explain_adapter
from restorekv.seal import digest_file

MAGIC = b"GGUF"
MARKER = "gguf.json"
VERSION = 1
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # permissions of a file that others can change
_HASHED_BYTES = 2**24  # bytes; of larger files in the cache only the size is checked
_HAS_GGUF_CONFIG = hasattr(
    transformers, "GgufConfig"
)  # versions that may keep weights packed by default
_UNPACKED = (
    {"quantization_config": transformers.GgufConfig(dequantize=True)} if _HAS_GGUF_CONFIG else {}
)
_REMEDY = "give the model's own folder or hub id"


@dataclass(frozen=True)
class Header:
    """The metadata of a GGUF file as Python values, and the names of its tensors."""

    fields: Mapping[str, object]
    tensors: frozenset[str]

    def of_model(self, key: str) -> object:
        """Returns a field whose name starts with the architecture, such as llama.context_length."""
        return self.fields.get(f"{self.fields.get('general.architecture')}.{key}")


def find_file(name: str) -> Path | None:
    """Returns the GGUF file that `name` is or that the folder `name` holds; None for other models."""
    if os.path.exists(name) and not os.path.isdir(name):
        with reraise_as(ModelError), open_with_size(Path(name), name) as (file, _):
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{name} is a file but not a GGUF file; give a model folder, a GGUF file or a hub id."
                )
        return Path(name)
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
        files = sorted(Path(name).glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(path.name for path in files)
            raise ModelError(
                f"The folder {name} holds {len(files)} GGUF files; name one of them: {names}."
            )
        return files[0] if files else None
    if name.endswith(".gguf"):
        raise ModelError(f"There is no GGUF file {name}; check the path.")
    return None


def find_installed(package: str) -> Path | None:
    """Returns the GGUF file in a package's folder without importing the package."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def prepare_folder(file: Path, name: str) -> Path:
    """Returns the transformers folder made from a GGUF file, now or before; messages call the model
    `name`.
    """
    with reraise_as(ModelError):
        key = f"{digest_file(file)[:16]}-{VERSION}"
    root = find_cache_folder()
    if root is not None and is_private_folder(root) and load_marker(root / key):
        return root / key
    folder = find_private_folder() / key
    try:
        with _folder_lock(folder):
            if not load_marker(folder):
                make_folder(file, name, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot keep {name} in {folder.parent} ({summarize_error(error)}); free some space there or set "
            "RESTOREKV_CACHE to another folder."
        ) from error
    return folder


def find_private_folder() -> Path:
    """Returns the folder of prepared models, which nobody else can change; without one, a temporary
    one.
    """
    root = find_cache_folder()
    problem = _find_problem(root)
    return Path(make_temporary_folder(problem).name) if root is None or problem else root


def read_quantization(folder: Path) -> str:
    """Returns the quantization of the GGUF file that a folder was made from, such as "GGUF Q4_1"."""
    return read_record(folder / MARKER, str(folder / MARKER))["weights"]


def _find_problem(root: Path | None) -> str | None:
    """Returns why models cannot be kept in a folder, which is made if there is none; None for a
    good one.
    """
    if root is None:
        return "There is no home folder"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if "RESTOREKV_CACHE" not in os.environ and _is_own(root.stat()):
            # A proof that was kept first made it as the umask says.
            root.chmod(root.stat().st_mode & ~WRITABLE_BY_OTHERS)
        with tempfile.TemporaryFile(dir=root):
            return None if is_private_folder(root) else f"Others can change the cache folder {root}"
    except OSError:
        return f"The cache folder {root} cannot be written"


def is_private_folder(root: Path) -> bool:
    """Returns whether nobody else can replace what this user keeps in a folder."""
    try:
        status = root.stat()
    except OSError:
        return False
    return _is_own(status) and (
        not status.st_mode & WRITABLE_BY_OTHERS
        or bool(status.st_mode & stat.S_ISVTX)
        or os.name != "posix"
    )


def _is_own(status: os.stat_result) -> bool:
    """Returns whether a file belongs to this user or to the system's administrator."""
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def _is_trusted(path: Path, kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
    """Returns whether nobody but this user and the administrator can have written a file, which is
    no link.
    """
    status = path.lstat()
    return (
        kind(status.st_mode)
        and _is_own(status)
        and not (os.name == "posix" and status.st_mode & WRITABLE_BY_OTHERS)
    )


@cache
def make_temporary_folder(problem: str) -> tempfile.TemporaryDirectory:
    """Makes a folder that is removed when the process ends, and warns that nothing will be kept."""
    effect = (
        "the model is prepared again in every process; set RESTOREKV_CACHE to a folder of your own"
    )
    warn(f"{problem}, so {effect}.")
    return tempfile.TemporaryDirectory(prefix="restorekv-")


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time prepare a folder; the others wait."""
    while True:
        with file_lock(folder.with_name(f".{folder.name}.lock")) as acquired:
            if acquired:
                yield
                return
        time.sleep(0.2)


def load_marker(folder: Path) -> dict | None:
    """Returns the marker of a folder that is whole and that nobody else can have written.

    Every file that the marker lists has the right size and, unless it is large, contents.
    """
    try:
        if not (_is_trusted(folder, stat.S_ISDIR) and _is_trusted(folder / MARKER)):
            return None
        marker = read_record(folder / MARKER, str(folder / MARKER))
        sound = marker["version"] == VERSION
        for name, (size, expected) in marker["files"].items() if sound else ():
            path = folder / name
            sound = (
                sound
                and Path(name).name == name
                and _is_trusted(path)
                and path.stat().st_size == size
            )
            sound = sound and (size > _HASHED_BYTES or digest_file(path) == expected)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if sound else None


def make_folder(file: Path, name: str, folder: Path) -> None:
    """Writes the folder under a temporary name and renames it, or leaves nothing."""
    if find_spec("gguf") is None:
        raise ModelError(describe_missing_extra(f"Reading {file}", "gguf", "gguf"))
    size = file.stat().st_size / 1e6
    print(
        f"preparing {name} from its GGUF file ({size:,.0f} MB), once: about half a minute for a small model",
        file=sys.stderr,
        flush=True,
    )
    header = load_header(file)
    remove_stale_files(folder)
    prefix = f".{folder.name}.{HOST}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as parent:
        fresh = Path(parent) / "model"
        convert_file(file, header, fresh)
        with reraise_as(ModelError):
            digest = digest_file(file)
        # Else the folder would be kept as that of another file.
        if not folder.name.startswith(digest[:16]):
            raise ModelError(f"{file} changed while it was read; try again when nobody writes it.")
        for path in (fresh, *fresh.iterdir()):
            path.chmod(path.stat().st_mode & ~WRITABLE_BY_OTHERS)
        if os.path.lexists(folder) and not load_marker(folder):
            _remove(folder)
        try:
            fresh.rename(folder)
        except OSError:  # on a disk without locks, another process was first
            if not load_marker(folder):
                raise


def _remove(place: Path) -> None:
    """Removes what is not a prepared model; of a link, the link alone."""
    if stat.S_ISDIR(place.lstat().st_mode):
        shutil.rmtree(place)
    else:
        place.unlink()


def load_header(file: Path) -> Header:
    """Reads the header; refuses damaged files and those that transformers would read incorrectly."""
    from gguf import GGUFReader

    with reraise_as(ModelError):
        gguf_header.check_header(file)
    if (file.parent / ADAPTER).exists():  # transformers would load the model that it names
        raise ModelError(explain_adapter(str(file.parent)))
    try:
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # its parser raises many kinds
        raise ModelError(
            f"The GGUF file {file} is damaged or cut short; fetch it again ({summarize_error(error)})."
        ) from error
    header = Header(fields, frozenset(tensor.name for tensor in reader.tensors))
    if (fields.get("split.count") or 1) > 1:
        raise _conversion_error(
            file,
            f"it is one of {fields['split.count']} parts",
            "join them with llama-gguf-split --merge",
        )
    scaling = header.of_model("rope.scaling.type")
    if scaling not in (None, "none") or header.tensors & {
        "rope_freqs.weight",
        "rope_factors_long.weight",
    }:
        raise _conversion_error(file, "transformers does not read its RoPE scaling from GGUF files")
    return header


def convert_file(file: Path, header: Header, folder: Path) -> None:
    """Writes model and tokenizer as transformers saves them, then MARKER."""
    longest = header.of_model("context_length") or 2048
    try:
        tokenizer = gguf_tokenizer.build_tokenizer(header.fields, int(longest))
        source = {
            "pretrained_model_name_or_path": str(file.parent),
            "gguf_file": file.name,
            "local_files_only": True,
            **NO_CODE,
        }
        with _silence_transformers():
            config = AutoConfig.from_pretrained(**source)
            if hasattr(config, "head_dim"):  # for Qwen3, transformers takes its own default
                config.head_dim = header.of_model("attention.key_length") or config.head_dim
            model, report = AutoModelForCausalLM.from_pretrained(
                **source,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **_UNPACKED,
            )
    except Exception as error:  # transformers raises many kinds
        raise _conversion_error(file, summarize_error(error)) from error
    wrong = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if wrong:  # transformers would draw them at random
        raise _conversion_error(
            file, f"it lacks {min(wrong)} or has it in a shape that its header does not give"
        )
    # Newer versions would not save a model marked as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    with _silence_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {
        path.name: (path.stat().st_size, digest_file(path)) for path in sorted(folder.iterdir())
    }
    marker = {
        "version": VERSION,
        "file": file.name,
        "weights": _name_quantization(header),
        "files": files,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _conversion_error(file: Path, reason: str, remedy: str = _REMEDY) -> ModelError:
    return ModelError(f"Cannot use the GGUF file {file}: {reason.rstrip('.')}; {remedy}.")


def _name_quantization(header: Header) -> str:
    """Returns the file's quantization, such as "GGUF Q4_1"."""
    from gguf import LlamaFileType

    try:
        kind = LlamaFileType(header.fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return f"GGUF {kind.removeprefix('MOSTLY_').removeprefix('ALL_')}"


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Silences the progress bars and messages of transformers, some of which no setting turns off."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
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
