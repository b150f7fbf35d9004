"""Sampled answers against transformers' own: processors, distribution, seeds, stops,
log-probabilities, grammars.
"""

import json
import re
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import StoppingCriteria

from restorekv import ask_many, compress
from restorekv.errors import OptionError, RestoreKVError
from restorekv.generation import decoding
from restorekv.generation.constraint import begins_with_space
from restorekv.generation.sampling import (
    SamplingConfig,
    SamplingOptions,
    TokenSampler,
    find_first_stop,
)
from restorekv.readers.extract import extract_text
from tests.helpers.compressing import QUESTIONS, TEXT, make_adapter
from tests.helpers.models import build_model, build_tokenizer

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def small(tiny_tokenizer):
    model = build_model("qwen3")
    return compress(model, tiny_tokenizer, TEXT, ratio=0.3, adapter=make_adapter(model))


@pytest.mark.parametrize("options", SETTINGS)
def test_scores_are_those_of_generate(small, options):
    inputs = small.inputs(QUESTIONS[0])
    config = {
        "top_k": 0,
        "top_p": 1.0,
        **options,
        "do_sample": True,
        "max_new_tokens": 1,
        "pad_token_id": 0,
    }
    result = small.model.generate(
        **inputs,
        past_key_values=small.cache.fork(),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **config,
    )
    ours = SamplingConfig.make(**options).warpers()(
        inputs["input_ids"], result.logits[0].float().clone()
    )
    assert torch.equal(ours.isinf(), result.scores[0].isinf())
    torch.testing.assert_close(ours, result.scores[0])


