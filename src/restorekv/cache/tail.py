"""What follows a compressed context: restore cache, question and answer, which have one length in
every head.

While gradients are recorded, every append makes new tensors, as autograd requires. Otherwise keys
and values are the start of larger buffers, an append writes only its own columns, and `reset`
writes only the restore cache: a step costs what it adds, and addresses stay while the buffers
suffice. A static tail shows its whole buffer and a tensor says where to write, so that every step
is the same work (see `FixedSteps` in generation/fixed_steps.py).
"""

# Keys and values are properties here and attributes in transformers.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from restorekv.errors import RestoreKVError

SPARE = 16  # columns, at least, that a buffer gains when it has to grow
OTHER_ATTENTION = (
    "The model has a different attention function now, which cannot read a compressed cache; call "
    "model.set_attn_implementation('restorekv')."
)
# The keys and the values of one layer, or of some of its heads.
KeysValues = tuple[Tensor, Tensor]


def count_queries(query: int | Tensor) -> int:
    """Return how many queries a mask is for.

    transformers 5.2 passes their positions, later versions their number.
    """
    if isinstance(query, Tensor):
        return query.shape[0]
    return query


class CompressedLayer(CacheLayerMixin):
    """What transformers asks of a layer whose tail has `columns` columns after `seen` positions."""

    is_sliding = False
    seen: int

    @property
    def columns(self) -> int:
        raise NotImplementedError

    # What follows is the protocol of transformers' cache layers: it asks a layer for its length and
    # its mask's size, hands it the new pairs, and reads keys and values for attention.
    # transformers' own versions have other parameters.
    def lazy_initialization(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *_: object
    ) -> None:
        """Do nothing: a compressed layer is complete from the start."""

    def get_seq_length(self, *_: object) -> int:
        """Return the number of positions of context and tail, from which transformers derives the
        next RoPE position.
        """
        return self.seen + self.columns

    # transformers 5.2 names the parameter `cache_position`.
    def get_mask_sizes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: int | Tensor
    ) -> tuple[int, int]:
        """Return the mask's width and offset: it covers the tail alone, since every query sees the
        whole context.
        """
        if not count_queries(query):
            raise RestoreKVError(
                f"There is nothing to read: the cache has seen {self.get_seq_length():,} tokens, "
                "and the input ids are no longer than that; pass the ids of what it has seen and "
                "of the question, as CompressedContext.inputs returns them."
            )
        return self.columns + count_queries(query), self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in transformers 5.2

    # transformers' own attention functions would treat what `update` returns as tensors. They fail
    # here, with a sentence that says what to do.
    def __getitem__(self, _: object) -> Tensor:
        raise RestoreKVError(OTHER_ATTENTION)

    def transpose(self, *_: object) -> Tensor:
        raise RestoreKVError(OTHER_ATTENTION)

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Tensor:
        raise RestoreKVError(OTHER_ATTENTION)


