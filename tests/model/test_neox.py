"""GPT-NeoX (Pythia), whose layers have other names than Llama's: one projection for query, key and
value, `dense` for the output, `attention` for the whole, and a cache in `layer_past`.
"""

import copy
from dataclasses import replace

import pytest
import torch

from restorekv import CompressedContext, compose
from restorekv.compression.eviction import make_compressor
from restorekv.errors import ModelError, RestoreKVError
from restorekv.model.cache_argument import find_cache
from restorekv.model.prompt import Context
from restorekv.model.shape import find_attention
from restorekv.train.loop import train_adapter
from tests.helpers import decoders, exactness
from tests.helpers.compressing import compress_with
from tests.helpers.exactness import TOKENIZER, measure_error, random_ids, read_question
from tests.helpers.training import CONFIG, EXAMPLES, losses

TEXT, QUESTION, PREFIX = 90, 12, 3
LONG = "The code of the red house is seven, and nobody lives there. " * 5
EVICTORS = [
    *["kvzip:chunk=32", "kvzip+:chunk=32", "contrastkv:chunk=32", "snapkv:window=8", "h2o"],
    *["keydiff", "knorm", "streaming", "tova", "random"],
]


@pytest.fixture
def model():
    return decoders.build("gpt_neox", max_position_embeddings=4096)


@pytest.mark.parametrize("spec", EVICTORS)
def test_a_question_sees_what_every_evictor_keeps(model, spec):
    context = Context(random_ids(TEXT), PREFIX, random_ids(2, 9))
    cache = make_compressor(spec).prepare(model, TOKENIZER, context).evict(0.4)
    asked = random_ids(QUESTION, 1)
    whole = torch.cat([context.ids, asked], -1)
    plain = exactness.plain_copy(decoders.build("gpt_neox", max_position_embeddings=4096))
    with torch.no_grad():
        own = read_question(model, cache, asked)
        expected = exactness.oracle(plain, whole, cache.mark_held(TEXT))[:, TEXT:]
        everything = plain(input_ids=whole).logits[:, TEXT:]
    assert measure_error(own, expected) < 2e-5
    assert measure_error(own, everything) > 1e-3


@pytest.mark.parametrize("kind", ["gpt_neox", "phi"])
def test_kvzip_plus_finds_the_output_projection(kind):
    """It has the name `dense` in both."""
    model = decoders.build(kind, max_position_embeddings=4096)
    context = Context(random_ids(TEXT), PREFIX, random_ids(2, 9))
    plus = make_compressor("kvzip+:chunk=32")
    found = plus.prepare(model, TOKENIZER, context).scores
    renamed = copy.deepcopy(model)
    for layer in renamed.base_model.layers:
        attention = find_attention(layer)
        attention.o_proj = attention.dense
        attention.dense = torch.nn.Sequential(attention.dense)  # whose matrix is not asked for
    assert plus.prepare(renamed, TOKENIZER, context).scores.equal(found)
    plain = make_compressor("kvzip:chunk=32").prepare(model, TOKENIZER, context).scores
    assert not plain.equal(found)


def test_expected_attention_needs_a_projection_of_queries(model, tiny_tokenizer):
    with pytest.raises(ModelError, match="has no q_proj"):
        compress_with(
            model, tiny_tokenizer, LONG, ratio=0.4, evictor="expected-attention", adapter=None
        )


def test_caches_are_saved_grown_and_composed(model, tiny_tokenizer, tmp_path):
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.5, adapter=None)
    small.append("It was sold in May.")
    answer = small.ask("who?", max_new_tokens=6)
    small.save(tmp_path / "doc.rkv")
    loaded = CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)
    assert loaded.ask("who?", max_new_tokens=6) == answer
    parts = [
        compress_with(model, tiny_tokenizer, text, ratio=1, adapter=None)
        for text in (LONG, "The house is blue. " * 6)
    ]
    assert compose(parts).ask("what?", max_new_tokens=6)


def test_adapters_are_trained_and_restore(model, tiny_tokenizer, tmp_path):
    targets = ("query_key_value", "dense", "dense_h_to_4h")
    config = replace(CONFIG, steps=24, targets=targets, hidden_weight=0.1, attention_weight=0.1)
    adapter = train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    curve = losses(tmp_path / "run")
    assert sum(curve[-3:]) < sum(curve[:3])
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.2, adapter=adapter)
    assert small.ask("who?", max_new_tokens=3) is not None
    assert small.cache.restore_length == config.restore_tokens


def test_default_targets_say_what_the_model_has(model, tiny_tokenizer, tmp_path):
    with pytest.raises(
        RestoreKVError,
        match=r"in the shell\): dense, dense_4h_to_h, dense_h_to_4h, query_key_value",
    ):
        train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")


def test_the_cache_of_a_layer_is_found():
    cache = object()
    for name in ("cache", "past_key_values", "layer_past"):
        assert find_cache({name: cache, "use_cache": True}) is cache
    assert find_cache({"use_cache": True, "layer_past": None}) is None
