"""A reader of results that accepts what kvpress's leaderboard accepts (src/data.py of the space
nvidia/kvpress-leaderboard).

A folder counts if it is directly below the given one, has metrics.json and config.yaml, config.yaml
has all required fields and no unknown ones, and the whole data set was asked. For a folder on which
the leaderboard would fail, it raises.
"""

import csv
import json
from pathlib import Path

import yaml

REQUIRED = {"dataset", "data_dir", "model", "device", "press_name", "compression_ratio"}
OPTIONAL = {
    "key_channel_compression_ratio",
    "fraction",
    "max_new_tokens",
    "max_context_length",
    "query_aware",
    "compress_questions",
    "output_dir",
    "log_level",
    "press_init_command",
    "model_kwargs",
    "seed",
    "threshold",
    "needle_depth",
    "compression_interval",
    "target_size",
    "hidden_states_buffer_size",
    "fp8",
    "restore_checkpoint",
}


def read(folder: Path) -> dict[str, dict]:
    """Return what the leaderboard's table shows, by folder."""
    shown = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not (path / "metrics.json").exists() or not (path / "config.yaml").exists():
            continue
        config = yaml.safe_load((path / "config.yaml").read_text())
        if (
            not REQUIRED <= config.keys() <= REQUIRED | OPTIONAL
            or config.get("fraction", 1.0) != 1.0
        ):
            continue
        with (path / "predictions.csv").open(newline="", encoding="utf-8") as file:
            ratios = [float(row["compression_ratio"]) for row in csv.DictReader(file)]
        metrics = json.loads((path / "metrics.json").read_text())
        if not all("string_match" in each for each in metrics.values()):
            continue
        shown[path.name] = {
            "dataset": config["dataset"],
            "data_dir": config["data_dir"],
            "model": config["model"],
            "method": config["press_name"],
            "compression_ratio": round(sum(ratios) / len(ratios), 2)
            or float(config["compression_ratio"]),
            "score": round(
                sum(each["string_match"] for each in metrics.values()) / len(metrics), 2
            ),
        }
    return shown