class TailLayer(CompressedLayer):
    """One layer: `seen` positions, the restore cache (1, H, n, D), keys and values (B, H, n + q, D)
    that start with it.

    `buffers` are tensors (B, H, columns, D) with keys and values as their first columns, or None.
    `static` is None or (first, written) with a 0-d int64 tensor `written`: an append of Q columns
    then writes the columns from first + written. A `locked` tail belongs to a compressed context
    that many questions share: it refuses every change.
    """

    # Assisted decoding of transformers 5.24 reads the whole prompt again into a cache that has it
    # already. It refuses a cache that says this.
    is_croppable = False
    locked = False
    buffers: KeysValues | None
    static: tuple[int, Tensor] | None

    def __init__(self, restore_keys: Tensor, restore_values: Tensor, seen: int) -> None:
        super().__init__()
        self.restore_keys = restore_keys
        self.restore_values = restore_values
        self.seen = seen
        # Until the first append, the tail is the restore cache itself.
        self.keys = restore_keys
        self.values = restore_values
        self.dtype = restore_keys.dtype
        self.device = restore_keys.device
        self.is_initialized = True

    # Assigned keys or values are separate tensors, not the start of a buffer.

    @property
    def keys(self) -> Tensor:
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self.check_unlocked()
        self._keys = keys
        # A buffer belongs to the tensors that were views of it.
        self.buffers = None
        self.static = None

    @property
    def values(self) -> Tensor:
        return self._values

    @values.setter
    def values(self, values: Tensor) -> None:
        self.check_unlocked()
        self._values = values
        self.buffers = None
        self.static = None

    def check_unlocked(self) -> None:
        if self.locked:
            raise RestoreKVError(
                "This cache belongs to a compressed context that other questions share; "
                "pass past_key_values=compressed.cache.fork()."
            )

    def get_mask_sizes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: int | Tensor
    ) -> tuple[int, int]:
        """Return the mask's width and offset; refuse a locked cache, because a model that asks is
        about to append.
        """
        self.check_unlocked()
        return super().get_mask_sizes(query)

    @property
    def keys_and_values(self) -> KeysValues:
        """Keys and values."""
        return self._keys, self._values

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def restore_length(self) -> int:
        """The length n of the restore cache."""
        return self.restore_keys.shape[-2]

    @property
    def columns(self) -> int:
        """The length n + q of the tail."""
        return self.keys.shape[-2]

    def fork(self, batch: int = 1) -> Self:
        """Return a layer with the same context and restore cache and its own tail, for `batch`
        questions.
        """
        layer = copy.copy(self)
        # The copy shares context and plans; only its tail is its own.
        layer.locked = False
        layer.share_restore_cache(batch)
        return layer

    def list_tail_tensors(self) -> list[Tensor]:
        """Return the tensors of the tail; the restore cache counts once while it is still the
        whole tail.
        """
        tensors = [self.restore_keys, self.restore_values]
        # Buffers have columns that are not written yet. They are memory, so they count.
        if self.buffers:
            tensors += self.buffers
        elif self.columns > self.restore_length:
            tensors += self.keys_and_values
        return tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, positions, D). Once imported, kvpress wraps every attention function and reads
        `key.shape`.
        """
        batch, heads, tail, dim = self.keys.shape
        return batch, heads, self.seen + tail, dim

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Append (B, H, Q, D) to the tail and return this layer twice, for the attention function.

        One of three ways: new tensors while gradients are recorded, columns that a tensor names in
        a static tail, or the next columns of the buffers, which grow when they are full.
        """
        self.check_unlocked()
        rows = len(key_states)
        if rows != len(self.keys):
            raise RestoreKVError(
                f"The cache was forked for a batch of {len(self.keys)}, and a batch of {rows} is "
                "read, with a row for each question, beam and returned sequence; pass "
                f"cache.fork({rows})."
            )
        new_columns = key_states.shape[-2]
        if torch.is_grad_enabled():
            self.keys = torch.cat([self.keys, key_states], -2)
            self.values = torch.cat([self.values, value_states], -2)
            return self, self
        if self.static:
            first, written = self.static
            # Where to write is a number on the device: a recorded graph repeats this with another
            # `written` and without a question to the host.
            columns = written + torch.arange(first, first + new_columns, device=self.device)
            key_buffer, value_buffer = self._get_buffers()
            key_buffer.index_copy_(-2, columns, key_states)
            value_buffer.index_copy_(-2, columns, value_states)
            return self, self
        start = self.columns
        end = start + new_columns
        # A fork has no buffers before its first append, and a full buffer has no room.
        if not self.can_write(end):
            # The first append gets exactly what it needs, since it may be the last.
            spare = 0
            if start != self.restore_length:
                # A quarter more each time: n appends copy a number of columns proportional to n.
                spare = max(end // 4, SPARE)
            self.reserve_columns(end + spare)
        key_buffer, value_buffer = self._get_buffers()
        key_buffer[:, :, start:end] = key_states
        value_buffer[:, :, start:end] = value_states
        self.set_end(end)
        return self, self

    def can_write(self, columns: int) -> bool:
        """Return whether the first `columns` columns of the buffers may be written."""
        if self.buffers is None:
            return False
        buffer = self.buffers[0]
        if buffer.shape[-2] < columns:
            return False
        # A tensor made in inference mode can only be written there. torch.compile cannot ask
        # whether one was, and it traces none that were.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return True
        return not buffer.is_inference()

    def reserve_columns(self, columns: int) -> None:
        """Make buffers of `columns` columns that start with the tail; the rest is zero."""
        self.check_unlocked()
        end = self.columns
        key_buffer = self.keys.new_zeros(*self.keys.shape[:2], columns, self.keys.shape[-1])
        value_buffer = self.values.new_zeros(*self.values.shape[:2], columns, self.values.shape[-1])
        key_buffer[:, :, :end] = self.keys
        value_buffer[:, :, :end] = self.values
        self.buffers = key_buffer, value_buffer
        self.set_end(end)

    def set_end(self, end: int) -> None:
        """Make keys and values the first `end` columns of the buffers."""
        key_buffer, value_buffer = self._get_buffers()
        # Views of the buffers, set without the setters, which would forget the buffers.
        self._keys = key_buffer[:, :, :end]
        self._values = value_buffer[:, :, :end]
        self.static = None

    def _get_buffers(self) -> KeysValues:
        assert self.buffers is not None, "reserve_columns comes first"
        return self.buffers

    def make_static(self, count: int, written: Tensor) -> None:
        """Add `count` columns at once; appends then write after the first `written` of them.

        The caller advances `written`, which starts at 0, and hides the columns that are not written
        yet with a mask.
        """
        first = self.columns
        self.reserve_columns(first + count)
        self.set_end(first + count)
        self.static = first, written

    def commit_tail(self) -> None:
        """Make what the tail holds now the restore cache."""
        # Copied, because the tail's buffers may be written again.
        self.keys = self.keys.clone()
        self.values = self.values.clone()
        self.restore_keys, self.restore_values = self.keys_and_values

    def reset(self) -> None:
        """Go back to the restore cache, with as many rows as the tail has now; buffers keep their
        addresses.
        """
        end = self.restore_length
        # Under gradients nothing is written in place, and a buffer that is too short may not be
        # written either.
        if not self.can_write(end) or torch.is_grad_enabled():
            self.share_restore_cache(len(self.keys))
            return
        # Written again, because `crop` may have gone further back.
        key_buffer, value_buffer = self._get_buffers()
        key_buffer[:, :, :end] = self.restore_keys
        value_buffer[:, :, :end] = self.restore_values
        self.set_end(end)

    def share_restore_cache(self, batch: int) -> None:
        """Reduce the tail to the restore cache, for `batch` rows, which share it until they are
        written.
        """
        # `expand` repeats without a copy; the first append makes separate room for each row.
        self.keys = self.restore_keys.expand(batch, -1, -1, -1)
        self.values = self.restore_values.expand(batch, -1, -1, -1)

    def crop(self, length: int) -> None:
        """Shorten the tail, never the context: by -length positions if `length` is 0 or less, else
        to `length` positions of cache in all.

        Raises:
            RestoreKVError: The context would be shortened, but its evicted pairs are gone.
        """
        # Newer versions of transformers pass only numbers of 0 or less, older ones both.
        end = length - self.seen
        if length <= 0:
            end = self.columns + length
        if end < 0:
            raise RestoreKVError(
                f"A compressed cache keeps its text of {self.seen:,} positions, and cannot be "
                f"cropped to {self.seen + end:,}; pass a new fork for each question."
            )
        end = min(end, self.columns)
        if self.buffers:
            self.set_end(end)
        else:
            self.keys = self.keys[:, :, :end]
            self.values = self.values[:, :, :end]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.keys = self.keys.repeat_interleave(repeats, 0)
        self.values = self.values.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.keys = self.keys[indices]
        self.values = self.values[indices]
