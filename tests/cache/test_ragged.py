"""The ragged cache against transformers' DynamicCache: logits, positions, rewinding, forking,
gradients, bytes.
"""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from restorekv.cache.ragged import RaggedCache
from restorekv.model import attention
from restorekv.model.shape import CacheShape
from tests.helpers.attention import ON_CPU
from tests.helpers.models import build_model

CONTEXT, QUESTION = 40, 7


def ids(count, seed, batch=1):
    return torch.randint(3, 300, (batch, count), generator=torch.Generator().manual_seed(seed))


def prefill(model, tokens):
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=full, use_cache=True)
    return full


def random_keep(model, columns, seed=0, share=0.3):
    shape = CacheShape.from_model(model)
    keep = (
        torch.rand(
            shape.layers, shape.heads, columns, generator=torch.Generator().manual_seed(seed)
        )
        < share
    )
    keep[:, :, :1] = True  # dense masked attention needs one visible column before the question
    keep[0, 1] = False  # except in one head, whose question sees only itself
    return keep


def masked_logits(model, full, keep, question):
    """Dense attention with the dropped columns masked, one mask per layer and head; an independent
    path.
    """
    shape = CacheShape.from_model(model)
    columns, length = keep.shape[-1], question.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    def masked(module, query, key, value, attention_mask, scaling=None, **_):
        kept = (
            keep[module.layer_idx]
            .repeat_interleave(shape.groups, 0)[:, None]
            .expand(-1, length, -1)
        )
        rest = torch.ones(kept.shape[0], length, key.shape[2] - columns - length, dtype=torch.bool)
        visible = torch.cat([kept, rest, causal.expand(kept.shape[0], -1, -1)], -1)[None]
        key, value = (x.repeat_interleave(shape.groups, 1) for x in (key, value))
        logits = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("masked_oracle", masked)
    AttentionMaskInterface.register("masked_oracle", sdpa_mask)
    model.set_attn_implementation("masked_oracle")
    try:
        with torch.no_grad():
            return model(question, past_key_values=full, use_cache=True).logits
    finally:
        model.set_attn_implementation(attention.NAME)


