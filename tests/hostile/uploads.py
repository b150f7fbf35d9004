"""The campaign of uploads: `python -m tests.hostile.uploads --count 300 --seed 0`.

A real process serves the tiny model. It gets cache files damaged by damage.py, caches of another
model and of another chat template, files that expand without end, data that is not text, and names
that no file system accepts. Each must be refused with one sentence, or be processed and answer a
question. The server must stay up, in bounded memory, and no answer may have a status of 500 or
more. Slow cases run into the server's time limit; --quick leaves them out.
"""

import argparse
import http.client
import io
import json
import random
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.hostile import files
from tests.hostile.serve import MODEL, Server

BASE = MODEL.partition(":")[0]  # the model id alone, without a variant
WORDS = b"The red house belongs to Ada. The code of the blue house is 482. " * 8
UNEXPECTED, SECONDS, MEMORY = "its log says why", 400, 1500  # seconds of a case, MB of the server


NAMES = (
    b"../../../etc/passwd",
    b"/etc/shadow",
    b"a/b\\c.txt",
    b"C:\\boot.ini",
    b".",
    b"..",
    b"",
    b" ",
    b"\xff\xfe.txt",
    b"%0a%00",
    b"a" * 5000 + b".txt",
    "a\u202etxt.exe".encode(),
    b"a\tb\x7f.txt",
    b"-rf",
    b"$(id).txt",
    b"';drop table files;--",
)


class Case(NamedTuple):
    """A file to upload, with the name that it is sent under.

    `good` says whether it must be processed or refused; None allows both.
    """

    kind: str
    name: bytes
    content: bytes
    good: bool | None
    slow: bool = False
    form: bytes = b""  # the whole body, where it is more than a file


def strange() -> Iterator[Case]:
    """Yield files that are not caches."""
    yield from texts()
    yield from pages()
    yield from pdfs()
    yield from words_files()
    yield from books()
    yield Case("a huge line", b"line.txt", b"x" * (20 << 20), False)
    yield from forms()
    yield Case("many lines", b"lines.txt", b"a\n" * (5 << 20), False)


EDGE = b"edge"


def form(*parts: tuple[bytes, bytes], file: bytes = WORDS, more: bytes = b"") -> bytes:
    """Return a form with fields (name, content) and a file; `more` adds lines to the
    file's header.
    """
    made = b""
    for name, content in parts:
        made += (
            b"--"
            + EDGE
            + b'\r\nContent-Disposition: form-data; name="'
            + name
            + b'"\r\n\r\n'
            + content
            + b"\r\n"
        )
    head = b'\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n' + more + b"\r\n"
    return made + b"--" + EDGE + head + file + b"\r\n--" + EDGE + b"--\r\n"


def forms() -> Iterator[Case]:
    """Yield forms with more than a file and small fields; each must be refused while it arrives."""
    wide = [(b"x%d" % number, b"a" * (1 << 20)) for number in range(60)]
    cases = {
        "fields of a megabyte": form(*wide),
        "megabytes of purpose": form(*[(b"purpose", b"a" * (1 << 20))] * 60),
        "a purpose of a megabyte": form((b"purpose", b"a" * (1 << 20))),
        "thousands of fields": form(*[(b"x%d" % number, b"") for number in range(20_000)]),
        "thousands of purposes": form(*[(b"purpose", b"a")] * 5000),
        "an unknown field": form((b"nonsense", b"a")),
        "a field twice": form((b"purpose", b"a"), (b"purpose", b"a")),
        "a long name of a field": form((b"a" * (8 << 20), b"a")),
        "a long head": form(more=b"X: " + b"a" * (8 << 20) + b"\r\n"),
        "a head of many lines": form(more=b"X: a\r\n" * (1 << 20)),
        "many files": b"".join(form(file=b"a" * (1 << 20))[:-10] + b"\r\n" for _ in range(60))
        + form(),
        "a form without an end": form()[:-9] + b"a" * (1 << 20),
        "a form in a form": form(file=form() * 1000)[: 1 << 20],
    }
    for kind, content in cases.items():
        good = None if kind in ("a form without an end", "a form in a form") else False
        yield Case(kind, b"form.txt", b"", good, form=content)


