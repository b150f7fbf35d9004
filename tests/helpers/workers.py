"""The processes of a run with several workers."""

from pathlib import Path


def children(process: int) -> set[int]:
    """Return the ids of all descendants of a process."""
    stems = {process}
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    for _ in parents:
        stems |= {child for child, parent in parents.items() if parent in stems}
    return stems - {process}


def running(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
