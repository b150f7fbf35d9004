"""Layers with pairs and a state side by side (Falcon-H1): what of them is held where. What such
models compute is compared with transformers' own classes in test_hybrid.py and tests/families.py.
"""

import pytest
import torch
from transformers import DynamicCache

from restorekv import CompressedContext, load_model
from restorekv.cache.ragged import RaggedLayer
from restorekv.cache.states import HAS_STATES, StateLayer
from restorekv.cli import execute
from restorekv.errors import CacheFileError, ModelError
from restorekv.model import parallel_states
from restorekv.model.cache_argument import pass_cache
from restorekv.model.support import get_support, prepare_model
from tests.helpers.compressing import QUESTIONS, compress_with, make_adapter
from tests.helpers.damage import check_refused, record
from tests.helpers.exactness import measure_error, random_ids
from tests.helpers.hybrids import build_hybrid

LONG = "The code of the red house is seven, and nobody lives there. " * 4
LAYERS = 4
pytestmark = pytest.mark.skipif(not HAS_STATES, reason="Falcon-H1 has a cache of its own")


@pytest.fixture(scope="module")
def model():
    return build_hybrid("falcon_h1")


def test_states_are_behind_all_pairs(model, tiny_tokenizer, tmp_path, capsys):
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=make_adapter(model))
    kinds = [type(layer) for layer in small.cache.layers]
    assert kinds == [RaggedLayer] * LAYERS + [StateLayer] * LAYERS
    manifest = small.manifest
    assert manifest.states == list(range(LAYERS, 2 * LAYERS))
    assert manifest.pairs_held == small.cache.pairs_held  # states are outside the budget
    held = sum(
        tensor.nbytes for layer in small.cache.with_states for tensor in layer.list_tensors()
    )
    assert manifest.state_bytes == held > 0
    path = tmp_path / "doc.rkv"
    small.save(path)
    again = CompressedContext.load(path, model, tiny_tokenizer)
    assert again.digest == small.digest
    assert again.ask(QUESTIONS, 20) == small.ask(QUESTIONS, 20)
    assert execute(["inspect", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"all {LAYERS} layers keep a state beside pairs" in shown


@torch.no_grad()
def test_caches_of_transformers_are_used_as_before(model):
    """The class is changed for caches of restorekv alone."""
    prepare_model(model)
    ids = random_ids(40)
    whole = model(input_ids=ids, use_cache=False).logits
    own = DynamicCache(config=model.config)
    first = model(input_ids=ids[:, :30], use_cache=True, **pass_cache(model, own)).logits
    rest = [
        model(input_ids=ids[:, index : index + 1], use_cache=True, **pass_cache(model, own)).logits
        for index in range(30, 40)
    ]
    assert measure_error(torch.cat([first, *rest], 1), whole) < 2e-5
    assert len(own.layers) == LAYERS
    assert all(layer.conv_states and layer.keys.shape[2] == 40 for layer in own.layers)


def test_a_model_that_was_not_probed_itself_is_used(model, tiny_tokenizer, tmp_path):
    """Only the first model of a class and config is probed."""
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    small.save(tmp_path / "doc.rkv")
    other = build_hybrid("falcon_h1")
    loaded = CompressedContext.load(tmp_path / "doc.rkv", other, tiny_tokenizer)
    assert loaded.ask(QUESTIONS[0], 12) == small.ask(QUESTIONS[0], 12)


DAMAGE = {
    "a state less": record(states=[4, 5, 6]),
    "states in place of pairs": record(states=[0, 1, 2, 3]),
    "states further behind": record(states=[5, 6, 7, 8]),
    "no states": record(states=[], state_shapes={}, state_dtypes={}),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_damaged_files_are_refused(model, tiny_tokenizer, tmp_path, harm):
    small = compress_with(model, tiny_tokenizer, LONG, ratio=0.4, adapter=None)
    check_refused(small, DAMAGE[harm], tmp_path / "doc.rkv")


def test_a_file_of_a_plain_model_is_refused(model, tiny_tokenizer, tmp_path):
    plain, tokenizer = load_model("tiny")
    small = compress_with(plain, tokenizer, LONG, ratio=0.4, adapter=None)
    small.save(tmp_path / "doc.rkv")
    with pytest.raises(CacheFileError):
        CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)


def test_a_part_that_is_not_found_is_refused(monkeypatch):
    model = build_hybrid("falcon_h1")
    monkeypatch.setattr(parallel_states, "_find_module", lambda layer, index: None)
    model.config.name = "other parts"  # so that it counts as new
    with pytest.raises(ModelError, match="pairs and a state, whose parts are not where"):
        get_support(model)
