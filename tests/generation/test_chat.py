"""Conversations: their ids are what the template makes of all turns, and each is read only once;
undo, fork, fold, files.
"""

import asyncio
import copy
import json
import warnings

import pytest
import torch
from transformers import LogitsProcessor

from restorekv import Chat, CompressedContext, compose, compress
from restorekv.errors import CacheFileError, RestoreKVError, RestoreKVWarning
from restorekv.generation.chat import encode_conversation
from restorekv.generation.decoding import get_stop_ids
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.chat_templates import build_chat_tokenizer
from tests.helpers.compressing import QUESTIONS, TEXT, compress_with, make_small
from tests.helpers.dictating import Dictate
from tests.helpers.models import build_model

SPOKEN = "the house is blue; who lives in the house?"


@pytest.fixture
def small(tiny_tokenizer):
    return make_small(tiny_tokenizer)


def speak_until(chat, question, stop):
    """Ask, and return an answer with the words of SPOKEN, cut at a stop string."""
    spoken = Dictate(chat.document.tokenizer, SPOKEN)
    return chat.ask(question, 64, stop=stop, details=True, processors=[spoken])


def tail_ids(chat):
    return [*chat.ids(), *chat.turns[-1].answer.ids[-1:]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_whole_conversation_is_what_the_template_makes_of_it(tiny_tokenizer, family, system):
    """Ids and greedy answers are those of the whole conversation, read at once over the
    same cache.
    """
    small = make_small(tiny_tokenizer, family, system=system, separator="\n\n")
    chat = small.chat()
    for number, question in enumerate(QUESTIONS):
        answer = chat.ask(question, 8)
        said = [{"role": "system", "content": system}] * bool(system)
        first = f"{TEXT}\n\n{QUESTIONS[0]}"
        turns = [
            (first if n == 0 else QUESTIONS[n], chat.turns[n].answer.text)
            for n in range(number + 1)
        ]
        for asked, written in turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": written}]
        rendered = tiny_tokenizer.apply_chat_template(
            said[:-1], tokenize=False, add_generation_prompt=True
        )
        read = [*small.context.ids[0].tolist(), *chat.ids()][
            : len(small.context.ids[0]) + chat_read(chat)
        ]
        assert tiny_tokenizer.decode(read) == rendered
        with torch.no_grad():
            ids = torch.tensor([tail_ids(chat)])
            logits = small.model(ids, past_key_values=small.cache.fork(), use_cache=True).logits[0]
        written = len(chat.turns[-1].answer.ids)
        assert logits[-written - 1 : -1].argmax(-1).tolist() == list(chat.turns[-1].answer.ids)
        assert answer == chat.messages[-1]["content"]


def chat_read(chat):
    """Return how many ids of the tail come before the latest answer."""
    return len(chat.ids()) - len(chat.turns[-1].answer.ids) + 1


def test_a_stop_string_with_a_space_cuts_where_the_answer_begins():
    """The conversation keeps the ids of the answer's text, also with a tokenizer that drops the
    first space of what it decodes.
    """
    tokenizer = build_chat_tokenizer("llama2")
    model = build_model("llama", vocab_size=len(tokenizer))
    chat = compress_with(model, tokenizer, TEXT, ratio=0.4).chat()
    spoken = Dictate(tokenizer, "the code")
    answer = chat.ask(QUESTIONS[0], 8, stop=" code", details=True, processors=[spoken])
    assert (answer.text, answer.finish) == ("the", "stop")
    assert tokenizer.decode(chat.turns[-1].answer_ids) == "the"
    spoken = Dictate(tokenizer, "the code")
    answer = chat.ask(QUESTIONS[1], 8, stop=" the", details=True, processors=[spoken])
    assert (answer.text, answer.finish) == ("", "stop")
    assert chat.turns[-1].answer_ids == ()


def test_no_token_is_read_twice(small):
    read = []

    def count(module, args, options):
        read.append(options["input_ids"].shape[1])

    hook = small.model.register_forward_pre_hook(count, with_kwargs=True)
    chat = small.chat()
    for question in QUESTIONS:
        read.clear()
        chat.ask(question, 6)
        assert sum(read) == len(chat.turns[-1].prompt_ids) + len(chat.turns[-1].answer.ids) - 1
    hook.remove()
    assert chat.columns == small.cache.restore_length + len(chat.ids())
    assert (
        small.cache.layers[0].columns == small.cache.restore_length
    )  # the document itself never grew


def test_an_eos_is_read_once(small):
    """If an answer ended with an EOS token, the template's end of the turn is not read as well."""
    chat = small.chat()
    chat.ask(QUESTIONS[0], 6)
    first = chat.turns[0].answer.ids[0]
    small.model.generation_config.eos_token_id = [first]
    chat = small.chat()
    chat.ask(QUESTIONS[0], 6)
    assert chat.turns[0].answer.ids == (first,) and chat.turns[0].answer.finish == "stop"
    ids = chat.question_ids("And?")
    # <|im_end|>, of the template.
    assert first in get_stop_ids(small.model, small.tokenizer) and ids[0] == 2


def test_a_turn_whose_warning_is_raised_is_not_remembered(small):
    chat = small.chat()
    chat.ask(QUESTIONS[0], 6)
    columns, ids = chat.columns, chat.ids()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RestoreKVWarning, match="may not match its regex"):
            chat.ask(QUESTIONS[1], 2, regex="[a-z ]{5,40}")
    assert len(chat.turns) == 1 and chat.columns == columns and chat.ids() == ids
    expected = small.chat()
    expected.ask(QUESTIONS[0], 6)
    assert chat.ask(QUESTIONS[2], 6) == expected.ask(QUESTIONS[2], 6)


