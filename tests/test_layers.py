"""The shape of the source: imports go downwards only and never in a circle, and every file says
what it is.
"""

import ast
import re

import pytest

from restorekv.cli import COMMANDS
from tests.helpers.source import (
    FILES,
    PACKAGE,
    ROOT,
    find_circles,
    find_imports,
    list_late_imports,
    module_name,
)

ROOMS = (  # each imports only from itself and from those before it
    "restorekv.errors",
    "restorekv.spec",
    "restorekv.size_limits",
    "restorekv.cluster",
    "restorekv.files",
    "restorekv.seal",
    "restorekv.cache",
    "restorekv.model.attention",
    "restorekv.model",
    "restorekv.readers",
    "restorekv.evictors",
    "restorekv.restore",
    "restorekv.compression",
    "restorekv.generation",
    "restorekv.storage",
    "restorekv.context",
    "restorekv.many_contexts",
    "restorekv.pipeline",
    "restorekv.vllm",
    "restorekv.serve",
    "restorekv.serve.ray",
    "restorekv.tiny",
    "restorekv.data",
    "restorekv.train",
    "restorekv.tasks",
    "restorekv.evaluation",
    "restorekv.cli",
    "restorekv.__main__",
    "benchmarks",
    "paper",
)
# Only commands, and what is beside the package, need them.
LEAVES = ("restorekv.serve", "restorekv.evaluation")
# A command imports its work when its arguments have been checked, since PyTorch takes seconds.
COMMAND_MODULES = {path.partition(":")[0] for path, *_ in COMMANDS.values()}
# Other imports that do not run when a file is loaded, each with its reason.
LATE = {
    ("lazy", "restorekv.cli.folder", "restorekv.cli.ray_folder"): "Ray is an extra",
    ("lazy", "restorekv.train.config", "restorekv.compression.eviction"): "it needs PyTorch",
    ("typing", "restorekv.train.config", "restorekv.compression.eviction"): "an annotation",
    ("typing", "restorekv.train.gate_config", "restorekv.model.shape"): "an annotation",
    ("lazy", "restorekv.vllm", "restorekv.vllm.connector"): "vLLM is an extra",
    ("lazy", "benchmarks.vllm_kl", "restorekv.vllm.plugin"): "vLLM has an environment of its own",
    ("lazy", "benchmarks.vllm_steps_side", "restorekv.vllm.cpu_backend"): "settings first",
    ("lazy", "benchmarks.vllm_steps_side", "restorekv.vllm.document_batch"): "settings first",
    ("lazy", "benchmarks.vllm_steps_side", "restorekv.vllm.page_pool"): "settings first",
    ("lazy", "benchmarks.vllm_steps_side", "restorekv.vllm.worker_state"): "settings first",
    ("typing", "restorekv.model.offload_self_test", "restorekv.model.offload"): "an annotation",
    ("typing", "restorekv.storage.cache_checks", "restorekv.storage.cache_file"): "an annotation",
}
# Rooms (the library's thirteen, vllm/ and serve/) and loose files that one sees in the package.
TOP, LOOSE = 17, 11


def room_of(module: str) -> int:
    """Return the number of a module's room: of the rooms that its name begins with, the longest."""
    fitting = [room for room in ROOMS if f"{module}.".startswith(f"{room}.")]
    assert fitting, f"{module} has no room; add it to ROOMS"
    return ROOMS.index(max(fitting, key=len))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = module_name(path)
    for other in find_imports(ast.parse(path.read_text())).all:
        assert room_of(other) <= room_of(own), f"{own} imports {other} from above"


def test_no_imports_in_a_circle():
    """Also inside rooms, for all imports that run when a file is loaded."""
    graph = {module_name(path): find_imports(ast.parse(path.read_text())).eager for path in FILES}
    circles = find_circles(graph)
    assert not circles, "; ".join(" -> ".join(circle) for circle in circles)


def test_late_imports_are_known():
    """An import inside a function, or for annotations only, may close a circle: none is new."""
    late = set(list_late_imports())
    waiting = {each for each in late if each[0] == "lazy" and each[1] in COMMAND_MODULES}
    # A command may name the types of its options without importing PyTorch.
    annotated = {each for each in late if each[0] == "typing" and ".cli" in each[1]}
    assert late - waiting - annotated <= set(LATE), "import it at the top, or say why in LATE"


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}
    assert find_circles(graph) == [["a", "b", "c", "a"]]
    assert not find_circles(graph | {"c": {"d"}})


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_are_imported_by_commands_only(leaf):
    for path in PACKAGE.rglob("*.py"):
        own = module_name(path)
        if not own.startswith((leaf, "restorekv.cli")):
            found = [
                other
                for other in find_imports(ast.parse(path.read_text())).all
                if f"{other}.".startswith(f"{leaf}.")
            ]
            assert not found, f"{own} imports {found[0]}"


def test_the_package_is_seen_at_a_glance():
    rooms = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.glob("*/*")
        if "__pycache__" not in path.parts
    }
    assert len(rooms) <= TOP and len(list(PACKAGE.glob("*.py"))) <= LOOSE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_has_a_docstring(path):
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a file says what it computes"


def test_tests_share_helpers_and_not_each_other():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(
            r"^\s*(from|import) tests\.(\w+\.)*test_", path.read_text(), re.MULTILINE
        ), path
