"""8-bit contexts: numbers within the bounds that their scales give, attention against the
definition, files.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv import CompressionConfig
from restorekv.cache import quantized
from restorekv.cache.quantized import GROUP
from restorekv.cache.ragged import RaggedLayer
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.many_contexts import ask_many
from restorekv.model import attention
from restorekv.model.attention import packed, reference
from restorekv.pipeline import compress

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 2
)
EIGHT_BITS = [how for how in quantized.KV_DTYPES if how != "model"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bounds_of(lengths):
    return tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def allowed(rows, bounds, how, keys):
    """The largest error of every number (N, D), from the definition, group by group in float64."""
    rows, limit = rows.double(), torch.zeros(rows.shape, dtype=torch.float64)
    for start, end in pairwise(bounds):
        size = max(end - start, 1) if how == "fp8" else GROUP if keys else 1
        for low in range(start, end, size):
            part = rows[low : min(low + size, end)]
            if how == "fp8":
                step = part.abs().max() / 448
                limit[low : low + len(part)] = torch.maximum(part.abs() / 16, step / 1024)
            else:
                highest = part.abs().amax(0) if keys else part.abs().max()
                limit[low : low + len(part)] = highest / 127 / 2
    return limit


def test_scales_are_as_many_as_the_format_says():
    """int8: one for each channel of up to GROUP rows of keys and for each row of values; fp8: one
    for each head that is not empty.
    """
    rows = draw(0, 2 * GROUP + 12, 4)
    bounds = bounds_of([2 * GROUP + 2, 0, 10])
    shapes = {}
    for how in EIGHT_BITS:
        packed_rows = quantized.quantize(rows, -rows, bounds, how)
        shapes[how] = [tuple(each.scales.shape) for each in packed_rows]
        for each in packed_rows:
            parts = [x for x in vars(each).values() if isinstance(x, torch.Tensor)]
            assert sum(x.nbytes for x in quantized.list_tensors(each)) == sum(
                x.nbytes for x in parts
            )
        assert shapes[how] == list(quantized.compute_scale_shapes(bounds, how, 4))
    assert shapes == {"int8": [(4, 4), (2 * GROUP + 12, 1)], "fp8": [(2, 1), (2, 1)]}


@pytest.mark.parametrize("how", EIGHT_BITS)
def test_empty_heads_and_single_pairs_have_scales(how):
    nothing = torch.empty(0, 4).bfloat16()
    packed_rows = quantized.quantize(nothing, nothing, (0, 0, 0), how)
    shapes = quantized.compute_scale_shapes((0, 0, 0), how, 4)
    for each, shape in zip(packed_rows, shapes, strict=True):
        assert each.codes.shape == each[:].shape == (0, 4) and each[:].dtype == torch.bfloat16
        assert each.scales.shape == shape and each.scales.dtype == torch.float32
    pairs = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    for each in quantized.quantize(pairs, pairs, (0, 2, 2), how):
        torch.testing.assert_close(each[:], pairs, rtol=1 / 16, atol=4 / 254)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 5, GROUP - 1, GROUP, 2 * GROUP + 3]), min_size=1, max_size=4
    ),
    dim=st.sampled_from([32, 80, 128, 256]),
    how=st.sampled_from(EIGHT_BITS),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1e-4, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_every_number_is_as_near_as_its_scale_says(lengths, dim, how, dtype, size, seed):
    bounds = bounds_of(lengths)
    keys, values = ((draw(seed + i, bounds[-1], dim) * size).to(dtype) for i in range(2))
    if len(keys):
        keys[:, 3] *= 20  # an outlying channel
        values[0] = 0
    for is_key, rows, found in zip(
        (True, False), (keys, values), quantized.quantize(keys, values, bounds, how), strict=True
    ):
        assert (
            found.codes.element_size() == 1
            and found.shape == rows.shape
            and found[:].dtype == dtype
        )
        exact = found.dequantize(slice(None), torch.float64)
        assert (
            (exact - rows.double()).abs() <= allowed(rows, bounds, how, is_key) * (1 + 1e-5) + 1e-30
        ).all()
        for part in (
            slice(0, 1),
            slice(1, 2),
            slice(GROUP // 2, 3 * GROUP),
            slice(len(rows) // 2, None),
        ):
            assert found.dequantize(part, torch.float64).equal(exact[part])
            torch.testing.assert_close(found[part], exact[part].to(dtype))
        again = quantized.from_codes((found.codes,) * 2, (found.scales,) * 2, bounds, how, dtype)[
            0 if is_key else 1
        ]
        assert again[:].equal(found[:])


def make_case(lengths, dim, groups, batch, queries, tail, dtype, bias, seed=0):
    heads, bounds = len(lengths), bounds_of(lengths)
    keys, values = (draw(seed + i, bounds[-1], dim, dtype=dtype) for i in range(2))
    empty = torch.zeros(1, heads, 0, dim, dtype=dtype)
    offsets, positions = (
        torch.tensor(bounds, dtype=torch.int32),
        torch.arange(bounds[-1], dtype=torch.int32),
    )
    added = draw(seed + 9, bounds[-1], dtype=dtype) if bias else None
    layer = RaggedLayer(keys, values, offsets, positions, bounds[-1], empty, empty, added)
    layer.keys, layer.values = (
        draw(seed + 5 + i, batch, heads, tail, dim, dtype=dtype) for i in range(2)
    )
    return draw(seed + 7, batch, heads, groups, queries, dim, dtype=dtype) * 2, layer


def store(layer, how):
    layer.context_keys, layer.context_values = quantized.quantize(
        layer.context_keys, layer.context_values, layer.bounds, how
    )
    return layer


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, 300]), min_size=1, max_size=3),
    dim=st.sampled_from([32, 64, 128, 256]),
    groups=st.sampled_from([1, 2, 8]),
    batch=st.sampled_from([1, 3]),
    queries=st.sampled_from([1, 4]),
    how=st.sampled_from(EIGHT_BITS),
    dtype=st.sampled_from([torch.float64, *DTYPES]),
    bias=st.booleans(),
    hidden=st.booleans(),
    block=st.sampled_from([1, 4096, 1 << 20]),
)
def test_attention_is_that_of_the_numbers_stored(
    lengths, dim, groups, batch, queries, how, dtype, bias, hidden, block
):
    """Tile by tile as at once, whatever the tile; the definition, in float64, of the very numbers
    that are held.
    """
    query, layer = make_case(lengths, dim, groups, batch, queries, queries + 2, dtype, bias)
    store(layer, how)
    mask = (
        torch.ones(queries, queries + 2, dtype=torch.bool).tril(2).expand(batch, 1, -1, -1).clone()
    )
    mask[0, :, :, 0] &= not hidden
    exact = packed.unpack_layer(layer)
    for name in ("context_keys", "context_values"):
        setattr(exact, name, getattr(layer, name).dequantize(slice(None), torch.float64))
    exact.keys, exact.values = layer.keys.double(), layer.values.double()
    exact.bias = None if layer.bias is None else layer.bias.double()
    expected = reference.attend_ragged(query.double(), exact, mask, dim**-0.5)
    before, packed.BLOCK = packed.BLOCK, block
    try:
        found = packed.attend_ragged(query, layer, mask if hidden else None, dim**-0.5)
    finally:
        packed.BLOCK = before
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.float16: 2e-3,
        torch.bfloat16: 2e-2,
    }[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", EIGHT_BITS)
@pytest.mark.parametrize("seed", range(4))
def test_attention_is_as_near_to_the_full_numbers_as_the_scales_say(how, seed):
    """Logits off by e at most leave weights within e^(2e) of theirs, so outputs within
    max error of a value + (e^(2e) - 1) * max |value|."""
    query, layer = make_case([300, 5, 0], 64, 2, 1, 3, 4, torch.float64, False, seed)
    query = query / 4
    keys, values = layer.context_keys, layer.context_values
    limits = [
        allowed(rows, layer.bounds, how, is_key) for rows, is_key in ((keys, True), (values, False))
    ]
    mask = torch.ones(3, 4, dtype=torch.bool).tril(1).expand(1, 1, -1, -1)
    expected = reference.attend_ragged(query, layer, mask, 64**-0.5)
    found = packed.attend_ragged(query, store(layer, how), mask, 64**-0.5)
    for head, (start, end) in enumerate(pairwise(layer.bounds)):
        error = (found - expected)[:, head].abs().max()
        if start == end:
            assert error < 1e-12
            continue
        off = (query[:, head].abs() @ limits[0][start:end].T).max() * 64**-0.5
        highest = (
            torch.cat([values[start:end].flatten(), layer.values[:, head].flatten()]).abs().max()
        )
        limit = limits[1][start:end].max() + (torch.exp(2 * off) - 1) * highest
        assert 0 < error <= limit
        assert limit < 0.4 * highest if how == "int8" else True  # a bound that says something


def test_no_layer_is_widened_whole(monkeypatch):
    """On the CPU; a backend that is asked for gets the context in the model's dtype all the
    same.
    """
    query, layer = make_case([300, 40], 32, 2, 1, 1, 3, torch.float32, False)
    plain = attention.attend_layer(None, query.flatten(1, 2), layer, layer, None)[0]
    store(layer, "int8")
    monkeypatch.setattr(packed, "BLOCK", 32 * 50)
    asked, rows = [], quantized.QuantizedRows.dequantize
    monkeypatch.setattr(
        quantized.QuantizedRows,
        "dequantize",
        lambda self, part, dtype: asked.append(part) or rows(self, part, dtype),
    )
    found = attention.attend_layer(None, query.flatten(1, 2), layer, layer, None)[0]
    assert max(part.stop - part.start for part in asked) == 50
    for backend in ("reference", "cascade", "autograd"):
        with attention.force_backend(backend):
            torch.testing.assert_close(
                attention.attend_layer(None, query.flatten(1, 2), layer, layer, None)[0], found
            )
    assert not found.equal(plain)
    torch.testing.assert_close(found, plain, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("how", EIGHT_BITS)
def test_compress_save_load_ask(tiny_model, tiny_tokenizer, tmp_path, how):
    plain = compress(tiny_model, tiny_tokenizer, TEXT, ratio=0.5)
    made = compress(
        tiny_model, tiny_tokenizer, TEXT, ratio=0.5, config=CompressionConfig(kv_dtype=how)
    )
    assert made.manifest.kv_dtype == how and plain.manifest.kv_dtype == "model"
    for field in ("pairs", "pairs_held", "ratio", "bytes_full"):
        assert getattr(made.manifest, field) == getattr(plain.manifest, field)
    assert made.manifest.bytes_held == made.cache.nbytes < 0.5 * plain.cache.nbytes  # float32
    made.save(tmp_path / "doc.rkv")
    loaded = CompressedContext.load(tmp_path / "doc.rkv", tiny_model, tiny_tokenizer)
    assert loaded.manifest == made.manifest and loaded.cache.nbytes == made.cache.nbytes
    for ours, theirs in zip(made.cache.layers, loaded.cache.layers, strict=True):
        assert all(
            a.equal(b) and a.dtype == b.dtype
            for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
        )
    questions = ["Which code?", "Who lives in the blue house?"]
    answers = made.ask(questions, 6)
    assert (
        answers
        == loaded.ask(questions, 6)
        == [made.generate(question, max_new_tokens=6) for question in questions]
    )


def test_a_rectangle_of_8_bits_becomes_a_plain_cache(tiny_model, tiny_tokenizer):
    made = compress(
        tiny_model,
        tiny_tokenizer,
        TEXT,
        ratio=0.5,
        config=CompressionConfig(kv_dtype="int8", allocation="per-head"),
    )
    plain = made.cache.to_dynamic_cache()
    layer = made.cache.layers[0]
    assert plain.layers[0].keys.dtype == tiny_model.dtype
    assert plain.layers[0].keys[0].flatten(0, 1).equal(layer.context_keys[:])


def test_unknown_kv_dtype_is_refused(tiny_model, tiny_tokenizer):
    said = "kv_dtype must be one of model, int8, fp8, not 'int4'"
    with pytest.raises(RestoreKVError, match=said):
        compress(tiny_model, tiny_tokenizer, TEXT, config=CompressionConfig(kv_dtype="int4"))


def test_documents_of_either_kv_dtype_are_asked_in_one_batch(tiny_model, tiny_tokenizer):
    texts = [TEXT, "Nobody lives in the green house, whose door is red. " * 3]
    made = [
        compress(
            tiny_model, tiny_tokenizer, text, ratio=0.5, config=CompressionConfig(kv_dtype=how)
        )
        for text, how in zip(texts, ("int8", "model"), strict=True)
    ]
    questions = ["Which code?", "Who?"]
    together = ask_many(list(zip(made, questions, strict=True)), 6)
    assert together == [one.ask(question, 6) for one, question in zip(made, questions, strict=True)]
