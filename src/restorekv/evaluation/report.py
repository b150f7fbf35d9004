"""Reports: the page of a run folder, and any page of sections, written whole or not at all.

A page is index.html, which needs no other file, with csv/, svg/ and png/ next to it. All text is
escaped.
"""

import base64
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from pandas import DataFrame

from restorekv import __version__
from restorekv.errors import RestoreKVError
from restorekv.evaluation import plots
from restorekv.evaluation.answers_kept import make_kept_table
from restorekv.evaluation.charts import Chart
from restorekv.evaluation.frame import GROUP, TASK, load_grid
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.grid_tables import count_gains, held_table, scores_table
from restorekv.evaluation.results import flatten_identity
from restorekv.evaluation.tables import Table
from restorekv.files import make_temporary_name

INDEX = "index.html"
SVG = "svg"
FILES = (INDEX, "csv", SVG, "png")
GENERATOR = "restorekv "
SIGNS = {"▲": "up", "▼": "down", "✓": "up", "✗": "down", "○": "even", "=": "even"}
DETAIL = re.compile(r"\(([^()]*)\)$")  # what a cell says in addition, in smaller letters
EMPHASIS = re.compile(r"^\*([^*]+)\*")  # Markdown's, which the paper's own figures have
SURE = re.compile(r"\(([+−])\S+ to \1")  # an interval that excludes zero


@dataclass(frozen=True)
class Details:
    """Blocks that open on a click."""

    summary: str
    blocks: "Sequence[Block]"


Block = str | Sequence[str] | Table | Chart | Details  # a sequence of texts is a list


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, blocks; `verdict` stands next to the heading."""

    title: str
    intro: str = ""
    blocks: Sequence[Block] = ()
    verdict: str = ""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder (to DIR/report by default) and return its path.

    Raises RestoreKVError where there is nothing to report, for a mix-up, and for an `out` that
    holds something else.
    """
    if not folder.is_dir():
        fix = "give one that `restorekv eval --out` wrote"
        raise RestoreKVError(f"There is no folder {folder}; {fix}.")
    out = out or folder / "report"
    check_folder(out.resolve())
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        # The paper's page has further files there, which a report would take away.
        if path.name not in FILES:
            why = f"{out} holds {path.name}, which is not a part of a report"
            raise RestoreKVError(f"{why}; choose another folder with --out.")
    grid = load_grid(folder)
    rows = grid.rows()
    if not rows:
        fix = f"run `restorekv eval --out {folder}` first"
        raise RestoreKVError(f"{folder} holds no results to report; {fix}.")
    by_condition = group_by(rows, lambda row: row["condition"])
    scores: list[Block] = []
    for condition, own in by_condition.items():
        scores.append(scores_table(own))
        kinds = {row["kind"] for row in own}
        parts = [scores_table(own, kind) for kind in (GROUP, TASK) if kind in kinds]
        scores += [Details(f"{condition}: by task", parts)] if parts else []
    charts = [chart for chart in map(plots.plot_scores, by_condition.values()) if chart]
    gains = count_gains(rows) or "No pair of a base and its restored cell is finished yet."
    kept = make_kept_table(grid)
    sections = [
        Section("Accuracy against ratio", plots.SCORES, charts),
        Section("Restored next to its base", gains, scores),
        Section("Answers kept", "", [kept] if kept else []),
        Section("Needle in a haystack", plots.NEEDLES, plots.plot_needles(grid)),
        Section("What the caches held", "", [held_table(own) for own in by_condition.values()]),
        Section("Conventions and versions", "", [conventions_table(grid.results)]),
    ]
    done = sum(result.done for result in grid.results)
    subtitle = f"{', '.join(by_condition)}; {done} of {len(grid.results)} cells done."
    sections = [section for section in sections if section.blocks]
    return write_page(out, "Answers from compressed caches", sections, [gains], subtitle)


def conventions_table(results: Sequence) -> Table:
    """Return what cells were made with, first what differs; the CSV file has every cell."""
    facts = [
        {"cell": result.folder.name, **flatten_identity(result.identity)} for result in results
    ]
    values: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for each in facts for key in each if key != "cell"):
        values[key] = list(dict.fromkeys(str(each.get(key)) for each in facts))
    keys = sorted(values, key=lambda key: len(values[key]) == 1)
    rows = [[key, "; ".join(values[key])] for key in keys]
    differing = sum(len(values[key]) > 1 for key in keys)
    note = f"{differing} of them differ between the {len(facts)} cells."
    columns = ["convention", "values"]
    title = "What all cells were made with"
    return Table("conventions", title, columns, rows, note, facts, left=(0, 1))