def test_draws_follow_the_distribution():
    """A chi-squared test of 10,000 first tokens, each with a different seed."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -8.0])
    sampling = SamplingConfig(temperature=0.8, top_k=6)
    counts = torch.zeros(7)
    for seed in range(10_000):
        counts[TokenSampler(sampling, None, torch.tensor([[0]]), seed).sample(logits)] += 1
    expected = (logits[:6] / 0.8).softmax(-1) * 10_000
    assert counts[6] == 0
    assert ((counts[:6] - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: p = 0.001


def test_an_answer_depends_on_its_seed_alone(small):
    hot = {"temperature": 1.5}
    alone = [small.ask(question, 12, seed=3, **hot) for question in QUESTIONS]
    assert small.ask(QUESTIONS, 12, seed=3, **hot) == alone
    assert small.ask(QUESTIONS[::-1], 12, seed=3, **hot) == alone[::-1]
    assert ask_many([(small, QUESTIONS)], 12, seed=3, **hot) == [alone]
    drawn = small.ask(QUESTIONS[0], 12, seed=3, samples=3, **hot)
    assert drawn == [small.ask(QUESTIONS[0], 12, seed=3 + number, **hot) for number in range(3)]
    assert len(set(drawn)) > 1
    assert "".join(small.ask(QUESTIONS[0], 12, seed=3, stream=True, **hot)) == alone[0]


def test_rows_beyond_one_batch_have_their_own_caches_limits_and_seeds(small, monkeypatch):
    """There are more rows than are written at once, and each is answered as if it were alone. The
    first rows have no restore tokens.
    """
    monkeypatch.setattr(small.model.generation_config, "eos_token_id", 319)
    other = compress(small.model, small.tokenizer, TEXT, ratio=0.6, adapter=None)
    asked = [(other, QUESTIONS * 3), (small, QUESTIONS * 3)]
    limits = [1 + number % 5 for number in range(18)]
    options = {"temperature": 1.5, "seed": 3}
    first, second = ask_many(asked, limits, details=True, **options)
    assert len(first) + len(second) == len(limits) > decoding.BATCH
    for number, answer in enumerate([*first, *second]):
        document = other if number < 9 else small
        question = QUESTIONS[number % 3]
        assert answer == document.ask(question, limits[number], details=True, **options)
    drawn = small.ask(QUESTIONS[0], 4, samples=18, **options)
    seeds = range(3, 21)
    assert drawn == [small.ask(QUESTIONS[0], 4, temperature=1.5, seed=seed) for seed in seeds]


def test_temperature_zero_is_greedy(small):
    greedy = small.ask(QUESTIONS, 12)
    assert small.ask(QUESTIONS, 12, temperature=0, seed=9) == greedy
    assert small.ask(QUESTIONS, 12, logprobs=0) == greedy
    assert small.ask(QUESTIONS, 12, temperature=1.0, top_k=1) == greedy


def test_stop_strings_end_answers_before_them(small):
    whole = small.ask(QUESTIONS[0], 20, details=True)
    stop = whole.text[4:7]
    assert stop
    cut = whole.text[: whole.text.index(stop)]
    stopped = small.ask(QUESTIONS[0], 20, stop=["never there", stop], details=True)
    assert (stopped.text, stopped.finish) == (cut, "stop") and len(stopped.ids) < len(whole.ids)
    pieces = list(small.ask(QUESTIONS[0], 20, stop=stop, stream=True))
    assert "".join(pieces) == cut
    assert whole.finish == "length" and whole.prompt_tokens == small.inputs(QUESTIONS[0])[
        "input_ids"
    ].shape[1] - (small.cache.get_seq_length())


def test_logprobs_are_the_models(small):
    answer = small.ask(QUESTIONS[0], 6, details=True, logprobs=4, temperature=1.2, seed=1)
    asked = small.inputs(QUESTIONS[0])["input_ids"][:, small.cache.get_seq_length() :]
    ids = torch.cat([asked, torch.tensor([answer.ids])], -1)
    with torch.no_grad():
        logits = small.model(ids, past_key_values=small.cache.fork(), use_cache=True).logits[0]
    expected = logits[asked.shape[1] - 1 : -1].log_softmax(-1)
    chosen = expected.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-4, rtol=1e-4)
    best = expected.topk(4)
    assert [list(each) for each in answer.top] == best.indices.tolist()


def test_bias_and_penalties_come_before_the_rest_and_after_log_probabilities():
    """Penalties follow OpenAI's formula and count only the answer; the text has ids 1 and 2."""
    options = {"logit_bias": {3: 2.0, 5: -1.0}, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    sampling = SamplingConfig(repetition_penalty=1.5, logprobs=6, **options)
    tokenizer = build_tokenizer()
    sampler = TokenSampler(sampling, tokenizer, torch.tensor([[1, 2]]), 0)
    logits = torch.tensor([2.0, 3.2, -1.0, 1.4, 2.2, 2.6])
    read = [1, 2]
    for _ in range(8):
        wanted = logits.clone()
        wanted[3] += 2.0
        wanted[5] -= 1.0
        for token in set(sampler.answer):
            wanted[token] -= 0.7 * sampler.answer.count(token) + 0.4
        for token in set(read):
            wanted[token] *= 1.5 if wanted[token] < 0 else 1 / 1.5
        chosen = sampler.sample(logits)
        assert chosen == int(wanted.argmax())
        read.append(chosen)
        assert sampler.logprobs[-1] == pytest.approx(float(logits.log_softmax(-1)[chosen]))
    assert len(set(sampler.answer)) > 2 and sampler.ids.tolist() == [read]


def test_the_first_of_several_stop_strings_ends_an_answer():
    assert find_first_stop(["house", "red", "x"], "the red house") == 4
    assert find_first_stop(["red", "house"], "the red house") == 4
    assert find_first_stop(["blue"], "the red house") is None


def test_a_generation_config_is_understood(small):
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.9, top_k=11, num_return_sequences=2
    )
    made = SamplingConfig.make(config=config, seed=4)
    assert made == SamplingConfig(temperature=0.7, top_p=0.9, top_k=11, samples=2, seed=4)
    assert SamplingConfig.make(config=GenerationConfig(repetition_penalty=1.2)) == SamplingConfig(
        repetition_penalty=1.2
    )
    with pytest.raises(RestoreKVError, match="num_beams"):
        small.ask(QUESTIONS[0], config=GenerationConfig(num_beams=4))


def test_criteria_end_an_answer(small):
    class Third(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return torch.full((len(ids),), ids.shape[1] >= length + 3)

    length = small.context.num_tokens + small.ask(QUESTIONS[0], 1, details=True).prompt_tokens
    assert len(small.ask(QUESTIONS[0], 20, criteria=[Third()], details=True).ids) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"samples": 0},
        {"stop": [""]},
        {"logprobs": 1000},
        {"regex": "a", "json_schema": {}},
        {"temperature": "1"},
        {"temperature": 1e-45},
        {"top_k": 5.5},
        {"samples": "2"},
        {"logprobs": True},
        {"regex": b"a"},
        {"processors": 3},
        {"config": {}},
    ],
)
def test_refused_options(small, wrong):
    with pytest.raises(RestoreKVError, match=f"^{next(iter(wrong))} (must be|is for)"):
        small.ask(QUESTIONS[0], **wrong)


