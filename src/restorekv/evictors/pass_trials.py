"""Small passes over a full cache, on which `blocked.py` and triton_maxima.py are compared with the
weights in float64.

The pass's own pairs, the first columns (`sinks`) and the columns from `start` to `end` share a
softmax, whose highest weights are compared; the output is compared over all columns. A third of the
queries is random; the others point at one column each, at the edges of tiles and of that softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from restorekv.model.attention import blocked
from restorekv.model.attention.proofs import (
    Component,
    Measurement,
    Target,
    compute_tolerance,
    register_component,
)
from restorekv.model.attention.trials import point_queries_at, require_kernels, require_nothing

Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ScoringPass:
    """Q rows over K cached columns; keys and values lie columns first, as an offloaded layer does,
    if `transposed`.
    """

    name: str
    rows: int
    held: int
    sinks: int
    start: int
    end: int
    transposed: bool = False


PASSES = (
    ScoringPass("a chunk", rows=70, held=150, sinks=4, start=21, end=150),
    ScoringPass("a prefill", rows=33, held=65, sinks=0, start=0, end=65, transposed=True),
    ScoringPass("the first rows", rows=20, held=0, sinks=0, start=0, end=0),
)


@dataclass(frozen=True)
class PassInputs:
    """Query (H, G, Q, D), own pairs (H, Q, D) and cached ones (H, K, D) on the CPU, and the
    definition's results.

    output (Q, H * G, D) and weights (H, G, Q, W + Q) are float64; the latter over the columns of
    the softmax. sizes are the weighted means of absolute values, which errors of the output are
    relative to (proofs.tolerance).
    """

    query: Tensor
    own: Pairs
    cached: Pairs
    scale: float
    output: Tensor
    weights: Tensor
    allowed: float
    sizes: Tensor


def make_inputs(target: Target, each: ScoringPass) -> PassInputs:
    """Draws the inputs of a pass, the same for every device."""
    generator = torch.Generator().manual_seed(PASSES.index(each) if each in PASSES else 99)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    heads = target.heads
    rows = each.rows
    dim = target.dim
    dtype = target.dtype
    own, cached = (
        tuple(draw(heads, count, dim).to(dtype) for _ in range(2)) for count in (rows, each.held)
    )
    keys, values = (torch.cat(both, 1).double() for both in zip(cached, own, strict=True))
    query = draw(heads, target.groups, rows, dim) * 2
    edges = {
        0,
        15,
        16,
        63,
        64,
        each.sinks,
        each.start,
        each.end - 1,
        each.end,
        each.held,
        each.held + 1,
    }
    places = sorted(
        place for place in edges | {each.held + rows - 1} if 0 <= place < each.held + rows
    )
    for head in range(heads):
        point_queries_at(query[head], keys[head, places])
    query = query.to(dtype)
    scale = dim**-0.5
    columns = torch.arange(each.held + rows)
    later = columns[None] > each.held + torch.arange(rows)[:, None]
    logits = (query.double() @ keys[:, None].mT * scale).masked_fill(later, -math.inf)
    output, sizes = (
        (logits.softmax(-1) @ averaged[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
        for averaged in (values, values.abs())
    )
    sizes = sizes + torch.finfo(dtype).tiny * values.shape[1] * float(values.abs().max())
    chosen = [*range(each.sinks), *range(each.start, each.end), *range(each.held, each.held + rows)]
    largest = float(logits.masked_fill(later, 0).abs().max())
    return PassInputs(
        query,
        own,
        cached,
        scale,
        output,
        logits[..., chosen].softmax(-1),
        compute_tolerance(dtype, largest),
        sizes,
    )


def _lay_out(pairs: Pairs, each: ScoringPass, device: torch.device) -> Pairs:
    """Returns keys and values (H, n, D) on a device, in the layout of the pass."""
    if not each.transposed:
        return tuple(x.to(device) for x in pairs)
    return tuple(x.transpose(0, 1).contiguous().to(device).transpose(0, 1) for x in pairs)


def compare_results(
    name: str, inputs: PassInputs, output: Tensor, best: Tensor, wanted: Tensor
) -> Iterator[Measurement]:
    """Compares an output (Q, H * G, D), and highest weights (H, G, n) with those wanted."""
    error = float(((output.cpu().double() - inputs.output).abs() / inputs.sizes).max())
    yield Measurement(f"{name}: output", error, inputs.allowed)
    if wanted.numel():
        # A weight is a power of a float32 logit, whatever the dtype: relative to itself, and to the
        # least that counts.
        error = float(((best.cpu().double() - wanted).abs() / (wanted + 1e-4)).max())
        yield Measurement(
            f"{name}: highest weights", error, max(1e-4, _compute_weight_tolerance(inputs))
        )


def _compute_weight_tolerance(inputs: PassInputs) -> float:
    """Returns the relative error of a weight that rounding explains: logits are float32 in every
    dtype.
    """
    return 4 * compute_tolerance(torch.float32, float(inputs.query.double().norm(dim=-1).max()))


def measure_blocked(target: Target) -> Iterator[Measurement]:
    """Compares `blocked` with the definition: output, and the highest weight that any row gives
    each column.
    """
    for each in PASSES:
        inputs = make_inputs(target, each)
        cached = _lay_out(inputs.cached, each, target.device)
        width = inputs.weights.shape[-1]
        best = torch.zeros(target.heads, target.groups, width, device=target.device)

        def on_weights(
            head: int, low: int, high: int, weights: Tensor, best: Tensor = best
        ) -> None:
            reached = best[head, :, : weights.shape[-1]]
            torch.maximum(reached, weights.amax(1), out=reached)

        output = blocked.attend_pass(
            inputs.query.to(target.device),
            _lay_out(inputs.own, each, target.device),
            lambda head, cached=cached: tuple(x[head] for x in cached),
            inputs.scale,
            [slice(0, each.sinks), slice(each.start, each.end)],
            on_weights,
        )
        yield from compare_results(each.name, inputs, output, best, inputs.weights.amax(2))


def measure_maxima(kernels: ModuleType, target: Target) -> Iterator[Measurement]:
    """Compares both kernels of triton_maxima.py with the definition, also for own pairs and for
    weighted rows.
    """
    for each in PASSES:
        inputs = make_inputs(target, each)
        device = target.device
        query = inputs.query.to(device)
        own = _lay_out(inputs.own, each, device)
        cached = _lay_out(inputs.cached, each, device)
        output, lse = kernels.attend_pass(
            query, own, cached, inputs.scale, each.sinks, each.start, each.end
        )
        width = inputs.weights.shape[-1] - each.rows
        held, mine = inputs.weights.split([width, each.rows], -1)
        best = kernels.find_maxima(query, cached[0][:, each.start : each.end], lse, inputs.scale)
        yield from compare_results(each.name, inputs, output, best, held[..., each.sinks :].amax(2))
        for diagonal in (True, False):
            seen = mine.clone()
            if not diagonal:
                seen.diagonal(dim1=-2, dim2=-1).zero_()
            best = kernels.find_maxima(
                query, own[0], lse, inputs.scale, own=True, diagonal=diagonal
            )
            yield from compare_results(
                f"{each.name}, own pairs", inputs, output, best, seen.amax(2)
            )
        weight = torch.linspace(0.2, 1, each.rows, dtype=torch.float64)
        lighter = lse - weight.float().log2().to(device)  # x - (l - log2 w): a weight times w
        best = kernels.find_maxima(
            query, cached[0][:, each.start : each.end], lighter, inputs.scale
        )
        wanted = (held[..., each.sinks :] * weight[:, None]).amax(2)
        yield from compare_results(f"{each.name}, weighted rows", inputs, output, best, wanted)


def register_proofs(kernels: ModuleType | None) -> None:
    """Makes both components known; `kernels` is triton_maxima.py, if Triton is installed."""
    register_component(
        Component(
            "blocked",
            "Scoring in blocks of rows (blocked)",
            "Slower operations score",
            require_nothing,
            measure_blocked,
        )
    )
    register_component(
        Component(
            "maxima",
            "The Triton kernels of scoring",
            "PyTorch's own operations score, more slowly",
            require_kernels,
            lambda target: measure_maxima(kernels, target),
        )
    )