def test_undo_and_fork(small):
    chat = small.chat()
    answers = [chat.ask(question, 6) for question in QUESTIONS]
    branch = chat.fork()
    chat.undo(2)
    assert [chat.ask(question, 6) for question in QUESTIONS[1:]] == answers[1:]
    assert branch.ask("Green?", 6) == chat.ask("Green?", 6)
    branch.undo()
    assert len(branch.turns) == 3 and len(chat.turns) == 4
    with pytest.raises(RestoreKVError, match="5 turns cannot be taken back; this"):
        chat.undo(5)


def test_a_turn_that_is_broken_off_has_not_happened(small):
    chat = small.chat()
    chat.ask(QUESTIONS[0], 6)
    columns = chat.columns
    pieces = chat.ask(QUESTIONS[1], 20, stream=True)
    next(pieces)
    pieces.close()
    assert chat.columns == columns and len(chat.turns) == 1
    whole = small.chat()
    assert [whole.ask(question, 6) for question in QUESTIONS[:2]][1] == chat.ask(QUESTIONS[1], 6)


def test_a_saved_conversation_goes_on(small, tmp_path):
    chat = small.chat(system="Be brief.")
    for question in QUESTIONS[:2]:
        chat.ask(question, 6)
    chat.save(tmp_path / "chat.json")
    again = Chat.load(tmp_path / "chat.json", small)
    assert again.messages == chat.messages and again.columns == chat.columns
    assert again.ask(QUESTIONS[2], 8) == chat.ask(QUESTIONS[2], 8)
    again.undo(3)
    assert again.columns == small.cache.restore_length


