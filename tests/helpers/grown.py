"""Documents that have grown in every possible way: appended, composed and folded."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from restorekv import compose, compress
from restorekv.context import CompressedContext

TEXT = "The code of the {} house is seven; nobody lives there. "
# Files of `make_grown_documents`: two texts, and what became of them.
GROWN = ("red", "blue", "appended", "appended keeping all", "folded", "composed", "grown composed")


def make_grown_documents(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> dict[str, CompressedContext]:
    """Compress two texts, grow and compose them, and save all of it in a folder."""
    options = {"ratio": 0.3, **options}
    adapter = options.get("adapter")
    red, blue = (
        compress(model, tokenizer, TEXT.format(name) * count, **options)
        for name, count in (("red", 12), ("blue", 7))
    )
    chat = red.chat()
    chat.ask("Who lives there?", max_new_tokens=6)
    chat.ask("Which code?", max_new_tokens=6)
    chat.fold(adapter=adapter)
    more = "The well is deep, and the garden is large. " * 5
    appended = red.append(more, adapter=adapter)
    made = {
        "red": red,
        "blue": blue,
        "appended": appended,
        "appended keeping all": red.append(more, restore="every", adapter=adapter),
        "folded": chat.document,
        "composed": compose([red, blue]),
        "grown composed": compose([red, blue]).append(more, adapter=adapter),
    }
    assert set(made) == set(GROWN)
    for name, document in made.items():
        document.save(folder / f"{name}.rkv")
    return made
