"""What the campaigns over numbered cases share: their options, and what they print at the end."""

import argparse
import signal
import sys
from collections import Counter


def read_options(description: str, count: int, **flags: str) -> argparse.Namespace:
    """Return the options of a campaign of `count` cases; `flags` are additional switches with their
    help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case by its number")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_args()
    # Which a shell's background would ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return options


def finish(counts: Counter, failures: list[str]) -> None:
    """Print how many cases had each outcome, and exit with an error if any failed."""
    for outcome, number in sorted(counts.items()):
        parts = outcome if isinstance(outcome, tuple) else (outcome,)
        print(" ".join(f"{part:16}" for part in parts), number)
    sys.exit(f"{len(failures)} failures" if failures else 0)
