"""Options that would silently give wrong answers, or end in a traceback, are refused with a
sentence; answers that follow a regular expression are returned unchanged.
"""

import copy
import re
import warnings

import pytest
import torch
from transformers import GenerationConfig, InfNanRemoveLogitsProcessor, MaxLengthCriteria

from restorekv import CompressedContext, CompressionConfig, ask_many, compress
from restorekv.errors import OptionError, RestoreKVError, RestoreKVWarning
from restorekv.generation.chat import Chat
from restorekv.generation.transformers_generate import INPUT_OPTIONS
from tests.helpers.models import build_model

TEXT = "The code of the red house is seven. " * 12
QUESTION = "Which code?"


@pytest.fixture(scope="module")
def small(tiny_tokenizer):
    return compress(build_model("llama"), tiny_tokenizer, TEXT, ratio=0.5, adapter=None)


def test_nothing_may_write_ahead(small):
    """transformers would read the whole prompt into the cache again, and answer wrongly."""
    with pytest.raises(RestoreKVError, match="cannot use prompt_lookup_num_tokens"):
        small.generate(QUESTION, prompt_lookup_num_tokens=3)
    config = GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=4)
    with pytest.raises(RestoreKVError, match="cannot use prompt_lookup_num_tokens"):
        small.generate(QUESTION, generation_config=config)
    with pytest.raises(RestoreKVError, match="cannot use assistant_model"):
        small.generate(QUESTION, assistant_model=small.model)
    assert small.generate(QUESTION, max_new_tokens=8) == small.ask(QUESTION, 8)


@pytest.mark.parametrize("name", ["token_healing", "use_mtp"])
def test_nothing_may_be_read_again(small, tiny_tokenizer, monkeypatch, name):
    """token_healing, for example, tokenizes the prompt again without its control tokens, which the
    cache has.
    """
    if not hasattr(GenerationConfig(), name):
        pytest.skip("an option of later versions")
    said = f"cannot use {name}, .* pass {name}=False"
    with pytest.raises(RestoreKVError, match=said):
        small.generate(QUESTION, max_new_tokens=4, tokenizer=tiny_tokenizer, **{name: True})
    monkeypatch.setattr(small.model.generation_config, name, True)
    with pytest.raises(RestoreKVError, match=said):
        small.generate(QUESTION, max_new_tokens=4)
    assert small.generate(QUESTION, max_new_tokens=4, **{name: False}) == small.ask(QUESTION, 4)


@pytest.mark.parametrize("name", INPUT_OPTIONS)
def test_generate_takes_no_inputs_besides_the_question(small, name):
    """Another cache in place of the context's would be silently ignored."""
    given = small.cache.fork() if name in ("past_key_values", "cache") else torch.ones(1, 3)
    with pytest.raises(RestoreKVError, match=f"generate makes {name} from the question itself"):
        small.generate(QUESTION, **{name: given})
    assert small.generate(QUESTION, max_new_tokens=4, **{name: None}) == small.ask(QUESTION, 4)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"generation_config": {"top_k": 5}}, "a GenerationConfig of transformers, not dict"),
        (
            {"logits_processor": InfNanRemoveLogitsProcessor()},
            "logits_processor must be a list, not ",
        ),
        ({"stopping_criteria": MaxLengthCriteria(9)}, r"pass stopping_criteria=\[...\]"),
    ],
)
def test_generate_says_which_type_an_option_has(small, options, said):
    with pytest.raises(RestoreKVError, match=said):
        small.generate(QUESTION, **options)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length", "num_beams"])
@pytest.mark.parametrize("value", ["5", 0, -1, 2.5, True])
def test_generate_refuses_what_is_no_number_of_something(small, name, value):
    """Such values were once added or compared before transformers could refuse them."""
    with pytest.raises(RestoreKVError, match=f"{name} must be a number of at least 1, not "):
        small.generate(QUESTION, **{name: value})


def test_generate_refuses_a_number_of_beams_in_its_config(small):
    config = GenerationConfig(max_new_tokens=4)
    config.num_beams = "2"
    with pytest.raises(RestoreKVError, match="num_beams must be a number of at least 1, not '2'"):
        small.generate(QUESTION, generation_config=config)


