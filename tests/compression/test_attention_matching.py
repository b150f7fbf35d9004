"""Attention Matching compared with float64 NumPy on the same context, and with eviction on the tiny
model.
"""

import json
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import floor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv import CompressionConfig
from restorekv.compression import allocate
from restorekv.compression.allocate import HeadShares, split_by_shares
from restorekv.compression.attention_matching import method as attention_matching
from restorekv.compression.attention_matching.matching import (
    fit_head,
    observe_layer,
    solve_in_box,
    solve_least_squares,
)
from restorekv.compression.attention_matching.method import AttentionMatching, sample_numbers
from restorekv.compression.eviction import Eviction, make_compressor
from restorekv.compression.full_cache import ScoredContext
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.model.attention import BACKENDS
from restorekv.model.load import load_model
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill
from restorekv.model.prompt import encode_text, make_context
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from restorekv.tiny.suite import draw_documents
from tests.helpers.attention import ON_CPU
from tests.helpers.models import build_model

TEXT = (
    "the code of the red house is seven; who lives in the blue house? one two, three four five. "
    * 3
)
E3 = np.exp(3.0)


def reference(model, tokenizer, context):
    """Return queries (L, H, n, D), keys and values (L, H, T, D), float64, from one plain pass over
    context and repetition.
    """
    asked = encode_text(tokenizer, "\n\nRepeat the previous context verbatim.")
    ids = torch.cat(
        [context.ids, asked, context.suffix_ids, context.ids[:, context.prefix_length :]], -1
    )
    found = []

    def on_layer(view):
        queries = view.query[:, :, context.num_tokens :].transpose(1, 2).flatten(1, 2)
        own = (x[:, context.prefix_length : context.num_tokens] for x in (view.key, view.value))
        found.append([x.numpy().copy() for x in (queries, *own)])

    with observe_layers(model.double(), on_layer):
        prefill(model, ids)
    model.float()
    return [np.stack(x) for x in zip(*found, strict=True)]


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def oracle(query, key, value, count):
    """Match one head in float64.

    Returns:
        The columns, the factors B, and a function that fits values to a given bias.
    """
    logits = query @ key.T / key.shape[-1] ** 0.5
    weights = softmax(logits)
    columns = np.sort(np.argsort(-np.sqrt((weights**2).mean(0)), kind="stable")[:count])
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    matrix, mass = raised[:, columns], raised.sum(-1)
    factors = np.linalg.lstsq(matrix, mass, rcond=None)[0].clip(1 / E3, E3)
    for _ in range(2):
        slope = matrix.T @ (matrix @ factors - mass)
        factors = (factors - slope / np.linalg.norm(matrix, 2) ** 2).clip(1 / E3, E3)

    def values(bias):
        return np.linalg.lstsq(softmax(logits[:, columns] + bias), weights @ value, rcond=None)[0]

    return columns, factors, values


def compact(model, tokenizer, ratio, spec="am-fast"):
    prepared = make_compressor(spec).prepare(model, tokenizer, TEXT)
    return prepared, prepared.evict(ratio)


@pytest.mark.parametrize("tokens_per_head", [1, 16])
def test_columns_bias_and_values_are_those_of_double_precision(
    tiny_model, tiny_tokenizer, tokens_per_head
):
    prepared = make_compressor("am-fast").prepare(tiny_model, tiny_tokenizer, TEXT)
    made = prepared.evict(Fraction(tokens_per_head, prepared.context.text_tokens))
    queries, keys, values = reference(tiny_model, tiny_tokenizer, prepared.context)
    prefix = prepared.context.prefix_length
    for index, layer in enumerate(made.layers):
        for head in range(layer.heads):
            rows = slice(layer.bounds[head] + prefix, layer.bounds[head + 1])
            count = rows.stop - rows.start
            assert count == tokens_per_head
            columns, factors, fitted = oracle(
                queries[index, head], keys[index, head], values[index, head], count
            )
            assert (layer.positions[rows].numpy() - prefix == columns).all()
            bias = layer.bias[rows].double().numpy()
            np.testing.assert_allclose(np.exp(bias), factors, rtol=2e-3, atol=2e-3)
            wanted = fitted(bias)
            assert np.linalg.norm(
                layer.context_values[rows].numpy() - wanted
            ) < 1e-2 * np.linalg.norm(wanted)
            np.testing.assert_allclose(
                layer.context_keys[rows].numpy(), keys[index, head][columns], atol=1e-4
            )


