"""What ships: a model that transformers loads, adapters that fit it, and answers that are right."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from restorekv import compress, load_model
from restorekv.errors import RestoreKVWarning
from restorekv.model.names import tiny_path
from restorekv.tiny.suite import draw_documents

SHIPPED = ("kvzip", "kvzip+", "contrastkv", "contrastkv-simple", "snapkv", "h2o", "fastkvzip")
ENGLISH = (
    "Ordinary English, with 1,234 numbers, naïve accents and\n\ttabs: does it survive? “Yes!” — "
    "100 %."
)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def test_transformers_loads_it_without_us():
    model = AutoModelForCausalLM.from_pretrained(tiny_path("model"))
    assert model.config.model_type == "qwen3" and model.dtype == torch.float32
    assert 2e6 <= sum(weight.numel() for weight in model.parameters()) <= 10e6
    tokenizer = AutoTokenizer.from_pretrained(tiny_path("model"))
    assert tokenizer.decode(tokenizer(ENGLISH)["input_ids"]) == ENGLISH


def test_all_weights_together_stay_under_25_megabytes():
    files = list(tiny_path().rglob("*.safetensors"))
    assert len(list(tiny_path("model").glob("*.safetensors"))) == 1
    assert {folder.name for folder in tiny_path("adapters").iterdir()} == set(SHIPPED)
    assert sum(file.stat().st_size for file in files) <= 25e6


@pytest.mark.parametrize("evictor", SHIPPED)
def test_the_shipped_adapter_is_found_and_used(tiny, evictor):
    model, tokenizer = tiny
    document = draw_documents(tokenizer, 1, split="check", low=512, high=600)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RestoreKVWarning)
        small = compress(
            model, tokenizer, document.text, evictor=evictor, ratio=0.2, adapter="auto"
        )
    assert (
        small.manifest.restore_tokens > 0
        and small.manifest.adapter["evictor"] == small.manifest.evictor
    )
    assert small.manifest.model == "tiny"
    layers, heads = small.manifest.shape["layers"], small.manifest.shape["heads"]
    assert small.manifest.pairs == small.manifest.tokens * layers * heads // 5


def test_it_answers_held_out_questions_from_a_fifth_of_the_cache(tiny):
    model, tokenizer = tiny
    scores = []
    for document in draw_documents(tokenizer, 8, split="check", low=512, high=800):
        small = compress(model, tokenizer, document.text, ratio=0.2, adapter="auto")
        told = small.ask([question.text for question in document.questions], max_new_tokens=64)
        scores += [
            question.score(answer)
            for question, answer in zip(document.questions, told, strict=True)
        ]
    assert sum(scores) / len(scores) > 0.75


def test_restoring_is_the_default_where_an_adapter_ships(tiny):
    model, tokenizer = tiny
    assert compress(model, tokenizer, ENGLISH * 8, ratio=0.2).manifest.restore_tokens > 0
    assert (
        compress(model, tokenizer, ENGLISH * 8, ratio=0.2, adapter=None).manifest.restore_tokens
        == 0
    )


def test_plain_english_runs(tiny):
    model, tokenizer = tiny
    small = compress(model, tokenizer, ENGLISH * 8, ratio=0.5, adapter="auto")
    assert isinstance(small.ask("Does it run?", max_new_tokens=4), str)
