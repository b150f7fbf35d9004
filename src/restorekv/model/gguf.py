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
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    logging,
)

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
from restorekv.model.split_file import SplitFile, join_parts
from restorekv.seal import digest_file

MAGIC = b"GGUF"
MARKER = "gguf.json"
VERSION = 2
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # permissions of a file that others can change
_HASHED_BYTES = 2**24  # bytes; of larger files in the cache only the size is checked
_HAS_GGUF_CONFIG = hasattr(
    transformers, "GgufConfig"
)  # versions that may keep weights packed by default
_UNPACKED = (
    {"quantization_config": transformers.GgufConfig(dequantize=True)} if _HAS_GGUF_CONFIG else {}
)
# The Gemmas of 27 billion parameters, by type and number of layers.
_GEMMA_27B_MODELS = (("gemma2", 46), ("gemma3_text", 62))
_REMEDY = "give the model's own folder or hub id"


@dataclass(frozen=True)
class Header:
    """The metadata of a GGUF file as Python values, and how many numbers each tensor has, by
    name.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, int]

    def of_model(self, key: str) -> Any:
        """Return a field whose name starts with the architecture, such as llama.context_length."""
        return self.fields.get(f"{self.fields.get('general.architecture')}.{key}")


def find_file(name: str) -> Path | None:
    """Return the GGUF file that `name` is or that the folder `name` holds; None for other names."""
    # A file of another kind is refused by its first bytes, before a parser reads it.
    if os.path.exists(name) and not os.path.isdir(name):
        with reraise_as(ModelError), open_with_size(Path(name), name) as (file, _):
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{name} is a file but not a GGUF file; "
                    "give a model folder, a GGUF file or a hub id."
                )
        return Path(name)
    # A folder with a config is a transformers model, even if a GGUF file lies in it.
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
    """Return the GGUF file in a package's folder without importing the package."""
    spec = find_spec(package)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def prepare_folder(file: Path, name: str) -> Path:
    """Return the transformers folder made from a GGUF file, now or before.

    Messages call the model `name`.
    """
    with reraise_as(ModelError):
        # The whole file decides its place in the cache: two files of one name are two models.
        digest = digest_file(file)
    return _find_or_make_folder(digest, name, lambda folder: make_folder(file, name, folder))


def prepare_split_folder(split: SplitFile) -> Path:
    """Return the transformers folder made from the parts of a GGUF file, now or before.

    Its place follows from the whole file's SHA-256, so the parts are read only if it is not there.
    """

    def make(folder: Path) -> None:
        print(f"{split.model}: {split.terms}", file=sys.stderr, flush=True)
        # The joined file is not needed afterwards. `remove_stale_files` removes what a killed
        # process leaves of it.
        prefix = f".{folder.name}.{HOST}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as parent:
            joined = Path(parent) / split.file
            join_parts(split, joined)
            make_folder(joined, split.model, folder)

    return _find_or_make_folder(split.sha256, split.model, make)