@pytest.mark.parametrize("block", [1, 5000, 1 << 22])
def test_targets_are_those_of_the_whole_matrix(tiny_tokenizer, block):
    model = build_model("qwen3")
    context = make_context(tiny_tokenizer, TEXT)
    query, key, value = (torch.tensor(x[0]) for x in reference(model, tiny_tokenizer, context))
    logits = query @ key.transpose(1, 2) * 0.25
    targets, scores = observe_layer(query.float(), key.float(), value.float(), 0.25, block)
    torch.testing.assert_close(
        targets.highest.double() + targets.mass.double().log(), logits.logsumexp(-1)
    )
    torch.testing.assert_close(
        targets.output.double(), logits.softmax(-1) @ value, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        scores.double(), logits.softmax(-1).square().mean(1).sqrt(), rtol=1e-4, atol=1e-7
    )


def test_the_prefix_stays_as_it_is(tiny_tokenizer):
    prepared, made = compact(build_model("qwen3"), tiny_tokenizer, 0.2)
    prefix = prepared.context.prefix_length
    for layer, full in zip(made.layers, prepared.full.layers, strict=True):
        for head in range(layer.heads):
            rows = slice(layer.bounds[head], layer.bounds[head] + prefix)
            assert (
                layer.positions[rows].tolist() == list(range(prefix)) and not layer.bias[rows].any()
            )
            assert layer.context_keys[rows].equal(full.keys[0, head, :prefix])
            assert layer.context_values[rows].equal(full.values[0, head, :prefix])
    assert made.seen == prepared.context.num_tokens and made.restore_length == 0


def test_everything_kept_is_the_full_cache(tiny_tokenizer):
    model = build_model("qwen3")
    prepared, made = compact(model, tiny_tokenizer, 1)
    for layer, full in zip(made.layers, prepared.full.layers, strict=True):
        assert layer.bias is None
        assert layer.context_keys.equal(full.keys[0].flatten(0, 1))
        assert layer.context_values.equal(full.values[0].flatten(0, 1))
    for layer, targets in zip(made.layers, prepared.targets, strict=True):  # and so do the fits
        keys = layer.context_keys[prepared.context.prefix_length : layer.bounds[1]]
        bias, values = fit_head(targets, 0, keys, 2, 3.0)
        logits = targets.query[0] @ keys.T * targets.scale + bias
        output = logits.softmax(-1) @ values
        assert (output - targets.output[0]).norm() < 1e-3 * targets.output[0].norm()
        mass = logits.logsumexp(-1) - targets.highest[0] - targets.mass[0].log()
        assert mass.abs().max() < 1e-2


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 8))
def test_the_box_is_kept_and_every_step_helps(seed, count, steps):
    rng = np.random.default_rng(seed)
    exact, wanted = rng.random((30, count)) ** 4, 30 * rng.random(30)
    matrix, target = torch.tensor(exact).float(), torch.tensor(wanted).float()
    loss = lambda factors: np.linalg.norm(exact @ np.asarray(factors) - wanted)  # noqa: E731
    found, longer, best = (
        solve_in_box(matrix, target, count, 3.0) for count in (steps, steps + 1, 400)
    )
    assert (found >= 1 / E3 * 0.999).all() and (found <= E3 * 1.001).all()
    assert loss(longer) <= loss(found) * (1 + 1e-5)
    slow = np.ones(count)  # another method: exact coordinate descent
    for turn in range(100 * count):
        column = exact[:, turn % count]
        rest = wanted - exact @ slow + column * slow[turn % count]
        slow[turn % count] = np.clip(column @ rest / (column @ column), 1 / E3, E3)
    assert loss(slow) * (1 - 1e-6) <= loss(found) and loss(best) <= loss(slow) * (1 + 2e-3)


