"""The commands do what the library does, and write the same figures for programs."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import restorekv.cli.train
from restorekv import __version__
from restorekv.cli import COMMANDS, ask
from restorekv.context import CompressedContext
from restorekv.evaluation.survivors import Survivors
from restorekv.model.load import load_model
from restorekv.train.config import TrainConfig
from tests.helpers.cli_world import QUESTION, TEXT, World, build_world, cli

TRAIN = (
    "--restore-tokens",
    2,
    "--rank",
    2,
    "--warmup",
    1,
    "--max-new-tokens",
    4,
    "--ratio-min",
    0.1,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


def compress(world: World, out, *more: object, text: str | None = None, stdin: bytes = b""):
    result = cli(
        "compress", text or world.text, "--model", world.model, "-o", out, *more, stdin=stdin
    )
    assert result.code == 0, result.err
    return result


def test_help_lists_the_commands_without_loading_pytorch():
    probe = "import sys, restorekv.cli as c; c.execute(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
    assert all(name in done.stdout for name in COMMANDS)
    assert cli().out == cli("--help").out == cli("-h").out
    assert cli("--version").out == f"restorekv {__version__}\n"


def test_help_groups_the_commands_by_what_they_are_for():
    panels = {
        "Use": "compress ask chat append compose serve inspect export verify doctor demo",
        "Measure": "eval report",
    }
    panels["Train"] = "data train train-gate convert-gate push"
    shown, page = {}, cli("--help").out
    for line in page.splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            shown[title[1]] = names = []
        elif command := re.match(r"│ ([a-z-]+)  ", line):
            names.append(command[1])
    assert {title: " ".join(names) for title, names in shown.items() if title in panels} == panels


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    result = cli(name, "--help")
    assert result.code == 0 and "Usage" in result.out and not result.err
    assert cli(name, "-h").out == result.out
    assert f"restorekv {name}" in result.out


@pytest.mark.parametrize("program", ["paper", "benchmarks"])
def test_a_checkout_s_programs_have_the_same_short_help(program):
    result = cli(program, "-h")
    assert (
        result.code == 0
        and f"python -m {program}" in result.out
        and result.out == cli(program, "--help").out
    )


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (["Who", "lives", "there?"], True),
        (["Who?", "When?", "Where?"], False),
        (["Who lives there?", "When", "Why"], False),
        (["谁?", "什么?", "哪里?"], False),
        (["Who", "When"], False),
    ],
)
def test_a_question_without_quotation_marks_is_pointed_out(world, words, warns):
    result = cli("ask", world.cache, *words, "--model", world.model, "--max-new-tokens", 2)
    assert result.code == 0
    assert ('put one question into quotation marks: "Who lives there?"' in result.err) == warns


def test_compress_then_ask_as_the_library_does(world, tmp_path):
    out, figures = tmp_path / "doc.rkv", tmp_path / "figures.json"
    told = compress(world, out, "--ratio", "0.3", "--adapter", world.adapter, "--json", figures)
    assert not told.err
    made = json.loads(figures.read_text())
    tokens, shape = made["tokens"], made["shape"]
    assert made["pairs"] == 3 * tokens * shape["layers"] * shape["heads"] // 10
    assert made["restore_tokens"] == 8 and made["file_bytes"] == out.stat().st_size
    assert f"{made['pairs']:,} KV pairs" in told.out

    loaded = CompressedContext.load(out, *load_model(world.model))
    expected = loaded.ask([QUESTION, "is the code seven?"], 6)
    one = cli("ask", out, QUESTION, "--model", world.model, "--max-new-tokens", 6)
    assert one.code == 0 and one.out == expected[0] + "\n"
    assert "(the answer was cut after 6 tokens; --max-new-tokens sets the limit)" in one.err
    short = cli("ask", out, QUESTION, "--model", world.model, "--max-new-tokens", 1)
    assert "(the answer was cut after 1 token; --max-new-tokens sets the limit)" in short.err
    prefixed = cli(
        *("ask", out, QUESTION, "--model", world.model, "--max-new-tokens", 6),
        *("--answer-prefix", "the code"),
    )
    assert prefixed.out == loaded.ask(QUESTION, 6, answer_prefix="the code") + "\n" != one.out
    # The file says which folder, which is only its word.
    unnamed = cli("ask", out, QUESTION, "--max-new-tokens", 6)
    assert unnamed.code == 1 and "with --model" in unnamed.err
    answers = tmp_path / "answers.json"
    both = cli(
        "ask",
        out,
        QUESTION,
        "is the code seven?",
        "--model",
        world.model,
        "--max-new-tokens",
        6,
        "--json",
        answers,
    )
    assert both.code == 0, both.err
    rows = json.loads(answers.read_text())["answers"]
    assert [row["answer"] for row in rows] == expected and {row["file"] for row in rows} == {
        str(out)
    }
    assert {row["finish"] for row in rows} == {"length"}
    assert "(2 answers were cut after 6 tokens" in both.err


@pytest.mark.parametrize(
    ("flags", "explained"),
    [
        (("--ratio", 0.3), True),
        (("--ratio", 1), False),
        (("--ratio", 0.3, "--adapter", "none"), False),
        (("--ratio", 0.3, "--evictor", "am-fast"), False),
    ],
)
def test_compress_says_why_nothing_is_restored_unasked(world, tmp_path, flags, explained):
    """No adapter ships for this model."""
    told = cli("compress", world.text, "-o", tmp_path / "doc.rkv", "--model", world.model, *flags)
    assert told.code == 0, told.err
    words = " ".join(re.sub("[│ \n]+", " ", told.out).split())
    assert ("adapter none (no adapter ships that helps this model" in words) == explained


def test_a_note_says_how_many_of_several_answers_were_ended(capsys):
    ask._say_how_answers_ended(["stop", "length", "repetition", "repetition"], 128)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("(1 of 4 answers was cut after 128 tokens;")
    assert lines[1].startswith("(2 of 4 answers were ended at a repetition;")


def test_more_bytes_than_the_full_cache_are_explained(world, tmp_path):
    """A cache that keeps every pair holds their positions as well."""
    note = "%, with the position of each pair)"
    made = compress(world, tmp_path / "all.rkv", "--ratio", 1, "--adapter", "none")
    share = re.search(r"\((\d+\.\d)%, with the", made.out)
    assert share and float(share[1]) > 100
    assert note in cli("inspect", tmp_path / "all.rkv", "--model", world.model).out
    asked = cli("chat", tmp_path / "all.rkv", "--model", world.model)
    assert note in " ".join(asked.err.split())
    assert note not in compress(world, tmp_path / "half.rkv", "--ratio", 0.5).out


def test_several_files_answer_in_one_batch(world, tmp_path):
    files, loaded = [tmp_path / "one.rkv", tmp_path / "two.rkv"], load_model(world.model)
    for file, ratio in zip(files, ("0.3", "0.9"), strict=True):
        compress(world, file, "--ratio", ratio)
    told, answers = ("--model", world.model, "--max-new-tokens", 6), tmp_path / "answers.json"
    both = cli("ask", *files, QUESTION, "is the code seven?", *told, "--json", answers)
    assert both.code == 0 and f"{files[1]}: {QUESTION}" in both.out
    rows = json.loads(answers.read_text())["answers"]
    assert [(row["file"], row["question"]) for row in rows] == [
        (str(file), question) for file in files for question in (QUESTION, "is the code seven?")
    ]
    alone = [
        CompressedContext.load(file, *loaded).ask([QUESTION, "is the code seven?"], 6)
        for file in files
    ]
    assert [row["answer"] for row in rows] == alone[0] + alone[1]
    assert "no question" in cli("ask", *files, *told).err


def test_compress_takes_stdin_tokens_per_head_and_every_policy(world, tmp_path):
    figures = tmp_path / "figures.json"
    out = tmp_path / "doc.rkv"
    compress(world, out, "--tokens-per-head", 10, "--json", figures, text="-", stdin=TEXT.encode())
    made = json.loads(figures.read_text())
    assert (
        made["pairs"] == 10 * made["shape"]["layers"] * made["shape"]["heads"]
        and made["adapter"] is None
    )
    tight = ("--ratio", "0.01", "--adapter", world.adapter)
    compress(
        world,
        out,
        *tight,
        "--on-small-budget",
        "fewer",
        "--prefix-policy",
        "counted",
        "--json",
        figures,
    )
    made = json.loads(figures.read_text())
    assert (
        made["restore_tokens"] < 8
        and made["prefix_policy"] == "counted"
        and made["on_small_budget"] == "fewer"
    )


def test_a_file_is_read_by_its_ending(world, tmp_path):
    (page := tmp_path / "page.html").write_text(f"<script>no()</script><p>{TEXT}</p>")
    figures = tmp_path / "figures.json"
    compress(world, tmp_path / "a.rkv", "--ratio", 1, "--json", figures, text=page)
    shown = cli("inspect", tmp_path / "a.rkv", "--model", world.model).out.replace("\n", " ")
    assert TEXT[:60] in shown and "script" not in shown and "<p>" not in shown
    grown = cli(
        "append",
        world.cache,
        page,
        "--model",
        world.model,
        "--adapter",
        "none",
        "-o",
        tmp_path / "b.rkv",
    )
    assert grown.code == 0, grown.err
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 of nothing")
    broken = cli(
        "compress", tmp_path / "broken.pdf", "--model", world.model, "-o", tmp_path / "c.rkv"
    )
    assert broken.code == 1 and "broken.pdf" in broken.err and "not UTF-8" not in broken.err


@pytest.mark.parametrize(
    ("content", "kind"), [(b"%PDF-1.4\n1 0 obj", "a PDF file"), (rb"{\rtf1 the door}", "RTF")]
)
def test_a_text_from_stdin_is_no_other_kind_of_file(world, tmp_path, content, kind):
    out = tmp_path / "doc.rkv"
    piped = cli("compress", "-", "--model", world.model, "-o", out, stdin=content)
    assert piped.code == 1 and f"The input is {kind} by its content" in piped.err
    assert not out.exists()


def test_questions_from_stdin(world, tmp_path):
    told = ("--model", world.model, "--max-new-tokens", 6)
    typed = cli(
        "ask", world.cache, "-", *told, stdin=f"{QUESTION}\n\nis the code seven?\n".encode()
    )
    assert (
        typed.code == 0
        and typed.out == cli("ask", world.cache, QUESTION, "is the code seven?", *told).out
    )
    assert (
        cli("ask", world.cache, "-", *told, stdin=QUESTION.encode()).out
        == cli("ask", world.cache, QUESTION, *told).out
    )
    empty = cli("ask", world.cache, "-", *told).err
    assert "The input is empty; give at least one question, each on its own line." in empty
    assert "A cache is read from a file, not from stdin" in cli("ask", "-", QUESTION, *told).err
    assert "not UTF-8" in cli("ask", world.cache, "-", *told, stdin=b"caf\xe9?").err


def test_a_mismatched_evictor_is_one_line_of_warning(world, tmp_path):
    told = compress(
        world,
        tmp_path / "doc.rkv",
        "--evictor",
        "kvzip+",
        "--ratio",
        "0.3",
        "--adapter",
        world.adapter,
    )
    assert told.err.startswith("warning: ") and told.err.count("\n") == 1 and "kvzip+" in told.err


def test_inspect_shows_text_figures_and_picture(world, tmp_path):
    plot, figures = tmp_path / "plot.png", tmp_path / "figures.json"
    told = cli("inspect", world.cache, "--plot", plot, "--json", figures)
    assert told.code == 0 and not told.err, told.err
    assert "Context tokens kept" in told.out and "seven" in told.out.replace("·", "") + "seven"
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    made = json.loads(figures.read_text())
    kept = torch.tensor(made["kept_per_head"])
    restored = made["restore_tokens"] * kept.numel()
    assert int(kept.sum()) + restored == made["pairs"]
    assert len(made["share_per_position"]) == made["prefix"] + made["tokens"]
    assert sum(made["share_per_layer"]) == pytest.approx(1, abs=1e-5)
    svg = cli("inspect", world.cache, "--plot", tmp_path / "plot.svg", "--tokens", 0)
    assert svg.code == 0 and "<svg" in (tmp_path / "plot.svg").read_text()


def test_survivors_agree_with_the_cache(world):
    survivors = Survivors.load(world.root / "cache")
    loaded = CompressedContext.load(world.cache, *load_model(world.model))
    assert torch.equal(survivors.keep.sum(-1), loaded.cache.lengths)
    for layer, keep in zip(loaded.cache.layers, survivors.keep, strict=True):
        assert torch.equal(keep.nonzero()[:, 1].int(), layer.positions)


def test_train_has_a_flag_for_every_setting():
    assert set(restorekv.cli.train.run.__annotations__) > {
        field.name for field in fields(TrainConfig)
    }
    assert all(field.metadata["help"].endswith(".") for field in fields(TrainConfig))


def test_train_resume_and_use_the_adapter(world, tmp_path):
    run = (
        tmp_path
        / "a-folder-whose-name-is-longer-than-a-line-of-a-terminal-that-has-eighty-columns"
        / "run"
    )
    run.parent.mkdir()
    common = ("train", "--data", world.data, "--model", world.model, "--out", run, *TRAIN)
    done = cli(*common, "--steps", 2, "--checkpoint-every", 1)
    assert done.code == 0 and "2/2 loss" in done.err, done.err
    assert f"Wrote {run / 'adapter'}\n" in done.out
    again = cli(*common, "--steps", 2, "--resume")
    assert again.code == 0, again.err
    assert len((run / "loss.csv").read_text().splitlines()) == 3
    told = compress(world, tmp_path / "doc.rkv", "--ratio", "0.2", "--adapter", run / "adapter")
    assert "n = 2" in told.out


def test_a_file_is_replaced_only_by_a_whole_one(world, tmp_path):
    out = tmp_path / "doc.rkv"
    compress(world, out, "--ratio", "0.2")
    before = out.read_bytes()
    failed = cli("compress", world.text, "--model", world.model, "-o", out, "--ratio", "7")
    assert failed.code == 1 and out.read_bytes() == before
    compress(world, out, "--ratio", "0.4")
    assert len(out.read_bytes()) > len(before)
    assert list(tmp_path.iterdir()) == [out]
