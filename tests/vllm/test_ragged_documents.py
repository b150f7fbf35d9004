"""Cache files as vLLM's documents, without vLLM: what is served, and what is never served."""

import copy

import pytest
import torch
import transformers

from restorekv import CompressionConfig, compress
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.model.rope import shift_keys
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter
from restorekv.storage import cache_file
from restorekv.vllm import chat, prompt
from restorekv.vllm.document_store import find_heads
from restorekv.vllm.ragged_documents import (
    PLACEHOLDERS,
    build_rope_model,
    gather_pairs,
    identify,
    load_file,
)
from restorekv.vllm.ragged_store import RaggedStore, count_pages_of_largest_rank
from tests.helpers.document_pairs import describe_engine_model
from tests.helpers.models import build_model

TEXTS = {
    "red": "The red house belongs to Ada, who has seven trees. " * 6,
    "blue": "The blue house belongs to Bob, who has nine trees. " * 6,
}
QUESTION = "Who lives in the red house?"


@pytest.fixture
def place(tiny_model, tiny_tokenizer, tmp_path):
    """The folder of two cache files with texts of the same length."""
    for name, text in TEXTS.items():
        compress(tiny_model, tiny_tokenizer, text, ratio=0.3, adapter=None).save(
            tmp_path / f"{name}.rkv"
        )
    return tmp_path


def test_a_prompt_finds_its_document(place, tiny_model, tiny_tokenizer):
    store = RaggedStore(place, describe_engine_model(tiny_model))
    for name in TEXTS:
        ids = prompt(place / f"{name}.rkv", QUESTION, tiny_tokenizer)
        found = store.find_document(ids)
        assert found.path.stem == name and tuple(ids[:PLACEHOLDERS]) == found.ids
        assert store.find_document(ids, name) == store.find_document(ids, found.name) == found
        file = cache_file.open_cache_file(place / f"{name}.rkv")
        assert found.lengths.equal(file.make_cache().lengths)
    assert (
        store.find_document(tiny_tokenizer.encode(QUESTION)) is None
        and store.find_document([]) is None
    )


def test_a_prompt_is_placeholders_and_the_question(place, tiny_model, tiny_tokenizer):
    file = cache_file.open_cache_file(place / "red.rkv")
    ids = prompt(file, QUESTION, tiny_tokenizer, "It is", [("Who?", "Ada.")])
    text = tiny_tokenizer.decode(ids[PLACEHOLDERS:])
    assert all(part in text for part in ("Who?", "Ada.", QUESTION))
    assert text.endswith("It is")
    body = chat(file, QUESTION, tiny_tokenizer)
    assert body["kv_transfer_params"] == {
        "prompt_token_ids": prompt(file, QUESTION, tiny_tokenizer),
        "document": identify(file).name,
    }


