"""The passes with which the probe of a model (probe.py) sees what the model computes.

The model reads seven tokens. Meanwhile every call of the attention function and every mask is
recorded, or the input and output of every layer's attention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from restorekv.errors import ModelError
from restorekv.model import attention
from restorekv.model.cache_argument import pass_cache
from restorekv.model.linear_layers import list_quantized_layers
from restorekv.model.observer import HOOKS_LOCK
from restorekv.model.shape import (
    CacheShape,
    find_empty_layers,
    find_pairless_layers,
    find_state_layers,
    get_dtype_name,
    list_pair_layers,
    list_parallel_layers,
    list_windows,
)

# Tokens that are read; the first, the third and the last are one token at three positions.
IDS = (5, 6, 5, 6, 7, 8, 5)
START = 5  # position of the first one
CACHED = 4  # tokens of a ragged cache, and of a short pass
# Keyword arguments of the attention function that change nothing here without dropout, or that
# other checks compare.
KNOWN_OPTIONS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "cache",
    "past_key_values",
    "past_key_value",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
    "s_aux",  # learned sinks, which probe.py compares
    "softcap",  # a cap on logits, which it compares too
    "sliding_window",
    "logits_to_keep",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "target_dtype",
    "deterministic",
    "labels",
    "input_ids",
}
REMEDY = "use a decoder with RoPE and layers that attend to the whole text"


class InstanceError(ModelError):
    """A fault of one model, which says nothing about others of its class and config."""


@dataclass(frozen=True)
class AttentionCall:
    """What the attention function got from one layer."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    options: dict[str, Any]


@dataclass
class PassRecord:
    """The calls of a pass, and the functions of the masks that were made for it."""

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor | None, Callable]] = field(default_factory=list)


def make_refusal(model: PreTrainedModel, why: str) -> ModelError:
    """Return the error of a model that `why` describes, such as "has no RoPE"."""
    return ModelError(f"{type(model).__name__} {why}; {REMEDY}.")


class ProbedModel:
    """A model that is probed, and the tokens that it reads."""

    def __init__(self, model: PreTrainedModel, backbone: nn.Module, shape: CacheShape) -> None:
        self.model: Any = model
        self.backbone = backbone
        self.shape = shape
        # Of every layer with pairs of its own, None for the whole text.
        self.windows = list_windows(self.model.config)
        # Of every layer, the one whose pairs it attends to.
        self.pair_layers = list_pair_layers(self.model.config)
        # The layers of a cache that keep a state.
        self.states = find_state_layers(self.model.config)
        # Where layers have both pairs and a state: the model's layer of each state's layer.
        parallel = list_parallel_layers(self.model.config)
        self._owners = {number: index for index, number in parallel.items()}
        self.parallel = tuple(parallel)
        # The layers that keep nothing.
        self.empty = find_empty_layers(self.model.config)
        layers = range(len(self.pair_layers))
        pairless = find_pairless_layers(self.model.config)
        # The layers that attend, and the layer whose pairs each of them attends to.
        self.attending = [index for index in layers if index not in pairless]
        self.attended = [self.pair_layers[index] for index in self.attending]
        # The dtype whose rounding may explain a difference: the model's, or one of 16 bits, since
        # quantized layers do not compute more exactly whatever dtype is around them.
        self.dtype = self.model.dtype
        if torch.finfo(self.dtype).bits > 16 and list_quantized_layers(model):
            self.dtype = torch.bfloat16
        vocabulary_size = self.model.get_input_embeddings().weight.shape[0]
        # (1, 7); a tiny vocabulary has fewer ids.
        self.ids = torch.tensor([IDS], device=model.device) % vocabulary_size
        self.positions = torch.arange(START, START + len(IDS), device=model.device)[None]

    def read_tokens(
        self,
        part: Any,
        cache: Cache,
        tokens: slice = slice(None),
        positions: Tensor | None = None,
        numbered: bool = True,
    ) -> Any:
        """Return what a pass over some of the tokens gives.

        Args:
            part: The model, or its backbone.
            cache: Where the pairs go.
            tokens: Which of the tokens are read; all by default.
            positions: (1, number of tokens read), if they are not the tokens' own.
            numbered: Whether the part is told the positions.
        """
        options = {}
        if numbered:
            options["position_ids"] = self.positions[:, tokens] if positions is None else positions
        return part(
            input_ids=self.ids[:, tokens], use_cache=True, **options, **pass_cache(part, cache)
        )

    def list_modules_with_states(self) -> list[nn.Module]:
        """Return the layers of the model that keep a state."""
        layers: Any = self.backbone.layers
        return [layers[self._owners.get(index, index)] for index in self.states]

    def get_state_layer(self, cache: Cache, index: int) -> Any:
        """Return the layer of a cache that has a state, of which `index` is the number in a cache
        of restorekv. transformers' own have it in the layer of the model.
        """
        if index < len(cache.layers):
            return cache.layers[index]
        return cache.layers[self._owners[index]]

    def make_refusal(self, why: str) -> ModelError:
        """Return the error of a model that `why` describes."""
        return make_refusal(self.model, why)

    def is_close(self, one: Tensor, other: Tensor, strict: bool = False) -> bool:
        """Return whether two results are equal up to the rounding of the model's layers."""
        return is_close(one, other, self.dtype, strict)

    def check_finite(self, result: Tensor) -> None:
        """Refuse NaN and infinite numbers, with which no check would mean anything."""
        if not result.isfinite().all():
            raise InstanceError(
                f"{type(self.model).__name__} computes numbers that are not finite in "
                f"{get_dtype_name(self.model.dtype)}: its weights are damaged or too large for it; "
                "load it in float32, or fetch it again."
            )


