"""Builds a model's twin with PEFT's LoRA layers: a second tree of modules over the same weights.

The restore pass runs through the twin. The model itself never changes, so other threads may use it
meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import AdapterError, summarize_error
from restorekv.files import matches_type
from restorekv.model.identity import RESTORE_ADAPTER
from restorekv.model.shape import get_backbone

NAME = RESTORE_ADAPTER  # of the adapter in PEFT's layers
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
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
LARGEST_ALPHA = 1e6  # far above any lora_alpha that trains


def parse_lora_config(entries: dict[str, Any], lora: dict[str, Tensor]) -> LoraConfig:
    """Return the config that adapter_config.json describes; raise ValueError where it and the
    tensors differ.
    """
    defaults = LoraConfig()
    for name, value in entries.items():
        if name in TYPES or name in SELECTING or name in DESCRIBING:
            continue
        # Settings that PEFT writes and this project does not use are ignored where they are off.
        if value and value != getattr(defaults, name, None):
            raise ValueError(f"{name} is set, which restore adapters do not use")
    known = {name: entries[name] for name in TYPES if name in entries}
    for name, value in known.items():
        if not matches_type(value, TYPES[name]):
            raise ValueError(f"{name} has another type")
    # PEFT takes some of the names for regular expressions, and a stranger's could run for years.
    # Layers that are chosen by more than a list of names become the list of those with tensors.
    is_pattern = isinstance(known.get("target_modules"), str)
    if is_pattern or any(entries.get(name) for name in SELECTING):
        known["target_modules"] = sorted(
            {name.removesuffix(LORA_A) for name in lora if name.endswith(LORA_A)}
        )
    config = LoraConfig(**known)
    alpha_pattern = config.alpha_pattern or {}
    for name in (*(config.rank_pattern or {}), *alpha_pattern):
        if not name.replace(".", "").replace("_", "").isalnum():
            raise ValueError("a pattern is not the name of a layer")
    alphas = (config.lora_alpha, *alpha_pattern.values())
    has_alphas = all(0 <= alpha <= LARGEST_ALPHA for alpha in alphas)
    if not has_alphas or not 0 <= config.lora_dropout < 1:
        raise ValueError("lora_alpha or lora_dropout is out of range")
    _check_ranks(config, lora)
    return config


def _check_ranks(config: LoraConfig, lora: dict[str, Tensor]) -> None:
    """Refuse tensors whose ranks the config does not name.

    A (r, in) and B (out, r) of every layer have a rank of the config. Its largest rank is that of a
    layer, because PEFT makes layers of it before the tensors are compared with them.
    """
    ranks = {config.r, *(config.rank_pattern or {}).values()}
    layers = set()
    for name in lora:
        if not name.endswith((LORA_A, LORA_B)):
            raise ValueError("a tensor is not LoRA's")
        layers.add(name.removesuffix(LORA_A).removesuffix(LORA_B))
    found = set()
    for layer in layers:
        a = lora.get(layer + LORA_A)
        b = lora.get(layer + LORA_B)
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"the tensors of {layer[:80]} do not fit each other")
        if not a.numel() or not b.numel() or a.shape[0] not in ranks:
            raise ValueError(f"the tensors of {layer[:80]} do not have its rank")
        found.add(a.shape[0])
    if min(ranks) < 1 or (layers and max(ranks) > max(found)):
        raise ValueError("no tensor has its rank")


def check_lora_fit(name: object, model: PreTrainedModel, lora: dict[str, Tensor]) -> None:
    """Refuse tensors for other layers than the model's, before PEFT makes layers of their rank."""
    for key, value in lora.items():
        # The layer's path, before lora_A or lora_B.
        path = key.rsplit(".", 2)[0]
        try:
            layer: Any = model.get_submodule(path)
            if key.endswith(LORA_A):
                fits = value.shape[1] == layer.in_features
            else:
                fits = value.shape[0] == layer.out_features
        except AttributeError:
            fits = False
        if not fits:
            raise AdapterError(
                f"The adapter {name} does not fit this model or its own config (see {key[:120]!r})."
            )


def attach_lora(
    model: PreTrainedModel, config: LoraConfig
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the twin and its LoRA layers by module name, in float32; without targets, the model
    itself.
    """
    if config.target_modules is not None and not config.target_modules:
        return model, {}
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")
    adapted = make_twin(model)
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with _take_targets_as_named(adapted):
            inject_adapter_in_model(config, adapted, NAME)
    except (ValueError, TypeError) as error:
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({summarize_error(error)}); "
            "name linear layers that the model has."
        ) from error
    finally:
        for parameter, flag in flags:  # PEFT freezes what it finds
            parameter.requires_grad_(flag)
    # Subclasses of LoraLayer, which are modules; PEFT's LoraLayer itself is not.
    layers: dict[str, Any] = {
        path: module for path, module in adapted.named_modules() if isinstance(module, LoraLayer)
    }
    _drop_other_parts(adapted, layers)
    _check_targets(model, config, layers)
    # Its modules have modes of their own, which do not follow the model's.
    adapted.eval()
    for layer in layers.values():
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
    return adapted, layers


@contextmanager
def _take_targets_as_named(adapted: PreTrainedModel) -> Iterator[None]:
    """Let PEFT put LoRA on the linear layers that the targets name, and on nothing else, in the
    block.

    Of models whose experts transformers 5 holds in one tensor, PEFT 0.21 takes "gate_proj" for a
    part of that tensor: other layers of that name get no LoRA, ranks change, and no adapter's file
    describes the result. It knows such a model by its type.
    """
    own_config = adapted.config
    config: Any = copy.copy(own_config)
    config.model_type = ""  # declared for the class alone
    adapted.config = config
    try:
        yield
    finally:
        adapted.config = own_config


def _drop_other_parts(adapted: PreTrainedModel, layers: dict[str, Any]) -> None:
    """Take LoRA out of the parts of a twin that read no text, such as a vision tower, whose layers
    have the same names.
    """
    reading = set(get_backbone(adapted).modules()) | {adapted.get_output_embeddings()}
    for path, layer in list(layers.items()):
        if layer not in reading:
            adapted.set_submodule(path, layer.get_base_layer())
            del layers[path]


def _check_targets(model: PreTrainedModel, config: LoraConfig, layers: dict[str, Any]) -> None:
    """Refuse a target that is not the name of a layer; PEFT needs only one that is."""
    if not isinstance(config.target_modules, set | list):
        return
    for name in sorted(config.target_modules):
        if not any(f".{path}".endswith(f".{name}") for path in layers):
            # The others may be there: experts, for one, are not linear layers, and attention has
            # some.
            found = sorted({path.rpartition(".")[2] for path in layers})
            such = f", such as {', '.join(found)}" if found else ""
            raise AdapterError(
                f"{type(model).__name__} has no linear layer {name!r} for LoRA; "
                f"name layers that it has{such}."
            )


def make_twin(module: nn.Module) -> Any:
    """Return a copy of the tree of modules that shares every parameter, buffer and hook, in half a
    millisecond.
    """
    twin = object.__new__(type(module))  # FSDP's classes refuse copy.copy
    vars(twin).update(vars(module))
    vars(twin)["_modules"] = {
        name: None if child is None else make_twin(child) for name, child in module._modules.items()
    }
    return twin
