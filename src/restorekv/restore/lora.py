"""Builds a model's twin with PEFT's LoRA layers: a second tree of modules over the same weights.

The restore pass runs through the twin. The model itself never changes, so other threads may use it
meanwhile.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import AdapterError, summarize_error
from restorekv.files import matches_type
from restorekv.model.linear_layers import drop_wrappers, list_quantized_layers
from restorekv.model.shape import get_backbone, list_windows
from restorekv.restore.choices import LARGEST_ALPHA

NAME = "restorekv"  # of the adapter in PEFT's layers
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
# The settings of PEFT that a restore adapter may have. Others must be off: some import modules or
# open other files.
ALLOWED_SETTINGS = {
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
# Settings that choose layers, in place of which the layers with tensors are listed; and settings
# that change nothing here.
LAYER_SELECTORS = ("exclude_modules", "layers_to_transform", "layers_pattern")
IGNORED_SETTINGS = (
    "peft_type",
    "peft_version",
    "auto_mapping",
    "megatron_core",
    "qalora_group_size",
)


def parse_lora_config(entries: dict[str, Any], lora: dict[str, Tensor]) -> LoraConfig:
    """Return the config that adapter_config.json describes; raise ValueError if it is not a restore
    adapter's or does not fit the tensors.
    """
    defaults = LoraConfig()
    for name, value in entries.items():
        if name in ALLOWED_SETTINGS or name in LAYER_SELECTORS or name in IGNORED_SETTINGS:
            continue
        # Settings that PEFT writes and this project does not use are ignored if they are off.
        if value and value != getattr(defaults, name, None):
            raise ValueError(f"{name} is set, which restore adapters do not use")
    known = {name: entries[name] for name in ALLOWED_SETTINGS if name in entries}
    for name, value in known.items():
        if not matches_type(value, ALLOWED_SETTINGS[name]):
            raise ValueError(f"{name} has the wrong type")
    # PEFT takes some of the names for regular expressions, and one of a stranger's file could run
    # for years. If layers are chosen by more than a list of names, list those that have tensors.
    is_pattern = isinstance(known.get("target_modules"), str)
    if is_pattern or any(entries.get(name) for name in LAYER_SELECTORS):
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
    """Refuse tensors with ranks that the config does not name, and ranks above all tensors'.

    A (r, in) and B (out, r) of every layer must have a rank of the config. The config's largest
    rank must be that of a layer, because PEFT allocates layers of that rank before the tensors are
    compared with them.
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


def extend_rank(config: LoraConfig, rank: int) -> LoraConfig:
    """Return the config of the same LoRA with a higher rank: alpha grows with it, so that the scale
    stays.

    Raises:
        AdapterError: `rank` is lower than the config's, or layers have ranks or scales of their
            own.
    """
    if type(rank) is not int or rank < config.r:
        raise AdapterError(
            f"A LoRA of rank {config.r} cannot be extended to {rank!r}; pass {config.r} or more."
        )
    if config.rank_pattern or config.alpha_pattern:
        raise AdapterError(
            "The layers of this adapter have ranks or scales of their own, so its rank stays "
            f"{config.r}; continue with that, or train a new adapter."
        )
    growth = rank / config.r
    if config.use_rslora:  # its scale is alpha / sqrt(rank)
        growth = math.sqrt(growth)
    alpha: Any = config.lora_alpha * growth  # PEFT declares an integer and scales by any number
    return replace(config, r=rank, lora_alpha=alpha)


def pad_rank(name: str, value: Tensor, fresh: Tensor) -> Tensor:
    """Return a LoRA tensor with the rank of a fresh one, and the same product of A and B.

    Args:
        name: Its name, which tells A from B.
        value: A (r, in) or B (out, r).
        fresh: The tensor of that name of a new LoRA of the same or a higher rank. A's further rows
            are taken from it; B's further columns are zero.
    """
    padded = fresh.clone() if name.endswith(LORA_A) else torch.zeros_like(fresh)
    rows, columns = value.shape
    padded[:rows, :columns] = value
    return padded