def test_unknown_options_are_refused_by_name(small):
    with pytest.raises(RestoreKVError, match="no option temprature; did you mean temperature"):
        small.ask(QUESTIONS[0], temprature=1)
    with pytest.raises(RestoreKVError, match="graph=True always takes the most likely"):
        small.ask(QUESTIONS[0], graph=True, temperature=1.0)


def test_the_options_of_ask_are_those_of_decoding():
    names = {each.name for each in fields(SamplingConfig)}
    assert set(get_type_hints(SamplingOptions)) == names - {"samples"} | {"config", "max_tokens"}


@pytest.mark.slow
def test_grammars_hold(small):
    pytest.importorskip("llguidance")
    answer = small.ask(QUESTIONS[0], 30, regex="[a-c]{2,4} (yes|no)", temperature=2.0, seed=2)
    assert re.fullmatch("[a-c]{2,4} (yes|no)", answer)
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    for seed in range(3):
        found = json.loads(
            small.ask(QUESTIONS[0], 60, json_schema=schema, temperature=1.0, seed=seed)
        )
        assert set(found) == {"age"} and found["age"] <= 99
    assert re.fullmatch("[a-c]{3}", small.ask(QUESTIONS[0], 30, regex="^[a-c]{3}$"))
    for empty in ({"regex": "[^\\s\\S]"}, {"json_schema": {"$ref": "#"}}):
        with pytest.raises(
            RestoreKVError, match=r"No text matches|cannot be used|left its grammar"
        ):
            small.ask(QUESTIONS[0], **empty)
    for wrong, what in (
        ({"regex": "("}, "regular expression"),
        ({"json_schema": '{"type": 3}'}, "JSON schema"),
    ):
        with pytest.raises(RestoreKVError, match=f"The {what}.* cannot be used"):
            small.ask(QUESTIONS[0], **wrong)


@pytest.mark.parametrize(
    "regex, sentence",
    [
        ("(", "The regular expression '(' cannot be used: unclosed group; correct it."),
        (
            "[z-a]+",
            "The regular expression '[z-a]+' cannot be used: invalid character class range, the "
            "start must be <= the end; correct it.",
        ),
        (
            r"(a)\1",
            r"The regular expression '(a)\1' cannot be used: backreferences are not supported; "
            "write it without.",
        ),
        (
            r"\bfoo\b",
            r"The regular expression '\bfoo\b' cannot be used: look-around, such as \b, ^ and $ "
            "between characters, is not supported; write it without.",
        ),
    ],
)
def test_a_regular_expression_that_is_none_says_why_in_one_sentence(small, regex, sentence):
    """The error of llguidance has several lines, with positions in a grammar."""
    with pytest.raises(OptionError) as refused:
        small.ask(QUESTIONS[0], regex=regex)
    assert (str(refused.value), refused.value.option) == (sentence, "regex")


@pytest.mark.parametrize(
    "schema, sentence",
    [
        (
            {"type": "array", "uniqueItems": True},
            "The JSON schema cannot be used: the keyword uniqueItems cannot be enforced; write it "
            "without.",
        ),
        (
            {"not": {}, "uniqueItems": True},
            "The JSON schema cannot be used: the keywords not, uniqueItems cannot be enforced; "
            "write it without.",
        ),
        ({"type": "foo"}, "The JSON schema cannot be used: Invalid type: foo; correct it."),
        (
            {"type": "string", "pattern": "("},
            "The JSON schema cannot be used: unclosed group; correct it.",
        ),
        (
            {"oneOf": [{"type": "string"}, {"type": "string"}]},
            "The JSON schema cannot be used: oneOf is taken where its schemas differ in their "
            "types or in a constant that they require, so that no answer matches two of them; use "
            "anyOf.",
        ),
    ],
)
def test_a_json_schema_that_cannot_be_used_says_why_in_one_sentence(small, schema, sentence):
    """The error of llguidance alone does not say what to do."""
    with pytest.raises(OptionError) as refused:
        small.ask(QUESTIONS[0], json_schema=schema)
    assert (str(refused.value), refused.value.option) == (sentence, "json_schema")


