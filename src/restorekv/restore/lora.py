"""Builds PEFT's LoRA layers for a model and leaves the model as it was."""

from __future__ import annotations

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from restorekv.errors import AdapterError, first_sentence

NAME = "restorekv"


def build(model: PreTrainedModel, config: LoraConfig) -> dict[str, LoraLayer]:
    """Returns PEFT's layers around the targets, by module name, in float32; the model stays as it was."""
    if config.target_modules is not None and not config.target_modules:
        return {}
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        inject_adapter_in_model(config, model, NAME)
        layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    except (ValueError, TypeError) as error:
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({first_sentence(error)}); "
            "name linear layers that the model has."
        ) from error
    finally:
        remove(model)
        for parameter, flag in flags:
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
    return layers


def remove(model: PreTrainedModel) -> None:
    """Takes every PEFT layer out of the model."""
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.get_base_layer())
    vars(model).pop("peft_config", None)
