"""Which tokens of a step ask which document, and how two parts of attention are merged.

vLLM's attention metadata has no request ids. The connector knows the first block of every request
that asks a document; a row of the block table that begins with it is that request's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from restorekv.vllm.ragged_documents import PLACEHOLDERS

# The logit of a sink that measures nearly all log-sum-exps. Models with large biases on keys, such
# as Qwen 2, have log-sum-exps of thousands, for which other sinks are tried.
SINK = 40.0
REACH = 69.0  # a sink measures log-sum-exps that are at most this much below it
SMALLEST_SHARE = 1e-30  # below it, products of float32 numbers lose digits
LARGEST_SHARE = 0.5  # above it, one minus the share loses digits


@dataclass(frozen=True)
class DocumentRows:
    """The tokens of one request in a step that attend to a document.

    first, count: tokens of the step; tail: pairs of vLLM's own pool that the last token sees,
    which are those after the placeholders; table_row: of the block table.
    """

    document: str
    first: int
    count: int
    tail: int
    table_row: int


def find_document_rows(
    documents: Mapping[int, str],
    first_blocks: Sequence[int],
    token_starts: Sequence[int],
    seq_lens: Sequence[int],
) -> list[DocumentRows]:
    """Return the tokens that ask a document, those of one document together.

    Args:
        documents: Name by the first block of a request.
        first_blocks: The first block of every request of the step.
        token_starts: The first token of every request, then the number of tokens.
        seq_lens: Tokens of every request, those of this step included.

    If vLLM computes placeholders itself, they are left out: they attend to no document, and nothing
    reads their outputs.
    """
    found = []
    for row, block in enumerate(first_blocks):
        document = documents.get(block)
        if document is None:
            continue
        start, end = token_starts[row], token_starts[row + 1]
        position = seq_lens[row] - (end - start)
        start += max(PLACEHOLDERS - position, 0)
        if start < end:
            tail = seq_lens[row] - PLACEHOLDERS
            found.append(DocumentRows(document, start, end - start, tail, row))
    order = {name: rank for rank, name in enumerate(dict.fromkeys(r.document for r in found))}
    return sorted(found, key=lambda rows: order[rows.document])


def index_tokens(rows: Sequence[DocumentRows]) -> Tensor:
    """Return the step's tokens (R,) int64 of the rows, in their order."""
    return torch.cat([torch.arange(row.first, row.first + row.count) for row in rows])


def index_heads_as_sequences(counts: Sequence[int], heads: int) -> list[Tensor]:
    """Return the order of (R, H) pairs of token and KV head by document, head, token.

    Attention over a document treats every KV head as a separate sequence, whose queries are the
    tokens that ask the document.

    Args:
        counts: Tokens of every document.
        heads: H.

    Returns:
        For each document, indices into the flattened pairs (R, H).
    """
    parts = []
    first = 0
    for count in counts:
        tokens = torch.arange(first, first + count)
        parts.append((tokens[None, :] * heads + torch.arange(heads)[:, None]).flatten())
        first += count
    return parts


def measure_log_sum_exp(
    attend: Callable[[float], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return attention's output (..., D) and the log-sum-exp (...) of its logits, both float32.

    A kernel that does not return the log-sum-exp, log Z, also attends with a sink of logit s, which
    adds e^s to the softmax's denominator: O_s = O * Z / (Z + e^s). The share
    rho = <O_s, O> / <O, O> gives log Z = s + log(rho) - log(1 - rho).

    Args:
        attend: Runs the kernel; returns its output without a sink and with a sink of this logit.
    """
    sink = SINK
    plain, sunk = (output.float() for output in attend(sink))
    norms = plain.square().sum(-1)
    lse = torch.full_like(norms, -torch.inf)
    # If every value is zero, nothing can be measured. Only a pruned head is like that, and its
    # other part is zero, too.
    missing = norms > 0
    # Bounds of the log-sum-exps that were not measured yet. Each sink narrows them.
    low = lse.clone()
    high = -low
    while True:
        share = (sunk * plain).sum(-1) / norms
        sound = missing & (share > SMALLEST_SHARE) & (share < LARGEST_SHARE)
        found = sink + share.log() - torch.log1p(-share)
        lse = torch.where(sound, found, lse)
        missing = missing & ~sound
        if not bool(missing.any()):
            break
        low = torch.where(share >= LARGEST_SHARE, low.clamp(min=sink), low)
        high = torch.where(share <= SMALLEST_SHARE, high.clamp(max=sink - REACH), high)
        last = sink
        sink = choose_sink(float(low[missing][0]), float(high[missing][0]))
        if sink == last or not math.isfinite(sink):
            raise FloatingPointError(
                "The attention logits of a document's question are not finite."
            )
        sunk = attend(sink)[1].float()
    return plain, lse


def choose_sink(low: float, high: float) -> float:
    """Return the logit of a sink that may measure a log-sum-exp between two bounds.

    If one of the bounds is infinite, steps grow with the other bound, so that few suffice.
    """
    if math.isinf(high):
        return low + max(abs(low), 45.0)
    if math.isinf(low):
        return high - max(abs(high), 45.0) + REACH
    return (low + high + REACH) / 2


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Return attention over both parts: outputs (..., D) weighted by e to their log-sum-exps.

    A part without a pair has the log-sum-exp -inf and any finite output. If neither part has a
    pair, the output is that of the first.
    """
    weight = torch.sigmoid(second_lse - first_lse)
    # The difference of -inf and -inf is NaN.
    weight = weight.masked_fill(second_lse == -torch.inf, 0)
    return first + weight[..., None] * (second - first)
