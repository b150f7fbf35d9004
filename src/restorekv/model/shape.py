"""The shape of a model's cache, and other facts about a model that many modules need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.cache.states import HAS_STATES
from restorekv.errors import ModelError, summarize_error

# The kind of layers, in configs of transformers, that see a whole text.
FULL_ATTENTION = "full_attention"
# The other kinds see all of a text that fits into their window, whose length probe_limits.py finds.
_WHOLE_TEXT_LAYERS = {FULL_ATTENTION, "sliding_attention", "chunked_attention"}
# These keep a state of fixed size instead of pairs (cache/states.py).
_STATE_LAYERS = {"linear_attention", "conv"} if HAS_STATES else set()
# These have neither: a block of experts or of an MLP alone (Nemotron-H).
_EMPTY_LAYERS = {"moe", "mlp"} if HAS_STATES else set()
_PAIRLESS_LAYERS = _STATE_LAYERS | _EMPTY_LAYERS
# These have pairs and a state; only models in which all layers do are used (Falcon-H1).
_PARALLEL_LAYERS = {"hybrid"} if HAS_STATES else set()
# What layers call their attention. The second name is GPT-NeoX's; a block of Nemotron-H has one
# module, a mixer, whatever its kind.
_ATTENTION_NAMES = ("self_attn", "attention", "mixer")


@dataclass(frozen=True)
class CacheShape:
    """L layers, H KV heads, G query heads per KV head, D head dim, d hidden.

    Of a hybrid model, L counts the layers that see the whole text: they alone are scored, evicted
    and counted (see `list_windows` and `find_pairless_layers`).
    """

    layers: int
    heads: int
    groups: int
    head_dim: int
    hidden: int

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "CacheShape":
        """Return the shape that the model's config gives; raise ModelError if it gives none."""
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        known = _WHOLE_TEXT_LAYERS
        # Layers with states beside layers with windows are in no model that was tried, nor are
        # layers that hold nothing in a model without states.
        if kinds & _STATE_LAYERS and not kinds - _PAIRLESS_LAYERS - {FULL_ATTENTION}:
            known = {FULL_ATTENTION} | _PAIRLESS_LAYERS
        if kinds == _PARALLEL_LAYERS:
            known = _PARALLEL_LAYERS
        unknown = kinds - known
        if unknown:
            raise ModelError(
                f"{config.model_type} has {min(unknown)} layers; "
                "use a model in which every layer attends to the whole context."
            )
        if kinds and not kinds - _PAIRLESS_LAYERS:
            raise ModelError(
                f"{config.model_type} has no layers with keys and values, of which something could "
                "be evicted; its states have a fixed size already, so use it as it is."
            )
        try:
            heads = list_heads(config)
            windows = list_windows(config)
        # No heads, or none that the config names: configs raise errors of their own classes.
        except Exception as error:
            raise ModelError(
                f"{config.model_type} does not say the size of every layer's heads "
                f"({summarize_error(error)}); use another decoder."
            ) from error
        full = [heads[index] for index in list_full_layers(config)]
        sliding = _select_heads(heads, windows, has_window=True)
        if not full:
            raise ModelError(
                f"{config.model_type} has no layers with keys and values of their own; use the "
                "model that it assists."
            )
        for kind, of_kind in (("see the whole text", full), ("have a window", sliding)):
            if len(set(of_kind)) > 1:
                raise ModelError(
                    f"{config.model_type} has heads of different numbers or sizes in the layers "
                    f"that {kind}; use a decoder in which these layers are alike."
                )
        return cls(
            layers=len(full),
            heads=full[0].heads,
            groups=full[0].groups,
            head_dim=full[0].head_dim,
            hidden=config.hidden_size,
        )


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer: H KV heads, G query heads per KV head, D head dim."""

    heads: int
    groups: int
    head_dim: int


def list_heads(config: Any) -> tuple[LayerHeads, ...]:
    """Return the heads of every layer that has pairs of its own.

    Layers with a window may have other heads than those that see the whole text, as in Gemma 4.
    """
    config = config.get_text_config()
    found = []
    for own in _list_layer_configs(config):
        queries = int(own.num_attention_heads)
        if is_latent_config(own):
            # All query heads read one latent and one rotated key (model/latent.py).
            found.append(LayerHeads(1, queries, own.kv_lora_rank + own.qk_rope_head_dim))
            continue
        # Without grouped queries every query head has its own KV head.
        heads = int(getattr(own, "num_key_value_heads", None) or queries)
        head_dim = int(getattr(own, "head_dim", None) or own.hidden_size // queries)
        found.append(LayerHeads(heads, queries // heads, head_dim))
    return tuple(found)


def is_latent_config(config: Any) -> bool:
    """Return whether a config names the sizes of latent attention."""
    config = config.get_text_config()
    return all(getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))


def _select_heads(
    heads: Sequence[LayerHeads], windows: Sequence[int | None], has_window: bool
) -> list[LayerHeads]:
    """Return the heads of the layers that have a window, or of those that have none."""
    return [
        each
        for each, window in zip(heads, windows[: len(heads)], strict=True)
        if (window is not None) == has_window
    ]


def describe_sliding_heads(config: Any) -> dict[str, int]:
    """Return the KV heads and head dim of the layers with a window as files record them; nothing if
    they are those of the other layers.
    """
    heads = list_heads(config)
    windows = list_windows(config)
    full = _select_heads(heads, windows, has_window=False)
    sliding = _select_heads(heads, windows, has_window=True)
    if not full or not sliding:
        return {}
    found = {"heads": sliding[0].heads, "head_dim": sliding[0].head_dim}
    if found == {"heads": full[0].heads, "head_dim": full[0].head_dim}:
        return {}
    return found


def _list_layer_configs(config: Any) -> list[Any]:
    """Return the config of every layer that has pairs of its own.

    Most models have one config for all layers. The configs of some, such as Gemma 4's, refuse to
    name a number that is not the same in all layers.
    """
    count = config.num_hidden_layers - count_sharing_layers(config)
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[index] for index in range(count)]
    return [config] * count


def count_sharing_layers(config: Any) -> int:
    """Return how many of the last layers have no pairs of their own, and attend to those of the
    last layer of their kind that has some (Gemma 3n, Gemma 4).
    """
    return getattr(config.get_text_config(), "num_kv_shared_layers", None) or 0


def list_windows(config: Any) -> tuple[int | None, ...]:
    """Return the window W of every layer of a full cache, None for a layer that sees the whole text
    or has no pairs. Layers of the model that share the pairs of others have none in the cache.

    A token in a layer with a window sees itself and the W - 1 tokens before it. A hybrid model has
    both kinds of layers. A model with a window in every layer counts as one without windows here:
    nothing of it could be evicted, and it is used up to the length of its window (probe_limits.py).
    """
    config = config.get_text_config()
    own = _list_layer_configs(config)
    kinds = list(getattr(config, "layer_types", None) or ())[: len(own)]
    if set(kinds) != {FULL_ATTENTION, "sliding_attention"}:
        return (None,) * (len(own) + len(list_parallel_layers(config)))
    windows: list[int | None] = []
    for kind, layer_config in zip(kinds, own, strict=True):
        window = None
        if kind == "sliding_attention":
            window = getattr(layer_config, "sliding_window", None)
            if type(window) is not int or window < 2:
                return (None,) * len(own)
        windows.append(window)
    return tuple(windows)


def list_pair_layers(config: Any) -> tuple[int, ...]:
    """Return for every layer of the model the layer whose pairs it attends to: itself, or, for the
    last layers of some models, the last one of its kind that has pairs of its own.
    """
    config = config.get_text_config()
    total = config.num_hidden_layers
    own = total - count_sharing_layers(config)
    found = list(range(own))
    kinds = list(getattr(config, "layer_types", None) or [FULL_ATTENTION] * total)
    for kind in kinds[own:]:
        sources = [index for index in range(own) if kinds[index] == kind]
        if not sources:
            raise ModelError(
                f"{config.model_type} has no layer of the kind {kind!r} with pairs of its own; use "
                "another decoder."
            )
        found.append(sources[-1])
    return tuple(found)


def count_readers(config: Any) -> list[int]:
    """Return for every layer of the L that see the whole text how many layers attend to its pairs:
    1, or more where later layers share them.
    """
    sources = list_pair_layers(config)
    return [sources.count(index) for index in list_full_layers(config)]


def describe_windows(config: Any) -> list[int]:
    """Return the windows of a hybrid model's layers as files record them, 0 for the whole text; an
    empty list for any other model.
    """
    windows = [window or 0 for window in list_windows(config)]
    return windows if any(windows) else []


def list_parallel_layers(config: Any) -> dict[int, int]:
    """Return, by the number of each layer of the model that has pairs and a state, the number of
    the layer of a cache that has its state (parallel_states.py); most models have no such layers.
    """
    first = int(config.get_text_config().num_hidden_layers)
    parallel = _find_layers(config, _PARALLEL_LAYERS)
    return {index: first + place for place, index in enumerate(parallel)}


def find_state_layers(config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers of a cache that keep a state instead of pairs, in ascending
    order (cache/states.py); most models have none.
    """
    return _find_layers(config, _STATE_LAYERS) + tuple(list_parallel_layers(config).values())


