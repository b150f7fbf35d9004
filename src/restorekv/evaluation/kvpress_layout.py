"""Finished cells in the layout of kvpress 0.5.5's evaluation (evaluation/evaluate.py), which its leaderboard reads.

DIR/kvpress/{dataset}__{data_dir}__{model, -- for /}__{press_name}__{compression ratio, two digits}[__fraction0.200]
           [__max_context4096]/
    predictions.csv   the rows that were asked, without their contexts, with predicted_answer and compression_ratio
    metrics.json      ruler: {task: {"string_match": points}}; longbench: points; others: {task: {"score": points}}
    config.yaml       kvpress's settings
    restorekv.json    the cell, what it was made with and its figures; no part of kvpress's layout

A folder whose name is taken by another cell gets a numbered one inside, as kvpress does (ratios 0.12 and 0.125 print
alike). compression_ratio is 1 - r. LongBench has a folder for each task, as kvpress runs them.

The leaderboard (Hugging Face space nvidia/kvpress-leaderboard, src/data.py) takes a folder directly below its own that
has config.yaml with no key but those of its settings, metrics.json with "string_match" for every task, and fraction 1;
the score is the mean over tasks, the compression ratio the mean of the column in predictions.csv. It knows
neither trust_remote_code nor head_compression_ratio; kvpress does without them too, so both are left out. It does not
look into numbered folders, passes over other benchmarks and fails on LongBench's bare numbers: send it ruler alone.

Names of presses: kvpress's own where its choice of pairs is ours (KVzip, KVzip+ and RestoreKV over them, one ranking
over all heads, the template counted); every other cell is named restorekv_ and its settings, which kvpress's own
EvaluationConfig refuses. Only RULER's official rows are data_dir "4096"; generated ones are "4096-generated".
Cells of other protocols are left out.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from restorekv import tasks
from restorekv.compression.budget import exact_ratio
from restorekv.evaluation.cell import FULL, Cell
from restorekv.evaluation.results import Result, load
from restorekv.files import replacing, write_json
from restorekv.tasks.longbench import LongBench
from restorekv.tasks.ruler import Ruler
from restorekv.tasks.ruler.dataset import NAME as RULER_ROWS

FOLDER, OURS, CONFIG = "kvpress", "restorekv.json", "config.yaml"
PRESSES = {
    ("kvzip", False): "kvzip",
    ("kvzip+", False): "kvzip_plus",
    ("kvzip", True): "RestoreKV",
    ("kvzip+", True): "RestoreKV_plus",
}
OFFICIAL_RULER = 6500  # rows of a length
OFFICIAL_LONGBENCH = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}  # rows; other tasks have 200
COLUMNS = {
    "question": "question", "answer_prefix": "answer_prefix", "references": "answer", "task": "task",
    "max_new_tokens": "max_new_tokens", "prediction": "predicted_answer",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What goes into one folder: `fraction` is the share of the data set that was asked."""

    dataset: str
    data_dir: str | None
    fraction: float
    answers: Sequence[Mapping]
    metrics: dict | float


def export(folder: Path) -> list[Path]:
    """Writes what is finished of a run and not yet written; every folder of the layout, in the cells' order."""
    done = [result for result in load(folder) if result.done and result.cell.protocol == "kvpress"]
    return [written(folder / FOLDER, result, part) for result in done for part in parts(result)]


def parts(result: Result) -> Iterator[Part]:
    """A cell by kvpress's data sets."""
    answers = [told for line in result.lines for told in line["answers"]]
    by_task: dict[str, list[Mapping]] = {}
    for told in answers:
        by_task.setdefault(told["task"], []).append(told)
    match tasks.make(result.cell.benchmark):
        case Ruler() as ruler:
            official = result.facts["benchmark"]["data"] == RULER_ROWS
            name = str(ruler.length) if official else f"{ruler.length}-generated"
            rows = OFFICIAL_RULER if official else len(ruler.chosen_tasks) * ruler.per_task
            metrics = {task: {"string_match": points(told)} for task, told in sorted(by_task.items())}
            yield Part("ruler", name, len(answers) / rows, answers, metrics)
        case LongBench():
            for task, told in by_task.items():
                yield Part("longbench", task, len(told) / OFFICIAL_LONGBENCH.get(task, 200), told, points(told))
        case other:
            scores = {task: {"score": round(found["score"], 2)} for task, found in result.summary["tasks"].items()}
            yield Part(other.name, safe(other.spec.partition(":")[2]) or None, 1.0, answers, scores)


def points(answers: Sequence[Mapping]) -> float:
    return round(sum(told["score"] for told in answers) / len(answers) * 100, 2)


