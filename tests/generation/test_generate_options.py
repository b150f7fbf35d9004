"""Options of transformers' `generate` that look at ids see text, question and answer, as with the
full cache: placeholders of restore tokens and of skipped positions do not count.
"""

import copy

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from restorekv import CompressionConfig, compress
from restorekv.generation.transformers_generate import NGRAM_OPTIONS, make_ngram_processors
from restorekv.model.cache_argument import pass_cache_to_generate
from restorekv.model.prompt import encode_question
from tests.helpers import decoders
from tests.helpers.compressing import QUESTIONS, make_adapter
from tests.helpers.models import build_model

TEXT = "the code of the red house is seven; nobody lives there. " * 4
TOKENS = 16
QUESTION = QUESTIONS[0]


@pytest.fixture(scope="module", params=["restore tokens", "an offset"])
def small(request, tiny_tokenizer):
    """A context in which some positions have no token. The tokenizer's padding is a token that the
    model answers with, as if padding were the EOS token.
    """
    model = build_model("qwen3")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    options = {"adapter": make_adapter(model)}
    if request.param == "an offset":
        options = {"adapter": None, "config": CompressionConfig(offset=5)}
    made = compress(model, tokenizer, TEXT, ratio=0.4, evictor="snapkv", **options)
    written = made.ask(QUESTION, TOKENS, details=True).ids
    known = set(made.context.ids[0].tolist() + list_question_ids(made))
    # What is in text or question is penalized in any case.
    padding = next(token for token in written if token not in known and token != 2)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    assert tokenizer.pad_token_id == padding
    return made


def list_question_ids(small):
    return encode_question(small.tokenizer, small.context, QUESTION)[0].tolist()


def ask(small, processor):
    """Answer with a processor of transformers that sees what the full model would have read."""
    return small.ask(QUESTION, TOKENS, processors=[processor])


def generate(small, **options):
    return small.generate(QUESTION, max_new_tokens=TOKENS, **options)


def test_penalties_of_repetition_count_the_text(small):
    plain = small.ask(QUESTION, TOKENS)
    assert generate(small) == plain
    wanted = ask(small, RepetitionPenaltyLogitsProcessor(8.0))
    assert wanted != plain
    assert generate(small, repetition_penalty=8.0) == wanted
    config = GenerationConfig(repetition_penalty=8.0, max_new_tokens=TOKENS)
    assert small.generate(QUESTION, generation_config=config) == wanted
    assert small.ask(QUESTION, TOKENS, repetition_penalty=8.0) == wanted
    read = small.context.ids.new_tensor([small.context.ids[0].tolist() + list_question_ids(small)])
    # It raises what the prompt has, by the inverse of what a penalty takes.
    wanted = ask(small, EncoderRepetitionPenaltyLogitsProcessor(4.0, read))
    assert generate(small, encoder_repetition_penalty=4.0) == wanted


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_n_gram_is_of_placeholders(small, size):
    wanted = ask(small, NoRepeatNGramLogitsProcessor(size))
    assert generate(small, no_repeat_ngram_size=size) == wanted
    config = GenerationConfig(no_repeat_ngram_size=size, max_new_tokens=TOKENS)
    assert small.generate(QUESTION, generation_config=config) == wanted
    assert generate(small, no_repeat_ngram_size=size, num_beams=2)
    read = small.context.ids.new_tensor([small.context.ids[0].tolist() + list_question_ids(small)])
    wanted = ask(small, EncoderNoRepeatNGramLogitsProcessor(size, read))
    assert generate(small, encoder_no_repeat_ngram_size=size) == wanted


def test_placeholders_make_no_n_gram_where_the_text_begins_with_an_ordinary_token():
    """Placeholders repeat the first token of the text, which a model without a template or a BOS
    may write twice.
    """
    placeholders, text = [7, 7, 7], [7, 8, 9, 7]
    ids = torch.tensor([placeholders + text])
    scores = torch.zeros(1, 12)
    sizes = dict.fromkeys(NGRAM_OPTIONS, 2)
    for processor in make_ngram_processors(sizes, ids, len(placeholders)):
        found = processor(ids, scores).isinf().nonzero()
        assert found.tolist() == [[0, 8]]


def test_words_that_are_bad_or_biased_may_begin_in_the_text(small):
    """A word may have its beginning in the text, before the placeholders, and is still found."""
    first = small.ask(QUESTION, TOKENS, details=True).ids[0]
    word = [int(small.context.ids[0, -1]), *list_question_ids(small), first]
    plain = generate(small)
    wanted = ask(small, NoBadWordsLogitsProcessor([word], [2]))
    assert generate(small, bad_words_ids=[word]) == wanted != plain
    wanted = ask(small, SequenceBiasLogitsProcessor([[word, -50.0]]))
    assert generate(small, sequence_bias=[[word, -50.0]]) == wanted != plain


def test_ids_of_the_text_and_of_the_question_follow_each_other(small):
    ids = small.inputs(QUESTION)["input_ids"][0].tolist()
    read = small.context.ids[0].tolist() + list_question_ids(small)
    placeholders = len(ids) - len(read)
    assert placeholders == small.cache.get_seq_length() - small.context.num_tokens > 0
    assert ids[placeholders:] == read
    assert set(ids) == set(read), "a placeholder would be penalized, too"


