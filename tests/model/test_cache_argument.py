"""Under which name models are given their cache."""

import warnings

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from restorekv.model.cache_argument import find_cache, pass_cache, pass_cache_to_generate
from restorekv.model.shape import get_backbone
from tests.helpers.models import build_model

IDS = torch.tensor([[3, 4, 5]])


class OldModule(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return past_key_values


class NewModule(nn.Module):
    def forward(self, input_ids, cache=None, **options):
        return cache


class CallableModel:
    def __call__(self, input_ids, past_key_values):
        return past_key_values


@pytest.mark.parametrize("kind", [OldModule, NewModule, CallableModel])
def test_a_model_is_given_its_cache_under_its_own_name(kind):
    cache = DynamicCache()
    model = kind()
    assert model(IDS, **pass_cache(model, cache)) is cache


def test_a_wrapper_is_given_the_name_of_this_transformers():
    class Wrapper(nn.Module):
        def forward(self, *args, **kwargs):
            return kwargs

    cache = DynamicCache()
    assert pass_cache(Wrapper(), cache) == pass_cache_to_generate(cache)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_takes_the_cache_without_a_warning(name):
    model = build_model(name)
    for each in (model, get_backbone(model)):
        cache = DynamicCache()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            each(input_ids=IDS, use_cache=True, **pass_cache(each, cache))
        assert cache.get_seq_length() == IDS.shape[1]


def test_generation_continues_from_the_cache():
    model = build_model("llama")
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=IDS[:, :2], use_cache=True, **pass_cache(model, cache))
        expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
        found = model.generate(
            IDS, max_new_tokens=3, do_sample=False, **pass_cache_to_generate(cache)
        )
    assert found.equal(expected) and cache.get_seq_length() == 5


def test_hooks_find_the_cache_under_either_name():
    cache = DynamicCache()
    assert find_cache({"cache": cache}) is cache
    assert find_cache({"past_key_values": cache, "cache": None}) is cache
    assert find_cache({"use_cache": True}) is None
