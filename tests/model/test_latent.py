"""Latent attention: one vector for keys and values, held once. What such models compute is compared
with transformers' own classes in test_hybrid.py and tests/families.py.
"""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from restorekv import CompressedContext, compose
from restorekv.cache.states import HAS_STATES
from restorekv.errors import RestoreKVError
from restorekv.model.cache_argument import pass_cache
from restorekv.model.shape import CacheShape
from restorekv.train.loop import train_adapter
from tests.helpers.compressing import QUESTIONS, compress_with, make_adapter
from tests.helpers.damage import check_refused, record
from tests.helpers.exactness import measure_error, plain_copy, random_ids
from tests.helpers.hybrids import LATENT, build_hybrid
from tests.helpers.models import build_model
from tests.helpers.training import CONFIG, EXAMPLES, losses

LONG = "The code of the red house is seven, and nobody lives there. " * 4
pytestmark = pytest.mark.skipif(not HAS_STATES, reason="transformers caches latents since it has")


@pytest.fixture(scope="module")
def model():
    return build_hybrid("deepseek_v3")


def test_a_pair_is_held_once(model, tiny_tokenizer):
    config = model.config
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=make_adapter(model))
    shape = CacheShape.from_model(model)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert (shape.heads, shape.groups) == (1, config.num_attention_heads)
    assert shape.head_dim == width
    for layer in small.cache.full_attention:
        assert layer.context_keys is layer.context_values
    m = small.manifest
    own = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=small.context.ids, use_cache=True, **pass_cache(model, own))
    of_transformers = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)
    assert m.bytes_full == of_transformers
    # Restore pairs are few and held twice, as keys and as values.
    restore = 2 * shape.layers * m.restore_tokens * width * model.dtype.itemsize
    retained = (m.pairs_held - shape.layers * m.restore_tokens) * width * model.dtype.itemsize
    assert retained + restore < m.bytes_held < retained + restore + 8 * m.pairs_held + 1000


@pytest.mark.parametrize("kind", LATENT[:-1])
def test_a_cache_of_transformers_stays_its_own(kind, tiny_tokenizer):
    """The classes of a model that was compressed with compute over other caches what they did."""
    model = build_hybrid(kind)
    ids = random_ids(40)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None).ask(QUESTIONS[0], 4)
    plain = plain_copy(model)
    plain.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=True, **pass_cache(model, cache)).logits
        assert measure_error(found, plain(input_ids=ids).logits) < 1e-5
    assert cache.layers[0].keys.shape[-1] == model.config.kv_lora_rank
    asked = {"attention_mask": torch.ones_like(ids), **options}
    assert model.generate(ids, **asked).equal(plain.generate(ids, **asked))


def test_texts_that_are_read_in_parts_have_their_pairs_once(model, tiny_tokenizer):
    adapter = make_adapter(model)
    options = {"evictor": "snapkv", "streaming_chunk": 64}
    small = compress_with(model, tiny_tokenizer, LONG * 3, ratio=0.4, adapter=adapter, **options)
    grown = small.append(random_ids(50, 3)[0].tolist(), adapter=adapter, restore="every")
    for context in (small, grown):
        assert context.manifest.shares_pairs
        for layer in context.cache.full_attention:
            assert layer.shares_pairs and layer.context_keys.shape[0]
    assert grown.manifest.earlier


def test_what_wraps_a_model_may_have_wrapped_another_kind_before(tiny_tokenizer):
    """PEFT's class is the same around a Llama and around a model with latent attention."""
    for inner in (build_model("llama"), build_hybrid("glm4_moe_lite")):
        wrapped = get_peft_model(inner, LoraConfig(r=2, target_modules=["o_proj"])).eval()
        compress_with(wrapped, tiny_tokenizer, LONG, ratio=0.4, adapter=None, evictor="knorm")


@pytest.mark.parametrize("ratio", [1, 0.4])
def test_files_hold_a_pair_once(model, tiny_tokenizer, tmp_path, ratio):
    small = compress_with(model, tiny_tokenizer, LONG, ratio=ratio, adapter=make_adapter(model))
    path = tmp_path / "doc.rkv"
    small.save(path)
    again = CompressedContext.load(path, model, tiny_tokenizer)
    assert again.manifest == small.manifest and again.digest == small.digest
    assert again.manifest.shares_pairs
    assert all(layer.shares_pairs for layer in again.cache.full_attention)
    assert again.ask(QUESTIONS, 12) == small.ask(QUESTIONS, 12)
    assert path.stat().st_size < 1.3 * small.manifest.bytes_held + 20_000
    grown = again.append(random_ids(50, 3)[0].tolist(), adapter=None, restore="none")
    grown.save(path)
    assert CompressedContext.load(path, model, tiny_tokenizer).digest == grown.digest


DAMAGE = {
    "pairs that are held twice": record(shares_pairs=False),
    "8 bits": record(kv_dtype="int8"),
    "a word": record(shares_pairs="yes"),
    "several heads": lambda tensors, manifest: manifest["shape"].update(heads=2),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_damaged_files_are_refused(model, tiny_tokenizer, tmp_path, harm):
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    check_refused(small, DAMAGE[harm], tmp_path / "doc.rkv")


def test_what_needs_keys_and_values_of_every_head_is_refused(model, tiny_tokenizer, tmp_path):
    for evictor, why in (
        ("am-fast", "fits new values"),
        ("expected-attention", "how to rotate"),
    ):
        with pytest.raises(RestoreKVError, match=why):
            compress_with(model, tiny_tokenizer, LONG, ratio=0.4, evictor=evictor, adapter=None)
    with pytest.raises(RestoreKVError, match="leave out offload"):
        compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None, offload=True)
    with pytest.raises(RestoreKVError, match="leave out kv_dtype"):
        compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None, kv_dtype="int8")
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    with pytest.raises(RestoreKVError, match="latents that our caches hold joined"):
        small.cache.to_dynamic_cache()
    with pytest.raises(RestoreKVError, match=r"latents.* from the cache file itself"):
        small.portable()
    with pytest.raises(RestoreKVError, match="with latent attention cannot be composed"):
        compose([small, small])


def test_adapters_are_trained(model, tiny_tokenizer, tmp_path):
    """Also with LoRA in the projection from which keys and values are made."""
    targets = ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    config = replace(CONFIG, steps=24, targets=targets)
    curves = []
    for run in ("filling", "filled"):
        store = tmp_path / "store"
        adapter = train_adapter(
            model, tiny_tokenizer, EXAMPLES, config, tmp_path / run, store=store, store_prefill=True
        )
        curves.append(losses(tmp_path / run))
    assert curves[0] == curves[1] and sum(curves[0][-3:]) < sum(curves[0][:3])
    for target in targets:
        learned = [
            bool(weight.any())
            for name, weight in adapter.trainable_state().items()
            if f"{target}.lora_B" in name
        ]
        assert any(learned), target
