"""The memory that compression takes, computed instead of measured: `python -m benchmarks memory
--on-paper`.

All sizes follow from a model's shape; bfloat16, binary units. The parts, with C = S + T columns:

    weights     2 bytes a parameter
    full cache  2 * L * H * D * C * 2          one layer  the same over L
    scores      6 * L * H * C                  a float32 score a pair, and at most two booleans for
                                               whether it is kept; 10 for streaming, which chooses
                                               the best pairs in a copy without the prefix
    kept        r of the full cache            one part   P = 2,048 columns of the full cache
    workspace   c * (3 * C + 2 * (4 * d + 3 * f + 4 * q)), c = min(4096, 2^26 / C, C) rows of a
                chunk, hidden width d, MLP width f, q = H * G * D: the mask as booleans and as
                numbers, and a layer's activations

    plain       weights + full cache + one layer + scores + workspace
    offload     weights + one layer, twice (held and joined with the chunk's pairs) + kept + scores
                + workspace
    streaming   weights + kept + one part + scores + workspace of a part, C = P, which is prefilled
                alone

These are the sizes on a CPU. A GPU holds a third layer when it offloads: the next one, fetched
ahead. Prefixes are counted as text.
"""

from __future__ import annotations

from dataclasses import dataclass

from restorekv.context import format_bytes
from restorekv.model.prefill import CHUNK, MASK

RATIO = 0.05
PART = 2048
SCORES = {"plain": 6, "offload": 6, "streaming": 10}  # bytes a pair
LENGTHS = (32_768, 131_072, 1_048_576)


@dataclass(frozen=True)
class Model:
    """A model's published shape."""

    name: str
    layers: int
    hidden: int
    inner: int
    queries: int
    heads: int
    dim: int
    vocabulary: int
    tied: bool

    @property
    def weights(self) -> int:
        """Return the bytes of all weights except norms."""
        attention = self.hidden * self.dim * (2 * self.queries + 2 * self.heads)
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return 2 * (self.layers * (attention + 3 * self.hidden * self.inner) + tables)

    def layer(self, columns: int) -> int:
        return 4 * self.heads * self.dim * columns

    def scores(self, columns: int, mode: str = "plain") -> int:
        return SCORES[mode] * self.layers * self.heads * columns

    def workspace(self, columns: int) -> int:
        rows = min(CHUNK, MASK // columns, columns)
        return rows * (
            3 * columns + 2 * (4 * self.hidden + 3 * self.inner + 4 * self.queries * self.dim)
        )

    def peaks(self, columns: int) -> tuple[int, int, int]:
        """Return the peak bytes of the modes plain, offload and streaming."""
        full = self.layers * self.layer(columns)
        layer = self.layer(columns)
        kept = int(RATIO * full)
        part = self.layers * self.layer(PART)
        always = self.weights + self.scores(columns) + self.workspace(columns)
        streamed = self.weights + self.scores(columns, "streaming") + self.workspace(PART)
        return always + full + layer, always + 2 * layer + kept, streamed + kept + part


MODELS = (
    Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936, True),
    Model("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151_936, True),
    Model("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256, False),
)


def format_table() -> str:
    """Return a table of every model and length."""
    text = f"bfloat16, r = {RATIO:g}, parts of {PART:,} tokens\n\n"
    text += "| model | T | weights | full cache | one layer | scores | workspace | peak | offload |"
    text += " streaming |\n"
    text += "|---" * 10 + "|\n"
    for model in MODELS:
        for tokens in LENGTHS:
            layer = model.layer(tokens)
            parts = (
                model.weights,
                model.layers * layer,
                layer,
                model.scores(tokens),
                model.workspace(tokens),
            )
            cells = [model.name, f"{tokens:,}", *map(format_bytes, (*parts, *model.peaks(tokens)))]
            text += f"| {' | '.join(cells)} |\n"
    return text
