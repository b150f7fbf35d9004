"""Answers over full caches in padded batches are the same as those written one row at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st

from restorekv.cache.ragged import RaggedCache
from restorekv.data.self_study import GreedyUntilLoop, SelfStudy
from restorekv.errors import RestoreKVError
from restorekv.generation import padded
from restorekv.generation.decoding import generate_ids
from restorekv.generation.padded import generate_padded
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, encode_question, make_context
from tests.helpers.data_world import settings
from tests.helpers.decoding import QUESTIONS, TEXT
from tests.helpers.models import build_model

LIMITS = [9, 3, 9, 14, 1, 9]


@pytest.fixture
def case(tiny_model, tiny_tokenizer):
    """Three texts of different lengths with two questions each."""
    contexts = [make_context(tiny_tokenizer, text) for text in (TEXT, TEXT[:90], TEXT[::-1] + TEXT)]
    contexts = [context for context in contexts for _ in range(2)]
    prompts = []
    for place, context in enumerate(contexts):
        question = QUESTIONS[place % len(QUESTIONS)] * (1 + place % 3)
        prompts.append(encode_question(tiny_tokenizer, context, question)[0])
    return tiny_model, tiny_tokenizer, contexts, prompts


def write_alone(model, tokenizer, contexts, prompts, limits, samplers=None):
    caches = [
        RaggedCache.from_full_cache(prefill(model, context.ids, chunk=10**6))
        for context in contexts
    ]
    written = generate_ids(model, tokenizer, caches, prompts, limits, samplers=samplers, batch=1)
    return [ids.tolist() for ids in written]


@pytest.mark.parametrize("most_positions", [1, 700, 10**6])
def test_every_row_is_written_as_if_it_were_alone(case, most_positions):
    written = generate_padded(*case, LIMITS, most_positions=most_positions)
    assert [ids.tolist() for ids in written] == write_alone(*case, LIMITS)
    assert all(len(ids) <= limit for ids, limit in zip(written, LIMITS, strict=True))


@rules(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), max_size=12), st.integers(1, 20))
def test_batches_hold_what_fits_in_the_order_of_limits_and_lengths(rows, most):
    limits = [limit for limit, _ in rows]
    lengths = [length for _, length in rows]
    nothing = torch.empty(1, 0, dtype=torch.long)
    contexts = [Context(torch.zeros(1, length), 0, nothing) for length in lengths]
    batches = padded._split_rows(contexts, limits, most)
    order = [row for batch in batches for row in batch]
    assert sorted(order) == list(range(len(rows)))
    assert [rows[row] for row in order] == sorted(rows)
    for number, batch in enumerate(batches):
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= most
        for after in batches[number + 1 : number + 2]:
            # The next row would not have fitted.
            assert (len(batch) + 1) * max(longest, lengths[after[0]]) > most


def test_an_answer_that_repeats_itself_ends(case):
    watches, samplers = ([GreedyUntilLoop(2) for _ in LIMITS] for _ in range(2))
    limits = [40] * len(LIMITS)
    written = generate_padded(*case, limits, watches)
    assert [ids.tolist() for ids in written] == write_alone(*case, limits, samplers)
    assert min(len(ids) for ids in written) < 40


def test_a_stop_ends_its_row_alone(case, monkeypatch):
    limits = [12] * len(LIMITS)
    free = write_alone(*case, limits)
    stop = free[0][3]
    monkeypatch.setattr(padded, "get_stop_ids", lambda model, tokenizer: {stop})
    for ids, whole in zip(generate_padded(*case, limits), free, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert ids.tolist() == whole[:end]


def test_logits_that_name_no_token_are_refused(case):
    model = case[0]
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(RestoreKVError, match="finite"):
        generate_padded(*case, LIMITS)


def test_a_teacher_pads_on_a_gpu_alone(tiny_tokenizer):
    study = SelfStudy(build_model("llama"), tiny_tokenizer, settings({}))
    assert not study.pads
    study.model.to("meta")
    assert study.pads
    hybrid = SelfStudy(build_model("gemma3").to("meta"), tiny_tokenizer, settings({}))
    assert not hybrid.pads
