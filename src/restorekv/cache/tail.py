"""What comes behind a compressed context: restore cache, question and answer, of one length in every head.

While gradients are recorded every append makes new tensors, as autograd wants them. Otherwise keys and values are the
beginning of buffers with room to spare: an append writes its own columns and moves nothing, and going back to the
restore cache writes that alone, so that steps cost what they add and addresses stay while the room suffices. A `fixed`
tail shows its whole buffer, and a tensor tells where to write: every step is then the same work; see decode_graph.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

SPARE = 16  # columns, at least, that a buffer which has to grow gains


class TailLayer(CacheLayerMixin):
    """One layer: `seen` positions, the restore cache (1, H, n, D), keys and values (B, H, n + q, D) that begin with it.

    room: the buffers (B, H, columns, D) whose beginning keys and values are, or None. fixed: None, or (first, moved),
    moved a 0-d int64 tensor: an append of Q columns then writes first + moved ... first + moved + Q - 1.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, restore_keys: Tensor, restore_values: Tensor, seen: int) -> None:
        super().__init__()
        self.restore_keys, self.restore_values, self.seen = restore_keys, restore_values, seen
        self.keys, self.values = restore_keys, restore_values
        self.dtype, self.device = restore_keys.dtype, restore_keys.device
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._keys, self.room, self.fixed = keys, None, None

    @property
    def values(self) -> Tensor:
        return self._values

    @values.setter
    def values(self, values: Tensor) -> None:
        self._values, self.room, self.fixed = values, None, None

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def restore(self) -> int:
        """n."""
        return self.restore_keys.shape[-2]

    @property
    def columns(self) -> int:
        """n + q."""
        return self.keys.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, positions, D): importing kvpress wraps every attention function in one that asks a key for this."""
        batch, heads, tail, dim = self.keys.shape
        return batch, heads, self.seen + tail, dim

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Appends (B, H, Q, D) to the tail and hands itself to the attention function, twice."""
        new, end = (key_states, value_states), self.columns + key_states.shape[-2]
        if torch.is_grad_enabled():
            self.keys, self.values = (torch.cat([old, x], -2) for old, x in zip(self.pair, new, strict=True))
            return self, self
        if self.fixed:
            first, moved = self.fixed
            places = moved + torch.arange(first, first + key_states.shape[-2], device=self.device)
            for buffer, states in zip(self.room, new, strict=True):
                buffer.index_copy_(-2, places, states)
            return self, self
        if not self.fits(end):  # the first append gets what it needs, as it may be the last
            self.reserve(end if self.columns == self.restore else end + max(end // 4, SPARE))
        for buffer, states in zip(self.room, new, strict=True):
            buffer[:, :, self.columns : end] = states
        self.end_at(end)
        return self, self

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self._keys, self._values

    def fits(self, columns: int) -> bool:
        """Whether the buffers may be written up to there."""
        if self.room is None or self.room[0].shape[-2] < columns:
            return False
        # torch.compile cannot ask whether a tensor is one of inference mode, and traces none that are.
        return torch.compiler.is_compiling() or not self.room[0].is_inference() or torch.is_inference_mode_enabled()

    def reserve(self, columns: int) -> None:
        """Buffers for so many columns in all, with what the tail holds now at their beginning and zeros behind it."""
        room, end = tuple(x.new_zeros(*x.shape[:2], columns, x.shape[-1]) for x in self.pair), self.columns
        for buffer, states in zip(room, self.pair, strict=True):
            buffer[:, :, :end] = states
        self.room = room
        self.end_at(end)

    def end_at(self, end: int) -> None:
        """Shows the first `end` columns of the buffers."""
        self._keys, self._values = (buffer[:, :, :end] for buffer in self.room)
        self.fixed = None

    def fix(self, count: int, moved: Tensor) -> None:
        """Room for `count` more columns, all of it shown; `moved`, which begins at 0, tells appends where to write.

        The caller moves it, and hides with a mask what is not written yet.
        """
        first = self.columns
        self.reserve(first + count)
        self.end_at(first + count)
        self.fixed = first, moved

    def settle(self) -> None:
        """What the tail holds now becomes the restore cache."""
        self.keys, self.values = (x.clone() for x in self.pair)
        self.restore_keys, self.restore_values = self.pair

    def rewind(self) -> None:
        """Back to the restore cache, for as many rows as the tail has now; buffers stay where they are."""
        if not self.fits(self.restore) or torch.is_grad_enabled():
            self.spread(len(self.keys))
            return
        for buffer, states in zip(self.room, (self.restore_keys, self.restore_values), strict=True):
            buffer[:, :, : self.restore] = states  # `crop` may have gone further back
        self.end_at(self.restore)

    def spread(self, batch: int) -> None:
        """The restore cache alone, for `batch` rows, which share it until they are written."""
        self.keys, self.values = (x.expand(batch, -1, -1, -1) for x in (self.restore_keys, self.restore_values))

    def reset(self) -> None:
        self.rewind()

    def crop(self, length: int) -> None:
        """Drops -length positions (negative) or all beyond position `length`; never the context."""
        end = min(max(self.columns + length if length <= 0 else length - self.seen, 0), self.columns)
        if self.room:
            self.end_at(end)
        else:
            self.keys, self.values = (x[:, :, :end] for x in self.pair)

    def lazy_initialization(self, *_: object) -> None:
        """A compressed layer is born complete."""

    def get_seq_length(self, *_: object) -> int:
        """Positions seen, from which transformers takes the next RoPE position."""
        return self.seen + self.columns

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Width and offset of the mask: the tail alone, since every query sees the whole context.

        transformers 5.2 passes the positions of the queries, later ones their number.
        """
        queries = query.shape[0] if isinstance(query, Tensor) else query
        return self.columns + queries, self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length` under the name that transformers 5.2 asks for."""
        return -1

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.keys, self.values = (x.repeat_interleave(repeats, 0) for x in self.pair)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.keys, self.values = (x[indices] for x in self.pair)
