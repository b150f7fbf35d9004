"""A program that reads a PDF, DOCX, EPUB or HTML file from its standard input and writes the text.

extract.py runs it with bounds on memory and time, because a small file can expand without limit. It
imports what the files next to it need of the package, and no library of models, so it starts fast.
"""

import contextlib
import json
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 64 << 20  # no model reads as much
EXIT_MISSING_LIBRARY = 3  # the exit status if a library is not installed
# The modules that read the kinds of files, and their functions. A new kind also needs a row in
# FILE_TYPES and in CPU_SECONDS of extract.py, and one in its PACKAGES if it needs a library.
EXTRACTORS = {
    "pdf": ("pdf_text", "extract_pdf"),
    "docx": ("docx_text", "extract_docx"),
    "epub": ("epub_text", "extract_epub"),
    "html": ("html_text", "extract_html"),
}


def extract(kind: str, content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of a file, and notices of what in it could not be read."""
    module, function = EXTRACTORS[kind]
    read = getattr(import_module(f"restorekv.readers.{module}"), function)
    return read(content)


def main(kind: str, memory: int, seconds: int) -> int:
    """Read stdin, write its text to stdout, and return the exit status.

    The last line of stderr is JSON of the notices; on failure it is the error's type, or with
    EXIT_MISSING_LIBRARY the name of the library.

    Args:
        kind: A key of EXTRACTORS.
        memory: Bytes that this process may use.
        seconds: Seconds of processor time that it may use.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such bounds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        text, notices = extract(kind, sys.stdin.buffer.read())
        payload = text.replace("\0", "").encode(errors="replace")
        if len(payload) > MAX_TEXT_BYTES:
            raise MemoryError  # reported like a document that needs too much memory
    except ImportError as error:
        print(f"\n{error.name}", file=sys.stderr)
        return EXIT_MISSING_LIBRARY
    except BaseException as error:  # libraries raise many kinds of errors on a hostile file
        print(f"\n{type(error).__name__}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(payload)
    print(f"\n{json.dumps(notices)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    # Make `restorekv.readers` importable from where this file is, without the package's own
    # __init__.py.
    package = types.ModuleType("restorekv")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["restorekv"] = package
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
