"""Tiny random hybrid models, and what transformers' own model computes over the same pairs.

The oracle is the class's own eager attention in one dense pass in float64. Its mask for every layer
and head is made here, directly from the config.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.cache.states import HAS_STATES
from restorekv.restore.choices import LINEAR_LAYERS
from tests.helpers import decoders, exactness

WINDOW = 16
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# Five layers with a window to one without, two kinds of RoPE, norms of queries and keys; windows on
# the last layers alone; layers without RoPE among those that see everything; learned sinks;
# a cap on logits.
HYBRIDS: dict[str, dict[str, object]] = {
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    },
    # Low caps, which bend most logits.
    "gemma2": {
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "qwen2": {
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
        "use_sliding_window": True,
    },
    "qwen3": {"layer_types": MIXED, "use_sliding_window": True},
    "cohere2": {},
    # With larger weights float32 itself is off by more than 2e-5.
    "gpt_oss": {"layer_types": MIXED, "initializer_range": 0.2},
}
# Gemma 4's larger models have other heads in the layers with a window, and values made from the
# projection of keys; its smaller ones and Gemma 3n add embeddings of ids to every layer, and their
# last layers share the pairs of earlier ones.
SHARING = {"num_hidden_layers": 6, "layer_types": [*MIXED, *MIXED[:2]], "num_kv_shared_layers": 2}
SHARING_KINDS = ("gemma4_sharing", "gemma3n_sharing")
if decoders.HAS_LAYER_CONFIGS:
    HYBRIDS |= {
        "gemma4_text": {
            "layer_types": MIXED,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "initializer_range": 0.2,
        },
        "gemma4_sharing": {"model_type": "gemma4_text", "global_head_dim": 16, **SHARING},
        "gemma3n_sharing": {"model_type": "gemma3n_text", **SHARING},
    }
# Linear attention and short convolutions keep states instead of pairs. They compute in float32 even
# in a model of float64, so that with larger weights the oracle itself is off by more than 2e-5.
WITH_STATES: tuple[str, ...] = ()
if HAS_STATES:
    LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "initializer_range": 0.1}
    CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    OF_STATES: dict[str, dict[str, object]] = {
        # A layer with a state first, as in all of these models, and several in a row.
        "qwen3_5_text": {
            **LINEAR,
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2,
        },
        "qwen3_next": LINEAR,
        "olmo_hybrid": LINEAR,
        # A state-space model, without RoPE.
        "granitemoehybrid": LINEAR,
        # The same, with blocks of experts or of an MLP that hold nothing.
        "nemotron_h": {
            "num_hidden_layers": 7,
            "layer_types": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
                "full_attention",
                "mlp",
            ],
            "initializer_range": 0.1,
        },
        # Pairs and a state in every layer.
        "falcon_h1": {"mamba_d_ssm": 64, "initializer_range": 0.1},
        "lfm2": CONVOLUTIONS,
        "lfm2_moe": CONVOLUTIONS,
    }
    WITH_STATES = tuple(OF_STATES)
    HYBRIDS |= OF_STATES
# Not hybrid, but with pairs of their own kind too: latent attention, with and without a projection
# of queries of low rank. transformers caches latents since it has states.
LATENT: tuple[str, ...] = ()
if HAS_STATES:
    # The last one has layers with states too.
    LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear")
OF_LATENTS: dict[str, dict[str, object]] = {
    kind: {"initializer_range": 0.1, "sliding_window": None} for kind in LATENT
}
Visible = Callable[[int, int], Tensor]
# Models whose layers are like those of another one: the longest tests ask them in `make nightly`
# alone. tests/model/test_families.py compares the answers of every class each time.
ALIKE = {
    "qwen2": "qwen3",
    "gemma3n_sharing": "gemma4_sharing",
    "gemma4_text": "gemma4_sharing",
    "granitemoehybrid": "nemotron_h",
    "qwen3_next": "qwen3_5_text",
    "olmo_hybrid": "qwen3_5_text",
    "lfm2_moe": "lfm2",
    "deepseek_v2": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "minicpm3": "deepseek_v3",
}


def mark_alike(kinds: Iterable[str]) -> list[Any]:
    """Return kinds for `pytest.mark.parametrize`, with those in ALIKE marked as slow."""
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in ALIKE else kind for kind in kinds]


def build_hybrid(kind: str, seed: int = 0, double: bool = False) -> PreTrainedModel:
    """Return a random model with some windows of 16 tokens, or with latent attention."""
    settings = {
        "max_position_embeddings": 4096,
        "sliding_window": WINDOW,
        **(HYBRIDS | OF_LATENTS)[kind],
    }
    model = decoders.build(settings.pop("model_type", kind), seed, **settings)
    model.set_experts_implementation("eager")  # the others have no float64
    return model.double() if double else model


def list_targets(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the linear layers of a model that can have LoRA: experts cannot."""
    names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    return tuple(name for name in LINEAR_LAYERS if name in names)


