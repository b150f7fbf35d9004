"""The shape of a model's cache, and other facts about a model that many modules need."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import ModelError, summarize_error

# The kind of layers, in configs of transformers, that see a whole text.
FULL_ATTENTION = "full_attention"
# The other kinds see all of a text that fits into their window; probe.py finds out its length.
_WHOLE_TEXT_LAYERS = {FULL_ATTENTION, "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class CacheShape:
    """L layers, H KV heads, G query heads per KV head, D head dim, d hidden.

    Of a hybrid model, L counts the layers that see the whole text: they alone are scored, evicted
    and counted (see `list_windows`).
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
        # Linear attention and state-space layers hold no pairs to score or evict.
        others = set(getattr(config, "layer_types", None) or ()) - _WHOLE_TEXT_LAYERS
        if others:
            raise ModelError(
                f"{config.model_type} has {min(others)} layers; "
                "use a model in which every layer attends to the whole context."
            )
        try:
            queries = int(config.num_attention_heads)
            # Without grouped queries every query head has its own KV head.
            heads = int(getattr(config, "num_key_value_heads", None) or queries)
            head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
            return cls(
                layers=list_windows(config).count(None),
                heads=heads,
                groups=queries // heads,
                head_dim=head_dim,
                hidden=config.hidden_size,
            )
        # No heads, or layers of different shapes: configs raise errors of their own classes.
        except Exception as error:
            raise ModelError(
                f"{config.model_type} does not say the size of every layer's heads "
                f"({summarize_error(error)}); "
                "use a decoder with one kind of attention in all layers."
            ) from error


def list_windows(config: Any) -> tuple[int | None, ...]:
    """Return the window W of every layer, None for a layer that sees the whole text.

    A token in a layer with a window sees itself and the W - 1 tokens before it. A hybrid model has
    both kinds of layers. A model with a window in every layer counts as one without windows here:
    nothing of it could be evicted, and it is used up to the length of its window (probe.py).
    """
    config = config.get_text_config()
    kinds = list(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    has_both = set(kinds) == {FULL_ATTENTION, "sliding_attention"}
    if not has_both or type(window) is not int or window < 2:
        return (None,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def describe_windows(config: Any) -> list[int]:
    """Return the windows of a hybrid model's layers as files record them, 0 for the whole text; an
    empty list for any other model.
    """
    windows = [window or 0 for window in list_windows(config)]
    return windows if any(windows) else []


def list_full_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that see the whole text, in ascending order."""
    return [index for index, window in enumerate(list_windows(config)) if window is None]


def is_hybrid(model: PreTrainedModel) -> bool:
    """Return whether some layers of a model have a window and others see the whole text."""
    return any(window is not None for window in list_windows(model.config))


def get_backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of the model that outputs hidden states and skips the LM head."""
    found = model.get_decoder()
    # Llama 4 returns itself.
    if hasattr(found, "layers"):
        return found
    return getattr(found, "model", found)


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
