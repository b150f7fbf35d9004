"""Adapters and their model cards."""

import re

from restorekv.restore import model_card
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.models import build_model


def adapter_of(name="Qwen/Qwen3-tiny", targets=("q_proj", "v_proj"), **record):
    model = build_model("qwen3")
    model.config._name_or_path = name
    adapter = RestoreAdapter.create(model, 4, rank=2, targets=targets)
    if record:
        adapter.record_training(
            **{"evictor": "kvzip", "prefix_policy": "free", "ratio_range": (0.025, 0.25), **record}
        )
    return adapter


def card_of(adapter):
    return model_card.render_card(adapter.card, adapter.lora_config)


def rows(text, title):
    """Return the table under a heading as {first cell: other cells}."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [
        re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")
    ]
    return {line[0].strip(): [each.strip() for each in line[1:]] for line in lines[2:]}
