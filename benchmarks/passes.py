"""What is timed alike over compressed and dense caches: a pass over all layers, and a copy that
tells the bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Step = Callable[[], object]


def pass_over(things: Sequence, act: Callable) -> Step:
    """Return a step that acts on all of them, such as layers."""

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
    """Bytes a second, read and written, of one copy of `count` bytes, which `seconds` times."""
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / seconds(lambda: target.copy_(source))
