"""A page of sections as a folder, written whole or not at all: index.html, which stands alone, csv/, svg/ and png/.

A section holds paragraphs, lists, tables and charts. Text is plain and gets escaped; a `Markup` of markupsafe is taken
as it is.
"""

import csv
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from restorekv import __version__
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts, draw, tables
from restorekv.evaluation.charts import Chart
from restorekv.evaluation.tables import Table, TableCell
from restorekv.files import temporary_name

INDEX, SVG = "index.html", "svg"
FILES = (INDEX, "csv", SVG, "png")
GENERATOR = "restorekv "
TOGETHER = re.compile(r"(?<=\d) (?=%)|(?<=\b\w) (?== )|(?<=\b\w =) (?=[\d.])")
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True)
class Points:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Blocks that open on a click (in print they are open)."""

    summary: str
    blocks: "Sequence[Block]"


Block: TypeAlias = "str | Points | Table | Chart | Details"


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, blocks; `verdict` stands beside the heading."""

    title: str
    intro: str = ""
    blocks: Sequence[Block] = ()
    verdict: TableCell | None = None


def page(title: str, sections: Sequence[Section], summary: Sequence[str] = (), subtitle: str = "") -> str:
    """Returns one self-contained HTML page. Raises ValueError for a name that is no file name, or used twice."""
    names = [block.name for block in exhibits(sections)]
    for name in names:
        if not NAME.fullmatch(name) or names.count(name) > 1:
            raise ValueError(f"{name!r} names no file or names two; use lower-case letters, digits, '.' and '-' once.")
    # page.html ends in what jinja2 escapes; the style is ours and made of colors.
    loader = FileSystemLoader(Path(__file__).parent)
    world = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=typeset)
    world.globals |= {"kind_of": kind_of, "as_cell": tables.as_cell, "svg": draw.inline}
    tones = {"light": dict(zip(charts.DARK, charts.DARK, strict=True)), "dark": charts.DARK}
    style = world.get_template("page.css").render(
        {theme: " ".join(f"--{name[1:]}: {color};" for name, color in of.items()) for theme, of in tones.items()}
    )
    return world.get_template("page.html").render(
        title=title, sections=sections, summary=summary, subtitle=subtitle, style=Markup(style),
        generator=GENERATOR + __version__,
    )  # fmt: skip


def typeset(value: object) -> object:
    """Returns text in which no line break parts units and small equations ("95 %", "r = 0.05")."""
    return TOGETHER.sub("\u00a0", value) if type(value) is str else value


def kind_of(block: Block) -> str:
    return type(block).__name__.lower() if isinstance(block, (Table, Chart, Points, Details)) else "text"


def write(
    folder: Path, title: str, sections: Sequence[Section], summary: Sequence[str] = (), subtitle: str = ""
) -> Path:
    """Writes the page with all its files and returns it. What an earlier call wrote there is replaced."""
    folder = folder.resolve()
    check_folder(folder)
    temporary = temporary_name(folder)
    try:
        new = temporary / "new"
        for place in (temporary, new, *(new / name for name in FILES if name != INDEX)):
            place.mkdir()
        for block in exhibits(sections):
            write_csv(new / "csv" / f"{block.name}.csv", block)
            if isinstance(block, Chart):
                for ending in (SVG, "png"):
                    (new / ending / f"{block.name}.{ending}").write_bytes(draw.image(block, ending))
        (new / INDEX).write_text(page(title, sections, summary, subtitle), encoding="utf-8")
        if folder.exists():
            os.replace(folder, temporary / "old")
        os.replace(new, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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
    index = folder / INDEX
    written = index.is_file() and f'<meta name="generator" content="{GENERATOR}' in index.read_text(errors="replace")
    if not written and any(folder.iterdir()):
        raise RestoreKVError(f"{folder} holds files that are not a report; choose another folder or empty it.")


def exhibits(sections: Sequence[Section]) -> Iterator[Table | Chart]:
    """Yields every table and chart, in the order of the page."""

    def within(blocks: Sequence[Block]) -> Iterator[Table | Chart]:
        for block in blocks:
            if isinstance(block, Details):
                yield from within(block.blocks)
            elif isinstance(block, (Table, Chart)):
                yield block

    for section in sections:
        yield from within(section.blocks)


def write_csv(path: Path, block: Table | Chart) -> None:
    """Writes the rows; columns stand in the order in which they first appear."""
    rows = tables.records(block) if isinstance(block, Table) else block.data
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
