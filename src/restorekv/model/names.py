"""The models that have a name in this package, and the folders of the files that ship for them."""

from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel

TINY = "tiny"  # the project's own small model, in the distribution restorekv-tiny
SMOLLM2 = "smollm2"
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GEMMA3 = "gemma3-270m"
GEMMA3_ID = "google/gemma-3-270m"
NAMES = (SMOLLM2, GEMMA3, TINY)
SHIPPING = (TINY, SMOLLM2)  # the models for which a distribution ships adapters and gates
# Where a checkout has those distributions. Next to an installed package, there is no such folder.
DISTRIBUTIONS = Path(__file__).parents[3] / "distributions"


def tiny_path(*parts: str) -> Path:
    """Return a path in the folder of the tiny model."""
    return shipped_path(TINY, *parts)


def shipped_path(name: str, *parts: str) -> Path:
    """Return a path in the folder of the files that ship for a model; it may not exist.

    The files are data in a separate distribution: `restorekv-tiny` has the package
    `restorekv_tiny` with `model`, `adapters/EVICTOR` and `gates/KIND.safetensors`.
    """
    package = f"restorekv_{name}"
    # Code that runs from a checkout takes the data of that checkout, whatever is installed, so that
    # both are of one revision and a worktree needs no installation.
    folder = DISTRIBUTIONS / f"restorekv-{name}" / package
    if not folder.is_dir():
        found = find_spec(package)
        if found is not None and found.submodule_search_locations:
            folder = Path(found.submodule_search_locations[0])
    return folder.joinpath(*parts)


def is_shipping_installed(name: str) -> bool:
    """Return whether what ships for a model is on this machine."""
    return shipped_path(name).is_dir()


def get_install_command(name: str) -> str:
    """Return the command that installs what ships for a model, to end a sentence with."""
    return f"pip install restorekv-{name} (in a checkout: ./distributions/restorekv-{name})"


def get_model_name(model: PreTrainedModel) -> str:
    """Return the name with which `load_model` would load the model again."""
    # `load_model` writes the name there; a model loaded by transformers has its folder.
    path = str(model.config.name_or_path)
    if path and Path(path).resolve() == tiny_path("model").resolve():
        return TINY
    return to_canonical_name(path)


def to_canonical_name(name: str) -> str:
    """Return the one name that records use for a model.

    "gemma3-270m" is only the quantized model of its packages, so Gemma's hub id stays unchanged.
    """
    return SMOLLM2 if name == SMOLLM2_ID else name


def to_hub_id(name: str) -> str:
    """Return the hub id of a model that has a name here, and any other name unchanged."""
    return {SMOLLM2: SMOLLM2_ID, GEMMA3: GEMMA3_ID}.get(name, name)


def find_known_name(name: str) -> str | None:
    """Return the record name of a model that has a name in this package, None for any other.

    A file may name its model, but it may not choose what is opened or downloaded: a folder's config
    can name code, and a hub id anybody's weights. So a name from a file is only compared with the
    names that are known.
    """
    name = to_canonical_name(name)
    return name if name in NAMES else None