def test_a_long_regular_expression_is_named_by_its_start(small):
    with pytest.raises(OptionError) as refused:
        small.ask(QUESTIONS[0], regex="(" + "a\n" * 200)
    assert len(str(refused.value)) < 250 and "\n" not in str(refused.value)


def test_no_regular_expression_takes_all_memory(small):
    """Large counts, and syntax that two libraries read differently, once ended the process."""
    assert begins_with_space("[ a]{1000000000}")
    assert not begins_with_space("a{1000000000}")
    assert begins_with_space("a{0,1000000000} b")
    assert not begins_with_space("(?R)a")
    with pytest.raises(OptionError, match="cannot be used"):
        small.ask(QUESTIONS[0], regex="(" * 20_000)


def test_without_llguidance_one_sentence(small, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RestoreKVError, match=r"restorekv\[constrained\]"):
        small.ask(QUESTIONS[0], regex="a")


def test_a_model_may_have_more_ids_than_its_tokenizer(tiny_tokenizer):
    pytest.importorskip("llguidance")
    model = build_model("qwen3", vocab_size=400)
    made = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    assert re.fullmatch("[a-c]{4}", made.ask(QUESTIONS[0], 30, regex="[a-c]{4}", temperature=1.0))


def test_an_eos_that_is_text_does_not_end_an_answer_inside_its_grammar(tiny_tokenizer):
    """A model may end its answers with a line break, which JSON may have between its parts."""
    pytest.importorskip("llguidance")
    model = build_model("llama")
    line_break, digit = tiny_tokenizer.encode("\n7", add_special_tokens=False)
    model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, line_break, digit]
    made = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=None)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    likely = {line_break: 50.0, digit: 50.0}
    answer = made.ask(QUESTIONS[0], 40, json_schema=schema, logit_bias=likely, details=True)
    assert set(json.loads(answer.text)) == {"a"} and answer.finish == "stop"
    assert re.fullmatch("code [0-9]{4}", made.ask(QUESTIONS[0], 40, regex="code [0-9]{4}"))
    answer = made.ask(QUESTIONS[0], 40, regex="[0-9]{2,}", logit_bias=likely, details=True)
    assert re.fullmatch("[0-9]{2}", answer.text) and answer.finish == "stop"
    with pytest.raises(RestoreKVError, match="ends every answer; give another one"):
        made.ask(QUESTIONS[0], 40, regex="code 7")


def test_the_models_own_generation_config_is_understood(small):
    small.model.generation_config.output_attentions = False
    assert small.ask(QUESTIONS[0], 6, config=small.model.generation_config) == small.ask(
        QUESTIONS[0], 6
    )
    with pytest.raises(RestoreKVError, match=r"itself: ask\(question, max_new_tokens=1\)"):
        small.ask(QUESTIONS[0], config=GenerationConfig(max_new_tokens=1))


@pytest.mark.parametrize("name, value", [("processors", []), ("criteria", []), ("logit_bias", {})])
def test_an_empty_option_asks_for_nothing(small, name, value):
    """A CUDA graph was once refused because such an option was passed."""
    assert SamplingConfig(**{name: value}) == SamplingConfig()
    expected = small.ask(QUESTIONS[0], 3)
    assert small.ask(QUESTIONS[0], 3, graph=True, **{name: value}) == expected


def test_max_tokens_is_the_limit_of_an_answer(small):
    expected = small.ask(QUESTIONS[0], 3, details=True)
    assert len(expected.ids) == 3
    assert small.ask(QUESTIONS[0], max_tokens=3, details=True).ids == expected.ids
    assert small.chat().ask(QUESTIONS[0], max_tokens=3, details=True).ids == expected.ids
    assert ask_many([(small, [QUESTIONS[0]])], max_tokens=3) == [[expected.text]]
    assert small.ask(QUESTIONS[0], 3, max_tokens=None) == expected.text
    assert small.ask(QUESTIONS[0], None) == small.ask(QUESTIONS[0])


