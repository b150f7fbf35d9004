"""`python -m paper.analysis`, in a checkout: what eviction changes in attention and predictions."""

import sys

from restorekv.cli import invoke, load


def execute(args: list[str]) -> int:
    """Run the command and return its exit code."""
    line = "Show what eviction changes in attention and predictions."
    return invoke(
        load("paper.analysis.cli", line, "paper.analysis"), args, "python -m paper.analysis", {}
    )


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
