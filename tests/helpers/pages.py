"""What the documents print: their code blocks, commands, tables and links."""

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
    """A command that a page prints, and the output below it; `runs` if it stands behind a `$`."""

    line: str
    runs: bool = False
    output: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Language and text of the code blocks of a page."""
    return [
        block for block in FENCE.findall(page.read_text(encoding="utf-8")) if block[0] in languages
    ]


def commands(page: Path) -> list[Command]:
    """The shell commands of a page in their order; those joined by && are several."""
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
    """The lines outside code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
