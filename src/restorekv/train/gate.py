"""Train a gate: Fast KVzip's (arXiv:2601.17668) on KVzip's scores, KVzap's (arXiv:2601.07891) on
log KVzip+.

fastkvzip     soft-target binary cross-entropy, mean over tokens, summed over heads and layers; SGD
              with momentum 0.9
kvzap-linear  ridge regression with an intercept, in closed form
kvzap-mlp     mean squared error; AdamW, cosine per epoch, gradient norm clipped to 1

All layers are trained at once, as parameters with a leading layer axis; the model is not changed.
The bias b of a Fast KVzip gate counts once, in training as in inference: both are the one function
`FastKVzip.predict`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.progress import OnStep
from restorekv.data.overlap import find_near_copies
from restorekv.errors import RestoreKVError, warn
from restorekv.evictors import gate_file
from restorekv.evictors.fastkvzip import FastKVzip
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.evictors.gated import Predict
from restorekv.evictors.kvzap import KVzap
from restorekv.model.gate_kinds import TARGETS
from restorekv.model.shape import CacheShape
from restorekv.train.features import Features, collect_features
from restorekv.train.gate_config import GateConfig

Stacked = Mapping[str, Tensor]  # parameters (L, ...)


# The calling program may be in a mode without gradients.
@torch.inference_mode(False)
@torch.enable_grad()
def train_gate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    texts: list[str],
    config: GateConfig,
    out: Path,
    features: Path,
    resume: bool = False,
    progress: OnStep = lambda done, total, what: None,
) -> Gate:
    """Collect features, train a gate, measure it on held-out contexts and write it.

    Args:
        model: The model that the gate is for.
        tokenizer: The model's own.
        texts: The contexts, at least two of them.
        config: Kind and settings of the gate.
        out: The file to write.
        features: Folder of the features, which later runs may use again.
        resume: Use the features that are there already.
        progress: Called with the steps done, their number and what they are.

    Returns:
        The gate.
    """
    if len(texts) < 2:
        raise RestoreKVError(
            "A gate needs at least two contexts, one of them to check it on; give more."
        )
    target = TARGETS[config.kind]
    shape = CacheShape.from_model(model)
    config = config.resolve(shape)
    data = collect_features(
        model, tokenizer, texts, target, config.tokens, config.seed, features, resume, progress
    )
    # Whole contexts are held out: tokens of one text are too similar.
    train, held = data.split_held_out(config.held_out)
    del data  # the two halves are copies
    train = _drop_near_copies(train, held, texts)
    # Each kind has a function that fits its parameters and one that predicts scores from them; both
    # work on all layers at once.
    fit, predict = FITS[config.kind]
    stacked = fit(train, shape, config, model.device, progress)
    figures = measure_gate(held, stacked, predict, config, model.device)
    card = GateCard.for_model(
        model,
        config.kind,
        target,
        settings={**config.list_used(), "contexts": len(texts)},
        figures=figures,
    )
    gate = Gate(unstack_layers(stacked), card)
    gate_file.write_gate(out, gate)
    return gate


def _drop_near_copies(train: Features, held: Features, texts: Sequence[str]) -> Features:
    """Return the features to train on, without those of contexts that are nearly the same as one
    that the gate is checked on: these would make the figures too good.
    """
    numbers: list[int] = train.document.unique().tolist()
    held_numbers: list[int] = held.document.unique().tolist()
    train_texts = [texts[number] for number in numbers]
    copies = find_near_copies(train_texts, [texts[number] for number in held_numbers])
    if not copies:
        return train
    if len(copies) == len(numbers):
        raise RestoreKVError(
            "All contexts are nearly the same, so that none can check the gate; give others."
        )
    warn(
        f"{len(copies)} of {len(texts)} contexts are nearly the same as one that the gate is "
        "checked on; they are not trained on."
    )
    dropped = torch.tensor([numbers[index] for index in copies])
    return train.select(~torch.isin(train.document, dropped))


def _init_linear(
    generator: torch.Generator, name: str, layers: int, outputs: int, inputs: int
) -> dict[str, Tensor]:
    """Draw PyTorch's initial weight and bias of a linear layer, for every decoder layer."""
    # Uniform in [-1/sqrt(inputs), 1/sqrt(inputs)], as torch.nn.Linear begins.
    bound = math.sqrt(inputs)
    weight = 2 * torch.rand(layers, outputs, inputs, generator=generator) - 1
    bias = 2 * torch.rand(layers, outputs, generator=generator) - 1
    return {f"{name}.weight": weight / bound, f"{name}.bias": bias / bound}