def test_a_model_that_was_saved_without_a_cache_reads_it_all_the_same(small, monkeypatch):
    """Otherwise the prompt would be read into the cache once more for every token."""
    plain = small.ask(QUESTION, TOKENS)
    assert generate(small, use_cache=False) == plain
    config = GenerationConfig(use_cache=False, max_new_tokens=TOKENS)
    assert small.generate(QUESTION, generation_config=config) == plain
    monkeypatch.setattr(small.model.generation_config, "use_cache", False)
    monkeypatch.setattr(small.model.config, "use_cache", False, raising=False)
    assert generate(small) == plain
    assert small.ask(QUESTION, TOKENS) == plain


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_a_kind_of_cache_in_a_generation_config_changes_nothing(small, monkeypatch, name):
    """transformers makes such a cache if it is given none, and refuses the option with a cache."""
    plain = small.ask(QUESTION, TOKENS)
    assert generate(small, cache_implementation=name) == plain
    config = GenerationConfig(cache_implementation=name, max_new_tokens=TOKENS)
    assert small.generate(QUESTION, generation_config=config) == plain
    monkeypatch.setattr(small.model.generation_config, "cache_implementation", name)
    assert generate(small) == plain


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_a_model_that_was_saved_to_return_more_answers_all_the_same(tiny_tokenizer, name):
    """transformers sets return_dict_in_generate in its generation config then."""
    model = build_model("llama", **{name: True})
    made = compress(model, tiny_tokenizer, TEXT, ratio=0.4, evictor="snapkv", adapter=None)
    assert generate(made) == made.ask(QUESTION, TOKENS)


def test_stop_strings_of_a_generation_config_end_an_answer(small, monkeypatch):
    """To find them, transformers needs the tokenizer, which is a separate argument."""
    plain = small.ask(QUESTION, TOKENS)
    stop = next(each for each in plain[1:] if each.isascii() and each.isprintable())
    wanted = generate(small, stop_strings=[stop])
    assert wanted != plain
    config = GenerationConfig(stop_strings=[stop], max_new_tokens=TOKENS)
    assert small.generate(QUESTION, generation_config=config) == wanted
    monkeypatch.setattr(small.model.generation_config, "stop_strings", [stop])
    assert generate(small) == wanted


@pytest.mark.skipif("laguna" not in CONFIG_MAPPING, reason="transformers 5.2 has no Laguna")
def test_a_class_that_tells_attention_nothing_of_the_cache_reads_it(tiny_tokenizer):
    """Its layers get use_cache=False whatever `generate` passes."""
    model = decoders.build("laguna", max_position_embeddings=512)
    made = compress(model, tiny_tokenizer, TEXT, ratio=0.4, evictor="snapkv", adapter=None)
    answer = made.ask(QUESTION, TOKENS)
    assert made.generate(QUESTION, max_new_tokens=TOKENS) == answer
    written = model.generate(
        **made.inputs(QUESTION),
        **pass_cache_to_generate(made.cache.fork()),
        max_new_tokens=TOKENS,
        do_sample=False,
    )
    written = written[0, made.inputs(QUESTION)["input_ids"].shape[1] :]
    assert tiny_tokenizer.decode(written, skip_special_tokens=True).lstrip() == answer


@pytest.mark.parametrize(
    "options",
    [{}, {"generation_config": GenerationConfig()}, {"max_new_tokens": None, "max_length": None}],
)
def test_an_answer_without_a_limit_has_as_many_tokens_as_that_of_ask(small, monkeypatch, options):
    """transformers would end it after 20."""
    monkeypatch.setattr(small.model.generation_config, "eos_token_id", 319)
    assert len(small.ask(QUESTION, details=True).ids) > 20
    assert small.generate(QUESTION, **options) == small.ask(QUESTION)
    config = GenerationConfig(max_new_tokens=5)
    assert small.generate(QUESTION, generation_config=config) == small.ask(QUESTION, 5)


def test_a_generation_config_that_does_not_say_so_does_not_sample(small, monkeypatch):
    """transformers would do what the model's own config says."""
    own = small.model.generation_config
    monkeypatch.setattr(own, "do_sample", True)
    monkeypatch.setattr(own, "temperature", 5.0)
    config = GenerationConfig(max_new_tokens=TOKENS)
    plain = small.ask(QUESTION, TOKENS)
    for seed in range(3):
        torch.manual_seed(seed)
        assert small.generate(QUESTION, generation_config=config) == plain
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=True)
    assert small.generate(QUESTION, generation_config=config) != plain


@pytest.mark.parametrize("beams", [1, 2])
def test_a_model_without_an_eos_writes_up_to_the_limit(tiny_tokenizer, beams):
    model = build_model("llama", eos_token_id=None)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.eos_token = None
    made = compress(model, tokenizer, TEXT, ratio=0.4, evictor="knorm", adapter=None)
    written = made.generate(QUESTION, num_beams=beams, max_new_tokens=TOKENS)
    assert written
    if beams == 1:
        assert written == made.ask(QUESTION, TOKENS)


def test_lengths_count_what_the_cache_has_seen(small):
    """They count the ids of `inputs`, also the placeholders of positions without a token."""
    read = small.inputs(QUESTION)["input_ids"].shape[1]
    assert generate(small, min_length=read + 3) == generate(small, min_new_tokens=3)
    assert small.generate(QUESTION, max_length=read + 3) == small.ask(QUESTION, 3)
