"""Attention over pages, written plainly in float64, with FlashAttention's signature."""

import torch
from torch import Tensor


def attend_plainly(query, keys, values, scale, causal):
    """Return output (T, Hq, D) and log-sum-exps (Hq, T) of one sequence.

    query (T, Hq, D); keys and values (N, H, D); the last query sees all N pairs.
    """
    groups = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(groups, 1)
    values = values.double().repeat_interleave(groups, 1)
    logits = torch.einsum("thd,nhd->htn", query.double(), keys) * scale
    if causal:
        count, pairs = logits.shape[1:]
        seen = torch.ones(count, pairs, dtype=torch.bool).tril(pairs - count)
        logits = logits.masked_fill(~seen, -torch.inf)
    output = torch.einsum("htn,nhd->thd", logits.softmax(-1), values)
    return output, logits.logsumexp(-1)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    return_softmax_lse: bool,
    fa_version: int,
):
    """Return what vLLM's FlashAttention returns: outputs (T, Hq, D) and log-sum-exps (Hq, T).

    Keys and values are (P, page, H, D).
    """
    assert return_softmax_lse and fa_version in (2, 3)
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(seqused_k.max())
    outputs, sums = [], []
    for row, pairs in enumerate(seqused_k.tolist()):
        pages = block_table[row, : -(-pairs // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:pairs] for x in (k, v))
        own = q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]]
        output, lse = attend_plainly(own, keys, values, softmax_scale, causal)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs).to(q.dtype), torch.cat(sums, 1).float()


def read_flat_pages(pages, numbers):
    """Return keys and values of pages that `write_flat_pages` wrote."""
    keys, values = pages[numbers.long(), 0].chunk(2, dim=-1)
    return keys, values
