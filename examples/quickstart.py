"""Compress a text once, ask it several questions, save the cache and ask again.

python examples/quickstart.py         # SmolLM2 and an article; about a minute on a CPU
python examples/quickstart.py tiny    # the tiny model that ships, on its own kind of text; seconds
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

# Make PyTorch's threads sleep while they wait for each other, so that other programs can run. The
# variable is read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from restorekv import CompressedContext, compress, load_model

HERE = Path(__file__).parent
TEXTS = {
    "smollm2": (
        "lighthouse.txt",
        ["Who built the first lighthouse?", "What was the name of the keeper on duty?"],
    ),
    "tiny": ("register.txt", ["What is the code of the market?", "What is the trade of Agnes?"]),
}


def main(name: str = "smollm2") -> None:
    if name not in TEXTS:
        raise SystemExit(__doc__)
    file, questions = TEXTS[name]
    model, tokenizer = load_model(name)
    text = (HERE / file).read_text(encoding="utf-8")

    small = compress(model, tokenizer, text, ratio=0.2)
    print(small)
    for question, answer in zip(questions, small.ask(questions, max_new_tokens=64), strict=True):
        print(f"{question}\n  {answer.strip()}")

    with TemporaryDirectory() as folder:
        path = Path(folder) / "small.rkv"
        small.save(path)
        again = CompressedContext.load(path, model, tokenizer)
        print(
            f"From a file of {path.stat().st_size / 1e6:.1f} MB: "
            f"{again.ask(questions[0], max_new_tokens=64).strip()}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
