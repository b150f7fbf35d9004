"""The self-test of a backend: small ragged inputs on which it is compared with reference.py in
float64.

Heads keep unequal numbers of pairs around the edges of tiles, some none. A third of the queries is
random; the others point at one pair each, the first or last of a head or a tile, of the tail or
just after what the query may see, so that a pair that is missed or seen too early changes a row by
as much as its values are long. What no query may see holds values a hundred times as large. Some
cases have learned sinks about as large as the largest logits, and some, for the backends that take
one, a cap that bends large logits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from restorekv.cache import quantized
from restorekv.cache.quantized import QuantizedRows
from restorekv.cache.ragged import RaggedLayer
from restorekv.model.attention import autograd, cascade, packed, reference
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.attention.self_tests import (
    SINGLE,
    Component,
    Measurement,
    Target,
    compute_tolerance,
    register_component,
)

try:
    from restorekv.model.attention import triton_attend
except ImportError:  # an extra: pip install 'restorekv[triton]'
    triton_attend = None

# Pairs that heads keep: those of a case's heads are consecutive entries, from its `first_length`
# on, and begin again after the last entry.
LENGTHS = (130, 0, 1, 64, 65, 63, 7, 300)
# The logit of a pair that a query points at, about; random logits have a deviation of 2.
_POINTED_LOGIT = 8.0
# How many contexts of CASES are packed and read; the others differ in their questions only.
_PACKED_CASES = 4
# How much longer values are that no query may see.
_HIDDEN_FACTOR = 100.0
Attend = Callable[..., Tensor]  # from query, layer, mask, scale and perhaps sinks and cap


@dataclass(frozen=True)
class AttentionCase:
    """B questions of Q tokens each over a context, with a tail of `tail` columns, which starts a
    buffer.

    With `masked`, questions are padded on the left after the first column. The buffer has `spare`
    more columns, which a `fixed` tail shows and its mask hides, as for steps of fixed work.
    `first_length` is where in LENGTHS the first head starts, or None for empty heads. `sinks` says
    that the model has a logit of each query head in every softmax, `cap` is the cap on its logits.
    """

    name: str
    batch: int
    queries: int
    tail: int
    first_length: int | None
    masked: bool = False
    bias: bool = False
    spare: int = 0
    fixed: bool = False
    sinks: bool = False
    cap: float | None = None


def _iterate_forms() -> Iterator[AttentionCase]:
    """Yield every combination of one or two questions, one or two tokens, tails, mask and bias.

    A tail is the question alone, a whole tile, or neither. The first head is never short: it may be
    the only one. Few rows keep them cheap, and the kernels that they compile are those of decoding.
    """
    forms = product(
        (1, 2),
        (1, 2),
        ("the question alone", "a whole tile", "a few more"),
        (False, True),
        (False, True),
    )
    for number, (batch, queries, end, masked, bias) in enumerate(forms):
        tail = {"the question alone": queries, "a whole tile": 64, "a few more": queries + 5}[end]
        words = [f"{batch} x {queries} tokens", f"tail: {end}"]
        if masked:
            words.append("mask")
        if bias:
            words.append("bias")
        # Long heads take turns, so that every form comes with different ones.
        first_length = (0, 3, 4, 7)[(number + number // 4) % 4]
        yield AttentionCase(", ".join(words), batch, queries, tail, first_length, masked, bias)


CASES = (
    AttentionCase("one token", batch=1, queries=1, tail=5, first_length=0),
    AttentionCase(
        "padded answers with a bias",
        batch=3,
        queries=1,
        tail=70,
        first_length=3,
        masked=True,
        bias=True,
        spare=6,
    ),
    AttentionCase("two questions", batch=2, queries=7, tail=9, first_length=6),
    AttentionCase(
        "long questions, padded", batch=2, queries=33, tail=66, first_length=7, masked=True
    ),
    AttentionCase(
        "a step of fixed work",
        batch=2,
        queries=1,
        tail=20,
        first_length=4,
        masked=True,
        spare=30,
        fixed=True,
    ),
    AttentionCase("empty heads", batch=2, queries=2, tail=6, first_length=None, masked=True),
    AttentionCase(
        "one long question, padded, with a bias",
        batch=1,
        queries=12,
        tail=82,
        first_length=2,
        masked=True,
        bias=True,
    ),
    AttentionCase(
        "several short questions with a bias", batch=4, queries=3, tail=5, first_length=5, bias=True
    ),
    AttentionCase(
        "one token with a bias, after a full tile",
        batch=1,
        queries=1,
        tail=65,
        first_length=1,
        bias=True,
    ),
    AttentionCase(
        "one padded token",
        batch=1,
        queries=1,
        tail=6,
        first_length=5,
        masked=True,
        spare=4,
        fixed=True,
    ),
    AttentionCase("one question of a full tile", batch=1, queries=64, tail=64, first_length=7),
    AttentionCase(
        "a few tokens after a full tile, with a bias",
        batch=1,
        queries=3,
        tail=67,
        first_length=3,
        bias=True,
    ),
    *_iterate_forms(),
    AttentionCase("one token and sinks", batch=1, queries=1, tail=5, first_length=0, sinks=True),
    AttentionCase(
        "padded questions with a bias and sinks",
        batch=3,
        queries=3,
        tail=70,
        first_length=3,
        masked=True,
        bias=True,
        sinks=True,
    ),
    AttentionCase(
        "empty heads and sinks", batch=2, queries=2, tail=6, first_length=None, sinks=True
    ),
)
# Only for the backends that take a cap.
CAPPED_CASES = (
    AttentionCase(
        "padded questions under a cap",
        batch=3,
        queries=3,
        tail=70,
        first_length=3,
        masked=True,
        bias=True,
        cap=6.0,
    ),
    AttentionCase(
        "one token under a cap, with sinks",
        batch=1,
        queries=1,
        tail=5,
        first_length=0,
        sinks=True,
        cap=3.0,
    ),
)


def _find_case(name: str) -> AttentionCase:
    """Return the case of that name."""
    return next(case for case in (*CASES, *CAPPED_CASES) if case.name == name)


# The cases with gradients that are compared.
GRADIENT_CASES = (
    _find_case("padded answers with a bias"),
    _find_case("padded questions with a bias and sinks"),
    _find_case("padded questions under a cap"),
)


@dataclass(frozen=True)
class CaseInputs:
    """A case's inputs on the CPU in the target's dtype.

    `largest` estimates the largest logit: the longest query times the longest key of the tail.
    """

    query: Tensor
    layer: RaggedLayer
    mask: Tensor | None
    scale: float
    largest: float
    sinks: Tensor | None = None
    cap: float | None = None

    def list_softmax_arguments(self, device: torch.device) -> tuple[Any, ...]:
        """Return the last arguments of a backend on a device: sinks (H, G) and cap, or none if the
        case has neither.
        """
        sinks = None if self.sinks is None else self.sinks.to(device)
        return () if sinks is None and self.cap is None else (sinks, self.cap)

    def compute_definition(self) -> Tensor:
        """Return the definition's result in float64."""
        layer = _convert_to_float64(self.layer)
        return reference.attend_ragged(
            self.query.double(), layer, self.mask, self.scale, self.sinks, self.cap
        )

    def compute_sizes(self) -> Tensor:
        """Return, for each number of the result, the weighted mean of the absolute values in it.

        Rounding changes a number in proportion to what is added up, however small the sum is.
        Weights below the least normal number of the dtype keep fewer digits; over many pairs that
        error can add up.
        """
        layer = _convert_to_float64(self.layer)
        context = layer.context_values[:].abs()
        tail = layer.values.abs()
        largest = max((float(x.max()) for x in (context, tail) if x.numel()), default=0.0)
        absolute = make_layer(
            layer.context_keys, context, list(layer.bounds), layer.keys, tail, layer.bias
        )
        means = reference.attend_ragged(
            self.query.double(), absolute, self.mask, self.scale, self.sinks, self.cap
        )
        pairs = layer.columns + max(end - start for start, end in pairwise(layer.bounds))
        return means + torch.finfo(self.query.dtype).tiny * pairs * largest

    def measure_error(self, found: Tensor, wanted: Tensor) -> float:
        """Return the largest error of a number relative to the size of what it averages, or NaN."""
        if found.shape != wanted.shape:
            return math.inf
        return float(((found.detach().cpu().double() - wanted).abs() / self.compute_sizes()).max())


