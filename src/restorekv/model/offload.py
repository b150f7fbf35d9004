"""A full cache that keeps one layer at a time in memory; the others are in files, or on the host.

On a CPU, keys and values are views of temporary files that are mapped into memory. When another
layer is needed, the pages of the previous one leave the process; the system writes them out and
keeps them cached as its memory allows. TMPDIR sets the folder, which should be on a disk, not in
memory.

On a GPU, they are in the host's pinned memory. Reading a layer's keys or values makes copies on the
device, and a second stream starts to copy the next layer, so that the device holds two layers, or
three while a pass joins one with its own pairs. transformers' own offloading
(DynamicCache(offloading=True), 5.2 to 5.23) moves a layer there and back whenever pairs are added,
and leaves it on the host for other readers such as scores.

On a device that is not a CPU, a store has to pass a self-test when it is first used
(offload_self_test.py). If copies on a second stream go wrong, pageable memory and copies that are
waited for are tried; if these go wrong too, the full cache stays on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import tempfile
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from restorekv.cache.tail import KeysValues
from restorekv.errors import ModelError, RestoreKVError
from restorekv.model import offload_self_test
from restorekv.model.attention import self_tests
from restorekv.model.prefill import make_full_cache, make_hybrid_layers
from restorekv.model.shape import CacheShape, is_latent_config, list_full_layers


def make_offloaded_cache(model: PreTrainedModel, columns: int, margin: int = 0) -> Cache:
    """Return an empty cache with room for `columns` columns, S + T.

    If no store passes its self-test on the device, nothing is offloaded. Layers with a sliding
    window never are: they hold only their last W - 1 + `margin` columns. Nor are states.
    """
    if is_latent_config(model.config):
        raise ModelError(
            f"The cache of {type(model).__name__} has latents, which are not offloaded; leave out "
            "offload."
        )
    shape = CacheShape.from_model(model)
    device = model.device
    # A CPU writes to files and needs no self-test; on other devices the store has to pass one.
    streams = True
    if self_tests.needs_self_test(device):
        key = device, shape.heads, shape.groups, shape.head_dim, model.dtype
        # Two stores can be tried: copies on a second stream, then copies that are waited for.
        streams = _uses_streams(device) and self_tests.passed_self_test("offload", *key)
        if not streams and not self_tests.passed_self_test("offload-plain", *key):
            return make_full_cache(model, margin)
    size = shape.heads, columns, shape.head_dim
    store = make_store(shape.layers, size, model.dtype, device, streams)
    # Offloaded layers are those that see the whole text, in their order.
    layers = make_hybrid_layers(model, margin)
    for index, stored in zip(list_full_layers(model.config), store.layers, strict=True):
        layers[index] = stored
    return Cache(layers=layers)


def make_store(
    count: int,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    streams: bool = True,
) -> OffloadStore:
    """Return the store for a device: files for a CPU, else the host's memory.

    Args:
        count: L, the number of layers.
        size: (H, columns, D) of a layer's keys.
        dtype: The dtype of the numbers.
        device: Where the model is.
        streams: Copy on a second stream, if the device has one.
    """
    if not self_tests.needs_self_test(device):
        return FileStore(count, size, dtype, device)
    return HostStore(count, size, dtype, device, streams)


def _uses_streams(device: torch.device) -> bool:
    """Return whether copies can run on a second stream, from pinned memory."""
    return device.type == "cuda"


class OffloadedLayer(DynamicLayer):
    """A dense layer whose keys and values are loaded when they are read; it can only grow or be
    released.

    `room` (2, 1, H, columns, D) is the memory for its pairs; the first `length` columns are used.
    """

    def __init__(self, store: OffloadStore, index: int) -> None:
        self.store = store
        self.index = index
        self.room: Tensor | None = None
        self.length = 0
        # Last: it sets keys and values to None, and so calls `release`.
        super().__init__()

    def get_stored(self) -> KeysValues:
        """Return the pairs where they are stored."""
        assert self.room is not None, "update allocates it"
        keys, values = self.room[:, :, :, : self.length]
        return keys, values

    @property
    def keys(self) -> Tensor | None:
        """(1, H, length, D), on the model's device."""
        return self.store.load(self)[0] if self.length else None

    @keys.setter
    def keys(self, keys: None) -> None:
        self.release(keys)

    @property
    def values(self) -> Tensor | None:
        """(1, H, length, D), on the model's device."""
        return self.store.load(self)[1] if self.length else None

    @values.setter
    def values(self, values: None) -> None:
        self.release(values)

    def release(self, value: None) -> None:
        """Free the room, when `keys` or `values` are set to None; refuse any other value."""
        if value is not None:
            raise ValueError("an offloaded layer is written by update alone")
        self.room = None
        self.length = 0
        self.store.release(self)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> KeysValues:
        """Store Q new pairs (1, H, Q, D) and return all pairs."""
        if self.room is None:
            self.room = self.store.allocate(self)
            self.dtype = key_states.dtype
            self.device = key_states.device
            self.is_initialized = True
        start = self.length
        self.length = self.length + key_states.shape[-2]
        keys, values = self.get_stored()
        self.store.write(self, keys[:, :, start:], key_states)
        self.store.write(self, values[:, :, start:], value_states)
        return self.store.append_pairs(self, (key_states, value_states))

    def get_seq_length(self, *_: object) -> int:
        return self.length


