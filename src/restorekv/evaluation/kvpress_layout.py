"""Exports finished cells in the layout of kvpress 0.5.5's evaluation (evaluation/evaluate.py), for
its leaderboard.

DIR/kvpress/{dataset}__{data_dir}__{model, -- for /}__{press_name}__{compression ratio, two digits}
           [__fraction0.200][__max_context4096]/
    predictions.csv   the rows that were asked, without their contexts, with predicted_answer and
                      compression_ratio
    metrics.json      ruler: {task: {"string_match": points}}; longbench: points;
                      others: {task: {"score": points}}
    config.yaml       kvpress's settings
    restorekv.json    the cell, what it was made with and its figures; not part of kvpress's layout

compression_ratio is 1 - r. LongBench gets a folder for each task, as kvpress runs them. If the name
belongs to another cell (ratios 0.12 and 0.125 print alike) or to a folder that kvpress itself
wrote, a numbered folder inside it is used, as kvpress does.

The leaderboard (Hugging Face space nvidia/kvpress-leaderboard, src/data.py) reads "string_match" of
every task from folders directly below its own whose fraction is 1, and refuses keys of config.yaml
that it does not know. It skips numbered folders and other benchmarks, and fails on LongBench: send
it ruler only.

A press has kvpress's own name if kvpress chooses the same pairs (KVzip, KVzip+ and RestoreKV
over them, one ranking over all heads, the template counted); the full cache is no_press, and every
other cell is named restorekv_ and its settings. Only RULER's official rows have a data_dir such as
"4096"; generated ones have "4096-generated". Cells of other protocols are left out.
"""

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from restorekv import tasks
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid import FULL, Cell, group_by
from restorekv.evaluation.results import Result, load_readable_cells
from restorekv.files import cut_name, replace_file, write_json
from restorekv.tasks.longbench import LongBench
from restorekv.tasks.ruler.benchmark import HUB as RULER_ROWS
from restorekv.tasks.ruler.benchmark import Ruler

FOLDER = "kvpress"
LONGEST_NAME = 200  # bytes of a folder's name; file systems allow 255
OURS = "restorekv.json"
CONFIG = "config.yaml"
PRESSES = {
    ("kvzip", False): "kvzip",
    ("kvzip+", False): "kvzip_plus",
    ("kvzip", True): "RestoreKV",
    ("kvzip+", True): "RestoreKV_plus",
}
OFFICIAL_RULER = 6500  # rows of each context length
# Rows of each task; other tasks have 200.
OFFICIAL_LONGBENCH = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
COLUMNS = {
    "question": "question",
    "answer_prefix": "answer_prefix",
    "references": "answer",
    "task": "task",
    "max_new_tokens": "max_new_tokens",
    "prediction": "predicted_answer",
}


@dataclass(frozen=True)
class KvpressRun:
    """The contents of one folder; `fraction` is the share of the data set that was asked."""

    dataset: str
    data_dir: str | None
    fraction: float
    answers: Sequence[Mapping]
    metrics: dict | float


def export_kvpress(folder: Path) -> list[Path]:
    """Export the finished cells of the kvpress protocol and return their folders, in the cells'
    order.
    """
    written: list[Path] = []
    for result in load_readable_cells(folder):
        # kvpress itself has only finished runs of its own protocol.
        if result.done and result.cell.protocol == "kvpress" and _is_readable(result):
            for part in _split_result(result):
                settings = _make_settings(result, part)
                path = _find_free_folder(folder / FOLDER / _name_folder(settings), written)
                _write_run(path, result, part, settings)
                written.append(path)
    return written


def _is_readable(result: Result) -> bool:
    """Return whether a cell's files are intact and hold answers; those of other runs may be
    damaged.
    """
    try:
        return bool(result.summary and result.lines)
    except RestoreKVError:
        return False


def _split_result(result: Result) -> Iterator[KvpressRun]:
    answers = [answer for line in result.lines for answer in line["answers"]]
    by_task = group_by(answers, lambda answer: answer["task"])
    match tasks.make_benchmark(result.cell.benchmark):
        case Ruler() as ruler:
            official = result.identity["benchmark"]["data"] == RULER_ROWS
            name = str(ruler.length) if official else f"{ruler.length}-generated"
            rows = OFFICIAL_RULER
            if not official:
                rows = len(ruler.chosen_tasks) * ruler.per_task
            metrics = {
                task: {"string_match": _compute_mean_points(own)}
                for task, own in sorted(by_task.items())
            }
            yield KvpressRun("ruler", name, len(answers) / rows, answers, metrics)
        case LongBench():
            for task, own in by_task.items():
                yield KvpressRun(
                    "longbench",
                    task,
                    len(own) / OFFICIAL_LONGBENCH.get(task, 200),
                    own,
                    _compute_mean_points(own),
                )
        case other:
            scores = {
                task: {"score": round(each["score"], 2)}
                for task, each in result.summary["tasks"].items()
            }
            yield KvpressRun(
                other.name,
                _make_safe_name(other.spec.partition(":")[2]) or None,
                1.0,
                answers,
                scores,
            )


