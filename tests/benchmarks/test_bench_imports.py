"""Every module of what stands beside the package imports: a renamed constant shows at once."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import benchmarks
import paper
import recipes
from tests.helpers.pages import ROOT

# What runs in an environment of its own, with kvpress.
ELSEWHERE = {"benchmarks.kvpress_side"}


def list_modules():
    names = []
    for package in (benchmarks, paper, recipes):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and module.name not in ELSEWHERE:
                names.append(module.name)
    return names


@pytest.mark.parametrize("name", list_modules())
def test_a_module_imports(name):
    importlib.import_module(name)


def test_the_side_of_kvpress_imports_what_stands_beside_it():
    """In a process of its own: it is a script, and kvpress is not installed here."""
    program = """
import sys, types
kvpress = types.ModuleType("kvpress")
kvpress.KVPressTextGenerationPipeline = kvpress.KVzipPress = object
sys.modules["kvpress"] = kvpress
sys.path.insert(0, "benchmarks")
import kvpress_side
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
