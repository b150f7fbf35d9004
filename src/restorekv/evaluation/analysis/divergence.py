"""How far a cache's predictions are from the full cache's: KL of the next-token distributions, in nats.

With p_t the distribution after the question and the first t tokens of the full cache's greedy answer from the full
cache, and q_t from a compressed one that is given the same tokens (teacher forcing):

    forward    KL(p_t || q_t), the divergence from the full-cache model (the paper's 7.3 -> 3.8)
    backward   KL(q_t || p_t)
    symmetric  their mean, what the adapters are trained on (Eq. 8)

`first` is t = 0, the distribution of the first answer token; `answer` is the mean over the answer's tokens, EOS
included, then over questions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from restorekv.compression.generate import answer_ids
from restorekv.evaluation.analysis.case import FULL, Case
from restorekv.evaluation.analysis.pool import Pool, plain
from restorekv.train.loss import answer_logits, divergence

PLACES, FIGURES = ("first", "answer"), ("forward", "backward", "symmetric", "agreement")
DEFINITIONS = {
    "first": "the distribution of the first answer token",
    "answer": "mean over the tokens of the full cache's greedy answer, which every cache is given, then over questions",
    "forward": "KL(full || cache), in nats",
    "backward": "KL(cache || full), in nats",
    "symmetric": "mean of both directions",
    "agreement": "share of positions whose likeliest token is the full cache's",
}


@torch.no_grad()
def measure(case: Case) -> dict:
    """{cache: {"first" and "answer": (4) figures}}, means over questions."""
    model, limits = case.prepared.model, [asked.max_new_tokens for asked in case.sample.questions]
    full = case.caches[FULL]
    may = case.protocol.first_may_stop
    answers = answer_ids(model, case.tokenizer, full, case.prompts, limits, first_may_stop=may)
    found: dict[str, list] = {name: [] for name in case.caches if name != FULL}
    for prompt, answer in zip(case.prompts, answers, strict=True):
        rows, counts = [torch.cat([prompt[0], answer])], [len(answer)]
        there = answer_logits(model, full, rows, counts)
        for name in found:
            figures = compared(there, answer_logits(model, case.caches[name], rows, counts))
            found[name].append(torch.stack([figures[0], figures.mean(0)]).tolist())
    return {name: dict(zip(PLACES, np.mean(every, 0).tolist(), strict=True)) for name, every in found.items()}


def compared(full: Tensor, cache: Tensor) -> Tensor:
    """Logits (M, V) each -> (M, 4): FIGURES at every position."""
    forward, backward = divergence(full, cache, "forward"), divergence(full, cache, "reverse")
    same = (full.argmax(-1) == cache.argmax(-1)).to(forward.dtype)
    return torch.stack([forward, backward, (forward + backward) / 2, same], -1).double().cpu()


def pooled(pool: Pool) -> dict:
    """Every question weighs the same; intervals over documents."""
    return {"caches": {name: {place: one(pool, name, place) for place in PLACES} for name in pool.documents[0]}}


def one(pool: Pool, name: str, place: str) -> dict:
    """A cache's figures at one place, each with its interval."""
    mean, told = pool.mean(name, place, by_question=True), {}
    for index, figure in enumerate(FIGURES):
        told[figure] = plain(mean[index])
        told[f"{figure}_interval"] = pool.interval(lambda x, i=index: x[:, i], name, place, by_question=True)
    return told
