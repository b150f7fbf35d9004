"""The chart of `python -m benchmarks vllm-steps`: how long a decode step of vLLM takes."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks.chart_bars import group_bars
from benchmarks.panels import make_chart
from restorekv.evaluation.charts import BLUE, WIDE, Chart, Mark
from restorekv.evaluation.tables import format_ratio, name_evictor

SIDES = {
    "alone": "plain requests, vLLM alone",
    "plain": "plain requests, with the plugin",
    "documents": "requests about documents, with the plugin",
}


def draw_steps(result: Mapping) -> Chart:
    """Draw the median step of each side in milliseconds, one below the other."""
    options = result["options"]
    rounds = result["rounds"]
    times = [1000 * median(each[side] for each in rounds) for side in SIDES]
    names = list(SIDES.values())
    panel = group_bars("", "milliseconds", names, {Mark("", BLUE): times}, 1, WIDE)
    title = f"A decode step of vLLM with {options['documents']} requests in a batch"
    note = (
        f"{options['model']}; median of {len(rounds)} rounds. Each request has a document of its "
        f"own of {options['tokens']:,} tokens, {name_evictor(options['evictor'])} at "
        f"{format_ratio(float(options['ratio']))}."
    )
    return make_chart("vllm-steps", title, [panel], note)
