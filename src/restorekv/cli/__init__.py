"""The command line `restorekv COMMAND`: names the commands and imports the one that runs.

PyTorch takes seconds to import, so a command's module is imported only when that command runs. A
command's arguments are the signature of the function `run` in its module, or of the function that
the table names after a colon. A module with several subcommands has them in the group `app`.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from restorekv import __version__
from restorekv.cli.errors import (
    RECEIVED,
    UsageError,
    explain_usage_error,
    prepare_process,
    print_error,
    report_error,
    show_warnings,
)

USE = "Use"
MEASURE = "Measure"
TRAIN = "Train"
COMMANDS: dict[str, tuple[str, ...]] = {  # name: module, help, panel of `restorekv --help`
    "compress": ("restorekv.cli.compress", "Compress a text into a small cache file.", USE),
    "ask": ("restorekv.cli.ask", "Answer questions from a cache file.", USE),
    "chat": ("restorekv.cli.chat", "Have a conversation about a cache file in the terminal.", USE),
    "append": (
        "restorekv.cli.cache_files:append",
        "Add a text to a cache file, without reading its own text again.",
        USE,
    ),
    "compose": ("restorekv.cli.cache_files:compose", "Join several cache files into one.", USE),
    "serve": (
        "restorekv.cli.serve",
        "Serve OpenAI's API over documents that stay compressed.",
        USE,
    ),
    "inspect": (
        "restorekv.cli.inspect",
        "Show which tokens a cache file keeps, and in which heads.",
        USE,
    ),
    "export": (
        "restorekv.cli.cache_files:export",
        "Turn a cache file into a plain prefix for other engines.",
        USE,
    ),
    "verify": (
        "restorekv.cli.verify",
        "Check that files are intact and safe to load, and say what they are.",
        USE,
    ),
    "doctor": (
        "restorekv.cli.doctor",
        "Test the code for this machine's CPU and GPUs, and show what is installed.",
        USE,
    ),
    "demo": (
        "restorekv.cli.demo",
        "Compare the answers of a full cache with those of small ones, side by side.",
        USE,
    ),
    "eval": (
        "restorekv.cli.eval",
        "Score evictors on benchmarks, with and without restoring.",
        MEASURE,
    ),
    "report": (
        "restorekv.cli.eval:report",
        "Make a page of tables and charts from the results of eval.",
        MEASURE,
    ),
    "data": (
        "restorekv.cli.data",
        "Build or show training data: documents, questions and the model's answers.",
        TRAIN,
    ),
    "train": ("restorekv.cli.train", "Train a restore adapter by self-distillation.", TRAIN),
    "train-gate": (
        "restorekv.cli.gate:train",
        "Train a learned scorer for the evictors fastkvzip and kvzap.",
        TRAIN,
    ),
    "convert-gate": (
        "restorekv.cli.gate:convert",
        "Convert a published gate of Fast KVzip or KVzap.",
        TRAIN,
    ),
    "push": ("restorekv.cli.push", "Publish a restore adapter on the Hugging Face Hub.", TRAIN),
}


# click's command or, since typer carries its own copy of click, typer's, which has no public name.
Command = Any


class Commands(TyperGroup):
    """A group that lists every command of `table` but imports only the one that runs."""

    table: dict[str, tuple[str, ...]] = COMMANDS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, line, *panel) in self.table.items():
            self.add_command(
                TyperCommand(name, help=line, rich_help_panel=panel[0] if panel else None)
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Command, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:  # while a shell completes a word that is not a command
            return name, command, rest
        path, line = self.table[name][:2]
        return name, _load_command(path, line, name), rest


def _load_command(path: str, line: str, name: str) -> Command:
    """Import a command; its flags come from the signature of its function, or from the group
    `app`.
    """
    module_name, _, function = path.partition(":")
    module = importlib.import_module(module_name)
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name, help=line)(getattr(module, function or "run"))
    return typer.main.get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"restorekv {__version__}")
        raise typer.Exit()


app = typer.Typer(cls=Commands)  # with --install-completion and --show-completion
COMPLETE = "_RESTOREKV_COMPLETE"  # set by a shell that asks what may come next


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Compress the KV cache of a long text once, then ask as many questions as you like."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit with 0, 1 (an error), 2 (wrong usage), 130 (Ctrl-C), 143 (SIGTERM)
    or 129 (SIGHUP).
    """
    prepare_process()
    # OpenMP's threads sleep while they wait for each other. By default they spin for milliseconds,
    # hundreds of times a token, whenever another program has one of the cores. PyTorch's OpenMP
    # reads this when it is loaded, and workers inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if COMPLETE in os.environ:
        typer.main.get_command(app)(prog_name="restorekv")
    code = execute(sys.argv[1:] if args is None else list(args))
    sys.exit(128 + RECEIVED[-1] if RECEIVED else code)


def execute(args: list[str]) -> int:
    """Run one command of restorekv and return its exit code."""
    return invoke(typer.main.get_command(app), args or ["--help"], "restorekv", COMMANDS)


def invoke(group: Command, args: list[str], name: str, table: Mapping[str, object]) -> int:
    """Run a command and return its exit code; an error that a user can fix is one sentence on
    stderr.

    Args:
        group: All commands.
        args: The command and its arguments.
        name: What errors call the program.
        table: The names of the commands.
    """
    show_warnings()
    try:
        # Not group.main(), which would print errors its own way, with a usage page.
        with group.make_context(name, args, help_option_names=["-h", "--help"]) as context:
            group.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except UsageError as error:
        page = " ".join([name, *(part for part in args[:1] if part in table), "--help"])
        return print_error(f"{explain_usage_error(error)}; see {page}.", 2)
    except BaseException as error:
        return report_error(error)
    return 0
