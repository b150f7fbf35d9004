"""The mean and covariance of every head's queries before RoPE, and the attention that such queries
would pay.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from restorekv.errors import ModelError
from restorekv.evictors.base import Model
from restorekv.model.attention.sinks import compute_weights
from restorekv.model.observer import LayerView
from restorekv.model.rope import compute_rotation
from restorekv.model.shape import CacheShape, is_latent_config, list_attention_modules
from restorekv.model.support import get_support

# Rotated queries that are compared, and how far they may be from the model's own, as a share of
# their norm: bfloat16 rounds to 1 in 256, and a wrong order of the numbers is off by about 1.
COMPARED = 64
TOLERANCE = 0.03


class QueryMoments:
    """Moments of every head's queries before RoPE, of all columns but the first `skip`, in float32.

    `mean` (L, H, G, D); `spread` (L, H, G, D, D) is the sum of (q - mean)(q - mean)^T over
    count[layer] queries. Chunks are merged as by Chan, Golub and LeVeque (1979): deviations from
    means are summed, never raw squares, so that no two large sums are subtracted.

    Families differ in how they rotate queries. Every chunk's queries are therefore rotated in each
    way that is known and compared with those that the model's attention gets; a model that none of
    them reproduces is refused.
    """

    def __init__(self, model: Model, skip: int) -> None:
        if is_latent_config(model.config):
            # Its queries are projected once more, after RoPE.
            raise ModelError(
                f"{type(model).__name__} has latent attention, whose queries expected-attention "
                "does not know how to rotate; use another evictor, such as snapkv."
            )
        if get_support(model).has_cap:
            # Under a cap the mean of the exponentials of Gaussian logits has no formula.
            raise ModelError(
                f"{type(model).__name__} caps the logits of its attention, for which "
                "expected-attention has no formula; use another evictor, such as snapkv."
            )
        if not all(hasattr(module, "q_proj") for module in list_attention_modules(model)):
            raise ModelError(
                f"{type(model).__name__} has no q_proj; "
                "use an evictor other than expected-attention."
            )
        shape = CacheShape.from_model(model)
        self.mean = torch.zeros(
            (shape.layers, shape.heads, shape.groups, shape.head_dim),
            dtype=torch.float32,
            device=model.device,
        )
        self.spread = self.mean.unsqueeze(-1).repeat(1, 1, 1, 1, shape.head_dim)
        # Queries seen per layer: chunks of a prefill arrive layer by layer.
        self.count = [0] * shape.layers
        self.scales = [1.0] * shape.layers  # of the layers' logits, once they were seen
        self.sinks: list[Tensor | None] = [None] * shape.layers  # (H, G), where a model has them
        self.skip = skip
        # The ways of rotating that have reproduced every chunk of a layer so far. They differ by
        # layer: some models rotate in a part of their layers only.
        self.layouts = [tuple(LAYOUTS)] * shape.layers

    @torch.no_grad()
    def on_layer(self, view: LayerView) -> None:
        """Handle one layer of one chunk of the prefill."""
        assert view.hidden is not None
        layer = view.layer
        self.scales[layer] = view.scale
        self.sinks[layer] = view.sinks
        before = view.key.shape[1] - view.query.shape[2]
        # The first `skip` columns of the text do not count, and `before` of them came in earlier
        # chunks.
        hidden = view.hidden[max(self.skip - before, 0) :]
        seen = self.count[layer]
        new = len(hidden)
        if new == 0:
            return
        # Moments of this chunk, and how they move those of the chunks before.
        query = _project_queries(view.module, hidden).unflatten(
            0, view.query.shape[:2]
        )  # (H, G, new, D)
        self._compare_layouts(view, query)
        mean = query.mean(-2)
        query = query - mean.unsqueeze(-2)
        # Chan's update: the deviation of this chunk's mean from the running one, weighted by both
        # counts.
        step = mean - self.mean[layer]
        between = step.unsqueeze(-1) * step.unsqueeze(-2) * (seen * new / (seen + new))
        self.spread[layer] += query.mT @ query + between
        self.mean[layer] += step * (new / (seen + new))
        self.count[layer] = seen + new

    def predict_moments(
        self, model: Model, layer: int, start: int, future: int
    ) -> tuple[Tensor, Tensor]:
        """Return R m (H, G, D) and R C R^T (H, G, D, D).

        R is the RoPE rotation averaged over the positions start to start + future - 1, and the
        identity in a layer without RoPE.
        """
        mean = self.mean[layer]
        covariance = self.spread[layer] / max(self.count[layer], 1)
        rotate = LAYOUTS[self.layouts[layer][0]]
        # A layer without RoPE: a query does not depend on its position.
        if rotate is _no_rotation:
            return mean, covariance
        positions = torch.arange(start, start + future, device=mean.device).unsqueeze(0)
        # The mean rotation of the positions at which questions may stand.
        cos, sin = (
            x[0].mean(0) for x in list_pair_rotations(compute_rotation(model, mean, positions))
        )
        # Twice the same step: C R^T transposed is R C, and R C R^T transposed is itself.
        for _ in range(2):
            covariance = rotate(covariance, cos, sin).mT
        return rotate(mean, cos, sin), covariance

    def _compare_layouts(self, view: LayerView, query: Tensor) -> None:
        """Drop the layouts that do not turn queries before RoPE (H, G, Q, D), the last of this
        chunk, into those that the model's attention got; refuse a model that leaves none.
        """
        query = query[:, :, -COMPARED:]
        expected = view.query[:, :, -query.shape[2] :].float()
        limit = TOLERANCE * float(expected.norm())
        fitting = []
        # Only layouts that have fitted every chunk so far are tried again.
        for name in self.layouts[view.layer]:
            found = query
            if LAYOUTS[name] is not _no_rotation:
                # Without cosines and sines nothing can be rotated. Before transformers 5.3,
                # Qwen2-VL has a rotation for each of time, height and width (3, 1, Q, R).
                if view.rotation is None or view.rotation[0].dim() == 4:
                    continue
                pairs = list_pair_rotations(view.rotation)
                cos, sin = (x[0, -query.shape[2] :].float() for x in pairs)
                # Partial RoPE rotates fewer numbers than a head has, never more.
                if 2 * cos.shape[-1] > query.shape[-1]:
                    continue
                found = LAYOUTS[name](query, cos, sin)
            if float((found - expected).norm()) <= limit:
                fitting.append(name)
        if not fitting:
            raise ModelError(
                f"{type(view.module).__name__} makes its queries in a way that expected-attention "
                "does not know; use another evictor, such as snapkv."
            )
        self.layouts[view.layer] = tuple(fitting)


def list_pair_rotations(rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine (1, Q, R / 2) of each pair of numbers that is rotated together.

    Most models list every angle twice, (1, Q, R): either all of them and then all of them again, or
    each one beside itself. gpt-oss lists it once, (1, Q, R / 2).
    """
    half = rotation[0].shape[-1] // 2
    if half and all(torch.equal(x[..., :half], x[..., -half:]) for x in rotation):
        return rotation[0][..., :half], rotation[1][..., :half]
    if all(torch.equal(x[..., : 2 * half : 2], x[..., 1::2]) for x in rotation):
        return rotation[0][..., ::2], rotation[1][..., ::2]
    return rotation


