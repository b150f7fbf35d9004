"""Builds a model's twin with PEFT's LoRA layers: a second tree of modules over the same weights.

The restore pass runs through the twin. The model itself never changes, so other threads may use it
meanwhile.
"""

from __future__ import annotations

from typing import Any, Literal

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import AdapterError, summarize_error
from restorekv.files import matches_type

NAME = "restorekv"
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
# The settings of PEFT that a restore adapter may have; of the others, some import modules or open
# other files.
TYPES = {
    "r": int,
    "lora_alpha": float,
    "lora_dropout": float,
    "target_modules": list[str] | str | None,
    "rank_pattern": dict[str, int],
    "alpha_pattern": dict[str, float],
    "use_rslora": bool,
    "fan_in_fan_out": bool,
    "init_lora_weights": bool | Literal["gaussian"],
    "inference_mode": bool,
    "task_type": str | None,
    "base_model_name_or_path": str | None,
    "revision": str | None,
}
SELECTING = ("exclude_modules", "layers_to_transform", "layers_pattern")
DESCRIBING = ("peft_type", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size")
ALPHA = 1e6  # the largest lora_alpha, far above any that trains


def parse_lora_config(entries: dict[str, Any], lora: dict[str, Tensor]) -> LoraConfig:
    """Returns the config that adapter_config.json describes; raises ValueError where it and the
    tensors differ.

    PEFT takes some of the names for regular expressions, and a stranger's could run for years:
    layers that are chosen by more than a list of names become the list of those that have tensors.
    """
    unknown = {
        name: entries[name] for name in entries if name not in (*TYPES, *SELECTING, *DESCRIBING)
    }
    plain = LoraConfig()
    for name, value in unknown.items():
        if value and value != getattr(plain, name, None):
            raise ValueError(f"{name} is set, which restore adapters do not use")
    known = {name: entries[name] for name in TYPES if name in entries}
    for name, value in known.items():
        if not matches_type(value, TYPES[name]):
            raise ValueError(f"{name} has another type")
    if isinstance(known.get("target_modules"), str) or any(entries.get(name) for name in SELECTING):
        known["target_modules"] = sorted(
            {name.removesuffix(SUFFIXES[0]) for name in lora if name.endswith(SUFFIXES[0])}
        )
    config = LoraConfig(**known)
    patterns = (*config.rank_pattern, *config.alpha_pattern)
    if not all(name.replace(".", "").replace("_", "").isalnum() for name in patterns):
        raise ValueError("a pattern is no name of a layer")
    alphas = (config.lora_alpha, *config.alpha_pattern.values())
    if not 0 <= config.lora_dropout < 1 or not all(0 <= alpha <= ALPHA for alpha in alphas):
        raise ValueError("lora_alpha or lora_dropout is out of range")
    _check_ranks(config, lora)
    return config


def _check_ranks(config: LoraConfig, lora: dict[str, Tensor]) -> None:
    """Checks that A (r, in) and B (out, r) of every layer have a rank of the config, which is no
    larger than theirs.
    """
    ranks = {config.r, *config.rank_pattern.values()}
    if not all(name.endswith(SUFFIXES) for name in lora):
        raise ValueError("a tensor is not LoRA's")
    layers = {
        name.removesuffix(suffix) for name in lora for suffix in SUFFIXES if name.endswith(suffix)
    }
    found = set()
    for layer in layers:
        first, second = (lora.get(layer + suffix) for suffix in SUFFIXES)
        if (
            first is None
            or second is None
            or first.ndim != 2
            or second.ndim != 2
            or first.shape[0] != second.shape[1]
        ):
            raise ValueError(f"the tensors of {layer[:80]} do not fit each other")
        if not (first.numel() and second.numel() and first.shape[0] in ranks):
            raise ValueError(f"the tensors of {layer[:80]} do not have its rank")
        found.add(first.shape[0])
    if min(ranks) < 1 or (layers and max(ranks) > max(found)):
        raise ValueError("no tensor has its rank")


def check_lora_fit(name: object, model: PreTrainedModel, lora: dict[str, Tensor]) -> None:
    """Refuses tensors for other layers than the model's, before PEFT makes layers of their rank."""
    for key, value in lora.items():
        path = key.rsplit(".", 2)[0]
        axis = key.endswith(SUFFIXES[0])
        try:
            layer = model.get_submodule(path)
            fits = value.shape[int(axis)] == (layer.in_features if axis else layer.out_features)
        except AttributeError:
            fits = False
        if not fits:
            raise AdapterError(
                f"The adapter {name} does not fit this model or its own config (see {key[:120]!r})."
            )


def attach_lora(
    model: PreTrainedModel, config: LoraConfig
) -> tuple[PreTrainedModel, dict[str, LoraLayer]]:
    """Returns the twin and its LoRA layers by module name, in float32; without targets, the model
    itself.
    """
    if config.target_modules is not None and not config.target_modules:
        return model, {}
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")
    adapted = make_twin(model)
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        inject_adapter_in_model(config, adapted, NAME)
        layers = {
            path: module
            for path, module in adapted.named_modules()
            if isinstance(module, LoraLayer)
        }
    except (ValueError, TypeError) as error:
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({summarize_error(error)}); "
            "name linear layers that the model has."
        ) from error
    finally:
        for parameter, flag in flags:  # PEFT freezes what it finds
            parameter.requires_grad_(flag)
    targets = config.target_modules if isinstance(config.target_modules, set | list) else ()
    missing = sorted(
        name for name in targets if not any(f".{path}".endswith(f".{name}") for path in layers)
    )
    if missing:
        raise AdapterError(
            f"{type(model).__name__} has no linear layer {missing[0]!r} for LoRA; name layers that it has."
        )
    for layer in layers.values():
        layer.eval()
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
    return adapted, layers


def make_twin(module: nn.Module) -> nn.Module:
    """Returns a copy of the tree of modules that shares every parameter, buffer and hook, in half a
    millisecond.
    """
    double = object.__new__(type(module))  # FSDP's classes refuse copy.copy
    vars(double).update(vars(module))
    children = module._modules.items()
    vars(double)["_modules"] = {
        name: child if child is None else make_twin(child) for name, child in children
    }
    return double
