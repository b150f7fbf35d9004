"""What identifies a model in records: its name, its weights, its RoPE and its chat template.

A fingerprint identifies exact weights. It is a hash of 64 values from every weight, which are read
from the device in one transfer. For quantized layers the values are codes and scales as they are
stored; a sketch has the numbers that these represent. The fingerprint is not remembered with the
model, except for one with sharded weights (`remember_identity`): weights can change in ways that
leave no trace but their values (merging a LoRA adapter adds to `weight.data`, which PyTorch's
version counters do not see), and a cache or an adapter for the old weights would then be accepted
for the new ones. Code that needs the identity more than once computes it once and passes it on;
nothing below asks the model again.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.model.linear_layers import (
    dequantize,
    drop_wrappers,
    read_entries,
    settle_quantized_layers,
    space_evenly,
)
from restorekv.model.names import get_model_name
from restorekv.model.prompt import hash_template
from restorekv.model.rope import get_rope_settings, write_rope_settings
from restorekv.model.shape import (
    CacheShape,
    describe_sliding_heads,
    describe_windows,
    find_empty_layers,
    find_state_layers,
    get_dtype_name,
    refuse_offloaded,
)

# Settings that change what a model computes without changing its weights or shape. They count if
# they differ from the default of the architecture.
DECISIVE_SETTINGS = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "norm_topk_prob",
    "num_experts_per_tok",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "routed_scaling_factor",
    "use_qk_norm",
)
SAMPLES = 64  # values of every weight in a fingerprint
SKETCH_VALUES = 1024  # values of all matrices together in a sketch

# Where a model's weights came from, such as "GGUF Q4_1".
WEIGHT_SOURCES: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
# Fingerprint and description of models whose weights are no longer in one place.
_SHARDED_IDENTITIES: WeakKeyDictionary[PreTrainedModel, tuple[str, dict[str, Any]]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class ModelIdentity:
    """What identifies a model in records, as of the moment when it was computed.

    name: what `load_model` would load again; fingerprint: 16 hex digits of config and weights;
    weights: where these came from, and a sketch of them (`describe_weights`); dtype: such as
    "bfloat16"; rope: what determines the rotation of keys; shape: that of the cache; windows: those
    of the layers, [] unless the model is hybrid; sliding_shape: heads and head dim of the layers
    with a window, {} if they are those of the others; template: 16 hex digits of the tokenizer's
    chat template, None if no tokenizer was given.
    """

    name: str
    fingerprint: str
    weights: dict[str, Any]
    dtype: str
    rope: dict[str, Any]
    shape: CacheShape
    windows: list[int]
    sliding_shape: dict[str, int]
    template: str | None = None


def identify_model(model: PreTrainedModel, tokenizer: Tokenizer | None = None) -> ModelIdentity:
    """Compute the identity of a model and, if given, of its tokenizer's chat template."""
    template = None if tokenizer is None else hash_template(tokenizer)
    fingerprint, weights = _SHARDED_IDENTITIES.get(model) or _examine_weights(model)
    return ModelIdentity(
        name=get_model_name(model),
        fingerprint=fingerprint,
        weights=weights,
        dtype=get_dtype_name(model.dtype),
        rope=get_rope_settings(model.config),
        shape=CacheShape.from_model(model),
        windows=describe_windows(model.config),
        sliding_shape=describe_sliding_heads(model.config),
        template=template,
    )


def fingerprint_model(model: PreTrainedModel) -> str:
    """Return 16 hex digits for the config's essentials and samples from every weight.

    Samples are rounded to bfloat16, so that a checkpoint has one fingerprint in float32 and
    bfloat16. PEFT's adapters in the model count while they are active: they change every pair.
    (Restore adapters do not count: they are not in the model itself, but in a twin of it.)
    """
    return (_SHARDED_IDENTITIES.get(model) or _examine_weights(model))[0]


def describe_weights(model: PreTrainedModel) -> dict[str, Any]:
    """Return where the weights came from if known, the architecture, and a sketch in base64.

    The sketch holds the same number of evenly spaced values from every matrix, in bfloat16, in the
    order of the sorted names, without LoRA layers. base_weights.py compares sketches.
    """
    return (_SHARDED_IDENTITIES.get(model) or _examine_weights(model))[1]


