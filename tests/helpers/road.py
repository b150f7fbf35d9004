"""The references of docs/contributing.md to functions and their lines, which this updates."""

import ast
import re

from tests.helpers.source import ROOT

PAGE = ROOT / "docs" / "contributing.md"
# [`name`](../src/restorekv/file.py#L12), with or without the line.
REFERENCE = re.compile(r"\[`(\w+)`\]\((?:\.\./)?(src/[\w/]+\.py)(?:#L(\d+))?\)")


def find_line(name: str, path: str) -> int:
    """Return the line on which a file defines a function, class or method, the last for overloads.

    Raises:
        LookupError: The file defines no such name.
    """
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    if not found:
        raise LookupError(f"{path} defines no {name}")
    return found[-1].lineno


def set_lines(text: str) -> str:
    """Return the page with the current line in every reference."""

    def rewrite(match: re.Match) -> str:
        name, path, _ = match.groups()
        return f"[`{name}`](../{path}#L{find_line(name, path)})"

    return REFERENCE.sub(rewrite, text)


if __name__ == "__main__":
    PAGE.write_text(set_lines(PAGE.read_text()))