def check_lora_fit(name: object, model: PreTrainedModel, lora: dict[str, Tensor]) -> None:
    """Refuse tensors that do not fit the model's layers, before PEFT makes layers of their rank."""
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
    refuse_other_adapters(model)
    adapted = make_twin(model)
    try:
        # PEFT freezes the model's weights and draws new ones on the CPU; the program's gradient
        # flags and random state must not change.
        with (
            keep_gradient_flags(model),
            _hide_other_parts(adapted),
            _hide_model_type(adapted),
            torch.random.fork_rng(devices=[]),
        ):
            inject_adapter_in_model(config, adapted, NAME)
    except (ValueError, TypeError) as error:
        raise AdapterError(
            f"The adapter's LoRA does not fit {type(model).__name__} ({summarize_error(error)}); "
            "name linear layers that the model has (--targets in the shell): "
            f"{_list_linear_names(model)}."
        ) from error
    # Subclasses of LoraLayer, which are modules; PEFT's LoraLayer itself is not. The `lora_A` of
    # embeddings is empty.
    layers: dict[str, Any] = {
        path: module
        for path, module in adapted.named_modules()
        if isinstance(module, LoraLayer) and NAME in module.lora_A
    }
    _check_targets(model, config, layers)
    _check_replaced_functions(model, adapted)
    # The twin's modules have their own training mode, which does not follow the model's.
    adapted.eval()
    for layer in layers.values():
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
    return adapted, {drop_wrappers(path): layer for path, layer in layers.items()}


