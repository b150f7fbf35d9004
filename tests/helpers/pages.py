"""What the pages of the documentation contain: code blocks, commands, tables and links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
RECORDED = [ROOT / "paper" / "log.md", *sorted((ROOT / "paper" / "results").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command on a page, and the output below it; `runs` says whether it follows a `$`."""

    line: str
    runs: bool = False
    output: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Return the language and text of a page's code blocks in these languages."""
    return [
        block for block in FENCE.findall(page.read_text(encoding="utf-8")) if block[0] in languages
    ]


def commands(page: Path) -> list[Command]:
    """Return the shell commands of a page in order; commands joined by && are separate ones."""
    found = []
    for language, text in blocks(page, "", "console"):
        if language:
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                found.append(Command(line, True, output))
        else:
            found += [
                Command(part)
                for line in text.splitlines()
                for part in line.split(" && ")
                if part.strip()
            ]
    return [command for command in found if command.words]


def prose(page: Path) -> list[str]:
    """Return the lines outside code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
