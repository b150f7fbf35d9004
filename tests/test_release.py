"""What a public project promises around the code: one version everywhere, workflows that run."""

import datetime
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import restorekv

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release.py"
FILES = (
    "pyproject.toml",
    "distributions/restorekv-tiny/pyproject.toml",
    "distributions/restorekv-smollm2/pyproject.toml",
    "src/restorekv/__init__.py",
    "CITATION.cff",
    "uv.lock",
    "CHANGELOG.md",
)
TODAY = datetime.date(2031, 2, 3)


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_file_names_the_same_version():
    versions = {
        name: tomllib.loads((ROOT / name).read_text())["project"]["version"]
        for name in FILES
        if name.endswith(".toml")
    }
    versions["CITATION.cff"] = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions["CHANGELOG.md"] = heading[1]
    assert set(versions.values()) == {restorekv.__version__}, versions


def test_a_release_writes_the_version_and_the_date(release, copy):
    release.write_version(copy, "7.8.9", TODAY)
    for name in FILES:
        before = (ROOT / name).read_text().splitlines()
        after = (copy / name).read_text().splitlines()
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        dated = name in ("CITATION.cff", "CHANGELOG.md")
        lines = len(release.PROJECTS) if name == "uv.lock" else 1 + dated
        assert "7.8.9" in " ".join(changed) and len(changed) <= lines, name
        assert ("2031-02-03" in " ".join(changed)) == dated, name


@pytest.mark.parametrize("version", ["1", "v1.2.3", "1.2.3-dev", "1.2.3\n"])
def test_a_word_that_is_no_version_is_refused(release, copy, version):
    before = {name: (copy / name).read_bytes() for name in FILES}
    with pytest.raises(release.ReleaseError, match="is no version"):
        release.write_version(copy, version, TODAY)
    assert before == {name: (copy / name).read_bytes() for name in FILES}


def test_a_changelog_without_a_heading_for_it_is_refused(release, copy):
    release.write_version(copy, "7.8.9", TODAY)
    with pytest.raises(release.ReleaseError, match=r"CHANGELOG\.md has 0 lines"):
        release.write_version(copy, "7.9.0", TODAY)


def test_a_tree_with_changes_is_not_released(tmp_path):
    """The script of a repository of its own, with one file that was not committed."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    done = subprocess.run(
        [sys.executable, tmp_path / ".ci" / "release.py", "1.2.3"], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == (
        "The tree has changes; commit or remove them first.\n"
    )


def test_a_release_that_fails_says_why_and_leaves_the_tree_as_it_was(copy):
    """Its lint fails here, with a word on stdout."""
    (copy / ".ci").mkdir()
    shutil.copy(SCRIPT, copy / ".ci")
    (copy / "Makefile").write_text("lint test:\n\t@echo the reason; exit 1\n")
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", "-b", "main", copy], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "All"], check=True)
    done = subprocess.run(
        [sys.executable, copy / ".ci" / "release.py", "7.8.9"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "the reason" in done.stdout and "failed" in done.stderr
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    assert status.stdout == ""


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                for word in re.findall(r"make (.*)", step.get("run", "")):
                    called |= set(matrix["target"] if "matrix.target" in word else word.split())
    assert called >= {"lint", "test", "nightly"} and called <= targets, called - targets


def test_templates_are_forms_that_github_reads():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yml"))]
    forms = [form for form in forms if "body" in form]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= set(form)
        marks = [part["id"] for part in form["body"]]
        assert len(set(marks)) == len(marks)
        assert {part["type"] for part in form["body"]} <= {"textarea", "input"}
