"""Mean and covariance of every head's queries before RoPE, gathered in the prefill, and where such queries look."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from restorekv.errors import ModelError
from restorekv.model.observer import LayerProbe
from restorekv.model.shape import CacheShape, decoder


class QueryMoments:
    """`mean` (L, H, G, D) and `spread` (L, H, G, D, D), the sum of (q - mean)(q - mean)^T, float32, over `count[layer]`
    queries, those of all columns but the first `skip`.

    Chunks are merged as by Chan, Golub and LeVeque (1979): sums of deviations from means, never of raw squares, so that
    no two large sums are subtracted.
    """

    def __init__(self, model: PreTrainedModel, skip: int) -> None:
        if not all(hasattr(layer.self_attn, "q_proj") for layer in decoder(model).layers):
            raise ModelError(f"{type(model).__name__} has no q_proj; use an evictor other than expected-attention.")
        shape = CacheShape.of(model)
        self.mean = torch.zeros(shape.layers, shape.heads, shape.groups, shape.head_dim, device=model.device)
        self.spread = self.mean.unsqueeze(-1).repeat(1, 1, 1, 1, shape.head_dim)
        self.count, self.skip = [0] * shape.layers, skip

    @torch.no_grad()
    def __call__(self, probe: LayerProbe) -> None:
        """One layer of one chunk of the prefill."""
        layer, before = probe.layer, probe.key.shape[1] - probe.query.shape[2]
        hidden = probe.hidden[max(self.skip - before, 0) :]
        seen, new = self.count[layer], len(hidden)
        if new == 0:
            return
        query = unrotated(probe.module, hidden).unflatten(0, probe.query.shape[:2])  # (H, G, new, D)
        mean = query.mean(-2)
        query, step = query - mean.unsqueeze(-2), mean - self.mean[layer]
        between = step.unsqueeze(-1) * step.unsqueeze(-2) * (seen * new / (seen + new))
        self.spread[layer] += query.mT @ query + between
        self.mean[layer] += step * (new / (seen + new))
        self.count[layer] = seen + new

    def ahead(self, model: PreTrainedModel, layer: int, start: int, future: int) -> tuple[Tensor, Tensor]:
        """R m (H, G, D) and R C R^T (H, G, D, D), R being the average rotation over `future` positions from `start`."""
        positions = torch.arange(start, start + future, device=self.mean.device).unsqueeze(0)
        cos, sin = (x[0].mean(0) for x in decoder(model).rotary_emb(self.mean, positions))
        mean, covariance = self.mean[layer], self.spread[layer] / max(self.count[layer], 1)
        for _ in range(2):  # C R^T transposed is R C, R C R^T transposed is itself
            covariance = (covariance * cos + rotate_half(covariance) * sin).mT
        return mean * cos + rotate_half(mean) * sin, covariance


def unrotated(module: nn.Module, hidden: Tensor) -> Tensor:
    """hidden (Q, d) -> queries (H * G, Q, D) float32 before RoPE, QK-normed where the model does that."""
    query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
    return (module.q_norm(query) if hasattr(module, "q_norm") else query).transpose(0, 1).float()


def expected_weights(key: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """key (H, K, D), mean (H, G, D), covariance (H, G, D, D) -> (H, K), the mean over G of E[exp(q k_i / sqrt(D))], of
    sum 1 each, for Gaussian q. One KV head at a time: G * K * D floats."""
    dim, weights = key.shape[-1], []
    for k, m, c in zip(key, mean, covariance, strict=True):
        logits = m @ k.T / dim**0.5 + (k @ c * k).sum(-1) / (2 * dim)
        weights.append(logits.softmax(-1).mean(0))
    return torch.stack(weights)
