"""What a training run is made of: the paper's settings are the defaults ("Training Setup Details")."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

from restorekv.compression.budget import PrefixPolicy
from restorekv.compression.compressor import Eviction
from restorekv.compression.prepared import RestoreFrom, one_of
from restorekv.errors import RestoreKVError
from restorekv.train.answers import ATTENTION, HIDDEN
from restorekv.train.distill import DIRECTIONS, REDUCTIONS, Direction, Reduction

RatioLaw = Literal["uniform", "log-uniform"]
RATIO_LAWS: tuple[str, ...] = ("uniform", "log-uniform")
AT_LEAST_ONE = ("restore_tokens", "rank", "steps", "contexts", "questions", "max_new_tokens", "checkpoint_every")
AT_LEAST_ZERO = ("alpha", "lr", "weight_decay", "warmup", "clip", "keep", "hidden_weight", "attention_weight")


@dataclass(frozen=True)
class TrainConfig:
    """One run; the same settings and data give the same adapter."""

    evictor: str = "kvzip"
    prefix_policy: PrefixPolicy = "free"
    allocation: str = "global"
    restore_from: RestoreFrom = "full"
    restore_tokens: int = 8  # n
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    init: str = ""  # folder or hub id of the adapter to begin with; none: a fresh one
    embeddings: str = "learned"  # or "fixed": those of a line break
    lr: float = 2e-4
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    steps: int = 5000
    contexts: int = 1  # per process and step
    questions: int = 4  # per context and step, at most
    ratio_min: float = 0.025
    ratio_max: float = 0.25
    ratio_law: RatioLaw = "uniform"
    nested: bool = False  # draw how many restore tokens are used, 1 to n, so that the first k work alone
    kl: Direction = "symmetric"
    reduction: Reduction = "mean"
    hidden_weight: float = 0.0  # of matching the hidden states at the answer, every layer
    attention_weight: float = 0.0  # of matching the attention outputs there
    max_new_tokens: int = 512
    seed: int = 0
    keep: int = 0  # contexts whose prefill, scores and lessons stay in memory for the next time they are drawn
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        self.eviction()
        one_of("embeddings", self.embeddings, ("learned", "fixed"))
        one_of("ratio_law", self.ratio_law, RATIO_LAWS)
        one_of("kl", self.kl, DIRECTIONS)
        one_of("reduction", self.reduction, REDUCTIONS)
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise RestoreKVError(f"{name} is a number of at least 1, not {getattr(self, name)}.")
        for name in AT_LEAST_ZERO:
            if not 0 <= getattr(self, name) < math.inf:
                raise RestoreKVError(f"{name} is a number of at least 0, not {getattr(self, name)}.")
        if not 1e-6 <= self.ratio_min <= self.ratio_max <= 1:
            raise RestoreKVError(
                "Training ratios need 0.000001 <= ratio_min <= ratio_max <= 1, not "
                f"{self.ratio_min:g} and {self.ratio_max:g}."
            )

    @classmethod
    def parse(cls, text: str) -> TrainConfig:
        """The counterpart of `text`; settings that an older file lacks take their defaults."""
        found = json.loads(text)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})

    def watched(self) -> dict[str, float]:
        """The states that are matched beside the logits, with their weights."""
        weights = {HIDDEN: self.hidden_weight, ATTENTION: self.attention_weight}
        return {name: weight for name, weight in weights.items() if weight}

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    def eviction(self) -> Eviction:
        """What the adapter is trained to restore; contexts too short for n restore tokens get fewer."""
        conventions = {"allocation": self.allocation, "restore_from": self.restore_from}
        return Eviction.make(self.evictor, prefix_policy=self.prefix_policy, on_small_budget="fewer", **conventions)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
