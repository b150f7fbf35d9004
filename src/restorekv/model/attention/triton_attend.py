"""Ragged attention on a GPU in two kernel launches, attend_tile and merge; the host does not wait.

`attend_tile` runs one program per tile of the context (see tiles.py) and per piece of the tail. A
context program multiplies its tile by the queries of all B questions, Q positions and G group heads
of its head, as rows of one matrix (R = B * Q * G, in blocks of 16 to 64), and stores for each row
the softmax average o over its tile and the log-sum-exp l of the logits; a tail program does so for
the rows of one question. `merge` joins them per head and row, always in the order of the tiles, so
that equal inputs give equal bits:

    o = sum_i e^(l_i - l) o_i,    l = log sum_i e^l_i.

`merge` starts from a model's sinks (sinks.py): an average of 0, with their logit as its l.

A layer with N kept pairs in P tiles and a tail of t rows in p pieces moves this many bytes:

    2 N D size            context, once if R <= 64; else once per 64 rows (float32: 16), whose
                          programs are neighbors and find the tile in the L2 cache
    2 B H t D size        tail
    8 (P R + p R H) (D+1) partial results in float32, written and read
    2 H R D size          queries and output

Logits, weights and sums are float32; float32 inputs are multiplied as such, not as TF32. The
launches depend on shapes and strides alone and read nothing from the device, so a CUDA graph can
record them. There, and wherever the tail is a buffer of fixed size, the mask hides its unused rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from restorekv.cache.ragged import RaggedLayer
from restorekv.errors import RestoreKVError
from restorekv.model.attention import tiles
from restorekv.model.attention.triton_kernels import (
    BIAS,
    CAUSAL,
    LOG2E,
    MASK,
    NOTHING,
    attend_tile,
    merge,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# TRITON_INTERPRET=1 runs kernels on the CPU, very slowly.
INTERPRETED = not isinstance(attend_tile, JITFunction)
PER_PROCESSOR = 4  # programs per multiprocessor
WANTED_ELSEWHERE = 4  # programs in the interpreter
STAGE = 16 << 10  # bytes of keys, and of values, that a program loads at once
MERGED = 32  # partial results that `merge` reads at once


def can_answer(query: Tensor, layer: RaggedLayer, cap: float | None = None) -> bool:
    """Return whether this backend can answer: on a GPU, with one of DTYPES, without gradients or a
    cap.
    """
    learning = torch.is_grad_enabled() and any(
        x.requires_grad for x in (query, layer.keys, layer.values)
    )
    reachable = query.is_cuda or (INTERPRETED and query.device.type == "cpu")
    fitting = query.dtype in DTYPES and query.dtype == layer.context_keys.dtype == layer.keys.dtype
    return reachable and fitting and not learning and cap is None


def attend_ragged(
    query: Tensor,
    layer: RaggedLayer,
    tail_mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the attention (B, H, G, Q, D) of query (B, H, G, Q, D) to a layer's context and tail.

    tail_mask is (B, 1, Q, n + q) bool, or None for a causal mask; sinks are (H, G) or None. No
    gradients are recorded, and `cap` has to be None.
    """
    if not can_answer(query, layer, cap):
        raise RestoreKVError(
            "The backend 'triton' needs float16, bfloat16 or float32 on a CUDA device and gives "
            "no gradients and no cap on logits; leave out attention.force_backend(...)."
        )
    plan = tiles.get_tiles(layer)
    result = attend_tiles(
        query,
        layer.context_keys,
        layer.context_values,
        layer.bias,
        layer.keys,
        layer.values,
        tail_mask,
        plan.entries,
        plan.first,
        list(plan.counts),
        scale,
        sinks,
    )
    return result.permute(0, 2, 3, 1, 4)


