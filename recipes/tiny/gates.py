"""Train the gates of the tiny model: the learned scorers of fastkvzip and kvzap.

    python -m recipes.tiny.gates runs/tiny          (resumes)

The documents are from the split that restore adapters are trained on, and have the lengths of those
of the suite.
"""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.run import make_parser, run_recipe
from restorekv.model.gate_kinds import KINDS, TARGETS
from restorekv.model.load import load_model
from restorekv.tiny.world import LONGEST, SHORTEST
from restorekv.train.examples import make_tiny_examples
from restorekv.train.gate import train_gate
from restorekv.train.gate_config import GateConfig

CONTEXTS = 200


def main() -> None:
    """Write one file per kind to FOLDER/gates."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    model, tokenizer = load_model(str(folder / "model"))
    texts = [
        example.context for example in make_tiny_examples(tokenizer, CONTEXTS, 0, SHORTEST, LONGEST)
    ]

    def show(done: int, total: int, what: str) -> None:
        if done % max(total // 20, 1) == 0:
            print(f"{done} of {total}, {what}", flush=True)

    gates = folder / "gates"
    gates.mkdir(exist_ok=True)
    for kind in KINDS:
        out = gates / f"{kind}.safetensors"
        if not out.exists():
            config = GateConfig(kind)
            gate = train_gate(
                model,
                tokenizer,
                texts,
                config,
                out,
                gates / TARGETS[kind],
                resume=True,
                progress=show,
            )
            print(f"{kind}: {gate.card.figures}", flush=True)


if __name__ == "__main__":
    run_recipe(main)
