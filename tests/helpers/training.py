"""Examples and settings for a training that takes seconds, and a reader of its losses."""

import csv
from pathlib import Path

from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext

TEXT = (
    "the code of the red house is seven; who lives in the blue house? the blue house is the code "
    "of who. " * 2
)
EXAMPLES = [
    TrainingContext(
        TEXT + tail, ("who lives in the red house?", "is the code seven?"), (" seven", None)
    )
    for tail in ("red", "blue", "seven", "house", "lives")
]
CONFIG = TrainConfig(
    restore_tokens=2,
    rank=2,
    alpha=4,
    lr=1e-2,
    warmup=2,
    steps=6,
    contexts=2,
    questions=2,
    ratio_min=0.1,
    ratio_max=0.4,
    max_new_tokens=6,
    checkpoint_every=2,
    keep=8,
)


def losses(folder: Path) -> list[float]:
    """Return the logged loss of every step."""
    with (folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
