"""Layers without pairs, in models that also have layers that see the whole text.

Most of them keep a state of fixed size: linear attention (Qwen3-Next, Qwen 3.5, OLMo Hybrid), short
convolutions (LFM2) and state-space layers (Granite, Nemotron-H). Others keep nothing at all.

A state has read the whole text, so nothing of it is evicted, and no budget counts it. A compressed
cache holds the states as they are after the context's last token. Questions continue from there:
the restore pass reads the states and leaves them unchanged, so that such layers compute for a
question what they would compute without restorekv.

Unlike the pairs of a text, a state cannot be cut back to an earlier token. Who will need an earlier
state says so before the text is read (`StateLayer.marks`), and every reader of a shared state gets
a copy, since some models write into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import cache_utils

# The first versions of transformers 5 keep such states in caches of single models.
_TransformersLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
_TransformersEmptyLayer: Any = getattr(cache_utils, "DummyLayer", object)
HAS_STATES = hasattr(cache_utils.Cache, "get_conv_state")
# The kinds of states. In transformers, `conv_states` and `recurrent_states` of a layer each map the
# number of a state to a tensor or None.
KINDS = ("conv", "recurrent")


class StateLayer(_TransformersLayer):
    """One layer that keeps states, in a full cache, in a compressed one or in a view of either.

    A layer may have several states of each kind, such as one for queries and one for keys. Tensors
    are (B, ...): conv states (B, channels, last inputs), recurrent ones as the model has them.

    Args:
        number_of_states: How many states of each kind it has.
    """

    is_sliding = False
    is_croppable = False
    is_initialized = True

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        # Positions at which a prefill copies the states (`copy_if_marked`), and the copies.
        self.marks: frozenset[int] = frozenset()
        self.marked: dict[int, StateLayer] = {}
        # It has no pairs: a layer of no heads, for code that goes through the layers of a cache.
        self.keys = self.values = torch.empty(1, 0, 0, 0)

    @property
    def record_past(self) -> bool:
        """Whether a pass must not write into the tensors of earlier states.

        transformers' step of one token does, which autograd forbids. It asks this before.
        """
        return torch.is_grad_enabled()

    @record_past.setter
    def record_past(self, _: bool) -> None:
        """Ignore transformers' initial value."""

    # New tensors replace the old ones, which autograd may have saved and other layers may share.

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Append inputs (B, channels, Q) to a conv state, which keeps the last ones; return those
        kept before with the new ones.
        """
        width = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        self.conv_kernel_size[state_idx] = width
        inputs = conv_states
        if self.has_previous_state[state_idx]:
            inputs = torch.cat([self.conv_states[state_idx], conv_states], -1)
        kept = inputs[..., -width:]
        # Before the first token there are zeros.
        missing = width - kept.shape[-1]
        self.conv_states[state_idx] = torch.nn.functional.pad(kept, (missing, 0)).clone()
        self.is_conv_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        self.dtype = conv_states.dtype
        self.device = conv_states.device
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Replace a recurrent state."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return recurrent_states

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """The states by name, such as "conv.0" and "recurrent.0"."""
        found = {}
        for kind in KINDS:
            for number, state in self._get_states(kind).items():
                if state is not None:
                    found[f"{kind}.{number}"] = state
        return found

    def _get_states(self, kind: str) -> dict[int, Tensor | None]:
        """Return the states of a kind by their numbers."""
        return self.conv_states if kind == "conv" else self.recurrent_states

    def list_tensors(self) -> list[Tensor]:
        """Return every tensor of the layer."""
        return list(self.named_tensors.values())

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> StateLayer:
        """Return a layer with these states, named as in `named_tensors`; nothing is copied."""
        numbers = {int(name.partition(".")[2]) for name in tensors}
        layer = cls(max(numbers) + 1)
        for name, tensor in tensors.items():
            kind, _, number = name.partition(".")
            state = int(number)
            layer._get_states(kind)[state] = tensor
            layer.has_previous_state[state] = True
            if kind == "conv":
                layer.is_conv_states_initialized[state] = True
                layer.conv_kernel_size[state] = tensor.shape[-1]
            else:
                layer.is_recurrent_states_initialized[state] = True
            layer.dtype = tensor.dtype
            layer.device = tensor.device
        return layer

    def copy(self) -> StateLayer:
        """Return a layer with copies of the states, without gradients."""
        tensors = {name: state.detach().clone() for name, state in self.named_tensors.items()}
        return type(self).from_tensors(tensors) if tensors else type(self)(self.number_of_states)

    # A shallow copy would share the states, and a pass over the copy would change both.
    __copy__ = copy

    def fork(self, batch: int = 1) -> StateLayer:
        """Return a layer with a copy of the states, whose one row is repeated `batch` times."""
        layer = self.copy()
        if batch != 1:
            layer.batch_repeat_interleave(batch)
        return layer

    def copy_from(self, other: StateLayer) -> None:
        """Take over copies of another layer's states."""
        fresh = other.copy()
        for name in (
            "conv_states",
            "recurrent_states",
            "is_conv_states_initialized",
            "is_recurrent_states_initialized",
            "has_previous_state",
            "conv_kernel_size",
        ):
            setattr(self, name, getattr(fresh, name))

    def copy_if_marked(self, position: int) -> None:
        """Copy the states if `position`, up to which the text has been read, is one of `marks`."""
        if position in self.marks:
            self.marked[position] = self.copy()

    def copy_at(self, position: int | None) -> StateLayer:
        """Return a copy of the layer as it was after `position` positions; None is now.

        Raises:
            ValueError: The position was not marked before it was read.
        """
        if position is None:
            return self.copy()
        if position not in self.marked:
            raise ValueError(f"the states after {position:,} positions are not held")
        return self.marked[position].copy()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._change_states(lambda state: state[indices.to(state.device)])

    reorder_cache = batch_select_indices  # transformers' name in beam search

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._change_states(lambda state: state.repeat_interleave(repeats, 0))

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every state by what `change` makes of it."""
        for kind in KINDS:
            states = self._get_states(kind)
            for number, state in states.items():
                if state is not None:
                    states[number] = change(state)


class EmptyLayer(_TransformersEmptyLayer):
    """One layer that holds nothing, in every kind of cache: a block of experts or of an MLP alone.

    Of a `StateLayer` it has `named_tensors`, `list_tensors`, `copy`, `fork` and `copy_at`.
    transformers must not take it for one, since it asks the last layer with states whether there
    has been a token.
    """

    is_sliding = False
    is_croppable = True
    is_initialized = True

    def __init__(self) -> None:
        super().__init__()
        # As in a `StateLayer`: a layer of no heads.
        self.keys = self.values = torch.empty(1, 0, 0, 0)

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """No states."""
        return {}

    def list_tensors(self) -> list[Tensor]:
        """Return every tensor of the layer: none."""
        return []

    def copy(self) -> EmptyLayer:
        """Return a layer that holds nothing."""
        return type(self)()

    def fork(self, _batch: int = 1) -> EmptyLayer:
        """Return a layer that holds nothing."""
        return self.copy()

    def copy_at(self, _position: int | None) -> EmptyLayer:
        """Return the layer as it was after any number of positions."""
        return self.copy()


PairlessLayer = StateLayer | EmptyLayer


def join_states(layers: Sequence[StateLayer]) -> StateLayer:
    """Return a layer with copies of the rows of all layers, one layer after the other."""
    rows = [layer.named_tensors for layer in layers]
    joined = {name: torch.cat([each[name] for each in rows]) for name in rows[0]}
    return StateLayer.from_tensors(joined)


def split_joined_states(
    joined: StateLayer, layers: Sequence[StateLayer], rows: Sequence[int]
) -> None:
    """Give each layer its rows of a joined one.

    Args:
        joined: A layer from `join_states` that a pass has advanced.
        layers: What it was joined from.
        rows: The number of rows of each.
    """
    parts = {name: state.split(list(rows)) for name, state in joined.named_tensors.items()}
    for index, layer in enumerate(layers):
        # Copied, because a step of one token may write into them, and the rows of others share
        # the joined tensor.
        own = {name: split[index] for name, split in parts.items()}
        layer.copy_from(StateLayer.from_tensors(own))


def clone_saved_states(layers: Iterable[Any]) -> AbstractContextManager[Any]:
    """Let autograd keep copies of the states that a pass in the block reads, if there are any.

    Granite's step of one token writes into its recurrent state without asking for `record_past`.
    """
    # The tensors themselves are held, not only their addresses: the pass replaces states, and an
    # activation at the address of a freed one would be copied too. The copy of an activation that
    # is a slice is laid out differently, and kernels may round differently then.
    states: dict[int, Tensor] = {}
    for layer in list_state_layers(layers):
        for tensor in layer.list_tensors():
            states[tensor.untyped_storage().data_ptr()] = tensor
    if not states or not torch.is_grad_enabled():
        return nullcontext()

    def keep(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in states else tensor

    return saved_tensors_hooks(keep, lambda tensor: tensor)


def list_state_layers(layers: Iterable[Any]) -> list[StateLayer]:
    """Return those of a cache's layers that keep states."""
    return [layer for layer in layers if isinstance(layer, StateLayer)]


def mark_position(layers: Iterable[Any], position: int) -> None:
    """Have the states after `position` positions kept when a prefill reaches them."""
    for layer in list_state_layers(layers):
        layer.marks |= {position}