def _init_fastkvzip(shape: CacheShape, config: GateConfig) -> dict[str, Tensor]:
    """Return the authors' initial parameters: norms at 1, bias and sink keys at 0.

    Equal sinks have equal gradients, so they stay equal: they act as one sink that counts s times.
    Random ones learned no more on the tiny model (held-out loss 1.983, 1.984).
    """
    generator = torch.Generator().manual_seed(config.seed)
    layers = shape.layers
    heads = shape.heads
    groups = shape.groups
    rank = config.rank
    query = _init_linear(generator, "q_proj", layers, heads * groups * rank, shape.hidden)
    key = _init_linear(generator, "k_proj", layers, heads * rank, shape.hidden)
    return query | {
        "k_proj.weight": key["k_proj.weight"],
        "q_norm.weight": torch.ones(layers, rank),
        "k_norm.weight": torch.ones(layers, rank),
        "k_base": torch.zeros(layers, heads, 1, config.sinks, rank),
        "b": torch.zeros(layers, heads, 1, groups),
    }


def _make_trainable(parameters: Stacked, device: torch.device) -> dict[str, Tensor]:
    """Move parameters to a device, where they get gradients."""
    return {name: tensor.to(device).requires_grad_() for name, tensor in parameters.items()}


def _scale_rate(step: int, steps: int) -> float:
    """Return the learning rate's factor: step / 100 for 50 steps, then 1; 1/2 from half of the
    steps, 1/4 from 3/4.
    """
    if step < 50:
        return 0.01 * step
    if step < steps / 2:
        return 1.0
    if step < 3 * steps / 4:
        return 0.5
    return 0.25


def fit_fastkvzip(
    data: Features, shape: CacheShape, config: GateConfig, device: torch.device, progress: OnStep
) -> Stacked:
    """Take `steps` steps on random tokens, the same ones for all layers."""
    gate = _make_trainable(_init_fastkvzip(shape, config), device)
    assert config.lr is not None and config.batch is not None, "`resolve` sets them for this kind"
    optimizer = torch.optim.SGD(gate.values(), lr=0.0, momentum=0.9)
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        # Draws come from the CPU, so that every device trains on the same tokens.
        rows = torch.randperm(len(data.target), generator=generator)[: config.batch]
        hidden, target = data.select_by_layer(rows, device)
        loss = compute_cross_entropy(FastKVzip.predict(gate, hidden), target)
        optimizer.zero_grad()
        loss.backward()
        # The authors' schedule: a warm-up, then halved at half and at three quarters of the steps.
        optimizer.param_groups[0]["lr"] = config.lr * _scale_rate(step, config.steps)
        optimizer.step()
        progress(step + 1, config.steps, f"loss {float(loss.detach()):.4f}")
    return gate


def fit_linear(
    data: Features, shape: CacheShape, config: GateConfig, device: torch.device, progress: OnStep
) -> Stacked:
    """Minimize the squared error plus alpha * |W|^2, the intercept unpenalized: normal equations
    in float64.
    """
    layers: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    # One layer at a time: its hidden states in float64 are the largest tensor here.
    for layer in range(shape.layers):
        hidden = data.hidden[:, layer].to(device, torch.float64)
        target = _log_scores(data.target[:, layer].to(device, torch.float64), config.floor)
        center = hidden.mean(0)
        mean = target.mean(0)
        # Centered: the intercept follows from the means and is not penalized.
        hidden = hidden - center
        gram = hidden.T @ hidden + config.alpha * torch.eye(
            shape.hidden, dtype=torch.float64, device=device
        )
        weight = torch.linalg.solve(gram, hidden.T @ (target - mean)).T  # (H, d)
        layers["weight"].append(weight.float())
        layers["bias"].append((mean - weight @ center).float())
        progress(layer + 1, shape.layers, "layers solved")
    return {name: torch.stack(parts) for name, parts in layers.items()}


