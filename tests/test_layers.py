"""The shape of the source: imports go downwards only, files and functions stay short."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "restorekv"
FLOORS = [
    ["errors", "freed"],
    ["spec", "licences"],
    ["budget", "prompt", "storage", "tail", "cache", "joint", "atomic", "allocate"],
    ["attention", "gguf_tokenizer"],
    ["gguf_model"],
    ["models"],
    ["base_weights"],
    [
        "prefill",
        "offload",
        "probe",
        "adapter_file",
        "card_results",
        "card_training",
        "card_usage",
        "model_card",
        "hub",
        "lora",
        "gate_file",
        "published_gate",
    ],
    ["evictors", "restore"],
    ["prepared"],
    ["steps"],
    ["context_file", "generate", "streamed"],
    ["compressed"],
    ["manifest"],
    ["baselines"],
    ["compression", "survivors", "survivors_plot"],
    ["bundled"],
    ["data"],
    ["stats", "facts"],
    ["train", "tasks"],
    ["tables"],
    ["demo"],
    ["protocols"],
    ["grid", "analysis", "bench"],
    ["report"],
    ["paper"],
    ["cli"],
    ["__main__"],
]
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def floor_of(module: str) -> int:
    """Number of the floor on which restorekv.<module> stands."""
    for number, names in enumerate(FLOORS):
        if module in names:
            return number
    raise AssertionError(f"{module} has no floor; add it to FLOORS")


def imported(tree: ast.Module) -> set[str]:
    """First parts of the restorekv modules that a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "restorekv":
            found |= {alias.name for alias in node.names if (ROOT / alias.name).with_suffix(".py").exists()}
            found |= {alias.name for alias in node.names if (ROOT / alias.name).is_dir()}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("restorekv."):
            found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    for other in imported(ast.parse(path.read_text())):
        assert floor_of(other) <= floor_of(own), f"{own} imports {other} from above"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 300
    assert not text.strip() or ast.get_docstring(tree), "a file says what it computes"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{node.name} is too long"
