"""Prepare a release: check the tree, write the version, build and check the wheels.

    python .ci/release.py 0.2.0            # on a clean main; commits and tags, pushes nothing
    python .ci/release.py 0.2.0 --write    # only writes the version into the files

The version is written in pyproject.toml of the package and of both distributions, in `__version__`,
in CITATION.cff, in uv.lock, and in the newest heading of CHANGELOG.md. The wheels and the sdist are
in dist/ afterwards, ready for `twine upload dist/*`.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The folder of each project, by its published name.
PROJECTS = {
    "restorekv": ".",
    "restorekv-tiny": "distributions/restorekv-tiny",
    "restorekv-smollm2": "distributions/restorekv-smollm2",
}
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
WHEEL_BYTES = 2 << 20  # limit for the package itself, which is code without weights
UNRELEASED = "unreleased"


class ReleaseError(Exception):
    """A reason not to release, and what to do about it."""


def replace_once(path: Path, pattern: str, replacement: str) -> None:
    """Replace the only match of a pattern in a file."""
    text = path.read_text("utf-8")
    changed, count = re.subn(pattern, lambda match: replacement, text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(
            f"{path} has {count} lines like {pattern!r}, not one; write the version by hand."
        )
    path.write_text(changed, "utf-8")


def write_version(root: Path, version: str, today: datetime.date) -> None:
    """Write a version into every file that states it, and the date into those that have one."""
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"{version} is no version; write it like 0.2.0 or 0.2.0rc1.")
    for name, folder in PROJECTS.items():
        settings = root / folder / "pyproject.toml"
        replace_once(settings, r'^version = ".*"$', f'version = "{version}"')
        locked = rf'^name = "{name}"\nversion = ".*"$'
        replace_once(root / "uv.lock", locked, f'name = "{name}"\nversion = "{version}"')
    source = root / "src" / "restorekv" / "__init__.py"
    replace_once(source, r'^__version__ = ".*"$', f'__version__ = "{version}"')
    citation = root / "CITATION.cff"
    replace_once(citation, r"^version: .*$", f"version: {version}")
    replace_once(citation, r"^date-released: .*$", f"date-released: {today.isoformat()}")
    replace_once(
        root / "CHANGELOG.md",
        rf"^## \S+ \({UNRELEASED}\)$",
        f"## {version} ({today.isoformat()})",
    )


def run(*command: str) -> str:
    """Run a command in the repository and return its output; a failure ends the release."""
    print("$", *command, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        # Linters, tests and twine write to standard output what is wrong.
        print(done.stdout, flush=True)
        raise ReleaseError(f"`{' '.join(command)}` failed; nothing was committed or tagged.")
    return done.stdout


def check_tree(version: str) -> None:
    """Refuse a tree with changes, a branch other than main, and a version that has a tag."""
    if run("git", "status", "--porcelain").strip():
        raise ReleaseError("The tree has changes; commit or remove them first.")
    branch = run("git", "rev-parse", "--abbrev-ref", "HEAD").strip()
    if branch != "main":
        raise ReleaseError(f"This is the branch {branch}; release from main.")
    if run("git", "tag", "--list", f"v{version}").strip():
        raise ReleaseError(f"The tag v{version} exists; choose the next version.")


def build_wheels() -> None:
    """Build the wheels of all projects and the package's sdist into dist/, and check them."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in PROJECTS.values():
        run(sys.executable, "-m", "build", "--outdir", "dist", folder)
    run(
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        *map(str, sorted((ROOT / "dist").iterdir())),
    )
    [wheel] = (ROOT / "dist").glob("restorekv-[0-9]*.whl")
    if wheel.stat().st_size > WHEEL_BYTES:
        raise ReleaseError(
            f"{wheel.name} has {wheel.stat().st_size:,} bytes; "
            f"the package ships code alone, at most {WHEEL_BYTES:,}."
        )


def release(version: str) -> None:
    """Write the version, check, build, commit and tag; a failure leaves the tree as it was."""
    try:
        write_version(ROOT, version, datetime.date.today())
        run("make", "lint", "test")
        build_wheels()
    except ReleaseError:
        # The tree was clean, so only the version has changed.
        run("git", "restore", ".")
        raise
    run("git", "commit", "--all", "--message", f"Release {version}")
    run("git", "tag", "--annotate", f"v{version}", "--message", f"restorekv {version}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="as in 0.2.0")
    parser.add_argument("--write", action="store_true", help="only write it into the files")
    options = parser.parse_args()
    try:
        if options.write:
            write_version(ROOT, options.version, datetime.date.today())
            return
        check_tree(options.version)
        release(options.version)
    except ReleaseError as error:
        sys.exit(str(error))
    print("Push with `git push --follow-tags`, then publish with `twine upload dist/*`.")


if __name__ == "__main__":
    main()
