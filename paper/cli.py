"""`python -m paper`: every table and figure of the paper, compared with the paper's own figures."""

import shlex
import shutil
import warnings
from pathlib import Path
from typing import Annotated, TypedDict

import typer
from rich.progress import BarColumn, Progress, TextColumn

from paper import plan, setting, smollm2
from paper.carry_out import carry_out, load_done
from paper.experiments import EXPERIMENTS, FURTHER, choose_experiments
from paper.training import train_all
from paper.write import write_page_of_paper
from restorekv.cli import options
from restorekv.cli.loading import silence_transformers
from restorekv.cli.pools import open_pool
from restorekv.cli.terminal import notes, output, print_written
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evaluation.report import SVG
from restorekv.files import check_target, replace_file
from restorekv.model.names import SMOLLM2, TINY, to_canonical_name

RESULTS = "results"

Out = Annotated[Path, typer.Argument(help="The run's folder; what it holds is not done again.")]
Only = Annotated[
    str, typer.Option(help=f"Some of {', '.join((*EXPERIMENTS, *FURTHER))}, with commas.")
]
Markdown = Annotated[
    Path | None, typer.Option(help="The tables here too, and their figures in results/ beside it.")
]


class CommonSettings(TypedDict):
    """The arguments that the settings of all models have in common."""

    count: int
    seeds: tuple[int, ...]
    device: str
    dtype: str


def run(
    context: typer.Context,
    out: Out = Path("runs/paper"),
    model: options.Model = TINY,
    adapters: Annotated[
        str | None, typer.Option(help="With --model: a folder by evictor, or published.")
    ] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: a benchmark's settings, as in quality:path=FILE; repeatable."
        ),
    ] = None,
    only: Only = "",
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train the adapters that are not at hand, first.")
    ] = False,
    seeds: Annotated[
        str, typer.Option(help="Training seeds of the ablations, with commas.")
    ] = "0,1,2",
    data: Annotated[
        Path | None, typer.Option(help="With --model: what --retrain trains on.")
    ] = None,
    markdown: Markdown = None,
    listed: Annotated[
        bool, typer.Option("--list", help="What would be measured, and nothing else.")
    ] = False,
    so_far: Annotated[
        bool, typer.Option("--so-far", help="Write the page of what is done; measure nothing.")
    ] = False,
    count: Annotated[
        int, typer.Option(min=0, help="Contexts of each benchmark; 0: its own number.")
    ] = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    ray: Annotated[
        str | None, typer.Option(help="Spread over Ray: local, auto or an address.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Trainings at once; with --ray local, processes.")
    ] = 2,
) -> None:
    common: CommonSettings = {
        "count": count,
        "seeds": _parse_numbers(seeds),
        "device": device,
        "dtype": dtype,
    }
    asked = make_setting(out, to_canonical_name(model), adapters, benchmark or [], data, common)
    experiments = choose_experiments(only, asked)
    if listed:
        _print_list(experiments, asked)
        return
    if so_far and retrain:
        raise RestoreKVError("--so-far measures nothing, so nothing is trained; leave out one.")
    if retrain and not asked.tiny and data is None:
        raise RestoreKVError("--retrain on another model needs --data, what is trained on.")
    if markdown:
        check_target(markdown)
    silence_transformers()
    if so_far:
        done = load_done(experiments, asked, out)
    else:
        out.mkdir(parents=True, exist_ok=True)
        if retrain:
            train_all(plan.list_trainings(experiments, asked), workers, 1)
        with (
            warnings.catch_warnings(),
            open_pool(ray, workers, device) as pool,
            _make_progress_bar() as progress,
        ):
            # Adapters used with other evictors raise warnings, but some tables measure just that.
            warnings.simplefilter("ignore", RestoreKVWarning)
            done = carry_out(experiments, asked, out, _make_callback(progress), pool)
    page = write_page_of_paper(experiments, asked, done, out, _format_command(context))
    if markdown:
        _copy_report(page.parent, markdown)
    for experiment in experiments:
        for line in (
            *plan.list_missing(experiment, asked),
            *plan.list_unreachable(experiment, asked, done.failed),
        ):
            notes.print(
                f"{experiment.number or experiment.title}: not measured, {line}",
                highlight=False,
                markup=False,
            )
    print_written(page)


