"""Gates of random weights."""

import torch

from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.model.shape import CacheShape

S, T, RANK, SINKS, WIDTH = 3, 61, 8, 5, 7


def random_layers(kind, model, seed=0):
    """Return parameters far from their starting values, so that each has a visible effect."""
    generator, shape = torch.Generator().manual_seed(seed), CacheShape.from_model(model)
    free = {
        "q_norm.weight": torch.empty(RANK),
        "k_base": torch.empty(1, 1, SINKS, 1),
        "0.weight": torch.empty(WIDTH, 1),
    }
    wanted = gate_file.compute_shapes(kind, shape, free)
    return [
        {name: torch.randn(size, generator=generator) * 0.5 for name, size in wanted.items()}
        for _ in range(shape.layers)
    ]


def save_gate(path, kind, model, layers=None):
    card = GateCard.for_model(model, kind, "kvzip", settings={"seed": 1}, figures={"loss": 0.5})
    gate_file.write_gate(path, Gate(layers or random_layers(kind, model), card))
    return str(path)
