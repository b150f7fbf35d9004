"""Hooks for mkdocs that put onto the site what pages of docs/ link to outside of docs/: results,
sources, notebooks.

mkdocs calls the functions `on_...` (mkdocs.yml, `hooks`). A link such as
`../paper/results/table1.md` works on GitHub, but a site of docs/ alone has no such file. So each
linked file of the repository becomes a file of the site under `repository/`: Markdown as a page and
code as a page with numbered lines. mkdocs then checks these links like any other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
# Files that are shown as a page with numbered lines; all others except Markdown are copied.
CODE = {".py": "python", ".ipynb": "python", ".jinja": "jinja", "Makefile": "makefile"}
PAGES = (".md", ".ipynb")  # files that are searched for links
LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, directly or through other linked files."""
    docs = Path(config.docs_dir).relative_to(ROOT).as_posix()
    waiting = [f"{docs}/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.endswith(PAGES):
            continue
        for target in find_links(path):
            place, _, _ = target.partition("#")
            if place in seen or place.startswith(f"{docs}/") or not (ROOT / place).is_file():
                continue
            seen.add(place)
            waiting.append(place)
            files.append(make_file(place, config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links of a page to where the site has the files."""
    source = find_source(page.file.src_uri)
    if not source.endswith(PAGES):
        return markdown
    return rewrite_links(markdown, source, page.file.src_uri)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Register the anchors of numbered lines, which mkdocs does not see in code."""
    anchors = set(re.findall(r'id="(__codelineno-[\d-]+)"', html))
    page.present_anchor_ids = (page.present_anchor_ids or set()) | anchors
    return html


def find_links(path: str) -> list[str]:
    """Return what a page of the repository links to, as paths from its root."""
    place = ROOT / path
    is_notebook = place.suffix == ".ipynb"
    text = show_notebook(place) if is_notebook else place.read_text(encoding="utf-8")
    text = FENCE.sub("", text)
    return [
        resolve_link(path, target)
        for _, target in LINK.findall(text)
        if "://" not in target and not target.startswith("#")
    ]


def resolve_link(path: str, target: str) -> str:
    """Return a link of a file as a path from the repository's root, with its anchor."""
    place, mark, anchor = target.partition("#")
    return normpath(join(dirname(path), place)) + mark + anchor


def find_source(uri: str) -> str:
    """Return the repository's file that a file of the site was made from."""
    if uri.startswith(f"{FOLDER}/"):
        source = uri.removeprefix(f"{FOLDER}/")
        return source if (ROOT / source).is_file() else source.removesuffix(".md")
    return f"docs/{uri}"


def find_uri(source: str) -> str:
    """Return the site's path for a file of the repository."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    is_code = Path(source).suffix in CODE or Path(source).name in CODE
    return f"{FOLDER}/{source}{'.md' if is_code else ''}"


def rewrite_links(markdown: str, source: str, uri: str) -> str:
    """Return a page with its links rewritten to links between files of the site."""

    def rewrite(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        place, mark, anchor = resolve_link(source, target).partition("#")
        if not (ROOT / place).is_file():
            # A link to a folder becomes text, because the site has no listing of it.
            return f"{text.strip('[]')} (`{place}`)" if (ROOT / place).is_dir() else match[0]
        line = re.fullmatch(r"L(\d+)", anchor)
        if line:
            anchor = f"__codelineno-0-{line[1]}"
        return f"{text}({relpath(find_uri(place), dirname(uri) or '.')}{mark}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    # Code blocks, which are the odd parts, stay unchanged.
    return "".join(
        part if index % 2 else LINK.sub(rewrite, part) for index, part in enumerate(parts)
    )


def make_file(source: str, config: MkDocsConfig) -> File:
    """Return the site's file for a file of the repository."""
    path = ROOT / source
    uri = find_uri(source)
    language = CODE.get(path.suffix) or CODE.get(path.name)
    if path.suffix == ".ipynb":
        text = show_notebook(path)
    elif language:
        text = show_code(path, source, language)
    elif path.suffix == ".md":
        text = NO_SEARCH + path.read_text(encoding="utf-8")
    else:
        return File.generated(config, uri, abs_src_path=str(path))
    return File.generated(config, uri, content=text)


def show_code(path: Path, source: str, language: str) -> str:
    """Return a page with a file's lines, each with an anchor."""
    code = path.read_text(encoding="utf-8")
    fence = "`" * 8  # longer than any in a docstring
    return f'{NO_SEARCH}# {source}\n\n{fence} {{ .{language} linenums="1" }}\n{code}\n{fence}\n'


def show_notebook(path: Path) -> str:
    """Return a page with a notebook's cells and what they printed."""
    parts = [NO_SEARCH]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            printed = "".join(output.get("text", ()))
            if printed:
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