@pytest.mark.parametrize("rows", [40, 5])
def test_least_squares_without_full_rank(rows):
    """If no query looks at a key, or a query looks at no kept key, the solution is the shortest
    one, as NumPy's is.
    """
    matrix, target = torch.rand(rows, 8), torch.randn(rows, 2)
    (matrix[:, 3] if rows > 8 else matrix[3]).zero_()
    wanted = np.linalg.lstsq(matrix.double().numpy(), target.double().numpy(), rcond=None)[0]
    np.testing.assert_allclose(
        solve_least_squares(matrix, target).numpy(), wanted, rtol=1e-3, atol=1e-3
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.data(),
)
def test_shares_give_the_exact_total(weights, most, data):
    pairs = data.draw(st.integers(0, most * len(weights)))
    shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
    counts = split_by_shares(pairs, shares, most)
    assert sum(counts) == pairs and all(0 <= count <= most for count in counts)
    floors = [min(floor(share * pairs), most) for share in shares]
    assert all(count >= low for count, low in zip(counts, floors, strict=True))
    # Nobody is capped: nobody gets more than one extra.
    if all(share * pairs <= most for share in shares):
        assert all(count <= low + 1 for count, low in zip(counts, floors, strict=True))
    if len(set(weights)) == 1:
        assert counts == allocate.split_evenly(pairs, len(weights))


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 1000).map(lambda x: x / 1000),
    st.lists(st.integers(0, 50), min_size=6, max_size=6).filter(any),
)
def test_caches_hold_the_exact_budget(ratio, weights):
    scores = torch.rand(3, 2, 41, generator=torch.Generator().manual_seed(sum(weights)))
    pairs = floor(Fraction(str(ratio)) * 41 * 6)
    for shares in ((), tuple(Fraction(weight, sum(weights)) for weight in weights)):
        keep = HeadShares("made", shares)(scores, pairs)
        assert int(keep.sum()) == pairs
        for kept, head in zip(keep.flatten(0, 1), scores.flatten(0, 1), strict=True):
            assert not kept.any() or kept.all() or head[kept].min() >= head[~kept].max()


def test_head_budgets_from_a_file(tiny_tokenizer, tmp_path):
    shares = {"L0H0": 0.5, "L0H1": 0.0, "L1H0": 0.125, "L1H1": 0.125, "L2H0": 0.2, "L2H1": 0.05}
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps(dict(reversed(shares.items()))))
    prepared, made = compact(build_model("qwen3"), tiny_tokenizer, 0.1, f"am-fast:heads={path}")
    tokens, prefix = prepared.context.text_tokens, prepared.context.prefix_length
    total = floor(Fraction("0.1") * tokens * 6)
    counts = (made.lengths - prefix).flatten()
    assert int(counts.sum()) == total and counts[1] <= 1
    wanted = [share * total for share in shares.values()]
    assert all(
        0 <= count - floor(want) <= 1 for count, want in zip(counts.tolist(), wanted, strict=True)
    )
    assert prepared.method.spec == f"am-fast:heads={path}"
    assert prepared.config.to_json()["allocation"] == str(path)
    full = prepared.evict(0.4)  # L0H0 gets all of its pairs, and keeps them unchanged
    rows = slice(prefix, full.layers[0].bounds[1])
    assert rows.stop - rows.start == tokens and not full.layers[0].bias[rows].any()


@pytest.mark.parametrize("backend", ON_CPU)
def test_every_backend_attends_with_the_bias(tiny_tokenizer, backend):
    _, made = compact(build_model("llama"), tiny_tokenizer, 0.15)
    generator = torch.Generator().manual_seed(0)
    layer = made.fork().layers[1]
    dim = layer.context_keys.shape[1]
    tail, query = (
        torch.randn(2, 1, 2, 3, dim, generator=generator),
        torch.randn(1, 2, 2, 3, dim, generator=generator),
    )
    layer.update(*tail)
    found = BACKENDS[backend](query, layer, None, dim**-0.5)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for head in range(2):
        rows = slice(layer.bounds[head], layer.bounds[head + 1])
        keys, values = (
            torch.cat(pair).double()
            for pair in (
                (layer.context_keys[rows], tail[0, 0, head]),
                (layer.context_values[rows], tail[1, 0, head]),
            )
        )
        logits = query[0, head].double() @ keys.T * dim**-0.5
        logits[..., : rows.stop - rows.start] += layer.bias[rows].double()
        logits[..., rows.stop - rows.start :].masked_fill_(later, -torch.inf)
        wanted = logits.softmax(-1) @ values
        torch.testing.assert_close(found[0, head].double(), wanted, rtol=1e-3, atol=1e-4)


def test_reading_in_pieces_or_from_a_subset(tiny_tokenizer, monkeypatch):
    model = build_model("qwen3")
    whole = AttentionMatching().prepare(model, tiny_tokenizer, TEXT)
    few = AttentionMatching(queries=100).prepare(model, tiny_tokenizer, TEXT)
    monkeypatch.setattr(attention_matching, "CHUNK", 17)
    pieces = AttentionMatching().prepare(model, tiny_tokenizer, TEXT)
    few_pieces = AttentionMatching(queries=100).prepare(model, tiny_tokenizer, TEXT)
    pool = whole.targets[0].query.shape[1]
    chosen = sample_numbers(pool, 100, 0)
    assert (
        len(chosen) == 100
        and (chosen.diff() > 0).all()
        and not chosen.equal(sample_numbers(pool, 100, 1))
    )
    for one, two, three, four in zip(
        whole.targets, pieces.targets, few.targets, few_pieces.targets, strict=True
    ):
        torch.testing.assert_close(one.query, two.query, rtol=1e-3, atol=1e-4)
        assert three.query.equal(one.query[:, chosen])
        torch.testing.assert_close(four.query, three.query, rtol=1e-3, atol=1e-4)
    assert [layer.keys.shape[-2] for layer in whole.full.layers] == [whole.context.num_tokens] * 3


