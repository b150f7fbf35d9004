"""The chart of `python -m benchmarks vllm`: seconds to the first token, and tokens a second."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks.chart_bars import group_bars
from benchmarks.panels import make_chart
from restorekv.evaluation.charts import BLUE, GREEN, ORANGE, SKY, Chart, Mark

COLD = Mark("cold", ORANGE, hatch="//")
WARM = Mark("warm", BLUE)


def draw_vllm(result: Mapping) -> Chart:
    """Draw a bar for whole documents and for each ratio, one below the other."""
    options = result["options"]
    rows = result["rows"]
    names = [f"{row['side']}, {row['bytes'] / 1e6:.0f} MB" for row in rows]
    waits = {
        COLD: [median(row["cold"]) for row in rows],
        WARM: [median(row["warm"]) for row in rows],
    }
    most = max(options["together"])
    fit = Mark(f"{options['fitting']} documents, which fit whole", GREEN, hatch="..")
    do_not_fit = Mark(f"{options['documents']} documents, which do not", SKY, hatch="")
    rates = {
        fit: [row["throughput"][f"fit, {most} together"] for row in rows],
        do_not_fit: [row["throughput"][f"do not fit, {most} together"] for row in rows],
    }
    panels = [
        group_bars("First token of an answer", "seconds", names, waits, digits=2),
        group_bars(f"{most} questions at once", "tokens a second", names, rates),
    ]
    title = (
        f"Documents of {options['tokens']:,} tokens in vLLM, "
        f"in memory for {options['fitting']} whole ones"
    )
    note = (
        f"{options['model']}; answers of {options['answer']} tokens. Cold: the document was not in "
        "vLLM's cache. Compressed: SnapKV, without an adapter."
    )
    return make_chart("vllm", title, panels, note)
