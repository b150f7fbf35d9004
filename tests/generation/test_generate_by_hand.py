"""A fork of a compressed cache in loops that are not ours, such as transformers' `generate`: inputs
that would be read wrongly are refused with a sentence.
"""

import copy

import pytest
import torch
from transformers import pipeline
from transformers.cache_utils import CacheLayerMixin

from restorekv import CompressionConfig, compress
from restorekv.errors import RestoreKVError
from restorekv.model.cache_argument import pass_cache, pass_cache_to_generate
from tests.helpers.compressing import QUESTIONS, TEXT, make_adapter
from tests.helpers.models import build_model

QUESTION = QUESTIONS[1]
TOKENS = 8
GREEDY = {"max_new_tokens": TOKENS, "do_sample": False}
# transformers 5.2 itself ends where it finds no new ids, with an error of its own.
NOTHING_NEW = (RestoreKVError, IndexError)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def small(request, tiny_tokenizer):
    model = build_model(request.param)
    adapter = make_adapter(model)
    return compress(model, tiny_tokenizer, TEXT, ratio=0.4, evictor="snapkv", adapter=adapter)


def generate(small, inputs, cache=None, **options):
    """Return the answers of transformers' `generate` to inputs, one for each row."""
    cache = small.cache.fork(len(inputs["input_ids"])) if cache is None else cache
    arguments = {**inputs, **pass_cache_to_generate(cache), **GREEDY, **options}
    written = small.model.generate(**arguments)[:, inputs["input_ids"].shape[1] :]
    answers = small.tokenizer.batch_decode(written, skip_special_tokens=True)
    return [answer.lstrip() for answer in answers]


def read_question(small, cache=None, **options):
    """Return the logits (B, Q, V) of a forward pass that reads a question over a fork."""
    cache = small.cache.fork() if cache is None else cache
    ids = small.inputs(QUESTION)["input_ids"][:, small.cache.get_seq_length() :]
    return small.model(ids, **pass_cache(small.model, cache), **options).logits


def pad_before(small, questions):
    """Return the inputs of several questions as a tokenizer pads them, before the text."""
    made = [small.inputs(question) for question in questions]
    rows = [{name: tensor[0].tolist() for name, tensor in each.items()} for each in made]
    return dict(small.tokenizer.pad(rows, return_tensors="pt", padding_side="left"))


def test_an_answer_by_hand_is_that_of_ask(small):
    assert generate(small, small.inputs(QUESTION)) == [small.ask(QUESTION, TOKENS)]


@pytest.mark.skipif(not hasattr(CacheLayerMixin, "is_croppable"), reason="transformers 5.24 asks")
@pytest.mark.parametrize("kind", ["fork", "plain", "portable"])
def test_nothing_may_write_ahead(tiny_tokenizer, kind):
    """transformers would read the whole prompt again into the cache, which then answers wrongly."""
    model = build_model("llama")
    config = CompressionConfig(allocation="per-head")
    made = compress(
        model, tiny_tokenizer, TEXT, ratio=0.4, evictor="knorm", adapter=None, config=config
    )
    cache, inputs = made.cache.fork(), made.inputs(QUESTION)
    if kind == "plain":
        cache, inputs = made.cache.to_dynamic_cache(), made.inputs(QUESTION, plain=True)
    elif kind == "portable":
        portable = made.portable()
        cache, inputs = portable.make_cache(), portable.inputs(tiny_tokenizer, QUESTION)
    error, said = ValueError, "a cache that can be cropped"
    if kind == "fork":  # refused while transformers reads
        error, said = RestoreKVError, "with a draft model or prompt lookup"
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build_model("llama")}):
        with pytest.raises(error, match=said):
            generate(made, inputs, copy.deepcopy(cache), **options)
    assert generate(made, inputs, cache) == [made.ask(QUESTION, TOKENS)]


def test_a_loop_without_the_cache_is_refused(small):
    """It would read the whole prompt into the cache again for every token."""
    # Older versions pass the mask of the new ids alone, which is refused before.
    said = "leave out such options|the ids of new tokens alone"
    with pytest.raises(RestoreKVError, match=said):
        generate(small, small.inputs(QUESTION), use_cache=False)