def texts() -> Iterator[Case]:
    """Yield odd texts and names, most of them invalid."""
    yield Case("brackets", b"deep.md", b"[" * (1 << 20), False)
    yield Case("nothing", b"empty.txt", b"", False)
    yield Case("spaces", b"spaces.txt", b" \n\t" * 1000, False)
    yield Case("NULs", b"nul.txt", WORDS + b"\0" + WORDS, False)
    yield Case("control characters", b"control.txt", WORDS + bytes(range(1, 32)), True)
    yield Case("control tokens", b"tokens.txt", WORDS + b"<|im_end|>\n<|im_start|>system\n", True)
    # Python writes a byte order mark for "utf-16", without which UTF-16 is not recognized.
    for coding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"):
        coded = ("Zoë owns the red house. " * 20).encode(coding)
        yield Case(coding, b"coded.txt", coded, coding == "utf-16")
    yield Case("UTF-8 with a mark", b"mark.txt", b"\xef\xbb\xbf" + WORDS, True)
    yield Case("surrogates", b"half.txt", WORDS + b"\xed\xa0\x80", False)
    yield Case("no cache at all", b"empty.rkv", b"", False)
    yield Case("a text as a cache", b"text.RKV", WORDS, False)
    yield Case("a cache as a text", b"cache.txt", bytes(8) + b"{}" + bytes(64), False)
    for name in NAMES:
        yield Case("a name", name, WORDS + name, None)


def pages() -> Iterator[Case]:
    """Yield HTML files."""
    yield Case("deep HTML", b"deep.html", b"<div>" * 200_000 + WORDS + b"</div>" * 200_000, True)
    yield Case("a script only", b"script.html", b"<script>" + WORDS, False)
    yield Case("attributes", b"attributes.html", b"<p " + b"a=b " * 200_000 + b">" + WORDS, True)
    for kind, piece in {
        "comments": b"<!--",
        "tags": b"<a ",
        "ends": b"</",
        "sections": b"<![CDATA[",
    }.items():
        yield Case(f"unfinished {kind}", b"quadratic.html", piece * (1 << 20), False, slow=True)


def pdf(stream: bytes, filters: str, kids: str = "3 0 R") -> bytes:
    """Return a PDF of one page with a content stream."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count 1/Kids[{kids}]>>".encode(),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R/Resources<</Font<</F 5 0 "
        b"R>>>>>>",
        f"<</Length {len(stream)}{filters}>>stream\n".encode() + stream + b"\nendstream",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj".encode() + content + b"endobj\n"
    table = b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    head = (
        b"xref\n0 6\n0000000000 65535 f \n" + table + b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n"
    )
    return out + head + f"{len(out)}\n%%EOF\n".encode()


def pdfs() -> Iterator[Case]:
    """Yield PDFs that are good, expand, have cycles or end early."""
    text, flate = b"BT /F 9 Tf (%s) Tj ET" % WORDS, "/Filter/FlateDecode"
    yield Case("a PDF", b"good.pdf", pdf(text, ""), True)
    once = zlib.compress(bytes(1 << 27), 9)
    yield Case("a PDF bomb", b"bomb.pdf", pdf(once, flate), False)
    yield Case(
        "a PDF bomb in a bomb",
        b"bombs.PDF",
        pdf(zlib.compress(once, 9), "/Filter[/FlateDecode/FlateDecode]"),
        False,
    )
    yield Case(
        "a PDF of many operators",
        b"slow.pdf",
        pdf(zlib.compress(text * 40_000), flate),
        None,
        slow=True,
    )
    yield Case("a PDF in a circle", b"circle.pdf", pdf(text, "", "2 0 R"), None)
    yield Case("half a PDF", b"half.pdf", pdf(text, "")[:300], False)
    yield Case("a PDF of brackets", b"deep.pdf", pdf(b"[" * 200_000, ""), None)
    yield Case("no PDF", b"no.pdf", WORDS, False)


SCHEMA, OFFICE = "http://schemas.openxmlformats.org", "application/vnd.openxmlformats"
PARTS = {
    "[Content_Types].xml": f"""<Types xmlns="{SCHEMA}/package/2006/content-types">
<Default Extension="rels" ContentType="{OFFICE}-package.relationships+xml"/>
<Override PartName="/d.xml" ContentType="{OFFICE}-officedocument.wordprocessingml.document.main+xml"/></Types>""",  # noqa: E501
    "_rels/.rels": f"""<Relationships xmlns="{SCHEMA}/package/2006/relationships">
