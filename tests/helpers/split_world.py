"""Packages that hold a GGUF file in parts, as a package index would install them."""

import hashlib
from pathlib import Path

from restorekv.model.split_file import FilePart, SplitFile

TERMS = "Terms apply to it: https://example.org/terms"


def install_parts(site: Path, file: Path, count: int = 3) -> SplitFile:
    """Split a file into packages below `site`, and return their description.

    The packages must not be imported; importing one fails.
    """
    content = file.read_bytes()
    size = -(-len(content) // count)
    parts = []
    for number in range(count):
        piece = content[number * size : (number + 1) * size]
        part = FilePart(
            f"some-model-part{number + 1}",
            f"some.gguf.part{number:02}",
            hashlib.sha256(piece).hexdigest(),
        )
        folder = site / part.package.replace("-", "_")
        (folder / "data").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / "data" / part.file).write_bytes(piece)
        parts.append(part)
    digest = hashlib.sha256(content).hexdigest()
    return SplitFile("gemma3-270m", "some-model", "1.0", "some.gguf", digest, tuple(parts), TERMS)


def locate_part(site: Path, part: FilePart) -> Path:
    """Return the path of an installed part."""
    return site / part.package.replace("-", "_") / "data" / part.file
