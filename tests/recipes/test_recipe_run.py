"""A user's mistake in a recipe's arguments is one sentence, as it is for the command line."""

import os
import subprocess
import sys

import pytest

from recipes.run import run_recipe
from restorekv.errors import RestoreKVError
from tests.helpers.source import ROOT


def test_a_file_that_is_missing_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "recipes.smollm2.texts", str(tmp_path)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Cannot use ")
    assert len(done.stderr.splitlines()) == 1


def test_an_error_of_the_library_is_one_sentence(capsys):
    def fail() -> None:
        raise RestoreKVError("There is no adapter; pass adapter=None.")

    with pytest.raises(SystemExit) as end:
        run_recipe(fail)
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: There is no adapter; pass --adapter none.\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_recipe(lambda: print(1 / 0))
