"""Training a gate: collect features, fit, measure on contexts that were held out, write. The model is not touched."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import TARGETS, Gate, GateCard
from restorekv.evictors.gated import Predict
from restorekv.model.shape import CacheShape
from restorekv.train.features import Features, Progress, collect
from restorekv.train.gate_fits import FITS, GateConfig, Stacked, loss_of


def train_gate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: list[str],
    config: GateConfig,
    out: Path,
    features: Path,
    resume: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Gate:
    """Collect features in a folder, train, measure on held-out contexts, write the gate to `out` and return it."""
    if len(texts) < 2:
        raise RestoreKVError("A gate needs at least two contexts, one of them to check it on; give more.")
    target, shape = TARGETS[config.kind], CacheShape.of(model)
    config = config.resolved(shape)
    settings = target, config.tokens, config.seed, features, resume, progress
    train, held = collect(model, tokenizer, texts, *settings).held_out(config.held_out)
    fit, predict = FITS[config.kind]
    stacked = fit(train, shape, config, model.device, progress)
    figures = measured(held, stacked, predict, config, model.device)
    card = GateCard.of(model, config.kind, target, settings={**config.used(), "contexts": len(texts)}, figures=figures)
    gate = Gate(unstacked(stacked), card)
    gate_file.write(out, gate)
    return gate


def unstacked(stacked: Stacked) -> list[dict[str, Tensor]]:
    """Parameters (L, ...) -> one mapping a layer."""
    layers = len(next(iter(stacked.values())))
    return [{name: tensor[index].detach().cpu() for name, tensor in stacked.items()} for index in range(layers)]


def measured(
    data: Features, gate: Stacked, predict: Predict, config: GateConfig, device: torch.device
) -> dict[str, float]:
    """On contexts that were held out: the loss, and how alike gate and evictor rank the pairs of a context."""
    losses, alike, within, shared = [], [], [], []
    for document in data.document.unique():
        hidden, target = data.part(data.document == document, device)
        with torch.no_grad():
            scores = predict(gate, hidden)
        losses.append(loss_of(config)(scores, target))
        alike.append(spearman(scores, target))
        pairs = zip(scores.flatten(0, 1), target.flatten(0, 1), strict=True)
        within.append(torch.stack([spearman(*pair) for pair in pairs]).mean())
        shared.append(overlap(scores, target))
    return {
        "held_out_loss": float(torch.stack(losses).mean()),
        "spearman": float(torch.stack(alike).mean()),
        "spearman_within_heads": float(torch.stack(within).mean()),
        "overlap_of_top_tenth": float(torch.stack(shared).mean()),
    }


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Rank correlation of two tensors of scores, over all their entries; equals share a rank, a constant has 0."""
    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].nan_to_num()


def ranks(scores: Tensor) -> Tensor:
    """Flat, from 1, float64; equal scores get the mean of their places."""
    _, place, counts = scores.flatten().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[place]


def overlap(first: Tensor, second: Tensor, share: float = 0.1) -> Tensor:
    """Of the best tenth by the one, the share that is in the best tenth by the other."""
    count = max(int(first.numel() * share), 1)
    best = [scores.flatten().topk(count).indices for scores in (first, second)]
    return torch.isin(*best).double().mean()