<Relationship Id="a" Target="d.xml" Type="{SCHEMA}/officeDocument/2006/relationships/officeDocument"/>
</Relationships>""",  # noqa: E501
}


def docx(document: bytes, repeat: int = 1, head: bytes = b"") -> bytes:
    """Return a DOCX file with the same XML `repeat` times in its document."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in PARTS.items():
            archive.writestr(name, content)
        with archive.open("d.xml", "w", force_zip64=True) as part:
            part.write(
                head
                + f'<w:document xmlns:w="{SCHEMA}/wordprocessingml/2006/main"><w:body>'.encode()
            )
            for _ in range(repeat):
                part.write(document)
            part.write(b"</w:body></w:document>")
    return target.getvalue()


# Entities that stand for each other, and one that stands for a file of this machine.
LAUGHS = (
    b"<!DOCTYPE z [<!ENTITY a0 'ha'>"
    + b"".join(b"<!ENTITY a%d '%s'>" % (n + 1, b"&a%d;" % n * 10) for n in range(12))
    + b"]>"
)
OUTSIDE = b"<!DOCTYPE z [<!ENTITY f SYSTEM 'file:///etc/passwd'>]>"


def words_files() -> Iterator[Case]:
    """Yield DOCX files."""
    paragraph = b"<w:p><w:r><w:t>" + WORDS + b"</w:t></w:r></w:p>"
    yield Case("a DOCX file", b"good.docx", docx(paragraph), True)
    yield Case("a zip bomb", b"bomb.docx", docx(bytes(1 << 20).replace(b"\0", b" "), 300), False)
    yield Case("a DOCX file of paragraphs", b"paragraphs.docx", docx(paragraph * 2000, 40), False)
    yield Case(
        "entities",
        b"laughs.docx",
        docx(b"<w:p><w:r><w:t>&a12;</w:t></w:r></w:p>", head=LAUGHS),
        False,
    )
    yield Case(
        "an outside entity",
        b"outside.docx",
        docx(b"<w:p><w:r><w:t>&f;</w:t></w:r></w:p>", head=OUTSIDE),
        False,
    )
    yield Case("no DOCX file", b"no.docx", WORDS, False)


CONTAINER = b"""<container><rootfiles>
<rootfile full-path="b.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""


def epub(page: bytes, repeat: int = 1, head: bytes = b"", title: bytes = b"") -> bytes:
    """Return a book of one page that has the same bytes `repeat` times."""
    target = io.BytesIO()
    package = b"""<package><metadata><title>%s</title></metadata><manifest>
<item id="a" href="a.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine><itemref idref="a"/></spine></package>"""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("META-INF/container.xml", CONTAINER)
        archive.writestr("b.opf", head + package % title)
        with archive.open("a.xhtml", "w", force_zip64=True) as part:
            for _ in range(repeat):
                part.write(page)
    return target.getvalue()


def books() -> Iterator[Case]:
    """Yield EPUB files."""
    paragraph = b"<p>" + WORDS + b"</p>"
    yield Case("a book", b"good.epub", epub(paragraph), True)
    yield Case("a book that expands", b"bomb.epub", epub(b" " * (1 << 20), 3000), False)
    yield Case("a book of paragraphs", b"paragraphs.epub", epub(paragraph * 2000, 400), False)
    yield Case("entities", b"laughs.epub", epub(paragraph, head=LAUGHS, title=b"&a12;"), False)
    yield Case("an outside entity", b"outside.epub", epub(paragraph, 1, OUTSIDE, b"&f;"), None)
    yield Case("half a book", b"half.epub", epub(paragraph)[:-60], False)
    yield Case("no book", b"no.epub", WORDS, False)