def write_page(
    folder: Path,
    title: str,
    sections: Sequence[Section],
    summary: Sequence[str] = (),
    subtitle: str = "",
) -> Path:
    """Write the page with all its files, in place of what an earlier call wrote, and return it.

    Args:
        folder: what to write; the folder above must exist.
        title: the page's heading.
        sections: what the page shows, in order.
        summary: sentences that stand out at the top.
        subtitle: a line below the heading.
    """
    folder = folder.resolve()
    check_folder(folder)
    temporary = make_temporary_name(folder)
    try:
        new = temporary / "new"
        for place in (temporary, new, *(new / name for name in FILES if name != INDEX)):
            place.mkdir()
        for block in exhibits(sections):
            frame = block.to_frame() if isinstance(block, Table) else DataFrame(list(block.figures))
            frame.to_csv(new / "csv" / f"{block.name}.csv", index=False)
            for ending in (SVG, "png") if isinstance(block, Chart) else ():
                (new / ending / f"{block.name}.{ending}").write_bytes(block.render(ending))
        (new / INDEX).write_text(render_page(title, sections, summary, subtitle), encoding="utf-8")
        if folder.exists():
            os.replace(folder, temporary / "old")
        os.replace(new, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder / INDEX


def render_page(
    title: str,
    sections: Sequence[Section],
    summary: Sequence[str] = (),
    subtitle: str = "",
) -> str:
    """Return one HTML page. Raises ValueError for a name that is no file name, or used twice."""
    names = [block.name for block in exhibits(sections)]
    for name in names:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or names.count(name) > 1:
            fix = "use lower-case letters, digits, '.' and '-' once"
            raise ValueError(f"{name!r} names no file or names two; {fix}.")
    # Texts may be a stranger's: autoescape is on, and only `mark_up_cell` returns markup.
    world = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    world.filters["cell"] = mark_up_cell
    world.filters["kind"] = lambda block: type(block).__name__
    world.filters["picture"] = encode_picture
    page = world.get_template("report.html")
    words = {"title": title, "sections": sections, "summary": summary, "subtitle": subtitle}
    return page.render(words, generator=GENERATOR + __version__)


def mark_up_cell(text: str) -> Markup:
    """Escape a cell's text, give it the color of its sign, and make its parentheses smaller."""
    color = next((name for sign, name in SIGNS.items() if sign in text), "")
    weight = " bold" if SURE.search(text) else ""
    safe = EMPHASIS.sub(r"<em>\1</em>", str(escape(text)))
    shown = Markup(DETAIL.sub(r"<small>(\1)</small>", safe))
    return Markup('<span class="{}">{}</span>').format(color + weight, shown) if color else shown


def encode_picture(chart: Chart) -> str:
    """Return the chart as an address that holds the whole picture."""
    return "data:image/svg+xml;base64," + base64.b64encode(chart.render(SVG)).decode()


def exhibits(sections: Sequence[Section | Details]) -> Iterator[Table | Chart]:
    """Yield every table and chart, in the order of the page."""
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Details):
                yield from exhibits([block])
            elif isinstance(block, (Table, Chart)):
                yield block


def check_folder(folder: Path) -> None:
    """Refuse, before figures are made, a place that holds something else or cannot be written."""
    if not folder.parent.is_dir():
        fix = "create it or choose another"
        raise RestoreKVError(f"The folder {folder.parent} does not exist; {fix}.")
    if not os.access(folder.parent, os.W_OK):
        fix = "choose another or change its permissions"
        raise RestoreKVError(f"The folder {folder.parent} is not writable; {fix}.")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RestoreKVError(f"{folder} is a file; choose a folder for the report.")
    index = folder / INDEX
    sign = f'<meta name="generator" content="{GENERATOR}'
    written = index.is_file() and sign in index.read_text(errors="replace")
    if not written and any(folder.iterdir()):
        fix = "choose another folder or empty it"
        raise RestoreKVError(f"{folder} holds files that are not a report; {fix}.")
