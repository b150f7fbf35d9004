"""Loading a model with its tokenizer, and the facts about it that everything else depends on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import attention
from restorekv.errors import ModelError, RestoreKVError

DTYPES = ("auto", "float32", "bfloat16", "float16")
BUNDLED = "bundled"
SAMPLES = 64
FINGERPRINTS: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # of models spread over processes


@dataclass(frozen=True)
class CacheShape:
    """L layers, H KV heads, G query heads per KV head, D head dim, d hidden."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    hidden: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CacheShape":
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ModelError(
                f"{config.model_type} has {', '.join(sorted(kinds - {'full_attention'}))} layers; "
                "use a model in which every layer attends to the whole context."
            )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            groups=config.num_attention_heads // heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
        )


def bundled_path(*parts: str) -> Path:
    """A path inside the package's `bundled` folder."""
    return Path(str(files("restorekv"))).joinpath("bundled", *parts)


def load_model(
    name: str = BUNDLED,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    rope: Mapping[str, object] | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """`name` is "bundled", a local folder or a hub id; attention goes through `restorekv.attention`.

    `rope` changes entries of the config's RoPE, such as {"rope_type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 32768}.
    """
    check_dtype(dtype)
    source = model_source(name)
    device = usable_device(device)
    tokenizer = load_tokenizer(name)
    try:
        config = AutoConfig.from_pretrained(source)
        if rope:
            stretch(config, rope)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, attn_implementation=attention.NAME
        )
    except Exception as error:  # transformers raises a dozen kinds: missing, damaged, unreachable, unknown
        raise unloadable(name, error) from error
    CacheShape.of(model)
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
    source = model_source(name)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=offline)
    except Exception as error:
        raise unloadable(name, error) from error


def model_name(model: PreTrainedModel) -> str:
    """What `load_model` would take to load it again: "bundled", wherever the package lies, a folder or a hub id."""
    path = str(model.config.name_or_path)
    return BUNDLED if path and Path(path).resolve() == bundled_path("model").resolve() else path


def model_source(name: str) -> str:
    """A folder or a hub id that transformers understands."""
    if name != BUNDLED:
        if not name.strip():
            raise ModelError("The model has no name; give a model folder, a hub id or 'bundled'.")
        return name
    folder = bundled_path("model")
    if not folder.is_dir():
        raise ModelError(f"This installation has no bundled model in {folder}; reinstall restorekv or pass --model.")
    return str(folder)


def unloadable(name: str, error: Exception) -> ModelError:
    """One sentence from whatever transformers raised."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")
    return ModelError(f"Cannot load the model {name!r}; give a model folder, a hub id or 'bundled' ({reason}).")


def usable_device(device: str | torch.device) -> torch.device:
    """A device that PyTorch knows and this machine has."""
    try:
        known = torch.device(device)
        torch.empty(0, device=known)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"There is no device {str(device)!r} here; use cpu or one that PyTorch has.") from error
    return known


def decoder(model: PreTrainedModel) -> nn.Module:
    """The backbone, which returns hidden states and skips the LM head."""
    return model.get_decoder()


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
    for name, weight in sorted(model.named_parameters(), key=lambda item: item[0].replace(".base_layer", "")):
        if "lora_" in name or weight.numel() == 0:
            continue
        places = torch.linspace(0, weight.numel() - 1, SAMPLES, dtype=torch.float64).long().to(weight.device)
        sample = weight.detach().reshape(-1)[places].to(torch.bfloat16).cpu()
        digest.update(name.replace(".base_layer", "").encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
