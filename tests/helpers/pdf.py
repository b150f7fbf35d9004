"""Small PDFs, built page by page."""

FONT = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"
# A font that numbers the shapes of its letters, without a map to characters.
UNMAPPED = (
    "<</Type/Font/Subtype/Type0/BaseFont/ABCDEF+Calibri/Encoding/Identity-H/DescendantFonts["
    "<</Type/Font/Subtype/CIDFontType2/BaseFont/ABCDEF+Calibri"
    "/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>"
    "/FontDescriptor<</Type/FontDescriptor/FontName/ABCDEF+Calibri/Flags 4>>>>]>>"
)
PICTURE = (
    "<</Type/XObject/Subtype/Image/Width {}/Height {}/ColorSpace/DeviceGray/BitsPerComponent 8"
    "/Filter/FlateDecode/Length 0>>stream\n\nendstream"
)


def make_stream(content: bytes, entries: str = "") -> bytes:
    return f"<</Length {len(content)}{entries}>>stream\n".encode() + content + b"\nendstream"


class Pdf:
    """Builds a PDF page by page."""

    def __init__(self) -> None:
        self.objects: list[bytes] = [b"", b""]
        self.pages: list[int] = []
        self.root = "<</Type/Catalog/Pages 2 0 R{}>>"
        self.more_in_root = ""
        self.listed = 0  # pages that the file lists and does not have

    def add(self, content: str | bytes) -> int:
        """Add an object; return its number."""
        self.objects.append(content.encode() if isinstance(content, str) else content)
        return len(self.objects)

    def add_page(
        self, content: bytes = b"", entries: str = "", objects: str = "", more: str = ""
    ) -> None:
        """Add a page.

        Args:
            content: The page's content stream.
            entries: What the stream's dictionary has in addition to the length.
            objects: The page's pictures and forms.
            more: Further entries of the page's dictionary.
        """
        stream = self.add(make_stream(content, entries))
        fonts = f"/Font<</F {self.add(FONT)} 0 R/G {self.add(UNMAPPED)} 0 R>>"
        page = (
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents {stream} 0 R"
            f"/Resources<<{fonts}/XObject<<{objects}>>>>{more}>>"
        )
        self.pages.append(self.add(page))

    def add_text(self, text: str, more: str = "") -> None:
        """Add a page with a line of text."""
        self.add_page(b"BT /F 9 Tf (%s) Tj ET" % text.encode(), more=more)

    def make(self) -> bytes:
        """Return the file."""
        kids = " ".join(f"{number} 0 R" for number in self.pages)
        kids += " 999 0 R" * self.listed
        count = len(self.pages) + self.listed
        self.objects[0] = self.root.format(self.more_in_root).encode()
        self.objects[1] = f"<</Type/Pages/Count {count}/Kids[{kids}]>>".encode()
        out = b"%PDF-1.7\n"
        places = []
        for number, content in enumerate(self.objects, 1):
            places.append(len(out))
            out += b"%d 0 obj" % number + content + b"endobj\n"
        table = b"".join(b"%010d 00000 n \n" % place for place in places)
        size = len(self.objects) + 1
        return (
            out
            + b"xref\n0 %d\n0000000000 65535 f \n" % size
            + table
            + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (size, len(out))
        )


def line(text: str) -> bytes:
    return b"BT /F 9 Tf (%s) Tj ET" % text.encode()


def make_pdf_with_a_damaged_page(text: str) -> bytes:
    """Return a PDF of a page with a text and a second page that cannot be read."""
    pdf = Pdf()
    pdf.add_text(text)
    pdf.add_page(b"no zlib", "/Filter/FlateDecode")
    return pdf.make()
