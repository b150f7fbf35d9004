"""Charts of what benchmarks measured: each file that a benchmark's --json wrote becomes one
picture.

Which benchmark wrote a file is recognized by the keys of its rows (`KINDS`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.chart_bars import draw_compare, draw_scorers, draw_training, format_layers
from benchmarks.chart_lines import draw_decode, draw_kernel
from benchmarks.chart_memory import draw_memory
from benchmarks.vllm_chart import draw_vllm
from benchmarks.vllm_steps_chart import draw_steps
from restorekv.errors import RestoreKVError
from restorekv.evaluation.charts import Chart
from restorekv.evaluation.tables import make_slug
from restorekv.files import replace_file

KINDS: dict[frozenset[str], Callable[[Mapping], Chart]] = {
    frozenset({"tokens", "side", "seconds", "small", "full"}): draw_compare,
    frozenset({"ratio", "attention", "step"}): draw_decode,
    frozenset({"tokens", "mode", "phases"}): draw_memory,
    frozenset({"method", "multiple"}): draw_scorers,
    frozenset({"variant", "seconds", "step"}): draw_training,
    frozenset({"ratio", "ours", "roofline"}): draw_kernel,
    frozenset({"side", "resident", "throughput"}): draw_vllm,
    frozenset({"alone", "plain", "documents"}): draw_steps,
}
BENCHMARKS = (
    "bench, bench-decode, bench-memory, bench-scorers, bench-train, bench-kernel, benchmarks vllm "
    "or benchmarks vllm-steps"
)
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def write_charts(files: Sequence[Path], out: Path, png: bool = False) -> list[Path]:
    """Write every file's chart as OUT/NAME.svg, with `png` also as OUT/NAME.png; return the paths
    written.

    All charts are drawn before the first is written. Raises RestoreKVError if a file is missing,
    damaged or not a benchmark's, if two files have the same name, or if `out` is not a folder.
    """
    names = [file.stem for file in files]
    twice = sorted(name for name in set(names) if names.count(name) > 1)
    if twice:
        raise RestoreKVError(
            f"Several files are called {twice[0]} and would have one chart; rename one of them."
        )
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is not a folder; choose one for the charts.")
    payloads: dict[Path, bytes] = {}
    for file in files:
        payloads |= {
            out / f"{file.stem}{ending}": payload
            for ending, payload in _draw_chart(file, png).items()
        }
    out.mkdir(parents=True, exist_ok=True)
    for path, payload in payloads.items():
        with replace_file(path) as temporary:
            temporary.write_bytes(payload)
    return list(payloads)


def _draw_chart(file: Path, png: bool) -> dict[str, bytes]:
    """Return the bytes of the file's chart by file ending, such as ".svg"."""
    result = _read_result(file)
    try:
        chart = make_chart_with_note(file, result)
        return {f".{ending}": chart.render(ending) for ending in ("svg", *(["png"] if png else []))}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RestoreKVError(
            f"{file} does not hold what its chart shows ({type(error).__name__}: {error}); measure "
            "again."
        ) from error


def _read_result(file: Path) -> dict:
    """Read a result; refuse what is not one."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RestoreKVError(
            f"There is no file {file}; give one that a benchmark's --json wrote."
        ) from None
    except ValueError:
        raise RestoreKVError(
            f"{file} is not JSON, or damaged; give one that a benchmark's --json wrote."
        ) from None
    if _find_drawer(result) is None:
        raise RestoreKVError(f"{file} is not a result of {BENCHMARKS}; name files that are.")
    return result


def _find_drawer(result: object) -> Callable[[Mapping], Chart] | None:
    """Return the function that draws this result, or None if it is not a benchmark's."""
    if not isinstance(result, dict):
        return None
    # `vllm-steps` stores rounds instead of rows.
    rows = result.get("rows", result.get("rounds"))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    for keys, draw in KINDS.items():
        if all(keys <= row.keys() for row in rows):
            return draw
    return None


def make_chart_with_note(file: Path, result: Mapping) -> Chart:
    """Return the chart, named after the file, with a note on what and where it was measured."""
    draw = _find_drawer(result)
    assert draw is not None, "_read_result refuses what has no chart"
    chart = draw(result)
    return replace(
        chart,
        name=make_slug(file.stem),
        note=" ".join(filter(None, (chart.note, _describe_measurement(file, result)))),
    )


def _describe_measurement(file: Path, result: Mapping) -> str:
    """Return model, machine, versions and day as one sentence, as far as they are known; the day
    may be in the file's name.
    """
    machine = result["machine"]
    model = result.get("model")
    day = DAY.search(file.stem)
    parts = []
    if model:
        parts += ["Random weights", f"{model['parameters'] / 1e6:,.0f} million parameters"]
        parts += [format_layers(model["num_hidden_layers"]), model["dtype"]]
        parts += [
            machine["processor"],
            f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}",
        ]
    else:  # the kernel alone, on a GPU, or a model that the chart's own note names
        parts.append(machine.get("device", machine["processor"]))
        parts += [f"CUDA {machine['cuda']}"] if machine.get("cuda") else []
    parts += [f"{name} {number}" for name, number in _find_versions(result).items()]
    parts.append(machine.get("date") or (day and day.group()))
    return "; ".join(part.replace(" ", "\u00a0") for part in parts if part) + "."


def _find_versions(result: Mapping) -> Mapping[str, str]:
    """Return versions of packages: the machine's, or what our side reported in older results."""
    ours: dict = {}
    for row in result.get("rows", []):
        if row.get("side") == "ours" and "versions" in row:
            ours = row["versions"]
            break
    return result["machine"].get("versions") or ours
