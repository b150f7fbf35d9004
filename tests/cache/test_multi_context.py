"""Questions to several documents in one batch: what each would answer alone, and how the rows are
kept apart.
"""

import warnings
from unittest.mock import patch

import pytest
import torch

import restorekv
from restorekv import ask_many, compress
from restorekv.cache.multi_context import MultiContextLayer, fork_caches
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.generation import decoding
from restorekv.model.prompt import encode_question
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.compressing import compress_with
from tests.helpers.models import build_model, greedy

TEXTS = [
    "The code of the red house is seven. The blue house has a green door. " * 4,
    "Who lives in the red house? Nobody lives there. The door is blue. " * 9,
    "The green house has seven doors and no code at all. " * 2,
]
QUESTIONS = [
    "Which code?",
    "Who lives in the blue house, and why?",
    "?",
    "Tell me about the red house.",
]


@pytest.fixture
def made(tiny_model, tiny_tokenizer):
    """Three documents of different lengths, ratios, methods and numbers of restore tokens."""
    adapter = RestoreAdapter.create(tiny_model, 3)
    with torch.no_grad():
        adapter.embeddings.mul_(30)  # so that a wrong mask over restore tokens shows
    ways = [{"ratio": 0.5, "adapter": adapter}, {"ratio": 0.2, "adapter": None, "evictor": "knorm"}]
    ways.append({"ratio": 0.9, "adapter": adapter, "restore_tokens": 1, "kv_dtype": "int8"})
    with warnings.catch_warnings():
        # The first restore token was not trained to work alone.
        warnings.simplefilter("ignore", RestoreKVWarning)
        return [
            compress_with(tiny_model, tiny_tokenizer, text, **way)
            for text, way in zip(TEXTS, ways, strict=True)
        ]


def test_every_document_answers_as_it_does_alone(made):
    asked = [
        (made[0], QUESTIONS),
        (made[1], QUESTIONS[1]),
        (made[2], QUESTIONS[:2]),
        (made[0], [QUESTIONS[3]]),
    ]
    with patch.object(decoding, "fork_caches", wraps=fork_caches) as batches:
        found = ask_many(asked, max_new_tokens=12)
    assert len(batches.call_args_list) == 1  # one batch
    assert found == [each.ask(given, 12) for each, given in asked]
    assert isinstance(found[1], str) and [len(own) for own in (found[0], found[2], found[3])] == [
        4,
        2,
        1,
    ]
    assert len({answer for own in found for answer in ([own] if isinstance(own, str) else own)}) > 4


def test_more_questions_than_a_batch_holds(made):
    asked = [
        (each, [f"{question} {n}" for n in range(3) for question in QUESTIONS]) for each in made
    ]
    assert ask_many(asked, max_new_tokens=3) == [each.ask(given, 3) for each, given in asked]


def test_rows_end_on_their_own(made, tiny_tokenizer):
    """Documents whose rows are done leave the batch, first, middle or last."""
    model = made[0].model
    rows = [(each, question) for each in made for question in QUESTIONS[:2]]
    prompts = [encode_question(tiny_tokenizer, each.context, question) for each, question in rows]
    caches, limits = [each.cache for each, _ in rows], [9, 1, 2, 2, 5, 9]
    model.generation_config.eos_token_id = 319
    together = decoding.generate_ids(model, tiny_tokenizer, caches, prompts, limits)
    for row, limit in enumerate(limits):
        alone = decoding.generate_ids(
            model, tiny_tokenizer, caches[row], prompts[row : row + 1], limit
        )[0]
        assert together[row].tolist() == alone.tolist()


def test_a_pass_sees_every_row_that_still_runs_and_no_other(made, tiny_tokenizer):
    model = made[0].model
    prompts = [encode_question(tiny_tokenizer, each.context, "Which code?")[0] for each in made]
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with hook:
        greedy(model, [each.cache for each in made], prompts, [4, 2, 1], set())
    longest = max(len(prompt) for prompt in prompts)
    assert sizes == [3 * longest, 2, 1, 1]


def test_one_cache_is_forked_and_several_are_joined(made):
    caches = [each.cache for each in made]
    # Without states, rows of any lengths share a fork.
    assert fork_caches([caches[0]] * 3, [4, 5, 6]).layers[0].keys.shape[0] == 3
    joint = fork_caches([caches[0], caches[0], caches[1]], [4, 4, 4])
    layer = joint.layers[0]
    assert isinstance(layer, MultiContextLayer) and layer.rows == [2, 1] and layer.columns == 3
    assert all(
        part.context_keys is cache.layers[0].context_keys
        for part, cache in zip(layer.contexts, caches[:2], strict=True)
    )
    assert layer.shape == (3, layer.heads, 3, layer.contexts[0].keys.shape[-1])


def test_masks_belong_to_tails_by_their_last_columns(made):
    layer = fork_caches([each.cache for each in made], [2] * len(made)).layers[0]
    mask = torch.arange(3 * 2 * 3).view(3, 1, 2, 3) % 2 == 0
    query = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 4, 2, 16)
    parts = list(layer.split_query(query, mask))
    assert [own.shape[-1] for _, _, own in parts] == [3, 0, 1]
    assert parts[0][2].equal(mask[:1]) and parts[2][2].equal(mask[2:, ..., 2:])
    assert [float(rows.mean()) for _, rows, _ in parts] == [0.0, 1.0, 2.0]
    assert all(own is None for _, _, own in layer.split_query(query, None))


def test_other_models_and_templates_are_refused(made, tiny_tokenizer):
    other = compress(
        build_model("llama", seed=3), tiny_tokenizer, TEXTS[0], ratio=0.5, adapter=None
    )
    with pytest.raises(RestoreKVError, match="one model"):
        ask_many([(made[0], "a?"), (other, "b?")])
    with patch.object(restorekv.many_contexts, "hash_template", side_effect=lambda one: id(one)):
        strange = restorekv.CompressedContext(
            made[0].model, object(), *list(vars(made[0]).values())[2:]
        )
        with pytest.raises(RestoreKVError, match="one chat template"):
            ask_many([(made[0], "a?"), (strange, "b?")])


def test_nothing_asked_nothing_answered(made):
    assert ask_many([]) == [] and ask_many([(made[0], []), (made[1], [])]) == [[], []]
    with pytest.raises(RestoreKVError, match="max_new_tokens"):
        ask_many([(made[0], "a?")], max_new_tokens=0)
