"""The setting of SmolLM2-135M-Instruct: benchmarks of real texts that ship with the package replace
the paper's.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

from paper.setting import SEEDS, Bench, Setting, check_adapters
from paper.training import Setup
from restorekv import tasks
from restorekv.errors import RestoreKVError
from restorekv.model.names import SMOLLM2
from restorekv.restore import adapter_file
from restorekv.restore.shipped import find_shipped_adapter
from restorekv.tasks.ruler.benchmark import GROUPS
from restorekv.train.config import TrainConfig

# The numbers of contexts are chosen so that Table 1, the largest experiment, takes about two hours
# on two cores (paper/log.md).
RULER = "ruler:length=1024,per_task=4"
LONG_RULER = "ruler:length=2048,per_task=2"
FAIRYTALES = "fairytaleqa:count=30"
ARTICLES = "xquad:count=30"
SECTIONS = "factbook:count=24"
PAIRS = "hotpotqa:count=24"
METHOD = "kvzip"  # the ablations vary this evictor's adapter
CATEGORIES = {
    "S-QA": ("explicit", "implicit", "xquad"),
    "M-QA": ("hotpotqa",),
    "Synth": (*GROUPS["retrieval"], *GROUPS["multi-hop tracing"], *GROUPS["aggregation"]),
}
ABOUT = (
    "The model has 135 million parameters, the paper's have 0.6 to 8 billion, and the questions "
    "are others: what can "
    "be compared is the order of rows and the size of gains, not the scores. So small a model "
    "answers many questions "
    "badly whatever its cache; how far a cache is from the full one can be measured all the same, "
    "as KL and as the "
    "share of answers that stay the same. The adapters were trained with the chat prefix kept "
    "beside the budget, so "
    "they are asked so here. Where n restore tokens exceed a budget, fewer are used."
)


def make_smollm2_setting(
    out: Path,
    count: int = 0,
    seeds: tuple[int, ...] = SEEDS,
    adapters: str | None = None,
    data: Path | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> Setting:
    """Return the setting of SmolLM2.

    `count` is the number of contexts of each benchmark; 0 means those in the specs above.
    `adapters` is a folder of adapters that take precedence over those that ship.
    """
    if count < 0:
        raise RestoreKVError(f"count is a number of contexts, at least 0, not {count}.")
    check_adapters(adapters)

    def asked(spec: str) -> str:
        made = tasks.make_benchmark(spec)
        return (replace(made, count=count) if count else made).spec

    ruler = asked(RULER)
    fairytales = asked(FAIRYTALES)
    articles = asked(ARTICLES)
    benches = {
        "ruler": Bench(
            "RULER-4K",
            ruler,
            name="RULER at 1,024 tokens",
            standing="RULER's 13 tasks at 1,024 tokens, made from a novel and subsets of SQuAD "
            "and HotpotQA, stand for "
            "RULER-4K.",
        ),
        "qasper": Bench(
            "QASPER",
            fairytales,
            name="FairytaleQA",
            standing=(
                "FairytaleQA (experts' questions on passages of stories, up to 1,024 tokens) "
                "stands for QASPER."
            ),
        ),
        "quality": Bench(
            "QuALITY",
            articles,
            name="XQuAD",
            standing="XQuAD's English part (articles of an encyclopedia, up to 1,024 tokens, F1 "
            "and no options) stands "
            "for QuALITY.",
        ),
        "longhealth": Bench(
            "LongHealth",
            asked(SECTIONS),
            name="Factbook",
            standing="Sections of The World Factbook (512 to 4,096 tokens, machine-made "
            "questions, F1 and no options) "
            "stand for LongHealth.",
        ),
        "longbench": Bench(
            "LongBench",
            ruler,
            CATEGORIES,
            more=(fairytales, articles, asked(PAIRS)),
            name="FairytaleQA, XQuAD, HotpotQA and RULER",
            standing="FairytaleQA and XQuAD stand for LongBench's S-QA, HotpotQA for M-QA, "
            "RULER's needles, tracing "
            "and aggregation at 1,024 tokens for Synth. Summ, Few-shot and Code have no "
            "counterpart.",
        ),
        "scbench": Bench(
            "SCBench",
            asked(LONG_RULER),
            name="RULER at 2,048 tokens",
            standing="RULER at 2,048 tokens stands for SCBench: longer than the other "
            "benchmarks' contexts, if not by "
            "SCBench's order of magnitude.",
        ),
    }
    settings = _make_settings(adapters)
    setup = Setup(out / "trained", settings, SMOLLM2, data, device=device, dtype=dtype)
    conventions = {"prefix_policy": "free", "on_small_budget": "fewer"}
    return Setting(
        setup,
        benches,
        conventions,
        adapters,
        seeds,
        name="SmolLM2-135M-Instruct",
        about=ABOUT,
        efficiency_tokens=2048,
    )


def _make_settings(adapters: str | None) -> TrainConfig:
    """Return the settings that KVzip's adapter was trained with, the given or the shipped one.

    If there is no adapter, or its card does not state them, they are the paper's.
    """
    given = Path(adapters or "") / METHOD
    folder = (
        given if (given / adapter_file.CARD).exists() else find_shipped_adapter(SMOLLM2, METHOD)
    )
    card = adapter_file.read_adapter(folder).card if folder else None
    if card is None:
        return TrainConfig()
    setting_names = {each.name for each in fields(TrainConfig)} - {"evictor", "seed", "init"}
    settings = {key: value for key, value in (card.settings or {}).items() if key in setting_names}
    return TrainConfig.from_json(json.dumps({**settings, "restore_tokens": card.restore_tokens}))
