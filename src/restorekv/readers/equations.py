"""Equations of Word and of web pages as a line of text in which no number can be misread.

A fraction is "a/b", "x^2" is raised, "x_1" an index, and whatever is longer than a word or number
gets parentheses: "(a+b)/(2a)", "x^(n+1)", "sqrt(b^2-4ac)".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from restorekv.readers.raised import FRACTION, INDEX, RAISED, enclose, enclose_if_long, mark

# Signs of MathML that are not shown, such as one for the product in 2x.
INVISIBLE = dict.fromkeys(range(0x2061, 0x2065))
# Elements of MathML that show none of their text.
SILENT = ("annotation", "annotation-xml", "mphantom", "mspace", "none", "mprescripts")


def write_fraction(top: str, bottom: str, has_bar: bool = True) -> str:
    """Return "a/b"; without a bar, which is a binomial coefficient, "binom(a, b)"."""
    if not has_bar:
        return f"binom({top.strip()}, {bottom.strip()})"
    return mark(FRACTION, f"{enclose_if_long(top)}/{enclose_if_long(bottom)}")


def write_scripts(base: str, lower: str = "", upper: str = "") -> str:
    """Return a base with an index (`lower`) and an exponent or the like (`upper`)."""
    base = base.strip()
    if base:
        base = enclose_if_long(base)
    return base + mark(INDEX, lower.strip()) + mark(RAISED, upper.strip())


def write_root(radicand: str, degree: str = "") -> str:
    """Return "sqrt(a)", or "root(a, 3)" for a degree other than 2."""
    if degree.strip():
        return f"root({radicand.strip()}, {degree.strip()})"
    return f"sqrt({radicand.strip()})"


def write_operator(symbol: str, lower: str, upper: str, operand: str) -> str:
    """Return a sum, an integral or a similar operator, such as "∑_(i=1)^n i"."""
    return f"{write_scripts(symbol, lower, upper)} {operand.strip()}"


def write_function(name: str, argument: str) -> str:
    """Return a function with its argument in parentheses."""
    return f"{name.strip()}{enclose(argument.strip())}"


def write_accent(base: str, accent: str) -> str:
    """Return a letter with a combining accent after it; a longer base gets parentheses first."""
    base = base.strip()
    if len(base) != 1:
        base = enclose(base)
    return base + accent


def write_rows(rows: Iterable[Sequence[str]]) -> str:
    """Return a matrix: "[a, b; c, d]"."""
    lines = [", ".join(cell.strip() for cell in row) for row in rows]
    return f"[{'; '.join(lines)}]"


@dataclass
class MathElement:
    """An element of MathML, with the text or elements in it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["MathElement | str"] = field(default_factory=list)

    def render(self) -> str:
        """Return the element as text."""
        if self.tag in SILENT:
            if self.tag == "mspace":
                return " "
            return ""
        parts = self.render_children()
        if self.tag in ("semantics", "maction"):
            # The other children say the same in other forms.
            return parts[0] if parts else ""
        if self.tag in ("msqrt", "mtr", "mtable", "mfenced"):
            return self._render_sequence(parts)
        if self.tag in SHAPES and len(parts) == SHAPES[self.tag]:
            return self._render_shape(parts)
        return "".join(parts)

    def render_children(self) -> list[str]:
        """Return the text of each child, without the white space between elements."""
        parts = []
        for child in self.children:
            if isinstance(child, MathElement):
                parts.append(child.render())
            elif self.tag in ("mi", "mn", "mo", "mtext", "ms") or child.strip():
                parts.append(" ".join(child.translate(INVISIBLE).split()))
        return parts

    def _render_sequence(self, parts: list[str]) -> str:
        """Return an element of any number of parts."""
        if self.tag == "msqrt":
            return write_root("".join(parts))
        if self.tag == "mtr":
            return ", ".join(parts)
        if self.tag == "mtable":
            return f"[{'; '.join(parts)}]"
        separator = self.attributes.get("separators", ",").strip()[:1]
        inner = separator.join(parts)
        return self.attributes.get("open", "(") + inner + self.attributes.get("close", ")")

    def _render_shape(self, parts: list[str]) -> str:
        """Return an element with one part above or below another, such as a fraction."""
        if self.tag == "mfrac":
            thickness = self.attributes.get("linethickness", "1").strip()
            return write_fraction(*parts, has_bar=not thickness.startswith("0"))
        if self.tag == "mroot":
            return write_root(*parts)
        if self.tag in ("msup", "mover"):
            if self.tag == "mover" and self.attributes.get("accent") == "true":
                return write_accent(*parts)
            return write_scripts(parts[0], upper=parts[1])
        return write_scripts(*parts)


# Elements that have a fixed number of parts.
SHAPES = {
    "mfrac": 2,
    "mroot": 2,
    "msup": 2,
    "msub": 2,
    "msubsup": 3,
    "mover": 2,
    "munder": 2,
    "munderover": 3,
}
