"""Two Triton kernels for a pass's attention and the highest weight that any of its rows gives each
column.

    attend    one program per block of rows and query head: the output over all pairs, and the
              log2-sum-exp2 l_j of each row over those that share a softmax
    highest   one program per block of columns and query head, over all rows:
              max over j of 2^(x_ji - l_j + log2 w_j)

Logits x_ji are in units of log 2, float32, and computed twice: memory beyond the output is one
number per row and one per column for each query head. Equal inputs give equal bits.
"""

# ruff: noqa: N803
# Launches and constexprs of Triton are beyond a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from restorekv.cache.tail import KeysValues
from restorekv.model.attention.triton_attend import (
    DTYPES,
    choose_resources,
    count_pairs_at_once,
    get_factor_type,
    make_rows_contiguous,
)
from restorekv.model.attention.triton_kernels import LOG2E

# Kernels are not specialized for these.
VARYING = ["rows", "sinks", "start", "stop", "columns", "skipped"]


def supports_query(query: Tensor) -> bool:
    """Return whether the kernels can take this query."""
    return query.is_cuda and query.dtype in DTYPES


def attend_pass(
    query: Tensor,
    own: KeysValues,
    cached: KeysValues,
    scale: float,
    sinks: int,
    start: int,
    end: int,
) -> tuple[Tensor, Tensor]:
    """Return the attention output (Q, H * G, D) of a pass and l (H, G, Q).

    Args:
        query: (H, G, Q, D).
        own: Keys and values (H, Q, D) of the pass itself, which are seen causally.
        cached: Keys and values (H, K, D) of the cache.
        scale: The factor of the logits.
        sinks: The cached columns before it share a softmax with the pass's own pairs.
        start: So do those from here, at least `sinks`,
        end: To here.
    """
    heads, groups, rows, width = query.shape
    query = make_rows_contiguous(query)
    own_keys = make_rows_contiguous(own[0])
    own_values = make_rows_contiguous(own[1])
    keys = make_rows_contiguous(cached[0])
    values = make_rows_contiguous(cached[1])
    # Row-major by query position, which is the order in which attention is returned.
    output = query.new_empty(rows, heads, groups, width)
    lse = query.new_empty(heads, groups, rows, dtype=torch.float32)
    m, n, block_d, options = _choose_launch_sizes(query)
    # Kernels run on the current device, which may not be the query's.
    with torch.cuda.device_of(query):
        attend_kernel[(triton.cdiv(rows, m), heads * groups)](
            query,
            own_keys,
            own_values,
            keys,
            values,
            output,
            lse,
            rows,
            sinks,
            start,
            end,
            keys.shape[1],
            *query.stride()[:3],
            *own_keys.stride()[:2],
            *own_values.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            scale * LOG2E.value,
            groups,
            width,
            m,
            n,
            block_d,
            get_factor_type(query.dtype),
            **options,
        )
    return output.flatten(1, 2), lse


def find_maxima(
    query: Tensor, keys: Tensor, lse: Tensor, scale: float, own: bool = False, diagonal: bool = True
) -> Tensor:
    """Return the highest weight (H, G, n) float32 that any row gives each key.

    Args:
        query: (H, G, Q, D).
        keys: (H, n, D).
        lse: l - log2 w (H, G, Q).
        scale: The factor of the logits.
        own: Whether the keys are the rows' own, which earlier rows do not see.
        diagonal: Whether a row then sees its own key.
    """
    heads, groups, rows, width = query.shape
    query = make_rows_contiguous(query)
    keys = make_rows_contiguous(keys)
    lse = lse.contiguous()
    # Zero: no row has given a column any weight yet.
    best = query.new_zeros(heads, groups, keys.shape[1], dtype=torch.float32)
    m, n, block_d, options = _choose_launch_sizes(query)
    with torch.cuda.device_of(query):
        highest_kernel[(triton.cdiv(keys.shape[1], m), heads * groups)](
            query,
            keys,
            lse,
            best,
            rows,
            keys.shape[1],
            int(not diagonal),
            *query.stride()[:3],
            *keys.stride()[:2],
            scale * LOG2E.value,
            own,
            groups,
            width,
            m,
            n,
            block_d,
            get_factor_type(query.dtype),
            **options,
        )
    return best


def _choose_launch_sizes(query: Tensor) -> tuple[int, int, int, dict[str, int]]:
    """Return the rows of a program, the rows it loads at once, their padded width, and options for
    the launch.
    """
    # A dot product wants at least 16 columns and a power of two.
    block_d = max(triton.next_power_of_2(query.shape[-1]), 16)
    m, warps, stages = choose_resources(query.dtype, block_d, query.shape[2])
    n = count_pairs_at_once(block_d, query.dtype)
    return m, n, block_d, {"num_warps": warps, "num_stages": stages}


