"""`/v1/completions`: the plain model continues a prompt, as transformers does."""

import json
import typing

import pytest
import torch

openai = pytest.importorskip("openai")

from openai.types import completion_create_params  # noqa: E402

from restorekv.model.tokenize import TextStream  # noqa: E402
from restorekv.serve import fields  # noqa: E402
from restorekv.serve.completions import CompletionRequest, list_logprobs  # noqa: E402
from restorekv.serve.engine import BusyError  # noqa: E402
from restorekv.serve.questions import Questions  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from tests.helpers.chat_templates import build_chat_tokenizer  # noqa: E402
from tests.helpers.models import build_model  # noqa: E402
from tests.helpers.serving import VARIANT, client_of, serving  # noqa: E402

TEXT = "The blue house has a green door"
SINGLE = "t"  # one token


@pytest.fixture(scope="module")
def url(model, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with serving(model, tiny_tokenizer, folder, limits=Limits(tokens=64)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return client_of(url)


def generated(model, tokenizer, ids, tokens=12) -> tuple[str, list[int]]:
    """Return what transformers writes after the ids: text and ids."""
    ids = torch.tensor([ids])
    stops = model.generation_config.eos_token_id or tokenizer.eos_token_id
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=stops)
    written = out[0, ids.shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True), written.tolist()


def complete(client, prompt, **options):
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}
    )


@pytest.mark.parametrize("text", [TEXT, SINGLE, " ", "<|im_end|>", TEXT * 9])
def test_the_text_is_transformers(client, model, tiny_tokenizer, text):
    ids = tiny_tokenizer(text).input_ids
    expected, written = generated(model, tiny_tokenizer, ids)
    assert expected
    for prompt in (text, ids, [text], [ids]):
        answer = complete(client, prompt)
        assert [choice.text for choice in answer.choices] == [expected]
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(written))
    pieces = list(complete(client, text, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected
    assert pieces[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert pieces[-1].usage.completion_tokens == len(written)


def test_one_token_is_enough_for_a_model_with_windows(tiny_tokenizer, tmp_path):
    model = build_model("gemma3")
    with serving(model, tiny_tokenizer, tmp_path) as url:
        for text in (SINGLE, TEXT):
            expected, _ = generated(model, tiny_tokenizer, tiny_tokenizer(text).input_ids, 24)
            answer = complete(client_of(url), text, max_tokens=24)
            assert answer.choices[0].text == expected


def test_a_space_at_the_start_belongs_to_the_continuation(client, tiny_tokenizer):
    space = tiny_tokenizer(" ").input_ids[0]
    options = {"logit_bias": {str(space): 100}, "max_tokens": 3}
    assert complete(client, TEXT, **options).choices[0].text == "   "
    pieces = complete(client, TEXT, stream=True, **options)
    assert "".join(piece.choices[0].text for piece in pieces) == "   "


def test_several_prompts_and_samples(client):
    alone = [complete(client, text, n=2, seed=5, temperature=1).choices for text in (TEXT, SINGLE)]
    both = complete(client, [TEXT, SINGLE], n=2, seed=5, temperature=1)
    assert [each.text for each in both.choices] == [each.text for own in alone for each in own]
    assert [each.index for each in both.choices] == [0, 1, 2, 3]
    assert both.usage.total_tokens == both.usage.prompt_tokens + both.usage.completion_tokens


def test_equal_prompts_are_sampled_apart(client):
    found = complete(client, [TEXT] * 4, temperature=1)
    assert len({each.text for each in found.choices}) > 1


def test_what_is_refused_half_way_is_not_written(client, monkeypatch):
    begun = []
    begin = Questions.begin

    def refuse_the_third(self, question, *more):
        if len(begun) == 2:
            raise BusyError
        begun.append(question)
        return begin(self, question, *more)

    monkeypatch.setattr(Questions, "begin", refuse_the_third)
    with pytest.raises(openai.RateLimitError):
        complete(client, [TEXT] * 3)
    assert [each.cancelled for each in begun] == [True, True]


def test_more_prompts_than_may_wait_are_answered_in_turn(model, tiny_tokenizer, tmp_path):
    limits = Limits(tokens=64, max_waiting=2)
    with serving(model, tiny_tokenizer, tmp_path, limits=limits) as url:
        answer = complete(client_of(url), [f"{TEXT} {number}" for number in range(40)])
    assert [each.index for each in answer.choices] == list(range(40))


def test_log_probabilities_are_the_models(client, model, tiny_tokenizer):
    ids = tiny_tokenizer(TEXT).input_ids
    whole = complete(client, TEXT, logprobs=2).choices[0]
    _, written = generated(model, tiny_tokenizer, ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids + written])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(written)), written]
    assert whole.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert "".join(whole.logprobs.tokens).startswith(whole.text[:4])
    assert all(len(top) in (1, 2) for top in whole.logprobs.top_logprobs)
    streamed = [piece.choices[0] for piece in complete(client, TEXT, logprobs=2, stream=True)]
    told = [each.logprobs.token_logprobs for each in streamed if each.logprobs]
    assert [value for values in told for value in values] == whole.logprobs.token_logprobs


