"""The two kernels against the attention matrix in float64; in Triton's interpreter on a machine
without a GPU.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from restorekv.compression.eviction import Eviction
from restorekv.model.prompt import Context
from tests.helpers.blocked import TOLERANCE, make, written_out
from tests.helpers.kernels import compiled, without_triton
from tests.helpers.models import build_model

triton_maxima = pytest.importorskip("restorekv.evictors.triton_maxima")
from restorekv.model.attention.triton_attend import INTERPRETED  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of own keys, own values, held keys and held values.
LAYOUTS = st.lists(st.sampled_from(["plain", "columns first", "apart"]), min_size=4, max_size=4)


def moved(case):
    query, own, held = case
    return query.to(DEVICE), *(tuple(x.to(DEVICE) for x in pair) for pair in (own, held))


def laid(x, layout):
    """The same numbers (H, n, D), columns before heads, or with something else between the rows."""
    if layout == "columns first":  # as an offloaded layer lies
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return (
        torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]]
        if layout == "apart"
        else x
    )


def check(heads, groups, rows, held, dim, dtype, edges, seed, layouts=["plain"] * 4):
    """Output, maxima of held columns, and of own columns with and without the diagonal."""
    sinks, start, end = sorted(min(edge, held) for edge in edges)
    columns = [*range(sinks), *range(start, end)]
    case = make(heads, groups, rows, held, dim, dtype, seed)
    output, weights = written_out(*case, dim**-0.5, columns)
    query, own, context = moved(case)
    own = tuple(map(laid, own, layouts[:2]))
    context = tuple(map(laid, context, layouts[2:]))
    found, lse = triton_maxima.attend_pass(query, own, context, dim**-0.5, sinks, start, end)
    assert (
        found.dtype == dtype and (found.cpu().double() - output).abs().max() <= TOLERANCE[dtype] * 4
    )
    best = triton_maxima.find_maxima(query, context[0][:, start:end], lse, dim**-0.5)
    exact = weights[..., sinks : len(columns)].amax(2)
    torch.testing.assert_close(best.cpu().double(), exact, rtol=1e-4, atol=1e-7)
    for diagonal in (True, False):
        exact = weights[..., len(columns) :].clone()
        if not diagonal:
            exact.diagonal(dim1=-2, dim2=-1).zero_()
        best = triton_maxima.find_maxima(query, own[0], lse, dim**-0.5, own=True, diagonal=diagonal)
        torch.testing.assert_close(best.cpu().double(), exact.amax(2), rtol=1e-4, atol=1e-7)


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(
    heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    rows=st.integers(1, 40),
    held=st.integers(0, 50),
    dim=st.sampled_from([32, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    edges=st.lists(st.integers(0, 50), min_size=3, max_size=3),
    seed=st.integers(0, 99),
    layouts=LAYOUTS,
)
def test_both_kernels(heads, groups, rows, held, dim, dtype, edges, seed, layouts):
    check(heads, groups, rows, held, dim, dtype, edges, seed, layouts)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(
    heads=st.integers(1, 2),
    groups=st.integers(1, 8),
    rows=st.integers(1, 200),
    held=st.integers(0, 300),
    dim=st.sampled_from([32, 64, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    edges=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    seed=st.integers(0, 99),
    layouts=LAYOUTS,
)
def test_larger_ones(heads, groups, rows, held, dim, dtype, edges, seed, layouts):
    check(heads, groups, rows, held, dim, dtype, edges, seed, layouts)


@pytest.mark.parametrize("layout", ["columns first", "apart"])
def test_pairs_are_read_where_they_lie(layout, monkeypatch):
    check(2, 2, 20, 30, 32, torch.float32, [3, 9, 25], 0, [layout] * 4)
    query, own, held = moved(make(3, 2, 5, 60, 16, torch.float32, 0))
    own, held = (tuple(laid(x, layout) for x in pair) for pair in (own, held))
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(
                [x.data_ptr() for x in args if torch.is_tensor(x)]
            )

    monkeypatch.setattr(triton_maxima, "attend_kernel", Kernel())
    monkeypatch.setattr(triton_maxima, "highest_kernel", Kernel())
    _, lse = triton_maxima.attend_pass(query, own, held, 0.3, 0, 0, 60)
    triton_maxima.find_maxima(query, held[0][:, 7:], lse, 0.3)
    assert launched[0][:5] == [x.data_ptr() for x in (query, *own, *held)]
    assert launched[1][1] == held[0][:, 7:].data_ptr()


@pytest.mark.parametrize("spec", ["kvzip+:chunk=15", "h2o:diagonal=false"])
def test_evictors_use_them(tiny_tokenizer, monkeypatch, spec):
    model = build_model("qwen3", num_hidden_layers=1).to(DEVICE)
    ids = torch.randint(3, 300, (1, 30), generator=torch.Generator().manual_seed(0))
    context = Context(ids, 5, torch.zeros(1, 0, dtype=torch.long))
    called, attend = [], triton_maxima.attend_pass
    monkeypatch.setattr(triton_maxima, "supports_query", lambda query: False)
    expected = Eviction.make(spec).prepare(model, tiny_tokenizer, context).scores
    monkeypatch.setattr(triton_maxima, "supports_query", lambda query: True)
    monkeypatch.setattr(
        triton_maxima,
        "attend_pass",
        lambda *args, **more: called.append(0) or attend(*args, **more),
    )
    scores = Eviction.make(spec).prepare(model, tiny_tokenizer, context).scores
    assert called
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_without_triton_everything_else_works():
    code = (
        "import torch; from restorekv.evictors import attend\n"
        "assert attend.triton_maxima is None and not attend.can_use_kernels(torch.zeros(1))"
    )
    without_triton(code)


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_spilling():
    """By Triton's compiler and NVIDIA's assembler, which need no GPU; running them does."""
    for made in compiled("compile_maxima.py"):
        assert made["stack"] <= 64 and (made["matrix"] or made["dtype"] == "fp32"), made
        assert made["shared"] <= (99 << 10 if made["arch"] == 80 else 227 << 10), made
