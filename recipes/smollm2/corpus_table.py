"""Name every source of the corpus of many genres, with its license, in paper/results/corpus.md.

    python -m recipes.smollm2.corpus_table ../shared/data/corpus

A row for each source says how many of its passages may be trained on, under which license, and
which repository the corpus' README names. The page also gets a digest of the corpus' files. A data
build records the hashes of the same files (build.json, manifest.json), so a test can check that the
table describes the corpus that a shard was built from.
"""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.pages import fill_page
from recipes.run import make_parser, run_recipe
from restorekv.data.corpus import TRAIN_SPLIT, identify_license
from restorekv.data.documents import DropRow
from restorekv.data.files import identify_source

PAGE = Path(__file__).parents[2] / "paper" / "results" / "corpus.md"
BEGIN = "<!-- made by recipes/smollm2/corpus_table.py -->"
END = "<!-- end of the sources -->"
WIDEST_REPOSITORY = 40  # characters; longer names are cut after the owner
NOT_USED = "not used"


def hash_corpus(files: Sequence[Mapping]) -> str:
    """Return 16 hex digits of the files' names and hashes.

    Args:
        files: The files as {name, sha256}, as a data build records them.
    """
    lines = sorted(f"{file['name']} {file['sha256']}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_repositories(readme: str) -> dict[str, str]:
    """Return the repository that the corpus' README names for each source."""
    repositories = {}
    for line in readme.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) > 7:
            # What follows in brackets are folders or single books.
            repositories[cells[1]] = cells[2].partition(" (")[0]
    return repositories


def shorten_repository(name: str) -> str:
    """Return a repository's name, or only its owner and an ellipsis if the name is too long."""
    if len(name) <= WIDEST_REPOSITORY:
        return name
    return f"{name.partition('/')[0]}/…"


def name_license(row: Mapping) -> str:
    """Return the identifier of a row's license, or that the data build leaves the row out."""
    try:
        return identify_license(dict(row))
    except DropRow:
        return f"{row['license']}, {NOT_USED}"


def make_table(corpus: Path) -> str:
    """Return a sentence with the totals and the digest, followed by the table of all sources."""
    repositories = read_repositories((corpus / "README.md").read_text(encoding="utf-8"))
    passages: Counter[tuple[str, str, str]] = Counter()
    for path in sorted(corpus.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                source = (row["genre"], row["source"], name_license(row))
                passages[source] += row["split"] == TRAIN_SPLIT
    table = ["| genre | source | from | license | passages |", "|---|---|---|---|---:|"]
    for (genre, source, license_name), count in passages.items():
        repository = shorten_repository(repositories[source])
        genre_words = genre.replace("_", " ")
        table.append(f"| {genre_words} | {source} | {repository} | {license_name} | {count} |")
    used = sum(count for source, count in passages.items() if NOT_USED not in source[2])
    genres = len({genre for genre, _, _ in passages})
    digest = hash_corpus(identify_source(str(corpus))["files"])
    totals = (
        f"{len(passages)} sources of {genres} genres; {used:,} passages may be trained on. "
        f"Digest of the corpus: `{digest}`."
    )
    return "\n".join([totals, "", *table])


def main(args: Sequence[str] | None = None) -> None:
    """Fill the page's table."""
    parser = make_parser(__doc__)
    parser.add_argument("corpus", type=Path, help="The folder of the corpus.")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(args)
    fill_page(given.page, BEGIN, END, make_table(given.corpus))


if __name__ == "__main__":
    run_recipe(main)
