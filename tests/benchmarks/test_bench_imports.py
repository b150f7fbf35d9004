"""Every module of what stands beside the package imports: a renamed constant shows at once."""

import importlib
import pkgutil

import pytest

import benchmarks
import paper
import recipes

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