def test_heads_whose_queries_attend_almost_alike_can_be_saved(tiny_tokenizer, tmp_path):
    """The matrix of their weights has almost not full rank, and files have a largest number."""
    model = build_model("qwen3")
    for name, weight in model.named_parameters():
        if "q_norm" in name:
            weight.data *= 0.02
    made = compress(model, tiny_tokenizer, 4 * TEXT, evictor="am-fast", ratio=0.3)
    made.save(tmp_path / "doc.rkv")
    again = CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)
    assert again.digest == made.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_load_and_ask(tiny_tokenizer, tmp_path, dtype):
    model = build_model("qwen3").to(dtype)
    made = compress(model, tiny_tokenizer, TEXT, evictor="am-fast:box=2", ratio=0.3)
    assert made.manifest.evictor == "am-fast:box=2.0" and made.manifest.allocation == "uniform"
    assert (
        made.manifest.pairs == floor(Fraction("0.3") * made.manifest.tokens * 6)
        and made.manifest.adapter is None
    )
    biases = [layer.bias for layer in made.cache.layers]
    assert all(bias.dtype == dtype and 1 < bias.abs().max() <= 2 for bias in biases)
    pairs = sum(
        sum(x.nbytes for x in (layer.context_keys, layer.context_values))
        for layer in made.cache.layers
    )
    assert made.manifest.bytes_held - pairs - sum(bias.nbytes for bias in biases) == 4 * (
        made.cache.pairs_held + 3 * 3
    )
    made.save(tmp_path / "cache")
    again = CompressedContext.load(tmp_path / "cache", model, tiny_tokenizer)
    for layer, bias in zip(again.cache.layers, biases, strict=True):
        assert layer.bias.equal(bias)
    question = "who lives in the red house?"
    answer = made.ask(question, max_new_tokens=8)
    assert again.ask(question, max_new_tokens=8) == answer
    assert again.ask([question, "one two"], max_new_tokens=8)[0] == answer


def test_mistakes_are_told(tiny_tokenizer, tmp_path):
    model, budgets = build_model("qwen3"), tmp_path / "budgets.json"
    for wrong in ("steps=-1", "queries=0", "box=nan", "box=30", "heads=none.json"):
        with pytest.raises(RestoreKVError):
            make_compressor(f"am-fast:{wrong}")
    for right in ("steps=0", "queries=1", "box=0", "box=20"):
        assert make_compressor(f"am-fast:{right}").spec.startswith("am-fast:")
    for text in (
        "{",
        "[]",
        "{}",
        '{"L0H0": 0.5}',
        '{"L0H0": true}',
        '{"L0H0": -1, "L0H1": 2}',
        '{"L0H0": "1"}',
    ):
        budgets.write_text(text)
        with pytest.raises(RestoreKVError):
            make_compressor(f"am-fast:heads={budgets}")
    budgets.write_text('{"L0H0": 0.5, "L0H1": 0.5}')
    with pytest.raises(RestoreKVError, match="3 x 2"):
        make_compressor(f"am-fast:heads={budgets}").prepare(model, tiny_tokenizer, TEXT)
    with pytest.raises(RestoreKVError, match="commas"):
        AttentionMatching(instruction="Repeat, please.")
    with pytest.raises(RestoreKVError, match="free"):
        compress(
            model,
            tiny_tokenizer,
            TEXT,
            evictor="am-fast",
            config=CompressionConfig(prefix_policy="counted"),
        )
    with pytest.raises(RestoreKVError, match="heads=FILE"):
        compress(
            model,
            tiny_tokenizer,
            TEXT,
            evictor="am-fast",
            config=CompressionConfig(allocation="per-head"),
        )
    with pytest.raises(RestoreKVError, match="no restore pass"):
        AttentionMatching(config=CompressionConfig(restore_from="evicted"))
    restorer = RestoreAdapter.create(model, 2, rank=2)
    for given_adapter in (restorer, "somewhere"):
        with pytest.raises(RestoreKVError, match="restores nothing"):
            compress(model, tiny_tokenizer, TEXT, evictor="am-fast", adapter=given_adapter)
    with pytest.raises(RestoreKVError, match="restores nothing"):
        AttentionMatching().prepare(model, tiny_tokenizer, TEXT).with_restore_cache(restorer)


