"""The GPU backend in Triton's interpreter: its work lists, and its kernels against the definition
in float64.

With TRITON_INTERPRET=0 on a machine with a GPU the same tests run the compiled kernels.
"""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.errors import RestoreKVError
from restorekv.model import attention
from restorekv.model.attention import cascade, dispatch, reference, tiles
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from restorekv.storage import cache_file
from tests.helpers.kernels import compiled, without_triton
from tests.helpers.models import build_model

if dispatch.triton_attend is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
from restorekv.model.attention import triton_attend

DEVICE = "cpu" if triton_attend.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ALL_DIMS = [8, 32, 64, 80, 96, 112, 128, 160, 192, 256]


def make_layer(lengths, batch, tail, width, dtype, bias, seed=0):
    """A random layer whose heads keep `lengths` pairs, with a tail for `batch` questions."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    offsets, heads = torch.tensor([0, *lengths]).cumsum(0).int(), len(lengths)
    count, empty = int(offsets[-1]), draw(1, heads, 0, width)
    layer = RaggedLayer(
        draw(count, width),
        draw(count, width),
        offsets.to(DEVICE),
        torch.zeros(count).int(),
        max(lengths),
        empty,
        empty,
        draw(count) if bias else None,
    )
    layer.keys, layer.values = draw(batch, heads, tail, width), draw(batch, heads, tail, width)
    return layer, draw


def make_query(draw, batch, heads, groups, queries, width):
    """As a projection leaves it: (B, Q, H*G, D) in memory."""
    return (draw(batch, queries, heads, groups, width) * 2).permute(0, 2, 3, 1, 4)


def padded_mask(batch, queries, tail):
    """Causal; question 0 has a column of padding on the left, where every query still sees
    another.
    """
    mask = (
        torch.ones(queries, tail, dtype=torch.bool, device=DEVICE)
        .tril(tail - queries)
        .expand(batch, 1, -1, -1)
    )
    mask = mask.clone()
    mask[0, :, :, 0] = tail == queries
    return mask


def exactly(layer):
    """The same layer in float64."""
    exact = [x.double() for x in (layer.context_keys, layer.context_values)]
    bias = None if layer.bias is None else layer.bias.double()
    made = RaggedLayer(
        *exact, layer.offsets, layer.positions, layer.seen, layer.keys, layer.values, bias
    )
    made.keys, made.values = layer.keys.double(), layer.values.double()
    return made


@st.composite
def cases(draw, dims, longest):
    queries = draw(st.sampled_from([1, 1, 3]))
    return {
        "lengths": draw(
            st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, longest]), min_size=1, max_size=3)
        ),
        "batch": draw(st.integers(1, 3)),
        "groups": draw(st.integers(1, 8)),
        "queries": queries,
        "tail": queries + draw(st.sampled_from([0, 4, 70])),
        "width": draw(st.sampled_from(dims)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "bias": draw(st.booleans()),
        "masked": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "wanted": draw(st.sampled_from([1, 4, 16])),
        "seed": draw(st.integers(0, 99)),
    }


def check(case):
    """The kernels against the definition; memory that no kernel writes is NaN."""
    case = dict(case)
    groups, queries, masked, wanted, has_sinks = (
        case.pop(name) for name in ("groups", "queries", "masked", "wanted", "sinks")
    )
    layer, draw = make_layer(**case)
    heads = len(case["lengths"])
    query = make_query(draw, case["batch"], heads, groups, queries, case["width"])
    mask = padded_mask(case["batch"], queries, case["tail"]) if masked else None
    sinks = draw(heads, groups) * 4 if has_sinks else None
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN then
    try:
        with patch.object(triton_attend, "WANTED_ELSEWHERE", wanted):
            found = triton_attend.attend_ragged(query, layer, mask, 0.2, sinks)
    finally:
        torch.use_deterministic_algorithms(False)
    wished = reference.attend_ragged(query.double(), exactly(layer), mask, 0.2, sinks)
    assert found.dtype == query.dtype and found.shape == query.shape and found.isfinite().all()
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(found.double(), wished, rtol=tolerance, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(cases([8, 32, 48], 130))
def test_equals_the_definition(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(ALL_DIMS, 300))
def test_equals_the_definition_in_every_shape(case):
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 80, 256])
def test_every_dtype_and_width(width, dtype):
    check(
        {
            "lengths": [70, 0, 1],
            "batch": 2,
            "groups": 8,
            "queries": 2,
            "tail": 5,
            "width": width,
            "dtype": dtype,
            "bias": True,
            "masked": True,
            "sinks": True,
            "wanted": 4,
            "seed": 1,
        }
    )


def test_many_rows_take_blocks_of_their_own():
    """Blocks of 64 rows, whose last is not full, of all questions for the context and of each for
    its tail's pieces.
    """
    check(
        {
            "lengths": [130, 3],
            "batch": 2,
            "groups": 2,
            "queries": 35,
            "tail": 150,
            "width": 32,
            "dtype": torch.float16,
            "bias": False,
            "masked": True,
            "sinks": False,
            "wanted": 32,
            "seed": 2,
        }
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 500, 1000]), min_size=1, max_size=9))
def test_every_list_covers_every_row_once(lengths):
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    made = tiles.cut_tiles(bounds)
    assert made.entries.dtype == made.first.dtype == torch.int32
    spans = [tiles.TILE_ROWS << level for level in range(len(made.counts))]
    assert spans[-1] >= max(lengths) and all(span < max(lengths) for span in spans[:-1])
    for span, first, entries in zip(
        spans, made.first.tolist(), made.entries.split(made.counts), strict=True
    ):
        covered = torch.zeros(bounds[-1], dtype=torch.int)
        for number, (head, start, end, _) in enumerate(entries.tolist()):
            assert bounds[head] <= start < end <= bounds[head + 1] and end - start <= span
            assert first[head] <= number < first[head + 1]
            covered[start:end] += 1
        assert (covered == 1).all() and first[-1] == len(entries)
        assert [high - low for low, high in pairwise(first)] == [
            -(-length // span) for length in lengths
        ]


def test_many_queries_take_longer_tiles():
    made = tiles.cut_tiles((0, 1000, 1000, 1064))
    assert made.counts == (17, 9, 5, 3, 2)
    assert [tiles.choose_list(made.counts, blocks, 17) for blocks in (1, 2, 3, 4, 8, 100)] == [
        0,
        2,
        2,
        3,
        4,
        4,
    ]


def test_forks_share_the_list_and_files_never_hold_it(tiny_model):
    full = prefill(tiny_model, torch.arange(30)[None])
    keep = torch.rand(len(full.layers), 2, 30, generator=torch.Generator().manual_seed(0)) < 0.5
    cache = RaggedCache.from_kept_pairs(full, keep)
    context = Context(torch.arange(30)[None], 0, torch.arange(3))
    before = {name: x.shape for name, x in cache_file.pack_cache(cache, context).items()}
    fork, bare = cache.fork(2), cache.nbytes
    tiles.plan_tiles(fork.layers)
    assert {name: x.shape for name, x in cache_file.pack_cache(cache, context).items()} == before
    lists = [
        x
        for layer in cache.layers
        for x in (tiles.get_tiles(layer).entries, tiles.get_tiles(layer).first)
    ]
    assert cache.nbytes == bare + sum(x.nbytes for x in lists)
    held = [tiles.get_tiles(layer) for layer in cache.layers]
    with patch.object(tiles, "cut_tiles", side_effect=AssertionError("made twice")):
        assert all(
            tiles.get_tiles(layer) is plan
            for layer, plan in zip(cache.fork().layers, held, strict=True)
        )
        assert all(
            tiles.get_tiles(layer) is plan
            for layer, plan in zip(fork.fork(3).layers, held, strict=True)
        )
    assert all(tuple(plan.first[-1].diff().tolist()) == (1, 1) for plan in held)


def test_lists_are_small():
    """A thousandth of the keys and values of a long context."""
    made = tiles.cut_tiles(tuple(range(0, 8 * 4096 + 1, 4096)))
    assert made.nbytes <= 0.0012 * 8 * 4096 * 2 * 128 * 2


def example(dtype=torch.float32, batch=2, queries=2, masked=True):
    layer, draw = make_layer([70, 0, 1], batch, 6, 16, dtype, True)
    query = make_query(draw, batch, 3, 2, queries, 16)
    return query, layer, padded_mask(batch, queries, 6) if masked else None


def test_a_query_that_sees_nothing_gets_zero():
    query, layer, mask = example()
    mask[0, :, 0] = False
    found = triton_attend.attend_ragged(query, layer, mask, 0.3)
    assert found.isfinite().all() and not found[0, 1, :, 0].any() and found[0, 0, :, 0].all()


def test_the_same_bits_twice():
    query, layer, mask = example()
    one, two = (triton_attend.attend_ragged(query, layer, mask, 0.3) for _ in range(2))
    assert torch.equal(one, two)


def test_questions_do_not_see_each_other():
    """A batch answers as each question alone, to the last few bits."""
    query, layer, mask = example(batch=3)
    together = triton_attend.attend_ragged(query, layer, mask, 0.3)
    for row in range(3):
        alone = layer.fork()
        alone.keys, alone.values = layer.keys[row : row + 1], layer.values[row : row + 1]
        found = triton_attend.attend_ragged(query[row : row + 1], alone, mask[row : row + 1], 0.3)
        torch.testing.assert_close(found, together[row : row + 1], rtol=1e-5, atol=1e-6)


def test_one_mask_may_serve_all_questions_and_a_tail_may_be_a_view():
    """As of a buffer of fixed size, whose unused rows the mask hides."""
    query, layer, _ = example(masked=False)
    wished = triton_attend.attend_ragged(query, layer, None, 0.3)
    keys, values = (torch.full((2, 3, 9, 16), 1e4, device=DEVICE) for _ in range(2))
    keys[:, :, :6], values[:, :, :6] = layer.keys, layer.values
    mask = torch.zeros(1, 1, 2, 9, dtype=torch.bool, device=DEVICE)
    mask[..., :6] = torch.ones(2, 6, device=DEVICE).tril(4).bool()
    layer.keys, layer.values = keys, values
    torch.testing.assert_close(
        triton_attend.attend_ragged(query, layer, mask, 0.3), wished, rtol=1e-5, atol=1e-6
    )
    layer.keys, layer.values = keys[:, :, :6], values[:, :, :6]
    assert torch.equal(triton_attend.attend_ragged(query, layer, None, 0.3), wished)


@pytest.mark.parametrize("width", [7, 16, 32])
def test_a_context_may_be_a_view(width):
    """Rows that lie apart, of keys and values each in their own way, and every other number as
    bias.
    """
    layer, draw = make_layer([13, 0, 4], 2, 6, width, torch.float32, True)
    query = make_query(draw, 2, 3, 2, 1, width)
    layer.context_keys = draw(17, 2 * width)[:, :width]
    layer.context_values, layer.bias = draw(width, 17).T, draw(34)[::2]
    found = triton_attend.attend_ragged(query, layer, None, 0.3)
    wished = reference.attend_ragged(query.double(), exactly(layer), None, 0.3)
    torch.testing.assert_close(found.double(), wished, rtol=2e-5, atol=2e-5)


def arguments(query, layer, mask):
    plan = tiles.get_tiles(layer)
    return (
        query,
        layer.context_keys,
        layer.context_values,
        layer.bias,
        layer.keys,
        layer.values,
        mask,
        plan.entries,
        plan.first,
        list(plan.counts),
        0.3,
    )


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_operator_keeps_the_rules_of_operators(masked):
    torch.library.opcheck(
        torch.ops.restorekv.attend_tiles.default, arguments(*example(torch.float32, 1, 1, masked))
    )


def test_a_step_reads_nothing_from_the_device():
    """Launching calls no operator that waits for a value, and tensors without values pass through
    the operator.
    """

    class Heard(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.name())
            return function(*args, **(kwargs or {}))

    query, layer, mask = example()
    given_arguments = arguments(query, layer, mask)
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(grid)

    with patch.multiple(triton_attend, attend_tile=Kernel(), merge=Kernel()), Heard() as heard:
        triton_attend.launch_kernels(*given_arguments)
    assert len(launched) == 2 and heard.names <= {"aten::new_empty", "aten::empty.memory_format"}
    with FakeTensorMode() as mode:
        unreal = [
            mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given_arguments
        ]
        assert triton_attend.attend_tiles(*unreal).shape == (2, 2, 3, 2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_model_answers_alike_in_one_graph(family, monkeypatch):
    model, generator = (
        build_model(family, num_hidden_layers=1).to(DEVICE),
        torch.Generator().manual_seed(0),
    )
    full = prefill(model, torch.randint(320, (1, 30), generator=generator).to(DEVICE))
    keep = torch.rand(1, 2, 30, generator=generator) < 0.5
    cache = RaggedCache.from_kept_pairs(full, keep)
    tiles.plan_tiles(cache.layers)
    monkeypatch.setattr(dispatch, "choose_backend", lambda *_: triton_attend.attend_ragged)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    forks, ids = (cache.fork(), cache.fork()), torch.tensor([[5, 6, 7]], device=DEVICE)
    with torch.no_grad():
        for step in (ids, ids[:, :1]):
            plain, found = (
                each(step, past_key_values=fork, use_cache=True).logits
                for each, fork in zip((model, compiled), forks, strict=True)
            )
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_is_refused_and_never_chosen():
    query, layer, mask = example()
    for strange in (query.double(), query.clone().requires_grad_()):
        with pytest.raises(RestoreKVError, match="float16, bfloat16 or float32"):
            triton_attend.attend_ragged(strange, layer, mask, 0.3)
    assert attention.choose_backend(query, layer) is (
        cascade.attend_ragged if DEVICE == "cpu" else triton_attend.attend_ragged
    )
    with (
        pytest.raises(RestoreKVError, match="no attention backend 'best'"),
        attention.force_backend("best"),
    ):
        pass


@pytest.mark.slow
def test_without_triton_everything_else_works():
    code = (
        "from restorekv.model.attention.dispatch import BACKENDS, triton_attend\n"
        "assert triton_attend is None and 'triton' not in BACKENDS"
    )
    without_triton(code)


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_spilling():
    """By Triton's compiler and NVIDIA's assembler, which need no GPU; running them does."""
    for made in compiled("compile_kernels.py"):
        assert made["stack"] <= 64, made
        assert made["shared"] <= (99 << 10 if made["arch"] == 80 else 227 << 10), made
        assert made["copies"] or made["kernel"] == "merge", made


def test_all_lists_are_made_up_front_where_they_will_be_used():
    _, layer, _ = example()
    attention.plan_kernels([layer])
    assert (tiles.PLAN in layer.plans) == (DEVICE == "cuda")
    layer.device = torch.device("cuda")
    attention.plan_kernels([layer])
    assert layer.plans[tiles.PLAN].counts == (3, 2)
