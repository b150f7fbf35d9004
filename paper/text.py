"""Sections of a page as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restorekv.evaluation.report import Cell, Chart, Details, Points, Section, Table
from restorekv.evaluation.report.blocks import Block


def markdown(title: str, intro: Sequence[str], sections: Sequence[Section], charts: str) -> str:
    """A whole page; the SVG files of its charts are in the folder `charts` beside it."""
    parts = [f"# {title}", *intro]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [f"**{section.verdict.text}**"] if section.verdict else []
        parts += [section.intro] if section.intro else []
        for block in section.blocks:
            parts += lines_of(block, charts)
    return "\n\n".join(parts) + "\n"


def lines_of(block: Block, charts: str) -> Iterator[str]:
    """Paragraphs of a block."""
    if isinstance(block, Table):
        yield f"### {block.title}"
        yield rows_of(block)
        if block.note:
            yield block.note
    elif isinstance(block, Points):
        yield "\n".join(f"- {item}" for item in block.items)
    elif isinstance(block, Details):
        yield f"### {block.summary}"
        for inner in block.blocks:
            yield from lines_of(inner, charts)
    elif isinstance(block, Chart):
        yield f"![{block.title}. {block.alt}.]({charts}/{block.name}.svg)"
    else:
        yield str(block)


def rows_of(table: Table) -> str:
    """Heads of several lines become one."""
    wide = [[text for cell in map(as_cell, line) for text in [cell.text] * cell.columns] for line in table.head]
    head = [" ".join(dict.fromkeys(filter(None, texts))) for texts in zip(*wide, strict=True)]
    body = [[worded(as_cell(cell), line.strong and not index) for index, cell in enumerate(line.cells)]
            for line in table.rows]  # fmt: skip
    ruled = ["---" if index in table.left else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ruled, *body))


def worded(cell: Cell, strong: bool) -> str:
    text = f"**{cell.text}**" if strong else f"*{cell.text}*" if cell.tone == "note" else cell.text
    return (f"{text} ({cell.small})" if cell.small else text).replace("|", "\\|")


def as_cell(value: Cell | str | float) -> Cell:
    return value if isinstance(value, Cell) else Cell(str(value))
