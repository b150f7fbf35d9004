"""Run a recipe from the command line, as `python -m recipes.NAME`."""

import argparse
import sys
from collections.abc import Callable

from restorekv.cli.errors import report_error, show_warnings


def run_recipe(main: Callable[[], None]) -> None:
    """Run a recipe; an error that a user can fix is one sentence on stderr, a bug a traceback."""
    show_warnings()
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report_error(error))


def make_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the docstring of a recipe as --help, with its line breaks."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
