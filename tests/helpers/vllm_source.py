"""The source code of the installed vLLM, or of one in a folder, parsed without running it."""

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SOURCE = "RESTOREKV_VLLM_SOURCE"  # a folder that has vLLM's package, such as an unpacked wheel


def find_source() -> Path | None:
    """Return the folder of vLLM's package, or None."""
    if os.environ.get(SOURCE):
        return Path(os.environ[SOURCE])
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def parse(path: str) -> ast.Module:
    """Return a file of vLLM's package."""
    folder = find_source()
    assert folder is not None
    return ast.parse((folder / path).read_text("utf-8"))


def find(path: str, *names: str) -> ast.ClassDef | ast.FunctionDef:
    """Return a class or function, such as ("a.py", "Class", "method")."""
    found: ast.AST = parse(path)
    for name in names:
        found = next(
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        )
    assert isinstance(found, ast.ClassDef | ast.FunctionDef)
    return found


def list_parameters(path: str, *names: str) -> list[str]:
    """Return the names of a function's parameters, without self."""
    function = find(path, *names)
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    found = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in found if name not in ("self", "cls")]


def list_fields(path: str, *names: str) -> set[str]:
    """Return the annotated attributes of a class, and those that its methods set."""
    fields = set()
    for node in ast.walk(find(path, *names)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields.add(node.target.id)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute):
                    fields.add(target.attr)
                if isinstance(target, ast.Name):
                    fields.add(target.id)
    return fields


def write_source(path: str, *names: str) -> str:
    """Return the code of a class or function in a normal form, without comments."""
    return ast.unparse(find(path, *names))
