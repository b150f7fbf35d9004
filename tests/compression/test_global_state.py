"""Global settings of PyTorch, made elsewhere in a program, change no cache."""

import pytest
import torch

from restorekv import compress
from restorekv.errors import ModelError
from restorekv.model.probe import probe_model
from tests.helpers.models import build_model

TEXT = "the code of the red house is seven; who lives in the blue house? " * 12
EVICTORS = ["kvzip", "kvzip+", "snapkv", "h2o", "expected-attention", "contrastkv", "am-fast"]


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("evictor", EVICTORS)
def test_the_default_dtype_changes_nothing(tiny_tokenizer, default_dtype, evictor):
    model = build_model("llama")
    options = {"ratio": 0.3, "evictor": evictor, "adapter": None}
    expected = compress(model, tiny_tokenizer, TEXT, **options).digest
    default_dtype(torch.bfloat16)
    assert compress(model, tiny_tokenizer, TEXT, **options).digest == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_default_dtype_refuses_no_model(default_dtype, family):
    """A model's class is checked only once, so the check must not depend on the default dtype."""
    model = build_model(family)
    default_dtype(torch.bfloat16)
    assert probe_model(model)


def test_autocast_is_refused(tiny_model, tiny_tokenizer):
    """Under autocast, pairs would have two dtypes, which no file can hold."""
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ModelError, match="outside it"),
    ):
        compress(tiny_model, tiny_tokenizer, TEXT, ratio=0.3)
