"""The characters of symbol fonts, in which the codes of letters and digits show symbols."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# The font Symbol, from its codes 0x20 and 0xA0 on; a space is a code without a character.
_SYMBOL_LOW = (
    " !∀#∃%&∋()∗+,−./0123456789:;<=>?"
    "≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_"
    "‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
)
_SYMBOL_HIGH = (
    "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵"
    "ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓"
    "◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪ 〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
)
# What documents use most of the other fonts: boxes, ticks, bullets, arrows and circled numbers.
_WINGDINGS = {
    0x20: " ",
    0x4A: "☺",
    0x4C: "☹",
    **dict(zip(range(0x6C, 0x73), "●❍■□❐❑❒", strict=True)),
    0x75: "◆",
    0x76: "❖",
    **dict(zip(range(0x80, 0x8B), "⓪①②③④⑤⑥⑦⑧⑨⑩", strict=True)),
    **dict(zip(range(0x8B, 0x96), "⓿❶❷❸❹❺❻❼❽❾❿", strict=True)),
    0x9F: "•",
    0xA7: "▪",
    0xA8: "◻",
    0xAB: "★",
    0xD8: "➢",
    **dict(zip(range(0xDF, 0xE3), "←→↑↓", strict=True)),
    0xE8: "➔",
    **dict(zip(range(0xEF, 0xF3), "⇦⇨⇧⇩", strict=True)),
    **dict(zip(range(0xFB, 0xFF), "✗✓☒☑", strict=True)),
}
_WINGDINGS_2 = {0x20: " ", 0x4F: "✗", 0x50: "✓", 0x52: "☑", 0xA3: "☐"}
FONTS: dict[str, dict[int, str]] = {
    "symbol": {
        **dict(enumerate(_SYMBOL_LOW, 0x20)),
        **dict(enumerate(_SYMBOL_HIGH, 0xA0)),
        0xF0: UNKNOWN,
    },
    "wingdings": _WINGDINGS,
    "wingdings 2": _WINGDINGS_2,
    "wingdings 3": {0x20: " "},
    "webdings": {0x20: " "},
}


def is_symbol_font(name: str) -> bool:
    """Return whether a font's codes are those of symbols."""
    return name.lower() in FONTS


def find_symbol(font: str, code: int) -> str:
    """Return the character that a font shows for a code; UNKNOWN if that is not known.

    Word writes codes of such fonts either unchanged or with 0xF000 added.
    """
    known = FONTS.get(font.lower())
    if known is not None and (code < 0x100 or 0xF000 <= code <= 0xF0FF):
        return known.get(code & 0xFF, UNKNOWN)
    # Control codes, surrogates, codes for private use, and codes beyond Unicode.
    if code < 0x20 or 0xD800 <= code <= 0xF8FF or code > 0x10FFFF:
        return UNKNOWN
    return chr(code)
