"""Where the last query token looks: its attention mass on the context, layer by layer (the paper's Fig. mechanism).

The last query token is the one that predicts the first answer token. With a_i its attention weight on pair i in one
query head, a cache's pairs fall in four parts, whose masses add up to 1:

    context    pairs of the context beyond the sinks ("non-sink context")
    sinks      pairs of the chat prefix, and of the first 4 columns where the prefix is shorter
    restore    the n restore pairs, which are no context
    question   the question's own pairs, template suffix included

The layer profile is m_l = the mean of the context mass over query heads and questions. The paper does not define its
divergences; two natural ones are told, in nats:

    kl_profile     KL(p || q) = sum_l p_l log(p_l / q_l),  p = m^full / sum_l m^full_l,  q = m^cache / sum_l m^cache_l;
                   not defined (null) where a layer holds no context at all, hence also
                   kl_profile_backward = KL(q || p)
    kl_attention   mean over query heads and questions of  sum_{i in K} p_i log(p_i / q_i),
                   p = a^full / sum_K a^full,  q = a^cache / sum_K a^cache,
                   K = the non-sink context columns that the head holds; heads that hold none are left out
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.evaluation.analysis.case import FULL, Case
from restorekv.evaluation.analysis.pool import Pool, plain
from restorekv.evaluation.analysis.watch import watching
from restorekv.model.shape import decoder

PARTS = ("context", "sinks", "restore", "question")
LEAST = 0.001  # layers whose context mass is below are counted
DEFINITIONS = {
    "query": "the last token before the answer; means over query heads and questions",
    "context": "context pairs beyond the sinks",
    "sinks": "the chat prefix, and the first 4 columns where it is shorter",
    "restore": "the restore pairs, which are no context",
    "question": "the question's own pairs",
    "layers_below": "layers whose mean mass on the context is below 0.1 %",
    "kl_profile": "KL(full || cache) in nats of the mean context masses, normalised over layers; not defined where a "
    "layer's mass is zero",
    "kl_profile_backward": "KL(cache || full) of the same, always defined",
    "kl_attention": "KL(full || cache) in nats of the attention over the context columns that the head holds, "
    "normalised over them; mean over layers, heads and questions",
}


def measure(case: Case) -> dict:
    """{cache: {"masses": (L, 4), "kl_attention": [sums (L), heads that hold context (L)]}}, means over questions."""
    found: dict[str, list[dict]] = {name: [] for name in case.caches}
    for prompt in case.prompts:
        full: dict[tuple[int, int], Tensor] = {}
        for name, cache in case.caches.items():
            found[name].append(looked(case, cache, prompt, full, keep=name == FULL))
    return {
        name: {key: np.mean([each[key] for each in every], 0).tolist() for key in every[0]}
        for name, every in found.items()
    }


@torch.no_grad()
def looked(case: Case, cache: RaggedCache, prompt: Tensor, full: dict[tuple[int, int], Tensor], keep: bool) -> dict:
    """One question: masses and divergences; with `keep` the weights on the context are put into `full`."""
    model, layers, sinks = case.prepared.model, len(cache.layers), case.sinks
    masses, kl = torch.zeros(layers, len(PARTS), dtype=torch.float64), torch.zeros(2, layers, dtype=torch.float64)

    def see(index: int, layer: RaggedLayer, weights) -> None:
        columns = layer.positions.cpu().split(layer.offsets.diff().tolist())
        for head, (own, places) in enumerate(zip(weights, columns, strict=True)):
            row, held = own[:, -1], len(places)  # (G, N + t)
            parts = (row[:, :held][:, places >= sinks], row[:, :held][:, places < sinks])
            tail = (row[:, held : held + layer.restore], row[:, held + layer.restore :])
            masses[index] += torch.stack([part.sum(-1).mean() for part in (*parts, *tail)]) / layer.heads
            if keep:
                full[index, head] = row[:, :held]
            elif parts[0].shape[-1]:
                there = full[index, head][:, places[places >= sinks].long()]
                kl[:, index] += torch.stack([divergence(there, parts[0]).mean(), torch.ones(())])

    with watching(model, see, last=1):
        decoder(model)(input_ids=prompt.to(model.device), past_key_values=cache.fork(), use_cache=True)
    return {"masses": masses.tolist()} | ({} if keep else {"kl_attention": kl.tolist()})


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of the last dimension's weights, (..., K) each, once they are normalised: (...)."""
    tiny = torch.finfo(q.dtype).tiny
    p, q = (x.clamp_min(tiny) / x.clamp_min(tiny).sum(-1, keepdim=True) for x in (p, q))
    return (p * (p / q).log()).sum(-1)


def pooled(pool: Pool) -> dict:
    """Every question weighs the same; intervals over documents."""
    masses = {name: pool.mean(name, "masses", by_question=True) for name in pool.documents[0]}
    caches = {}
    for name, mean in masses.items():
        caches[name] = {
            **{part: plain(mean[:, index]) for index, part in enumerate(PARTS)},
            "average": dict(zip(PARTS, plain(mean.mean(0)), strict=True)),
            "context_interval": pool.interval(lambda x: x[..., 0].mean(-1), name, "masses", by_question=True),
            "layers_below": int((mean[:, 0] < LEAST).sum()),
        }
        if name != FULL:
            caches[name] |= divergences(pool, name, masses[FULL][:, 0], mean[:, 0])
    return {"caches": caches}


def divergences(pool: Pool, name: str, full: np.ndarray, cache: np.ndarray) -> dict:
    """Both definitions; the profile's interval resamples the two profiles together."""
    both = Pool([{"masses": [each[FULL]["masses"], each[name]["masses"]]} for each in pool.documents], pool.questions)

    def forward(x: np.ndarray) -> np.ndarray:
        return profile_divergence(x[:, 0, :, 0], x[:, 1, :, 0])

    def backward(x: np.ndarray) -> np.ndarray:
        return profile_divergence(x[:, 1, :, 0], x[:, 0, :, 0])

    sums, heads = pool.mean(name, "kl_attention", by_question=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "kl_profile": plain(profile_divergence(full, cache)),
            "kl_profile_interval": both.interval(forward, "masses", by_question=True),
            "kl_profile_backward": plain(profile_divergence(cache, full)),
            "kl_profile_backward_interval": both.interval(backward, "masses", by_question=True),
            "kl_attention": plain(np.nanmean(sums / heads)),
            "kl_attention_interval": pool.interval(
                lambda x: np.nanmean(x[:, 0] / x[:, 1], -1), name, "kl_attention", by_question=True
            ),
            "kl_attention_per_layer": plain(sums / heads),
        }


def profile_divergence(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """KL(p || q) of two layer profiles (..., L), normalised over layers; 0 log 0 is 0, p log(p / 0) infinite."""
    p, q = first / first.sum(-1, keepdims=True), second / second.sum(-1, keepdims=True)
    return np.where(p > 0, p * np.log(np.where(p > 0, p / q, 1)), 0).sum(-1)