def _examine_weights(model: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """Return the fingerprint and the description of a model's weights."""
    refuse_offloaded(model)
    quantized = settle_quantized_layers(model)
    base = _list_base_parameters(model, quantized)
    # Names and values in sorted order, so that the fingerprint does not depend on the order in
    # which a checkpoint lists its weights.
    named = base + _list_active_adapters(model)
    # Vectors such as norms are alike in all models of a family and would hide differences.
    inside = tuple(f"{path}." for path in quantized)
    matrices = {}
    for name, weight in base:
        if weight.ndim > 1 and not name.startswith(inside):
            matrices[name] = weight
    count = max(SKETCH_VALUES // (len(matrices) + len(quantized)), 1)
    for path, layer in quantized.items():
        entries = read_entries(layer, count, model.dtype)
        matrices[f"{path}.weight"] = entries.to(model.device)
    for_fingerprint = [(weight, SAMPLES) for _, weight in named]
    for_sketch = [(matrix, count) for _, matrix in sorted(matrices.items())]
    # In one call, because each call waits for the device.
    rows = _sample_weights([*for_fingerprint, *for_sketch])

    shape = CacheShape.from_model(model)
    digest = hashlib.sha256(_describe_computation(model, shape).encode())
    for (name, _), row in zip(named, rows, strict=False):
        digest.update(name.encode())
        digest.update(row.view(torch.int16).numpy().tobytes())

    config = model.config.get_text_config()
    architecture = {
        name: getattr(config, name, None)
        for name in ("model_type", "vocab_size", "intermediate_size")
    }
    sketch = torch.cat(rows[len(named) :]).view(torch.uint8).numpy().tobytes()
    description = {
        "source": WEIGHT_SOURCES.get(model),
        "architecture": architecture | asdict(shape),
        "sketch": base64.b64encode(sketch).decode("ascii"),
    }
    return digest.hexdigest()[:16], description


def _describe_computation(model: PreTrainedModel, shape: CacheShape) -> str:
    """Return what decides how a model computes with its weights, a line for each fact."""
    config = model.config.get_text_config()
    facts = [
        config.model_type,
        config.vocab_size,
        getattr(config, "intermediate_size", None),
        repr(shape),
        write_rope_settings(model.config),
    ]
    windows = describe_windows(model.config)
    if windows:
        facts.append(str(windows))
    sliding_shape = describe_sliding_heads(model.config)
    if sliding_shape:
        facts.append(str(sliding_shape))
    states = find_state_layers(model.config)
    if states:
        # The sizes of linear attention and of convolutions, which have no names in common.
        entries = config.to_dict()
        sizes = {
            name: value
            for name, value in entries.items()
            if name.startswith(("linear_", "conv_")) and isinstance(value, int | float)
        }
        facts.append(f"{states} {json.dumps(sizes, sort_keys=True)}")
    empty = find_empty_layers(model.config)
    if empty:
        facts.append(f"nothing in {empty}")
    # The defaults of the architecture: `to_diff_dict` compares with those of all configs, and would
    # list what every Llama has.
    has_defaults = not getattr(config, "has_no_defaults_at_init", False)
    defaults = type(config)() if has_defaults else None
    decisive = {}
    for name in DECISIVE_SETTINGS:
        value = getattr(config, name, None)
        if value != getattr(defaults, name, None):
            decisive[name] = value
    if decisive:
        facts.append(json.dumps(decisive, sort_keys=True, default=str))
    return "\n".join(map(str, facts))


def remember_identity(model: PreTrainedModel) -> None:
    """Remember fingerprint and description, before the weights are sharded over processes.

    Neither can be computed afterwards.
    """
    _SHARDED_IDENTITIES[model] = _examine_weights(model)


def _list_base_parameters(
    model: PreTrainedModel, quantized: Mapping[str, nn.Module]
) -> list[tuple[str, Tensor]]:
    """Return the weights sorted by name, as if the model had no layers of PEFT, and the buffers
    that a checkpoint has too, such as Gemma 4's scales of layers and the codes and scales of
    quantized layers.
    """
    added = {id(weight) for _, _, _, weight in _iterate_adapter_weights(model)}
    named = []
    for name, weight in model.named_parameters():
        if id(weight) not in added and weight.numel():
            named.append((drop_wrappers(name), weight))
    for path, module in model.named_modules():
        # PEFT keeps numbers of its adapters in buffers of its own modules.
        if type(module).__module__.partition(".")[0] == "peft":
            continue
        own_path = drop_wrappers(path)
        left_out = () if own_path in quantized else module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.numel() and name not in left_out:
                named.append((f"{own_path}.{name}".lstrip("."), buffer))
    return sorted(named, key=lambda item: item[0])


def _iterate_adapter_weights(
    model: PreTrainedModel,
) -> Iterator[tuple[str, BaseTunerLayer, str, Tensor]]:
    """Yield (path of the layer, layer, name, weight) for every weight that an adapter has in one of
    PEFT's layers.
    """
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        own: Any = module  # each of PEFT's layers is a module as well
        for name, weight in own.named_parameters():
            # For other kinds than LoRA, the layer lists the names of its adapters' weights.
            if "lora_" in name or name.split(".")[0] in module.adapter_layer_names:
                yield path, module, name, weight


def _list_active_adapters(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return the weights of PEFT's active adapters, sorted by names that include the scaling."""
    found = []
    for path, layer, name, weight in _iterate_adapter_weights(model):
        used = set(layer.active_adapters) & set(name.split("."))
        if used and not layer.disable_adapters:
            # The scaling is a factor of every product with the weights.
            factors = getattr(layer, "scaling", None) or {}  # kinds besides LoRA may have none
            scaling = [factors.get(each) for each in sorted(used)]
            found.append((f"{drop_wrappers(path)}.{name} {scaling}", weight))
    return sorted(found, key=lambda item: item[0])


def _sample_weights(wanted: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Return n evenly spaced values of each weight in bfloat16, on the CPU.

    All values are collected on the device of the first weight and leave it in one transfer. The
    indices are computed on the CPU, since devices round float64 differently, and go to a device
    once for all weights of the same size.
    """
    target = wanted[0][0].device
    indices: dict[tuple[int, int, torch.device], Tensor] = {}
    rows = []
    for weight, count in wanted:
        key = weight.numel(), count, weight.device
        if key not in indices:
            indices[key] = space_evenly(weight.numel(), count).to(weight.device)
        values = dequantize(weight.detach()).reshape(-1)[indices[key]]
        rows.append(values.to(device=target, dtype=torch.bfloat16))
    counts = [count for _, count in wanted]
    return list(torch.cat(rows).cpu().split(counts))