@pytest.mark.parametrize("portable", [False, True])
def test_prompts_of_another_tokenizer_are_refused(
    place, tiny_model, tiny_tokenizer, tmp_path, portable
):
    """Their ids would mean other words, or would not end the user's turn."""
    paths = [place / "red.rkv"]
    if portable:
        config = CompressionConfig(allocation="per-head")
        small = compress(
            tiny_model, tiny_tokenizer, TEXTS["red"], ratio=0.3, adapter=None, config=config
        )
        paths = [tmp_path / "red.safetensors"]
        small.portable().save(paths[0])
    else:
        paths.append([place / "blue.rkv", place / "red.rkv"])
    with_template = copy.deepcopy(tiny_tokenizer)
    with_template.chat_template = tiny_tokenizer.chat_template.replace("assistant", "model")
    base = copy.deepcopy(tiny_tokenizer)
    base.chat_template = None
    trained = tiny_tokenizer.train_new_from_iterator(["assistant Ada tree house " * 9], 300)
    for path in paths:
        assert prompt(path, QUESTION, copy.deepcopy(tiny_tokenizer))
        for other in (with_template, base):
            for ask in (prompt, chat):
                with pytest.raises(
                    CacheFileError, match="was made with a different chat template;"
                ):
                    ask(path, QUESTION, other)
        with pytest.raises(CacheFileError, match="was made with a different tokenizer;"):
            prompt(path, QUESTION, trained)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: [*ids[:9], ids[9] ^ 1, *ids[10:]], "the store does not have"),
        (lambda ids: ids[:PLACEHOLDERS], "no question"),
    ],
)
def test_wrong_prompts_are_refused(place, tiny_model, tiny_tokenizer, change, message):
    store = RaggedStore(place, describe_engine_model(tiny_model))
    ids = prompt(place / "red.rkv", QUESTION, tiny_tokenizer)
    with pytest.raises(RestoreKVError, match=message):
        store.find_document(change(ids))
    with pytest.raises(RestoreKVError, match=r"of red\.rkv, but the request names blue"):
        store.find_document(ids, "blue")
    with pytest.raises(RestoreKVError, match="does not begin with placeholders"):
        store.find_document([1, 2, 3], "red")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 9}, "for layers 3, but the engine's model has 9"),
        ({"rope": {"rope_theta": 1.0}}, "for rope"),
        ({"fingerprint": "0" * 16}, "with other weights"),
    ],
)
def test_documents_of_another_model_are_refused(
    place, tiny_model, tiny_tokenizer, changed, message
):
    store = RaggedStore(place, describe_engine_model(tiny_model, **changed))
    with pytest.raises(RestoreKVError, match=message):
        store.find_document(prompt(place / "red.rkv", QUESTION, tiny_tokenizer))


def test_too_small_a_vocabulary_is_refused(place, tiny_model):
    with pytest.raises(RestoreKVError, match="vocabulary of 256"):
        RaggedStore(place, describe_engine_model(tiny_model, vocabulary=255))
    with pytest.raises(RestoreKVError, match="not a folder"):
        RaggedStore(place / "red.rkv", describe_engine_model(tiny_model))


def test_damaged_and_replaced_files_are_never_served(place, tiny_model, tiny_tokenizer):
    store = RaggedStore(place, describe_engine_model(tiny_model))
    ids = prompt(place / "red.rkv", QUESTION, tiny_tokenizer)
    found = store.find_document(ids)
    (place / "blue.rkv").rename(place / "red.rkv")
    with pytest.raises(CacheFileError, match="was replaced by a different document"):
        load_file(found.path, found.name)
    content = bytearray((place / "red.rkv").read_bytes())
    content[-40] ^= 1
    (place / "red.rkv").write_bytes(content)
    with pytest.raises(RestoreKVError, match="does not have"):
        RaggedStore(place, describe_engine_model(tiny_model)).find_document(ids)


def test_a_document_that_was_renamed_is_found_again(place, tiny_model, tiny_tokenizer):
    store = RaggedStore(place, describe_engine_model(tiny_model))
    red, blue = (prompt(place / f"{name}.rkv", QUESTION, tiny_tokenizer) for name in TEXTS)
    assert store.find_document(red).path.name == "red.rkv"
    (place / "red.rkv").rename(place / "old.rkv")
    (place / "blue.rkv").rename(place / "red.rkv")
    assert store.find_document(red).path.name == "old.rkv"
    assert store.find_document(blue).path.name == "red.rkv"
    # A copy takes the place of one that is overwritten.
    (place / "copy.rkv").write_bytes((place / "old.rkv").read_bytes())
    (place / "old.rkv").write_bytes((place / "red.rkv").read_bytes())
    found = store.find_document(red)
    assert found.path.name == "copy.rkv" and load_file(found.path, found.name)


