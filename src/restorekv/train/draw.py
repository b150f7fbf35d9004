"""What each step of a run trains on: which contexts and questions, at which ratio, with how many
restore tokens. Seed and step alone decide it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from restorekv.spec import split_specs
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext


@dataclass(frozen=True)
class StepSample:
    """One context of one step: its index, the indices of its questions, the ratio, and the number
    of restore tokens.

    `evictor` is the index of the evictor among those of the run.
    """

    index: int
    questions: tuple[int, ...]
    ratio: str
    restore_tokens: int
    evictor: int = 0


def draw_step_samples(
    config: TrainConfig, step: int, examples: list[TrainingContext], processes: int = 1
) -> list[StepSample]:
    """Return the samples of `step` for all processes, which seed and step alone decide; every
    epoch shuffles again.

    The `config.draws` samples of a context follow each other and share its evictor.
    """
    rng = random.Random(f"step {config.seed} {step}")
    count = config.contexts * processes
    evictors = len(split_specs(config.evictor))
    samples = []
    for number in range(step * count, (step + 1) * count):
        # Contexts are numbered over all steps; each epoch takes all of them once, in its own order.
        epoch, position = divmod(number, len(examples))
        order = list(range(len(examples)))
        random.Random(f"order {config.seed} {epoch}").shuffle(order)
        index = order[position]
        question_count = len(examples[index].questions)
        drawn = []
        for _ in range(config.draws):
            chosen = rng.sample(range(question_count), min(config.questions, question_count))
            # As text with six digits, so that a sample reads the same in every record.
            ratio = f"{_draw_ratio(config, rng):.6f}"
            tokens = config.restore_tokens
            if config.nested:
                tokens = rng.randint(1, config.restore_tokens)
            drawn.append((tuple(chosen), ratio, tokens))
        # Drawn last and only if needed, so that runs with one evictor keep the draws that they had
        # before there could be several.
        evictor = rng.randrange(evictors) if evictors > 1 else 0
        for questions, ratio, tokens in drawn:
            samples.append(StepSample(index, questions, ratio, tokens, evictor))
    return samples


def select_own_samples(
    samples: Sequence[StepSample], draws: int, rank: int, processes: int
) -> list[StepSample]:
    """Return one process' share of a step: whole contexts, with all their draws."""
    own = []
    contexts = range(0, len(samples), draws)
    # Contexts, not samples: the draws of one context share its prefill.
    for first in contexts[rank::processes]:
        own += samples[first : first + draws]
    return own


def _draw_ratio(config: TrainConfig, rng: random.Random) -> float:
    """Draw r ~ U(r_min, r_max), or uniformly in log r."""
    if config.ratio_law == "uniform":
        return rng.uniform(config.ratio_min, config.ratio_max)
    return math.exp(rng.uniform(math.log(config.ratio_min), math.log(config.ratio_max)))
