"""Small passes over a full cache, on which `blocked.py` and triton_maxima.py are compared with the
weights in float64.

The pass's own pairs, the first columns (`sinks`) and the columns from `start` to `end` share a
softmax, whose highest weights are compared; the output is compared over all columns. A third of the
queries is random; the others point at one column each, at the edges of tiles and of that softmax.
In one pass the model adds learned sinks to both, in another it caps the logits; the kernels of
triton_maxima.py do neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from restorekv.cache.tail import KeysValues
from restorekv.model.attention import blocked
from restorekv.model.attention.backend_self_test import (
    explain_missing_kernels,
    explain_no_obstacle,
    point_queries_at,
)
from restorekv.model.attention.self_tests import (
    Component,
    Measurement,
    Target,
    compute_tolerance,
    register_component,
)


@dataclass(frozen=True)
class ScoringPass:
    """Q rows over K cached columns; keys and values lie columns first, as an offloaded layer does,
    if `transposed`. `learned` says that the model has a logit of each query head in every softmax;
    `cap` is the cap on its logits.
    """

    name: str
    rows: int
    held: int
    sinks: int
    start: int
    end: int
    transposed: bool = False
    learned: bool = False
    cap: float | None = None


PASSES = (
    ScoringPass("a chunk", rows=70, held=150, sinks=4, start=21, end=150),
    ScoringPass("a prefill", rows=33, held=65, sinks=0, start=0, end=65, transposed=True),
    ScoringPass("the first rows", rows=20, held=0, sinks=0, start=0, end=0),
    ScoringPass("a model with sinks", rows=40, held=90, sinks=4, start=21, end=60, learned=True),
    ScoringPass("a model with a cap", rows=40, held=90, sinks=4, start=21, end=60, cap=5.0),
)


@dataclass(frozen=True)
class PassInputs:
    """Query (H, G, Q, D), own pairs (H, Q, D) and cached ones (H, K, D) on the CPU, and the
    definition's results.

    output (Q, H * G, D) and weights (H, G, Q, W + Q) are float64; the latter over the columns of
    the softmax. sizes are the weighted means of absolute values, which errors of the output are
    relative to (self_tests.py, `compute_tolerance`).
    """

    query: Tensor
    own: KeysValues
    cached: KeysValues
    scale: float
    output: Tensor
    weights: Tensor
    allowed: float
    sizes: Tensor
    learned: Tensor | None = None


def make_inputs(target: Target, each: ScoringPass) -> PassInputs:
    """Draw the inputs of a pass, the same for every device, and compute what is right."""
    # A pass that is not in the list, as a test makes one, gets its own seed.
    generator = torch.Generator().manual_seed(PASSES.index(each) if each in PASSES else 99)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    # Random inputs alone would hide an off-by-one: a third of the queries point at the columns
    # around tile borders and the softmax's ends.
    heads = target.heads
    rows = each.rows
    columns = each.held + rows
    dtype = target.dtype
    own = draw(heads, rows, target.dim).to(dtype), draw(heads, rows, target.dim).to(dtype)
    cached = (
        draw(heads, each.held, target.dim).to(dtype),
        draw(heads, each.held, target.dim).to(dtype),
    )
    keys = torch.cat([cached[0], own[0]], 1).double()
    values = torch.cat([cached[1], own[1]], 1).double()

    # Two thirds of the queries point at the edges of tiles and of the softmax.
    query = draw(heads, target.groups, rows, target.dim) * 2
    edges = {0, 15, 16, 63, 64, columns - 1}
    edges |= {each.sinks, each.start, each.end - 1, each.end, each.held, each.held + 1}
    places = sorted(place for place in edges if 0 <= place < columns)
    for head in range(heads):
        point_queries_at(query[head], keys[head, places])
    query = query.to(dtype)

    # The definition in float64: the output over all columns.
    scale = target.dim**-0.5
    later = torch.arange(columns)[None] > each.held + torch.arange(rows)[:, None]
    logits = query.double() @ keys[:, None].mT * scale
    if each.cap is not None:
        logits = each.cap * (logits / each.cap).tanh()
    logits = logits.masked_fill(later, -math.inf)
    learned = None
    if each.learned:
        learned = (draw(heads, target.groups) * 4).to(dtype)
    shares = _compute_shares(logits, learned)
    output = (shares @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    sizes = (shares @ values.abs()[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    sizes = sizes + torch.finfo(dtype).tiny * values.shape[1] * float(values.abs().max())

    # The weights over the columns that share a softmax.
    inside = [*range(each.sinks), *range(each.start, each.end), *range(each.held, columns)]
    largest = float(logits.masked_fill(later, 0).abs().max())
    return PassInputs(
        query=query,
        own=own,
        cached=cached,
        scale=scale,
        output=output,
        weights=_compute_shares(logits[..., inside], learned),
        allowed=compute_tolerance(dtype, largest),
        sizes=sizes,
        learned=learned,
    )


def _compute_shares(logits: Tensor, learned: Tensor | None) -> Tensor:
    """Return the softmax of float64 logits (H, G, Q, K), which learned sinks (H, G) have a share of
    too.
    """
    if learned is None:
        return logits.softmax(-1)
    total = torch.logaddexp(logits.logsumexp(-1), learned.double()[..., None])
    return (logits - total[..., None]).exp()


def _lay_out(pairs: KeysValues, each: ScoringPass, device: torch.device) -> KeysValues:
    """Return keys and values (H, n, D) on a device, in the layout of the pass."""

    def lay_out(rows: Tensor) -> Tensor:
        if each.transposed:
            return rows.transpose(0, 1).contiguous().to(device).transpose(0, 1)
        return rows.to(device)

    keys, values = pairs
    return lay_out(keys), lay_out(values)


def compare_results(
    name: str, inputs: PassInputs, output: Tensor, best: Tensor, wanted: Tensor
) -> Iterator[Measurement]:
    """Compare an output (Q, H * G, D), and highest weights (H, G, n) with those wanted."""
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
    """Return the relative error of a weight that rounding explains: logits are float32 in every
    dtype.
    """
    return 4 * compute_tolerance(torch.float32, float(inputs.query.double().norm(dim=-1).max()))


def measure_blocked(target: Target) -> Iterator[Measurement]:
    """Compare `blocked` with the definition: output, and the highest weight that any row gives
    each column.
    """
    for each in PASSES:
        inputs = make_inputs(target, each)
        cached = _lay_out(inputs.cached, each, target.device)
        width = inputs.weights.shape[-1]
        best = torch.zeros(
            target.heads, target.groups, width, dtype=torch.float32, device=target.device
        )

        def get_pairs(head: int, cached: KeysValues = cached) -> KeysValues:
            return cached[0][head], cached[1][head]

        def on_weights(
            head: int, low: int, high: int, weights: Tensor, best: Tensor = best
        ) -> None:
            reached = best[head, :, : weights.shape[-1]]
            torch.maximum(reached, weights.amax(1), out=reached)

        output = blocked.attend_pass(
            inputs.query.to(target.device),
            _lay_out(inputs.own, each, target.device),
            get_pairs,
            inputs.scale,
            [slice(0, each.sinks), slice(each.start, each.end)],
            on_weights,
            None if inputs.learned is None else inputs.learned.to(target.device),
            each.cap,
        )
        yield from compare_results(each.name, inputs, output, best, inputs.weights.amax(2))


def measure_maxima(kernels: Any, target: Target) -> Iterator[Measurement]:
    """Compare both kernels of triton_maxima.py with the definition, also for own pairs and for
    weighted rows.
    """
    for each in PASSES:
        if each.learned or each.cap is not None:
            continue  # such models are not scored by the kernels (attend.py)
        inputs = make_inputs(target, each)
        device = target.device
        query = inputs.query.to(device)
        own = _lay_out(inputs.own, each, device)
        cached = _lay_out(inputs.cached, each, device)
        output, lse = kernels.attend_pass(
            query, own, cached, inputs.scale, each.sinks, each.start, each.end
        )
        width = inputs.weights.shape[-1] - each.rows
        weights_cached, weights_own = inputs.weights.split([width, each.rows], -1)
        weights_cached = weights_cached[..., each.sinks :]
        chunk = cached[0][:, each.start : each.end]

        best = kernels.find_maxima(query, chunk, lse, inputs.scale)
        yield from compare_results(each.name, inputs, output, best, weights_cached.amax(2))

        name = f"{each.name}, own pairs"
        for diagonal in (True, False):
            seen = weights_own.clone()
            if not diagonal:
                seen.diagonal(dim1=-2, dim2=-1).zero_()
            best = kernels.find_maxima(
                query, own[0], lse, inputs.scale, own=True, diagonal=diagonal
            )
            yield from compare_results(name, inputs, output, best, seen.amax(2))

        # With x - (l - log2 w) as the logarithm, a weight becomes w times as large.
        name = f"{each.name}, weighted rows"
        row_weight = torch.linspace(0.2, 1, each.rows, dtype=torch.float64)
        lighter = lse - row_weight.float().log2().to(device)
        best = kernels.find_maxima(query, chunk, lighter, inputs.scale)
        wanted = (weights_cached * row_weight[:, None]).amax(2)
        yield from compare_results(name, inputs, output, best, wanted)


def register_scoring(kernels: ModuleType | None) -> None:
    """Make both components known; `kernels` is triton_maxima.py, if Triton is installed."""
    register_component(
        Component(
            "blocked",
            "Scoring in blocks of rows (blocked)",
            "Slower operations score",
            explain_no_obstacle,
            measure_blocked,
        )
    )
    register_component(
        Component(
            "maxima",
            "The Triton kernels of scoring",
            "PyTorch's own operations score, more slowly",
            explain_missing_kernels,
            partial(measure_maxima, kernels),
        )
    )
