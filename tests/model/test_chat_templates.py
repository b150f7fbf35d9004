"""What a popular model reads of a document, a question and earlier turns: the ids that its chat
template and tokenizer make of the whole conversation.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from restorekv.errors import RestoreKVError
from restorekv.generation.chat import encode_conversation
from restorekv.generation.decoding import get_stop_ids
from restorekv.model.load import load_model
from restorekv.model.prompt import (
    DEFAULT_SEPARATOR,
    FIXED_DATE,
    NOW,
    encode_plain_chat,
    make_context,
)
from tests.helpers.chat_templates import TEMPLATES, build_chat_tokenizer
from tests.helpers.compressing import compress_with
from tests.helpers.models import build_model

TEXT = "the code is 7."
QUESTION = "Who lives in the house?"
TURNS = [("What is the code?", "It is 7."), ("Who?", "Two:\n\n1. the cook")]
NO_SYSTEM = {"mistral1", "gemma2"}  # these templates refuse a system message
# Writes the system message into the last of the user's messages; restorekv, before the document.
SYSTEM_LAST = {"mistral3"}


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    """The ids that transformers makes of messages, on the day that templates print here."""
    template = NOW.sub(lambda call: repr(FIXED_DATE.strftime(call[2])), tokenizer.chat_template)
    whole = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer.encode(whole, add_special_tokens=False)


def make_messages(system: str, turns: list[tuple[str, str]], question: str) -> list[dict[str, str]]:
    """The conversation that follows TEXT."""
    texts = [text for turn in turns for text in turn] + [question]
    texts[0] = TEXT + DEFAULT_SEPARATOR + texts[0]
    messages = [{"role": "system", "content": system}] if system else []
    for number, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return messages


@pytest.fixture(scope="module", params=TEMPLATES)
def named(request: pytest.FixtureRequest) -> tuple[str, PreTrainedTokenizerFast]:
    return request.param, build_chat_tokenizer(request.param)


@pytest.mark.parametrize("turns", [[], TURNS[:1], TURNS], ids=["first", "second", "third"])
@pytest.mark.parametrize("system", ["", "Be brief."], ids=["plain", "system"])
def test_a_conversation_has_the_ids_that_its_template_makes(named, system, turns):
    name, tokenizer = named
    if system and name in NO_SYSTEM:
        with pytest.raises(RestoreKVError, match="chat template refuses these messages"):
            make_context(tokenizer, TEXT, DEFAULT_SEPARATOR, system)
        return
    context = make_context(tokenizer, TEXT, DEFAULT_SEPARATOR, system)
    asked = encode_conversation(tokenizer, context, turns, QUESTION)
    ours = [*context.ids[0].tolist(), *asked.tolist()]
    messages = make_messages(system, turns, QUESTION)
    if not (system and turns and name in SYSTEM_LAST):
        assert tokenizer.convert_ids_to_tokens(ours) == tokenizer.convert_ids_to_tokens(
            render(tokenizer, messages)
        )
    texts = [TEXT + DEFAULT_SEPARATOR + (turns[0][0] if turns else QUESTION)]
    plain_turns = [(texts[0], turns[0][1]), *turns[1:]] if turns else []
    plain = encode_plain_chat(tokenizer, plain_turns, QUESTION if turns else texts[0], system)
    assert plain.tolist() == render(tokenizer, messages)


@pytest.mark.parametrize("name", ["qwen3-thinking", "r1-distill", "exaone4", "qwen3"])
def test_thoughts_of_earlier_answers_are_dropped_where_the_template_drops_them(name):
    """A client sends back what it was answered."""
    tokenizer = build_chat_tokenizer(name)
    context = make_context(tokenizer, TEXT, DEFAULT_SEPARATOR)
    turns = [("Who?", "Let me see.\nThe cook?\n</think>\n\nthe cook")]
    asked = encode_conversation(tokenizer, context, turns, QUESTION)
    wanted = render(tokenizer, make_messages("", turns, QUESTION))
    assert [*context.ids[0].tolist(), *asked.tolist()] == wanted


@pytest.mark.parametrize("name", ["llama2", "mistral3", "gemma3", "llama3"])
@pytest.mark.parametrize("more", ["and the code", " and the code", "\n\nthe code", "</s><bos>the"])
def test_a_text_that_is_appended_follows_as_it_is(name, more):
    """Tokenizers as Llama 2's put a space before every text, also one that goes on."""
    tokenizer = build_chat_tokenizer(name)
    model = build_model("llama", vocab_size=400)
    small = compress_with(model, tokenizer, TEXT * 9, ratio=0.5, adapter=None)
    longer = small.append(more)
    whole = make_context(tokenizer, TEXT * 9 + more)
    assert tokenizer.convert_ids_to_tokens(longer.context.ids[0]) == (
        tokenizer.convert_ids_to_tokens(whole.ids[0])
    )


def test_a_conversation_without_a_template_has_no_spaces_between():
    tokenizer = build_chat_tokenizer("llama2")
    tokenizer.chat_template = None
    context = make_context(tokenizer, TEXT, DEFAULT_SEPARATOR)
    asked = encode_conversation(tokenizer, context, [("Who?", "the cook")], QUESTION, "", "It")
    whole = f"<s>{TEXT}{DEFAULT_SEPARATOR}Who?\nthe cook\n{QUESTION}\nIt"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    assert [*context.ids[0].tolist(), *asked.tolist()] == ids


@pytest.mark.parametrize(
    ("name", "own", "end"),
    [
        ("chatml", 7, "<|im_end|>"),
        ("llama3", [7, 8], "<|eot_id|>"),
        ("gemma3", 7, "<end_of_turn>"),
        ("phi3", 7, "<|end|>"),
        ("llama2", 7, "</s>"),
        ("glm4", 7, "<|user|>"),
        ("gpt-oss", 7, None),  # <|end|> follows its thoughts, too
        ("falcon3", 7, "<|endoftext|>"),
    ],
)
def test_a_loaded_model_ends_answers_as_its_template_does(tmp_path, name, own, end):
    """Though its generation config does not name the token, as that of many fine-tuned models."""
    tokenizer = build_chat_tokenizer(name)
    model = build_model("llama", vocab_size=400)
    model.generation_config.eos_token_id = own
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, loaded_tokenizer = load_model(tmp_path)
    ids = {7, 8} if name == "llama3" else {7}
    if end is not None:
        ids.add(tokenizer.convert_tokens_to_ids(end))
    assert get_stop_ids(loaded, loaded_tokenizer) == ids