@triton.jit
def accumulate(
    q,
    keys,
    values,
    key_row,
    value_row,
    best,
    weight,
    output,
    count,
    cut,
    first,
    second,
    limit,
    scale,
    OWN: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Add `count` pairs to a softmax's highest logit (M,), sum of weights (M,) and of weighted
    values (M, BLOCK_D).

    Pair i is in row i + first, and from `cut` on in row i + second; rows are key_row and value_row
    numbers apart. With OWN, row j of the queries sees the pairs up to limit[j].
    """
    # D is padded to BLOCK_D; the padding is masked out of every load.
    column = tl.arange(0, BLOCK_D)[None, :]
    for low in range(0, count, N):
        pair = low + tl.arange(0, N)
        inside = pair < count
        # Own pairs and cached ones lie in two tensors. One loop serves both: from the `cut`-th pair
        # on another base is added to the row's number.
        at = (pair + tl.where(pair < cut, first, second)).to(tl.int64)[:, None]
        valid = inside[:, None] & (column < D)
        key = tl.load(keys + at * key_row + column, mask=valid, other=0.0)
        logits = tl.dot(q.to(FACTOR), tl.trans(key).to(FACTOR), input_precision="ieee") * scale
        visible = inside[None, :]
        # Row j of the pass sees its own pairs up to itself.
        if OWN:
            visible = visible & (pair[None, :] <= limit[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        # The running softmax: an earlier maximum is lowered by `fade` when a later one exceeds it.
        higher = tl.maximum(best, tl.max(logits, 1))
        fade = tl.exp2(best - higher)
        share = tl.exp2(logits - higher[:, None])
        value = tl.load(values + at * value_row + column, mask=valid, other=0.0)
        shared = share.to(value.dtype).to(FACTOR)
        output = tl.dot(shared, value.to(FACTOR), output * fade[:, None], input_precision="ieee")
        weight = weight * fade + tl.sum(share, 1)
        best = higher
    return best, weight, output


@triton.jit(do_not_specialize=VARYING)
def attend_kernel(
    query,
    own_keys,
    own_values,
    keys,
    values,
    output,
    lse,
    rows,
    sinks,
    start,
    stop,
    columns,
    q_head,
    q_group,
    q_row,
    own_key_head,
    own_key_row,
    own_value_head,
    own_value_row,
    key_head,
    key_row,
    value_head,
    value_row,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Attend with M rows of one query head to own pairs, to cached pairs in their softmax, and to
    the rest.
    """
    # One program handles one query head and M of its rows.
    pair = tl.program_id(1).to(tl.int64)
    head = pair // G
    group = pair % G
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, BLOCK_D)[None, :]
    real = row < rows
    place = query + head * q_head + group * q_group + row.to(tl.int64)[:, None] * q_row + column
    q = tl.load(place, mask=real[:, None] & (column < D), other=0.0)
    best = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    total = tl.zeros([M, BLOCK_D], tl.float32)
    own_key = own_keys + head * own_key_head
    own_value = own_values + head * own_value_head
    key = keys + head * key_head
    value = values + head * value_head
    end = tl.minimum(tl.program_id(0) * M + M, rows)
    gap = start - sinks
    # The softmax: own pairs, then sinks and chunk, between which `gap` columns lie.
    best, weight, total = accumulate(
        q,
        own_key,
        own_value,
        own_key_row,
        own_value_row,
        best,
        weight,
        total,
        end,
        0,
        0,
        0,
        row,
        scale,
        True,
        D,
        N,
        BLOCK_D,
        FACTOR,
    )
    best, weight, total = accumulate(
        q,
        key,
        value,
        key_row,
        value_row,
        best,
        weight,
        total,
        sinks + stop - start,
        sinks,
        0,
        gap,
        row,
        scale,
        False,
        D,
        N,
        BLOCK_D,
        FACTOR,
    )
    # log2 of the softmax's sum, which the second kernel divides by.
    tl.store(lse + pair * rows + row, best + tl.log2(weight), mask=real)
    # The rest of the columns counts for the output alone.
    best, weight, total = accumulate(
        q,
        key,
        value,
        key_row,
        value_row,
        best,
        weight,
        total,
        gap + columns - stop,
        gap,
        sinks,
        stop - gap,
        row,
        scale,
        False,
        D,
        N,
        BLOCK_D,
        FACTOR,
    )
    # The last axis is written without padding, in the model's dtype.
    place = output + (row.to(tl.int64)[:, None] * tl.num_programs(1) + pair) * D + column
    mean = total / weight[:, None]
    tl.store(place, mean.to(output.dtype.element_ty), mask=real[:, None] & (column < D))


@triton.jit(do_not_specialize=VARYING)
def highest_kernel(
    query,
    keys,
    lse,
    best,
    rows,
    columns,
    skipped,
    q_head,
    q_group,
    q_row,
    key_head,
    key_row,
    scale,
    OWN: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Find the highest weight of M columns of one query head, over all rows that see them."""
    pair = tl.program_id(1).to(tl.int64)
    head = pair // G
    group = pair % G
    at = tl.program_id(0) * M + tl.arange(0, M)
    width = tl.arange(0, BLOCK_D)[None, :]
    real = at < columns
    # Rows of keys are columns of the weights: each program finds the highest weight of M of them.
    corner = keys + head * key_head + at.to(tl.int64)[:, None] * key_row + width
    key = tl.load(corner, mask=real[:, None] & (width < D), other=0.0)
    peak = tl.full([M], float("-inf"), tl.float32)
    # Own pairs: rows before the column's own cannot see it, so the loop starts at its block.
    start = tl.program_id(0) * M // N * N if OWN else 0
    for low in range(start, rows, N):
        row = low + tl.arange(0, N)
        inside = row < rows
        place = query + head * q_head + group * q_group + row.to(tl.int64)[:, None] * q_row + width
        q = tl.load(place, mask=inside[:, None] & (width < D), other=0.0)
        logits = tl.dot(key.to(FACTOR), tl.trans(q).to(FACTOR), input_precision="ieee") * scale
        logits -= tl.load(lse + pair * rows + row, mask=inside, other=float("inf"))[None, :]
        if OWN:
            logits = tl.where(row[None, :] >= at[:, None] + skipped, logits, float("-inf"))
        peak = tl.maximum(peak, tl.max(logits, 1))
    tl.store(best + pair * columns + at, tl.exp2(peak), mask=real)
