"""A helper for recipes that write their tables into pages."""

from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.files import replace_file


def fill_page(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what is between the lines `begin` and `end` of a page by a text."""
    before, begin_found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end_found, after = rest.partition(end)
    if not begin_found or not end_found:
        raise RestoreKVError(
            f"{page} lacks the marks {begin} and {end}; put them where the table belongs."
        )
    with replace_file(page) as temporary:
        temporary.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
