"""Shapes for attention by blocks, and the same attention written out densely."""

import math

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make(heads, groups, rows, held, dim, dtype, seed, size=2.0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, groups, rows, dim, generator=generator) * size
    own, context = (
        tuple(torch.randn(heads, count, dim, generator=generator).to(dtype) for _ in range(2))
        for count in (rows, held)
    )
    return query.to(dtype), own, context


def written_out(query, own, context, scale, columns=None):
    """Return the output (Q, H * G, D) and the weights (H, G, Q, columns + Q) in float64.

    The weights are those of the context's `columns` (None means all) and of the Q own pairs.
    """
    keys, values = (
        torch.cat([x, y], 1)[:, None].double() for x, y in zip(context, own, strict=True)
    )
    rows, held = query.shape[2], context[0].shape[1]
    later = torch.ones(rows, held + rows, dtype=torch.bool).triu(held + 1)
    logits = (query.double() @ keys.mT * scale).masked_fill(later, -math.inf)
    chosen = [*(range(held) if columns is None else columns), *range(held, held + rows)]
    return (logits.softmax(-1) @ values).permute(2, 0, 1, 3).flatten(1, 2), logits[
        ..., chosen
    ].softmax(-1)
