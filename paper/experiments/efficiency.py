"""Figure 6: what the restore pass adds to the cost of compression, and that attention and memory
are the same afterwards.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import efficiency as cost
from benchmarks import efficiency_page as charts
from benchmarks.workload import make_label
from paper.scores import FAILS, HOLDS, MISSING, JudgedClaim
from paper.setting import Setting
from paper.study import Study, load_figures
from restorekv.compression.config import CompressionConfig
from restorekv.compression.progress import OnStep
from restorekv.evaluation import protocols
from restorekv.evaluation.report import Block
from restorekv.evaluation.tables import Table, format_number, name_method
from restorekv.model.load import load_model
from restorekv.restore.shipped import find_shipped_adapter

LATENCY = {1.0: (0.457, 4.20), 0.05: (0.253, 0.20)}  # r: milliseconds a layer, GB of cache
NEAR = 5.0  # percent: what counts as nearly identical


def make_experiment(setting: Setting) -> Study:
    return Study(
        name="efficiency",
        number="Figure 6",
        label="fig:efficiency",
        title="Efficiency",
        backbone="Llama-3.1-8B-Instruct, 32K tokens",
        show=_show,
        measure=_measure,
        note="The paper: 0.03 to 0.04 s and 84 MB more on an RTX PRO 6000, with n = 8; the share "
        "of a restore pass "
        "falls with the length of the context and the size of the model.",
        minutes=4,
    )


def _measure(setting: Setting, out: Path, progress: OnStep) -> None:
    """Measure at the context length of the setting."""
    setup = setting.setup
    policy = protocols.make_protocol("kvpress").prefix_policy
    model, tokenizer = load_model(setup.model, setup.dtype, setup.device)
    options = cost.CostOptions(tokens=setting.efficiency_tokens)
    conventions = CompressionConfig(**{"prefix_policy": policy, **setting.conventions})
    cost.measure_efficiency(
        model, tokenizer, out, options, conventions, _label_run(setting), progress
    )


def _label_run(setting: Setting) -> str:
    """Return the label of the file of figures.

    It names the scorers that no adapter ships for. These are measured with adapters of random
    weights; once an adapter ships, the figures with it get another file.
    """
    lacking = [scorer for scorer in cost.SCORERS if not find_shipped_adapter(setting.model, scorer)]
    return make_label(
        setting.model, setting.setup.device, *(["without", *lacking] if lacking else [])
    )


def _show(setting: Setting, out: Path) -> tuple[list[Block], list[JudgedClaim]]:
    """Return both panels of the figure as charts and tables, and the claims."""
    found = load_figures(out / cost.FOLDER / f"{_label_run(setting)}.json")
    if found is None:
        return ["Not measured yet."], []
    short = make_label(setting.model, setting.setup.device)
    drawn = {**found, "name": short, "label": short}
    return [
        charts.draw_compression(drawn),
        _make_compression_table(found),
        charts.draw_latency(drawn),
        _make_attention_table(found),
    ], _list_claims(found)


def _make_compression_table(found: dict) -> Table:
    """Return a table of the costs of compression, with a row for every scorer."""
    facts = found["conventions"]
    lines = []
    totals = {
        (row["evictor"], row["restored"]): row["seconds"]["total"] for row in found["compression"]
    }
    for evictor, more in found["overhead"].items():
        peak = more["peak"]
        share = more["peak_share"]
        seconds = (
            f"{totals[evictor, False]:.2f}",
            f"{more['seconds']:.3f}",
            f"{100 * more['share']:.1f}",
        )
        memory = (None, None) if peak is None else (peak / 1e6, 100 * share)
        lines.append(
            [
                name_method(evictor, False),
                *seconds,
                *(format_number(value, 1, True) for value in memory),
            ]
        )
    lines.append(["paper: any scorer", "", "0.03 to 0.04", "0.5", "+84", "+0.4"])
    head = [
        "scorer",
        "compression, s",
        "restore pass, s",
        "its share, %",
        "peak memory, MB",
        "its share, %",
    ]
    note = (
        f"{facts['machine']}, {facts['device']}, {_count(facts['threads'], 'thread')}; "
        f"{facts['tokens']:,} tokens. "
    )
    note += f"Peak: {found['definitions']['peak']}."
    drawn = [
        name_method(row["evictor"], False)
        for row in found["compression"]
        if row["adapter"] == "random"
    ]
    note += f" The adapters of {', '.join(drawn)} have random weights." if drawn else ""
    return Table(
        "efficiency-compression",
        "(a) Compression with and without the restore pass",
        head,
        lines,
        note,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _make_attention_table(found: dict) -> Table:
    """Return a table of attention and memory after compression, with a row for every ratio."""
    rows = {(row["ratio"], row["restored"]): row for row in found["latency"]}
    lines = []
    for ratio in dict.fromkeys(row["ratio"] for row in found["latency"]):
        base = rows[ratio, False]
        restored = rows[ratio, True]
        milliseconds, held = LATENCY.get(ratio, ("", ""))
        lines.append(
            [
                f"{ratio:g}",
                f"{base['milliseconds']:.3f}",
                f"{restored['milliseconds']:.3f}",
                str(milliseconds),
                f"{base['bytes'] / 1e6:.2f}",
                f"{restored['bytes'] / 1e6:.2f}",
                str(held),
            ]
        )
    head = [
        "r",
        "KVzip, ms",
        "RestoreKV, ms",
        "paper, ms",
        "KVzip, MB",
        "RestoreKV, MB",
        "paper, GB",
    ]
    random = found["conventions"]["latency_context"] == "random"
    note = "One layer's attention for one new token." + (
        " Keys and values are random." if random else ""
    )
    return Table("efficiency-attention", "(b) Attention and memory afterwards", head, lines, note)


def _list_claims(found: dict) -> list[JudgedClaim]:
    """Return the claims, judged by single measurements without intervals."""
    more = list(found["overhead"].values())
    share = max(each["share"] for each in more)
    peaks = [each["peak_share"] for each in more if each["peak_share"] is not None]
    tight = min(row["ratio"] for row in found["latency"])
    base, restored = (
        next(row for row in found["latency"] if (row["ratio"], row["restored"]) == (tight, side))
        for side in (False, True)
    )
    slower = 100 * (found["latency_ratio"][f"{tight:g}"] - 1)
    larger = 100 * (restored["bytes"] / base["bytes"] - 1)
    return [
        _judge_claim(
            "the restore pass takes less than 0.5 % of compression (percent)", 0.5 - 100 * share
        ),
        _judge_claim(
            "peak memory grows by less than 0.5 % (percent)",
            0.5 - 100 * max(peaks) if peaks else None,
        ),
        _judge_claim(
            f"at r = {tight:g} attention is as fast to {NEAR:g} % (percent)", NEAR - abs(slower)
        ),
        _judge_claim(
            f"at r = {tight:g} the cache holds as many bytes to 1 % (percent)", 1 - abs(larger)
        ),
    ]


def _judge_claim(text: str, value: float | None) -> JudgedClaim:
    if value is None:
        return JudgedClaim(text, MISSING)
    return JudgedClaim(text, HOLDS if value > 0 else FAILS, (), value, value, value)
