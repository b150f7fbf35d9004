"""The mean and covariance of every head's queries before RoPE, and the attention that such queries
would pay.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from restorekv.errors import ModelError
from restorekv.evictors.base import Model
from restorekv.model.observer import LayerView
from restorekv.model.rope import compute_rotation
from restorekv.model.shape import CacheShape, get_backbone, is_hybrid


class QueryMoments:
    """Moments of every head's queries before RoPE, of all columns but the first `skip`, in float32.

    `mean` (L, H, G, D); `spread` (L, H, G, D, D) is the sum of (q - mean)(q - mean)^T over
    count[layer] queries. Chunks are merged as by Chan, Golub and LeVeque (1979): deviations from
    means are summed, never raw squares, so that no two large sums are subtracted.
    """

    def __init__(self, model: Model, skip: int) -> None:
        layers: Any = get_backbone(model).layers
        if not all(hasattr(layer.self_attn, "q_proj") for layer in layers):
            raise ModelError(
                f"{type(model).__name__} has no q_proj; "
                "use an evictor other than expected-attention."
            )
        shape = CacheShape.from_model(model)
        self.mean = torch.zeros(
            shape.layers, shape.heads, shape.groups, shape.head_dim, device=model.device
        )
        self.spread = self.mean.unsqueeze(-1).repeat(1, 1, 1, 1, shape.head_dim)
        self.count = [0] * shape.layers
        self.scales = [1.0] * shape.layers  # of the layers' logits, once they were seen
        self.skip = skip
        # In hybrid models such as Cohere 2 the layers that see the whole text may have no RoPE.
        self.is_rotated = [not is_hybrid(model)] * shape.layers

    @torch.no_grad()
    def on_layer(self, view: LayerView) -> None:
        """Handle one layer of one chunk of the prefill."""
        assert view.hidden is not None
        layer = view.layer
        self.scales[layer] = view.scale
        before = view.key.shape[1] - view.query.shape[2]
        hidden = view.hidden[max(self.skip - before, 0) :]
        seen = self.count[layer]
        new = len(hidden)
        if new == 0:
            return
        # Moments of this chunk, and how they move those of the chunks before.
        query = _project_queries(view.module, hidden).unflatten(
            0, view.query.shape[:2]
        )  # (H, G, new, D)
        if not self.is_rotated[layer]:
            rotated = view.query[:, :, -new:].float()
            self.is_rotated[layer] = not torch.allclose(query, rotated, rtol=1e-2, atol=1e-2)
        mean = query.mean(-2)
        query = query - mean.unsqueeze(-2)
        step = mean - self.mean[layer]
        between = step.unsqueeze(-1) * step.unsqueeze(-2) * (seen * new / (seen + new))
        self.spread[layer] += query.mT @ query + between
        self.mean[layer] += step * (new / (seen + new))
        self.count[layer] = seen + new

    def predict_moments(
        self, model: Model, layer: int, start: int, future: int
    ) -> tuple[Tensor, Tensor]:
        """Return R m (H, G, D) and R C R^T (H, G, D, D), R being the mean rotation at start ...
        start + future - 1; in a layer without RoPE that is none.
        """
        if not self.is_rotated[layer]:
            return self.mean[layer], self.spread[layer] / max(self.count[layer], 1)
        positions = torch.arange(start, start + future, device=self.mean.device).unsqueeze(0)
        cos, sin = (x[0].mean(0) for x in compute_rotation(model, self.mean, positions))
        mean = self.mean[layer]
        covariance = self.spread[layer] / max(self.count[layer], 1)
        # Twice the same step: C R^T transposed is R C, and R C R^T transposed is itself.
        for _ in range(2):
            covariance = (covariance * cos + rotate_half(covariance) * sin).mT
        return mean * cos + rotate_half(mean) * sin, covariance


def _project_queries(module: Any, hidden: Tensor) -> Tensor:
    """Return queries (H * G, Q, D) float32 of hidden states (Q, d) before RoPE, after QK-norm if
    the attention module has one.
    """
    query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
    if hasattr(module, "q_norm"):
        query = module.q_norm(query)
    return query.transpose(0, 1).float()


def compute_expected_weights(
    keys: Tensor, mean: Tensor, covariance: Tensor, scale: float
) -> Tensor:
    """Return (H, K), the mean over G of E[exp(scale q k_i)], normalized to sum 1, for Gaussian q.

    keys (H, K, D), mean (H, G, D), covariance (H, G, D, D). Computed for one KV head at a time: G *
    K * D floats. `scale` is the model's own.
    """
    divisor = 1 / scale  # sqrt(D) in most models; attend.py says why it divides
    weights = []
    for k, m, c in zip(keys, mean, covariance, strict=True):
        logits = m @ k.T / divisor + (k @ c * k).sum(-1) / (2 * divisor**2)
        weights.append(logits.softmax(-1).mean(0))
    return torch.stack(weights)