def _find_or_make_folder(digest: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the transformers folder for the GGUF file with this SHA-256; `make` it if needed."""
    # VERSION is part of the name, so that what another version of this code made is made again.
    key = f"{digest[:16]}-{VERSION}"
    # A folder that is ready needs no lock, and may lie where this user cannot write.
    root = find_cache_folder()
    if root is not None and is_private_folder(root) and load_marker(root / key):
        return root / key
    folder = find_private_folder() / key
    try:
        with _folder_lock(folder):
            if not load_marker(folder):
                remove_stale_files(folder)
                make(folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot keep {name} in {folder.parent} ({summarize_error(error)}); "
            "free some space there or set RESTOREKV_CACHE to a different folder."
        ) from error
    return folder


def find_private_folder() -> Path:
    """Return the folder of prepared models, which nobody else can change.

    If there can be no such folder, return a temporary one.
    """
    root = find_cache_folder()
    if root is None:
        return Path(make_temporary_folder("There is no home folder").name)
    problem = _explain_unusable_folder(root)
    if problem is not None:
        return Path(make_temporary_folder(problem).name)
    return root


def read_quantization(folder: Path) -> str:
    """Return the quantization of the GGUF file that a folder was made from, such as "GGUF Q4_1"."""
    return read_record(folder / MARKER, str(folder / MARKER))["weights"]


def _explain_unusable_folder(root: Path) -> str | None:
    """Make a folder if there is none; return why models cannot be kept in it, or None."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if "RESTOREKV_CACHE" not in os.environ and _is_own(root.stat()):
            # A saved self-test may have made it earlier, with the permissions of the umask.
            root.chmod(root.stat().st_mode & ~WRITABLE_BY_OTHERS)
        # Only a try shows whether a file can be written: permissions say nothing about full or
        # read-only disks.
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError:
        return f"The cache folder {root} cannot be written"
    if not is_private_folder(root):
        return f"Others can change the cache folder {root}"
    return None


def is_private_folder(root: Path) -> bool:
    """Return whether nobody else can replace what this user keeps in a folder."""
    try:
        status = root.stat()
    except OSError:
        return False
    if not _is_own(status):
        return False
    if os.name != "posix":
        return True  # other systems have no such permissions
    # In a sticky folder, such as /tmp, others can add files but not replace them.
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return is_sticky or not status.st_mode & WRITABLE_BY_OTHERS


def _is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user or to the system's administrator."""
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def _is_trusted(path: Path, kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
    """Return whether nobody but this user and the administrator can have written a file.

    It must be of the file type `kind`, so a link is never trusted.
    """
    status = path.lstat()
    if not kind(status.st_mode) or not _is_own(status):
        return False
    return os.name != "posix" or not status.st_mode & WRITABLE_BY_OTHERS


@cache
def make_temporary_folder(problem: str) -> tempfile.TemporaryDirectory:
    """Make a folder that is removed when the process ends, and warn that nothing will be kept."""
    warn(
        f"{problem}, so the model is prepared again in every process; "
        "set RESTOREKV_CACHE to a folder of your own."
    )
    return tempfile.TemporaryDirectory(prefix="restorekv-")


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Let one process at a time prepare a folder; the others wait."""
    while True:
        # `file_lock` does not wait; it says whether the lock is this process's.
        with file_lock(folder.with_name(f".{folder.name}.lock")) as acquired:
            if acquired:
                yield
                return
        time.sleep(0.2)


def load_marker(folder: Path) -> dict | None:
    """Return the marker of a complete folder that nobody else can have written, None for any other.

    Every file that the marker lists must have the right size and, unless it is large, the right
    contents.
    """
    try:
        if not (_is_trusted(folder, stat.S_ISDIR) and _is_trusted(folder / MARKER)):
            return None
        marker = read_record(folder / MARKER, str(folder / MARKER))
        if marker["version"] != VERSION:
            return None
        for name, (size, expected) in marker["files"].items():
            path = folder / name
            # A name with a folder in it would lead elsewhere.
            if Path(name).name != name or not _is_trusted(path) or path.stat().st_size != size:
                return None
            if size <= _HASHED_BYTES and digest_file(path) != expected:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker


def make_folder(file: Path, name: str, folder: Path) -> None:
    """Write the folder under a temporary name and rename it, or leave nothing."""
    if find_spec("gguf") is None:
        raise ModelError(describe_missing_extra(f"Reading {file}", "gguf", "gguf"))
    size = file.stat().st_size / 1e6
    print(
        f"preparing {name} from its GGUF file ({size:,.0f} MB), once: "
        "half a minute for a small model, about two minutes if its vocabulary is large",
        file=sys.stderr,
        flush=True,
    )
    # Headers can lie about sizes; load_header compares them with the file before a parser believes
    # them.
    header = load_header(file)
    prefix = f".{folder.name}.{HOST}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as parent:
        fresh = Path(parent) / "model"
        convert_file(file, header, fresh)
        with reraise_as(ModelError):
            digest = digest_file(file)
        # Otherwise the folder would be kept under the digest of another file.
        if not folder.name.startswith(digest[:16]):
            raise ModelError(
                f"{file} changed while it was read; try again when no process writes to it."
            )
        # A process with a loose umask would make files that others can change, which `load_marker`
        # refuses.
        for path in (fresh, *fresh.iterdir()):
            path.chmod(path.stat().st_mode & ~WRITABLE_BY_OTHERS)
        # What is there is incomplete, so it may go. The rename then puts all files in place at
        # once.
        if os.path.lexists(folder) and not load_marker(folder):
            _remove_incomplete_folder(folder)
        try:
            fresh.rename(folder)
        except OSError:  # on a disk without locks, another process was first
            if not load_marker(folder):
                raise


def _remove_incomplete_folder(path: Path) -> None:
    """Remove a file or folder that is not a prepared model; of a link, only the link itself."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def load_header(file: Path) -> Header:
    """Read the header; refuse damaged files and those that transformers would read incorrectly."""
    from gguf import GGUFReader

    # Before GGUFReader, which would allocate memory for whatever the header counts.
    with reraise_as(ModelError):
        gguf_header.check_header(file)
    if (file.parent / ADAPTER).exists():  # transformers would load the model that it names
        raise ModelError(explain_adapter(str(file.parent)))
    try:
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # its parser raises many kinds
        raise ModelError(
            f"The GGUF file {file} is damaged or cut short; fetch it again "
            f"({summarize_error(error)})."
        ) from error
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    header = Header(fields, sizes)
    if (fields.get("split.count") or 1) > 1:
        raise _make_conversion_error(
            file,
            f"it is one of {fields['split.count']} parts",
            "join them with llama-gguf-split --merge",
        )
    # transformers would read the numbers of quantized blocks in this machine's order, or refuse the
    # file's version.
    if reader.byte_order == "S":
        raise _make_conversion_error(
            file,
            "its bytes are in the order of another kind of machine",
            "fetch the file for yours",
        )
    # llama.cpp takes a factor without a type, or under its older name, for a linear scaling.
    factor = header.of_model("rope.scaling.factor") or header.of_model("rope.scale_linear") or 1.0
    scaling = header.of_model("rope.scaling.type") or ("none" if factor == 1.0 else "linear")
    # transformers takes frequencies only from the config, so the model of a file with tensors of
    # frequencies would rotate its keys wrongly.
    scaling_tensors = header.tensors.keys() & {"rope_freqs.weight", "rope_factors_long.weight"}
    if scaling != "none" or scaling_tensors:
        raise _make_conversion_error(
            file, "transformers does not read its RoPE scaling from GGUF files"
        )
    return header


def convert_file(file: Path, header: Header, folder: Path) -> None:
    """Write model and tokenizer as transformers saves them, then MARKER."""
    longest = header.of_model("context_length") or 2048
    local = {"gguf_file": file.name, "local_files_only": True, **NO_CODE}
    try:
        tokenizer = gguf_tokenizer.build_tokenizer(header.fields, int(longest))
        with _silence_transformers():
            config = AutoConfig.from_pretrained(str(file.parent), **local)
            _correct_config(config, header)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                **local,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **_UNPACKED,
            )
            model, report = loaded
    except Exception as error:  # transformers raises many kinds
        raise _make_conversion_error(file, summarize_error(error)) from error
    # Weights that the file lacks would be drawn at random, and the model would answer nonsense.
    wrong = list(report["missing_keys"])
    for key, *_ in report["mismatched_keys"]:
        wrong.append(key)
    if wrong:
        raise _make_conversion_error(
            file, f"it lacks {min(wrong)} or has it in a shape that its header does not give"
        )
    _refuse_unread_tensors(file, header, model)
    # Newer versions would not save a model marked as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    with _silence_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = path.stat().st_size, digest_file(path)
    marker = {
        "version": VERSION,
        "file": file.name,
        "weights": _name_quantization(header),
        "files": files,
    }
    # Last: a folder without it was not finished.
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _refuse_unread_tensors(file: Path, header: Header, model: PreTrainedModel) -> None:
    """Refuse a file with tensors that are not in the model.

    transformers takes only those that the config asks for, and GGUF headers do not say whether
    layers have biases. Without this check it would silently make a different model.
    """
    # Tied weights are one tensor under two names.
    read = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    stored = sum(header.tensors.values())
    if sum(read.values()) != stored:
        raise _make_conversion_error(
            file,
            f"transformers reads {sum(read.values()):,} of its {stored:,} weights and leaves out "
            "the others, such as biases",
        )


def _correct_config(config: PretrainedConfig, header: Header) -> None:
    """Set the values that transformers takes from its own defaults instead of from the file."""
    key_length = header.of_model("attention.key_length")
    if hasattr(config, "head_dim"):  # Qwen3's
        config.head_dim = key_length or config.head_dim
    if hasattr(config, "query_pre_attn_scalar"):  # Gemma's; scores are divided by its root
        config.query_pre_attn_scalar = config.head_dim
        # GGUF has no field for it. llama.cpp recognizes the models with another value by their
        # number of layers.
        if (config.model_type, config.num_hidden_layers) in _GEMMA_27B_MODELS:
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    base = header.of_model("rope.freq_base")
    if base and "rope_theta" in (config.rope_parameters or {}):  # Starcoder 2's and StableLM's
        config.rope_parameters["rope_theta"] = base
    window_base = header.of_model("rope.freq_base_swa")
    if window_base and "sliding_attention" in (config.rope_parameters or {}):
        config.rope_parameters["sliding_attention"]["rope_theta"] = window_base


def _make_conversion_error(file: Path, reason: str, remedy: str = _REMEDY) -> ModelError:
    return ModelError(f"Cannot use the GGUF file {file}: {reason.rstrip('.')}; {remedy}.")


def _name_quantization(header: Header) -> str:
    """Return the file's quantization, such as "GGUF Q4_1"."""
    from gguf import LlamaFileType

    try:
        kind = LlamaFileType(header.fields["general.file_type"]).name
    except (KeyError, ValueError):
        return "GGUF"
    return f"GGUF {kind.removeprefix('MOSTLY_').removeprefix('ALL_')}"


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Silence transformers in the block.

    stderr is redirected too, because no setting turns off some progress bars and messages.
    """
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
