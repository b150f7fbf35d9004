"""Portable caches: a plain prefix of m tokens answers as the compressed context does, and files are
data.
"""

import copy

import pytest
import torch

from restorekv import load_portable, seal
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.model import rope
from restorekv.model.prompt import encode_question
from restorekv.restore.adapter_file import read_adapter
from restorekv.restore.shipped import find_shipped_adapter
from restorekv.storage import portable
from tests.helpers.compressing import QUESTIONS, TEXT, compress_with, make_adapter
from tests.helpers.models import build_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
ROPES = {"default": {"rope_type": "default", "rope_theta": 1e4}, "yarn": YARN, "llama3": LLAMA3}
ROPES["linear"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def small_of(model, tokenizer, text=TEXT, **options):
    options = {
        "evictor": "snapkv",
        "ratio": 0.4,
        "allocation": "per-head",
        "adapter": make_adapter(model),
        **options,
    }
    return compress_with(model, tokenizer, text, **options)


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_plain_prefix_gives_the_logits_of_the_compressed_context(family, rope, tiny_tokenizer):
    """In float64, where only the rotation could differ."""
    model = build_model(family, rope_parameters=ROPES[rope]).double()
    small = small_of(model, tiny_tokenizer)
    plain = small.portable()
    assert (
        plain.tokens * plain.keys.shape[0] * plain.keys.shape[1]
        == small.cache.pairs_held
        == small.manifest.pairs_held
    )
    for question in QUESTIONS:
        asked = encode_question(tiny_tokenizer, small.context, question)
        with torch.no_grad():
            ours = model(asked, past_key_values=small.cache.fork(), use_cache=True).logits
            theirs = model(asked, past_key_values=plain.make_cache(), use_cache=True).logits
        # The model's own angles are in float32.
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_answers_are_those_of_ask(tiny_model, tiny_tokenizer, tmp_path):
    small = small_of(tiny_model, tiny_tokenizer)
    expected = small.ask(QUESTIONS, 16)
    plain = small.portable()
    plain.save(tmp_path / "doc.safetensors")
    again = load_portable(tmp_path / "doc.safetensors", tiny_model)
    assert again.ask(tiny_model, tiny_tokenizer, QUESTIONS, 16) == expected
    for question, answer in zip(QUESTIONS, expected, strict=True):
        inputs = again.inputs(tiny_tokenizer, question)
        result = tiny_model.generate(
            **inputs,
            past_key_values=again.make_cache(),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
        )
        ids = result[0, inputs["input_ids"].shape[1] :].tolist()
        assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == answer


def test_another_model_is_refused_by_a_cache_that_was_loaded_without_one(
    tiny_model, tiny_tokenizer, tmp_path
):
    made = small_of(tiny_model, tiny_tokenizer).portable()
    made.save(tmp_path / "a.safetensors")
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.lm_head.weight[5] += 1
    loaded = load_portable(tmp_path / "a.safetensors")
    assert loaded.ask(tiny_model, tiny_tokenizer, QUESTIONS[0], 4)
    with pytest.raises(CacheFileError, match="was made with a different model"):
        loaded.ask(other, tiny_tokenizer, QUESTIONS[0], 4)


def test_placeholders_follow_from_the_document(tiny_model, tiny_tokenizer):
    first, same, other = (
        small_of(tiny_model, tiny_tokenizer, text, ratio=None, tokens_per_head=12).portable()
        for text in (TEXT, TEXT, TEXT.replace("seven", "three"))
    )
    assert first.ids.equal(same.ids) and first.name == same.name
    assert first.tokens == other.tokens and first.name != other.name
    same = (first.ids == other.ids)[portable.MARK :]
    assert float(same.float().mean()) < 0.2
    assert int(first.ids.min()) > 0 and int(first.ids.max()) < tiny_model.config.vocab_size


def test_8_bits_and_no_adapter_are_portable(tiny_model, tiny_tokenizer):
    small = small_of(tiny_model, tiny_tokenizer, adapter=None, kv_dtype="int8")
    assert small.portable().ask(tiny_model, tiny_tokenizer, QUESTIONS, 8) == small.ask(QUESTIONS, 8)


def test_what_is_not_portable_says_what_to_do(tiny_model, tiny_tokenizer):
    with pytest.raises(RestoreKVError, match="allocation='per-head'") as error:
        small_of(tiny_model, tiny_tokenizer, allocation="global").portable()
    assert "am-fast" not in str(error.value)
    fitted = compress_with(tiny_model, tiny_tokenizer, TEXT, evictor="am-fast", ratio=0.3)
    with pytest.raises(RestoreKVError, match="no weights of pairs, which am-fast fits"):
        fitted.portable()
    dynamic = build_model(
        "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(
        RestoreKVError, match=r"kind 'dynamic' cannot be moved|rotates keys in a way that depends"
    ):
        small_of(dynamic, tiny_tokenizer).portable()


def test_a_model_that_pairs_numbers_otherwise_is_refused(tiny_model, tiny_tokenizer, monkeypatch):
    small = small_of(tiny_model, tiny_tokenizer)
    monkeypatch.setattr(rope, "_rotate_pairs", lambda keys, angles: keys)
    with pytest.raises(RestoreKVError, match="in an order that restorekv does not know"):
        small.portable()


def test_files_of_strangers(tiny_model, tiny_tokenizer, tmp_path):
    path = tmp_path / "doc.safetensors"
    small_of(tiny_model, tiny_tokenizer).portable().save(path)
    raw = path.read_bytes()
    metadata, tensors = seal.read_sealed(path, portable.KIND)
    lies = {
        "pairs": {
            **tensors,
            "keys": tensors["keys"][:, :, 1:],
            "values": tensors["values"][:, :, 1:],
        },
        "tensor values": {**tensors, "values": tensors["values"][:, :, 1:]},
        "not finite": {**tensors, "keys": tensors["keys"] / 0},
        "do not follow from its contents": {**tensors, "ids": tensors["ids"].flip(0)},
        "its vocabulary lacks": {**tensors, "suffix_ids": tensors["suffix_ids"] - 10_000},
        "other tensors": {**tensors, "more": tensors["ids"] + 1},
    }
    for message, harmed in lies.items():
        seal.write_sealed(path, portable.KIND, harmed, metadata)
        with pytest.raises(
            CacheFileError, match=message if message != "pairs" else "tensor keys|pairs"
        ):
            load_portable(path)
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CacheFileError, match="checksum"):
        load_portable(path)
    path.write_bytes(raw)
    with pytest.raises(CacheFileError, match="a different model"):
        load_portable(path, build_model("llama", seed=5))


def test_the_adapter_that_ships_for_the_allocation_goes_first():
    one = find_shipped_adapter("smollm2", "kvzip", "per-head")
    assert one.name == "kvzip.per-head" and find_shipped_adapter("smollm2", "kvzip").name == "kvzip"
    assert find_shipped_adapter("smollm2", "snapkv", "per-head").name == "kvzip"
    assert read_adapter(one).card.allocation == "per-head"
