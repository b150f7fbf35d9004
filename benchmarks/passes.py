"""Timed steps for compressed and dense caches: a pass over all layers, and a copy that measures the
bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Step = Callable[[], object]


def pass_over(things: Sequence, act: Callable) -> Step:
    """Return a step that calls `act` with each of the things, such as layers."""

    def step() -> None:
        for thing in things:
            act(thing)

    return step


def time_once(step: Step) -> float:
    """Return the wall time of a step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure_bandwidth(count: int, device: torch.device, seconds: Callable[[Step], float]) -> float:
    """Return the bytes a second, read and written, of a copy of `count` bytes on a device.

    `seconds` times the copy.
    """
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / seconds(lambda: target.copy_(source))
