"""Up to which position RestoreKV computes what a model computes; probe.py asks the model itself.

A model's class and config decide, so each pair of them is probed once per process, unless what is
wrong is one model's own, such as NaN in its weights. Up to `Support.positions`, windows hide
nothing and RoPE rotates every key the same way, so the model is used; a longer text is refused. In
a hybrid model the windowed layers are computed as such, so only its other layers can limit the
positions.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from restorekv.errors import ModelError, RestoreKVError
from restorekv.model import attention
from restorekv.model.linear_layers import settle_quantized_layers
from restorekv.model.probe import probe_model
from restorekv.model.probe_limits import UNLIMITED, Support, keys_follow_rope
from restorekv.model.probe_passes import REMEDY, InstanceError
from restorekv.model.shape import get_dtype_name, refuse_default_device, refuse_offloaded

__all__ = [
    "UNLIMITED",
    "Support",
    "check_keys_movable",
    "get_support",
    "prepare_model",
    "refuse_autocast",
    "refuse_beyond_exact",
    "refuse_cast_model",
    "refuse_scoring_beyond",
]

_Key = tuple[type, str]
_support_by_key: dict[_Key, Support | RestoreKVError] = {}
_moves: dict[_Key, bool] = {}  # whether cached keys can be moved
_probe_lock = threading.Lock()
_prepared_models: WeakSet[PreTrainedModel] = WeakSet()  # models whose quantized layers are settled


def prepare_model(model: PreTrainedModel) -> None:
    """Route attention through `restorekv.model.attention`.

    Raises ModelError for a model that is not supported.
    """
    get_support(model)
    attention.install_attention(model)


def get_support(model: PreTrainedModel) -> Support:
    """Return the model's limits, which are probed if its class and config are new.

    Raises ModelError for a model or a mode that is not supported, such as a pass inside
    `torch.autocast`, which would mix two dtypes in one cache.
    """
    refuse_default_device()
    kind = model.device.type
    if kind == "meta":
        refuse_offloaded(model)
    refuse_autocast(kind)
    _refuse_training_mode(model)
    _refuse_prompt_adapters(model)
    if model.config.return_dict is False:
        raise ModelError(
            "The model's config has return_dict=False, so that its passes do not name what they "
            "return; set model.config.return_dict = True."
        )
    key = _get_key(model)
    with _probe_lock:
        # For each model, not for its class as the rest is: the layers are the model's own.
        if model not in _prepared_models:
            settle_quantized_layers(model)
            _prepared_models.add(model)
        if key not in _support_by_key:
            try:
                _support_by_key[key] = probe_model(model)
            except InstanceError:
                raise  # and not remembered: another model of the class may be right
            except RestoreKVError as error:
                _support_by_key[key] = error
        found = _support_by_key[key]
    if isinstance(found, RestoreKVError):
        # A new one each time, since a raised exception collects the tracebacks of its raises.
        raise type(found)(str(found))
    return found


def refuse_autocast(kind: str) -> None:
    """Refuse `torch.autocast` for a kind of device, such as "cpu"."""
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        raise ModelError(
            "torch.autocast is on, which would mix dtypes in a cache; call restorekv outside "
            "it, with the model in the dtype that you want."
        )


def refuse_cast_model(model: PreTrainedModel, dtype_name: str) -> None:
    """Refuse a model that was cast to another dtype since a cache was made with it.

    Args:
        model: The model, which is to read the cache.
        dtype_name: The dtype of the model when the cache was made, as the manifest names it.

    Raises:
        ModelError: The model has another dtype now.
    """
    now = get_dtype_name(model.dtype)
    if now != dtype_name:
        raise ModelError(
            f"The cache was made with the model in {dtype_name}, and the model was cast to {now} "
            "since; compress the text again."
        )


def _refuse_training_mode(model: PreTrainedModel) -> None:
    """Refuse a model whose training mode changes its values or leaves out its cache."""
    # The mode of every module counts, not only the model's: a part may have been switched alone.
    if any(module.training and _drops_values(module) for module in model.modules()):
        raise ModelError(
            "The model is in training mode, in which dropout or noise changes every pass at "
            "random; call model.eval() first."
        )
    if any(module.training and _drops_cache(module) for module in model.modules()):
        raise ModelError(
            "The model is in training mode with gradient checkpointing, in which transformers "
            "leaves out the cache; call model.eval() first."
        )


def _refuse_prompt_adapters(model: PreTrainedModel) -> None:
    """Refuse PEFT's adapters that depend on the place of tokens in a whole prompt."""
    # PEFT sets it for prompt tuning, p-tuning and prefix tuning.
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        raise ModelError(
            "The model has a learned prompt of PEFT before whatever it reads, which would not be "
            "before a compressed text; pass the model without it, model.get_base_model()."
        )
    if getattr(peft_config, "alora_invocation_tokens", None):
        raise ModelError(
            "The model has an activated LoRA, which PEFT switches on at certain tokens of a whole "
            "prompt, and restorekv reads prompts in parts; merge a plain LoRA, or pass the model "
            "without it, model.get_base_model()."
        )