def _list_linear_names(model: PreTrainedModel) -> str:
    """Return the names of the linear layers in a model's decoder, with commas between them."""
    backbone = get_backbone(model)
    paths = list(list_quantized_layers(backbone))
    paths += [path for path, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    names = {path.rpartition(".")[2] for path in paths}
    return ", ".join(sorted(names))


@contextmanager
def keep_gradient_flags(model: nn.Module) -> Iterator[None]:
    """Restore the `requires_grad` of every weight at the end of the block."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def refuse_other_adapters(model: PreTrainedModel) -> None:
    """Refuse a model with PEFT's layers of other adapters, which a twin made earlier lacks."""
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise AdapterError("The model carries PEFT adapters already; merge or unload them first.")


def list_own_modules(model: PreTrainedModel) -> set[nn.Module]:
    """Return the modules that a twin of the model copies and a restore pass runs: those of its
    decoder, without the input embeddings, as if torch.compile had wrapped none of them.
    """
    found = set()
    for module in get_backbone(model).modules():
        is_wrapper = hasattr(module, "_orig_mod")  # torch.compile's, around the module itself
        if not is_wrapper and not isinstance(module, nn.Embedding):
            found.add(module)
    return found


@contextmanager
def _hide_model_type(adapted: PreTrainedModel) -> Iterator[None]:
    """Let PEFT put LoRA on the linear layers that the targets name, and on nothing else, in the
    block.

    In models with experts that transformers 5 holds in one tensor, PEFT 0.21 takes "gate_proj" for
    a part of that tensor: other layers of that name get no LoRA, ranks change, and no adapter's
    file describes the result. PEFT recognizes such a model by its type, which is hidden here.
    """
    own_config = adapted.config
    config: Any = copy.copy(own_config)
    config.model_type = ""  # `Any` above, since only the class declares it
    adapted.config = config
    try:
        yield
    finally:
        adapted.config = own_config


@contextmanager
def _hide_other_parts(adapted: PreTrainedModel) -> Iterator[None]:
    """Hide the parts of a twin that change nothing of a restore pass from PEFT in the block.

    Such are parts that read no text, as a vision tower, and layers that leave no pairs because they
    share those of earlier ones. They may have layers of the same names, some of classes that PEFT
    does not take (Gemma 4).
    """
    backbone: Any = get_backbone(adapted)
    used = set(backbone.modules()) | {adapted.get_output_embeddings()}
    for layer in backbone.layers[len(list_windows(adapted.config)) :]:
        used -= set(layer.modules())
    hidden = []
    for module in adapted.modules():
        for name, child in module.named_children():
            if used.isdisjoint(child.modules()):
                hidden.append((module, name, child))
    for module, name, _ in hidden:
        module._modules[name] = None
    try:
        yield
    finally:
        for module, name, child in hidden:
            module._modules[name] = child


def _check_targets(model: PreTrainedModel, config: LoraConfig, layers: dict[str, Any]) -> None:
    """Refuse a target that is not the name of a layer; PEFT itself is content if one of them is."""
    if not isinstance(config.target_modules, set | list):
        return
    for name in sorted(config.target_modules):
        if not any(f".{path}".endswith(f".{name}") for path in layers):
            # The message names the targets that were found: in a model with experts, for example,
            # those of attention.
            found = sorted({path.rpartition(".")[2] for path in layers})
            such = f", such as {', '.join(found)}" if found else ""
            raise AdapterError(
                f"{type(model).__name__} has no linear layer {name!r} for LoRA; "
                f"name layers that it has (--targets in the shell){such}."
            )


def _check_replaced_functions(model: PreTrainedModel, adapted: PreTrainedModel) -> None:
    """Refuse a module if another program has replaced its forward pass in such a way that the twin
    would run the model's own layers, without LoRA.
    """
    # The restore pass runs the backbone only.
    running = set(get_backbone(model).modules())
    for path, module in model.named_modules():
        if module not in running:
            continue
        # A layer with LoRA itself is replaced by one that calls it.
        twin = adapted.get_submodule(path)
        has_lora = any(isinstance(part, LoraLayer) for part in twin.modules() if part is not twin)
        for name in ("forward", "_compiled_call_impl"):
            own = vars(module).get(name)
            if own is None or not has_lora or vars(twin).get(name) is not own:
                continue
            raise AdapterError(
                f"Another program has replaced the forward pass of {path} by a function that runs "
                "this module alone, so LoRA could not be used in it; load the model again, and "
                "patch its class instead of the module."
            )


def make_twin(module: nn.Module) -> Any:
    """Return a copy of the tree of modules that shares every parameter, buffer and hook, in half a
    millisecond.

    accelerate, Liger and torch.compile set functions on a module that run this module. In the twin
    such a function runs the twin's module; a compiled one is replaced by what was compiled.
    """
    twins: dict[int, nn.Module] = {}  # by the id of the module that each is a copy of
    twin = _copy_modules(module, twins)
    # After all modules are copied: a function may run a module other than the one that it is on.
    for copied in twin.modules():
        for name, value in vars(copied).items():
            if callable(value):
                vars(copied)[name] = _bind_to_twins(value, twins)
    return twin


def _copy_modules(module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of a tree of modules, and add each of its modules to `twins`."""
    twin = object.__new__(type(module))  # FSDP's classes refuse copy.copy
    vars(twin).update(vars(module))
    twins[id(module)] = twin
    children = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _copy_modules(child, twins)
    vars(twin)["_modules"] = children
    return twin


def _bind_to_twins(function: Any, twins: dict[int, nn.Module]) -> Any:
    """Return a function that runs modules as one that runs their twins; any other is unchanged."""
    if isinstance(function, MethodType):
        owner = twins.get(id(function.__self__))
        return function if owner is None else MethodType(function.__func__, owner)
    # accelerate's hooks are run by a function with the module as its first argument.
    if isinstance(function, partial):
        inner = _bind_to_twins(function.func, twins)
        arguments = [twins.get(id(each), each) for each in function.args]
        if inner is function.func and not any(id(each) in twins for each in function.args):
            return function
        bound = partial(inner, *arguments, **function.keywords)
        vars(bound).update(vars(function))
        return bound
    # torch.compile marks its functions with these attributes; functools.wraps copies them to
    # functions that are not torch.compile's.
    compiled = getattr(function, "_torchdynamo_orig_callable", None)
    is_own = getattr(function, "_torchdynamo_wrapper_id", id(function)) == id(function)
    return _bind_to_twins(compiled, twins) if compiled is not None and is_own else function