def make_setting(
    out: Path,
    model: str,
    adapters: str | None,
    benchmarks: list[str],
    data: Path | None,
    common: CommonSettings,
) -> setting.Setting:
    """Return the setting for a model; refuse options that are for other models."""
    if model == TINY and (adapters or data or benchmarks):
        raise RestoreKVError(
            "--adapters, --data and --benchmark are for another --model; the tiny one has its own."
        )
    if model == SMOLLM2 and benchmarks:
        raise RestoreKVError(
            "--benchmark is for another --model; smollm2 has benchmarks that ship, see --count."
        )
    if model == TINY:
        return setting.make_tiny_setting(out, **common)
    if model == SMOLLM2:
        return smollm2.make_smollm2_setting(out, adapters=adapters, data=data, **common)
    return setting.make_backbone_setting(
        out, model, adapters, given=benchmarks, data=data, **common
    )


def _copy_report(report: Path, markdown: Path) -> None:
    """Copy the report's Markdown to `markdown`, and its figures and charts to results/ next to it.

    The file of figures and the folder of charts have the same name as the Markdown. If the Markdown
    is in a folder results/ itself, they go there too.
    """
    results = markdown.parent if markdown.parent.name == RESULTS else markdown.parent / RESULTS
    charts = results / markdown.stem
    charts.mkdir(parents=True, exist_ok=True)
    drawn = {path.name for path in (report / SVG).iterdir()}
    for path in charts.glob("*.svg"):
        if path.name not in drawn:  # a chart of an earlier report
            path.unlink()
    for name in sorted(drawn):
        _copy_file(report / SVG / name, charts / name)
    if not drawn:
        charts.rmdir()
    _copy_file(report / "paper.json", results / f"{markdown.stem}.json")
    text = (report / "paper.md").read_text(encoding="utf-8")
    with replace_file(markdown) as temporary:
        place = charts.relative_to(markdown.parent).as_posix()
        temporary.write_text(text.replace(f"]({SVG}/", f"]({place}/"), encoding="utf-8")


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file so that the target is either complete or unchanged."""
    with replace_file(target) as temporary:
        shutil.copyfile(source, temporary)


def _format_command(context: typer.Context) -> str:
    """Return the command line, without options that have their defaults."""
    told = ["python", "-m", "paper"]
    for given in context.command.params:
        values = context.params[given.name]
        source = context.get_parameter_source(given.name)
        if source is not None and source.name == "COMMANDLINE":
            for value in values if isinstance(values, (list, tuple)) else [values]:
                told += given.opts[:1] if given.param_type_name == "option" else []
                told += [] if value is True else [str(value)]
    return shlex.join(told)


def _parse_numbers(given: str) -> tuple[int, ...]:
    """Parse "0,1,2" to (0, 1, 2), sorted and without duplicates."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RestoreKVError(
            f"--seeds takes whole numbers with commas between them, not {given!r}."
        )
    return tuple(sorted({int(part) for part in parts}))


def _print_list(experiments: list[plan.Experiment], asked: setting.Setting) -> None:
    """Print a line for every experiment, then the trainings that would make the missing
    adapters.
    """
    for experiment in experiments:
        cells = len({need.cell for need in plan.list_needs(experiment, asked)})
        line = (
            f"{experiment.name:18} {experiment.number or '-':10} {cells:3} cells  "
            f"{experiment.title}"
        )
        output.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in plan.list_missing(experiment, asked):
            output.print(f"{'':18} missing: {line}", markup=False, highlight=False, soft_wrap=True)
    every = plan.list_cells(experiments, asked)
    output.print(
        f"{len(every)} cells in all; --retrain would train "
        f"{len(plan.list_trainings(experiments, asked))} adapters"
    )
    for training in plan.list_trainings(experiments, asked):
        output.print(
            f"{training.state():>16}  {training.name}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _make_progress_bar() -> Progress:
    parts = (BarColumn(), TextColumn("{task.percentage:.0f} %  {task.description}"))
    return Progress(*parts, console=notes, disable=not notes.is_terminal)


def _make_callback(progress: Progress):
    """Return the callback for `carry_out`: it moves the bar on a terminal, else prints a line now
    and then.
    """
    task = progress.add_task("", total=1.0)
    last = [("", -0.05)]

    def update(what: str, share: float) -> None:
        progress.update(task, completed=share, description=what)
        table = what.partition(", about")[0]
        if not notes.is_terminal and (table != last[0][0] or share - last[0][1] >= 0.05):
            last[0] = (table, share)
            notes.print(f"{share:.0%} {what}", highlight=False, markup=False, soft_wrap=True)

    return update
