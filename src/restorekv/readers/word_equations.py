"""Equations of Word documents (Office MathML) as a line of text; see equations.py."""

from collections.abc import Callable
from typing import Any

from restorekv.readers.equations import (
    write_accent,
    write_fraction,
    write_function,
    write_operator,
    write_root,
    write_rows,
    write_scripts,
)
from restorekv.readers.raised import remove_markers

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
# How a run of an equation is marked as deleted.
DELETED_RUN = "{0}rPr/{0}del".format(
    "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
)
ReadOther = Callable[[Any], str]


def read_equation(element: Any, read_other: ReadOther) -> str:
    """Return an equation, or an element of one, as text.

    Args:
        element: The XML.
        read_other: Returns the text of what is not of Office MathML, such as a tracked insertion,
            which may have equations in it.
    """
    tag = str(element.tag)
    if not tag.startswith(MATH):
        return read_other(element)
    name = tag.removeprefix(MATH)
    if name == "t":
        return remove_markers(element.text or "")
    if name.endswith("Pr") or element.find(DELETED_RUN) is not None:
        return ""
    write = WRITERS.get(name)
    if write is not None:
        return write(element, read_other)
    return "".join(read_equation(child, read_other) for child in element)


def _read_part(element: Any, name: str, read_other: ReadOther, hidden: str = "") -> str:
    """Return the text of an element's part, or "" if it has none or the property `hidden` says that
    it is not shown.
    """
    part = element.find(MATH + name)
    if part is None or (hidden and _has_property(element, hidden)):
        return ""
    return read_equation(part, read_other)


def _read_parts(element: Any, name: str, read_other: ReadOther) -> list[str]:
    """Return the texts of all of an element's parts with a name."""
    return [read_equation(part, read_other) for part in element.findall(MATH + name)]


def _find_property(element: Any, name: str, default: str) -> str:
    """Return a property of an element, such as a sum's symbol; `default` if it is not given."""
    local = str(element.tag).removeprefix(MATH)
    found = element.find(f"{MATH}{local}Pr/{MATH}{name}")
    if found is None:
        return default
    return found.get(MATH + "val", "")


def _has_property(element: Any, name: str) -> bool:
    """Return whether a property that is on or off is on."""
    local = str(element.tag).removeprefix(MATH)
    found = element.find(f"{MATH}{local}Pr/{MATH}{name}")
    return found is not None and found.get(MATH + "val", "1") not in ("0", "off", "false")


def _write_fraction(element: Any, read_other: ReadOther) -> str:
    top = _read_part(element, "num", read_other)
    bottom = _read_part(element, "den", read_other)
    return write_fraction(top, bottom, _find_property(element, "type", "bar") != "noBar")


def _write_scripts(element: Any, read_other: ReadOther) -> str:
    base = _read_part(element, "e", read_other)
    lower = _read_part(element, "sub", read_other)
    upper = _read_part(element, "sup", read_other)
    return write_scripts(base, lower, upper)


def _write_scripts_before(element: Any, read_other: ReadOther) -> str:
    lower = _read_part(element, "sub", read_other)
    upper = _read_part(element, "sup", read_other)
    return write_scripts("", lower, upper) + _read_part(element, "e", read_other)


def _write_root(element: Any, read_other: ReadOther) -> str:
    degree = _read_part(element, "deg", read_other, hidden="degHide")
    return write_root(_read_part(element, "e", read_other), degree)


def _write_operator(element: Any, read_other: ReadOther) -> str:
    lower = _read_part(element, "sub", read_other, hidden="subHide")
    upper = _read_part(element, "sup", read_other, hidden="supHide")
    operand = _read_part(element, "e", read_other)
    return write_operator(_find_property(element, "chr", "∫"), lower, upper, operand)


def _write_delimiters(element: Any, read_other: ReadOther) -> str:
    separator = _find_property(element, "sepChr", "|")
    inner = separator.join(_read_parts(element, "e", read_other))
    begin = _find_property(element, "begChr", "(")
    return begin + inner + _find_property(element, "endChr", ")")


def _write_function(element: Any, read_other: ReadOther) -> str:
    name = _read_part(element, "fName", read_other)
    return write_function(name, _read_part(element, "e", read_other))


def _write_limit(element: Any, read_other: ReadOther) -> str:
    base = _read_part(element, "e", read_other)
    limit = _read_part(element, "lim", read_other)
    if str(element.tag).removeprefix(MATH) == "limLow":
        return write_scripts(base, lower=limit)
    return write_scripts(base, upper=limit)


def _write_accent(element: Any, read_other: ReadOther) -> str:
    return write_accent(
        _read_part(element, "e", read_other), _find_property(element, "chr", "\u0302")
    )


def _write_bar(element: Any, read_other: ReadOther) -> str:
    # Without a position the bar is below.
    bar = "\u0305" if _find_property(element, "pos", "bot") == "top" else "\u0332"
    return write_accent(_read_part(element, "e", read_other), bar)


def _write_matrix(element: Any, read_other: ReadOther) -> str:
    rows = element.findall(MATH + "mr")
    return write_rows(_read_parts(row, "e", read_other) for row in rows)


def _write_lines(element: Any, read_other: ReadOther) -> str:
    return "; ".join(_read_parts(element, "e", read_other))


def _write_phantom(element: Any, read_other: ReadOther) -> str:
    if not _has_property(element, "show") and element.find(f"{MATH}phantPr/{MATH}show") is not None:
        return ""
    return _read_part(element, "e", read_other)


WRITERS: dict[str, Callable[[Any, ReadOther], str]] = {
    "f": _write_fraction,
    "sSub": _write_scripts,
    "sSup": _write_scripts,
    "sSubSup": _write_scripts,
    "sPre": _write_scripts_before,
    "rad": _write_root,
    "nary": _write_operator,
    "d": _write_delimiters,
    "func": _write_function,
    "limLow": _write_limit,
    "limUpp": _write_limit,
    "acc": _write_accent,
    "bar": _write_bar,
    "m": _write_matrix,
    "eqArr": _write_lines,
    "phant": _write_phantom,
}
