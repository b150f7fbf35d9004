"""The program `python -m paper`, in a checkout: it measures every table and figure of the paper and
compares them with the paper's own figures.
"""

import sys

from restorekv.cli import _load_command, invoke


def execute(args: list[str]) -> int:
    """Run the command."""
    line = "Measure every table and figure of the paper, beside its own figures."
    return invoke(_load_command("paper.cli", line, "paper"), args, "python -m paper", {})


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
