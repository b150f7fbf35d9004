"""The text of an HTML page in the character set that it names."""

import codecs
import re

from restorekv.errors import RestoreKVError, make_printable
from restorekv.files import decode_text

START_BYTES = 8192  # of a page, in which it names its character set
XML_DECLARATION = re.compile(
    rb"""\s*<\?xml[^>]{0,200}?\sencoding\s*=\s*["']\s*([\w.:-]+)""", re.IGNORECASE
)
META_TAG = re.compile(rb"<meta[\s/][^>]{0,1000}>", re.IGNORECASE)
META_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# Python's names for character sets, and the names that pages have for them. No others are used,
# since some of Python's encodings are not for text. As in browsers, Latin-1 is read as
# Windows-1252, and other old names as what programs of Windows wrote under them.
NAMES = {
    "utf-8": "utf-8 utf8 unicode-1-1-utf-8",
    "cp1252": "windows-1252 cp1252 x-cp1252 iso-8859-1 iso8859-1 iso_8859-1 iso88591 latin1 "
    "latin-1 l1 ascii us-ascii ansi_x3.4-1968",
    "cp1250": "windows-1250 cp1250 x-cp1250",
    "cp1251": "windows-1251 cp1251 x-cp1251",
    "cp1253": "windows-1253 cp1253 x-cp1253",
    "cp1254": "windows-1254 cp1254 x-cp1254 iso-8859-9 iso8859-9 iso_8859-9 latin5 l5",
    "cp1255": "windows-1255 cp1255 x-cp1255",
    "cp1256": "windows-1256 cp1256 x-cp1256",
    "cp1257": "windows-1257 cp1257 x-cp1257",
    "cp1258": "windows-1258 cp1258 x-cp1258",
    "cp874": "windows-874 tis-620 iso-8859-11 iso8859-11 dos-874",
    "cp866": "ibm866 cp866 866 csibm866",
    "koi8-r": "koi8-r koi8_r koi8 koi",
    "koi8-u": "koi8-u koi8-ru",
    "mac-roman": "macintosh mac x-mac-roman",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "cp932": "shift_jis shift-jis sjis x-sjis ms_kanji ms932 windows-31j csshiftjis",
    "euc-jp": "euc-jp x-euc-jp cseucpkdfmtjapanese",
    "iso2022-jp": "iso-2022-jp csiso2022jp",
    "cp949": "euc-kr ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 korean windows-949 cseuckr",
    "gb18030": "gb18030 gbk gb2312 gb_2312 gb_2312-80 chinese x-gbk csgb2312",
    "big5hkscs": "big5 big5-hkscs cn-big5 x-x-big5 csbig5",
    **{f"iso8859-{number}": f"iso-8859-{number} iso8859-{number} iso_8859-{number}"
       for number in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)},
}  # fmt: skip
CHARSETS = {label: name for name, labels in NAMES.items() for label in labels.split()}
CHARSETS.update({"latin2": "iso8859-2", "cyrillic": "iso8859-5", "greek": "iso8859-7"})
CHARSETS.update({"hebrew": "iso8859-8", "arabic": "iso8859-6", "latin-9": "iso8859-15"})


def decode_page(content: bytes, what: str) -> str:
    """Return a page's text, in the character set of its byte order mark, XML declaration or <meta>.

    A page that says it is Windows-1252 or Latin-1, but is valid UTF-8 with more than ASCII, is read
    as UTF-8: text in those character sets is hardly ever valid UTF-8, and programs that save pages
    as UTF-8 keep the old name. A page that says nothing is UTF-8.

    Args:
        content: The bytes of the page.
        what: What begins an error's sentence.

    Raises:
        RestoreKVError: The bytes are not of that character set, or it is not known.
    """
    marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if content.startswith(marks):
        return decode_text(content, what)
    label, charset = _find_charset(content, what)
    if charset == "cp1252" and not content.isascii() and _is_utf8(content):
        charset = "utf-8"
    if charset == "utf-8":
        return decode_text(content, what)
    try:
        text = content.decode(charset)
    except UnicodeDecodeError as error:
        raise RestoreKVError(
            f"{what} says that it is {label}, and byte {error.start} is not; save it as UTF-8."
        ) from None
    if "\0" in text:
        raise RestoreKVError(f"{what} is binary; give a text.")
    return text


def _find_charset(content: bytes, what: str) -> tuple[str, str]:
    """Return the name that a page gives of its character set, and Python's name for that."""
    # A declaration of XML in UTF-16 needs no mark before it.
    for charset in ("utf-16-le", "utf-16-be"):
        if content.startswith("<?x".encode(charset)):
            return "UTF-16", charset
    start = content[:START_BYTES]
    found = XML_DECLARATION.match(start)
    if found is None:
        for tag in META_TAG.findall(COMMENT.sub(b"", start)):
            found = META_CHARSET.search(tag)
            if found:
                break
    if found is None:
        return "UTF-8", "utf-8"
    label = found[1].decode("ascii", "replace").lower()
    if label.startswith(("utf-16", "utf16", "ucs-2", "unicode")):
        # If this were true, the tag could not have been read as ASCII. Browsers take UTF-8, too.
        return "UTF-8", "utf-8"
    charset = CHARSETS.get(label)
    if charset is None:
        raise RestoreKVError(
            f"{what} names the character set '{make_printable(label)}', which is not known; save "
            "it as UTF-8."
        )
    return label, charset


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