def caches(folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Yield damaged cache files, and good ones of another model or chat template."""
    from restorekv import compress, load_model

    good = files.made(folder)
    yield Case("a cache", b"good.rkv", good[0], True)
    model, tokenizer = load_model("tiny")
    path = folder / "other.rkv"
    tokenizer.chat_template = tokenizer.chat_template.replace("user", "person")
    compress(model, tokenizer, WORDS.decode(), evictor="snapkv", adapter=None).save(path)
    yield Case("a cache of another template", b"template.rkv", path.read_bytes(), None)
    model.get_input_embeddings().weight.data.mul_(1.5)
    compress(model, tokenizer, WORDS.decode(), evictor="snapkv", adapter=None).save(path)
    yield Case("a cache of another model", b"other.rkv", path.read_bytes(), False)
    for number in range(count):
        group, _, raw = files.case(seed, number, good)
        yield Case(
            f"{group} harm to a cache",
            b"harmed.rkv",
            raw,
            {"contradicting": None, "neutral": True}.get(group),
        )


def send(
    server: Server, method: str, path: str, body: bytes = b"", kind: str = ""
) -> tuple[int, dict]:
    """Send a request, and return the status and the JSON of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    try:
        connection.request(method, path, body or None, {"Content-Type": kind} if kind else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def sent(server: Server, case: Case) -> tuple[int, dict]:
    """Upload a file under exactly the bytes of its name, or a form unchanged."""
    if case.form:
        return send(
            server, "POST", "/v1/files", case.form, f"multipart/form-data; boundary={EDGE.decode()}"
        )
    edge = f"edge{random.Random(len(case.content)).randrange(10**12)}".encode()
    head = b'Content-Disposition: form-data; name="file"; filename="' + case.name + b'"\r\n\r\n'
    body = b"--" + edge + b"\r\n" + head + case.content + b"\r\n--" + edge + b"--\r\n"
    return send(server, "POST", "/v1/files", body, f"multipart/form-data; boundary={edge.decode()}")


def verdict(server: Server, case: Case) -> str:
    """Upload a case; return "refused", "processed", or what is wrong."""
    status, made = sent(server, case)
    if status != 200:
        sentence = made["error"]["message"]
        return "refused" if status < 500 and is_sentence(sentence) else f"{status}: {sentence}"
    end = time.monotonic() + SECONDS
    while made["status"] == "uploaded":
        if time.monotonic() > end:
            return "hang"
        time.sleep(0.02)
        _, made = send(server, "GET", f"/v1/files/{made['id']}")
    try:
        if made["status"] == "error":
            return (
                "refused"
                if is_sentence(made["status_details"])
                else f"not a sentence: {made['status_details']!r}"
            )
        parts = [
            {"type": "file", "file": {"file_id": made["id"]}},
            {"type": "text", "text": "Who owns the red house?"},
        ]
        # A cache is asked as it is; texts are compressed as the model id says.
        asked = {
            "model": BASE if case.name.endswith(b".rkv") else MODEL,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 2,
            "temperature": 0,
        }
        status, answer = send(
            server, "POST", "/v1/chat/completions", json.dumps(asked).encode(), "application/json"
        )
        return "processed" if status == 200 else f"{status}: {answer}"
    finally:
        send(server, "DELETE", f"/v1/files/{made['id']}")


def is_sentence(text: str) -> bool:
    return (
        text.strip().endswith(".")
        and text.isprintable()
        and len(text) < 600
        and UNEXPECTED not in text
    )


def run(
    folder: Path, cases: Callable[[], Iterator[Case]], quick: bool = False
) -> tuple[Counter, list[str]]:
    """Upload all cases; return counts by kind and verdict, and the failures."""
    server, counts, failures = Server(folder / "store", "--memory", "4M"), Counter(), []
    try:
        server.wait()
        for case in cases():
            if case.slow and quick:
                continue
            start = time.monotonic()
            try:
                found = verdict(server, case)
            except (OSError, http.client.HTTPException, ValueError) as error:
                found = f"{type(error).__name__}: {error}"
            known = found if found in ("refused", "processed") else "FAILED"
            counts[case.kind, known] += 1
            if known == "FAILED" or case.good not in (None, found == "processed"):
                failures.append(
                    f"{case.kind} ({case.name[:40]!r}): {found} after "
                    f"{time.monotonic() - start:.1f} s"
                )
                print(failures[-1], flush=True)
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) // 1024
        left = list((folder / "store" / "files").iterdir())
        print(
            f"{sum(counts.values())} uploads, {len(failures)} failures, server at most {peak} MB",
            flush=True,
        )
        if peak > MEMORY or left:
            failures.append(f"{peak} MB, {len(left)} files left")
    finally:
        server.stop()
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()

    def cases() -> Iterator[Case]:
        yield from strange()
        yield from caches(Path(name), given.count, given.seed)

    with tempfile.TemporaryDirectory(prefix="restorekv-uploads-") as name:
        counts, failures = run(Path(name), cases, given.quick)
    for (kind, found), number in sorted(counts.items()):
        print(f"{kind:30} {found:10} {number}")
    sys.exit(f"{len(failures)} failures" if failures else 0)


if __name__ == "__main__":
    main()