@pytest.mark.parametrize("other", ["Green?", QUESTION[:-1]])
def test_padding_before_the_text_is_refused(small, other):
    """The end of the text, which the cache has, would be read again before the shorter question."""
    inputs = pad_before(small, [QUESTION, other])
    padding = int((inputs["attention_mask"] == 0).sum())
    assert padding > small.cache.restore_length or other == QUESTION[:-1]
    with pytest.raises(RestoreKVError, match="put padding between text and question"):
        generate(small, inputs)


def test_a_question_without_the_ids_before_it_is_refused(small):
    """transformers would read only the last ids: as many as the input has more than the cache."""
    ids = small.inputs(QUESTION)["input_ids"]
    start = small.cache.get_seq_length() // 3
    said = "do not follow what the cache has seen|out of bounds"
    with pytest.raises(NOTHING_NEW, match=said):
        generate(small, {"input_ids": ids[:, start:]})


def test_a_question_alone_is_refused(small):
    """A pipeline of transformers passes a question this way, too."""
    ids = small.inputs(QUESTION)["input_ids"][:, small.cache.get_seq_length() :]
    said = "There is nothing to read: the cache has seen|out of bounds"
    with pytest.raises(NOTHING_NEW, match=said):
        generate(small, {"input_ids": ids})
    pipe = pipeline("text-generation", model=small.model, tokenizer=small.tokenizer)
    with pytest.raises(NOTHING_NEW, match=said):
        pipe(QUESTION, **pass_cache_to_generate(small.cache.fork()), **GREEDY)


def test_the_mask_of_a_question_alone_is_refused(small):
    """transformers would treat the columns that the mask lacks as padding."""
    wanted = read_question(small)
    width = wanted.shape[1]
    with pytest.raises(RestoreKVError, match=f"mask has {width} columns, and the cache has"):
        read_question(small, attention_mask=torch.ones(1, width, dtype=torch.long))
    with pytest.raises(RestoreKVError, match="pass the ids of new tokens alone"):
        small.model(**small.inputs(QUESTION), **pass_cache(small.model, small.cache.fork()))
    whole = torch.ones(1, small.cache.get_seq_length() + width, dtype=torch.long)
    assert read_question(small, attention_mask=whole).equal(wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions_over_the_text_is_refused(small, dtype):
    queries = read_question(small).shape[1]
    columns = small.cache.get_seq_length() + queries
    mask = torch.ones(1, 1, queries, columns, dtype=torch.bool).tril(columns - queries)
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    with pytest.raises(RestoreKVError, match="An attention mask of four dimensions"):
        read_question(small, attention_mask=mask)


def test_a_fork_for_another_number_of_rows_is_refused(small):
    inputs = small.inputs(QUESTION)
    with pytest.raises(RestoreKVError, match=r"a batch of 3 is read.*; pass cache.fork\(3\)"):
        generate(small, inputs, num_beams=3)
    with pytest.raises(RestoreKVError, match=r"a batch of 1 is read.*; pass cache.fork\(1\)"):
        generate(small, inputs, small.cache.fork(3))
    answer = generate(small, inputs, small.cache.fork(3), num_beams=3)
    assert answer == [small.generate(QUESTION, num_beams=3, max_new_tokens=TOKENS)]


@pytest.mark.parametrize("function", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [2, 4])
def test_another_attention_function_is_refused(tiny_tokenizer, function, heads):
    """Such a function expects a tensor and would get a layer of the cache."""
    model = build_model("llama", num_key_value_heads=heads)
    made = compress(model, tiny_tokenizer, TEXT, ratio=0.4, evictor="snapkv", adapter=None)
    wanted = read_question(made)
    model.set_attn_implementation(function)
    with pytest.raises(RestoreKVError, match=r"call model.set_attn_implementation\('restorekv'\)"):
        read_question(made)
    model.set_attn_implementation("restorekv")
    assert read_question(made).equal(wanted)
