"""Prefill in chunks, the cache that passes do not fill, and what a probe sees."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from restorekv.cache.ragged import RaggedCache
from restorekv.model import attention
from restorekv.model.attention import reference
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill, read_only_view
from tests.helpers.held import Held
from tests.helpers.models import VOCABULARY


def ids(count, seed=0):
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_chunked_prefill_equals_one_shot(tiny_model, chunk):
    whole, pieces = prefill(tiny_model, ids(40)), prefill(tiny_model, ids(40), chunk=chunk)
    for ours, theirs in zip(pieces.layers, whole.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-5)


def test_prefill_records_no_gradient(tiny_model):
    tiny_model.requires_grad_(True)
    assert not any(layer.keys.requires_grad for layer in prefill(tiny_model, ids(9)).layers)


def test_a_read_only_view_is_read_and_not_written(tiny_model):
    full = prefill(tiny_model, ids(20))
    expected = tiny_model(torch.cat([ids(20), ids(6, 1)], 1)).logits[:, 20:]
    for _ in range(2):
        logits = tiny_model(ids(6, 1), past_key_values=read_only_view(full)).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert full.get_seq_length() == 20


def test_an_observer_sees_what_attention_computes_with(tiny_model):
    views, outputs = [], []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _m, _a, output: outputs.append(output[0][0]))
        for layer in tiny_model.model.layers
    ]
    full = prefill(tiny_model, ids(20))
    outputs.clear()
    with observe_layers(tiny_model, views.append):
        tiny_model.model(input_ids=ids(6, 1), past_key_values=read_only_view(full))
    for hook in hooks:
        hook.remove()
    assert [view.layer for view in views] == list(range(len(tiny_model.model.layers)))
    for view, output in zip(views, outputs, strict=True):
        assert view.hidden.shape == (6, tiny_model.config.hidden_size) and view.key.shape[1] == 26
        logits = view.query @ view.key.unsqueeze(1).mT * view.scale  # (H, G, Q, K)
        logits = logits.masked_fill(torch.ones(6, 26, dtype=torch.bool).triu(21), float("-inf"))
        mixed = (
            (logits.softmax(-1) @ view.value.unsqueeze(1)).flatten(0, 1).transpose(0, 1).flatten(1)
        )
        torch.testing.assert_close(view.module.o_proj(mixed), output, rtol=1e-4, atol=1e-5)


def test_an_observer_sees_the_whole_ragged_layer(tiny_model):
    """Context, offsets and tail with the pass's own pairs, and the mask: enough to compute what
    attention gives.
    """
    full, expected, outputs = prefill(tiny_model, ids(20)), [], []
    keep = torch.rand(len(full.layers), 2, 20, generator=torch.Generator().manual_seed(2)) < 0.4
    cache = RaggedCache.from_kept_pairs(full, keep)

    def on_layer(view):
        assert view.ragged is cache.layers[view.layer] and view.key.equal(view.ragged.keys[0])
        # (H * G, Q, D)
        mixed = reference.attend_ragged(view.query[None], view.ragged, view.mask, view.scale)[
            0
        ].flatten(0, 1)
        expected.append(view.module.o_proj(mixed.transpose(0, 1).flatten(1)))
        return torch.zeros(6, 4, 16)  # which replaces nothing

    hooks = [
        layer.self_attn.register_forward_hook(lambda _m, _a, output: outputs.append(output[0][0]))
        for layer in tiny_model.model.layers
    ]
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    visible[..., 1:, 0] = False  # so that a mask that is not passed on shows
    with torch.no_grad(), observe_layers(tiny_model, on_layer):
        tiny_model.model(input_ids=ids(6, 1), attention_mask=visible, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    assert len(expected) == len(outputs) == len(full.layers)
    for ours, output in zip(expected, outputs, strict=True):
        torch.testing.assert_close(ours, output, rtol=1e-4, atol=1e-5)


def test_the_mask_of_a_chunk_is_bounded(tiny_model, monkeypatch):
    """However long the text, and keys and values are the same."""
    rows, whole = [], prefill(tiny_model, ids(60))
    monkeypatch.setattr("restorekv.model.prefill.MASK", 600)
    hook = tiny_model.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = prefill(tiny_model, ids(60))
    hook.remove()
    assert rows == [10] * 6
    for ours, theirs in zip(found.layers, whole.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_attention_copies_no_head(tiny_model, dtype):
    """The same bits as transformers' own, which copies every KV head for each of its query
    heads.
    """
    generator = torch.Generator().manual_seed(0)
    module, mask = (
        tiny_model.model.layers[0].self_attn,
        torch.ones(5, 30, dtype=torch.bool).tril(25)[None, None],
    )
    query, key, value = (
        torch.randn(1, n, q, 16, generator=generator).to(dtype)
        for n, q in ((4, 5), (2, 30), (2, 30))
    )
    with torch.no_grad():
        found = attention.attend_layer(module, query, key, value, mask)[0]
        held = Held(query, key, value)
        with held:
            attention.attend_layer(module, query, key, value, mask)
    assert found.equal(sdpa_attention_forward(module, query, key, value, mask, scaling=16**-0.5)[0])
    assert held.most < sum(x.nbytes for x in (query, key, value)) + key.nbytes