def written(folder: Path, result: Result, part: Part) -> Path:
    """The part's folder, filled unless it is."""
    config, ours = settings(result, part), {"cell": result.cell.told, "facts": result.facts, **result.summary}
    place = free(folder / named(config), result.cell)
    if (place / CONFIG).exists() and told(place) == ours:
        return place
    place.mkdir(parents=True, exist_ok=True)
    (place / CONFIG).unlink(missing_ok=True)  # comes last: without it a folder is not taken for finished
    write_json(place / OURS, ours)
    fill(place, part, config)
    return place


def fill(place: Path, part: Part, config: Mapping) -> None:
    """The three files that kvpress writes."""
    known = {key: column for key, column in COLUMNS.items() if key in part.answers[0]}
    if part.dataset == "longbench":
        known["references"] = "answers"
    rows = [[told[key] for key in known] + [config["compression_ratio"]] for told in part.answers]
    with replacing(place / "predictions.csv") as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        table.writerows([[*known.values(), "compression_ratio"], *rows])
    with replacing(place / "metrics.json") as temporary:
        temporary.write_text(json.dumps(part.metrics, indent=4), encoding="utf-8")
    with replacing(place / CONFIG) as temporary:
        temporary.write_text(yaml.dump(config, sort_keys=False), encoding="utf-8")


def settings(result: Result, part: Part) -> dict:
    """kvpress's EvaluationConfig, without the two keys that the leaderboard does not know and the two of other presses.

    What ours needs beyond it stands in press_init_command, which the leaderboard shows beside a method's name.
    """
    cell, facts = result.cell, result.facts
    return {
        "dataset": part.dataset, "data_dir": part.data_dir, "model": cell.model, "device": facts["device"],
        "press_name": press(cell, facts), "compression_ratio": float(1 - exact_ratio(cell.ratio)),
        "key_channel_compression_ratio": None, "fraction": part.fraction, "max_new_tokens": None,
        "max_context_length": cell.max_context or None, "query_aware": False, "needle_depth": None,
        "compression_interval": None, "target_size": None, "hidden_states_buffer_size": None,
        "output_dir": "./results", "log_level": "INFO", "model_kwargs": {"dtype": facts["dtype"]},
        "press_init_command": made_with(cell, facts), "seed": tasks.make(cell.benchmark).seed, "fp8": False,
    }  # fmt: skip


def press(cell: Cell, facts: Mapping) -> str:
    """kvpress's name of the method, or one of our own that it cannot be taken for."""
    if cell.evictor == FULL:
        return "no_press"
    kvpress_own = {"prefix_policy": "counted", "allocation": "global", "restore_from": "full", "offset": 0}
    changed = [f"{key}={facts[key]}" for key, value in kvpress_own.items() if facts[key] != value]
    changed += [cell.storage] if cell.storage != "model" else []
    changed += [f"streaming={cell.streaming}"] if cell.streaming else []
    if not changed and (cell.evictor, cell.restored) in PRESSES:
        return PRESSES[cell.evictor, cell.restored]
    words = ["restorekv", cell.evictor, *(["restored"] if cell.restored else []), *changed]
    return safe("_".join(words))


def made_with(cell: Cell, facts: Mapping) -> str:
    if cell.evictor == FULL:
        return "None"
    made = {key: facts[key] for key in ("method", "prefix_policy", "allocation", "restore_from", "offset", "on_tight")}
    made |= {"storage": cell.storage, "streaming": cell.streaming}
    made |= {"ratio": cell.ratio, "adapter": cell.adapter, **(facts["adapter"] or {})}
    return f"restorekv {facts['versions']['restorekv']}: " + ", ".join(f"{key}={value}" for key, value in made.items())


def named(config: Mapping) -> str:
    """kvpress's name of the folder."""
    words = [config["dataset"], config["data_dir"], config["model"].replace("/", "--"), config["press_name"]]
    words.append(f"{config['compression_ratio']:.2f}")
    if config["fraction"] < 1:
        words.append(f"fraction{config['fraction']:.3f}")
    if config["max_context_length"]:
        words.append(f"max_context{config['max_context_length']}")
    return "__".join(filter(None, words))


def free(place: Path, cell: Cell) -> Path:
    """The first of `place`, `place`/1, `place`/2 ... that is the cell's or nobody's."""
    found, number = place, 0
    while found.exists() and told(found).get("cell") != cell.told and any(found.iterdir()):
        number += 1
        found = place / str(number)
    return found


def told(place: Path) -> dict:
    """What a folder of ours tells; nothing of kvpress's own."""
    return json.loads((place / OURS).read_text(encoding="utf-8")) if (place / OURS).exists() else {}


def safe(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", text)
