"""The page of the analyses: attention by layer, distances from the full cache, surviving pairs, and
what restore tokens attend to.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.efficiency_page import BASE, RESTORED, explain_result, load_results
from benchmarks.panels import Panel, make_bars, make_chart
from paper.analysis.run import FOLDER
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts, survivor_plots
from restorekv.evaluation.charts import Mark, plot_line, set_ticks
from restorekv.evaluation.report import Block, Section, write_page
from restorekv.evaluation.tables import UNKNOWN, Table, format_percent, format_score, make_slug

CACHES = {"full": Mark("full cache", charts.INK, dashed=True), "base": BASE, "restored": RESTORED}
ALONE = Mark("restored: context alone", charts.SKY, "s")
WHOLE = Mark("restored: context and restore cache", charts.BLUE, "o")
PARTS = ("context", "sinks", "restore", "question")  # of the attention
READ = {
    "kept": Mark("pairs that are kept", charts.BLUE, hatch="//"),
    "evicted": Mark("pairs about to be evicted", charts.VERMILION, hatch="\\\\"),
    "sinks": Mark("sinks", charts.MUTED),
    "restore": Mark("earlier restore tokens", charts.GREEN, hatch=".."),
    "itself": Mark("itself", charts.ORANGE, hatch="xx"),
}
WHERE = {"first": "first answer token", "answer": "tokens of the answer"}
FEW = 12  # layers that a narrow chart has room for; restore tokens that get a row each
FLOOR = 0.001  # the share of attention that `layers_below` counts from
Analysis = Mapping[str, object]


def write_analyses(folder: Path) -> Path:
    """Write a page of all analyses in a run folder to FOLDER/analysis/page, and return its path."""
    return write_page(
        folder / FOLDER / "page", "Attention to compressed caches", make_sections(folder)
    )


def make_sections(folder: Path) -> list[Section]:
    """Return one section for each kind of analysis in the folder, the tightest ratio first."""
    files = load_results(folder / FOLDER)
    sections = []
    for kind, (title, intro, blocks_of) in KINDS.items():
        blocks: list[Block] = []
        for analysis in (file for file in files if file["analysis"] == kind):
            figures = analysis.get("figures")
            if not isinstance(figures, dict):
                raise RestoreKVError(
                    f"The analysis {analysis['label']} has no figures; make it again."
                )
            for ratio in sorted(figures, key=float):
                heading = f"{analysis['label']}, r = {ratio}"
                blocks += blocks_of(
                    analysis, figures[ratio], heading, make_slug(str(analysis["name"]), ratio)
                )
            blocks.append(explain_result(analysis))
        if blocks:
            sections.append(Section(title, intro, blocks))
    return sections


def shade_gain(
    axes: Axes,
    x: Sequence[float],
    low: Sequence[float] | np.ndarray,
    high: Sequence[float] | np.ndarray,
    label: str,
    color: str,
) -> None:
    """Shade the area between two lines where the second is above the first."""
    under = np.asarray(low)
    over = np.asarray(high)
    look = {"color": color, "alpha": 0.2, "linewidth": 0, "label": label}
    axes.fill_between(x, under, over, where=over >= under, interpolate=True, **look)


def _show_attention(
    analysis: Analysis, figures: Mapping, heading: str, name: str
) -> Iterator[Block]:
    """Yield a chart like the paper's Fig. mechanism, and a table of the averages over layers."""
    caches = figures["caches"]
    layers = range(len(caches["base"]["context"]))
    masses = {
        cache: {part: 100 * np.array(found[part]) for part in PARTS}
        for cache, found in caches.items()
    }
    marks = CACHES | {"restored": ALONE}

    def draw(axes: Axes) -> None:
        for cache, found in masses.items():
            plot_line(axes, marks[cache], layers, found["context"])
        if "restored" in masses:
            restored_mass = masses["restored"]["context"] + masses["restored"]["restore"]
            plot_line(axes, WHOLE, layers, restored_mass)
            base_mass = masses["base"]["context"]
            shade_gain(
                axes, layers, base_mass, restored_mass, "what restoring brings back", charts.BLUE
            )
        axes.set(xlabel="layer", ylabel="attention (%)", ylim=(0, None))
        set_ticks(axes, range(0, len(layers), -(-len(layers) // 9)))

    panel = Panel("", draw, charts.NARROW if len(layers) <= FEW else charts.WIDE, 3.3)
    data = [
        {"cache": cache, "layer": layer, **{part: found[part][layer] for part in PARTS}}
        for cache, found in caches.items()
        for layer in layers
    ]
    note = (
        f"{analysis['documents']:,} contexts. Mean attention mass of the last question token on "
        "context pairs that are "
        "no sinks, in percent of all its attention. Shaded: by how much context and restore cache "
        "together get more "
        "than the context of the base."
    )
    title = f"Attention on the context by layer: {heading}"
    yield make_chart(f"{name}-layers", title, [panel], note, data)
    columns = {
        "cache": _label_cache,
        "context": _format_context_share,
        "restore cache": lambda row: format_percent(row["average_restore"], 2),
        "sinks": lambda row: format_percent(row["average_sinks"], 2),
        "question": lambda row: format_percent(row["average_question"], 2),
        f"layers below {format_percent(FLOOR)} of context": lambda row: (
            f"{row['layers_below']} of {len(layers)}"
        ),
        "KL(full || cache) of layers": lambda row: _format_range(row, "kl_profile", 3),
        "KL(cache || full) of layers": lambda row: _format_range(row, "kl_profile_backward", 3),
        "KL of attention in a layer": lambda row: _format_range(row, "kl_attention", 3),
    }
    note = (
        "Shares of the last question token's attention, means over layers; KL in nats, of the "
        "context's mass as it is "
        "spread over layers and of the attention over retained columns (– where a layer has no "
        "mass, so that it is not "
        "defined); 95 % bootstrap intervals over contexts."
    )
    data = [{"cache": cache, **_flatten_numbers(found)} for cache, found in caches.items()]
    yield Table.from_figures(
        f"{name}-averages", f"Attention in numbers: {heading}", data, columns, note
    )


def _flatten_numbers(figures: Mapping) -> dict[str, object]:
    """Return the figures that are a single number or an interval, under the names of their columns
    in the CSV file.
    """
    columns: dict[str, object] = {
        f"average_{part}": value for part, value in figures.get("average", {}).items()
    }
    for key, value in figures.items():
        if key.endswith("_interval"):
            columns |= zip(
                (key.replace("_interval", end) for end in ("_low", "_high")), value, strict=True
            )
        elif isinstance(value, (int, float)):
            columns[key] = value
    return columns


def _format_range(row: Mapping, key: str, digits: int) -> str:
    """Return a figure of `_flatten_numbers` with its interval, or a dash if it is unknown."""
    if row.get(key) is None:
        return UNKNOWN
    return format_score(row[key], row[f"{key}_low"], row[f"{key}_high"], digits)


def _format_context_share(row: Mapping) -> str:
    """Return the attention on the context with its interval, if it has one."""
    text = format_percent(row["average_context"], 2)
    low = row["context_low"]
    high = row["context_high"]
    if low is None or high is None:
        return text
    return f"{text} ({format_percent(low, 2)} to {format_percent(high, 2)})"


def _label_cache(row: Mapping) -> str:
    return CACHES[row["cache"]].label


def _show_divergence(
    analysis: Analysis, figures: Mapping, heading: str, name: str
) -> Iterator[Block]:
    """Yield a table of the KL of next-token distributions, such as the paper's 7.3 and 3.8."""
    data = [
        {"where": where, "cache": cache, **_flatten_numbers(found[where])}
        for where in WHERE
        for cache, found in figures["caches"].items()
    ]
    columns = {
        "where": lambda row: WHERE[row["where"]],
        "cache": _label_cache,
        "KL(full || cache)": lambda row: _format_range(row, "forward", 2),
        "KL(cache || full)": lambda row: _format_range(row, "backward", 2),
        "mean of both": lambda row: _format_range(row, "symmetric", 2),
        "same likeliest token": lambda row: format_percent(row["agreement"]),
    }
    note = (
        "KL in nats, with 95 % bootstrap intervals over contexts; 0 is the full cache's own "
        "distribution."
    )
    yield Table.from_figures(
        name, f"Next-token distributions: {heading}", data, columns, note, left=(0, 1)
    )


def _show_survivors(
    analysis: Analysis, figures: Mapping, heading: str, name: str
) -> Iterator[Block]:
    """Yield a chart of kept pairs by layer, position and head, and a table by kind of token."""
    caches = figures["caches"]
    title = f"Where kept pairs lie: {heading}"
    layers, positions = (
        {CACHES[cache]: found[key] for cache, found in caches.items()}
        for key in ("share_per_layer", "kept_per_position")
    )
    panels = [
        Panel("By layer", lambda axes: survivor_plots.plot_layers(axes, layers)),
        Panel("By position", lambda axes: survivor_plots.plot_positions(axes, positions)),
    ]
    for cache, found in caches.items():
        kept = np.array(found["kept_per_head"])
        heads = f"{CACHES[cache].label}: by head"
        panels.append(
            Panel(
                heads,
                lambda axes, kept=kept: survivor_plots.plot_heads(axes, kept),
                height=survivor_plots.get_heads_height(len(kept)),
            )
        )
    data = [
        {"cache": cache, "by": by, "index": index, "share": share}
        for cache, found in caches.items()
        for by, key in (
            ("layer", "share_per_layer"),
            ("twentieth", "kept_per_position"),
            ("head", "kept_per_head"),
        )
        for index, share in enumerate(np.ravel(found[key]).tolist())
    ]
    note = (
        f"Means over {analysis['documents']:,} contexts. By layer: its share of all held context "
        "pairs; by position: "
        "the share of pairs kept in every twentieth of the context; by head: percent of the "
        "context's tokens."
    )
    yield make_chart(name, title, panels, note, data)
    data = [
        {"cache": cache, "class": kind, **share}
        for cache, found in caches.items()
        for kind, share in found["classes"].items()
    ]
    dropped = ", ".join(
        f"{CACHES[cache].label} {format_percent(found['forgotten'])}"
        for cache, found in caches.items()
    )
    note = f"Tokens of the context that no head holds: {dropped}."
    if "overlap" in figures:
        overlap = _format_range(_flatten_numbers(figures["overlap"]), "jaccard", 3)
        note += f" Pairs kept by both over pairs kept by either: {overlap}."
    columns = {
        "cache": _label_cache,
        "kind of token": lambda row: row["class"],
        "of the context's tokens": lambda row: format_percent(row["tokens"]),
        "of their pairs kept": lambda row: format_percent(row["kept"]),
        "of all held pairs": lambda row: format_percent(row["held"]),
    }
    yield Table.from_figures(
        f"{name}-kinds",
        f"Kinds of tokens that survive: {heading}",
        data,
        columns,
        note,
        left=(0, 1),
    )


def _show_restore_attention(
    analysis: Analysis, figures: Mapping, heading: str, name: str
) -> Iterator[Block]:
    """Yield a bar chart of each restore token's attention, and tables of the tokens that it attends
    to most.
    """
    masses = {part: np.mean(figures[part], axis=0) for part in READ}  # (n,), means over layers
    tokens = [str(token) for token in range(len(masses["kept"]))]
    parts = {mark: 100 * masses[part] for part, mark in READ.items()}
    panel = make_bars(
        "", "attention (%)", tokens, parts, [[""] * len(tokens)], stacked=True, width=charts.WIDE
    )
    title = f"Attention of the restore pass, by restore token: {heading}"
    seen, blind = (format_percent(figures["kept_share"][key]) for key in ("seen", "blind"))
    note = (
        f"Mean over layers, heads and {analysis['documents']:,} contexts. Of their attention on "
        f"the context {seen} "
        f"falls on pairs that are kept; looking at all pairs alike would put {blind} there."
    )
    data = [
        {
            "restore_token": int(token),
            **{part: float(mass[int(token)]) for part, mass in masses.items()},
        }
        for token in tokens
    ]
    yield make_chart(name, title, [panel], note, data)
    for example in figures["examples"]:
        rows = [
            [
                str(token),
                "  ".join(f"{word['text']!r} {format_percent(word['weight'])}" for word in words),
            ]
            for token, words in enumerate(example["tokens"][:FEW])
        ]
        data = [
            {"restore_token": token, **word}
            for token, words in enumerate(example["tokens"])
            for word in words
        ]
        document = str(example["document"])
        title = f"Context {document}: what restore tokens attend to most, {heading}"
        head = [
            "restore token",
            "tokens of the context, with the share of its attention on the context",
        ]
        slug = make_slug(name, "context", document)
        yield Section(title, blocks=[Table(slug, title, head, rows, "", data, left=(0, 1))])


KINDS = {
    "attention": (
        "Attention on the context",
        "Eviction takes away pairs that the last token of a question would attend to. The chart "
        "shows how much of its "
        "attention still reaches the context, layer by layer, and how much of the loss the restore "
        "cache brings back.",
        _show_attention,
    ),
    "divergence": (
        "Distance from the full cache",
        "How far the model's next-token distribution is from what it would say with the whole "
        "cache; lower is better.",
        _show_divergence,
    ),
    "survivors": (
        "What survives",
        "Which layers, positions and kinds of tokens the kept pairs belong to.",
        _show_survivors,
    ),
    "restore_attention": (
        "Where restore tokens look",
        "The restore pass reads the full cache before eviction: how much of its attention falls on "
        "pairs that are kept "
        "and on pairs about to be evicted, and which tokens those are.",
        _show_restore_attention,
    ),
}