def test_foreign_and_damaged_conversations_are_refused(small, tiny_tokenizer, tmp_path):
    path, chat = tmp_path / "chat.json", small.chat()
    chat.ask(QUESTIONS[0], 4)
    chat.save(path)
    with pytest.raises(CacheFileError, match="a different document"):
        Chat.load(path, make_small(tiny_tokenizer, ratio=0.5))
    content = json.loads(path.read_text())
    for change in (
        {"format": "x"},
        {"turns": 3},
        {"turns": [{}]},
        {"system": None},
        {"turns": [{**content["turns"][0], "read": [10**6]}]},
        {"turns": [{**content["turns"][0], "read": [-1]}]},
        {"turns": [{**content["turns"][0], "written": []}]},
        {"turns": [{**content["turns"][0], "question": 1}]},
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(CacheFileError, match=r"not a conversation|damaged"):
            Chat.load(path, small)


def test_other_files_are_refused_as_what_they_are(small, tmp_path):
    """Whatever their names are."""
    small.save(tmp_path / "doc.rkv")
    RestoreAdapter.create(small.model, 2).save_pretrained(tmp_path / "adapter")
    files = {
        "the cache of a document": (tmp_path / "doc.rkv").read_bytes(),
        "a text or another kind of file": b"Ada lives in the red house.",
        "empty": b"",
    }
    for what, content in files.items():
        (tmp_path / "chat.json").write_bytes(content)
        with pytest.raises(CacheFileError, match=f"is {what}, not a conversation; give"):
            Chat.load(tmp_path / "chat.json", small)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    with pytest.raises(CacheFileError, match="another kind of file, not a conversation"):
        Chat.load(weights, small)


def test_folding_frees_the_tail(small, tiny_tokenizer, tmp_path):
    chat = small.chat()
    for question in QUESTIONS:
        chat.ask(question, 12)
    opening = len(tiny_tokenizer.encode("<|im_end|>\n<|im_start|>user\n", add_special_tokens=False))
    tokens = small.manifest.tokens + len(chat.ids()) + 1 + opening
    chat.fold()
    assert chat.document.manifest.tokens == tokens and chat.ids() == [] and chat.nbytes == 0
    assert chat.document.manifest.pairs == int(0.4 * tokens * small.cache.lengths.numel())
    assert chat.ask("Green?", 6) is not None and len(chat.messages) == 8
    chat.document.save(tmp_path / "folded.rkv")
    again = CompressedContext.load(tmp_path / "folded.rkv", small.model, tiny_tokenizer).chat()
    assert again.ask("Green?", 6) == chat.messages[-1]["content"]
    with pytest.raises(RestoreKVError, match="this conversation can take back one turn"):
        chat.undo(2)
    chat.undo()
    with pytest.raises(RestoreKVError, match="no turn to take back"):
        chat.undo()
    with pytest.raises(RestoreKVError, match="Folded turns"):
        chat.save("never.json")


def test_a_text_appended_after_a_fold_is_separated_from_questions(small):
    """A fold ends where the user's next message begins, and an appended text is not a message."""
    separator = small.context.separator
    chat = small.chat()
    chat.ask(QUESTIONS[0], 8)
    chat.fold()
    assert separator and chat.document.context.separator == ""
    longer = chat.document.append("The code of the mill is 9.")
    assert longer.context.separator == longer.manifest.separator == separator
    assert longer.append(" And of the inn 8.").context.separator == separator
    assert small.append("The code of the mill is 9.").context.separator == separator
    again = chat.document.chat()
    again.ask(QUESTIONS[0], 8)
    again.fold()
    assert again.document.context.separator == ""


@pytest.mark.parametrize("separator", ["\n\n", " | ", ""])
@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("through", ["memory", "file"])
def test_a_text_after_a_fold_is_asked_as_the_template_writes_it(
    tiny_tokenizer, tmp_path, separator, has_template, through
):
    """The ids are those of the whole conversation, whatever separates texts from questions."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    if not has_template:
        tokenizer.chat_template = None
    small = make_small(tokenizer, separator=separator, adapter=None)
    chat = small.chat()
    # Ids of the answer that the tokenizer would choose for its text.
    answer = speak_until(chat, QUESTIONS[0], ";").text
    chat.fold()
    folded = chat.document
    if through == "file":
        folded.save(tmp_path / "folded.rkv")
        folded = CompressedContext.load(tmp_path / "folded.rkv", small.model, tokenizer)
    said = f"{TEXT}{separator}{QUESTIONS[0]}"
    more = "The code of the mill is 9."
    longer = folded.append(more)
    then = longer.chat()
    asked = f"{more}{separator}{QUESTIONS[1]}"
    if has_template:
        messages = [
            {"role": "user", "content": said},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": asked},
        ]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        whole = f"{said}\n{answer}\n{asked}\n"
    read = [*longer.context.ids[0].tolist(), *then.question_ids(QUESTIONS[1])]
    assert tokenizer.decode(read) == whole
    # Folded once more, the document ends where a question follows at once.
    then.ask(QUESTIONS[1], 4)
    then.fold()
    assert then.document.context.separator == ""
    assert then.document.append(more).context.separator == separator
    assert longer.append(more).context.separator == separator


def test_a_text_that_ends_like_a_turn_is_no_fold(small, tiny_tokenizer):
    """Questions follow such a text as its separator says, which is empty here."""
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    plain = compress_with(small.model, bare, TEXT, ratio=0.4, adapter=None, separator="")
    longer = plain.append("The code of the mill is 9.\n").append("And of the inn 8.")
    assert longer.context.separator == ""


def test_a_composed_text_ends_as_its_last_part_does(tiny_tokenizer):
    small = make_small(tiny_tokenizer, adapter=None)
    chat = small.chat()
    chat.ask(QUESTIONS[0], 8)
    chat.fold()
    options = {"ratio": 0.4, "adapter": None, "separator": ""}
    plain = compress_with(small.model, tiny_tokenizer, TEXT, **options)
    assert compose([plain, chat.document]).append(TEXT).context.separator == "\n\n"
    assert compose([chat.document, plain]).append(TEXT).context.separator == ""


def test_what_counts_tokens_counts_the_whole_conversation(small):
    """Penalties and criteria are given the document, earlier turns and what is read next."""
    seen = []

    class Look(LogitsProcessor):
        def __call__(self, ids, scores):
            seen.append(ids[0].tolist())
            return scores

    chat = small.chat()
    for number, question in enumerate(QUESTIONS):
        seen.clear()
        chat.ask(question, 5, processors=[Look()])
        known = [*small.context.ids[0].tolist(), *chat.ids()]
        written = len(chat.turns[-1].answer_ids)
        assert seen[0] == known[: len(known) - written + 1], number
        assert seen[-1] == known


def test_options_and_limits(small):
    chat = small.chat()
    hot = {"temperature": 1.5, "seed": 4}
    first = chat.ask(QUESTIONS[0], 8, **hot)
    chat.undo()
    assert "".join(chat.ask(QUESTIONS[0], 8, stream=True, **hot)) == first
    for wrong, match in (
        ({"samples": 2}, "one answer"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top": 1}, "top"),
        ({"stream": True, "details": True}, "leave out stream or details"),
    ):
        with pytest.raises(RestoreKVError, match=match):
            chat.ask("Who?", **wrong)
    with pytest.raises(RestoreKVError, match="ask something"):
        chat.ask(" ")
    assert len(chat.turns) == 1


def test_tasks_of_an_event_loop(small):
    async def both():
        answers = await asyncio.gather(
            *(small.ask_async(question, max_new_tokens=8) for question in QUESTIONS)
        )
        return answers, [
            piece async for piece in small.stream_async(QUESTIONS[0], max_new_tokens=8)
        ]

    answers, pieces = asyncio.run(both())
    assert (
        answers == [small.ask(question, 8) for question in QUESTIONS]
        and "".join(pieces) == answers[0]
    )


def test_a_stream_of_an_event_loop_takes_what_ask_takes(small):
    async def write(*given, **options):
        return [piece async for piece in small.stream_async(QUESTIONS[0], *given, **options)]

    answer = small.ask(QUESTIONS[0], 4)
    for given, options in (((4,), {}), ((4,), {"stream": True}), ((), {"max_tokens": 4})):
        assert "".join(asyncio.run(write(*given, **options))) == answer
    with pytest.raises(RestoreKVError, match="Use ask_async"):
        asyncio.run(write(4, stream=False))


def test_a_pass_that_is_broken_off_inside_the_model_has_not_happened(small):
    """Ctrl-C between two layers leaves one layer's tail longer than the others'."""
    chat = small.chat()
    first = chat.ask(QUESTIONS[0], 6)

    def interrupt(*_):
        raise KeyboardInterrupt

    for turn in (chat, small.chat()):
        hook = small.model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            turn.ask(QUESTIONS[1], 6)
        hook.remove()
        assert len({layer.columns for layer in turn.cache.layers}) == 1
    whole = small.chat()
    assert whole.ask(QUESTIONS[0], 6) == first and whole.ask(QUESTIONS[1], 6) == chat.ask(
        QUESTIONS[1], 6
    )


def test_one_turn_at_a_time(small):
    chat = small.chat()
    one, other = (chat.ask(question, 12, stream=True) for question in QUESTIONS[:2])
    next(one)
    for act in (lambda: chat.ask("Who?"), chat.fork, chat.undo, chat.fold, lambda: next(other)):
        with pytest.raises(RestoreKVError, match="still being written, by another thread or by"):
            act()
    list(one)
    assert "".join(chat.ask(QUESTIONS[1], 12, stream=True)) == chat.messages[-1]["content"]
    whole = small.chat()
    assert [whole.ask(question, 12) for question in QUESTIONS[:2]] == [
        turn.answer.text for turn in chat.turns
    ]


def test_a_stop_string_is_no_part_of_the_turn(small):
    chat = small.chat()
    whole = chat.ask(QUESTIONS[0], 12, details=True)
    chat.undo()
    stop = small.tokenizer.decode(whole.ids)[5:7]
    cut = chat.ask(QUESTIONS[0], 12, stop=stop, details=True)
    assert (
        cut.finish == "stop"
        and cut.ids == whole.ids[: len(cut.ids)]
        and len(cut.ids) < len(whole.ids)
    )
    assert stop not in small.tokenizer.decode(cut.ids) or len(cut.ids) == 1
    assert chat.columns == small.cache.restore_length + len(chat.ids())
    chat.ask("And?", 4)


# Stop strings that begin at the first letter, inside of a token, at its start, and in a space.
CUTS = {"t": "", "he": "t", "ouse": "the h", "house": "the ", "who": "the house is blue; "}


@pytest.mark.parametrize("stop, text", CUTS.items())
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_turn_is_cut_where_its_text_is(tiny_tokenizer, tmp_path, family, stop, text):
    """The next turn reads the text that was returned, even if that ends inside a token."""
    small = make_small(tiny_tokenizer, family)
    chat = small.chat()
    turns = []
    for question in QUESTIONS[:2]:
        assert speak_until(chat, question, stop).text == text
        turns.append((question, text))
        assert chat.columns == small.cache.restore_length + len(chat.ids())
    chat.save(tmp_path / "chat.json")
    last = chat.ask(QUESTIONS[2], 8, details=True)
    read = encode_conversation(tiny_tokenizer, small.context, turns, QUESTIONS[2])
    assert tail_ids(chat)[: len(read)] == read.tolist()
    with torch.no_grad():
        ids = torch.tensor([[*read.tolist(), *last.ids]])
        logits = small.model(ids, past_key_values=small.cache.fork(), use_cache=True).logits[0]
    assert logits[len(read) - 1 : -1].argmax(-1).tolist() == list(last.ids)
    again = Chat.load(tmp_path / "chat.json", small)
    assert again.messages == chat.messages[:4]
    assert again.ask(QUESTIONS[2], 8) == last.text
    for each in (chat, again):
        each.undo(3)
        assert each.columns == small.cache.restore_length


def test_a_streamed_turn_is_cut_where_its_text_is(small):
    chat = small.chat()
    whole = speak_until(chat, QUESTIONS[0], "ouse")
    streamed = small.chat()
    spoken = Dictate(small.tokenizer, SPOKEN)
    pieces = streamed.ask(QUESTIONS[0], 64, stop="ouse", stream=True, processors=[spoken])
    assert "".join(pieces) == whole.text
    assert streamed.ids() == chat.ids()
    assert streamed.ask(QUESTIONS[1], 8) == chat.ask(QUESTIONS[1], 8)


def test_a_turn_that_was_cut_can_be_folded(small):
    chat = small.chat()
    speak_until(chat, QUESTIONS[0], "ouse")
    read = encode_conversation(small.tokenizer, small.context, [(QUESTIONS[0], "the h")], "Green?")
    chat.fold()
    ids = [*chat.document.context.ids[0].tolist(), *chat.question_ids("Green?")]
    assert ids == [*small.context.ids[0].tolist(), *read.tolist()]


def test_without_a_chat_template(small, tiny_tokenizer):
    """There is no chat prefix, so nothing that is always kept precedes an appended part."""
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    plain = compress(small.model, bare, TEXT, ratio=0.4, adapter=None)
    assert plain.context.prefix_length == 0
    chat = plain.chat()
    chat.ask(QUESTIONS[0], 6)
    chat.fold()
    assert (
        chat.ask("And?", 4) is not None
        and plain.append(TEXT).manifest.tokens > plain.manifest.tokens
    )


def test_what_could_not_be_loaded_is_not_saved(small, tmp_path, monkeypatch):
    chat = small.chat()
    chat.ask(QUESTIONS[0], 4)
    monkeypatch.setattr("restorekv.generation.chat.SYSTEM_LETTERS", len(QUESTIONS[0]) - 1)
    with pytest.raises(RestoreKVError, match=r"more than .* characters"):
        chat.save(tmp_path / "chat.json")
    assert not list(tmp_path.iterdir())
