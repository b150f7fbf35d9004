"""The project's source files, their names as modules, and what they import."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "restorekv"
FILES = sorted(
    path
    for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "paper")
    for path in folder.rglob("*.py")
    if path != PACKAGE / "__init__.py"
)


def name_of(path: Path) -> str:
    """The name under which a file is imported."""
    base = PACKAGE.parent if path.is_relative_to(PACKAGE) else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def imported(tree: ast.Module) -> set[str]:
    """The project's modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            # Of the package, which imports nothing.
            if [alias.name for alias in node.names] == ["__version__"]:
                continue
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & MODULES) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {
        name for name in found if name.partition(".")[0] in ("restorekv", "benchmarks", "paper")
    }
