"""A small prefill through a store of `offload.py`, compared number by number with what was written.

Every layer grows in several steps, as in a prefill, and is then read in several orders. What a
reader gets is copied on the device right away and compared at the end, so a copy that has not
arrived yet, or memory that is reused too early, shows as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from restorekv.cache.tail import KeysValues
from restorekv.model.attention.backend_self_test import explain_no_obstacle
from restorekv.model.attention.self_tests import Component, Measurement, Target, register_component

LAYERS = 4
# Numbers of a layer's keys, about: enough that a copy takes longer than starting what reads it.
COLUMNS = 4 << 20
STEPS = (0.5, 0.25, 0.25)  # shares of the columns that a layer gains at a time
ORDERS = ((0, 1, 2, 3), (3, 1, 2, 0), (2, 2, 3, 0, 1))  # orders of reading the layers
# Makes a store of offload.py, which imports this file.
MakeStore = Callable[..., Any]


def _measure_store(make_store: MakeStore, streams: bool, target: Target) -> Iterator[Measurement]:
    """Measure the share of wrong numbers among those that readers get."""
    columns = _count_columns(target)
    size = target.heads, columns, target.dim
    store = make_store(LAYERS, size, target.dtype, target.device, streams)
    generator = torch.Generator().manual_seed(1)
    # The expected numbers stay on the CPU; the store gets copies on the device, as from a model.
    on_cpu: list[KeysValues] = []
    there: list[KeysValues] = []
    for _ in range(LAYERS):
        keys, values = (
            torch.rand(1, *size, generator=generator, dtype=torch.float32).to(target.dtype)
            for _ in range(2)
        )
        on_cpu.append((keys, values))
        there.append((keys.to(target.device), values.to(target.device)))
    # A prefill: every layer grows by a piece at a time.
    start = 0
    grown = []
    for number, share in enumerate(STEPS):
        # The last piece takes what rounding left over.
        end = columns
        if number != len(STEPS) - 1:
            end = start + max(int(columns * share), 1)
        for layer, (keys, values) in zip(store.layers, there, strict=True):
            found = layer.update(keys[:, :, start:end].clone(), values[:, :, start:end].clone())
            # Copied at once: a copy on a second stream that has not arrived yet gives wrong numbers
            # now.
            grown.append((layer.index, end, _copy_pair(found)))
        start = end
    # Otherwise the device would hold everything twice.
    del there
    wrong = sum(_measure_wrong_share(found, on_cpu[index], end) for index, end, found in grown)
    yield Measurement("a prefill", wrong, 0.0)
    for order in ORDERS:
        read = []
        for index in order:
            layer = store.layers[index]
            keys = layer.keys
            values = layer.values
            assert keys is not None and values is not None, "every layer was written above"
            read.append((index, _copy_pair((keys, values))))
        wrong = sum(_measure_wrong_share(found, on_cpu[index], columns) for index, found in read)
        yield Measurement(f"layers read in the order {', '.join(map(str, order))}", wrong, 0.0)
    # Releases each layer, as `evict` with consume=True does.
    for layer in store.layers:
        layer.keys = None


def _count_columns(target: Target) -> int:
    """Return the columns of a layer: many for a GPU, where copies should take a while."""
    # Copies to a GPU have to take longer than starting what reads them; a CPU writes files.
    numbers = COLUMNS if target.device.type == "cuda" else COLUMNS >> 8
    return max(numbers // (target.heads * target.dim), 8)


def _copy_pair(pair: KeysValues) -> KeysValues:
    """Return copies that the device makes now, as attention would read the pair now."""
    keys, values = pair
    return keys.clone(), values.clone()


def _measure_wrong_share(found: KeysValues, wanted: KeysValues, end: int) -> float:
    """Return the share of numbers that differ; NaN differs."""
    shares = []
    for ours, theirs in zip(found, wanted, strict=True):
        shares.append(float((ours.cpu() != theirs[:, :, :end]).double().mean()))
    return sum(shares) / 2


def _explain_gpu_only(device: torch.device, dtype: torch.dtype) -> str:
    """Return why offloading without a second stream is not for a device, or "" if it is."""
    if device.type == "cpu":
        return "it is for GPUs; a CPU offloads into temporary files"
    return ""


def register_stores(make_store: MakeStore) -> None:
    """Register both ways to offload as components: the device's usual store (on a CPU, files; on a
    CUDA device, copies on a second stream), and the host's memory without a second stream.
    """
    register_component(
        Component(
            "offload",
            "Offloading",
            "Copies of offloaded layers are waited for, which takes longer",
            explain_no_obstacle,
            partial(_measure_store, make_store, True),
        )
    )
    register_component(
        Component(
            "offload-plain",
            "Offloading without a second stream",
            "The whole cache stays on the device",
            _explain_gpu_only,
            partial(_measure_store, make_store, False),
        )
    )
