"""What is looked at in a model's folder before transformers reads it: no pickles, no special files, no other model.

transformers opens files by their names, whatever they are: a FIFO would never end, a pickle may run code when it is
loaded, and a LoRA adapter's config names a base model, which would be loaded in place of the one that the user named.
"""

import stat
from pathlib import Path

from transformers.utils.peft_utils import find_adapter_config_file

from restorekv.bounds import JSON_BYTES, TEXT_BYTES
from restorekv.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
SAFE = ".safetensors"
ADAPTER = "adapter_config.json"
TEMPLATES = "additional_chat_templates"  # the only folder in it from which transformers reads
TOKENIZERS = ("tokenizer.json", "vocab.json")  # which may be larger than other JSON
# What every call that loads a model or a tokenizer is given: Python code of the model's own is never run, and the user
# is never asked, for whatever answers may be a pipe.
NO_CODE = {"trust_remote_code": False}
NO_PICKLES = {"use_safetensors": True}


def check(folder: Path, weights: bool = True) -> None:
    """Refuses a folder with special files, with an adapter or, if `weights` are to be loaded, with pickles alone."""
    names = []
    for place in (folder, folder / TEMPLATES):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            names += check_file(path)
    if ADAPTER in names:
        raise ModelError(adapter_in(str(folder)))
    pickle = next((name for name in names if name.endswith(PICKLES)), None)
    if weights and pickle and not any(name.endswith(SAFE) for name in names):
        raise ModelError(
            f"{folder} has its weights in {pickle} alone, and loading a pickle may run code; convert them to "
            "safetensors, or give a folder that has them."
        )


def check_file(path: Path) -> list[str]:
    """Returns the name of a regular file; nothing for a folder and for a link that leads nowhere."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ModelError(f"Cannot read {path} ({error.strerror}); check its permissions.") from error
    if stat.S_ISDIR(status.st_mode):
        return []
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file, so its folder is no model; remove it.")
    most = TEXT_BYTES if path.name in TOKENIZERS else JSON_BYTES
    if path.suffix == ".json" and status.st_size > most:
        raise ModelError(f"{path} has {status.st_size:,} bytes, more than the {most:,} of such a file; fetch it again.")
    return [path.name]


def check_hub(name: str, local: bool) -> None:
    """Refuses a repository of the hub that is an adapter, like `check`."""
    if find_adapter_config_file(name, local_files_only=local) is not None:
        raise ModelError(adapter_in(name))


def adapter_in(name: str) -> str:
    return (
        f"{name} holds a LoRA adapter ({ADAPTER}), which names another model to be loaded; give that model, or a "
        "folder into which the adapter was merged."
    )
