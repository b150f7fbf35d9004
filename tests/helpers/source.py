"""The project's source files, their names as modules, and what they import.

`python -m tests.helpers.source` prints the imports that do not run when a module is loaded, and the
import cycles that they would close.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "restorekv"
FILES = sorted(
    path
    for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "paper")
    for path in folder.rglob("*.py")
    if path != PACKAGE / "__init__.py"
)
PROJECTS = ("restorekv", "benchmarks", "paper")


def module_name(path: Path) -> str:
    """Return the name under which a file is imported."""
    base = PACKAGE.parent if path.is_relative_to(PACKAGE) else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


@dataclass
class Imports:
    """The project's modules that a file imports.

    `eager` imports run when the file is loaded, `lazy` ones when a function is called, `typing`
    ones never (`if TYPE_CHECKING`).
    """

    eager: set[str] = field(default_factory=set)
    lazy: set[str] = field(default_factory=set)
    typing: set[str] = field(default_factory=set)

    @property
    def all(self) -> set[str]:
        return self.eager | self.lazy | self.typing


def find_imports(tree: ast.Module) -> Imports:
    """Return the project's modules that a file imports, anywhere in it."""
    imports = Imports()

    def visit(node: ast.AST, found: set[str]) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= _imported_modules(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found = imports.typing
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found = imports.lazy
        for child in ast.iter_child_nodes(node):
            visit(child, found)

    visit(tree, imports.eager)
    return imports


def _imported_modules(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the project's modules that one statement imports."""
    names = {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        # `__version__` is the package's own, which imports nothing.
        if node.module is None or names == {"__version__"}:
            return set()
        # `from package import module` needs the module, `from module import name` the module too.
        submodules = {f"{node.module}.{name}" for name in names} & MODULES
        names = submodules or {node.module}
    return {name for name in names if name.partition(".")[0] in PROJECTS}


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the cycles of a graph {module: what it imports} that a depth-first walk finds."""
    circles: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            circles.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return circles


def list_late_imports() -> Iterator[tuple[str, str, str]]:
    """Yield (kind, module, imported module) for imports that do not run when a file is loaded."""
    for path in FILES:
        imports = find_imports(ast.parse(path.read_text()))
        for kind, found in (("lazy", imports.lazy), ("typing", imports.typing)):
            for other in sorted(found - imports.eager):
                yield kind, module_name(path), other


def main() -> None:
    graph = {}
    for path in FILES:
        graph[module_name(path)] = find_imports(ast.parse(path.read_text())).all
    for kind, module, other in list_late_imports():
        print(f"{kind}: {module} imports {other}")
    for circle in find_circles(graph):
        print("circle:", " -> ".join(circle))


if __name__ == "__main__":
    main()