def fit_mlp(
    data: Features, shape: CacheShape, config: GateConfig, device: torch.device, progress: OnStep
) -> Stacked:
    """Go through all tokens `epochs` times, each time in a new order; the learning rate falls as a
    cosine, epoch by epoch.
    """
    generator = torch.Generator().manual_seed(config.seed)
    layers = shape.layers
    width = config.width
    assert config.lr is not None and config.batch is not None, "`resolve` sets them for this kind"
    assert width is not None, "`resolve` sets it from the model"
    first = _init_linear(generator, "0", layers, width, shape.hidden)
    last = _init_linear(generator, "2", layers, shape.heads, width)
    gate = _make_trainable(first | last, device)
    optimizer = torch.optim.AdamW(gate.values(), weight_decay=0.01)
    for epoch in range(config.epochs):
        optimizer.param_groups[0]["lr"] = (
            config.lr * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))
        )
        losses = []
        # A new order in every epoch.
        for rows in torch.randperm(len(data.target), generator=generator).split(config.batch):
            inputs, target = data.select_by_layer(rows, device)
            loss = F.mse_loss(KVzap.predict(gate, inputs), _log_scores(target, config.floor))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(gate.values(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        progress(epoch + 1, config.epochs, f"epochs, loss {float(torch.stack(losses).mean()):.4f}")
    return gate


FITS: dict[str, tuple[Callable[..., Stacked], Predict]] = {
    "fastkvzip": (fit_fastkvzip, FastKVzip.predict),
    "kvzap-linear": (fit_linear, KVzap.predict),
    "kvzap-mlp": (fit_mlp, KVzap.predict),
}


def _log_scores(scores: Tensor, floor: float) -> Tensor:
    return scores.clamp_min(floor).log()


def compute_cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """Return the binary cross-entropy with soft targets: (L, H, M) both -> mean over tokens, sum
    over the rest.
    """
    return F.binary_cross_entropy(scores, target, reduction="none").mean(-1).sum()


def unstack_layers(stacked: Stacked) -> list[dict[str, Tensor]]:
    """Split parameters (L, ...) into one mapping per layer."""
    layers = len(next(iter(stacked.values())))
    return [
        {name: tensor[index].detach().cpu() for name, tensor in stacked.items()}
        for index in range(layers)
    ]


def measure_gate(
    data: Features, gate: Stacked, predict: Predict, config: GateConfig, device: torch.device
) -> dict[str, float]:
    """Return means over contexts: of the loss, and of how similarly gate and evictor rank pairs."""
    rows: dict[str, list[Tensor]] = {
        "held_out_loss": [],
        "spearman": [],
        "spearman_within_heads": [],
        "overlap_of_top_tenth": [],
    }
    for document in data.document.unique():
        hidden, target = data.select_by_layer(data.document == document, device)
        with torch.no_grad():
            scores = predict(gate, hidden)
        heads = zip(scores.flatten(0, 1), target.flatten(0, 1), strict=True)
        if config.kind == "fastkvzip":
            rows["held_out_loss"].append(compute_cross_entropy(scores, target))
        else:
            rows["held_out_loss"].append(F.mse_loss(scores, _log_scores(target, config.floor)))
        rows["spearman"].append(compute_spearman(scores, target))
        within_heads = [compute_spearman(*pair) for pair in heads]
        rows["spearman_within_heads"].append(torch.stack(within_heads).mean())
        rows["overlap_of_top_tenth"].append(compute_top_overlap(scores, target))
    return {name: float(torch.stack(values).mean()) for name, values in rows.items()}


def compute_spearman(first: Tensor, second: Tensor) -> Tensor:
    """Return the rank correlation over all entries; equal scores share a rank, a constant tensor
    gives 0.
    """
    return torch.corrcoef(torch.stack([compute_ranks(first), compute_ranks(second)]))[
        0, 1
    ].nan_to_num()


def compute_ranks(scores: Tensor) -> Tensor:
    """Return ranks from 1, flat, float64; equal scores get the mean of their ranks."""
    _, index, counts = scores.flatten().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[index]


def compute_top_overlap(first: Tensor, second: Tensor, share: float = 0.1) -> Tensor:
    """Return the share of the best tenth by `first` that is in the best tenth by `second`."""
    count = max(int(first.numel() * share), 1)
    best = [scores.flatten().topk(count).indices for scores in (first, second)]
    return torch.isin(*best).double().mean()
