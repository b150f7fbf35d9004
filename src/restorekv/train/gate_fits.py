"""Fitting gates: Fast KVzip's (arXiv:2601.17668) on KVzip's scores, KVzap's (arXiv:2601.07891) on log KVzip+.

fastkvzip     soft-target binary cross-entropy, mean over tokens, summed over heads and layers; SGD, momentum 0.9
kvzap-linear  ridge regression with an intercept, in closed form
kvzap-mlp     mean squared error; AdamW, cosine per epoch, gradient norm clipped to 1

All layers are trained at once, as parameters with a leading layer axis. The bias b of a Fast KVzip gate counts once,
in training as in inference: both are the one function `FastKVzip.predict`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from restorekv.errors import GateError, RestoreKVError
from restorekv.evictors.fastkvzip import FastKVzip
from restorekv.evictors.gate_file import KINDS
from restorekv.evictors.gated import Predict
from restorekv.evictors.kvzap import KVzap
from restorekv.model.shape import CacheShape
from restorekv.train.features import Features, Progress

RATES = {"fastkvzip": 0.2, "kvzap-mlp": 5e-3}
BATCHES = {"fastkvzip": 1000, "kvzap-mlp": 512}
USED = {
    "fastkvzip": ("lr", "batch", "steps", "rank", "sinks"),
    "kvzap-linear": ("alpha", "floor"),
    "kvzap-mlp": ("lr", "batch", "epochs", "width", "floor"),
}
Stacked = Mapping[str, Tensor]  # parameters (L, ...)


@dataclass(frozen=True)
class GateConfig:
    """The settings of the authors are the defaults; those of the other kinds are not used."""

    kind: str = "fastkvzip"
    tokens: int = 500  # of a context
    held_out: float = 0.05  # share of the contexts
    seed: int = 0
    lr: float | None = None  # RATES
    batch: int | None = None  # tokens a step: BATCHES
    steps: int = 5000  # fastkvzip
    rank: int = 16  # R, fastkvzip
    sinks: int = 16  # s, fastkvzip
    epochs: int = 15  # kvzap-mlp
    width: int | None = None  # m, kvzap-mlp: an eighth of d, at least 64
    alpha: float = 1.0  # kvzap-linear
    floor: float = 1e-8  # kvzap: lower scores count as this, since log 0 is not a number

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GateError(f"There is no gate of the kind {self.kind!r}; use one of {', '.join(KINDS)}.")
        for name in ("tokens", "batch", "steps", "rank", "sinks", "epochs", "width"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise RestoreKVError(f"{name} is a number of at least 1, not {value}.")
        for name in ("lr", "alpha", "floor"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise RestoreKVError(f"{name} is a number above 0, not {value}.")
        if not 0 < self.held_out < 1:
            raise RestoreKVError(f"held_out is a share between 0 and 1, not {self.held_out:g}.")

    def resolved(self, shape: CacheShape) -> "GateConfig":
        """With numbers where None leaves the choice to the kind and the model."""
        return replace(
            self,
            lr=self.lr or RATES.get(self.kind),
            batch=self.batch or BATCHES.get(self.kind),
            width=self.width or max(shape.hidden // 8, 64),
        )

    def used(self) -> dict[str, object]:
        """The settings that decide a gate of this kind, for its card."""
        return {name: getattr(self, name) for name in ("tokens", "held_out", "seed", *USED[self.kind])}


def uniform(generator: torch.Generator, *shape: int, fan: int) -> Tensor:
    """PyTorch's start of a linear layer with `fan` inputs."""
    return (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(fan)


def fresh_fastkvzip(shape: CacheShape, config: GateConfig) -> dict[str, Tensor]:
    """Norms at 1, bias and sink keys 0, as the authors'. Equal sinks have equal gradients, so they stay equal: one sink
    that counts s times. Random ones learned no more on the bundled model (held-out loss 1.983 for 1.984)."""
    generator = torch.Generator().manual_seed(config.seed)
    layers, heads, groups, hidden, rank = shape.layers, shape.heads, shape.groups, shape.hidden, config.rank
    return {
        "q_proj.weight": uniform(generator, layers, heads * groups * rank, hidden, fan=hidden),
        "q_proj.bias": uniform(generator, layers, heads * groups * rank, fan=hidden),
        "k_proj.weight": uniform(generator, layers, heads * rank, hidden, fan=hidden),
        "q_norm.weight": torch.ones(layers, rank),
        "k_norm.weight": torch.ones(layers, rank),
        "k_base": torch.zeros(layers, heads, 1, config.sinks, rank),
        "b": torch.zeros(layers, heads, 1, groups),
    }


def factor(step: int, steps: int) -> float:
    """Of the learning rate: 0.01 a step for 50 steps, then 1, a half after half of the steps, then a quarter."""
    if step < 50:
        return 0.01 * step
    return 1.0 if step < steps / 2 else 0.5 if step < 3 * steps / 4 else 0.25


def fit_fastkvzip(
    data: Features, shape: CacheShape, config: GateConfig, device: torch.device, progress: Progress
) -> Stacked:
    """`steps` steps on random tokens, the same ones for all layers."""
    gate = {name: tensor.to(device).requires_grad_() for name, tensor in fresh_fastkvzip(shape, config).items()}
    optimizer = torch.optim.SGD(gate.values(), lr=0.0, momentum=0.9)
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        rows = torch.randperm(len(data.target), generator=generator)[: config.batch]
        hidden, target = data.part(rows, device)
        loss = cross_entropy(FastKVzip.predict(gate, hidden), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = config.lr * factor(step, config.steps)
        optimizer.step()
        progress(step + 1, config.steps, f"loss {float(loss.detach()):.4f}")
    return gate


def fit_linear(
    data: Features, shape: CacheShape, config: GateConfig, device: torch.device, progress: Progress
) -> Stacked:
    """Minimises the squared error plus alpha * |W|^2, the intercept unpenalised: normal equations in float64."""
    found: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    for layer in range(shape.layers):
        hidden = data.hidden[:, layer].to(device, torch.float64)
        target = logarithm(data.target[:, layer].to(device, torch.float64), config.floor)
        centre, level = hidden.mean(0), target.mean(0)
        hidden = hidden - centre
        gram = hidden.T @ hidden + config.alpha * torch.eye(shape.hidden, dtype=torch.float64, device=device)
        weight = torch.linalg.solve(gram, hidden.T @ (target - level)).T  # (H, d)
        found["weight"].append(weight.float())
        found["bias"].append((level - weight @ centre).float())
        progress(layer + 1, shape.layers, "layers solved")
    return {name: torch.stack(parts) for name, parts in found.items()}


def fit_mlp(data: Features, shape: CacheShape, config: GateConfig, device: torch.device, progress: Progress) -> Stacked:
    """`epochs` times through all tokens in a new order; the learning rate falls as a cosine, epoch by epoch."""
    generator = torch.Generator().manual_seed(config.seed)
    layers, hidden, width = shape.layers, shape.hidden, config.width
    start = {
        "0.weight": uniform(generator, layers, width, hidden, fan=hidden),
        "0.bias": uniform(generator, layers, width, fan=hidden),
        "2.weight": uniform(generator, layers, shape.heads, width, fan=width),
        "2.bias": uniform(generator, layers, shape.heads, fan=width),
    }
    gate = {name: tensor.to(device).requires_grad_() for name, tensor in start.items()}
    optimizer = torch.optim.AdamW(gate.values(), weight_decay=0.01)
    for epoch in range(config.epochs):
        rate = config.lr * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))
        optimizer.param_groups[0]["lr"] = rate
        losses = []
        for rows in torch.randperm(len(data.target), generator=generator).split(config.batch):
            inputs, target = data.part(rows, device)
            loss = F.mse_loss(KVzap.predict(gate, inputs), logarithm(target, config.floor))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(gate.values(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        progress(epoch + 1, config.epochs, f"epochs, loss {float(torch.stack(losses).mean()):.4f}")
    return gate


def logarithm(scores: Tensor, floor: float) -> Tensor:
    """Natural; KVzap's target."""
    return scores.clamp_min(floor).log()


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """Binary, with soft targets: (L, H, M) both -> mean over tokens, sum over heads and layers."""
    return F.binary_cross_entropy(scores, target, reduction="none").mean(-1).sum()


def loss_of(config: GateConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """What the kind is trained on: (scores, target) -> a number."""
    if config.kind == "fastkvzip":
        return cross_entropy
    return lambda scores, target: F.mse_loss(scores, logarithm(target, config.floor))


FITS: dict[str, tuple[Callable[..., Stacked], Predict]] = {
    "fastkvzip": (fit_fastkvzip, FastKVzip.predict),
    "kvzap-linear": (fit_linear, KVzap.predict),
    "kvzap-mlp": (fit_mlp, KVzap.predict),
}
