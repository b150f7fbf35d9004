"""Keeps the countries that Factbook's evaluation asks about out of the training data.

The word 13-grams of `overlap` cannot do this: countries share lists of treaties and field names.
The shipped file has a section of every such country; tasks/splits.py chose them.
"""

from functools import lru_cache
from pathlib import Path

from restorekv.data.documents import DropRow
from restorekv.data.files import iterate_rows

SHIPPED = Path(__file__).parents[1] / "tasks" / "texts" / "factbook" / "evaluation.jsonl.gz"


def refuse_evaluation_country(row: dict, text: str) -> None:
    """Raise DropRow for a section about one of the countries, recognized by the row's id or by a
    line of the text.
    """
    codes, names = _load_countries()
    code = str(row.get("id") or "").partition("/")[0]
    if code in codes or any(_parse_country(line) in names for line in text.splitlines()):
        raise DropRow("evaluation country")


@lru_cache(maxsize=1)
def _load_countries() -> tuple[frozenset[str], frozenset[str]]:
    """Return the countries of the shipped file as codes, with which ids begin, and as names."""
    codes = set()
    names = set()
    for row in iterate_rows(str(SHIPPED), {}):
        codes.add(row["id"].partition("/")[0])
        names.add(_parse_country(row["context"].partition("\n")[0]))
    return frozenset(codes), frozenset(names)


def _parse_country(line: str) -> str:
    """Return "Botswana" for "Botswana. Geography", the first line of a section; "" for a line
    without a period.
    """
    country, period, _ = line.partition(". ")
    return country.strip() if period else ""
