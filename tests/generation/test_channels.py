"""Answers in channels, as gpt-oss writes them: only the final channel is shown, also in streams."""

import pytest

from restorekv.errors import RestoreKVWarning
from restorekv.generation.answers import GrowingText
from restorekv.generation.decoding import decode_answer
from restorekv.model.channels import find_shown_ids
from restorekv.model.prompt import encode_question
from tests.helpers.chat_templates import build_chat_tokenizer
from tests.helpers.compressing import make_small
from tests.helpers.dictating import Dictate

THOUGHTS = "<|channel|>analysis<|message|>We need the code. The end?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ANSWER = "The code is 7. The end."
WRITTEN = f"{THOUGHTS}{FINAL}{ANSWER}<|return|>"
QUESTION = "What is the code?"


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer("gpt-oss")


@pytest.fixture(scope="module")
def small(tokenizer):
    made = make_small(tokenizer, separator="\n\n")
    made.model.generation_config.eos_token_id = tokenizer.eos_token_id
    return made


def dictate(small, written=WRITTEN):
    return {"processors": [Dictate(small.tokenizer, written)], "max_new_tokens": 200}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (WRITTEN, ANSWER),
        (f"{THOUGHTS}<|channel|>final <|constrain|>json<|message|>{{}}<|return|>", "{}"),
        (f"{FINAL}{ANSWER}<|return|>", ANSWER),
        (f"{ANSWER}<|return|>", ANSWER),  # no channel, where the answer's start was given
        (f"<|message|>{ANSWER}<|end|>", ANSWER),
        (f"{THOUGHTS}<|channel|>commentary to=functions.f<|message|>{{}}<|call|>", ""),
        (THOUGHTS, ""),
        (f"{THOUGHTS}<|channel|>fin", ""),
    ],
)
def test_the_final_channel_is_the_answer(tokenizer, written, shown):
    ids = tokenizer.encode(written, add_special_tokens=False)
    stops = {tokenizer.eos_token_id}
    assert decode_answer(tokenizer, ids, stops) == shown
    text = GrowingText(tokenizer, stops)
    assert "".join([*map(text.push, ids), text.rest()]) == shown


def test_other_tokenizers_have_no_channels(tiny_tokenizer):
    ids = tiny_tokenizer.encode("<|im_start|>" + WRITTEN, add_special_tokens=False)
    assert find_shown_ids(tiny_tokenizer, ids) == ids


def test_answers_and_streams_are_those_of_the_final_channel(small):
    answer = small.ask(QUESTION, details=True, **dictate(small))
    assert (answer.text, answer.finish) == (ANSWER, "stop")
    assert small.tokenizer.decode(answer.ids) == WRITTEN
    assert "".join(small.ask(QUESTION, stream=True, **dictate(small))) == ANSWER


def test_a_stop_string_in_the_thoughts_ends_nothing(small):
    answer = small.ask(QUESTION, details=True, stop="end", **dictate(small))
    assert (answer.text, answer.finish) == ("The code is 7. The ", "stop")
    chat = small.chat()
    assert chat.ask(QUESTION, stop="end", **dictate(small)) == answer.text
    assert small.tokenizer.decode(chat.turns[0].answer_ids) == f"{THOUGHTS}{FINAL}{answer.text}"


def test_a_turn_that_is_cut_inside_a_token_is_an_answer_in_the_final_channel(small):
    chat = small.chat()
    assert chat.ask(QUESTION, stop="ode", **dictate(small)) == "The c"
    whole = small.tokenizer.decode([*chat.ids(), chat.turns[0].answer_ids[-1]])
    assert whole == f"\n\n{QUESTION}<|end|><|start|>assistant{FINAL}The c"


def test_a_conversation_goes_on_after_the_final_channel(small):
    chat = small.chat()
    for _ in range(2):
        assert chat.ask(QUESTION, **dictate(small)) == ANSWER
    turn = f"{QUESTION}<|end|><|start|>assistant{WRITTEN}".removesuffix("<|return|>")
    whole = f"\n\n{turn}<|end|><|start|>user<|message|>{turn}"
    assert small.tokenizer.decode(chat.ids()) == whole


def test_an_answer_that_ends_among_its_thoughts_is_empty_and_says_so(small):
    options = {**dictate(small), "max_new_tokens": 8}
    with pytest.warns(RestoreKVWarning, match="before its final channel and is empty; allow more"):
        assert small.ask(QUESTION, **options) == ""


def test_an_answer_that_is_begun_begins_in_the_final_channel(small):
    asked = encode_question(small.tokenizer, small.context, QUESTION, "It is")
    told = f"\n\n{QUESTION}<|end|><|start|>assistant{FINAL}It is"
    assert small.tokenizer.decode(asked[0]) == told