def test_the_position_of_the_question_belongs_to_a_document(tiny_model, tiny_tokenizer, tmp_path):
    """Keys are moved by it, so files of the same text with different offsets are two documents."""
    names = set()
    for offset in (0, 500):
        small = compress(
            tiny_model,
            tiny_tokenizer,
            TEXTS["red"],
            ratio=0.3,
            adapter=None,
            config=CompressionConfig(offset=offset),
        )
        small.save(tmp_path / "moved.rkv")
        names.add(identify(cache_file.open_cache_file(tmp_path / "moved.rkv")).name)
    assert len(names) == 2


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"allocation": "per-head"}])
def test_pairs_are_those_of_the_cache_at_other_positions(tiny_model, tiny_tokenizer, options):
    config = CompressionConfig(**options)
    small = compress(
        tiny_model, tiny_tokenizer, TEXTS["red"], ratio=0.3, adapter=None, config=config
    )
    pairs = gather_pairs(small.cache, tiny_model, slice(None), torch.float32)
    distance = PLACEHOLDERS - small.cache.get_seq_length()
    for layer, keys, values in zip(small.cache.layers, pairs.keys, pairs.values, strict=True):
        assert values.equal(layer.context_values[:])
        assert torch.allclose(keys, shift_keys(tiny_model, layer.context_keys[:], distance))
    assert pairs.lengths.equal(small.cache.lengths)


def test_restore_caches_are_pairs_of_every_head(tiny_model, tiny_tokenizer):
    adapter = RestoreAdapter.create(tiny_model, 4, rank=2)
    small = compress(tiny_model, tiny_tokenizer, TEXTS["red"], ratio=0.3, adapter=adapter)
    pairs = gather_pairs(small.cache, tiny_model, slice(None), torch.float32)
    count = small.cache.restore_length
    assert count and pairs.lengths.equal(small.cache.lengths + count)
    last = pairs.values[0][-count:]
    assert last.equal(small.cache.layers[0].restore_values[0, -1])


def test_a_rank_gets_its_heads(tiny_model, tiny_tokenizer):
    small = compress(tiny_model, tiny_tokenizer, TEXTS["red"], ratio=0.3, adapter=None)
    whole = gather_pairs(small.cache, tiny_model, slice(None), torch.float32)
    second = gather_pairs(small.cache, tiny_model, find_heads(1, 2, 2), torch.float32)
    assert second.lengths.equal(whole.lengths[:, 1:])
    first = int(whole.lengths[0, 0])
    assert second.keys[0].equal(whole.keys[0][first:])
    largest = max(int((-(-whole.lengths[:, [head]] // 16)).clamp(min=1).sum()) for head in range(2))
    assert count_pages_of_largest_rank(whole.lengths, 2, 16) == largest


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_theta": 1e4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_tiny_model_rotates_as_the_large_one(family, rope):
    model = build_model(family, rope_parameters=rope)
    keys = torch.randn(5, CacheShape.from_model(model).head_dim)
    assert shift_keys(build_rope_model(model.config), keys, -77).equal(shift_keys(model, keys, -77))


@pytest.mark.parametrize("kind", ["Qwen3MoeConfig", "MixtralConfig"])
def test_a_tiny_model_has_one_expert(kind):
    config = getattr(transformers, kind)(num_hidden_layers=4, vocab_size=64, head_dim=64)
    with torch.device("meta"):
        small = build_rope_model(config)
    assert sum(each.numel() for each in small.parameters()) < 1_000_000
    # It runs once, to be checked.
    shift_keys(build_rope_model(config), torch.zeros(1, 64), 1)


def test_a_bias_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    small = compress(
        tiny_model, tiny_tokenizer, TEXTS["red"], ratio=0.3, adapter=None, evictor="am-fast"
    )
    small.save(tmp_path / "fitted.rkv")
    with pytest.raises(RestoreKVError, match="add a bias"):
        gather_pairs(small.cache, tiny_model, slice(None), torch.float32)
    store = RaggedStore(tmp_path, describe_engine_model(tiny_model))
    with pytest.raises(RestoreKVError, match="whose bias"):
        store.find_document(prompt(tmp_path / "fitted.rkv", QUESTION, tiny_tokenizer))


def test_numbers_that_a_dtype_cannot_hold_are_refused(tiny_model, tiny_tokenizer):
    small = compress(tiny_model, tiny_tokenizer, TEXTS["red"], ratio=0.3, adapter=None)
    small.cache.layers[0].context_values[0, 0] = 1e30
    with pytest.raises(RestoreKVError, match=r"too large for torch\.float16"):
        gather_pairs(small.cache, tiny_model, slice(None), torch.float16)
