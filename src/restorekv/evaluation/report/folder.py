"""A page as a folder, written whole or not at all: index.html, which stands alone, csv/ and png/ beside it."""

from __future__ import annotations

import csv
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from restorekv._version import __version__
from restorekv.errors import RestoreKVError
from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import Block, Cell, Chart, Details, Points, Section, Table

INDEX = "index.html"
FILES = (INDEX, "csv", "png")
GENERATOR = f"restorekv {__version__}"
HERE = Path(__file__).parent
TOGETHER = re.compile(r"(?<=\d) (?=%)|(?<=\b\w) (?== )|(?<=\b\w =) (?=[\d.])")
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def page(title: str, sections: Sequence[Section], summary: Sequence[str] = (), subtitle: str = "") -> str:
    """One self-contained HTML page. Raises ValueError for names that are not unique or no file names."""
    check_names(sections)
    # page.html ends in what jinja2 escapes; the style is ours and made of colours.
    loader = FileSystemLoader(HERE)
    world = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=typeset)
    world.globals |= {"kind_of": kind_of, "as_cell": as_cell, "svg": draw.svg, "swatch": draw.swatch}
    tones = {"light": dict(zip(draw.DARK, draw.DARK, strict=True)), "dark": draw.DARK}
    style = world.get_template("page.css").render(
        {theme: " ".join(f"--{name[1:]}: {colour};" for name, colour in of.items()) for theme, of in tones.items()}
    )
    return world.get_template("page.html").render(
        title=title, sections=sections, summary=summary, subtitle=subtitle, style=Markup(style), generator=GENERATOR
    )


def typeset(value: object) -> object:
    """Text whose units and small equations ("95 %", "r = 0.05") no line break parts."""
    return TOGETHER.sub("\u00a0", value) if type(value) is str else value


def write(
    folder: Path, title: str, sections: Sequence[Section], summary: Sequence[str] = (), subtitle: str = ""
) -> Path:
    """The page with all its PNGs and CSVs; returns the page. What an earlier call wrote there is replaced."""
    folder = folder.resolve()
    check_folder(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as made:
        new = Path(made) / "new"
        for place in (new, new / "csv", new / "png"):
            place.mkdir()
        for block in exhibits(sections):
            write_csv(new / "csv" / f"{block.name}.csv", block)
            if isinstance(block, Chart):
                draw.png(block, new / "png" / f"{block.name}.png")
        (new / INDEX).write_text(page(title, sections, summary, subtitle), encoding="utf-8")
        if folder.exists():
            os.replace(folder, Path(made) / "old")
        os.replace(new, folder)
    return folder / INDEX


def check_folder(folder: Path) -> None:
    """Refuses, before figures are made, a place that holds something else or cannot be written."""
    if not folder.parent.is_dir():
        raise RestoreKVError(f"The folder {folder.parent} does not exist; create it or choose another.")
    if not os.access(folder.parent, os.W_OK):
        raise RestoreKVError(f"The folder {folder.parent} is not writable; choose another or change its permissions.")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RestoreKVError(f"{folder} is a file; choose a folder for the report.")
    told = folder / INDEX
    written = told.is_file() and '<meta name="generator" content="restorekv ' in told.read_text(errors="replace")
    if not written and any(folder.iterdir()):
        raise RestoreKVError(f"{folder} holds something that is no report; choose another folder or empty it.")


def exhibits(sections: Sequence[Section]) -> Iterator[Table | Chart]:
    """Every table and chart, in the order of the page."""

    def within(blocks: Sequence[Block]) -> Iterator[Table | Chart]:
        for block in blocks:
            if isinstance(block, Details):
                yield from within(block.blocks)
            elif isinstance(block, (Table, Chart)):
                yield block

    for section in sections:
        yield from within(section.blocks)


def check_names(sections: Sequence[Section]) -> None:
    """Names become files and ids."""
    names = [block.name for block in exhibits(sections)]
    for name in names:
        if not NAME.fullmatch(name) or names.count(name) > 1:
            raise ValueError(f"{name!r} names no file or names two; use lower-case letters, digits, '.' and '-' once.")


def write_csv(path: Path, block: Table | Chart) -> None:
    """The data's rows; columns in the order in which they first appear."""
    rows = block.data or texts(block)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def texts(table: Table) -> list[Mapping[str, object]]:
    """What a table shows, as rows."""
    titles = [" ".join(dict.fromkeys(filter(None, column))) for column in zip(*map(spread, table.head), strict=True)]
    return [
        dict(zip(titles, map(plain, cells), strict=True))
        for cells in ([as_cell(value) for value in row.cells] for row in table.rows)
    ]


def plain(cell: Cell) -> str:
    return " ".join(filter(None, (cell.above, cell.text, cell.small and f"({cell.small})")))


def spread(row: Sequence[Cell | str]) -> list[str]:
    """A head row's texts, those that span columns once for each."""
    return [cell.text for cell in map(as_cell, row) for _ in range(cell.columns)]


def as_cell(value: Cell | str | int | float) -> Cell:
    return value if isinstance(value, Cell) else Cell(value if isinstance(value, str) else f"{value:,}")


def kind_of(block: Block) -> str:
    """Which macro of page.html shows it."""
    return type(block).__name__.lower() if isinstance(block, (Table, Chart, Points, Details)) else "text"