def _compute_mean_points(answers: Sequence[Mapping]) -> float:
    return round(sum(answer["score"] for answer in answers) / len(answers) * 100, 2)


def _write_run(path: Path, result: Result, part: KvpressRun, settings: Mapping) -> None:
    """Fill the folder of a part."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).unlink(missing_ok=True)  # written last: a folder without it is not finished
    own = {"cell": result.cell.to_dict(), "facts": result.identity, **result.summary}
    write_json(path / OURS, own, follow=False)
    # Only columns that the rows have: longbench calls its references answers.
    known = {key: column for key, column in COLUMNS.items() if key in part.answers[0]}
    if part.dataset == "longbench":
        known["references"] = "answers"
    ratio = settings["compression_ratio"]
    rows = [[*(answer[key] for key in known), ratio] for answer in part.answers]
    predictions = io.StringIO(newline="")
    table = csv.writer(predictions, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    table.writerows([[*known.values(), "compression_ratio"], *rows])
    with replace_file(path / "predictions.csv", follow=False) as temporary:
        temporary.write_text(predictions.getvalue(), encoding="utf-8", newline="")
    write_json(path / "metrics.json", part.metrics, follow=False)
    with replace_file(path / CONFIG, follow=False) as temporary:
        temporary.write_text(yaml.dump(settings, sort_keys=False), encoding="utf-8")


def _make_settings(result: Result, part: KvpressRun) -> dict:
    """Return kvpress's EvaluationConfig, without two keys that the leaderboard refuses and two of
    other presses.

    press_init_command holds our own settings; the leaderboard shows it next to a method's name.
    """
    cell = result.cell
    identity = result.identity
    return {
        "dataset": part.dataset,
        "data_dir": part.data_dir,
        "model": cell.model,
        "device": identity["device"],
        "press_name": _name_press(cell, identity),
        "compression_ratio": float(1 - parse_ratio(cell.ratio)),
        "key_channel_compression_ratio": None,
        "fraction": part.fraction,
        "max_new_tokens": None,
        "max_context_length": cell.max_context or None,
        "query_aware": False,
        "needle_depth": None,
        "compression_interval": None,
        "target_size": None,
        "hidden_states_buffer_size": None,
        "output_dir": "./results",
        "log_level": "INFO",
        "model_kwargs": {"dtype": identity["dtype"]},
        "press_init_command": _describe_cell(cell, identity),
        "seed": tasks.make_benchmark(cell.benchmark).seed,
        "fp8": False,
    }


def _name_press(cell: Cell, identity: Mapping) -> str:
    """Return kvpress's name for the method, or our own name, which kvpress does not know."""
    if cell.evictor == FULL:
        return "no_press"
    kvpress_own = {
        "prefix_policy": "counted",
        "allocation": "global",
        "restore_from": "full",
        "offset": 0,
    }
    changed = [
        f"{key}={identity[key]}" for key, value in kvpress_own.items() if identity[key] != value
    ]
    if cell.kv_dtype != "model":
        changed.append(cell.kv_dtype)
    if cell.streaming_chunk:
        changed.append(f"streaming_chunk={cell.streaming_chunk}")
    if not changed and (cell.evictor, cell.restored) in PRESSES:
        return PRESSES[cell.evictor, cell.restored]
    # Our own name for what kvpress does not have, with the settings that are unusual.
    words = ["restorekv", cell.evictor]
    if cell.restored:
        words.append("restored")
    return _make_safe_name("_".join([*words, *changed]))


def _describe_cell(cell: Cell, identity: Mapping) -> str:
    """Return everything that the cell was made with as one line of text."""
    if cell.evictor == FULL:
        return "None"
    keys = ("method", "prefix_policy", "allocation", "restore_from", "offset", "on_small_budget")
    made_with = {key: identity[key] for key in keys} | {
        "kv_dtype": cell.kv_dtype,
        "streaming_chunk": cell.streaming_chunk,
    }
    made_with |= {"ratio": cell.ratio, "adapter": cell.adapter, **(identity["adapter"] or {})}
    words = ", ".join(f"{key}={value}" for key, value in made_with.items())
    return f"restorekv {identity['versions']['restorekv']}: {words}"


def _name_folder(config: Mapping) -> str:
    words = [
        config["dataset"],
        config["data_dir"],
        config["model"].replace("/", "--"),
        config["press_name"],
    ]
    words.append(f"{config['compression_ratio']:.2f}")
    if config["fraction"] < 1:
        words.append(f"fraction{config['fraction']:.3f}")
    if config["max_context_length"]:
        words.append(f"max_context{config['max_context_length']}")
    name = "__".join(filter(None, words))
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{cut_name(name, LONGEST_NAME - 9)}_{digest}"


def _find_free_folder(path: Path, written: Sequence[Path]) -> Path:
    """Return the first of `path`, `path`/1, `path`/2 ... that is not among those `written` now and
    that kvpress itself has not written.
    """
    free = path
    number = 0
    while free in written or ((free / CONFIG).exists() and not (free / OURS).exists()):
        number += 1
        free = path / str(number)
    return free


def _make_safe_name(text: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", text)
