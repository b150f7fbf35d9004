"""PEFT's LoRA layers for a model that is handed back as it was."""

from __future__ import annotations

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from restorekv.errors import AdapterError

NAME = "restorekv"


def build(model: PreTrainedModel, config: LoraConfig) -> dict[str, LoraLayer]:
    """PEFT's layers around the targets, by module name, float32; the model is handed back as it was."""
    if config.target_modules is not None and not config.target_modules:
        return {}
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        inject_adapter_in_model(config, model, NAME)
        layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    except (ValueError, TypeError) as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({reason}); name linear layers that the model has."
        ) from error
    finally:
        remove(model)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    wanted = config.target_modules
    missing = set() if isinstance(wanted, str) or wanted is None else {
        name for name in wanted if not any(path == name or path.endswith(f".{name}") for path in layers)
    }  # fmt: skip
    if missing:
        raise AdapterError(
            f"{type(model).__name__} has no linear layer {sorted(missing)[0]!r} for LoRA; name layers that it has."
        )
    for layer in layers.values():
        layer.eval()
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
    return layers


def remove(model: PreTrainedModel) -> None:
    """Takes every PEFT layer out again."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module.get_base_layer())
    vars(model).pop("peft_config", None)