def test_values_beyond_the_dtype_are_told(tiny_tokenizer, monkeypatch):
    prepared = AttentionMatching().prepare(build_model("qwen3"), tiny_tokenizer, TEXT)
    monkeypatch.setattr(
        attention_matching, "fit_head", lambda *_: (torch.zeros(()), torch.tensor(torch.inf))
    )
    with pytest.raises(RestoreKVError, match="too large"):
        prepared.evict(0.2)


@cache
def tiny():
    """Prepare a document of about 600 tokens with the tiny model: for AM-fast, and for KVzip with
    the same number of pairs in every head.
    """
    model, tokenizer = load_model("tiny")
    text = draw_documents(tokenizer, 1, "am-dev", low=590, high=610)[0].text
    whole = AttentionMatching().prepare(model, tokenizer, text)
    kvzip = Eviction.make("kvzip").prepare(model, tokenizer, text)
    return whole, replace(kvzip, config=whole.config)


def attended(layer, targets, head, prefix):
    """Return outputs and log masses of the reference queries over one head of a cache, from column
    `prefix` on.
    """
    rows = slice(layer.bounds[head] + prefix, layer.bounds[head + 1])
    logits = targets.query[head] @ layer.context_keys[rows].T * targets.scale
    logits = logits if layer.bias is None else logits + layer.bias[rows]
    return logits.softmax(-1) @ layer.context_values[rows], logits.logsumexp(-1)


def every_head(made, prefix):
    """Return what `attended` returns, for all layers and heads of a cache of the tiny document."""
    whole, _ = tiny()
    return [
        attended(layer, targets, head, prefix)
        for layer, targets in zip(made.layers, whole.targets, strict=True)
        for head in range(layer.heads)
    ]


@cache
def of_the_full_cache(prefix):
    return every_head(tiny()[0].evict(1), prefix)


def output_errors(made, prefix):
    """Return the relative squared error of the outputs, for every layer and head."""
    pairs = zip(every_head(made, prefix), of_the_full_cache(prefix), strict=True)
    return np.array(
        [
            float((o - wanted).square().sum() / wanted.square().sum())
            for (o, _), (wanted, _) in pairs
        ]
    )


def evict_alone(matched, ratio):
    """Return a cache of the pairs that a matched context keeps, without bias and fitted values."""
    plain = ScoredContext(
        matched.model, matched.context, matched.full, matched.scores, config=matched.config
    )
    return plain.evict(ratio)


def mass_errors(made, prefix):
    """Return the root mean square error of the log mass, for every layer and head."""
    pairs = zip(every_head(made, prefix), of_the_full_cache(prefix), strict=True)
    return np.array([float((m - wanted).square().mean().sqrt()) for (_, m), (_, wanted) in pairs])


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2])
def test_every_head_matches_better_than_as_many_evicted_pairs(ratio):
    """The evicted pairs are the same keys with their own values, and KVzip's choice; errors are
    measured over the article alone and with the prefix.
    """
    whole, kvzip = tiny()
    made = whole.evict(ratio)
    for prefix in (0, whole.context.prefix_length):
        error = output_errors(made, prefix)
        assert error.shape == (4 * 3,)
        for evicted in (evict_alone(whole, ratio), kvzip.evict(ratio)):
            assert evicted.lengths.equal(made.lengths)
            assert (error < 0.75 * output_errors(evicted, prefix)).all()


def test_the_bias_is_what_matches_the_mass():
    whole, _ = tiny()
    prefix = whole.context.prefix_length
    made, evicted = whole.evict(0.1), evict_alone(whole, 0.1)
    assert (mass_errors(made, prefix) < 0.9 * mass_errors(evicted, prefix)).all()


def test_the_values_are_what_matches_the_outputs():
    whole, _ = tiny()
    prefix = whole.context.prefix_length
    made, plain = whole.evict(0.1), whole.evict(0.1)
    for layer, evicted in zip(plain.layers, evict_alone(whole, 0.1).layers, strict=True):
        layer.context_values = evicted.context_values
    assert (output_errors(made, prefix) < 0.75 * output_errors(plain, prefix)).all()
