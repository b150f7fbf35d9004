"""Conversations that are cancelled, copied, saved and begun in unusual ways."""

import asyncio
import copy
import json
import time

import pytest

from restorekv import Chat, CompressionConfig, compress
from restorekv.errors import CacheFileError, RestoreKVError
from tests.helpers.compressing import QUESTIONS, TEXT, make_small


@pytest.fixture
def small(tiny_tokenizer):
    return make_small(tiny_tokenizer)


@pytest.mark.parametrize("whole", [False, True])
def test_a_cancelled_task_ends_its_generation(small, whole):
    """The turn has not happened, and the next question need not wait for the rest of the answer."""
    chat, steps = small.chat(), []
    chat.ask(QUESTIONS[0], 4)
    columns = chat.columns

    def slowly(*_):
        steps.append(time.sleep(0.02))

    async def ask():
        asked = (small if whole else chat).ask_async(QUESTIONS[1], 500, temperature=50, seed=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 0.5)
        return len(steps)

    hook = small.model.register_forward_pre_hook(slowly)
    taken = asyncio.run(ask())
    hook.remove()
    assert 0 < taken == len(steps) < 60
    assert len(chat.turns) == 1 and chat.columns == columns
    assert chat.ask(QUESTIONS[2], 4) is not None


def test_a_conversation_can_be_copied(small):
    chat = small.chat()
    chat.ask(QUESTIONS[0], 6)
    other = copy.copy(chat)
    expected = chat.ask(QUESTIONS[1], 6)
    assert other.ask(QUESTIONS[1], 6) == expected and other.messages == chat.messages
    pieces = chat.ask(QUESTIONS[2], 6, stream=True)
    next(pieces)
    with pytest.raises(RestoreKVError, match="still being written"):
        copy.copy(chat)


def test_a_system_message_is_a_text_or_none(small, tmp_path):
    chat = small.chat(None)
    chat.ask(QUESTIONS[0], 4)
    chat.save(tmp_path / "chat.json")
    assert Chat.load(tmp_path / "chat.json", small).system == chat.system == ""
    made = compress(
        small.model,
        small.tokenizer,
        TEXT,
        ratio=0.4,
        adapter=None,
        config=CompressionConfig(system=None),
    )
    assert made.manifest.system == ""
    for wrong in (
        lambda: small.chat(5),
        lambda: compress(
            small.model, small.tokenizer, TEXT, config=CompressionConfig(system=b"Be brief.")
        ),
    ):
        with pytest.raises(RestoreKVError, match="A system message must be text, not"):
            wrong()


def test_a_saved_turn_keeps_how_it_ended(small, tmp_path):
    path, chat = tmp_path / "chat.json", small.chat()
    whole = chat.ask(QUESTIONS[0], 12, details=True)
    chat.undo()
    cut = chat.ask(QUESTIONS[0], 12, stop=small.tokenizer.decode(whole.ids)[5:7], details=True)
    chat.save(path)
    assert cut.finish == Chat.load(path, small).turns[0].answer.finish == "stop"
    content = json.loads(path.read_text())
    old = {name: value for name, value in content["turns"][0].items() if name != "finish"}
    for turn in (old, {**old, "finish": "never"}):
        path.write_text(json.dumps({**content, "turns": [turn]}))
        with pytest.raises(CacheFileError, match="damaged"):
            Chat.load(path, small)


def test_a_turn_too_short_to_fold(small):
    chat = compress(
        small.model, small.tokenizer, TEXT, ratio=0.4, evictor="snapkv:window=200", adapter=None
    ).chat()
    chat.ask("Who?", 1)
    with pytest.raises(RestoreKVError, match="fold when more was said"):
        chat.fold()
    assert len(chat.turns) == 1 and not chat.folded
