"""Train the restore adapters of the tiny model.

    python -m recipes.tiny.adapters runs/tiny --evictor kvzip          (resumes)

The settings are those of paper.recipe.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paper.recipe import CONTEXTS, LONGEST, SHIPPED, SHORTEST
from recipes.run import make_parser, run_recipe
from restorekv.model.load import load_model
from restorekv.train.config import TrainConfig
from restorekv.train.examples import make_tiny_examples
from restorekv.train.loop import train_adapter


def main() -> None:
    """Train one adapter and leave it in FOLDER/restore-EVICTOR/adapter."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--evictor", default="kvzip")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(str(options.folder / "model"))
    config = TrainConfig(**{**vars(SHIPPED), "evictor": options.evictor})
    examples = make_tiny_examples(tokenizer, CONTEXTS, config.seed, SHORTEST, LONGEST)

    def show(step: int, steps: int, loss: str) -> None:
        if step % 10 == 0:
            print(f"{options.evictor}: step {step} of {steps}, {loss}", flush=True)

    train_adapter(
        model,
        tokenizer,
        examples,
        config,
        options.folder / f"restore-{options.evictor}",
        resume=True,
        progress=show,
    )


if __name__ == "__main__":
    run_recipe(main)
