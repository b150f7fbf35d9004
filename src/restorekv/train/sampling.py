"""Which context a step trains on, with which questions, at which ratio: functions of seed and step alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from restorekv.train.config import TrainConfig
from restorekv.train.examples import Example


@dataclass(frozen=True)
class StepSample:
    """One context of one step: its index, the indices of its questions, the ratio, and how many restore tokens."""

    index: int
    questions: tuple[int, ...]
    ratio: str
    restore_tokens: int


def sample_step(config: TrainConfig, step: int, examples: list[Example], processes: int = 1) -> list[StepSample]:
    """Returns the samples of `step` for all processes; every epoch shuffles the contexts anew."""
    rng = random.Random(f"step {config.seed} {step}")
    count = config.contexts * processes
    samples = []
    for number in range(step * count, (step + 1) * count):
        epoch, place = divmod(number, len(examples))
        order = list(range(len(examples)))
        random.Random(f"order {config.seed} {epoch}").shuffle(order)
        asked = range(len(examples[order[place]].questions))
        questions = tuple(rng.sample(asked, min(config.questions, len(asked))))
        ratio = f"{sample_ratio(config, rng):.6f}"
        tokens = rng.randint(1, config.restore_tokens) if config.nested else config.restore_tokens
        samples.append(StepSample(order[place], questions, ratio, tokens))
    return samples


def sample_ratio(config: TrainConfig, rng: random.Random) -> float:
    """Draws r ~ U(r_min, r_max), or uniformly in log r."""
    if config.ratio_law == "uniform":
        return rng.uniform(config.ratio_min, config.ratio_max)
    return math.exp(rng.uniform(math.log(config.ratio_min), math.log(config.ratio_max)))
