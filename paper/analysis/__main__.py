"""The program `python -m paper.analysis`, in a checkout: it shows what eviction changes in
attention and predictions.
"""

import sys

from restorekv.cli import _load_command, invoke


def execute(args: list[str]) -> int:
    """Run the command and return its exit code."""
    line = "Show what eviction changes in attention and predictions."
    return invoke(
        _load_command("paper.analysis.cli", line, "paper.analysis"),
        args,
        "python -m paper.analysis",
        {},
    )


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
