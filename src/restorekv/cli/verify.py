"""`restorekv verify FILE...`: whether files can be trusted to load, and what they are, in a
sentence each.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from restorekv.cli.inputs import check_readable
from restorekv.cli.terminal import output
from restorekv.errors import RestoreKVError


def run(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Cache files, portable files, conversations, gates, or folders of cache files, "
            "adapters, data, results or training runs."
        ),
    ],
) -> None:
    refused = 0
    paths = [each for path in files for each in _list_cache_files(path)]
    for path in paths:
        try:
            what = _describe(path)
        except RestoreKVError as error:
            refused += 1
            output.print(Text(f"refused  {error}"), soft_wrap=True)
            continue
        output.print(Text(f"intact   {path}: {what}."), soft_wrap=True)
    if refused:
        raise RestoreKVError(f"{refused} of {len(paths)} cannot be loaded; see above why.")


def _list_cache_files(path: Path) -> list[Path]:
    """Return the cache files in a folder that `compress` made from a folder of texts; for anything
    else, return the path itself.
    """
    if not path.is_dir():
        return [path]
    from restorekv.cli.file_kinds import FOLDERS

    if any(any(path.glob(file)) for file in FOLDERS):
        return [path]
    return sorted(path.rglob("*.rkv")) or [path]


def _describe(path: Path) -> str:
    """Return what a file or folder is; a missing one is refused before PyTorch is imported."""
    if not path.is_dir():
        check_readable(path)
    from restorekv.cli.file_kinds import describe_file

    return describe_file(path)