def make_sample(target: Target, case: AttentionCase, seed: int | None = None) -> CaseInputs:
    """Draw a case's inputs, the same for every device.

    The default seed is the case's place in CASES.
    """
    if seed is None:
        known = (*CASES, *CAPPED_CASES)
        seed = known.index(case) if case in known else 99
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    heads = target.heads
    groups = target.groups
    dim = target.dim
    dtype = target.dtype
    batch = case.batch
    queries = case.queries
    tail = case.tail
    edges = [0]
    for head in range(heads):
        length = 0
        if case.first_length is not None:
            length = LENGTHS[(case.first_length + head) % len(LENGTHS)]
        edges.append(edges[-1] + length)
    # Every number is drawn in this order, whatever the case needs of it.
    context_keys, context_values = (draw(edges[-1], dim).to(dtype) for _ in range(2))
    columns = tail + case.spare
    keys, values = (draw(batch, heads, columns, dim).to(dtype) for _ in range(2))
    bias = None
    if case.bias:
        bias = draw(edges[-1]).to(torch.promote_types(dtype, torch.float32))
    visible = _make_visible_columns(case)
    query = draw(batch, heads, groups, queries, dim) * 2
    for head in range(heads):
        context = context_keys[edges[head] : edges[head + 1]].double()
        places = [place for place in (0, 63, 64, len(context) - 1) if 0 <= place < len(context)]
        for row in range(batch):
            own = keys[row, head].double()
            near = own[max(tail - queries - 1, 0) : tail + 1]
            point_queries_at(query[row, head], torch.cat([context[places], own[:1], near]))
    query = query.to(dtype)
    scale = dim**-0.5
    seen = visible.any(2).expand(batch, heads, -1)[..., None]  # (B, H, columns, 1): by any query
    values = torch.where(seen, values, values * _HIDDEN_FACTOR)
    largest = float((query.double().norm(dim=-1).max() * keys.double().norm(dim=-1).max()) * scale)
    if not case.fixed:
        keys = keys[:, :, :tail]
        values = values[:, :, :tail]
    layer = make_layer(context_keys, context_values, edges, keys, values, bias)
    mask = visible[..., : layer.columns] if case.masked else None
    sinks = None
    if case.sinks:
        sinks = (draw(heads, groups) * _POINTED_LOGIT / 2).to(dtype)
        largest = max(largest, float(sinks.abs().max()))
    return CaseInputs(query, layer, mask, scale, largest, sinks, case.cap)