def launch_kernels(
    query: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    entries: Tensor,
    first: Tensor,
    counts: list[int],
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch both kernels and return the attention (B, Q, H, G, D).

    It is that of query (B, H, G, Q, D) to a context (N, D) with bias (N,) and a tail (B, H, t, D)
    with mask (B or 1, 1, Q, t); sinks are (H, G). entries, first and counts are those of
    `tiles.Tiles`.
    """
    query = make_rows_contiguous(query)
    keys, values = _equalize_strides(keys, values)
    context_keys = context_keys.contiguous()
    context_values = context_values.contiguous()
    bias = None if bias is None else bias.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    batch, heads, groups, queries, width = query.shape
    rows = groups * queries
    wanted = _count_wanted_programs(query.device)
    block_d = max(triton.next_power_of_2(width), 16)
    m, warps, stages = choose_resources(query.dtype, block_d, batch * rows)
    level = tiles.choose_list(counts, triton.cdiv(batch * rows, m), wanted)
    count = counts[level]
    blocks = triton.cdiv(batch * rows, m), triton.cdiv(rows, m)
    piece = _choose_piece_rows(keys.shape[-2], wanted // (batch * heads * blocks[1]))
    pieces = triton.cdiv(keys.shape[-2], piece)
    parts = query.new_empty(count + heads * pieces, batch * rows, width, dtype=torch.float32)
    sums = query.new_empty(parts.shape[:2], dtype=torch.float32)
    output = query.new_empty(batch, queries, heads, groups, width)
    hiding = (0, 0, 0)
    if mask is not None:
        # One mask for all questions has the stride 0 between them.
        question_stride = 0
        if mask.shape[0] > 1:
            question_stride = mask.stride(0)
        hiding = (question_stride, *mask.stride()[2:])
    with torch.cuda.device_of(query):
        # Triton annotates a launch like the kernel, with neither num_warps nor ints as constants.
        launch_tiles: Any = attend_tile[(count * blocks[0] + batch * heads * pieces * blocks[1],)]
        launch_tiles(
            query,
            context_keys,
            context_values,
            bias,
            keys,
            values,
            mask,
            entries,
            parts,
            sums,
            sum(counts[:level]),
            count * blocks[0],
            *blocks,
            pieces,
            piece,
            count,
            batch,
            queries,
            keys.shape[-2],
            batch * rows,
            *query.stride()[:-1],
            *keys.stride()[:-1],
            *hiding,
            scale * LOG2E.value,
            NOTHING if bias is None else BIAS,
            CAUSAL if mask is None else MASK,
            heads,
            groups,
            width,
            m,
            count_pairs_at_once(block_d, query.dtype),
            block_d,
            get_factor_type(query.dtype),
            num_warps=warps,
            num_stages=stages,
        )
        m = 8
        columns = min(block_d, 128)
        merged = MERGED // 4
        # With few rows, smaller programs keep the device busy.
        if batch * rows * heads <= wanted:
            m = 1
            columns = min(block_d, 32)
            merged = MERGED
        launch_merge: Any = merge[
            (triton.cdiv(batch * rows, m), heads, triton.cdiv(width, columns))
        ]
        launch_merge(
            parts,
            sums,
            first,
            output,
            sinks,
            level * (heads + 1),
            count,
            pieces,
            queries,
            batch * rows,
            heads,
            groups,
            width,
            m,
            merged,
            columns,
            sinks is not None,
        )
    return output


# A custom operator, which torch.compile does not trace into.
attend_tiles = torch.library.custom_op("restorekv::attend_tiles", launch_kernels, mutates_args=())


@attend_tiles.register_fake
def _make_fake_result(query: Tensor, *_: object) -> Tensor:
    """Return an empty tensor of the shape that `launch_kernels` returns."""
    batch, heads, groups, queries, width = query.shape
    return query.new_empty(batch, queries, heads, groups, width)


def _count_wanted_programs(device: torch.device) -> int:
    """Return how many programs keep the device busy, without asking the device itself."""
    if device.type != "cuda":
        return WANTED_ELSEWHERE
    return PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def choose_resources(dtype: torch.dtype, block_d: int, rows: int) -> tuple[int, int, int]:
    """Return the rows of a program, its warps and its stages, chosen so that no register spills."""
    most_rows = 64
    if dtype == torch.float32:
        most_rows = 16
    m = min(max(triton.next_power_of_2(rows), 16), most_rows)
    warps = 4
    if dtype == torch.float32 or m * block_d >= 1 << 13:
        warps = 8
    stages = 3
    if m > 32 or block_d > 128:
        stages = 2
    return m, warps, stages


def count_pairs_at_once(block_d: int, dtype: torch.dtype) -> int:
    """Return how many pairs a program loads at once."""
    return max(min(STAGE // (block_d * dtype.itemsize), tiles.TILE_ROWS), 16)


def get_factor_type(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of matrix factors: that of the inputs, but the interpreter cannot multiply
    bfloat16.
    """
    if INTERPRETED and dtype == torch.bfloat16:
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[
        dtype
    ]


def _choose_piece_rows(tail: int, pieces: int) -> int:
    """Return the rows of a piece, whole tiles, so that at most `pieces` pieces cover the tail."""
    return triton.cdiv(triton.cdiv(tail, max(pieces, 1)), tiles.TILE_ROWS) * tiles.TILE_ROWS


def make_rows_contiguous(x: Tensor) -> Tensor:
    """Return x with stride 1 in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _equalize_strides(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with equal strides, the last of which is 1."""
    if keys.stride() == values.stride() and keys.stride(-1) == 1:
        return keys, values
    return keys.contiguous(), values.contiguous()
