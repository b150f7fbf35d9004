"""Reports: the page of a run folder, or any other page of sections; written whole or not at all.

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
from restorekv.evaluation.frame import GROUP, TASK, GridResults, load_grid
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.grid_tables import (
    count_gains,
    describe_cut_texts,
    make_held_table,
    make_scores_table,
)
from restorekv.evaluation.results import Result, flatten_identity
from restorekv.evaluation.reuse import find_contained_cells
from restorekv.evaluation.tables import Table
from restorekv.files import check_target, make_temporary_name

INDEX = "index.html"
SVG = "svg"
FOLDERS = ("csv", SVG, "png")
GENERATOR = "restorekv "
COLORS = {"▲": "up", "▼": "down", "✓": "up", "✗": "down", "○": "even", "≈": "even", "=": "even"}
DETAIL = re.compile(r"\(([^()]*)\)$")  # what a cell says in addition, in smaller letters
EMPHASIS = re.compile(r"^\*([^*]+)\*")  # Markdown's, which the paper's own figures have
SURE = re.compile(r"\(([+−])\S+ to \1")  # an interval that excludes zero


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph and blocks; `verdict` is shown next to the heading. A section inside a
    section is collapsed until it is clicked.
    """

    title: str
    intro: str = ""
    blocks: "Sequence[Block]" = ()
    verdict: str = ""