def _rotate_halves(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate number i of the first 2 P of the queries (..., D) with number i + P, by P angles, and
    keep the rest, as Llama does, and GPT-NeoX with a part of the numbers.
    """
    pairs = cos.shape[-1]
    first, second, rest = query.split([pairs, pairs, query.shape[-1] - 2 * pairs], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _rotate_neighbors(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate numbers 2 i and 2 i + 1 together, and keep the rest, as Cohere and GLM do."""
    rotated, rest = query.split([2 * cos.shape[-1], query.shape[-1] - 2 * cos.shape[-1]], -1)
    first = rotated[..., ::2]
    second = rotated[..., 1::2]
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([pairs.flatten(-2), rest], -1)


def _no_rotation(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Leave the queries as they are, as SmolLM3 does in every fourth layer."""
    return query


LAYOUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "halves": _rotate_halves,
    "neighbors": _rotate_neighbors,
    "none": _no_rotation,
}


def _project_queries(module: Any, hidden: Tensor) -> Tensor:
    """Return queries (H * G, Q, D) float32 of hidden states (Q, d) before RoPE, after QK-norm if
    the attention module has one: of each head, or, as in OLMo 2, of all heads at once.
    """
    query = module.q_proj(hidden)
    norm = getattr(module, "q_norm", None) or getattr(module, "q_layernorm", None)
    heads = module.config.get_text_config().num_attention_heads
    if query.shape[-1] == 2 * heads * module.head_dim:
        # Qwen3-Next projects a gate too, head by head after the query.
        query = query.unflatten(-1, (heads, 2, module.head_dim))[..., 0, :].flatten(-2)
    weight = getattr(norm, "weight", None)
    # OLMo 2 norms the output of the projection before it is split into heads.
    normalizes_all = weight is not None and weight.shape == query.shape[-1:] != (module.head_dim,)
    if norm is not None and normalizes_all:
        query = norm(query)
    query = query.unflatten(-1, (-1, module.head_dim))
    if norm is not None and not normalizes_all:
        query = norm(query)
    return query.transpose(0, 1).float()


def compute_expected_weights(
    keys: Tensor, mean: Tensor, covariance: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return (H, K), the mean over G of E[exp(scale q k_i)], normalized to sum 1, for Gaussian q.

    Args:
        keys: (H, K, D).
        mean: (H, G, D).
        covariance: (H, G, D, D). Computed for one KV head at a time: G * K * D floats.
        scale: The model's own.
        sinks: (H, G), logits of the model that no query changes, or None. They are part of the sum.
    """
    # The exponential of a Gaussian's logit has the mean exp(m k + k C k / 2), and the softmax over
    # columns removes what all share.
    divisor = 1 / scale  # sqrt(D) in most models; attend.py says why it divides
    weights = []
    for head, (k, m, c) in enumerate(zip(keys, mean, covariance, strict=True)):
        logits = m @ k.T / divisor + (k @ c * k).sum(-1) / (2 * divisor**2)
        of_head = None if sinks is None else sinks[head]
        weights.append(compute_weights(logits[:, None], of_head)[:, 0].mean(0))
    return torch.stack(weights)
