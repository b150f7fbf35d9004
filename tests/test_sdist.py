"""The source distribution has everything that its own tests and recipes need."""

import subprocess
import tomllib

import pytest

from tests.helpers.pages import ROOT

# The build adds these itself.
ADDED = {"pyproject.toml", ".gitignore"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git to know what is tracked")
def test_every_tracked_folder_and_file_is_in_the_source_distribution():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tracked = {line.partition("/")[0] for line in listed.splitlines()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = set(settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert tracked - ADDED == included
