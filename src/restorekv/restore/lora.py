"""Builds a model's twin with PEFT's LoRA layers: a second tree of modules over the same weights.

The restore pass runs through the twin. The model itself never changes, so other threads may use it meanwhile.
"""

from __future__ import annotations

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from restorekv.errors import AdapterError, first_sentence

NAME = "restorekv"


def build(model: PreTrainedModel, config: LoraConfig) -> tuple[PreTrainedModel, dict[str, LoraLayer]]:
    """Returns the twin and its LoRA layers by module name, in float32; without targets, the model itself."""
    if config.target_modules is not None and not config.target_modules:
        return model, {}
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")
    adapted, flags = twin(model), [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        inject_adapter_in_model(config, adapted, NAME)
        layers = {path: module for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    except (ValueError, TypeError) as error:
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({first_sentence(error)}); "
            "name linear layers that the model has."
        ) from error
    finally:
        for parameter, flag in flags:  # PEFT freezes what it finds
            parameter.requires_grad_(flag)
    targets = config.target_modules if isinstance(config.target_modules, set | list) else ()
    missing = sorted(name for name in targets if not any(f".{path}".endswith(f".{name}") for path in layers))
    if missing:
        raise AdapterError(
            f"{type(model).__name__} has no linear layer {missing[0]!r} for LoRA; name layers that it has."
        )
    for layer in layers.values():
        layer.eval()
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
    return adapted, layers


def twin(module: nn.Module) -> nn.Module:
    """Returns a copy of the tree of modules that shares every parameter, buffer and hook, in half a millisecond."""
    double = object.__new__(type(module))  # FSDP's classes refuse copy.copy
    vars(double).update(vars(module))
    children = module._modules.items()
    vars(double)["_modules"] = {name: child if child is None else twin(child) for name, child in children}
    return double
