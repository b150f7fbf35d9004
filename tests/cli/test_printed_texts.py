"""What a text or an answer says is shown to people as it is, and never acts on their terminal;
files keep it.
"""

import json

import pytest

import restorekv.generation.chat
import restorekv.many_contexts
from restorekv.generation import answers
from tests.helpers.cli_world import QUESTION, World, build_world, cli

HOSTILE, SHOWN = "bread \x1b]0;pwned\a \x1b[2J\x9b1m late", "bread ␛]0;pwned␇ ␛[2J�1m late"


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


def whole(world: World, path, text: str) -> str:
    """What inspect shows of a text of which every token is kept."""
    made = cli(
        "compress", "-", "--ratio", 1, "--model", world.model, "-o", path, stdin=text.encode()
    )
    assert made.code == 0, made.err
    return cli("inspect", path, "--model", world.model).out


def test_inspect_shows_control_characters_as_signs(world, tmp_path):
    assert f"{SHOWN}\n" in whole(world, tmp_path / "a.rkv", HOSTILE)


def test_inspect_shows_characters_of_several_tokens(world, tmp_path):
    text = "naïve café, 東京 and 🦊: Ελλάδα"
    assert f"{text}\n" in whole(world, tmp_path / "a.rkv", text)


def test_inspect_shows_a_character_that_is_cut_and_one_that_replaces(world, tmp_path):
    text = "a \ufffd\ufffd b 🦊"
    assert f"{text}\n" in whole(world, tmp_path / "a.rkv", text)
    assert (
        "\ufffd ... ("
        in cli("inspect", tmp_path / "a.rkv", "--model", world.model, "--tokens", 3).out
    )


def test_answers_act_on_no_terminal(world, tmp_path, monkeypatch):
    said = [[answers.Answer(HOSTILE, (1,), "stop", 1)]] * 2
    stream = answers.AnswerStream((each for each in [HOSTILE]), lambda: said[0][0])
    monkeypatch.setattr(answers, "stream_answer", lambda *_, **__: stream)
    monkeypatch.setattr(answers, "answer_questions", lambda *_, **__: said)
    ask = ("ask", world.cache, "--model", world.model)
    assert cli(*ask, QUESTION).out == f"{SHOWN}\n"
    both = cli(*ask, QUESTION, HOSTILE, "--json", tmp_path / "answers.json")
    assert both.out == f"{QUESTION}\n  {SHOWN}\n{SHOWN}\n  {SHOWN}\n"
    assert json.loads((tmp_path / "answers.json").read_text())["answers"][1]["answer"] == HOSTILE


def test_conversations_act_on_no_terminal(world, monkeypatch):
    monkeypatch.setattr(
        restorekv.generation.chat, "stream_text", lambda _, tokens, *__: [HOSTILE for _ in tokens]
    )
    lines = [f"{HOSTILE} :bug: [b]", "/history", f"/{HOSTILE}"]
    told = cli(
        "chat",
        world.cache,
        "--model",
        world.model,
        "--max-new-tokens",
        1,
        stdin="\n".join(lines).encode(),
    )
    assert (
        told.out.startswith(f"{SHOWN}\nuser: {SHOWN} :bug: [b]\n")
        and "There is no command /bread" in told.err
    )
    assert not {"\x1b", "\a", "\x9b"} & {*told.out, *told.err}


def test_names_are_printed_as_they_are(world, tmp_path):
    path = tmp_path / "a:bug:[b]\x1b[2J.rkv"
    made = cli("compress", world.text, "--model", world.model, "-o", path)
    assert made.code == 0 and "a:bug:[b]␛[2J.rkv" in made.out.replace("\n", "")
    told = cli("verify", path)
    assert told.code == 0 and "a:bug:[b]␛[2J.rkv" in told.out
    assert "a:bug:[b]␛[2J.rkv" in cli("ask", f"{path}x", QUESTION).err


def test_brackets_in_names_of_documents_are_not_markup(world, tmp_path):
    folder = tmp_path / "texts"
    (folder / "b[").mkdir(parents=True)
    names = ("a.txt", "b[/red].txt", "c[red].txt")
    for name in names:
        (folder / name).write_text("The code of the tower is 31. " * 9)
    settings = ("--evictor", "knorm", "--model", world.model)
    made = cli("compress", folder, *settings, "-o", tmp_path / "caches")
    assert made.code == 0, made.err
    # Each line of progress names the document that comes next.
    assert all(f", {name}" in made.err for name in names[1:])
