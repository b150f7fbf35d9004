"""The command line: `restorekv COMMAND`. This module knows the commands' names and imports none of them.

PyTorch takes seconds to import, so a command's module is imported when that command runs, from the one table
COMMANDS. Each module has a function `run` whose signature is the command's arguments.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from restorekv._version import __version__
from restorekv.cli.errors import UsageMistake, show_warnings, tell
from restorekv.cli.errors import report as told  # not `report`: that name is the command's module

COMMANDS: dict[str, tuple[str, str]] = {
    "compress": ("restorekv.cli.compress", "Compress a text into a small cache file."),
    "ask": ("restorekv.cli.ask", "Answer questions from a cache file."),
    "inspect": ("restorekv.cli.inspect", "Show which tokens survive and where the budget falls."),
    "data": ("restorekv.cli.data", "Build or show training data: documents, questions, the teacher's answers."),
    "train": ("restorekv.cli.train", "Train a restore adapter by self-distillation."),
    "push": ("restorekv.cli.push", "Publish a restore adapter on the Hugging Face hub."),
    "train-gate": ("restorekv.cli.train_gate", "Train a learned scorer, for the evictors fastkvzip and kvzap."),
    "convert-gate": ("restorekv.cli.convert_gate", "Turn a published gate of Fast KVzip or KVzap into one of ours."),
    "eval": ("restorekv.cli.eval", "Score evictors on the bundled suite, with and without restoring."),
    "analyze": ("restorekv.cli.analyze", "Show what eviction and restoring do to attention, predictions and cost."),
    "report": ("restorekv.cli.report", "Make one page of tables and charts from the results in a folder."),
    "demo": ("restorekv.cli.demo", "Show the main job on the bundled model, with figures."),
}


class Commands(TyperGroup):
    """Lists every command by its line in the table and imports only the one that runs."""

    table: dict[str, tuple[str, str]] = COMMANDS

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: typer.Context, name: str) -> TyperCommand | None:
        return TyperCommand(name, help=self.table[name][1]) if name in self.table else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(*self.table[name], name), rest


def load(path: str, line: str, name: str) -> TyperCommand:
    """The command itself, its flags read from the signature of its module's `run`; or the module's group `app`."""
    module = importlib.import_module(path)
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name, help=line)(module.run)
    return typer.main.get_command(single)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"restorekv {__version__}")
        raise typer.Exit()


app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=False)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Compress a long context once, restore what eviction lost, ask anything."""


def main(args: Sequence[str] | None = None) -> None:
    """The entry point: runs a command and exits with 0, 1 (a mistake), 2 (wrong usage) or 130 (Ctrl-C)."""
    sys.exit(execute(sys.argv[1:] if args is None else list(args)))


def execute(args: list[str]) -> int:
    """Run one command of restorekv."""
    return invoke(typer.main.get_command(app), args or ["--help"], "restorekv", COMMANDS)


def invoke(group: TyperCommand, args: list[str], name: str, table: Mapping[str, object]) -> int:
    """Run a command; whatever a user can fix is one sentence on stderr."""
    show_warnings()
    try:
        # Not group.main(): it would print mistakes its own way, and a usage page with them.
        with group.make_context(name, args) as context:
            group.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except UsageMistake as error:
        page = " ".join([name, *(part for part in args[:1] if part in table), "--help"])
        return tell(f"{error.format_message().rstrip('.')}; see {page}.", 2)
    except BaseException as error:
        return told(error)
    return 0
