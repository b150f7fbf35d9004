"""Attention over a document's pages head by head, for steps in which many tokens ask it.

A kernel for pages reads a pair again for every few queries. With many queries it is faster to copy
the document's pairs of the layer out of their pages once and to attend with PyTorch's own blocked
kernel, which returns the log-sum-exp too. `benchmarks vllm-steps` measures how many it takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from restorekv.vllm.page_pool import PageTable

# Copies pages out: (pages, numbers (N,)) to keys and values (N, page_size, D).
PageReader = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# A document is attended head by head if at least MIN_TOKENS tokens of the step ask it, and if these
# tokens times its mean number of pairs in a head are at least MIN_WORK. `benchmarks vllm-steps`,
# with SmolLM2's heads, chose 8 tokens on one machine and 32 on another. At 16, in between, neither
# way loses much.
MIN_TOKENS = 16
MIN_WORK = 4096


def prefers_loop(tokens: int, document: PageTable) -> bool:
    """Return whether attending to a document head by head is faster than attending to its pages.

    Args:
        tokens: How many tokens of the step ask it.
        document: Where it lies.
    """
    return tokens >= MIN_TOKENS and tokens * document.mean_length >= MIN_WORK


def attend_by_head(
    queries: Tensor,
    document: PageTable,
    layer: int,
    pages: Tensor,
    reader: PageReader,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to all pairs of a document in one layer, in float32.

    Args:
        queries: (H * R, G, D): the R tokens of the first head, then those of the next.
        document: Where it lies.
        layer: The layer's number.
        pages: The pool's pages.
        reader: Copies pairs out of pages.
        scale: The factor of the logits.

    Returns:
        Outputs (H * R, G, D) and log-sum-exps (H * R, G) of the scaled logits, float32.
    """
    table = document.tables[layer]
    lengths = document.lengths[layer].tolist()
    heads = len(lengths)
    count, groups, dim = queries.shape
    rows = queries.view(heads, 1, count // heads * groups, dim).float()
    output = torch.empty_like(rows)
    lse = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
    for head, pairs in enumerate(lengths):
        page_count = -(-pairs // pages.shape[2])
        keys, values = reader(pages, table[head, :page_count])
        # The kernel reads wrong numbers if those of a pair are not contiguous.
        keys = keys.reshape(1, 1, -1, dim)[:, :, :pairs].float().contiguous()
        values = values.reshape(1, 1, -1, dim)[:, :, :pairs].float().contiguous()
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows[head][None], keys, values, scale=scale
        )
        output[head] = attended[0][0]
        lse[head] = attended[1].reshape(lse[head].shape)
    return output.view(queries.shape), lse.view(count, groups)


def find_reader(
    candidates: list[PageReader],
    pages: Tensor,
    writer: Callable[[Tensor, Tensor, Tensor, Tensor], None],
) -> PageReader | None:
    """Return the reader that reads back what a writer wrote; None if none knows its layout.

    Args:
        candidates: Readers of layouts that are known.
        pages: Two pages (2, 1, page_size, 2 * D), which are overwritten.
        writer: Puts pairs into slots.
    """
    _, _, size, width = pages.shape
    count = 2 * size
    numbers = torch.arange(count * width // 2, device=pages.device).view(count, 1, -1)
    # Small whole numbers, which every dtype holds; keys differ from values.
    keys = (numbers % 251 - 125).to(pages.dtype)
    values = (numbers % 241 - 120).to(pages.dtype)
    writer(pages, keys, values, torch.arange(count, device=pages.device))
    for reader in candidates:
        found_keys, found_values = reader(pages, torch.arange(2, device=pages.device))
        if found_keys.reshape(keys.shape).equal(keys) and found_values.reshape(values.shape).equal(
            values
        ):
            return reader
    return None


def write_flat_pages(pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys and values (N, 1, D) into slots (N,) of pages (P, 1, page_size, 2 * D).

    This is the plain layout of FlashAttention: a row is a pair's key, then its value.
    """
    rows = pages.view(-1, pages.shape[-1])
    rows[slots] = torch.cat([keys, values], -1)[:, 0]


def read_transposed_pages(pages: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Copy out pages in the layout of vLLM's CPU kernel for vector instructions: a page has its
    keys (D, page_size), then its values (page_size, D).
    """
    copied = pages[numbers.long(), 0]
    count, size, width = copied.shape
    keys, values = copied.view(count, 2, -1).unbind(1)
    return keys.view(count, width // 2, size).mT, values.view(count, size, width // 2)