@pytest.mark.parametrize("more", [-100, 0])
def test_a_length_that_leaves_no_answer_says_what_it_counts(small, more):
    asked = small.inputs(QUESTION)["input_ids"].shape[1]
    said = f"max_length={asked + more} counts text and question, too, which have {asked} tokens"
    with pytest.raises(RestoreKVError, match=said):
        small.generate(QUESTION, max_length=asked + more)
    with pytest.raises(RestoreKVError, match=said):
        small.generate(QUESTION, generation_config=GenerationConfig(max_length=asked + more))
    # Of both, transformers heeds the other.
    answer = small.generate(QUESTION, max_length=asked + more, max_new_tokens=3)
    assert answer == small.ask(QUESTION, 3)


def test_an_option_of_none_is_left_to_the_models_own_config(small, monkeypatch):
    """This was once so for our own n-grams, but not for transformers' beams."""
    own = small.model.generation_config
    monkeypatch.setattr(own, "no_repeat_ngram_size", 1)
    monkeypatch.setattr(own, "num_beams", 2)
    monkeypatch.setattr(own, "eos_token_id", 319)
    wanted = small.generate(QUESTION, max_new_tokens=8)
    names = ("no_repeat_ngram_size", "num_beams", "do_sample", "eos_token_id", "stopping_criteria")
    assert small.generate(QUESTION, max_new_tokens=8, **dict.fromkeys(names)) == wanted


def test_generate_takes_a_list_of_criteria(small):
    read = small.inputs(QUESTION)["input_ids"].shape[1]
    criteria = [MaxLengthCriteria(read + 3)]
    assert small.generate(QUESTION, stopping_criteria=criteria) == small.ask(QUESTION, 3)


@pytest.mark.parametrize("end", ["", "\n", ".\n\n"])
def test_the_plain_model_answers_the_same_ids_alike(small, tiny_tokenizer, end):
    """The page on concepts says that it does, and it must hold however the text ends."""
    whole = compress(small.model, tiny_tokenizer, TEXT + end, ratio=1, adapter=None)
    inputs = whole.inputs(QUESTION)
    result = small.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    written = result[0, inputs["input_ids"].shape[1] :]
    assert tiny_tokenizer.decode(written, skip_special_tokens=True).strip() == whole.ask(
        QUESTION, 8
    )


def test_a_length_of_the_whole_is_heeded(small):
    asked = small.inputs(QUESTION)["attention_mask"].shape[1]
    written = small.generate(QUESTION, max_length=asked + 3, stop_strings=None)
    assert written == small.ask(QUESTION, 3)


@pytest.mark.parametrize(
    "expression",
    [
        r"\n\n[ab]{3}",
        "  [ab]{2}",
        "[ab]{3}",
        "( a|b)[ab]",
        "^a$",
        "\u3000[ab]{2}",
        r"\u00a0[ab]",
        r"\f[ab]",
    ],
)
def test_an_answer_matches_its_expression_from_the_start(small, expression):
    pytest.importorskip("llguidance")
    answer = small.ask(QUESTION, 12, regex=expression)
    assert re.fullmatch(expression, answer)
    assert "".join(small.ask(QUESTION, 12, regex=expression, stream=True)) == answer
    assert small.chat().ask(QUESTION, 12, regex=expression) == answer


def test_a_stream_warns_of_cut_json_too(small):
    pytest.importorskip("llguidance")
    for asked in (small, small.chat()):
        with pytest.warns(RestoreKVWarning, match="before the end of its JSON"):
            list(asked.ask(QUESTION, 2, json_schema={"type": "string"}, stream=True))


def test_more_tokens_than_logits_are_no_matter_to_a_form(small, tiny_tokenizer):
    """A model has more logits, for example, if a token for padding was added to it."""
    pytest.importorskip("llguidance")
    from restorekv.generation.constraint import Constraint

    constraint = Constraint.make(tiny_tokenizer, None, "[ab]{3}", {1})
    width = len(tiny_tokenizer) - 3
    assert constraint.allow(torch.zeros(1, width)).shape == (1, width)