def full_rows(model: PreTrainedModel) -> dict[int, int]:
    """Return each full-attention layer's row in the scores, by the layer's number.

    If all layers have the same window, all of them count as full-attention layers. Layers that
    share the pairs of an earlier one have none.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if not kinds or set(kinds) == {"sliding_attention"}:
        return {index: index for index in range(config.num_hidden_layers)}
    own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    whole = ("full_attention", "hybrid")
    full = [index for index, kind in enumerate(kinds[:own]) if kind in whole]
    return {index: row for row, index in enumerate(full)}


def reading_rows(model: PreTrainedModel) -> dict[int, int]:
    """Return the row of `full_rows` whose pairs each full-attention layer attends to: of a layer
    that shares pairs, the last row.
    """
    rows = full_rows(model)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for index, kind in enumerate(kinds):
        if kind == "full_attention" and index not in rows:
            rows[index] = max(full_rows(model).values())
    return rows


def show(visible: Tensor, heads: int) -> Tensor:
    """Return the mask (1, H * G, Q, K) that eager attention adds to its logits, from bools (H', Q,
    K).
    """
    dtype = torch.float64
    shown = visible.repeat_interleave(heads // len(visible), 0)
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)[None]


def make_masks(
    model: PreTrainedModel, total: int, rows: list[tuple[int, int, Tensor]], first: int = 0
) -> Callable[[int, int], Tensor]:
    """Return the masks of a dense pass of `total` tokens for `exactness.masked`.

    Args:
        model: The model; its config says the kind of each layer.
        total: The number of tokens.
        rows: (start, end, keep (L, H, K)): in full-attention layers, the tokens [start, end) attend
            only to those of the first K tokens that are in `keep`, and to all others before them.
        first: The number of the first query, if the tokens before it are cached.
    """
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    of_layer = reading_rows(model)
    window = getattr(model.config.get_text_config(), "sliding_window", None)

    def mask_of(layer: int, heads: int) -> Tensor:
        if layer not in of_layer:
            return show((causal & ~causal.tril(-window))[None, first:], heads)
        kv_heads = len(rows[0][2][0]) if rows else 1
        visible = causal.expand(kv_heads, -1, -1).clone()
        for start, end, keep in rows:
            visible[:, start:end, : keep.shape[-1]] &= keep[of_layer[layer]][:, None]
        return show(visible[:, first:], heads)

    return mask_of


def keep_old_states(cache: Cache) -> None:
    """Let layers of transformers replace their states instead of writing into them, as autograd
    needs it.
    """
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            layer.activate_past_recording()
            layer.update_recurrent_state = partial(_replace_state, layer)


def _replace_state(layer: Any, states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
    layer.recurrent_states[state_idx] = states
    return states


@torch.no_grad()
def dense_logits(
    model: PreTrainedModel, ids: Tensor, rows: list[tuple[int, int, Tensor]]
) -> Tensor:
    """Return the logits of one dense pass over ids (1, K) in float64; see `make_masks`."""
    plain = exactness.plain_copy(model).double()
    plain.set_attn_implementation("eager")
    with exactness.masked(plain, make_masks(plain, ids.shape[-1], rows)):
        return plain(input_ids=ids).logits


@torch.no_grad()
def attention_weights(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return transformers' own attention weights (H, G, K, K) of each of the L rows of pairs; where
    several layers share a row's pairs, G counts the query heads of all of them.
    """
    plain = exactness.plain_copy(model).double()
    plain.set_attn_implementation("eager")
    found = {}
    handles = []
    for index in reading_rows(plain):
        module = exactness.find_attention(plain.get_decoder().layers[index])
        handles.append(
            module.register_forward_hook(
                lambda module, args, output, index=index: found.update({index: output[1]})
            )
        )
    plain(input_ids=ids, output_attentions=True)
    for each in handles:
        each.remove()
    of_row: list[list[Tensor]] = [[] for _ in full_rows(plain)]
    for index, row in reading_rows(plain).items():
        module = exactness.find_attention(plain.get_decoder().layers[index])
        groups = module.num_key_value_groups
        if hasattr(module, "kv_lora_rank"):
            groups = len(found[index][0])  # all query heads read one latent
        of_row[row].append(found[index][0].unflatten(0, (-1, groups)))
    return [torch.cat(weights, 1) for weights in of_row]
