"""Names that sentences and lists of the package mention exist: in `__all__`, docstrings and
comments.
"""

import ast
import builtins
import importlib
import io
import re
import tokenize

import pytest

from tests.helpers.source import FILES, PACKAGE, module_name

LISTS = [
    module_name(path)
    for path in FILES
    if path.is_relative_to(PACKAGE) and re.search(r"^__all__", path.read_text(), re.MULTILINE)
]
# A plain name, with dots or a call's parentheses: `text`, `Answer.ids`, `evict(1)`.
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
# What others named: programs, keys in files, parameters and modules of other packages.
ELSEWHERE = {
    "accelerate",
    "cache_position",
    "constrained",
    "datasets",
    "difficult",
    "gain",
    "general_plugins",
    "hotpot_dev_distractor_v1",
    "json",
    "json_object",
    "launch",
    "load_dataset",
    "nohup",
    "restorekv_tiny",
    "ridge",
    "rouge",
    "split_special_tokens",
    "time_step",
    "torchrun",
}


@pytest.mark.parametrize("module", ["restorekv", *LISTS])
def test_what_a_module_exports_is_there(module):
    loaded = importlib.import_module(module)
    assert not [name for name in loaded.__all__ if not hasattr(loaded, name)]


def collect_names(text: str) -> set[str]:
    """Return every identifier of a file's code: what it defines, takes, uses or imports."""
    names = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names.add(token.string)
    return names


def collect_sentences(text: str) -> list[str]:
    """Return the docstrings and comments of a file."""
    sentences = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            sentences.append(ast.get_docstring(node) or "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            sentences.append(token.string)
    return sentences


def test_sentences_name_what_exists():
    """A file's own name counts too, as in `reference.py`."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    known = {*dir(builtins), *ELSEWHERE}
    for path, text in texts.items():
        known |= collect_names(text) | set(path.with_suffix("").parts) | {"py"}
    missing = []
    for path, text in texts.items():
        for sentence in collect_sentences(text):
            for name in NAME.findall(sentence):
                if not set(name.split(".")) <= known:
                    missing.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert not missing, "\n".join(missing)
