"""Which context a step visits, with which questions, at which ratio: functions of seed and step alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from restorekv.train.config import TrainConfig
from restorekv.train.example import Example


@dataclass(frozen=True)
class StepSample:
    """One context of one step: which of its questions, at which ratio, with how many restore tokens."""

    index: int
    questions: tuple[int, ...]
    ratio: str
    tokens: int


def draw(config: TrainConfig, step: int, examples: list[Example], size: int = 1) -> list[StepSample]:
    """The visits of `step` by all `size` processes; contexts are shuffled anew every epoch."""
    rng = random.Random(f"step {config.seed} {step}")
    count = config.contexts * size
    visits = []
    for visit in range(step * count, (step + 1) * count):
        epoch, place = divmod(visit, len(examples))
        order = list(range(len(examples)))
        random.Random(f"order {config.seed} {epoch}").shuffle(order)
        asked = range(len(examples[order[place]].questions))
        chosen = tuple(rng.sample(asked, min(config.questions, len(asked))))
        ratio = f"{ratio_of(config, rng):.6f}"
        tokens = rng.randint(1, config.restore_tokens) if config.nested else config.restore_tokens
        visits.append(StepSample(order[place], chosen, ratio, tokens))
    return visits


def ratio_of(config: TrainConfig, rng: random.Random) -> float:
    """r ~ U(r_min, r_max), or uniform in log r."""
    if config.ratio_law == "uniform":
        return rng.uniform(config.ratio_min, config.ratio_max)
    return math.exp(rng.uniform(math.log(config.ratio_min), math.log(config.ratio_max)))
