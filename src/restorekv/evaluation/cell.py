"""One cell of a grid: everything that decides a score, and the name of the folder that holds it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from restorekv.compression.budget import exact_ratio, from_file, to_file
from restorekv.compression.prepared import CompressionConfig

FULL = "full"
LATER = {"storage": "model", "streaming": 0}  # what the first run folders do not tell: their cells keep their names


@dataclass(frozen=True)
class Cell:
    """A model asked a benchmark under a protocol, from caches of one method at one ratio.

    `evictor` is a spec, or "full" for the full cache; `adapter` is what `load_adapter` takes, None for the base alone.
    Of the conventions, None means the protocol's. `max_context` cuts longer contexts at their end (0: the longest that
    the model takes). `streaming` compresses so many tokens at a time (0: all at once); see streaming.py.
    """

    model: str
    benchmark: str
    evictor: str
    ratio: str
    adapter: str | None = None
    restore_tokens: int | None = None
    protocol: str = "kvpress"
    prefix_policy: str | None = None
    on_small_budget: str = "error"
    allocation: str = "global"
    restore_from: str = "full"
    offset: int = 0
    max_context: int = 0
    dtype: str = "auto"
    storage: str = "model"
    streaming: int = 0

    @classmethod
    def full(cls, **common: object) -> Cell:
        """The full cache, which every method of a grid is measured against."""
        return cls(evictor=FULL, ratio="1", **common)

    @property
    def restored(self) -> bool:
        return self.adapter is not None

    @property
    def value(self) -> float:
        """r as a number."""
        return float(exact_ratio(self.ratio))

    @property
    def preparation(self) -> tuple[str, ...]:
        """Cells that agree in this share prefill and scores of a context."""
        return (*self.place, str(self.streaming), self.evictor)

    @property
    def place(self) -> tuple[str, ...]:
        """Cells that agree in this were asked the same questions of the same model."""
        return (self.model, self.dtype, self.protocol, self.benchmark, str(self.max_context))

    @property
    def told(self) -> dict:
        """For files."""
        return to_file({key: value for key, value in asdict(self).items() if key not in LATER or value != LATER[key]})

    @classmethod
    def parse(cls, told: dict) -> Cell:
        """The counterpart of `told`."""
        return cls(**from_file(told))

    @property
    def name(self) -> str:
        """Of its folder: readable, and the same for equal cells only."""
        words = [self.model.rstrip("/").rsplit("/", 1)[-1], self.benchmark, self.protocol, self.evictor]
        words += ["alone" if self.adapter is None else "restored", self.ratio]
        digest = hashlib.sha256(json.dumps(self.told, sort_keys=True).encode()).hexdigest()[:8]
        readable = "_".join(re.sub(r"[^\w.+=-]+", "-", word) for word in words)
        return f"{readable[:120]}_{digest}"

    def conventions(self, prefix_policy: str) -> CompressionConfig:
        """With the protocol's prefix policy where the cell names none."""
        policy = self.prefix_policy or prefix_policy
        return CompressionConfig(policy, self.on_small_budget, self.allocation, self.restore_from, self.offset)
