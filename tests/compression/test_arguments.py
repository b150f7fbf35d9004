"""Calls that a new user gets wrong: one sentence says what to write instead."""

import inspect
import re
from pathlib import Path

import pytest

from restorekv import CompressionConfig, compress, load_model
from restorekv.compression.arguments import CallError
from restorekv.errors import RestoreKVError
from tests.helpers.models import build_model

TEXT = "The code of the harbor is 12, and the code of the tower is 31. " * 4


@pytest.fixture(scope="module")
def model():
    return build_model("qwen3")


def call(model, tokenizer, **options):
    return compress(model, tokenizer, TEXT, **{"adapter": None, "ratio": 0.5, **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"preset": "fast"}, 'there is no argument preset; write evictor="fast"'),
        ({"press": "x"}, "kvpress:press=NAME"),
        ({"window_size": 64}, "snapkv:window=64"),
        ({"max_new_tokens": 5}, "it belongs to ask"),
        ({"kv_dtype": "int8"}, r"config=CompressionConfig\(kv_dtype="),
        ({"evictr": "kvzip"}, "did you mean evictor"),
        ({"temperature": 0.5}, r"it belongs to ask: compress\(...\).ask\(question, temperature="),
        ({"tokens": 50}, r"did you mean tokens_per_head\?"),
        ({"something_else": 1}, "use some of model, tokenizer, context, ratio"),
        ({"ratio": 20}, "write 0.2 for 20 %"),
        ({"ratio": "20%"}, "write 0.2 for 20 %"),
        ({"ratio": "0.5 %"}, "write 0.005 for 0.5 %"),
        ({"ratio": 1.5}, "the share that stays"),
        ({"adapter": "none"}, "pass adapter=None"),
        ({"adapter": False}, "a RestoreAdapter or None, not bool"),
        ({"evictor": None}, "a spec such as 'kvzip' .* not NoneType"),
        ({"evictor": ["kvzip"]}, "not list"),
    ],
)
def test_wrong_arguments_of_compress(model, tiny_tokenizer, options, sentence):
    with pytest.raises(RestoreKVError, match=sentence):
        call(model, tiny_tokenizer, **options)


def test_a_forgotten_tokenizer(model):
    with pytest.raises(CallError, match=r"context.*call compress\(model, tokenizer, context"):
        compress(model, TEXT, ratio=0.5)
    # As of any function, so that `except TypeError` and tools that know it work.
    with pytest.raises(TypeError):
        compress(model)


def test_every_setting_of_the_config_is_pointed_out(model, tiny_tokenizer):
    for name in inspect.signature(CompressionConfig).parameters:
        with pytest.raises(CallError, match=rf"CompressionConfig\({name}="):
            call(model, tiny_tokenizer, **{name: None})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kv_type", "did you mean kv_dtype? The arguments are prefix_policy"),
        ("chunk", "did you mean streaming_chunk?"),
        ("ratio", "pass it to compress itself: compress(..., ratio=...)."),
        ("window_size", "snapkv:window=64"),
        ("wrong", "use some of prefix_policy, on_small_budget"),
    ],
)
def test_wrong_arguments_of_a_config(name, said):
    with pytest.raises(CallError, match=f"^CompressionConfig: .*{re.escape(said)}"):
        CompressionConfig(**{name: 1})
    with pytest.raises(TypeError, match="too many positional arguments; call CompressionConfig"):
        CompressionConfig(*range(40))
    assert list(inspect.signature(CompressionConfig).parameters)[:2] == [
        "prefix_policy",
        "on_small_budget",
    ]


def test_the_signature_stays_that_of_the_function():
    parameters = list(inspect.signature(compress).parameters)
    assert parameters[:4] == ["model", "tokenizer", "context", "ratio"]
    assert compress.__doc__.startswith("Compress a context")


def test_files_and_messages_in_the_wrong_places(model, tiny_tokenizer, tmp_path):
    small = call(model, tiny_tokenizer)
    with pytest.raises(RestoreKVError, match=r"read the file first: .*Path\('more.txt'\)"):
        small.append(Path("more.txt"))
    message = {"role": "user", "content": "What?"}
    with pytest.raises(RestoreKVError, match=r"not a message with a role.*chat\(\)"):
        small.ask([message])


def test_a_misspelled_model():
    with pytest.raises(RestoreKVError, match=r"'smolm2' \(did you mean smollm2\?\)"):
        load_model("smolm2")