@pytest.fixture
def with_added_tokens(tiny_tokenizer):
    """A context with a tokenizer that has two tokens more than the model."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["zyx", "wvu"])
    model = build_model("llama", vocab_size=len(tokenizer) - 2)
    return compress(model, tokenizer, TEXT, ratio=0.5, adapter=None)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_form_that_asks_for_a_token_without_logits_says_so(with_added_tokens, temperature):
    """Without the check, sampling from no tokens ends in an error of torch."""
    pytest.importorskip("llguidance")
    with pytest.raises(RestoreKVError, match="no logits for the added token that the regular"):
        with_added_tokens.ask(QUESTION, 4, regex="zyx", temperature=temperature)


def test_a_bias_on_a_token_without_logits_says_so(with_added_tokens):
    last = len(with_added_tokens.tokenizer) - 1
    with pytest.raises(OptionError, match=f"token {last}, an added one that the model has no"):
        with_added_tokens.ask(QUESTION, 4, logit_bias={last: 5.0})


@pytest.mark.parametrize("eos", [-1, [2, 10_000], []])
def test_an_eos_that_no_token_has_ends_no_form(small, monkeypatch, eos):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(small.model.generation_config, "eos_token_id", eos)
    assert re.fullmatch("[ab]{3}", small.ask(QUESTION, 12, regex="[ab]{3}"))


def test_a_form_without_any_eos_is_refused(small, tiny_tokenizer, monkeypatch):
    """The first token of the vocabulary would end the answer, and be part of its text."""
    pytest.importorskip("llguidance")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.eos_token = None
    monkeypatch.setattr(small.model.generation_config, "eos_token_id", None)
    made = compress(small.model, tokenizer, TEXT, ratio=0.5, adapter=None)
    for form in ({"regex": "[ab]*"}, {"json_schema": {"type": "string"}}):
        with pytest.raises(RestoreKVError, match="need a token that ends the answer"):
            made.ask(QUESTION, 4, **form)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"answer_prefix": None}, "answer_prefix must be text, not NoneType"),
        ({"config": GenerationConfig(num_beams=2)}, "takes no num_beams"),
    ],
)
def test_options_of_another_type_are_refused(small, options, said):
    with pytest.raises(RestoreKVError, match=said):
        small.ask(QUESTION, 2, **options)


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id", "max_time"])
def test_a_zero_in_a_generation_config_is_a_value(small, name):
    """A zero equals False, and was once taken for an option that is off."""
    with pytest.raises(RestoreKVError, match=f"takes no {name} from a GenerationConfig"):
        small.ask(QUESTION, 2, config=GenerationConfig(**{name: 0}))


@pytest.mark.parametrize(
    "limits, said",
    [
        ({"max_length": 3}, "takes no max_length from a GenerationConfig; pass max_new_tokens"),
        ({"eos_token_id": [5, 9]}, r"eos_token_id .*not \[5, 9\]; set model.generation_config"),
        ({"eos_token_id": 0}, r"not \[0\]; .* or pass stop"),
    ],
)
def test_a_generation_config_that_would_end_answers_elsewhere_is_refused(small, limits, said):
    config = GenerationConfig(**limits)
    asking = {
        "ask": lambda: small.ask(QUESTION, 2, config=config),
        "ask_many": lambda: ask_many([(small, QUESTION)], 2, config=config),
        "chat": lambda: small.chat().ask(QUESTION, 2, config=config),
    }
    for ask in asking.values():
        with pytest.raises(RestoreKVError, match=said):
            ask()


def test_the_models_own_generation_config_may_be_passed(small, monkeypatch):
    """Its EOS ids, one or several, end answers in any case. Its sampling applies only if it is
    passed, and its length does not limit answers.
    """
    plain = small.ask(QUESTION, 8, details=True)
    own = GenerationConfig(
        eos_token_id=[5, plain.ids[3]], max_length=3, do_sample=True, temperature=2.0, top_k=7
    )
    monkeypatch.setattr(small.model, "generation_config", own)
    greedy = small.ask(QUESTION, 8, details=True)
    end = plain.ids.index(plain.ids[3]) + 1
    assert (greedy.ids, greedy.finish) == (plain.ids[:end], "stop")
    monkeypatch.setattr(own, "eos_token_id", [319])
    drawn = small.ask(QUESTION, 8, config=own, seed=3)
    assert drawn == small.ask(QUESTION, 8, temperature=2.0, top_k=7, seed=3)
    assert len(small.ask(QUESTION, 8, config=own, details=True).ids) == 8


@pytest.mark.parametrize("through", ["ask", "ask_many", "chat"])
def test_what_the_models_own_config_forbids_and_answers_do_not_is_told_once(
    tiny_tokenizer, through
):
    """Such as tokens that a model must not write, which were once silently ignored."""
    model = build_model("llama")
    made = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    asking = {
        "ask": lambda: made.ask(QUESTION, 2),
        "ask_many": lambda: ask_many([(made, QUESTION)], 2)[0],
        "chat": lambda: made.chat().ask(QUESTION, 2),
    }
    own = model.generation_config
    own.suppress_tokens = [5, 6]
    own.stop_strings = ["x"]
    own.bad_words_ids = []
    own.min_new_tokens = 0
    with pytest.warns(RestoreKVWarning, match="do not use suppress_tokens and stop_strings of"):
        answer = asking[through]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [ask() for ask in asking.values()] == [answer] * 3


def test_generate_ends_where_its_generation_config_says(small):
    written = small.ask(QUESTION, 8, details=True).ids
    end = written.index(written[3])
    expected = small.ask(QUESTION, end)
    config = GenerationConfig(eos_token_id=[5, written[3]], max_new_tokens=8)
    assert small.generate(QUESTION, generation_config=config) == expected
    assert small.generate(QUESTION, eos_token_id=written[3], max_new_tokens=8) == expected


def test_neutral_options_ask_for_nothing(small):
    config = GenerationConfig(
        num_beams=1, typical_p=1.0, length_penalty=1.0, min_new_tokens=0, penalty_alpha=0.0
    )
    assert small.ask(QUESTION, 3, config=config) == small.ask(QUESTION, 3)


def test_an_option_of_ask_alone_is_not_suggested_again(small):
    with pytest.raises(RestoreKVError, match="only ask and ask_many take answer_"):
        small.chat().ask(QUESTION, answer_prefix="x")


@pytest.mark.parametrize(
    "settings",
    [
        {"offset": 1.5},
        {"streaming_chunk": "30"},
        {"streaming_chunk": True},
        {"restore_tokens": 2.0},
        {"allocation": None},
        {"separator": 3},
        {"offload": "no"},
    ],
)
def test_settings_of_another_type_are_refused(settings):
    (name,) = settings
    with pytest.raises(RestoreKVError, match=f"{name} must be .*, not "):
        CompressionConfig(**settings)


def test_a_config_is_one(small):
    with pytest.raises(RestoreKVError, match="config must be a CompressionConfig, not dict"):
        compress(small.model, small.tokenizer, TEXT, config={})


def test_where_questions_begin_is_part_of_the_digest(small):
    for config in (CompressionConfig(offset=7), CompressionConfig(separator=" ## ")):
        other = compress(small.model, small.tokenizer, TEXT, ratio=0.5, adapter=None, config=config)
        assert other.digest != small.digest


def test_samples_that_cannot_differ_are_told(small):
    with pytest.warns(RestoreKVWarning, match="All 3 answers to a question are the same"):
        first, second, third = small.ask(QUESTION, 4, samples=3)
    assert first == second == third
    with pytest.warns(RestoreKVWarning, match="All 2 answers"):
        ask_many([(small, QUESTION)], 4, samples=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.ask(QUESTION, 4, samples=3, temperature=1.0)


def test_options_that_change_nothing_are_told(small):
    with pytest.warns(RestoreKVWarning, match="^top_p and min_p have no effect"):
        small.ask(QUESTION, 4, top_p=0.5, min_p=0.1)
    with pytest.warns(RestoreKVWarning, match="^top_k has no effect, because temperature 0"):
        small.chat().ask(QUESTION, 4, top_k=5)
    with pytest.warns(RestoreKVWarning, match="^top_p has no effect"):
        small.ask(QUESTION, 4, top_p=0.5, stream=True)
    with pytest.warns(RestoreKVWarning, match="pass details=True"):
        small.ask(QUESTION, 4, logprobs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.ask(QUESTION, 4, seed=3, stop="x")
        small.ask(QUESTION, 4, top_p=0.5, temperature=1.0)
        assert small.ask(QUESTION, 4, logprobs=1, details=True).logprobs


def test_a_generation_config_that_does_not_sample_is_told(small):
    """transformers writes greedily then, too."""
    config = GenerationConfig(temperature=0.7, top_k=5, top_p=1.0)
    for asked in (small, small.chat()):
        with pytest.warns(RestoreKVWarning, match="sets temperature and top_k without do_sample"):
            assert asked.ask(QUESTION, 4, config=config) == small.ask(QUESTION, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.ask(QUESTION, 4, config=GenerationConfig(temperature=1.0, top_p=1.0, top_k=50))
        small.ask(QUESTION, 4, config=GenerationConfig(do_sample=True, temperature=0.7))


def test_paths_and_documents_of_another_type_are_refused(small, tmp_path):
    for refuse in (
        lambda: CompressedContext.load(None, small.model, small.tokenizer),
        lambda: small.save(None),
        lambda: small.chat().save(7),
    ):
        with pytest.raises(RestoreKVError, match="A path must be text or a Path, not"):
            refuse()
    talk = small.chat()
    talk.save(tmp_path / "talk.json")
    with pytest.raises(
        RestoreKVError, match=r"continues over the compressed context .* not over str"
    ):
        Chat.load(tmp_path / "talk.json", "doc.rkv")
