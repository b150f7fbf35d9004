"""Tables F and H: the paper's environment and metrics, and ours."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.measure import name_processor
from paper.scores import JudgedClaim
from paper.setting import Setting
from paper.study import Study
from restorekv import tasks
from restorekv.evaluation.report import Block
from restorekv.evaluation.tables import Table

ENVIRONMENT = {
    "GPU": "NVIDIA RTX PRO 6000 Blackwell (96 GB)",
    "CPU": "Intel Xeon Gold 6530",
    "memory": "503 GiB",
    "system": "Ubuntu 22.04.5 LTS",
    "framework": "PyTorch 2.8.0 (CUDA 12.8)",
}
METRICS = {
    "ruler": "official string-matching score",
    "qasper": "maximum token F1 over reference annotations",
    "quality": "answer-letter accuracy",
    "longhealth": "answer-letter accuracy",
    "longbench": "official per-task metric (F1, ROUGE-L, or accuracy)",
    "scbench": "official task-specific evaluator",
}


def environment(setting: Setting) -> Study:
    return Study("environment", "Table F", "tab:env", "Experimental environment", "", show_machine)


def metrics(setting: Setting) -> Study:
    return Study("metrics", "Table H", "tab:eval_metrics", "Evaluation metrics", "", show_measures)


def show_machine(setting: Setting, out: Path) -> tuple[list[Block], list[JudgedClaim]]:
    """Return a table of the machine that writes the page, and of the paper's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    framework = f"PyTorch {torch.__version__}, transformers {version('transformers')}"
    own = {
        "GPU": gpu,
        "CPU": name_processor(),
        "memory": f"{memory:.0f} GiB",
        "system": platform.platform(),
        "framework": framework,
    }
    lines = [[key, own[key], ENVIRONMENT[key]] for key in ENVIRONMENT]
    return [
        Table(
            "environment-machine",
            "Hardware and software",
            ["", "here", "paper"],
            lines,
            left=(0, 1, 2),
        )
    ], []


def show_measures(setting: Setting, out: Path) -> tuple[list[Block], list[JudgedClaim]]:
    """Return a table of each benchmark's metric; if another benchmark replaces it, that one's."""
    lines = []
    for key, told in METRICS.items():
        bench = setting.benches[key]
        made = [
            f"{each.title}: {each.to_json()['metric']}"
            for each in map(tasks.make_benchmark, bench.specs)
        ]
        lines.append([bench.title, "; ".join(made), told])
    head = ["benchmark", "here", "paper"]
    return [Table("metrics-benchmarks", "Metrics by benchmark", head, lines, left=(0, 1, 2))], []
