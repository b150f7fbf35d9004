"""KVzip and KVzip+ against the definition: attention matrices written out in float64, no cache,
head by head.
"""

import copy
import dataclasses

import pytest
import torch
from transformers import DynamicCache

from restorekv import evictors
from restorekv.errors import RestoreKVError
from restorekv.evictors import kvzip
from restorekv.model.attention import blocked
from restorekv.model.observer import LayerView, observe_layers
from restorekv.model.prefill import prefill, read_only_view
from restorekv.model.prompt import make_context
from tests.helpers.models import build_model
from tests.helpers.scoring import TEXT, assert_relative, projected, repeat_ids


def naive_scores(model, tokenizer, context, chunk, plus):
    """(L, H, T) float64."""
    model = copy.deepcopy(model).double()
    config, positions = model.config, context.num_tokens
    groups = config.num_attention_heads // config.num_key_value_heads
    scores = torch.zeros(
        config.num_hidden_layers,
        config.num_key_value_heads,
        context.text_tokens,
        dtype=torch.float64,
    )
    for start in range(context.prefix_length, positions, chunk):
        end = min(start + chunk, positions)
        ids = repeat_ids(tokenizer, context, start, end, start == context.prefix_length)
        layers = projected(model, torch.cat([context.ids, ids], 1))
        columns = [
            *range(min(4, start)),
            *range(start, end),
            *range(positions, positions + ids.shape[1]),
        ]
        for index, (x, query, key, value) in enumerate(layers):
            weight = model.model.layers[index].self_attn.o_proj.weight
            for head in range(config.num_key_value_heads):
                best = []
                for number in range(head * groups, (head + 1) * groups):
                    dim = query.shape[-1]
                    logits = query[number, positions:] @ key[head, columns].T / dim**0.5
                    causal = torch.tensor(
                        [[c > positions + row for c in columns] for row in range(ids.shape[1])]
                    )
                    matrix = logits.masked_fill(causal, float("-inf")).softmax(-1)
                    if plus:
                        matrix = matrix / x[positions:].norm(dim=-1, keepdim=True)
                        slots = slice(number * dim, (number + 1) * dim)
                        matrix = matrix * (value[head, columns] @ weight[:, slots].T).norm(dim=-1)
                    sinks = min(4, start)
                    best.append(matrix[:, sinks : sinks + end - start].amax(0))
                scores[index, head, start - context.prefix_length : end - context.prefix_length] = (
                    torch.stack(best).amax(0)
                )
    return scores


@pytest.fixture
def context(tiny_tokenizer):
    return make_context(tiny_tokenizer, TEXT)


@pytest.mark.parametrize("name", ["kvzip", "kvzip+"])
@pytest.mark.parametrize("chunk", [2048, 17])
def test_scores_equal_the_definition(tiny_model, tiny_tokenizer, context, name, chunk):
    full = prefill(tiny_model, context.ids)
    scores = evictors.make_evictor(f"{name}:chunk={chunk}").score(
        tiny_model, tiny_tokenizer, context, full
    )
    assert scores.dtype == torch.float32
    exact = naive_scores(tiny_model, tiny_tokenizer, context, chunk, name == "kvzip+")
    assert_relative(scores, exact, 2e-4)


@pytest.mark.parametrize("prefix", [0, 2, 3, 4, 9])
def test_any_length_of_prefix(tiny_tokenizer, context, prefix):
    model = build_model("qwen3")
    context = dataclasses.replace(context, prefix_length=prefix)
    scores = evictors.make_evictor("kvzip:chunk=20").score(
        model, tiny_tokenizer, context, prefill(model, context.ids)
    )
    assert_relative(scores, naive_scores(model, tiny_tokenizer, context, 20, False), 2e-4)


def test_a_tokenizer_without_template(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    model, context = build_model("llama"), make_context(tokenizer, TEXT)
    assert context.prefix_length == 0
    scores = evictors.make_evictor("kvzip+").score(
        model, tokenizer, context, prefill(model, context.ids)
    )
    assert_relative(scores, naive_scores(model, tokenizer, context, 2048, True), 2e-4)


def test_scoring_leaves_the_cache_alone(tiny_model, tiny_tokenizer, context):
    full = prefill(tiny_model, context.ids)
    held = [(layer.keys, layer.values) for layer in full.layers]
    copies = [(keys.clone(), values.clone()) for keys, values in held]
    evictors.make_evictor("kvzip:chunk=16").score(tiny_model, tiny_tokenizer, context, full)
    assert full.get_seq_length() == context.num_tokens
    for layer, kept, copied in zip(full.layers, held, copies, strict=True):
        assert layer.keys is kept[0] and layer.values is kept[1]
        assert layer.keys.equal(copied[0]) and layer.values.equal(copied[1])


def test_a_pass_that_fails_leaves_the_cache_and_no_hooks(tiny_model, context):
    full = prefill(tiny_model, context.ids)

    def fail(view):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observe_layers(tiny_model, fail):
        tiny_model.model(input_ids=context.ids, past_key_values=read_only_view(full))
    assert full.get_seq_length() == context.num_tokens
    assert not any(layer.self_attn._forward_pre_hooks for layer in tiny_model.model.layers)
    tiny_model.model(input_ids=context.ids)


def random_pass(rows=50, chunk=40, heads=2, groups=3, dim=8):
    """What one layer saw and what it holds, and the columns of a chunk."""
    torch.manual_seed(0)
    own, held = torch.randn(heads, rows, dim), DynamicCache()
    held.update(torch.randn(1, heads, 60, dim), torch.randn(1, heads, 60, dim), 0)
    query = torch.randn(heads, groups, rows, dim) * 4
    return LayerView(0, None, dim**-0.5, None, query, own, own), held.layers[0], 10, 10 + chunk


@pytest.mark.parametrize("block", [1, 1000, 10_000])
def test_blocks_change_nothing(block, monkeypatch):
    case = random_pass()
    weight = torch.rand(case[0].query.shape[2])
    whole = kvzip.find_column_maxima(*case, 4, weight)
    monkeypatch.setattr(blocked, "BLOCK", block)
    for ours, exact in zip(kvzip.find_column_maxima(*case, 4, weight), whole, strict=True):
        torch.testing.assert_close(ours, exact)


def test_specs():
    assert (
        evictors.make_evictor("kvzip") == kvzip.KVzip()
        and evictors.make_evictor("kvzip").chunk == 2048
    )
    assert evictors.make_evictor("kvzip+:chunk=512,sinks=0").sinks == 0
    for spec in (
        "nosuch",
        "kvzip:window=3",
        "kvzip:chunk=many",
        "kvzip:chunk=0",
        "kvzip:chunk",
        "",
    ):
        with pytest.raises(RestoreKVError):
            evictors.make_evictor(spec)