@pytest.mark.parametrize("is_held_back", [False, True])
def test_a_stream_counts_characters_from_the_start_of_the_answer(client, is_held_back):
    """Not from the start of a piece: pieces are held back while they could become a stop string."""
    options = {"logprobs": 0, "max_tokens": 48}
    if is_held_back:
        text = complete(client, TEXT, max_tokens=48).choices[0].text
        options["stop"] = [f"{text[place]}~~" for place in range(0, len(text), 3)]
    whole = complete(client, TEXT, **options).choices[0]
    streamed = [piece.choices[0] for piece in complete(client, TEXT, stream=True, **options)]
    told = [each.logprobs.text_offset for each in streamed if each.logprobs]
    assert [place for places in told for place in places] == whole.logprobs.text_offset


def test_tokens_of_one_character_begin_where_it_does(tiny_tokenizer):
    ids = tiny_tokenizer("the caf\u00e9 \u2603 is", add_special_tokens=False).input_ids
    answer = TextStream(tiny_tokenizer, skip_special_tokens=True)
    places = list_logprobs([(token, 0.0, {}) for token in ids], answer).text_offset
    wholes = [tiny_tokenizer.decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids))]
    assert places == [len(whole) for whole in wholes]


def test_a_word_and_the_same_word_after_a_space_are_two_tokens():
    """Llama 2's tokenizer decodes both tokens to the same text if they stand alone."""
    tokenizer = build_chat_tokenizer("llama2")
    word, after_space = tokenizer.convert_tokens_to_ids(["the", "\u2581the"])
    answer = TextStream(tokenizer, skip_special_tokens=True, continues=True)
    told = list_logprobs([(after_space, -1.0, {after_space: -1.0, word: -2.0})], answer)
    assert told.tokens == [" the"]
    assert told.top_logprobs == [{" the": -1.0, "the": -2.0}]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt is empty"),
        ({"prompt": ["a"] * 65}, "more than 64"),
        ({"prompt": ["a", "b"], "stream": True}, "only one text in a stream"),
        ({"prompt": [10**9]}, "must be from 0 to"),
        ({"prompt": [-1]}, "must be from 0 to"),
        ({"prompt": "a " * 10_000}, "shorten it"),
        ({"prompt": "a " * 100_000}, "split it"),
        ({"echo": True}, "echo is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"extra_body": {"strange": 1}}, "strange is not a field"),
        ({"model": VARIANT}, "no document"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_requests_get_a_sentence(client, options, sentence):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **{"prompt": TEXT, **options})
    assert sentence in refused.value.message


def test_every_field_of_the_client_is_in_one_class():
    theirs = typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
    ours = (CompletionRequest.model_fields, fields.COMPLETION_IGNORED, fields.COMPLETION_REFUSED)
    classes = [set(each) for each in ours]
    assert set(theirs) - {"extra_headers"} <= set.union(*classes)
    assert sum(map(len, classes)) == len(set.union(*classes))


def test_unknown_models_and_the_description(client, url):
    with pytest.raises(openai.NotFoundError):
        complete(client, TEXT, model="other")
    paths = json.loads(client._client.get(url.removesuffix("/v1") + "/openapi.json").read())
    assert "post" in paths["paths"]["/v1/completions"]
