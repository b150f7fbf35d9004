"""What several tables share: the rows of KVzip and of RestoreKV, and their figures in the paper."""

from __future__ import annotations

from paper.experiment import Place, Points, Row, make_base_row, make_ruler_place
from paper.setting import Setting

# KVzip and RestoreKV on RULER-4K, Qwen3-4B, at THREE.
BASE = (91.4, 80.1, 38.2)
FULL = (93.5, 88.8, 73.2)


def make_base(setting: Setting, paper: Points) -> Row:
    """Return the row of the ablations' evictor without restoring."""
    return make_base_row(setting.settings.evictor, paper)


def make_restored(
    setting: Setting, paper: Points, label: str = "RestoreKV", paper_std: Points | None = None
) -> Row:
    """Return the row of the method with the unchanged settings of the ablations."""
    return Row(
        f"{label} (n = {setting.settings.restore_tokens})",
        setting.settings.evictor,
        {},
        paper=paper,
        paper_std=paper_std or {},
    )


def add_columns(setting: Setting, where: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return the paper's places, followed by those of the setting's `more_ratios`."""
    return (*where, *(make_ruler_place(ratio) for ratio in setting.more_ratios))
