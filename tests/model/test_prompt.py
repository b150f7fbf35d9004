"""Chat templates split as kvpress splits them, and what is refused."""

import copy

import pytest
import torch

from restorekv.errors import RestoreKVError
from restorekv.model.load import load_tokenizer
from restorekv.model.prompt import (
    DEFAULT_SEPARATOR,
    encode_question,
    get_default_separator,
    hash_template,
    make_context,
    split_template,
)

TEXT = "The code of the red house is seven.\n"


def test_pieces_join_to_the_rendered_conversation(tiny_tokenizer):
    context = make_context(tiny_tokenizer, TEXT)
    question = "What is the code?"
    asked = encode_question(tiny_tokenizer, context, question, answer_prefix="It is")
    whole = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT + question}], tokenize=False, add_generation_prompt=True
    )
    assert tiny_tokenizer.decode(torch.cat([context.ids, asked], 1)[0]) == whole + "It is"
    assert tiny_tokenizer.decode(context.ids[0, : context.prefix_length]) == "<|im_start|>user\n"
    assert tiny_tokenizer.decode(context.ids[0, context.prefix_length :]) == TEXT
    assert (
        tiny_tokenizer.decode(context.suffix_ids[0])
        == context.suffix_text
        == "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert context.text_tokens + context.prefix_length == context.num_tokens == context.ids.shape[1]


def test_contexts_can_be_compared(tiny_tokenizer):
    context = make_context(tiny_tokenizer, TEXT)
    assert context in [make_context(tiny_tokenizer, TEXT), context]
    assert len({context, make_context(tiny_tokenizer, TEXT)}) == 2


def test_the_mark_of_a_message_may_stand_in_the_text(tiny_tokenizer):
    text = "<restorekv-message> is a word"
    context = make_context(tiny_tokenizer, text)
    assert tiny_tokenizer.decode(context.ids[0, context.prefix_length :]) == text


def test_without_a_template(tiny_tokenizer):
    tokenizer = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    context = make_context(tokenizer, TEXT)
    assert context.prefix_length == 0 and context.suffix_text == "\n"
    assert hash_template(tokenizer) != hash_template(tiny_tokenizer)


@pytest.mark.parametrize("text", ["", "  \n", None, 5, b"bytes"])
def test_refused_contexts(tiny_tokenizer, text):
    with pytest.raises(RestoreKVError, match="context"):
        make_context(tiny_tokenizer, text)


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("", "question is empty"),
        (" ", "question is empty"),
        (None, "must be text"),
        (["a?"], "must be text, not a list"),
    ],
)
def test_refused_questions(tiny_tokenizer, question, told):
    context = make_context(tiny_tokenizer, TEXT)
    with pytest.raises(RestoreKVError, match=told):
        encode_question(tiny_tokenizer, context, question)


def test_a_template_that_drops_the_user(tiny_tokenizer):
    tokenizer = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template="hello"
    )
    with pytest.raises(RestoreKVError, match="drops the user's words"):
        make_context(tokenizer, TEXT)


@pytest.mark.parametrize(
    ("template", "refusal"),
    [
        ({"rag": "x", "tool_use": "y"}, r"several chat templates and none is its default; set "),
        ("{{ messages[0]['content'] + messages }}", r"fails for these messages \(.*str.*; set "),
    ],
)
def test_a_template_that_cannot_be_written_gets_a_sentence(tiny_tokenizer, template, refusal):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(RestoreKVError, match=refusal):
        make_context(tokenizer, "a text")


def test_a_template_that_drops_the_system_message(tiny_tokenizer):
    """Even if the message is a word that the template itself writes."""
    template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
    tokenizer = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template=f"{template}{{% endfor %}}"
    )
    assert make_context(tokenizer, TEXT).text_tokens
    for system in ("Be brief.", "user"):
        with pytest.raises(RestoreKVError, match="no place for these messages"):
            make_context(tokenizer, TEXT, system=system)


def test_a_system_message_writes_no_control_tokens(tiny_tokenizer):
    with pytest.raises(
        RestoreKVError,
        match=r"system message has <\|im_end\|>, a control token of the chat template",
    ):
        make_context(tiny_tokenizer, TEXT, system="Be brief.<|im_end|>")


def test_a_template_with_a_date_makes_the_same_prompt_every_day(tiny_tokenizer):
    dated = "{{ strftime_now('%d %B %Y') }} " + tiny_tokenizer.chat_template
    tokenizer = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template=dated
    )
    assert split_template(tokenizer)[0].startswith("01 January 2026 ") and hash_template(
        tokenizer
    ) == hash_template(tokenizer)


def test_what_parts_text_and_question_is_part_of_the_prompt(tiny_tokenizer):
    """The tiny model was trained without anything between; others get a blank line unless their
    files name it.
    """
    apart = make_context(tiny_tokenizer, TEXT, get_default_separator(tiny_tokenizer))
    plain = make_context(tiny_tokenizer, TEXT)
    assert (apart.separator, plain.separator) == (DEFAULT_SEPARATOR, "")
    assert torch.equal(
        encode_question(tiny_tokenizer, apart, "Who?"),
        encode_question(tiny_tokenizer, plain, f"{DEFAULT_SEPARATOR}Who?"),
    )
    assert get_default_separator(load_tokenizer("tiny")) == ""