def find_empty_layers(config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers that keep neither pairs nor a state, in ascending order."""
    return _find_layers(config, _EMPTY_LAYERS)


def find_pairless_layers(config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers of a cache that have no pairs, in ascending order: those
    that keep a state, and those that keep nothing.
    """
    return _find_layers(config, _PAIRLESS_LAYERS) + tuple(list_parallel_layers(config).values())


def _find_layers(config: Any, kinds: set[str]) -> tuple[int, ...]:
    """Return the numbers of the layers of some kinds, in ascending order."""
    of_layers = list(getattr(config.get_text_config(), "layer_types", None) or ())
    return tuple(index for index, kind in enumerate(of_layers) if kind in kinds)


def list_full_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that have pairs of their own and see the whole text, in
    ascending order.
    """
    pairless = find_pairless_layers(config)
    found = []
    for index, window in enumerate(list_windows(config)):
        if window is None and index not in pairless:
            found.append(index)
    return found


def is_hybrid(model: PreTrainedModel) -> bool:
    """Return whether some layers of a model see the whole text, and others have a window or no
    pairs.
    """
    has_windows = any(window is not None for window in list_windows(model.config))
    return has_windows or bool(find_pairless_layers(model.config))


def has_own_layers(model: PreTrainedModel) -> bool:
    """Return whether a full cache of a model needs other layers than those that transformers adds
    by itself.
    """
    return is_hybrid(model) or is_latent_config(model.config)


def get_backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model that outputs hidden states and skips the LM head."""
    found = model.get_decoder()
    # Llama 4 returns itself.
    if hasattr(found, "layers"):
        return found
    return getattr(found, "model", found)


def find_attention(layer: Any) -> Any:
    """Return the attention of a layer that attends; None if it is not where the models that are
    supported have it.
    """
    for name in _ATTENTION_NAMES:
        attention = getattr(layer, name, None)
        if isinstance(attention, nn.Module):
            return attention
    return None


def list_attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention of every layer that attends: of all but those without pairs."""
    layers: Any = get_backbone(model).layers
    pairless = find_pairless_layers(model.config)
    return [find_attention(layer) for index, layer in enumerate(layers) if index not in pairless]


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as files and results have it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def get_vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many token ids the model has embeddings for, which may be more than the
    tokenizer has.
    """
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def leave_out_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Return the keyword argument that turns off the loss of a mixture of experts' routers, or none
    if the config does not ask for that loss.

    A config may still ask for it after training, and the loss cannot take our masks.
    """
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


def refuse_default_device() -> None:
    """Refuse any default device of PyTorch but the CPU, where ids and random numbers are made
    before they go to the model's device.
    """
    default = torch.get_default_device()
    if default.type != "cpu":
        raise ModelError(
            f"PyTorch's default device is {str(default)!r}, and restorekv makes tensors on the CPU "
            "first; leave the default at 'cpu' (torch.set_default_device) and move the model: "
            f"model.to({str(default)!r})."
        )


def refuse_offloaded(model: PreTrainedModel) -> None:
    """Refuse a model with weights that are not in memory: accelerate leaves them on PyTorch's
    device "meta" and fetches them for every pass.
    """
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise ModelError(
                f"Not all weights of the model are in memory ({name} is on the device 'meta', as "
                "accelerate's offloading leaves it); load the model on devices with room for all "
                "of it."
            )


def compute_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits (..., V) of last hidden states (..., d).

    They are scaled and capped as Granite, HyperCLOVA X, Cohere and Gemma do.
    """
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1
    divisor = getattr(config, "logits_scaling", None) or 1
    # HyperCLOVA X multiplies by the number that Granite divides by.
    if config.model_type == "hyperclovax":
        divisor = 1 / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    head: Any = model.get_output_embeddings()
    scores = head(hidden) * scale / divisor
    if cap:
        scores = torch.tanh(scores / cap) * cap
    return scores