@pytest.mark.parametrize("backend", ON_CPU)
def test_keeping_everything_is_the_plain_model(tiny_model, backend):
    context, question = ids(CONTEXT, 1), ids(QUESTION, 2)
    shape = CacheShape.from_model(tiny_model)
    keep = torch.ones(shape.layers, shape.heads, CONTEXT, dtype=torch.bool)
    cache = RaggedCache.from_kept_pairs(prefill(tiny_model, context), keep)
    with torch.no_grad(), attention.force_backend(backend):
        plain = tiny_model(torch.cat([context, question], 1)).logits[:, -QUESTION:]
        first = tiny_model(question[:, :3], past_key_values=cache, use_cache=True).logits
        rest = [
            tiny_model(question[:, i : i + 1], past_key_values=cache, use_cache=True).logits
            for i in range(3, 7)
        ]
    torch.testing.assert_close(torch.cat([first, *rest], 1), plain, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == CONTEXT + QUESTION


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("restore", [0, 4])
def test_evicted_cache_is_masked_attention(tiny_model, backend, restore):
    """With the columns beyond the context as restore cache: never evicted, positions go on behind
    them.
    """
    tokens, question = ids(CONTEXT + restore, 1), ids(QUESTION, 2)
    full, keep = prefill(tiny_model, tokens), random_keep(tiny_model, CONTEXT)
    cache = RaggedCache.from_kept_pairs(full, keep)
    assert cache.restore_length == restore and cache.get_seq_length() == CONTEXT + restore
    with torch.no_grad(), attention.force_backend(backend):
        ours = tiny_model(question, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(
        ours, masked_logits(tiny_model, full, keep, question), rtol=1e-4, atol=1e-4
    )


def test_float64_to_ten_digits():
    model = build_model("qwen3").double()
    tokens, question = ids(CONTEXT, 1), ids(QUESTION, 2)
    full, keep = prefill(model, tokens), random_keep(model, CONTEXT)
    cache = RaggedCache.from_kept_pairs(full, keep)
    with torch.no_grad():
        ours = model(question, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(ours, masked_logits(model, full, keep, question), rtol=0, atol=1e-10)


def test_counts_positions_and_bytes(tiny_model):
    full, keep = prefill(tiny_model, ids(CONTEXT + 4, 1)), random_keep(tiny_model, CONTEXT)
    cache, shape = RaggedCache.from_kept_pairs(full, keep), CacheShape.from_model(tiny_model)
    assert cache.lengths.equal(keep.sum(-1))
    assert cache.pairs_held == int(keep.sum()) + 4 * shape.layers * shape.heads
    assert cache.count_prefix_pairs(5) == int(keep[..., :5].sum())
    for layer, kept in zip(cache.layers, keep, strict=True):
        assert layer.positions.dtype == torch.int32
        assert layer.positions.tolist() == [
            column for head in kept for column in head.nonzero()[:, 0].tolist()
        ]
    numbers = (
        cache.pairs_held * 2 * shape.head_dim + int(keep.sum()) + shape.layers * (shape.heads + 1)
    )
    assert cache.nbytes == 4 * numbers
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for y in cache.layers
        for x in y.list_tensors()
    }
    assert sum(storages.values()) == cache.nbytes  # nothing larger is kept alive behind a view


def test_rewind_is_free_and_exact(tiny_model):
    cache = RaggedCache.from_kept_pairs(
        prefill(tiny_model, ids(CONTEXT + 4, 1)), random_keep(tiny_model, CONTEXT)
    )
    with torch.no_grad():
        first = tiny_model(ids(QUESTION, 2), past_key_values=cache, use_cache=True).logits
        cache.reset()
        assert cache.get_seq_length() == CONTEXT + 4
        assert cache.layers[0].keys.equal(cache.layers[0].restore_keys)
        tiny_model(ids(3, 5), past_key_values=cache, use_cache=True)
        cache.crop(-3)
        again = tiny_model(ids(QUESTION, 2), past_key_values=cache, use_cache=True).logits
    assert first.equal(again)


def test_forks_share_the_context_and_nothing_else(tiny_model):
    cache = RaggedCache.from_kept_pairs(
        prefill(tiny_model, ids(CONTEXT + 4, 1)), random_keep(tiny_model, CONTEXT)
    )
    fork = cache.fork(3)
    questions = ids(QUESTION, 2, batch=3)
    with torch.no_grad():
        together = tiny_model(questions, past_key_values=fork, use_cache=True).logits
        alone = [
            tiny_model(row[None], past_key_values=cache.fork(), use_cache=True).logits
            for row in questions
        ]
    assert fork.layers[0].context_keys is cache.layers[0].context_keys
    assert (cache.get_seq_length(), fork.get_seq_length()) == (CONTEXT + 4, CONTEXT + 4 + QUESTION)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "autograd"])
def test_gradients_reach_the_restore_cache_alone(tiny_model, backend):
    full = prefill(tiny_model, ids(CONTEXT + 4, 1))
    for layer in full.layers:
        layer.keys.requires_grad_()
        layer.values.requires_grad_()
    cache = RaggedCache.from_kept_pairs(full, random_keep(tiny_model, CONTEXT))
    with attention.force_backend(backend):
        tiny_model(
            ids(QUESTION, 2), past_key_values=cache.fork(), use_cache=True
        ).logits.square().sum().backward()
    for layer in full.layers:
        assert not layer.keys.grad[:, :, :CONTEXT].any() and layer.keys.grad[:, :, CONTEXT:].any()
        assert (
            not layer.values.grad[:, :, :CONTEXT].any() and layer.values.grad[:, :, CONTEXT:].any()
        )


def test_beams_and_batch_selection(tiny_model):
    """What transformers does to caches between steps."""
    cache = RaggedCache.from_kept_pairs(
        prefill(tiny_model, ids(CONTEXT + 4, 1)), random_keep(tiny_model, CONTEXT)
    ).fork(2)
    with torch.no_grad():
        tiny_model(ids(QUESTION, 2, batch=2), past_key_values=cache, use_cache=True)
    before = cache.layers[0].keys.clone()
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].keys.equal(before.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].keys.equal(before.flip(0))


def test_a_mask_of_too_few_layers_is_refused_with_the_number_it_needs():
    """In a model with sliding windows, a mask is for the layers without one."""
    model = build_model("gemma3")
    full_layers = CacheShape.from_model(model).layers
    assert full_layers < model.config.num_hidden_layers
    full = prefill(model, ids(CONTEXT, 1))
    keep = torch.ones(full_layers + 1, 1, CONTEXT, dtype=torch.bool)
    told = f"has {full_layers + 1} layers, but {full_layers} layers of the cache see the whole text"
    with pytest.raises(ValueError, match=told):
        RaggedCache.from_kept_pairs(full, keep)
