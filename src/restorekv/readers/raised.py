"""Raised and lowered text, fractions and notes as plain text, so that no number changes.

A reader puts the markers below around them while it collects text. How `write_plainly` then writes
them depends on what is before and after them: 10 with a raised 6 is "10^6", and neither "106" nor,
if a digit follows, "10^65". program.py imports this file, which therefore imports nothing else of
the package.
"""

import re
from dataclasses import dataclass, field

# Control characters, which no document shows. All but END begin something.
RAISED = "\x11"
LOWERED = "\x12"
INDEX = "\x13"  # a lowered part of an equation
FRACTION = "\x14"  # an "a/b" of an equation
END = "\x15"
# Begins the mark of a note: its number or symbol.
NOTE = "\x16"
READING = "\x17"  # what begins the pronunciation above a word
MARKERS = RAISED + LOWERED + INDEX + FRACTION + END + NOTE + READING
_REMOVAL = dict.fromkeys(map(ord, MARKERS))
# Text that needs no parentheses as a part of an equation: a word, a number or a symbol.
ONE_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|\W")
# The same for an exponent or index, which may also have a plus or minus before it.
EXPONENT = re.compile(rf"[+\-\u2212]?(?:{ONE_TOKEN.pattern})")
# Raised endings of ordinal numbers, as in 1st, 2nd and French 1er.
ORDINALS = {"st", "nd", "rd", "th", "er", "re", "nde", "ème", "eme"}
# A fraction that is typed as a raised and a lowered number with a slash between them.
TYPED_FRACTION = re.compile(rf"(\d?){RAISED}(\d+){END}[/\u2044]{LOWERED}(\d+){END}")


def remove_markers(text: str) -> str:
    """Return a document's own text without the characters that mean something here."""
    return text.translate(_REMOVAL)


def mark(marker: str, text: str) -> str:
    """Return text between a marker and END; blank text is returned unmarked."""
    return f"{marker}{text}{END}" if text.strip() else text


@dataclass
class _Part:
    """Text that a marker began, until its end is found."""

    marker: str
    pieces: list[str] = field(default_factory=list)

    def find_last(self) -> str:
        """Return the last character, or ""."""
        for piece in reversed(self.pieces):
            if piece:
                return piece[-1]
        return ""


def write_plainly(text: str) -> str:
    """Return text without the markers.

    - Raised text is "^6", and "^(n+1)" if it is more than a word or number or if a letter or digit
      follows. Endings of ordinal numbers ("1st") and symbols ("5°") are joined to the word before.
    - Lowered digits after a letter or parenthesis are joined to it, unless a digit follows: "H2O".
      Other lowered text is "_max", as in "T_max", or "_(2)", as in "log_(2)8".
    - A fraction is "a/b", "2 1/2" after a digit, and in parentheses next to other letters, digits
      and exponents.
    - A note mark is "[3]", and the reading of a word is "(reading)" after it.
    """
    if not any(marker in text for marker in MARKERS):
        return text
    text = TYPED_FRACTION.sub(_write_typed_fraction, text)
    open_parts = [_Part("")]
    pieces = re.split(f"([{MARKERS}])", text)
    for number, piece in enumerate(pieces):
        if piece == END:
            if len(open_parts) > 1:
                part = open_parts.pop()
                following = _find_next(pieces, number)
                inner = "".join(part.pieces)
                before = open_parts[-1].find_last()
                open_parts[-1].pieces.append(_write_part(part.marker, inner, before, following))
        elif piece and piece in MARKERS:
            open_parts.append(_Part(piece))
        else:
            open_parts[-1].pieces.append(piece)
    # A part without an end is plain text.
    return "".join(piece for part in open_parts for piece in part.pieces)


def _write_typed_fraction(match: re.Match[str]) -> str:
    """Return "2 1/2" for 2 and a fraction of raised and lowered digits."""
    before, top, bottom = match.groups()
    fraction = f"{top}/{bottom}"
    if before:
        return f"{before} {fraction}"
    return fraction


def _find_next(pieces: list[str], number: int) -> str:
    """Return the character, or the marker, that comes next after a piece, or ""."""
    for piece in pieces[number + 1 : number + 3]:
        if piece:
            return piece[0]
    return ""


def _write_part(marker: str, inner: str, before: str, following: str) -> str:
    """Return a part of a text as plain text.

    Args:
        marker: What began it.
        inner: Its text.
        before: The character before it, or "".
        following: The character, or the marker of a part, after it, or "".
    """
    core = inner.strip()
    if not core:
        return inner
    start, _, end = inner.partition(core)
    written = _write_core(marker, core, start or before, end or following)
    return start + written + end


def _write_core(marker: str, inner: str, before: str, following: str) -> str:
    """Return a part without white space around it as plain text; see `_write_part`."""
    if marker == NOTE:
        return f"[{inner.strip('[]')}]"
    if marker == READING:
        return f"({inner})"
    if marker == FRACTION:
        return _write_fraction(inner, before, following)
    if marker == RAISED and _is_joined_when_raised(inner, before):
        return inner
    follows_letter_or_bracket = before.isalpha() or before in (")", "]")
    if (
        marker == LOWERED
        and inner.isdecimal()
        and follows_letter_or_bracket
        and not following.isdigit()
    ):
        return inner
    wrapped = inner
    if following.isalnum() or not EXPONENT.fullmatch(inner):
        wrapped = enclose(inner)
    return ("^" if marker == RAISED else "_") + wrapped


def _is_joined_when_raised(inner: str, before: str) -> bool:
    """Return whether raised text is an ending of a number, or a symbol such as ° or *."""
    if before.isdigit() and inner.lower() in ORDINALS:
        return True
    if inner.startswith("[") and inner.endswith("]"):  # a note mark that is not a link
        return True
    return not any(char.isalnum() or char in "+-\u2212" for char in inner)


def _write_fraction(inner: str, before: str, following: str) -> str:
    """Return an equation's fraction, set apart from the text around it."""
    is_mixed = before.isdigit() and re.fullmatch(r"\d+/\d+", inner)
    if following.isalnum() or following in (RAISED, INDEX, LOWERED, FRACTION, "("):
        inner = f"({inner})"
        if is_mixed:
            return f" {inner}"
        return inner
    if is_mixed:
        return f" {inner}"
    if before.isalnum() or before in ("^", "_", ")", "/"):
        return f"({inner})"
    return inner


def enclose(text: str) -> str:
    """Return text in parentheses, unless one pair of them is around all of it."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            # The first pair ends here.
            if position == len(text) - 1 and char == ")":
                return text
            break
    return f"({text})"


def enclose_if_long(text: str) -> str:
    """Return text in parentheses unless it is one word or number."""
    text = text.strip()
    return text if ONE_TOKEN.fullmatch(text) else enclose(text)