@contextmanager
def record_pass(model: PreTrainedModel) -> Iterator[PassRecord]:
    """Record the calls of the attention function and the masks that are made in the block.

    Plain causal masks, which are otherwise left out, are made too.
    """
    record = PassRecord()

    def on_call(*arguments) -> None:
        call = AttentionCall(*arguments)
        _check_options(model, call)  # before attention is computed, which fails with some of them
        record.calls.append(call)

    def on_mask(mask: Tensor | None, function: Callable) -> None:
        record.masks.append((mask, function))

    with attention.inspect_attention(on_call, on_mask):
        yield record


@contextmanager
def trace_modules(
    modules: Sequence[nn.Module], replacements: Sequence[Tensor] | None = None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record input and output (1, Q, d) of modules in this thread's pass in the block;
    `replacements` are the inputs that the modules get instead of their own.
    """
    trace: list[tuple[Tensor, Tensor]] = []
    inputs: list[Tensor] = []
    own_thread = threading.get_ident()

    def before_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        # Hooks see the passes of other threads too, and without kwargs while PyTorch is still
        # registering them.
        if kwargs is None or threading.get_ident() != own_thread:
            return None
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if replacements is not None:
            hidden = replacements[len(inputs)]
            if "hidden_states" in kwargs:
                kwargs = {**kwargs, "hidden_states": hidden}
            else:
                args = (hidden, *args[1:])
        inputs.append(hidden)
        return args, kwargs

    def after_layer(module: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() == own_thread:
            attended = output[0] if isinstance(output, tuple) else output
            trace.append((inputs[len(trace)], attended))

    handles = []
    with HOOKS_LOCK:
        for each in modules:
            handles.append(each.register_forward_pre_hook(before_layer, with_kwargs=True))
            handles.append(each.register_forward_hook(after_layer))
    try:
        yield trace
    finally:
        with HOOKS_LOCK:
            for handle in handles:
                handle.remove()


def _check_options(model: PreTrainedModel, call: AttentionCall) -> None:
    """Refuse settings of a layer's attention that the ragged attention lacks."""
    others = []
    for name, value in call.options.items():
        if name not in KNOWN_OPTIONS and value is not None:
            others.append(name)
    if others:
        raise make_refusal(model, f"computes its attention with {', '.join(sorted(others))}")
    sinks = call.options.get("s_aux")
    if sinks is not None and (
        not isinstance(sinks, Tensor) or tuple(sinks.shape) != (call.query.shape[1],)
    ):
        raise make_refusal(model, "has sinks that are not one logit of each query head (s_aux)")
    cap = call.options.get("softcap")
    if cap is not None and (isinstance(cap, Tensor) or not 0 < cap < float("inf")):
        raise make_refusal(model, f"has a cap on its logits that is not above 0 (softcap: {cap})")
    if call.options.get("is_causal") is False:
        raise make_refusal(model, "has layers that see later tokens")
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise make_refusal(model, "adds a bias to the logits of its attention, as ALiBi does")


def is_close(one: Tensor, other: Tensor, dtype: torch.dtype, strict: bool = False) -> bool:
    """Return whether two results of a model are equal up to the rounding of its dtype."""
    steps = 8 if strict else 32
    tolerance = max(torch.finfo(dtype).eps * steps, 1e-4)
    error = (one.float() - other.float()).abs().max()
    return bool(error <= tolerance * other.float().abs().max() + 1e-9)
