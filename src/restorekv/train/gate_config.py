"""The settings for training a gate; needs no PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from restorekv.data.config import require_at_least, setting
from restorekv.errors import GateError, RestoreKVError
from restorekv.model.gate_kinds import KINDS

if TYPE_CHECKING:
    from restorekv.model.shape import CacheShape

EVERY_KIND = ("kind", "tokens", "held_out", "seed")
RATES = {"fastkvzip": 0.2, "kvzap-mlp": 5e-3}
BATCHES = {"fastkvzip": 1000, "kvzap-mlp": 512}
USED_SETTINGS = {
    "fastkvzip": ("lr", "batch", "steps", "rank", "sinks"),
    "kvzap-linear": ("alpha", "floor"),
    "kvzap-mlp": ("lr", "batch", "epochs", "width", "floor"),
}


@dataclass(frozen=True)
class GateConfig:
    """The settings for one gate. The defaults are the authors'; a kind refuses settings that it
    does not use.
    """

    kind: str = setting("fastkvzip", f"Kind of gate: {', '.join(KINDS)}.")
    tokens: int = setting(500, "Tokens per context, drawn at random.")
    held_out: float = setting(0.05, "Share of the contexts to check on.")
    seed: int = setting(0, "Seed of draws and weights.")
    lr: float | None = setting(None, "Learning rate: 0.2 for fastkvzip, 0.005 for kvzap-mlp.")
    batch: int | None = setting(None, "Tokens per step: 1000 for fastkvzip, 512 for kvzap-mlp.")
    steps: int = setting(5000, "Steps of fastkvzip.")
    rank: int = setting(16, "Dimensions of fastkvzip's queries and keys.")
    sinks: int = setting(16, "Sink keys of fastkvzip.")
    epochs: int = setting(15, "Epochs of kvzap-mlp.")
    width: int | None = setting(
        None, "Hidden units of kvzap-mlp: d / 8 and at least 64 by default."
    )
    alpha: float = setting(1.0, "Penalty of kvzap-linear.")
    floor: float = setting(
        1e-8, "Lowest score whose logarithm kvzap learns; lower scores count as this."
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GateError(
                f"There is no gate of the kind {self.kind!r}; use one of {', '.join(KINDS)}."
            )
        require_at_least(1, self, ("tokens", "batch", "steps", "rank", "sinks", "epochs", "width"))
        for name in ("lr", "alpha", "floor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RestoreKVError(f"{name} must be above 0, not {value}.")
        if not 0 < self.held_out < 1:
            raise RestoreKVError(f"held_out must be between 0 and 1, not {self.held_out:g}.")
        used = (*EVERY_KIND, *USED_SETTINGS[self.kind])
        for field in fields(self):
            if field.name not in used and getattr(self, field.name) != field.default:
                raise RestoreKVError(
                    f"A gate of the kind {self.kind} does not use {field.name} "
                    f"(--{field.name} in the shell); leave it out."
                )

    def resolve(self, shape: CacheShape) -> Self:
        """Return the settings with numbers in place of None, chosen for the kind of gate and the
        model.
        """
        width = self.width
        if "width" in USED_SETTINGS[self.kind]:
            width = width or max(shape.hidden // 8, 64)
        return replace(
            self,
            lr=self.lr or RATES.get(self.kind),
            batch=self.batch or BATCHES.get(self.kind),
            width=width,
        )

    def list_used(self) -> dict[str, object]:
        """Return the settings that decide a gate of this kind, for its card."""
        names = (*EVERY_KIND, *USED_SETTINGS[self.kind])
        return {name: getattr(self, name) for name in names if name != "kind"}
