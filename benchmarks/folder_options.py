"""The options that a benchmark's folder was made with, stored in it so that work kept there is
never reused for other options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.files import read_json, write_json

FILE = "options.json"


def claim_folder(folder: Path, options: Mapping[str, object]) -> None:
    """Store the options of a benchmark in its folder, or check that they are those stored there.

    Args:
        folder: The folder that keeps a benchmark's work; it is created if it does not exist.
        options: The options that decide what the kept work is. Options that only say how much of
            it is wanted do not belong here.

    Raises:
        RestoreKVError: The folder was made with other options, or holds files but no options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / FILE
    if not place.exists():
        if any(folder.iterdir()):
            raise RestoreKVError(
                f"{folder} holds files but no {FILE}, so what they were made with is unknown; "
                "choose an empty folder."
            )
        write_json(place, dict(options))
        return
    stored = read_json(place, str(place))
    differences = []
    for name, value in options.items():
        if stored.get(name) != value:
            differences.append(f"{name} {stored.get(name)}, not {value}")
    if differences:
        raise RestoreKVError(
            f"{folder} was made with {', and '.join(differences)}; choose another folder, or the "
            "same options."
        )
