"""Decode steps of fixed work: the same answers as with growing tails, nothing that a CUDA graph
cannot hold, and few graphs of the compiler.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.generation.answers import answer_greedily, answer_questions
from restorekv.generation.fixed_steps import FixedSteps
from restorekv.model.attention import dispatch
from restorekv.model.prompt import encode_question, make_context
from tests.helpers.decoding import QUESTIONS, TEXT, make_cache
from tests.helpers.models import build_model, greedy


@pytest.fixture
def case(tiny_model, tiny_tokenizer):
    context = make_context(tiny_tokenizer, TEXT)
    return tiny_model, tiny_tokenizer, context, make_cache(tiny_model, context)


@pytest.mark.parametrize("limits", [20, [1, 7, 20], [1, 1, 1]])
def test_answers_are_those_of_growing_tails(case, limits):
    questions = QUESTIONS[:3]
    plain = answer_greedily(*case, questions, limits)
    assert answer_greedily(*case, questions, limits, graph=True) == plain
    assert answer_greedily(*case, questions[:1], 20, graph=True) == answer_greedily(
        *case, questions[:1], 20
    )
    assert answer_greedily(*case, questions, limits) == plain  # the cache itself is as it was


def test_rows_that_have_ended_go_on_unheard(case):
    """A row that has ended is still computed, but what it writes is not returned, and other rows do
    not change.
    """
    model, tokenizer, context, cache = case
    prompts = [encode_question(tokenizer, context, question)[0] for question in QUESTIONS[:3]]
    plain = greedy(model, [cache] * 3, prompts, [20] * 3, set())
    stops = {plain[0][4], plain[1][9]}
    ended = greedy(model, [cache] * 3, prompts, [20] * 3, stops)
    assert {len(row) for row in ended} != {20}
    assert greedy(model, [cache] * 3, prompts, [20] * 3, stops, graph=True) == ended


def test_documents_of_different_tails(tiny_model, tiny_tokenizer):
    made = []
    for text, restore in ((TEXT, 4), (TEXT[::-1], 0)):
        context = make_context(tiny_tokenizer, text)
        made.append((context, make_cache(tiny_model, context, restore)))
    rows = [(*each, question) for each in made for question in QUESTIONS[:2]]
    plain = answer_questions(tiny_model, tiny_tokenizer, rows, 12)
    assert answer_questions(tiny_model, tiny_tokenizer, rows, 12, graph=True) == plain


class Told(TorchDispatchMode):
    """A mode that fails where the capture of a graph would: at a number that is read by the host,
    or at a tensor from another device.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        assert "_local_scalar_dense" not in name and "nonzero" not in name, name
        devices = {
            x.device.type for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)
        }
        assert devices <= {"meta"}, (name, devices)
        return function(*args, **(kwargs or {}))


def meta_steps(model):
    """Return steps on the meta device, where tensors have shapes and no numbers."""
    layers, offsets = [], torch.tensor([0, 3, 8], dtype=torch.int32)
    for _ in range(2):
        context, restored = (
            torch.empty(2, 8, 16, device="meta"),
            torch.empty(2, 1, 2, 4, 16, device="meta"),
        )
        layers.append(RaggedLayer(*context, offsets, offsets.to("meta"), 30, *restored).fork(2))
    ids = torch.zeros(2, 1, dtype=torch.long, device="meta")
    return FixedSteps(
        model, RaggedCache(layers), ids, ids + 34, ids.new_ones(2, 4, dtype=torch.bool), 5
    )


def test_a_step_reads_nothing_on_the_host(monkeypatch):
    """Check the second step, which a GPU captures, except for attention: see test_tiles.py."""
    model = build_model("qwen3", num_hidden_layers=2).to("meta")
    monkeypatch.setattr(dispatch, "choose_backend", lambda *_: shaped)
    # Transformers 5.2 asks both of this device,.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which they do not know
    steps = meta_steps(model)
    steps()
    with Told():
        steps()


def shaped(query, layer, mask, scale):
    """Return an output of attention with the right shape and no numbers."""
    assert mask.shape[-1] == layer.columns == 4 + 5
    return torch.empty_like(query)


@pytest.mark.slow
def test_the_compiler_traces_few_graphs_whole(tiny_tokenizer):
    model = build_model("qwen3")
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(model, context)
    prompts = [encode_question(tiny_tokenizer, context, question)[0] for question in QUESTIONS[:2]]
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    # The questions and a step; growing tails are a few sizes more.
    for graph, most in ((True, 2), (False, 5)):
        expected = greedy(model, [cache] * 2, prompts, [30, 30], set(), graph=graph)
        torch._dynamo.reset()
        traced.clear()
        assert greedy(compiled, [cache] * 2, prompts, [30, 30], set(), graph=graph) == expected
        assert len(traced) <= most
