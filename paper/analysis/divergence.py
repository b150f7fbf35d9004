"""How far a cache's predictions are from the full cache's: the KL divergence of the next-token
distributions, in nats.

p_t is the full cache's distribution after the question and the first t tokens of its own greedy
answer; q_t is that of a compressed cache, which reads the same tokens (teacher forcing). `forward`
is KL(p_t || q_t) (the paper's 7.3 -> 3.8), `backward` is KL(q_t || p_t), and `symmetric` is their
mean, on which adapters are trained (Eq. 8). `first` is t = 0; `answer` is the mean over the
answer's tokens, EOS included, then over questions.
"""

from itertools import product

import numpy as np
import torch
from torch import Tensor

from paper.analysis.case import FULL, Case, DocumentFigures, to_plain
from restorekv.generation.decoding import generate_ids
from restorekv.train.loss import compute_answer_logits, compute_divergence

PLACES = ("first", "answer")
FIGURES = ("forward", "backward", "symmetric", "agreement")
DEFINITIONS = {
    "first": "the distribution of the first answer token",
    "answer": (
        "mean over the tokens of the full cache's greedy answer, which every cache reads, then "
        "over questions"
    ),
    "forward": "KL(full || cache), in nats",
    "backward": "KL(cache || full), in nats",
    "symmetric": "mean of both directions",
    "agreement": "share of positions whose most likely token is the full cache's",
}


@torch.no_grad()
def measure(case: Case) -> dict:
    """Return a document's means over questions: {cache: {"first": (4), "answer": (4)}},
    the FIGURES.
    """
    model = case.prepared.model
    limits = [question.max_new_tokens for question in case.sample.questions]
    full = case.caches[FULL]
    may_stop = case.protocol.first_may_stop
    answers = generate_ids(
        model, case.tokenizer, full, case.prompts, limits, first_may_stop=may_stop
    )
    figures: dict[str, list] = {name: [] for name in case.caches if name != FULL}
    for prompt, answer in zip(case.prompts, answers, strict=True):
        rows = [torch.cat([prompt[0], answer])]
        counts = [len(answer)]
        full_logits = compute_answer_logits(model, full, rows, counts)
        for name in figures:
            by_token = _compare(
                full_logits, compute_answer_logits(model, case.caches[name], rows, counts)
            )
            figures[name].append(torch.stack([by_token[0], by_token.mean(0)]).tolist())
    return {
        name: dict(zip(PLACES, np.mean(every, 0).tolist(), strict=True))
        for name, every in figures.items()
    }


def _compare(full: Tensor, cache: Tensor) -> Tensor:
    """Return FIGURES at every position (M, 4) from the logits (M, V) of both caches."""
    forward = compute_divergence(full, cache, "forward")
    backward = compute_divergence(full, cache, "reverse")
    same = (full.argmax(-1) == cache.argmax(-1)).to(forward.dtype)
    return torch.stack([forward, backward, (forward + backward) / 2, same], -1).double().cpu()


def pool_figures(figures: DocumentFigures) -> dict:
    """Pool the figures of all documents: questions have equal weights, intervals are over
    documents.
    """
    caches: dict[str, dict] = {}
    for name, place in product(figures.documents[0], PLACES):
        mean = figures.mean(name, place, by_question=True)
        columns = {}
        for index, key in enumerate(FIGURES):
            columns[key] = to_plain(mean[index])
            columns[f"{key}_interval"] = figures.interval(
                lambda x, i=index: x[:, i], name, place, by_question=True
            )
        caches.setdefault(name, {})[place] = columns
    return {"caches": caches}
