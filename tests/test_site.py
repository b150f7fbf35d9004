"""The site of docs/: few pages, each in the menu, built without a warning, complete by itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT, prose

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MENU = re.findall(r"^  - [\w ]+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
# Code, addresses of links, names with digits in them, numbers of figures, papers and versions.
NO_FIGURE = re.compile(
    r"`[^`]*`|https?://\S+|"
    r"\]\([^)]*\)|arXiv \S+|(?:Table|Figure|Eq\.|vLLM|kvpress|Python|CC BY(?:-\w+)*|CC0|"
    r"torch|transformers|Apache-|Gemma|Qwen|Llama|Mistral|FSDP|Phi-|OLMo|EXAONE|Cohere|Ernie|GLM|"
    r"Starcoder|Ministral) ?[\d.]+[\w.-]*|^\s*\d+\. |\b[A-Za-z][\w-]*\d[\w-]*"
)
FIGURE = re.compile(r"(?<![\w.,])\.?\d[\d,]*(?:\.\d+)?")


def paragraphs(page: Path) -> list[str]:
    """The paragraphs and items of lists of a page, without tables and headings."""
    found: list[str] = [""]
    for line in prose(page):
        if not line.strip() or line.startswith(("|", "#", "<!--", ":::")):
            found.append("")
        elif re.match(r"\s*(?:- |\d+\. )", line):
            found.append(line)
        else:
            found[-1] += f"\n{line}"
    return [text for text in found if text.strip()]


def test_the_menu_has_every_page_once():
    assert sorted(MENU) == [page.name for page in PAGES]
    assert MENU[0] == "index.md" and len(MENU) <= 12


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_paragraph_has_more_than_three_figures(page):
    """More of them belong in a table."""
    for text in paragraphs(page):
        figures = FIGURE.findall(NO_FIGURE.sub("", text))
        assert len(figures) <= 3, (figures, text)


def test_figures_are_counted():
    text = "r = 0.1 took 2.8 s of 1,024 tokens in 5 runs (Table 1, `-n 3`, SmolLM2)."
    assert FIGURE.findall(NO_FIGURE.sub("", text)) == ["0.1", "2.8", "1,024", "5"]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "load_model" in (tmp_path / "api.html").read_text()
    for page in tmp_path.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text()):
            address = re.search(r'(?:src|href)="(?:https?:)?//', tag)
            assert not address or 'rel="canonical"' in tag, (page, tag)