def _make_visible_columns(case: AttentionCase) -> Tensor:
    """Return which columns of the buffer each query sees: (B, 1, Q, tail + spare) bool."""
    causal = make_causal_mask(case.queries, case.tail, torch.device("cpu"))
    visible = causal.expand(case.batch, 1, -1, -1).clone()
    if case.masked:
        for row in range(case.batch):
            visible[row, :, :, 1 : 1 + min(row + 1, case.tail - case.queries)] = False
    return torch.nn.functional.pad(visible, (0, case.spare), value=False)


def point_queries_at(query: Tensor, keys: Tensor) -> None:
    """Turn two thirds of the queries (G, Q, D) towards one of the keys (n, D) each."""
    rows = query.view(-1, query.shape[-1])
    for number in range(len(rows)):
        if number % 3:
            key = keys[(number - number // 3 - 1) % len(keys)]
            length = _POINTED_LOGIT * len(key) ** 0.5 / key.square().sum().clamp_min(1e-6)
            rows[number] = rows[number] / 8 + key * length


def make_layer(
    context_keys: Tensor | QuantizedRows,
    context_values: Tensor | QuantizedRows,
    edges: list[int],
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
) -> RaggedLayer:
    """Return a layer with a context; its head h has the rows edges[h]:edges[h + 1]."""
    offsets = torch.tensor(edges, dtype=torch.int32, device=keys.device)
    positions = torch.zeros(edges[-1], dtype=torch.int32, device=keys.device)
    nothing = keys[:1, :, :0]
    layer = RaggedLayer(
        context_keys, context_values, offsets, positions, edges[-1], nothing, nothing, bias
    )
    layer.keys = keys
    layer.values = values
    return layer


def _convert_to_float64(layer: RaggedLayer) -> RaggedLayer:
    """Return a layer with the same numbers in float64."""
    bias = None if layer.bias is None else layer.bias.double()
    return make_layer(
        _unpack_to_float64(layer.context_keys),
        _unpack_to_float64(layer.context_values),
        list(layer.bounds),
        layer.keys.double(),
        layer.values.double(),
        bias,
    )


def _unpack_to_float64(rows: Tensor | QuantizedRows) -> Tensor:
    """Return rows (N, D) in float64, where 8-bit codes times scales are exact."""
    if isinstance(rows, QuantizedRows):
        return rows.dequantize(slice(None), torch.float64)
    return rows.double()


def _copy_to_device(layer: RaggedLayer, device: torch.device) -> RaggedLayer:
    """Return a copy of a layer on a device.

    Its tail is the beginning of a longer buffer of NaN, as the tails of views are.
    """
    tail = []
    for states in layer.keys_and_values:
        batch, heads, columns, dim = states.shape
        room = states.new_full((batch, heads, columns + 3, dim), math.nan)
        room[:, :, :columns] = states
        tail.append(room.to(device)[:, :, :columns])
    keys, values = tail
    return make_layer(
        layer.context_keys.to(device),
        layer.context_values.to(device),
        list(layer.bounds),
        keys,
        values,
        None if layer.bias is None else layer.bias.to(device),
    )


def _measure_backend(
    attend: Callable[[], Attend], target: Target, products: bool = True, takes_cap: bool = False
) -> Iterator[Measurement]:
    """Compare a backend with the definition in every case.

    `attend` returns the backend when a case needs it, because tests replace it.
    """
    for case in (*CASES, *CAPPED_CASES) if takes_cap else CASES:
        sample = make_sample(target, case)
        device = target.device
        mask = None if sample.mask is None else sample.mask.to(device)
        layer = _copy_to_device(sample.layer, device)
        more = sample.list_softmax_arguments(device)
        found = attend()(sample.query.to(device), layer, mask, sample.scale, *more)
        allowed = compute_tolerance(target.dtype, sample.largest, products)
        yield Measurement(
            case.name, sample.measure_error(found, sample.compute_definition()), allowed
        )


def _measure_autograd(target: Target) -> Iterator[Measurement]:
    """Compare `autograd` with the definition, and its gradients with those of the definition."""
    yield from _measure_backend(lambda: autograd.attend_ragged, target, takes_cap=True)
    for case in GRADIENT_CASES:
        ending = " with sinks" if case.sinks else " under a cap" if case.cap else ""
        sample = make_sample(target, case)
        wanted_gradients = _compute_gradients(
            reference.attend_ragged,
            sample.query.double(),
            _convert_to_float64(sample.layer),
            sample.mask,
            sample.scale,
            *sample.list_softmax_arguments(torch.device("cpu")),
        )
        layer = _copy_to_device(sample.layer, target.device)
        query = sample.query.to(target.device)
        mask = None if sample.mask is None else sample.mask.to(target.device)
        found_gradients = _compute_gradients(
            autograd.attend_ragged,
            query,
            layer,
            mask,
            sample.scale,
            *sample.list_softmax_arguments(target.device),
        )
        names = ("queries", "keys", "values")
        for name, found, wanted in zip(names, found_gradients, wanted_gradients, strict=True):
            longest = float(wanted.norm(dim=-1).max())
            error = float((found.cpu().double() - wanted).norm(dim=-1).max()) / longest
            allowed = 4 * compute_tolerance(target.dtype, sample.largest)
            yield Measurement(f"gradients of {name}{ending}", error, allowed)


def _compute_gradients(
    attend: Attend,
    query: Tensor,
    layer: RaggedLayer,
    mask: Tensor | None,
    scale: float,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients that reach the query and the tail's keys and values."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, *layer.keys_and_values)]
    layer = copy.copy(layer)
    layer.keys, layer.values = leaves[1:]
    with torch.enable_grad():
        result = attend(leaves[0], layer, mask, scale, *more)
        pattern = torch.linspace(-1, 1, result.shape[-1], dtype=result.dtype, device=result.device)
        return torch.autograd.grad((result * pattern).sum(), leaves)


def _measure_quantization(kv_dtype: str, target: Target) -> Iterator[Measurement]:
    """Check what packing, unpacking and attention over a packed context compute on the device."""
    allowed = compute_tolerance(target.dtype, 0.0)
    for number, case in enumerate((*CASES, *CAPPED_CASES)):
        sample = make_sample(target, case)
        plain = sample.layer
        bounds = sample.layer.bounds
        plain_keys = plain.context_keys[:]
        plain_values = plain.context_values[:]
        packed_keys, packed_values = quantized.quantize(plain_keys, plain_values, bounds, kv_dtype)
        if number < _PACKED_CASES:
            keys_on_device, values_on_device = quantized.quantize(
                plain_keys.to(target.device), plain_values.to(target.device), bounds, kv_dtype
            )
            for name, plain_rows, on_device, on_cpu in (
                ("keys", plain_keys, keys_on_device, packed_keys),
                ("values", plain_values, values_on_device, packed_values),
            ):
                error = _measure_packing_error(
                    plain_rows, on_device.to(torch.device("cpu")), kv_dtype
                )
                yield Measurement(f"packing {name}, {case.name}", error, 1.0)
                error = _measure_unpacking_error(on_cpu, target.device)
                yield Measurement(f"reading {name}, {case.name}", error, allowed)
        layer = make_layer(
            packed_keys, packed_values, list(bounds), plain.keys, plain.values, plain.bias
        )
        exact = _convert_to_float64(layer)
        wanted = reference.attend_ragged(
            sample.query.double(), exact, sample.mask, sample.scale, sample.sinks, sample.cap
        )
        mask = None if sample.mask is None else sample.mask.to(target.device)
        found = packed.attend_ragged(
            sample.query.to(target.device),
            _copy_to_device(layer, target.device),
            mask,
            sample.scale,
            *sample.list_softmax_arguments(target.device),
        )
        yield Measurement(
            case.name,
            sample.measure_error(found, wanted),
            compute_tolerance(target.dtype, sample.largest),
        )


def _measure_unpacking_error(rows: QuantizedRows, device: torch.device) -> float:
    """Return how far rows that a device unpacks are from those of the CPU, relative to the largest
    number.
    """
    if not len(rows):
        return 0.0
    found = rows.to(device)[:].cpu()
    error = (found.double() - rows.dequantize(slice(None), torch.float64)).abs().max()
    return float(error) / float(rows[:].double().abs().max())


def _measure_packing_error(exact: Tensor, rows: QuantizedRows, kv_dtype: str) -> float:
    """Return how far packed numbers (on the CPU) are from the exact ones.

    The unit is what 8 bits allow: half a step of int8; for fp8 a sixteenth of the number, or a
    thousandth of the scale.
    """
    if not len(exact):
        return 0.0
    read = rows.dequantize(slice(None), torch.float64)
    ones = QuantizedRows(torch.ones_like(rows.codes), rows.scales, rows.starts, rows.dtype)
    scales = ones.dequantize(slice(None), torch.float64)
    if kv_dtype == "int8":
        allowed = scales / 2
    else:
        allowed = torch.maximum(exact.double().abs() / 16, scales / 1024)
    largest = float(exact.double().abs().max())
    return float(((read - exact.double()).abs() / (allowed + 4 * SINGLE * largest)).max())


def _explain_cpu_only(device: torch.device, dtype: torch.dtype) -> str:
    """Return why a component for CPUs cannot be used on a device, or "" if it can."""
    return "" if device.type == "cpu" else "it is for CPUs"


def explain_no_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Return "": the component runs on every device."""
    return ""


def explain_missing_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the Triton kernels cannot be used on a device, or "" if they can."""
    if triton_attend is None:
        return "Triton is not installed: pip install 'restorekv[triton]'"
    if dtype not in triton_attend.DTYPES:
        return f"the kernels have no {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" or (triton_attend.INTERPRETED and device.type == "cpu"):
        return ""
    return "it is for CUDA devices"


def _get_kernels() -> Attend:
    """Return the Triton backend; `explain_missing_kernels` must have found it."""
    assert triton_attend is not None
    return triton_attend.attend_ragged


register_component(
    Component(
        "reference",
        "PyTorch's own operations",
        "Nothing else is there to answer",
        explain_no_obstacle,
        lambda target: _measure_backend(lambda: reference.attend_ragged, target, takes_cap=True),
    )
)
register_component(
    Component(
        "triton",
        "The Triton kernels of attention",
        "PyTorch's own operations answer, more slowly",
        explain_missing_kernels,
        lambda target: _measure_backend(_get_kernels, target, products=False),
    )
)
register_component(
    Component(
        "cascade",
        "The CPU's fused attention (cascade)",
        "Slower operations answer",
        _explain_cpu_only,
        lambda target: _measure_backend(lambda: cascade.attend_ragged, target),
    )
)
register_component(
    Component(
        "autograd",
        "Attention in blocks of rows (autograd)",
        "Slower operations answer",
        explain_no_obstacle,
        _measure_autograd,
    )
)
for kv_dtype in quantized.QUANTIZED_DTYPES:
    register_component(
        Component(
            kv_dtype,
            f"8-bit numbers as {kv_dtype}",
            "Numbers are packed and unpacked on the CPU, which takes longer",
            explain_no_obstacle,
            lambda target, kv_dtype=kv_dtype: _measure_quantization(kv_dtype, target),
        )
    )