class OffloadStore(ABC):
    """The memory for the pairs of `layers`: (H, columns, D) for keys, and the same for values."""

    def __init__(
        self, count: int, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size = size
        self.dtype = dtype
        self.device = device
        self.layers = [OffloadedLayer(self, index) for index in range(count)]

    @property
    def nbytes(self) -> int:
        """Bytes of one layer."""
        heads, columns, dim = self.size
        return 2 * heads * columns * dim * self.dtype.itemsize

    @abstractmethod
    def allocate(self, layer: OffloadedLayer) -> Tensor:
        """Return the room for a layer's keys and values, (2, 1, H, columns, D)."""

    @abstractmethod
    def write(self, layer: OffloadedLayer, target: Tensor, states: Tensor) -> None:
        """Copy new keys or values (1, H, Q, D) to `target`, their columns in the layer's room."""

    @abstractmethod
    def load(self, layer: OffloadedLayer) -> KeysValues:
        """Return a layer's pairs on the model's device; those of other layers may leave it."""

    def append_pairs(self, layer: OffloadedLayer, new: KeysValues) -> KeysValues:
        """Like `load`, but may reuse what is on the device, because `new` was just written."""
        return self.load(layer)

    @abstractmethod
    def release(self, layer: OffloadedLayer) -> None:
        """Free what the store holds for a layer."""


class FileStore(OffloadStore):
    """One temporary file per layer, reserved before any work.

    The pages of one layer at a time are in the process.
    """

    def __init__(
        self, count: int, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.maps: dict[int, mmap.mmap] = {}
        self.loaded: OffloadedLayer | None = None
        # Makes the layers, which call `release`.
        super().__init__(count, size, dtype, device)
        folder = tempfile.gettempdir()
        needed = count * self.nbytes
        message = (
            f"The full cache takes {needed / 1e9:,.1f} GB and {folder} has less; "
            "set TMPDIR to a roomier folder."
        )
        if shutil.disk_usage(folder).free < needed:
            raise RestoreKVError(message)
        try:
            self.maps |= {index: _reserve_file(self.nbytes) for index in range(count)}
        except OSError as error:
            raise RestoreKVError(message) from error

    def allocate(self, layer: OffloadedLayer) -> Tensor:
        heads, columns, dim = self.size
        return torch.frombuffer(self.maps[layer.index], dtype=self.dtype).view(
            2, 1, heads, columns, dim
        )

    def write(self, layer: OffloadedLayer, target: Tensor, states: Tensor) -> None:
        self.load(layer)
        target.copy_(states)

    def load(self, layer: OffloadedLayer) -> KeysValues:
        if self.loaded is not layer:
            self.unload()
            self.loaded = layer
        return layer.get_stored()

    def unload(self) -> None:
        """Take the loaded layer's pages out of the process; the system writes them to disk before
        it reuses the memory.
        """
        pages = self.maps.get(self.loaded.index) if self.loaded else None
        if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)

    def release(self, layer: OffloadedLayer) -> None:
        self.maps.pop(layer.index, None)
        if self.loaded is layer:
            self.loaded = None


class HostStore(OffloadStore):
    """The host's pinned memory, with columns before heads, so that the used columns are contiguous.

    Up to two layers are on the device; a second stream copies the later one. Without `streams` the
    memory is pageable, and every copy is waited for.
    """

    def __init__(
        self,
        count: int,
        size: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        streams: bool = True,
    ) -> None:
        self.on_device: dict[int, KeysValues] = {}
        self.cuda = streams and _uses_streams(device)
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        super().__init__(count, size, dtype, device)

    def allocate(self, layer: OffloadedLayer) -> Tensor:
        heads, columns, dim = self.size
        flat = torch.empty(2, 1, columns, heads, dim, dtype=self.dtype, pin_memory=self.cuda)
        return flat.transpose(2, 3)

    def write(self, layer: OffloadedLayer, target: Tensor, states: Tensor) -> None:
        # Both sides are contiguous. Only CUDA makes later reads wait for an asynchronous copy to
        # pinned memory.
        target.transpose(1, 2).copy_(states.transpose(1, 2).contiguous(), non_blocking=self.cuda)

    def load(self, layer: OffloadedLayer) -> KeysValues:
        # The device holds this layer and, on its way there, the next one; the others leave it.
        # After the last layer comes the first, with which the next pass begins.
        following = self.layers[(layer.index + 1) % len(self.layers)]
        for index in set(self.on_device) - {layer.index, following.index}:
            del self.on_device[index]
        pair = self.on_device.get(layer.index) or self.copy_to_device(layer)
        self.on_device[layer.index] = pair
        self.wait()
        # Its copy runs on the second stream while this layer is read.
        if following.length and following.index not in self.on_device:
            self.on_device[following.index] = self.copy_to_device(following)
        return pair

    def copy_to_device(self, layer: OffloadedLayer) -> KeysValues:
        """Copy a layer to the device on the second stream, for which a reader has to `wait`."""
        stream = self.stream
        if stream is None:
            keys, values = layer.get_stored()
            return keys.to(self.device, copy=True), values.to(self.device, copy=True)
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)  # writes must be finished, and reused memory must be free
        with torch.cuda.stream(stream):
            keys, values = layer.get_stored()
            keys = keys.to(self.device, non_blocking=True, copy=True)
            values = values.to(self.device, non_blocking=True, copy=True)
        # The allocator must not give their memory away while the current stream reads it.
        keys.record_stream(current)
        values.record_stream(current)
        return keys, values

    def wait(self) -> None:
        """Make the current stream wait for the copies on the second stream."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def append_pairs(self, layer: OffloadedLayer, new: KeysValues) -> KeysValues:
        # The first piece of a layer is on the device already.
        if layer.length == new[0].shape[-2]:
            self.on_device[layer.index] = new
        elif layer.index in self.on_device:
            self.wait()  # the shorter pair may still be on its way
            keys, values = self.on_device.pop(layer.index)
            self.on_device[layer.index] = (
                torch.cat([keys, new[0]], 2),
                torch.cat([values, new[1]], 2),
            )
            del keys, values  # which frees the shorter pair before the next layer is copied
        return self.load(layer)

    def release(self, layer: OffloadedLayer) -> None:
        self.on_device.pop(layer.index, None)


def _reserve_file(nbytes: int) -> mmap.mmap:
    """Map an unnamed temporary file; its blocks are allocated now if the system can do so.

    If the disk filled up later, the first write to a missing block would end the process with a
    signal.
    """
    # An unnamed file disappears with the process, however that ends.
    with tempfile.TemporaryFile(prefix="restorekv-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            os.truncate(file.fileno(), nbytes)
        return mmap.mmap(file.fileno(), nbytes)


def trim_heap() -> None:
    """Return freed memory to the system; glibc would keep up to a whole full cache of it for
    later.
    """
    # Other systems have no such library or no such function, and then keep the memory.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# The self-test cannot import this module, which imports it.
offload_self_test.register_stores(make_store)
