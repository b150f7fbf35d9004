"""Makes the texts that the benchmarks ship with from a folder of public data (docs/benchmarks.md names the sources).

    python recipes/benchmark_texts.py --data ../shared/data --out src/restorekv/tasks/texts

The folder holds fairytaleqa/val.jsonl, novels/*.txt, factbook/documents.jsonl, ruler-qa/{squad,hotpotqa}.json and the
license files. Equal data make equal files: gzip without a time stamp or name, lines in the order of the source.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
from itertools import pairwise
from pathlib import Path

from restorekv.files import replacing
from restorekv.tasks.splits import EVALUATION, EVALUATION_NOVEL, factbook_splits

BANDS = (512, 1024, 1536, 2048, 4097)  # tokens of SmolLM2; from every band as many Factbook documents
DOCUMENTS = 60
COPIED = {  # from the data to the package
    "fairytaleqa/val.jsonl": "fairytaleqa/val.jsonl.gz",
    "fairytaleqa/LICENSE": "fairytaleqa/LICENSE",
    f"novels/{EVALUATION_NOVEL}.txt": f"novels/{EVALUATION_NOVEL}.txt.gz",
    "factbook/LICENSE.md": "factbook/LICENSE.md",
    "ruler-qa/squad.json": "share-alike/squad.json.gz",
    "ruler-qa/hotpotqa.json": "share-alike/hotpotqa.json.gz",
    "ruler-qa/LICENSE-CC-BY-SA-4.0.txt": "share-alike/LICENSE",
}


def factbook(path: Path) -> bytes:
    """Returns DOCUMENTS evaluation documents, evenly spaced within every band of lengths."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    splits = factbook_splits(row["id"] for row in rows)
    held_out = [row for row in rows if splits[row["id"]] == EVALUATION]
    share, chosen = DOCUMENTS // (len(BANDS) - 1), set()
    for low, high in pairwise(BANDS):
        band = [row["id"] for row in held_out if low <= row["tokens_smollm2"] < high]
        chosen |= {band[index * len(band) // share] for index in range(share)}
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in held_out if row["id"] in chosen]
    return "".join(lines).encode()


def packed(content: bytes) -> bytes:
    """Returns a gzip file that tells neither time nor name."""
    target = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=9, mtime=0) as file:
        file.write(content)
    return target.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    files = {target: (given.data / source).read_bytes() for source, target in COPIED.items()}
    files["factbook/evaluation.jsonl.gz"] = factbook(given.data / "factbook/documents.jsonl")
    for target, content in files.items():
        path = given.out / target
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(packed(content) if path.suffix == ".gz" else content)


if __name__ == "__main__":
    main()
