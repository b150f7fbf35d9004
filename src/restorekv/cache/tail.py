"""What follows a compressed context: restore cache, question and answer, which have one length in
every head.

While gradients are recorded, every append makes new tensors, as autograd requires. Otherwise keys
and values are the start of larger buffers, an append writes only its own columns, and `reset`
writes only the restore cache: a step costs what it adds, and addresses stay while the buffers
suffice. A `fixed` tail shows its whole buffer and a tensor says where to write, so that every step
is the same work (see `Steps` in generation/generate.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from restorekv.errors import RestoreKVError

SPARE = 16  # columns, at least, that a buffer gains when it has to grow


class CompressedLayer(CacheLayerMixin):
    """What transformers asks of a layer with `columns` columns in its tail, which start after
    `seen` positions.
    """

    is_sliding = False

    def lazy_initialization(self, *_: object) -> None:
        """Does nothing: a compressed layer is complete from the start."""

    def get_seq_length(self, *_: object) -> int:
        """Returns the number of positions seen, from which transformers derives the next RoPE
        position.
        """
        return self.seen + self.columns

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Returns the mask's width and offset: it covers the tail alone, since every query sees the
        whole context.

        transformers 5.2 passes the positions of the queries, later versions their number.
        """
        return self.columns + (query.shape[0] if isinstance(query, Tensor) else query), self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in transformers 5.2


class TailLayer(CompressedLayer):
    """One layer: `seen` positions, the restore cache (1, H, n, D), keys and values (B, H, n + q, D)
    that start with it.

    `room` holds the buffers (B, H, columns, D) whose start keys and values are, or None. `fixed` is
    None or (first, moved) with a 0-d int64 tensor `moved`: an append of Q columns then writes the
    columns from first + moved. A `locked` tail belongs to a compressed context that many questions
    share: it refuses every change.
    """

    is_croppable = True
    locked = False

    def __init__(self, restore_keys: Tensor, restore_values: Tensor, seen: int) -> None:
        super().__init__()
        self.restore_keys = restore_keys
        self.restore_values = restore_values
        self.seen = seen
        self.keys = restore_keys
        self.values = restore_values
        self.dtype = restore_keys.dtype
        self.device = restore_keys.device
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self.check_unlocked()
        self._keys = keys
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
                "This cache belongs to a compressed context, whose other questions need it as it is; "
                "pass past_key_values=compressed.cache.fork()."
            )

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self._keys, self._values

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def restore_length(self) -> int:
        """n."""
        return self.restore_keys.shape[-2]

    @property
    def columns(self) -> int:
        """n + q."""
        return self.keys.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, positions, D). Once imported, kvpress wraps every attention function and reads
        `key.shape`.
        """
        batch, heads, tail, dim = self.keys.shape
        return batch, heads, self.seen + tail, dim

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Appends (B, H, Q, D) to the tail and returns this layer twice, for the attention
        function.
        """
        self.check_unlocked()
        new = (key_states, value_states)
        end = self.columns + key_states.shape[-2]
        if torch.is_grad_enabled():
            self.keys, self.values = (
                torch.cat([old, x], -2) for old, x in zip(self.pair, new, strict=True)
            )
            return self, self
        if self.static:
            first, moved = self.static
            columns = moved + torch.arange(first, first + key_states.shape[-2], device=self.device)
            for buffer, states in zip(self.buffers, new, strict=True):
                buffer.index_copy_(-2, columns, states)
            return self, self
        # The first append gets exactly what it needs, since it may be the last.
        if not self.can_write(end):
            self.reserve_columns(
                end if self.columns == self.restore_length else end + max(end // 4, SPARE)
            )
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, self.columns : end] = states
        self.set_end(end)
        return self, self

    def can_write(self, columns: int) -> bool:
        """Returns whether the first `columns` columns of the buffers may be written."""
        if self.buffers is None or self.buffers[0].shape[-2] < columns:
            return False
        # torch.compile cannot ask whether a tensor was made in inference mode, and it traces none
        # that were.
        return (
            torch.compiler.is_compiling()
            or not self.buffers[0].is_inference()
            or torch.is_inference_mode_enabled()
        )

    def reserve_columns(self, columns: int) -> None:
        """Makes buffers of `columns` columns that start with what the tail holds now; the rest is
        zero.
        """
        self.check_unlocked()
        room = tuple(x.new_zeros(*x.shape[:2], columns, x.shape[-1]) for x in self.pair)
        end = self.columns
        for buffer, states in zip(room, self.pair, strict=True):
            buffer[:, :, :end] = states
        self.buffers = room
        self.set_end(end)

    def set_end(self, end: int) -> None:
        """Shows the first `end` columns of the buffers."""
        self._keys, self._values = (buffer[:, :, :end] for buffer in self.buffers)
        self.static = None

    def make_static(self, count: int, moved: Tensor) -> None:
        """Reserves and shows `count` more columns; appends write where `moved`, which starts at 0,
        says.

        The caller moves it and hides the columns that are not written yet with a mask.
        """
        first = self.columns
        self.reserve_columns(first + count)
        self.set_end(first + count)
        self.static = first, moved

    def commit_tail(self) -> None:
        """Makes what the tail holds now the restore cache."""
        self.keys, self.values = (x.clone() for x in self.pair)
        self.restore_keys, self.restore_values = self.pair

    def reset(self) -> None:
        """Goes back to the restore cache, with as many rows as the tail has now; buffers keep their
        addresses.
        """
        if not self.can_write(self.restore_length) or torch.is_grad_enabled():
            self.share_restore_cache(len(self.keys))
            return
        for buffer, states in zip(
            self.buffers, (self.restore_keys, self.restore_values), strict=True
        ):
            buffer[:, :, : self.restore_length] = states  # `crop` may have gone further back
        self.set_end(self.restore_length)

    def share_restore_cache(self, batch: int) -> None:
        """Reduces the tail to the restore cache, for `batch` rows, which share it until they are
        written.
        """
        self.keys, self.values = (
            x.expand(batch, -1, -1, -1) for x in (self.restore_keys, self.restore_values)
        )

    def crop(self, length: int) -> None:
        """Drops -length positions (if negative) or all after the first `length`; never drops
        context.
        """
        end = min(
            max(self.columns + length if length <= 0 else length - self.seen, 0), self.columns
        )
        if self.buffers:
            self.set_end(end)
        else:
            self.keys, self.values = (x[:, :, :end] for x in self.pair)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.keys, self.values = (x.repeat_interleave(repeats, 0) for x in self.pair)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.keys, self.values = (x[indices] for x in self.pair)
