"""Fidelity to the full cache: how far a compressed cache's predictions are from it, and how often
the answers agree.

The full cache answers a sample's questions once, greedily. A compressed cache then reads the ids of
those answers as they were generated, with the EOS that ended them; KL(full || cache) is computed at
each, in float32 and nats. Questions start at each cache's own next position: S + T for the full
cache, S + T + n after n restore tokens.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.evaluation.stats import bootstrap_ratio
from restorekv.generation.decoding import BATCH
from restorekv.train.loss import compute_hidden_divergence, run_answers

FIGURES = ("kl", "kl_low", "kl_high", "same", "answer_tokens")


@dataclass(frozen=True)
class FullAnswers:
    """The full cache's answers to the questions of one sample.

    For every question: the ids of its prompt (q,) and of its answer (M,), and the last hidden
    states (M, d) that predict the answer's ids.
    """

    prompts: Sequence[Tensor]
    answers: Sequence[Tensor]
    hidden: Sequence[Tensor]

    @classmethod
    def from_answers(
        cls,
        model: PreTrainedModel,
        cache: RaggedCache,
        prompts: Sequence[Tensor],
        answers: Sequence[Tensor],
    ) -> Self:
        """Compute the answers' hidden states with the full cache; prompts are (1, q) or (q,)."""
        flat = [prompt.flatten().cpu() for prompt in prompts]
        return cls(flat, answers, _compute_hidden_states(model, cache, flat, answers))

    @torch.no_grad()
    def measure_divergences(self, model: PreTrainedModel, cache: RaggedCache) -> list[float]:
        """Return the mean KL(full || cache) over each answer's tokens, in nats."""
        states = _compute_hidden_states(model, cache, self.prompts, self.answers)
        # The full cache's states and this cache's, answer by answer.
        pairs = zip(self.hidden, states, strict=True)
        return [
            compute_hidden_divergence(model, full, own, "forward").double().mean().item()
            for full, own in pairs
        ]


@torch.no_grad()
def _compute_hidden_states(
    model: PreTrainedModel, cache: RaggedCache, prompts: Sequence[Tensor], answers: Sequence[Tensor]
) -> list[Tensor]:
    """Return the last hidden states (M, d) that predict each answer's M ids, read in batches."""
    states: list[Tensor] = []
    for start in range(0, len(prompts), BATCH):
        batch = range(start, min(start + BATCH, len(prompts)))
        counts = [len(answers[index]) for index in batch]
        rows = [torch.cat([prompts[index], answers[index]]) for index in batch]
        states += run_answers(model, cache, rows, counts).hidden.split(counts)
    return states


def summarize_fidelity(
    lines: Sequence[Mapping], tasks: Container[str] | None = None
) -> dict[str, Any]:
    """Return FIGURES over the contexts of `lines`.

    "kl" weighs every token of the full cache's answers equally, with a 95 % bootstrap over
    contexts; "same" is the percentage of answers with the full cache's exact text. `tasks`
    restricts the questions; None takes all of them.
    """
    asked = []
    for line in lines:
        asked.append([each for each in line["answers"] if tasks is None or each["task"] in tasks])
    sums, tokens = tally_divergence(asked)
    # Contexts that were not asked these tasks are not drawn.
    drawn = tokens > 0
    kl, low, high = bootstrap_ratio(sums[drawn], tokens[drawn])
    same = [answer["same"] for answers in asked for answer in answers]
    figures = (kl, low, high, 100 * sum(same) / len(same), int(tokens.sum()))
    return dict(zip(FIGURES, figures, strict=True))


def tally_divergence(contexts: Sequence[Sequence[Mapping]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the KL summed over the tokens of each context's answers, and how many tokens they
    have, both (contexts,).
    """
    # Weighted by tokens: an answer of forty tokens counts forty times an answer of one.
    sums = np.zeros(len(contexts))
    tokens = np.zeros(len(contexts))
    for number, answers in enumerate(contexts):
        for answer in answers:
            sums[number] += answer["kl"] * answer["answer_tokens"]
            tokens[number] += answer["answer_tokens"]
    return sums, tokens
