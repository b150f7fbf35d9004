"""What the last query token attends to: its attention mass on the context, layer by layer (the
paper's Fig. mechanism).

The last query token predicts the first answer token. In each query head its attention weights a_i
over a cache's pairs are divided into four parts with masses that add up to 1; DEFINITIONS says
which. The paper does not define its divergences, so two natural ones are measured, in nats, over
layers l and context columns i:

    kl_profile     KL(p || q) = sum_l p_l log(p_l / q_l),
                   p = m^full / sum_l m^full_l,  q = m^cache / sum_l m^cache_l,
                   m_l = the mean of the context mass over query heads and questions; null if a
                   layer holds no context at all, so kl_profile_backward = KL(q || p) is measured
                   too
    kl_attention   mean over query heads and questions of  sum_{i in K} p_i log(p_i / q_i),
                   p = a^full / sum_K a^full,  q = a^cache / sum_K a^cache,
                   K = the columns of `context` that the head holds; heads that hold none are
                   left out
"""

import numpy as np
import torch
from torch import Tensor

from paper.analysis.case import (
    FULL,
    Case,
    DocumentFigures,
    to_plain,
    to_plain_list,
    watch_attention,
)
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.model.cache_argument import pass_cache
from restorekv.model.shape import get_backbone

PARTS = ("context", "sinks", "restore", "question")
LEAST = 0.001  # layers with a smaller mass on the context are counted in `layers_below`
DEFINITIONS = {
    "query": "the last token before the answer; means over query heads and questions",
    "context": "context pairs beyond the sinks",
    "sinks": "the chat prefix, and the first 4 columns where it is shorter",
    "restore": "the restore pairs, which are not context",
    "question": "the question's own pairs, template suffix included",
    "layers_below": "layers whose mean mass on the context is below 0.1 %",
    "kl_profile": "KL(full || cache) in nats of the mean context masses, normalized over layers; "
    "not defined where a "
    "layer's mass is zero",
    "kl_profile_backward": "KL(cache || full) of the same, always defined",
    "kl_attention": "KL(full || cache) in nats of the attention over the context columns that "
    "the head holds, "
    "normalized over them; mean over layers, heads and questions",
}


def measure(case: Case) -> dict:
    """Return a document's means over questions: {cache: {"masses": (L, 4), "kl_attention": [sums
    (L), heads with context (L)]}}.
    """
    figures: dict[str, list[dict]] = {name: [] for name in case.caches}
    for prompt in case.prompts:
        full: dict[tuple[int, int], Tensor] = {}
        for name, cache in case.caches.items():
            figures[name].append(_measure_question(case, cache, prompt, full, keep=name == FULL))
    return {
        name: {key: np.mean([each[key] for each in every], 0).tolist() for key in every[0]}
        for name, every in figures.items()
    }


@torch.no_grad()
def _measure_question(
    case: Case, cache: RaggedCache, prompt: Tensor, full: dict[tuple[int, int], Tensor], keep: bool
) -> dict:
    """Return the masses and divergences of one question.

    With `keep` the cache is the full one: its weights on the context are stored in `full`, with
    which the other caches are then compared.
    """
    model = case.prepared.model
    layers = len(cache.full_attention)  # layers with a sliding window are not observed
    sinks = case.sinks
    masses = torch.zeros(layers, len(PARTS), dtype=torch.float64)
    kl = torch.zeros(2, layers, dtype=torch.float64)

    def see(index: int, layer: RaggedLayer, weights) -> None:
        columns = layer.positions.cpu().split(layer.offsets.diff().tolist())
        for head, (own, places) in enumerate(zip(weights, columns, strict=True)):
            # (G, N + t)
            row = own[:, -1]
            held = len(places)
            parts = (row[:, :held][:, places >= sinks], row[:, :held][:, places < sinks])
            tail = (
                row[:, held : held + layer.restore_length],
                row[:, held + layer.restore_length :],
            )
            masses[index] += (
                torch.stack([part.sum(-1).mean() for part in (*parts, *tail)]) / layer.heads
            )
            if keep:
                full[index, head] = row[:, :held]
            elif parts[0].shape[-1]:
                there = full[index, head][:, places[places >= sinks].long()]
                kl[:, index] += torch.stack(
                    [_compute_divergence(there, parts[0]).mean(), torch.ones(())]
                )

    with watch_attention(model, see, last=1):
        backbone = get_backbone(model)
        backbone(
            input_ids=prompt.to(model.device),
            **pass_cache(backbone, cache.fork()),
            use_cache=True,
        )
    return {"masses": masses.tolist()} | ({} if keep else {"kl_attention": kl.tolist()})


def _compute_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) (...) of weights (..., K), after normalizing both over the last
    dimension.
    """
    tiny = torch.finfo(q.dtype).tiny
    p, q = (x.clamp_min(tiny) / x.clamp_min(tiny).sum(-1, keepdim=True) for x in (p, q))
    return (p * (p / q).log()).sum(-1)


def pool_figures(figures: DocumentFigures) -> dict:
    """Pool the figures of all documents: questions have equal weights, intervals are over
    documents.
    """
    masses = {name: figures.mean(name, "masses", by_question=True) for name in figures.documents[0]}
    caches = {}
    for name, mean in masses.items():
        caches[name] = {
            **{part: to_plain(mean[:, index]) for index, part in enumerate(PARTS)},
            "average": dict(zip(PARTS, to_plain_list(mean.mean(0)), strict=True)),
            "context_interval": figures.interval(
                lambda x: x[..., 0].mean(-1), name, "masses", by_question=True
            ),
            "layers_below": int((mean[:, 0] < LEAST).sum()),
        }
        if name != FULL:
            caches[name] |= _compute_divergences(figures, name, masses[FULL][:, 0], mean[:, 0])
    return {"caches": caches}


@np.errstate(invalid="ignore", divide="ignore")
def _compute_divergences(
    figures: DocumentFigures, name: str, full: np.ndarray, cache: np.ndarray
) -> dict:
    """Return a cache's divergences from the full one, with their intervals.

    For the profile's interval, both profiles are resampled with the same documents.
    """
    pairs = [{"masses": [each[FULL]["masses"], each[name]["masses"]]} for each in figures.documents]
    both = DocumentFigures(pairs, figures.questions)
    columns = {}
    for key, order in (("kl_profile", (0, 1)), ("kl_profile_backward", (1, 0))):

        def of_means(x: np.ndarray, order: tuple[int, int] = order) -> np.ndarray:
            return compute_profile_divergence(*(x[:, side, :, 0] for side in order))

        columns[key] = to_plain(
            compute_profile_divergence(*((full, cache)[side] for side in order))
        )
        columns[f"{key}_interval"] = both.interval(of_means, "masses", by_question=True)
    sums, heads = figures.mean(name, "kl_attention", by_question=True)
    columns["kl_attention"] = to_plain(np.nanmean(sums / heads))
    columns["kl_attention_interval"] = figures.interval(
        lambda x: np.nanmean(x[:, 0] / x[:, 1], -1), name, "kl_attention", by_question=True
    )
    return columns | {"kl_attention_per_layer": to_plain(sums / heads)}


def compute_profile_divergence(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return KL(p || q) of layer profiles (..., L), normalized over layers; 0 log 0 is 0, p log(p /
    0) is infinite.
    """
    p = first / first.sum(-1, keepdims=True)
    q = second / second.sum(-1, keepdims=True)
    return np.where(p > 0, p * np.log(np.where(p > 0, p / q, 1)), 0).sum(-1)
