"""What an ablation is: variants of one training, the paper's figures for them, and what the paper says they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from restorekv.tables import name
from restorekv.train.config import TrainConfig

RATIOS = (0.4, 0.2, 0.1, 0.05, 0.025)  # every variant is asked at all of them
Scores = Mapping[float, float]  # points by ratio


@dataclass(frozen=True)
class Variant:
    """Overrides of the settings; without `train` nothing is trained and the base evictor answers alone.

    `evictor` is the one used at inference where it is not the one trained on. `paper` holds the scores of the paper's
    table (Qwen3-4B on RULER-4K), `paper_std` their deviation over seeds where the paper tells it.
    """

    label: str
    train: Mapping[str, object] | None = field(default_factory=dict)
    conventions: Mapping[str, object] = field(default_factory=dict)
    evictor: str | None = None
    paper: Scores = field(default_factory=dict)
    paper_std: Scores = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """The weighted sum of the variants' scores at `ratio`, and `plus`, is above zero; less a deviation if one is named.

    The sum is in points: how far the scores are on the claim's side of its border. `spread` names the variant whose
    deviation over seeds is taken off.
    """

    text: str
    ratio: float
    weights: Mapping[str, float]
    plus: float = 0.0
    spread: str | None = None


@dataclass(frozen=True)
class Sweep:
    """One table of the paper. `reference` is the variant the others are compared with, question by question."""

    title: str
    table: str  # its caption and label in the paper
    ratios: tuple[float, ...]  # the paper's
    variants: Mapping[str, Variant]
    reference: str
    claims: tuple[Claim, ...]


def above(better: str, worse: str, ratio: float, text: str) -> Claim:
    """One variant scores more than another."""
    return Claim(f"{text} at r = {ratio:g}", ratio, {better: 1, worse: -1})


def keeps(part: str, share: float, of: str, base: str, ratio: float, text: str) -> Claim:
    """A variant's gain over `base` is more than `share` of the gain of `of`."""
    return Claim(f"{text} at r = {ratio:g}", ratio, {part: 1, of: -share, base: share - 1})


def at(ratios: tuple[float, ...], *scores: float) -> dict[float, float]:
    """A row of a table."""
    return dict(zip(ratios, scores, strict=True))


THREE = (0.2, 0.1, 0.05)
BASE = at(THREE, 91.4, 80.1, 38.2)
FULL = at(THREE, 93.5, 88.8, 73.2)


def alone(settings: TrainConfig, paper: Scores = BASE) -> Variant:
    """The base evictor without restoring."""
    return Variant(f"{name(settings.evictor, False)} alone", None, paper=paper)


def whole(settings: TrainConfig, paper: Scores = FULL, label: str = "RestoreKV", **more) -> Variant:
    """RestoreKV as the settings have it."""
    return Variant(f"{label} (n = {settings.restore_tokens})", paper=paper, **more)