Block = str | Sequence[str] | Table | Chart | Section  # a sequence of texts is a list


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder (to DIR/report by default) and return its path.

    Raises RestoreKVError if there is nothing to report, if cells share names but not what they
    name, or if `out` holds something else.
    """
    # The command line has already refused a `folder` that does not exist.
    out = out or folder / "report"
    # The paper's page has other files in its folder, and a report there would delete them.
    _check_folder(out.resolve(), others=False)
    grid = load_grid(folder)
    contained = {result.folder for result in find_contained_cells(grid.results)}
    if contained:
        grid = GridResults([each for each in grid.results if each.folder not in contained])
    by_condition = group_by(grid.list_rows(), lambda row: row["condition"])
    if not by_condition:
        raise RestoreKVError(
            f"{folder} holds no results to report; run `restorekv eval --out {folder}` first."
        )
    scores: list[Block] = []
    for condition, rows in by_condition.items():
        scores.append(make_scores_table(rows))
        kinds = {row["kind"] for row in rows}
        parts = [make_scores_table(rows, kind) for kind in (GROUP, TASK) if kind in kinds]
        if parts:
            scores.append(Section(f"{condition}: by task", blocks=parts))
    charts = [plots.plot_scores(rows) for rows in by_condition.values()]
    needles = plots.plot_needles(grid)
    kept = make_kept_table(grid)
    gains = count_gains([row for rows in by_condition.values() for row in rows])
    gains = gains or (
        "No pair of an evictor alone and restored is finished yet. Two evictors are compared, "
        "context by context, with compare_results of restorekv.evaluation.compare."
    )
    held = [make_held_table(rows) for rows in by_condition.values()]
    sections = [
        Section("Accuracy against ratio", plots.SCORES, [chart for chart in charts if chart]),
        Section("Restored next to the evictor alone", gains, scores),
        Section("Answers kept", "", [kept] if kept else []),
        Section("Needle in a haystack", plots.NEEDLES, needles),
        Section("What the caches held", "", held),
        Section("Conventions and versions", "", [_make_conventions_table(grid.results)]),
    ]
    done = sum(result.done for result in grid.results)
    subtitle = f"{', '.join(by_condition)}; {done} of {len(grid.results)} cells done."
    sections = [section for section in sections if section.blocks]
    summary = [gains, *describe_cut_texts(grid.results)]
    if contained:
        summary.append(
            f"Not shown: {len(contained)} cells of smaller runs, whose answers a larger run of "
            "this folder has, too."
        )
    return write_page(out, "Answers from compressed caches", sections, summary, subtitle)


def _make_conventions_table(results: Sequence[Result]) -> Table:
    """Return a table of what cells were made with, starting with what differs between them; the CSV
    file has every cell.
    """
    cells = [{"cell": each.folder.name, **flatten_identity(each.identity)} for each in results]
    names = dict.fromkeys(name for cell in cells for name in cell if name != "cell")
    values = {name: dict.fromkeys(str(cell.get(name)) for cell in cells) for name in names}
    differing = [name for name in values if len(values[name]) > 1]
    shared = [name for name in values if len(values[name]) == 1]
    return Table(
        "conventions",
        "What all cells were made with",
        ["convention", "values"],
        [[name, "; ".join(values[name])] for name in (*differing, *shared)],
        f"{len(differing)} of them differ between the {len(cells)} cells.",
        figures=cells,
        left=(0, 1),
    )


def write_page(
    folder: Path,
    title: str,
    sections: Sequence[Section],
    summary: Sequence[str] = (),
    subtitle: str = "",
) -> Path:
    """Write the page with all its files, in place of what an earlier call wrote, and return it.

    Args:
        folder: The folder to write; its parent must exist.
        title: The page's heading.
        sections: What the page shows, in order.
        summary: Sentences that stand out at the top.
        subtitle: A line below the heading.
    """
    folder = folder.resolve()
    _check_folder(folder)
    temporary = make_temporary_name(folder)
    new = temporary / "new"
    try:
        for name in FOLDERS:
            (new / name).mkdir(parents=True)
        for block in _list_exhibits(sections):
            if isinstance(block, Table):
                frame = block.to_frame()
            else:
                frame = DataFrame(list(block.figures))
                for ending in (SVG, "png"):
                    (new / ending / f"{block.name}.{ending}").write_bytes(block.render(ending))
            frame.to_csv(new / "csv" / f"{block.name}.csv", index=False)
        (new / INDEX).write_text(render_page(title, sections, summary, subtitle), encoding="utf-8")
        # The old page goes aside before the new one takes its place, both by a rename.
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
    """Return one HTML page; see `write_page` for the arguments.

    Raises ValueError for an exhibit's name that is not a file name, or is used twice.
    """
    names = [block.name for block in _list_exhibits(sections)]
    for name in names:
        # A name becomes files in three folders and an id of the page.
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or names.count(name) > 1:
            raise ValueError(
                f"{name!r} is not a file name or is used twice; use lower-case letters, digits, "
                "'.' and '-', each name once."
            )
    # Texts may be a stranger's: autoescape is on, and only `mark_up_cell` returns markup.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["cell"] = mark_up_cell
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["base64"] = lambda chart: base64.b64encode(chart.render(SVG)).decode()
    return environment.get_template("report.html").render(
        title=title,
        sections=sections,
        summary=summary,
        subtitle=subtitle,
        generator=GENERATOR + __version__,
    )


def mark_up_cell(text: str) -> Markup:
    """Escape a cell's text, give it the color of its sign, and make its parentheses smaller."""
    safe = EMPHASIS.sub(r"<em>\1</em>", str(escape(text)))
    marked = Markup(DETAIL.sub(r"<small>(\1)</small>", safe))
    color = next((color for sign, color in COLORS.items() if sign in text), "")
    weight = " bold" if SURE.search(text) else ""
    if color:
        return Markup('<span class="{}">{}</span>').format(color + weight, marked)
    return marked


def _list_exhibits(sections: Sequence[Section]) -> Iterator[Table | Chart]:
    """Yield every table and chart, in the order of the page."""
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Section):
                yield from _list_exhibits([block])
            elif isinstance(block, (Table, Chart)):
                yield block


def _check_folder(folder: Path, others: bool = True) -> None:
    """Refuse a folder that holds something other than a page or cannot be written, before any
    figures are made.

    Unless `others`, a page's folder must hold nothing but the page's own files.
    """
    if not folder.exists():
        check_target(folder)
        return
    if not folder.is_dir():
        raise RestoreKVError(f"{folder} is a file; choose a folder for the report.")
    index = folder / INDEX
    names = sorted(path.name for path in folder.iterdir())
    sign = f'<meta name="generator" content="{GENERATOR}'
    if names and not (index.is_file() and sign in index.read_text(errors="replace")):
        raise RestoreKVError(
            f"{folder} holds files that are not a report; choose another folder or empty it."
        )
    more = [name for name in names if name not in (INDEX, *FOLDERS)]
    if more and not others:
        raise RestoreKVError(
            f"{folder} holds {more[0]}, which is not a part of a report; choose another folder "
            "with --out."
        )