def test_none_leaves_an_option_as_it_is(small):
    names = [each.name for each in fields(SamplingConfig)]
    assert SamplingConfig(**dict.fromkeys(names)) == SamplingConfig()
    config = SamplingConfig(stop=["e"], temperature=1.0, seed=3)
    options = {"stop": None, "temperature": None, "seed": None}
    assert SamplingConfig.make(config, **options) == config
    # Of these None is a value.
    assert SamplingConfig.make(replace(config, regex="a"), regex=None) == config
    expected = small.ask(QUESTIONS[0], 6)
    assert small.ask(QUESTIONS[0], 6, **options) == expected
    assert small.chat().ask(QUESTIONS[0], 6, stop_repeats=None, **options) == expected


@pytest.mark.parametrize(
    "name, said",
    [
        ("temp", "did you mean temperature?"),
        ("p", "did you mean top_p?"),
        ("top", "did you mean top_p or top_k?"),
        ("penalty", "did you mean repetition_penalty, frequency_penalty or presence_penalty?"),
        ("repeat_penalty", "did you mean repetition_penalty?"),
        ("stop_sequences", "did you mean stop?"),
        ("n_tokens", "did you mean max_new_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("prefix", "did you mean answer_prefix?"),
        ("system", "CompressionConfig(system=...)"),
        ("wrong", "use some of temperature, top_p"),
    ],
)
def test_hints_name_what_is_alike(small, name, said):
    with pytest.raises(RestoreKVError, match=f"no option {name}; .*{re.escape(said)}"):
        small.ask(QUESTIONS[0], **{name: 1})


@pytest.mark.parametrize(
    "name, said",
    [
        ("temp", "there is no argument temp; did you mean temperature? The arguments are temp"),
        ("max_new_tokens", "pass max_new_tokens to ask itself: ask(question, max_new_tokens=64)"),
        ("max_length", "pass max_new_tokens to ask itself"),
        ("stream", "pass it to ask itself: ask(question, stream=...)"),
        ("wrong", "use some of temperature"),
    ],
)
def test_wrong_arguments_of_a_sampling_config(name, said):
    sentence = f"^SamplingConfig: .*{re.escape(said)}.* criteria.$"
    with pytest.raises(TypeError, match=sentence) as told:
        SamplingConfig(**{name: 1})
    assert isinstance(told.value, RestoreKVError)
    with pytest.raises(TypeError, match=r"^SamplingConfig: .*; call SamplingConfig\(temp"):
        SamplingConfig(*range(40))


def test_names_of_other_libraries_get_a_hint(small):
    with pytest.raises(RestoreKVError, match="no option do_sample; a temperature above 0 samples"):
        small.ask(QUESTIONS[0], do_sample=True)
    with pytest.raises(RestoreKVError, match="samples is the number of answers"):
        small.ask(QUESTIONS[0], num_return_sequences=2)
    with pytest.raises(RestoreKVError, match=r"no evictor 'kvzipp' .did you mean kvzip"):
        compress(small.model, small.tokenizer, TEXT, evictor="kvzipp")


def test_the_path_of_a_page_is_read_as_its_text(small, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f"<html><script>hidden</script><p>{TEXT.strip()}</p></html>")
    made = compress(small.model, small.tokenizer, page, ratio=0.5, adapter=None)
    text = extract_text("page.html", page.read_bytes())
    plain = compress(small.model, small.tokenizer, text, ratio=0.5, adapter=None)
    assert made.context.ids.tolist() == plain.context.ids.tolist()


@pytest.mark.parametrize("limit", [3, 40])
@pytest.mark.parametrize("options", [{}, {"stop": ["e", "a"]}, {"stop_repeats": 2}])
def test_a_stream_tells_at_its_end_how_the_answer_ended(small, limit, options):
    expected = small.ask(QUESTIONS[0], limit, details=True, **options)
    stream = small.ask(QUESTIONS[0], limit, stream=True, **options)
    assert stream.answer is None
    assert "".join(stream) == expected.text
    assert (stream.answer.finish, stream.answer.ids) == (expected.finish, expected.ids)
    assert next(stream, None) is None and stream.answer.text == expected.text
    left = small.ask(QUESTIONS[0], limit, stream=True, **options)
    next(left, None)
    left.close()
    assert next(left, None) is None and left.answer is None


def test_a_misspelled_argument_of_ask_gets_its_name():
    with pytest.raises(RestoreKVError, match="did you mean max_new_tokens"):
        SamplingConfig.make(max_new_token=5)
