"""KVzip+ (the normalization of arXiv:2601.07891 in KVzip, as in kvpress): what a pair adds to the
residual stream.

With x_j the input of the attention module (after the input norm), v_i the value and W_hg the
columns of the output projection that belong to query head (h, g),

    score_i = max over j, g of  A_ji * ||W_hg v_i|| / ||x_j||.

Where attention has a gate (Qwen3-Next, Qwen 3.5), the norm is that before the gate.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from restorekv.errors import ModelError
from restorekv.evictors.kvzip import KVzip, find_column_maxima
from restorekv.model.latent import is_latent, join_projections
from restorekv.model.linear_layers import compute_matrix
from restorekv.model.observer import LayerView

# The second is the name in LFM2, the third in GPT-NeoX and Phi.
OUTPUT_NAMES = ("o_proj", "out_proj", "dense")


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """Passes, chunks and sinks are KVzip's."""

    name: ClassVar[str] = "kvzip+"

    def score_chunk(
        self, view: LayerView, cached: Any, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Return the maxima (H, end - start) and the attention output.

        The column factor is the same for every row, so the row maximum is taken first.
        """
        assert view.hidden is not None
        row_weight = 1 / view.hidden.float().norm(dim=-1)  # (Q,)
        sinks = min(self.sinks, start)
        best, output = find_column_maxima(view, cached, start, end, sinks, row_weight)
        values = cached.values[0, :, start:end]
        found = [getattr(view.module, name, None) for name in OUTPUT_NAMES]
        output_layer = next((layer for layer in found if layer is not None), None)
        if output_layer is None:
            raise ModelError(
                f"{type(view.module).__name__} has no output projection named "
                f"{' or '.join(OUTPUT_NAMES)}; use an evictor other than kvzip+."
            )
        matrix = compute_matrix(output_layer, values.dtype)
        if is_latent(view.module, cached.values):
            matrix = join_projections(view.module, matrix)
        norms = _compute_output_norms(matrix, values, groups=best.shape[1])
        return (best * norms).amax(1), output


def _compute_output_norms(weight: Tensor, value: Tensor, groups: int) -> Tensor:
    """Return ||W_hg v_i||, (H, G, m), for weight (d, H*G*D) and value (H, m, D).

    ||W v||^2 = v^T (W^T W) v, and the Gram matrix is D x D: no (m, d) products are stored.
    """
    heads, _, dim = value.shape
    split = weight.float().reshape(-1, heads, groups, dim)
    gram = torch.einsum("xhgd,xhge->hgde", split, split)
    value = value.float().unsqueeze(1)  # (H, 1, m, D)
    return ((value @ gram) * value).sum(-1).clamp_min(0).sqrt()
