"""`chat`, `append`, `compose` and the sampling flags of `ask` do what the library does."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from restorekv import Chat, CompressedContext, compose, compress
from restorekv.cli.errors import make_visible
from restorekv.errors import RestoreKVError
from restorekv.model.load import load_model
from restorekv.restore.adapter import RestoreAdapter
from restorekv.storage.cache_file import open_cache_file
from tests.helpers.cli_world import QUESTION, TEXT, World, build_world, cli


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


@pytest.fixture(scope="module")
def document(world) -> CompressedContext:
    return CompressedContext.load(world.cache, *load_model(world.model))


def test_a_conversation_in_a_pipe(world, document, tmp_path):
    lines = [
        QUESTION,
        "and the house?",
        "/undo",
        "",
        "/history",
        f"/save {tmp_path / 'c.json'}",
        "/never",
        "/help",
    ]
    options = ("--model", world.model, "--max-new-tokens", 6)
    result = cli("chat", world.cache, *options, stdin="\n".join([*lines, "/fold", "who?"]).encode())
    assert result.code == 0
    chat = document.chat()
    first, second = chat.ask(QUESTION, 6), chat.ask("and the house?", 6)
    chat.undo()
    said = f"{first}\n{second}\nuser: {QUESTION}\nassistant: {first}\n"
    chat.fold(adapter=None)
    assert result.out.startswith(said)
    for part in (
        "read ",
        "pairs per head: cache",
        "Turns taken back: 1; turns left: 1",
        "no command /never",
        "/fold",
    ):
        assert part in " ".join(result.err.split())
    again = cli(
        "chat",
        world.cache,
        *options,
        "--continue",
        tmp_path / "c.json",
        stdin=b"and the house?\n/quit\nno",
    )
    assert again.out == f"{second}\n"


def test_undo_does_not_count_what_was_folded(world, tmp_path):
    """Folded turns are part of the document and cannot be taken back."""
    made, model = tmp_path / "a.rkv", ("--model", world.model)
    options = (*model, "--ratio", 0.4, "--adapter", "none")
    assert cli("compress", world.text, *options, "-o", made).code == 0

    def chat(*lines: str) -> str:
        stdin = "\n".join(lines).encode()
        return cli("chat", made, *model, "--max-new-tokens", 9, stdin=stdin).err

    twice = [QUESTION, QUESTION, "/fold"]
    told = chat(*twice, QUESTION, "/undo", "/undo", "/fold")
    assert "Turns taken back: 1; turns left: 0, besides 2 that are folded.\n" in told
    assert (
        "error: There is no turn to take back: those so far are folded into the document.\n" in told
    )
    assert "error: There are no turns to fold; ask something first.\n" in told
    told = chat(*twice, QUESTION, "/undo 3")
    assert (
        "error: 3 turns cannot be taken back; this conversation can take back one turn, since 2 "
        "are folded into the document.\n" in told
    )


def test_nothing_is_folded_before_the_first_turn(world):
    result = cli("chat", world.cache, "--model", world.model, stdin=b"/fold")
    assert result.code == 0 and "There are no turns to fold" in result.err


@pytest.mark.parametrize(
    "words, message",
    [
        (("--continue", "none.json"), "none.json"),
        (("--continue", "text"), "text"),
        (("--continue", "x", "--system", "y"), "leave it out"),
        (("--top-p", 0), "top_p must be"),
    ],
)
def test_chat_refuses_with_a_sentence(world, words, message):
    words = [world.text if word == "text" else word for word in words]
    result = cli("chat", world.cache, "--model", world.model, *words, stdin=b"hi")
    assert (
        result.code == 1
        and result.err.startswith("error:")
        and message in result.err
        and result.out == ""
    )


def test_a_conversation_goes_on_after_what_fails(world, tmp_path, monkeypatch):
    """A full disk, Ctrl-C in a long command, too little memory and a question that is not UTF-8
    lose no turn.
    """

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def exhausted(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(Chat, "fold", interrupt)
    monkeypatch.setattr(Chat, "undo", exhausted)
    lines = [QUESTION.encode(), f"/save {tmp_path / 'c.json'}".encode(), b"/fold", b"/undo"]
    lines += [b"caf\xe9?", b"/history"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        options = ("--model", world.model, "--max-new-tokens", 4)
        result = cli("chat", world.cache, *options, stdin=b"\n".join(lines))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code == 0 and "interrupted" in result.err and f"user: {QUESTION}\n" in result.out
    assert "caf" not in result.out and not list(tmp_path.iterdir())
    for part in (
        f"error: Cannot write {tmp_path / 'c.json'}: File too large",
        "not enough memory",
        "not Unicode",
    ):
        assert part in result.err


def test_a_conversation_is_folded_before_it_exceeds_the_full_cache(world, document, tmp_path):
    """Cache and turns hold at most what the full cache of the text does, whatever is said."""
    document = compress(document.model, document.tokenizer, TEXT, ratio=0.3, adapter=None)
    made = tmp_path / "a.rkv"
    document.save(made)
    lines = [f"and the house {number}?" for number in range(16)]
    options = ("--model", world.model, "--max-new-tokens", 6)
    result = cli("chat", made, *options, stdin="\n".join(lines).encode())
    folds = re.findall(r"Folded (\d+) pairs per head.* holds (\d+) now.*cache's (\d+);", result.err)
    told = re.findall(r"cache (\d+), turns (\d+) \(full cache (\d+)\)", result.err)
    assert len(told) == 16 and folds
    assert all(int(cache) + int(turns) <= int(full) for cache, turns, full in told)

    # The answers are those of a conversation that is folded by hand at the same turns.
    chat = document.chat()
    answers = []
    fulls = [int(full) for _, _, full in told]
    for number, line in enumerate(lines):
        if number and fulls[number] > fulls[number - 1]:
            chat.fold()
        answers.append(chat.ask(line, 6))
    assert result.out == "".join(f"{make_visible(answer)}\n" for answer in answers)
    first = int(folds[0][2])
    assert document.context.num_tokens == first == fulls[0]

    alone = cli("chat", made, *options, "--no-fold", stdin="\n".join(lines).encode())
    assert "Folded" not in alone.err and f"(full cache {first})" in alone.err.splitlines()[-1]


def test_a_conversation_that_cannot_be_folded_goes_on(world, monkeypatch):
    def refuse(*_, **__):
        raise RestoreKVError("No room.")

    monkeypatch.setattr(Chat, "fold", refuse)
    lines = [f"and the house {number}?" for number in range(8)]
    options = ("--model", world.model, "--max-new-tokens", 6)
    result = cli("chat", world.cache, *options, stdin="\n".join(lines).encode())
    assert result.code == 0 and result.err.count("cannot be folded: No room.") == 1
    assert result.err.count("pairs per head: cache") == 8


def test_names_and_numbers_that_cannot_be_end_no_conversation(world):
    lines = [b"/save a\0b", b"/undo " + b"9" * 5000, QUESTION.encode()]
    told = cli("chat", world.cache, "--model", world.model, stdin=b"\n".join(lines))
    assert told.code == 0 and told.err.count("error: ") == 2 and "Traceback" not in told.err
    assert told.out.strip()


def test_what_was_folded_is_saved_with_the_document(world, tmp_path):
    made, saved, model = tmp_path / "a.rkv", tmp_path / "b.rkv", ("--model", world.model)
    assert (
        cli("compress", world.text, *model, "--ratio", 0.4, "--adapter", "none", "-o", made).code
        == 0
    )
    lines = [QUESTION, "/fold", f"/save {tmp_path / 'c.json'}", f"/save {saved}"]
    told = cli("chat", made, *model, "--max-new-tokens", 30, stdin="\n".join(lines).encode())
    assert "save that, as in /save doc.rkv." in told.err and {*tmp_path.iterdir()} == {made, saved}


def test_a_saved_document_has_all_turns_in_it(world, tmp_path):
    """Those before a fold, after it, and without one; the conversation itself goes on unfolded."""
    made, model = tmp_path / "a.rkv", ("--model", world.model)
    assert (
        cli("compress", world.text, *model, "--ratio", 0.4, "--adapter", "none", "-o", made).code
        == 0
    )
    saved = [tmp_path / f"{number}.rkv" for number in range(3)]
    lines = [QUESTION, f"/save {saved[0]}", QUESTION, "/undo", "/fold", f"/save {saved[1]}"]
    lines += [QUESTION, f"/save {saved[2]}"]
    told = cli("chat", made, *model, "--max-new-tokens", 9, stdin="\n".join(lines).encode())
    assert told.code == 0 and "Turns taken back: 1" in told.err
    sizes = [open_cache_file(path).context.text_tokens for path in (made, *saved)]
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3]


def test_folded_turns_that_no_file_holds_are_named_at_the_end(world, tmp_path):
    made, model = tmp_path / "a.rkv", ("--model", world.model)
    compressed = cli(
        "compress", world.text, *model, "--ratio", 0.4, "--adapter", "none", "-o", made
    )
    assert compressed.code == 0
    save, talk = f"/save --replace {tmp_path / 'b.rkv'}", tmp_path / "talk.json"

    def chat(*lines: str, more: tuple = ()) -> str:
        stdin = "\n".join(lines).encode()
        return cli("chat", made, *model, "--max-new-tokens", 9, *more, stdin=stdin).err

    lost = "not saved, folded ones included; /save FILE.rkv before /quit keeps them.\n"
    for ending in ([], ["/quit"]):
        assert chat(QUESTION, "/fold", *ending).endswith(f"1 turn was {lost}")
    assert chat(QUESTION, "/fold", QUESTION).endswith(f"2 turns were {lost}")
    assert chat(save, QUESTION, "/fold", "/save /").endswith(f"1 turn was {lost}")
    for lines in ([QUESTION], [QUESTION, "/fold", save], [QUESTION, save, "/fold", QUESTION]):
        assert "not saved" not in chat(*lines)
    chat(QUESTION, f"/save {talk}")
    assert "not saved" not in chat("/fold", more=("--continue", talk))


def test_a_conversation_does_not_write_over_its_document(world, tmp_path):
    made, model = tmp_path / "a.rkv", ("--model", world.model)
    compressed = cli(
        "compress", world.text, *model, "--ratio", 0.4, "--adapter", "none", "-o", made
    )
    before = made.read_bytes()
    lines = [QUESTION, f"/save {made}", f"/save {tmp_path / 'b.RKV'}"]
    told = cli("chat", made, *model, "--max-new-tokens", 9, stdin="\n".join(lines).encode())
    assert compressed.code == 0 and "is the document that this conversation" in told.err
    assert made.read_bytes() == before
    assert open_cache_file(tmp_path / "b.RKV").context.text_tokens > 0


def test_a_conversation_replaces_its_own_files_alone(world, tmp_path):
    """Those that it wrote, and the one that it continues; others where it is told to."""
    other = tmp_path / "other.rkv"
    other.write_bytes(Path(world.cache).read_bytes())
    before = other.read_bytes()
    talk = tmp_path / "talk.json"
    none = ("--adapter", "none")

    def chat(*lines: str, more: tuple = ()) -> str:
        options = ("--model", world.model, "--max-new-tokens", 6, "--no-fold", *none, *more)
        return cli("chat", world.cache, *options, stdin="\n".join(lines).encode()).err

    told = chat(QUESTION, f"/save {other}")
    assert (
        f"error: {other} exists and is not of this conversation; give a different name, or replace "
        f"it with /save --replace {other}\n"
    ) in told
    assert other.read_bytes() == before

    told = chat(QUESTION, f"/save {talk}", QUESTION, f"/save {talk}")
    assert "error" not in told and len(json.loads(talk.read_text())["turns"]) == 2
    written = talk.read_text()
    assert "exists and is not of this" in chat("Who?", f"/save {talk}")
    assert talk.read_text() == written
    assert "error" not in chat("Who?", f"/save {talk}", more=("--continue", talk))
    assert len(json.loads(talk.read_text())["turns"]) == 3

    assert "error" not in chat("Who?", f"/save --replace {talk}", f"/save {other} --replace")
    assert len(json.loads(talk.read_text())["turns"]) == 1
    assert other.read_bytes() != before
    # Not what the conversation is about, nor a file of another kind.
    (tmp_path / "notes.txt").write_text("notes")
    for path in (world.cache, tmp_path / "notes.txt"):
        assert "error: " in chat("Who?", f"/save --replace {path}")
    assert (tmp_path / "notes.txt").read_text() == "notes"


def test_a_file_to_save_is_named_as_in_a_shell(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    names = ['"q.json"', "'my notes.json'", "a\\ b.json", '"~/c.json"', "~/d.json", "\te.json"]
    refused = ["", '""', "my notes.json", "it's.json", "a\\", "--force x.json", "--help"]
    lines = [QUESTION, *(f"/save {name}" for name in [*names, *refused])]
    options = ("--model", world.model, "--max-new-tokens", 6)
    told = cli("chat", world.cache, *options, stdin="\n".join(lines).encode()).err
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")}
    assert written == {
        "q.json",
        "my notes.json",
        "a b.json",
        "home/c.json",
        "home/d.json",
        "e.json",
    }
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(refused)
    words = ("Give a file", "Give a file", "takes one file, not 2", "no partner", "no partner")
    for error, part in zip(errors, (*words, "takes one file", "has no option --help"), strict=True):
        assert part in error


@pytest.mark.parametrize("word", ["quit", "Exit", "/quit", "/exit now"])
def test_whoever_types_quit_leaves(world, word):
    result = cli("chat", world.cache, "--model", world.model, stdin=f"{word}\nWho?".encode())
    assert result.code == 0 and result.out == ""


def test_a_word_that_is_more_than_quit_is_a_question(world):
    options = ("--model", world.model, "--max-new-tokens", 4)
    result = cli("chat", world.cache, *options, stdin=b"exit?\nhelp\n/sav x")
    assert result.err.count("pairs per head: cache") == 1
    assert "/undo [N]" in result.err and "no command /sav (did you mean /save?)" in result.err


def test_chat_folds_with_the_adapter_that_it_is_given(world, tmp_path):
    """One that nothing finds by itself."""
    made, model = tmp_path / "a.rkv", ("--model", world.model)
    adapter = tmp_path / "adapter"
    RestoreAdapter.create(load_model(str(world.model))[0], 2, rank=1).save_pretrained(adapter)
    compressed = cli(
        "compress", world.text, *model, "--ratio", 0.4, "--adapter", adapter, "-o", made
    )
    assert compressed.code == 0
    lines = f"{QUESTION}\n/fold".encode()
    chat = ("chat", made, *model, "--max-new-tokens", 9)
    assert "is not available; pass its folder" in cli(*chat, stdin=lines).err
    folded = cli(*chat, "--adapter", adapter, stdin=lines)
    assert "Folded" in folded.err and "not available" not in folded.err


SLOW = """
import signal, sys, time, restorekv.cli as cli, restorekv.generation.chat as chat
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores
chat.stream_text = lambda *_, **__: (print("answering", flush=True), time.sleep(600))
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "moment, ending, code",
    [
        ("answering", signal.SIGTERM, 143),
        pytest.param(">", signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_chat(world, moment, ending, code):
    """Both while it answers a piped question and while it waits for one on a terminal."""
    command = [sys.executable, "-c", SLOW, "chat", world.cache, "--model", world.model]
    terminal, typed = os.openpty()
    stdin = subprocess.PIPE if moment == "answering" else typed
    with subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        if process.stdin:
            process.stdin.write(b"who?\nand who else?\n")
            process.stdin.flush()
        assert process.stdout.read(len(moment)) == moment.encode()
        # A signal between the prompt and the system's call to read would wait for what is typed.
        time.sleep(0.5)
        process.send_signal(ending)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    os.close(terminal)
    os.close(typed)
    assert process.returncode == code and b"error: Interrupted" in told


def test_append_and_compose_write_what_the_library_makes(world, document, tmp_path):
    options = ("--model", world.model, "--adapter", world.adapter, "-o", tmp_path / "grown.rkv")
    text = Path(world.text).read_text()
    assert cli("append", world.cache, world.text, *options).code == 0
    grown = CompressedContext.load(tmp_path / "grown.rkv", document.model, document.tokenizer)
    assert grown.ask(QUESTION, 6) == document.append(text, adapter=world.adapter).ask(QUESTION, 6)
    both = cli(
        "compose",
        world.cache,
        tmp_path / "grown.rkv",
        "--model",
        world.model,
        "-o",
        tmp_path / "both.rkv",
    )
    assert both.code == 0 and "seconds" in both.out
    loaded = CompressedContext.load(tmp_path / "both.rkv", document.model, document.tokenizer)
    assert loaded.ask(QUESTION, 6) == compose([document, grown]).ask(QUESTION, 6)
    wrong = cli("append", world.cache, world.text, "--restore", "all", *options)
    assert wrong.code == 1 and "--restore must be one of last, every, none" in wrong.err


def test_sampled_and_constrained_answers(world, document, tmp_path):
    hot = (
        "--temperature",
        1.3,
        "--top-k",
        30,
        "--seed",
        5,
        "--max-new-tokens",
        8,
        "--model",
        world.model,
    )
    expected = document.ask(QUESTION, 8, temperature=1.3, top_k=30, seed=5)
    assert cli("ask", world.cache, QUESTION, *hot).out == f"{expected}\n"
    stops = [expected[2:4], "what no answer has"]
    several = document.ask(QUESTION, 8, temperature=1.3, top_k=30, seed=5, stop=stops)
    stopped = cli("ask", world.cache, QUESTION, *hot, "--stop", stops[0], "--stop", stops[1]).out
    assert stopped == f"{several}\n" and several == expected[:2].rstrip() != expected
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    pytest.importorskip("llguidance")
    answer = cli("ask", world.cache, QUESTION, "--json-schema", schema, "--model", world.model).out
    assert json.loads(answer) in ("yes", "no")
    broken = cli("ask", world.cache, QUESTION, "--json-schema", world.text, "--model", world.model)
    assert broken.code == 1 and "is not JSON (" in broken.err
    assert broken.err.endswith("); give a file with a JSON schema.\n")
