"""Progress of a compression: the share of its forward passes that is done, counted layer by
layer.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.compression.compressor import BeginPhase
from restorekv.model.observer import HOOKS_LOCK
from restorekv.model.shape import get_backbone

# Called with what is being done, such as a phase, and the share of the whole that is done (0 to 1).
OnProgress = Callable[[str, float], None]
# Called with the steps done, their number and what they are: for work in equal steps.
OnStep = Callable[[int, int, str], None]
SMALLEST_STEP = 0.01  # between two calls in one phase
# The share is 1 only at the end of the compression: evictors may read more than was expected.
MOST_BEFORE_THE_END = 0.99


class ProgressMeter:
    """Counts the tokens that layers have read, and reports the share of those to be read.

    Args:
        on_progress: Called when a phase begins and whenever the share has grown by a hundredth.
        tokens: Tokens to be read in all, each by every layer.
        layers: Layers of the model.
    """

    def __init__(self, on_progress: OnProgress, tokens: int, layers: int) -> None:
        self.on_progress = on_progress
        self.expected = tokens * layers
        self.phase = "prefill"
        self.done = 0
        self.reported = 0.0
        self.thread = threading.get_ident()

    @property
    def share(self) -> float:
        """The share that is done."""
        return min(self.done / self.expected, MOST_BEFORE_THE_END)

    def begin_phase(self, phase: str) -> None:
        """Report that a phase begins."""
        self.phase = phase
        self.reported = self.share
        self.on_progress(phase, self.reported)

    def count_layer(self, _: nn.Module, __: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        """Count a layer's pass: the hook of every decoder layer."""
        # Hooks see the passes of other threads too: a server answers while it compresses.
        if threading.get_ident() != self.thread:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self.done += hidden.shape[-2]
        if self.share - self.reported >= SMALLEST_STEP:
            self.reported = self.share
            self.on_progress(self.phase, self.reported)


@contextmanager
def measure_progress(
    model: PreTrainedModel, tokens: int, on_progress: OnProgress | None
) -> Iterator[BeginPhase]:
    """Watch a compression in this thread; the block gets the callback for its phases.

    Args:
        model: The model that compresses.
        tokens: Tokens to be read in all, each by every layer.
        on_progress: Called with a phase and the share that is done; None watches nothing.
    """
    if on_progress is None:
        yield lambda phase: None
        return
    layers: Any = get_backbone(model).layers
    meter = ProgressMeter(on_progress, tokens, len(layers))
    with HOOKS_LOCK:
        handles = [layer.register_forward_hook(meter.count_layer) for layer in layers]
    try:
        yield meter.begin_phase
    finally:
        with HOOKS_LOCK:
            for handle in handles:
                handle.remove()
