"""A full cache of which one layer at a time is at hand: the others lie in a file, or in the host's memory.

On a CPU, keys and values are views of a temporary file that is mapped into memory. When another layer's turn comes, the
pages of the one before leave the process; the system writes them out and takes them back as it has memory to spare.
TMPDIR says where the file is: a folder on a disk, not one in memory.

On a GPU, they lie in pinned memory of the host. Asking for a layer's keys or values gives copies on the device, and a
second stream begins to copy the next layer, so that the device holds two, and three while a pass joins one of them with
its own pairs. transformers' own offloading (DynamicCache(offloading=True), 5.2 to 5.23) moves a layer to the device and
all of it back whenever pairs are added, and leaves it on the host for whoever reads the cache otherwise, as scores do.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from restorekv.errors import RestoreKVError
from restorekv.model.shape import CacheShape

Pair = tuple[Tensor, Tensor]  # keys and values (1, H, length, D)


def offloaded(model: PreTrainedModel, columns: int) -> Cache:
    """An empty cache with room for S + T columns."""
    shape = CacheShape.of(model)
    kind = Mapped if model.device.type == "cpu" else Host
    shelf = kind(shape.layers, (shape.heads, columns, shape.head_dim), model.dtype, model.device)
    return Cache(layers=shelf.layers)


class ShelvedLayer(DynamicLayer):
    """A dense layer whose keys and values are fetched when they are asked for, and can only grow or be let go.

    `store` (2, 1, H, columns, D) is all its room, of which `length` columns are taken.
    """

    def __init__(self, shelf: OffloadStore, index: int) -> None:
        self.shelf, self.index, self.store, self.length = shelf, index, None, 0
        super().__init__()

    def taken(self) -> Pair:
        """Where they lie."""
        return tuple(self.store[:, :, :, : self.length])

    @property
    def keys(self) -> Tensor | None:
        """(1, H, length, D), where the model is."""
        return self.shelf.lend(self)[0] if self.length else None

    @keys.setter
    def keys(self, nothing: None) -> None:
        self.release(nothing)

    @property
    def values(self) -> Tensor | None:
        """(1, H, length, D), where the model is."""
        return self.shelf.lend(self)[1] if self.length else None

    @values.setter
    def values(self, nothing: None) -> None:
        self.release(nothing)

    def release(self, nothing: None) -> None:
        """Gives the room back."""
        if nothing is not None:
            raise ValueError("an offloaded layer is written by update alone")
        self.store, self.length = None, 0
        self.shelf.forget(self)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> Pair:
        """Q new pairs (1, H, Q, D) -> all of them."""
        if self.store is None:
            self.store = self.shelf.room(self)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        start, self.length = self.length, self.length + key_states.shape[-2]
        for place, states in zip(self.taken(), (key_states, value_states), strict=True):
            self.shelf.write(self, place[:, :, start:], states)
        return self.shelf.grown(self, (key_states, value_states))

    def get_seq_length(self, *_: object) -> int:
        return self.length


class OffloadStore(ABC):
    """Room for the pairs of `layers`, of size (H, columns, D) each for keys and for values."""

    def __init__(self, count: int, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.layers = [ShelvedLayer(self, index) for index in range(count)]

    @property
    def nbytes(self) -> int:
        """Of one layer."""
        heads, columns, dim = self.size
        return 2 * heads * columns * dim * self.dtype.itemsize

    @abstractmethod
    def room(self, layer: ShelvedLayer) -> Tensor:
        """(2, 1, H, columns, D)."""

    @abstractmethod
    def write(self, layer: ShelvedLayer, place: Tensor, states: Tensor) -> None:
        """Stores pairs (1, H, Q, D)."""

    @abstractmethod
    def lend(self, layer: ShelvedLayer) -> Pair:
        """The pairs of a layer where the model is; those of other layers may go."""

    @abstractmethod
    def grown(self, layer: ShelvedLayer, new: Pair) -> Pair:
        """The same after `new` ones were stored."""

    @abstractmethod
    def forget(self, layer: ShelvedLayer) -> None:
        """The layer is gone."""


class Mapped(OffloadStore):
    """One temporary file a layer, reserved before any work; of one layer the pages are in the process."""

    def __init__(self, count: int, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.maps: dict[int, mmap.mmap] = {}
        self.lent: ShelvedLayer | None = None
        super().__init__(count, size, dtype, device)
        folder, wanted = tempfile.gettempdir(), count * self.nbytes
        told = f"The full cache takes {wanted / 1e9:,.1f} GB and {folder} has less; set TMPDIR to a roomier folder."
        if shutil.disk_usage(folder).free < wanted:
            raise RestoreKVError(told)
        try:
            self.maps |= {index: reserved(self.nbytes) for index in range(count)}
        except OSError as error:
            raise RestoreKVError(told) from error

    def room(self, layer: ShelvedLayer) -> Tensor:
        heads, columns, dim = self.size
        return torch.frombuffer(self.maps[layer.index], dtype=self.dtype).view(2, 1, heads, columns, dim)

    def write(self, layer: ShelvedLayer, place: Tensor, states: Tensor) -> None:
        self.lend(layer)
        place.copy_(states)

    def lend(self, layer: ShelvedLayer) -> Pair:
        if self.lent is not layer:
            self.put_back()
            self.lent = layer
        return layer.taken()

    def grown(self, layer: ShelvedLayer, new: Pair) -> Pair:
        return self.lend(layer)

    def put_back(self) -> None:
        """What was written stays with the system, which has it on the disk before it takes the memory."""
        pages = self.maps.get(self.lent.index) if self.lent else None
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)

    def forget(self, layer: ShelvedLayer) -> None:
        self.maps.pop(layer.index, None)
        if self.lent is layer:
            self.lent = None


class Host(OffloadStore):
    """Pinned memory of the host, where columns come before heads, so that those taken are one piece; two layers on the
    device, of which a second stream fetches the later one, and a third where a pass joins its own pairs to a copy."""

    def __init__(self, count: int, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.here: dict[int, Pair] = {}
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        super().__init__(count, size, dtype, device)

    def room(self, layer: ShelvedLayer) -> Tensor:
        heads, columns, dim = self.size
        flat = torch.empty(2, 1, columns, heads, dim, dtype=self.dtype, pin_memory=self.cuda)
        return flat.transpose(2, 3)

    def write(self, layer: ShelvedLayer, place: Tensor, states: Tensor) -> None:
        place.transpose(1, 2).copy_(states.transpose(1, 2).contiguous(), non_blocking=True)  # one piece to one piece

    def lend(self, layer: ShelvedLayer) -> Pair:
        following = self.layers[(layer.index + 1) % len(self.layers)]
        self.here = {each.index: self.here[each.index] for each in (layer, following) if each.index in self.here}
        pair = self.here.get(layer.index) or self.fetch(layer)
        self.here[layer.index] = pair
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if following.length and following.index not in self.here:
            self.here[following.index] = self.fetch(following)
        return pair

    def fetch(self, layer: ShelvedLayer) -> Pair:
        """Copies on the device; whoever reads them waits for the second stream first."""
        if not self.cuda:
            return tuple(x.to(self.device, copy=True) for x in layer.taken())
        present = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(present)  # what is being stored must be there, and memory that is taken again be free
        with torch.cuda.stream(self.stream):
            pair = tuple(x.to(self.device, non_blocking=True) for x in layer.taken())
        for copied in pair:
            copied.record_stream(present)
        return pair

    def grown(self, layer: ShelvedLayer, new: Pair) -> Pair:
        if layer.length == new[0].shape[-2]:
            self.here[layer.index] = new
        elif layer.index in self.here:  # the shorter pair goes before the next layer comes
            both = zip(self.here.pop(layer.index), new, strict=True)
            self.here[layer.index] = tuple(torch.cat(each, 2) for each in both)
            del both
        return self.lend(layer)

    def forget(self, layer: ShelvedLayer) -> None:
        self.here.pop(layer.index, None)


def reserved(nbytes: int) -> mmap.mmap:
    """A temporary file that no folder lists, mapped. Its blocks are taken now where the system can do that: a disk that
    fills up later would end the process with a signal at the first write to a block that is not there."""
    with tempfile.TemporaryFile(prefix="restorekv-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            os.truncate(file.fileno(), nbytes)
        return mmap.mmap(file.fileno(), nbytes)
