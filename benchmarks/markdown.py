"""A table of the package as Markdown, for pages of benchmarks and of the paper."""

from dataclasses import replace

from restorekv.evaluation.tables import Table, TableCell, as_cell


def markdown(table: Table) -> str:
    """Returns the table's rows as Markdown, without title and note; a head of several rows becomes one."""
    titles = table.titles
    ruled = ["---" if index in table.left else "---:" for index in range(len(titles))]
    body = [
        [marked(as_cell(value), row.strong and not index) for index, value in enumerate(row.cells)]
        for row in table.rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ruled, *body))


def marked(cell: TableCell, strong: bool) -> str:
    sign = "**" if strong else "*" if cell.tone == "note" else ""
    return replace(cell, text=f"{sign}{cell.text}{sign}").plain.replace("|", "\\|")
