"""The two kernels of `triton_attend.py`: a softmax average for each tile and row, and their merger.

Rows are numbered (b * G + g) * Q + q. Logits are in units of log 2, since a GPU computes exp2; a
sum of weights 2^s is kept as its log2. For a row that sees no pair this is -inf and the average is
0. Names in capitals are compile-time constants.
"""

# ruff: noqa: N803, N806

import triton
import triton.language as tl

# How `extra` and `limit` apply to a pair.
NOTHING, BIAS, CAUSAL, MASK = (tl.constexpr(kind) for kind in range(4))
LOG2E = tl.constexpr(1.4426950408889634)

# Triton compiles a kernel again for every pattern of 1s and multiples of 16 among its integers,
# except these.
VARYING = (
    "skipped context_programs context_blocks tail_blocks pieces piece_rows begin count batch "
    "queries tail total_rows mask_batch mask_query mask_pair"
).split()


@triton.jit
def average(
    q,
    keys,
    values,
    step,
    start,
    end,
    extra,
    limit,
    pair_step,
    scale,
    HOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return the average value (M, BLOCK_D) that rows q (M, BLOCK_D) get from the pairs start:end,
    which are `step` numbers apart, and log2 of the summed weights (M,).

    BIAS: extra is added to the logits; CAUSAL: row i sees the pairs up to limit[i]; MASK: extra +
    limit[i] points to row i's mask, whose columns are pair_step apart. FACTOR is the dtype of the
    factors in matrix products.
    """
    M: tl.constexpr = q.shape[0]
    # Online softmax: the largest logit so far, the sum of weights and the weighted sum of values,
    # both relative to that logit.
    best = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    output = tl.zeros([M, BLOCK_D], tl.float32)
    column = tl.arange(0, BLOCK_D)[None, :]
    for at in range(start, end, BLOCK_N):
        pair = at + tl.arange(0, BLOCK_N)
        inside = pair < end
        # In 64 bits, since a pool of pairs may have more than 2^31 numbers.
        place = pair.to(tl.int64)[:, None] * step + column
        # BLOCK_D is D rounded up to a power of two; the columns beyond D read as zero.
        valid = inside[:, None] & (column < D)
        key = tl.load(keys + place, mask=valid, other=0.0)
        logits = tl.dot(q.to(FACTOR), tl.trans(key).to(FACTOR), input_precision="ieee") * scale
        if HOW == BIAS:
            logits += tl.load(extra + pair, mask=inside, other=0.0).to(tl.float32)[None, :] * LOG2E
        visible = inside[None, :]
        if HOW == CAUSAL:
            visible = visible & (pair[None, :] <= limit[:, None])
        if HOW == MASK:
            visible = visible & tl.load(
                extra + limit[:, None] + pair[None, :] * pair_step, mask=visible, other=0
            )
        logits = tl.where(visible, logits, float("-inf"))
        # A block with a larger logit makes all earlier weights smaller, by the factor `fade`.
        higher = tl.maximum(best, tl.max(logits, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        fade = tl.exp2(best - finite)
        share = tl.exp2(logits - finite[:, None])
        value = tl.load(values + place, mask=valid, other=0.0)
        # Weights are rounded to the values' dtype, whatever FACTOR is.
        share_of_value = share.to(value.dtype).to(FACTOR)
        output = tl.dot(
            share_of_value, value.to(FACTOR), output * fade[:, None], input_precision="ieee"
        )
        weight = weight * fade + tl.sum(share, 1)
        best = higher
    seen = weight > 0
    divisor = tl.where(seen, weight, 1.0)
    return output / divisor[:, None], tl.where(seen, best + tl.log2(divisor), float("-inf"))


@triton.jit
def store_partial(
    parts, sums, slot, total_rows, row, real, output, lse, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store the rows of a program's result: parts (slots, R, D), sums (slots, R)."""
    place = slot.to(tl.int64) * total_rows + row
    column = tl.arange(0, BLOCK_D)[None, :]
    tl.store(parts + place[:, None] * D + column, output, mask=real[:, None] & (column < D))
    tl.store(sums + place, lse, mask=real)


@triton.jit
def load_queries(
    query,
    row,
    real,
    queries,
    q_batch,
    q_group,
    q_query,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the queries (M, BLOCK_D) of one head's rows."""
    # Row (b * G + g) * Q + q, taken apart into its batch, its query head and its query.
    place = row // (G * queries) * q_batch + row // queries % G * q_group + row % queries * q_query
    column = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(
        query + place.to(tl.int64)[:, None] + column, mask=real[:, None] & (column < D), other=0.0
    )


@triton.jit(do_not_specialize=VARYING)
def attend_tile(
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
    skipped,
    context_programs,
    context_blocks,
    tail_blocks,
    pieces,
    piece_rows,
    count,
    batch,
    queries,
    tail,
    total_rows,
    q_batch,
    q_head,
    q_group,
    q_query,
    t_batch,
    t_head,
    t_pair,
    mask_batch,
    mask_query,
    mask_pair,
    scale,
    CONTEXT: tl.constexpr,
    TAIL: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Attend from a block of a head's rows to a context tile, or from a question's rows to a piece
    of its tail.
    """
    program = tl.program_id(0)
    # The first programs are for the context, which all questions share: all their rows of a head
    # attend to a tile together. An entry holds a tile's head, its first pair and where it ends.
    if program < context_programs:
        slot = program // context_blocks
        entry = entries + (skipped + slot) * 4
        head = tl.load(entry)
        row = (program % context_blocks * M + tl.arange(0, M)).to(tl.int64)
        real = row < total_rows
        q = load_queries(
            query + head * q_head, row, real, queries, q_batch, q_group, q_query, G, D, BLOCK_D
        )
        output, lse = average(
            q,
            context_keys,
            context_values,
            D,
            tl.load(entry + 1),
            tl.load(entry + 2),
            bias,
            row,
            1,
            scale,
            CONTEXT,
            D,
            BLOCK_N,
            BLOCK_D,
            FACTOR,
        )
        store_partial(parts, sums, slot, total_rows, row, real, output, lse, D, BLOCK_D)
    else:
        # The others are for the tails: each question's rows attend only to its own pairs.
        program -= context_programs
        inner = program % tail_blocks * M + tl.arange(0, M)
        piece = program // tail_blocks % pieces
        head = program // (tail_blocks * pieces) % H
        question = (program // (tail_blocks * pieces * H)).to(tl.int64)
        real = inner < G * queries
        row = question * G * queries + inner
        # Causal: query q of Q is the pair tail - Q + q itself, and sees those up to it.
        limit = inner % queries + tail - queries
        if TAIL == MASK:
            limit = tl.where(real, question * mask_batch + inner % queries * mask_query, 0)
        q = load_queries(
            query + head * q_head, row, real, queries, q_batch, q_group, q_query, G, D, BLOCK_D
        )
        first = question * t_batch + head * t_head
        start = piece * piece_rows
        end = min(piece * piece_rows + piece_rows, tail)
        output, lse = average(
            q,
            keys + first,
            values + first,
            t_pair,
            start,
            end,
            mask,
            limit,
            mask_pair,
            scale,
            TAIL,
            D,
            BLOCK_N,
            BLOCK_D,
            FACTOR,
        )
        store_partial(
            parts,
            sums,
            count + head * pieces + piece,
            total_rows,
            row,
            real,
            output,
            lse,
            D,
            BLOCK_D,
        )


@triton.jit(do_not_specialize=VARYING)
def merge(
    parts,
    sums,
    first,
    output,
    sinks,
    begin,
    count,
    pieces,
    queries,
    total_rows,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the results of a head's tiles, then its tail's, for M rows and WIDTH columns of output
    (B, Q, H, G, D).

    With SINKS, the logits sinks (H, G) are merged too, as results of 0.
    """
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    head = tl.program_id(1)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = row < total_rows
    within = column < D
    # The head's results lie in slots low to low + own, those of its tail after all `count` tiles.
    low = tl.load(first + begin + head)
    own = tl.load(first + begin + head + 1) - low
    group = row // queries % G
    best = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    if SINKS:
        # A sink takes weight and has no value: only the sum of weights begins with it.
        best = tl.load(sinks + head * G + group).to(tl.float32) * LOG2E
        weight = tl.full([M], 1.0, tl.float32)
    result = tl.zeros([M, WIDTH], tl.float32)
    for at in range(0, own + pieces, BLOCK_S):
        index = at + tl.arange(0, BLOCK_S)
        slot = tl.where(index < own, low + index, count + head * pieces + index - own)
        place = slot.to(tl.int64)[:, None] * total_rows + row[None, :]  # (BLOCK_S, M)
        valid = (index < own + pieces)[:, None] & real[None, :]
        lse = tl.load(sums + place, mask=valid, other=float("-inf"))
        cell = parts + place[:, :, None] * D + column[None, None, :]
        part = tl.load(cell, mask=valid[:, :, None] & within[None, None, :], other=0.0)
        higher = tl.maximum(best, tl.max(lse, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(lse - finite[None, :])
        fade = tl.exp2(best - finite)
        result = result * fade[:, None] + tl.sum(part * share[:, :, None], 0)
        weight = weight * fade + tl.sum(share, 0)
        best = higher
    # A row that saw no pair, such as one beyond the last, has weight 0 and result 0.
    result /= tl.where(weight > 0, weight, 1.0)[:, None]
    question = row // (G * queries)
    query = row % queries
    place = ((question * queries + query) * H + head) * G + group
    cell = output + place[:, None] * D + column[None, :]
    tl.store(cell, result.to(output.dtype.element_ty), mask=real[:, None] & within[None, :])
