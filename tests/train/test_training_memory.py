"""What a training step keeps for its backward pass and computes at once: nothing that grows with
the context.

Counted tensor by tensor, so the figures are exact; and the path that keeps nothing gives the same
gradients.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.eviction import Eviction
from restorekv.model import attention
from restorekv.model.attention import autograd, cascade, dispatch, reference
from restorekv.model.prefill import prefill, read_only_view
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.attention import build, make_layer
from tests.helpers.models import build_model

WORDS = "the code of the red house is seven; who lives in the blue house? "
QUESTIONS = torch.randint(3, 300, (3, 12), generator=torch.Generator().manual_seed(0))


def make_adapter(model):
    """One whose LoRA does something."""
    adapter = RestoreAdapter.create(model, 4, rank=2)
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return adapter


def student_loss(model, prepared, adapter):
    """The student's cache and a loss of its answers to three questions."""
    student = prepared.with_restore_cache(adapter).evict(0.3)
    return student, model(QUESTIONS, past_key_values=student.fork(3)).logits.square().mean()


def storages(*tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def kept_for_backward(model, tokenizer, words):
    """Bytes kept by a restore pass and a student, beside weights and the frozen context; and the
    context's length.
    """
    prepared, adapter, kept = (
        Eviction.make("knorm").prepare(model, tokenizer, WORDS * words),
        make_adapter(model),
        {},
    )

    def pack(tensor):
        # Held, so that no address comes twice.
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        student, loss = student_loss(model, prepared, adapter)
    fixed = storages(
        *model.parameters(),
        *(x for layer in prepared.full.layers for x in (layer.keys, layer.values)),
    )
    for layer in student.layers:
        fixed |= storages(layer.context_keys, layer.context_values)
    loss.backward()
    assert adapter.embeddings.grad.any()
    return sum(
        storage.nbytes() for place, storage in kept.items() if place not in fixed
    ), prepared.context.text_tokens


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_nothing_kept_for_the_backward_pass_grows_with_the_context(
    tiny_tokenizer, monkeypatch, family
):
    monkeypatch.setattr(dispatch, "MAX_COPY_BYTES", 0)
    model = build_model(family)
    short, few = kept_for_backward(model, tiny_tokenizer, 3)
    long, many = kept_for_backward(model, tiny_tokenizer, 24)
    assert many > 7 * few
    assert long == short


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made inside the block."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.elements = max(self.elements, result.numel())
        return result


def test_blocks_bound_what_is_computed_at_once(monkeypatch):
    heads, groups, queries, tail, kept, dim = 2, 3, 40, 44, 5000, 4
    monkeypatch.setattr(autograd, "BLOCK", 50_000)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    query, keys, values = (
        draw(*shape, dim).requires_grad_()
        for shape in ((1, heads, groups, queries), (1, heads, tail), (1, heads, tail))
    )
    keep = torch.ones(heads, kept, dtype=torch.bool)
    layer = make_layer(keep, draw(heads, kept, dim), draw(heads, kept, dim), keys, values, None)
    with Largest() as largest:
        autograd.attend_ragged(query, layer, None, 0.5).float().square().sum().backward()
    logits = heads * groups * queries * (kept + tail)
    assert 20 * largest.elements < logits and largest.elements <= 50_000


@pytest.mark.parametrize("block", [1, 100])
def test_blocks_of_rows_are_exact(monkeypatch, block):
    """Gradients by finite differences: with a bias, padding, and a query that sees nothing in an
    empty head.
    """
    monkeypatch.setattr(autograd, "BLOCK", block)
    case = {
        "seed": 4,
        "lengths": [3, 0, 9],
        "batch": 2,
        "queries": 3,
        "tail": 5,
        "bias": True,
        "padding": True,
    }
    keep, leaves, fixed, bias, mask = build(case)
    mask[1, :, 0] = False

    def run(query, tail_keys, tail_values):
        layer = make_layer(keep, **fixed, tail_keys=tail_keys, tail_values=tail_values, bias=bias)
        return autograd.attend_ragged(query, layer, mask, 0.3)

    assert torch.autograd.gradcheck(
        run, [leaf.requires_grad_() for leaf in leaves.values()], fast_mode=True
    )


def test_both_paths_give_the_same_loss_and_gradients(tiny_model, tiny_tokenizer, monkeypatch):
    prepared = Eviction.make("knorm").prepare(tiny_model, tiny_tokenizer, WORDS * 4)
    found = []
    for bound in (dispatch.MAX_COPY_BYTES, 0):
        monkeypatch.setattr(dispatch, "MAX_COPY_BYTES", bound)
        adapter = make_adapter(tiny_model)
        loss = student_loss(tiny_model, prepared, adapter)[1]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in adapter.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 20
    for copied, referred in zip(*found, strict=True):
        torch.testing.assert_close(
            referred, copied, rtol=1e-3, atol=1e-3 * float(copied.abs().max())
        )


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_restore_pass_leaves_the_full_cache_alone(tiny_model, tokens):
    """Without gradients it is bit for bit the pass that appends to a plain cache."""
    ids = torch.randint(3, 300, (1, 30), generator=torch.Generator().manual_seed(0))
    adapter, full, grown = (
        RestoreAdapter.create(tiny_model, tokens),
        prefill(tiny_model, ids),
        prefill(tiny_model, ids),
    )
    with torch.no_grad():
        adapter.run_restore_pass(grown)
        caches = {True: read_only_view(full), False: RaggedCache.from_full_cache(full)}
        for cache in caches.values():
            adapter.run_restore_pass(cache)
    assert full.get_seq_length() == 30
    for plain, joined, apart in zip(
        grown.layers, caches[True].layers, caches[False].layers, strict=True
    ):
        assert joined.keys.equal(plain.keys[:, :, 30:]) and joined.values.equal(
            plain.values[:, :, 30:]
        )
        torch.testing.assert_close(apart.keys, joined.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(apart.values, joined.values, rtol=1e-4, atol=1e-4)


def test_a_whole_cache_is_a_view_even_of_slices(tiny_model):
    ids = torch.randint(3, 300, (1, 30), generator=torch.Generator().manual_seed(0))
    full = prefill(tiny_model, ids)
    full.layers[1].keys = full.layers[1].keys[:, :, :20]
    full.layers[1].values = full.layers[1].values[:, :, :20]
    expected = [layer.keys.clone() for layer in full.layers]
    whole = RaggedCache.from_full_cache(full)
    for layer, dense, keys in zip(whole.layers, full.layers, expected, strict=True):
        assert storages(layer.context_keys, layer.context_values) == storages(
            dense.keys, dense.values
        )
        assert dense.keys.equal(keys) and layer.context_keys.equal(keys[0].flatten(0, 1))


def test_the_backend_follows_gradients():
    case = {
        "seed": 0,
        "lengths": [4, 2, 7],
        "batch": 2,
        "queries": 2,
        "tail": 3,
        "bias": False,
        "padding": False,
    }
    keep, leaves, fixed, _, _ = build(case)
    query = leaves.pop("query")
    layer = make_layer(keep, **fixed, **leaves, bias=None)
    chosen = lambda: attention.choose_backend(query, layer)  # noqa: E731
    assert chosen() == cascade.attend_ragged
    query.requires_grad_()
    assert chosen() == autograd.attend_ragged
    with torch.no_grad():
        assert chosen() == cascade.attend_ragged
    layer.keys = layer.keys.to(torch.bfloat16)  # no kernel for the CPU mixes dtypes
    assert chosen() == autograd.attend_ragged
    with attention.force_backend("reference"):
        assert chosen() == reference.attend_ragged
