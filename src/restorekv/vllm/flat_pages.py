"""Pages in the plain layout of FlashAttention: a pair's key, then its value."""

import torch
from torch import Tensor


def write_pages(pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys and values (N, 1, D) into slots (N,) of pages (P, 1, page_size, 2 * D)."""
    rows = pages.view(-1, pages.shape[-1])
    rows[slots] = torch.cat([keys, values], -1)[:, 0]
