"""Latent attention, as in DeepSeek V3, GLM-4.7-Flash, MiniCPM3 and Kimi Linear.

A layer of this kind caches two vectors for every token, which all query heads share: a latent c,
and a key r with RoPE. From these, its class makes the key [W_h c; r] and the value U_h c of every
head h. With the query [p; q] of a head,

    [p; q] . [W_h c; r] = (W_h^T p) . c + q . r    and    sum_j a_j U_h c_j = U_h sum_j a_j c_j.

So the layer computes the attention of one KV head with the key [c; r] and the value c, between a
projection of every query and one of every result. That is how restorekv reads such layers: its
caches hold [c; r], scores and budgets count one KV head, and a pair is evicted for all query heads
at once. The whole [c; r] is used as the value too, so that keys and values are one tensor, and the
numbers of the result that come from r are dropped.

transformers 5.24 gives a cache c and r, and makes keys and values after it. Here the classes are
changed so that a cache of restorekv gets [c; r], and that no keys and values are made of it. With
any other cache they compute what they always did.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.model.attention import PROJECTIONS, Projection
from restorekv.model.cache_argument import replace_cache
from restorekv.model.linear_layers import compute_matrix_with_gradients

_lock = threading.Lock()


class _JoiningCache:
    """A cache that gets the two vectors of a token as one."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def update(
        self, latents: Tensor, rotated: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append c (B, 1, Q, rank) and r (B, 1, Q, rope) to a layer."""
        joined = torch.cat([latents, rotated], -1)
        return self.cache.update(joined, joined, layer_idx, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def install_latent_attention(model: PreTrainedModel) -> None:
    """Let the layers of a model with latent attention use caches of restorekv."""
    # Every module is looked at each time: PEFT's and torch.compile's classes, and those that also
    # take images, are the same around text models with and without latent attention.
    with _lock:
        for module in model.modules():
            kind = type(module)
            if hasattr(kind, "expand_kv") and kind not in PROJECTIONS:
                _change_class(kind)
                PROJECTIONS[kind] = Projection(_is_joined, _attend_latents)


def _change_class(kind: Any) -> None:
    """Let attention layers of a class read and write [c; r] in caches of restorekv."""
    original_expand_kv = kind.expand_kv
    original_forward = kind.forward

    @functools.wraps(original_expand_kv)
    def expand_kv(self: Any, latents: Any, rotated: Any) -> tuple[Any, Any]:
        if _is_joined(self, latents):
            return latents, rotated
        return original_expand_kv(self, latents, rotated)

    @functools.wraps(original_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def join(cache: Cache) -> Any:
            return _JoiningCache(cache) if _takes_joined(cache, self.layer_idx) else cache

        replace_cache(kwargs, join)
        return original_forward(self, *args, **kwargs)

    kind.expand_kv = expand_kv
    kind.forward = forward


def _takes_joined(cache: Any, index: int) -> bool:
    """Return whether a layer of a cache is one of restorekv's."""
    layers = getattr(cache, "layers", ())
    return index < len(layers) and type(layers[index]).__module__.startswith("restorekv.")


def _is_joined(module: Any, key: Any) -> bool:
    """Return whether keys are [c; r] (B, 1, K, rank + rope), or a layer of a compressed cache."""
    if not isinstance(key, Tensor):
        return True
    return key.shape[1] == 1 and key.shape[-1] == module.kv_lora_rank + module.qk_rope_head_dim


def is_latent(module: nn.Module, key: object) -> bool:
    """Return whether a layer has latent attention and its keys are [c; r]."""
    return type(module) in PROJECTIONS and _is_joined(module, key)


def _attend_latents(module: Any, query: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the attention (B, Q, H * G, D) over a layer's own values.

    Args:
        module: The layer.
        query: (B, H * G, Q, nope + rope), for the layer's own keys.
        attend: Returns the average (B, Q, H * G, rank + rope) of [c; r], for a query (B, H * G, Q,
            rank + rope).
    """
    for_keys, for_values = _split_projection(module, query.dtype)
    plain, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    result = attend(torch.cat([plain @ for_keys, rotated], -1))
    latents = result[..., : module.kv_lora_rank].transpose(1, 2)
    return (latents @ for_values.mT).transpose(1, 2).contiguous()


def join_projections(module: Any, output: Tensor) -> Tensor:
    """Return the matrix (d, H * G * (rank + rope)) that a layer multiplies with averages of [c; r],
    of the matrix (d, H * G * D) of its output layer. It is 0 for the numbers of r.
    """
    _, for_values = _split_projection(module, output.dtype)
    heads = output.unflatten(1, for_values.shape[:2])  # (d, H * G, D)
    joined = torch.einsum("xhd,hdr->xhr", heads, for_values)
    return torch.nn.functional.pad(joined, (0, module.qk_rope_head_dim)).flatten(1)


def _split_projection(module: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return W (H * G, nope, rank) and U (H * G, D, rank) of all heads."""
    matrix = compute_matrix_with_gradients(module.kv_b_proj, dtype).to(dtype)
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    for_keys, for_values = matrix.view(-1, sum(sizes), matrix.shape[-1]).split(sizes, 1)
    return for_keys, for_values