def _drops_values(module: nn.Module) -> bool:
    """Return whether a module drops or changes values at random in training mode."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    # Modules that call PyTorch's dropout as a function hold its share, and routers the size of
    # their noise. PEFT holds the shares of all adapters of a layer in one mapping.
    for name, value in vars(module).items():
        if "drop" not in name and "jitter" not in name:
            continue
        shares = value.values() if isinstance(value, dict) else [value]
        if any(_is_positive_number(share) for share in shares):
            return True
    return False


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _drops_cache(module: nn.Module) -> bool:
    """Return whether a module leaves out the cache in training mode."""
    return bool(getattr(module, "gradient_checkpointing", False))


def _get_key(model: PreTrainedModel) -> _Key:
    return type(model), _describe_config(model.config)


def _describe_config(config: PretrainedConfig) -> str:
    """Return what decides a config's computation, as text."""
    entries = config.to_dict()
    for name in ("_name_or_path", "dtype"):
        entries.pop(name, None)
    return json.dumps(entries, sort_keys=True, default=str)


def refuse_beyond_exact(model: PreTrainedModel, positions: int, what: str) -> None:
    """Refuse what needs more positions than are exact."""
    support = get_support(model)
    if positions > support.positions:
        raise ModelError(
            f"{what} needs {positions:,} positions, and in {type(model).__name__} "
            f"{support.beyond}; shorten it, or {REMEDY}."
        )


def refuse_scoring_beyond(model: PreTrainedModel, positions: int) -> None:
    """Refuse to read a text again to score it if its positions change how the model rotates.

    A window does not matter here: the scorer computes attention over the whole text itself.
    """
    support = get_support(model)
    if support.changes_keys and positions > support.positions:
        raise ModelError(
            f"Scoring this text reads it again up to position {positions:,}, and in "
            f"{type(model).__name__} {support.beyond}; "
            "shorten the text, or use an evictor that does not, such as snapkv."
        )


def check_keys_movable(model: PreTrainedModel, rotate: Callable[[Tensor, int], Tensor]) -> None:
    """Refuse a model whose cached keys cannot be moved: rotate(keys, p) has to give the keys of p
    positions later.

    Keys cannot be moved if layers with RoPE alternate with layers without it, or if a model scales
    queries by their position.
    """
    prepare_model(model)
    key = _get_key(model)
    if key not in _moves:
        _moves[key] = keys_follow_rope(model, rotate)
    if not _moves[key]:
        raise ModelError(
            f"{type(model).__name__} has layers that do not rotate keys and queries by RoPE alone, "
            "so its keys cannot be moved; compress the whole text at once, or use a model that "
            "rotates all of them alike."
        )
