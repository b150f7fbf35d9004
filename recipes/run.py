"""Run a recipe from the command line, as `python -m recipes.NAME`."""

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
