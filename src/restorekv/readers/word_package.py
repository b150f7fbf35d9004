"""The parts of a Word document: XML files in a ZIP file that name the others they need."""

import io
import posixpath
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote
from zipfile import ZipFile

# The names of Word's own elements, and of those that choose between forms of one thing.
WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
COMPATIBILITY = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
# Documents that are saved as "Strict Open XML" have other names for the same elements.
STRICT = "{http://purl.oclc.org/ooxml/"
STRICT_NAMES = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/")
USUAL_NAMES = rb"http://schemas.openxmlformats.org/\1/2006/"


@dataclass(frozen=True)
class Relation:
    """The relation of a part to another one.

    Attributes:
        kind: What the other part is for it, such as "footnotes".
        target: The name of the other part; "" for what is not in the file, such as a linked page.
    """

    kind: str
    target: str


class WordPackage:
    """The parts of a document, read when they are asked for; others may be missing, as in Word.

    Args:
        content: The bytes of the ZIP file.
    """

    def __init__(self, content: bytes) -> None:
        self.archive = ZipFile(io.BytesIO(content))
        self.files = {_unify_name(name): name for name in self.archive.namelist()}
        self.roots: dict[str, Any] = {}

    def has_part(self, name: str) -> bool:
        """Return whether the file has a part of that name."""
        return _unify_name(name) in self.files

    def read_part(self, name: str) -> Any:
        """Return the XML of a part; raises KeyError for one that is missing."""
        key = _unify_name(name)
        if key not in self.roots:
            self.roots[key] = _parse(self.archive.read(self.files[key]))
        return self.roots[key]

    def find_main_part(self) -> str:
        """Return the name of the part with the document itself; raises KeyError without one."""
        for relation in self.read_relations("").values():
            if relation.kind == "officeDocument":
                return relation.target
        raise KeyError("officeDocument")

    def read_relations(self, name: str) -> dict[str, Relation]:
        """Return the relations of a part, or of the whole file for "", by their ids."""
        folder, file = posixpath.split(name)
        names = f"{folder}/_rels/{file}.rels"
        if not self.has_part(names):
            return {}
        relations = {}
        for element in self.read_part(names).iterchildren("{*}Relationship"):
            target = element.get("Target", "")
            if element.get("TargetMode") == "External":
                target = ""
            elif target:
                target = posixpath.normpath(posixpath.join("/", folder, target))
            kind = element.get("Type", "").rpartition("/")[2]
            relations[element.get("Id", "")] = Relation(kind, target)
        return relations


def is_on(element: Any) -> bool:
    """Return whether a property exists and is on."""
    return element is not None and element.get(WORD + "val", "1") not in ("0", "off", "false")


def read_number(element: Any | None, default: int, highest: int, attribute: str = "val") -> int:
    """Return an attribute of an element as a number from 0 to `highest`.

    Args:
        element: The element, or None.
        default: What is returned if there is no such number.
        highest: What is returned for higher numbers.
        attribute: The name of the attribute, without its namespace.
    """
    text = "" if element is None else element.get(WORD + attribute, "")
    return min(int(text[:9]), highest) if text.isdecimal() else default


def _unify_name(name: str) -> str:
    """Return a form of a part's name that is the same for all its spellings."""
    return unquote(name).replace("\\", "/").lstrip("/").lower()


def _parse(content: bytes) -> Any:
    """Return a part's XML, with the usual names of elements."""
    from docx.oxml import parse_xml

    root = parse_xml(content)
    if str(root.tag).startswith(STRICT):
        root = parse_xml(STRICT_NAMES.sub(USUAL_NAMES, content))
    return root
