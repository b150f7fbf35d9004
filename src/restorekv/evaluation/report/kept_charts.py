"""Charts of what survives an eviction and of where the restore tokens look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from restorekv.evaluation.report import draw
from restorekv.evaluation.report.blocks import Block, Chart, Details, Mark, Panel, percent, table
from restorekv.evaluation.report.names import slug

BASE = Mark("base alone", draw.VERMILION, "o", dashed=True, hollow=True)
RESTORED = Mark("restored", draw.BLUE, "o")
MARKS = {"base": BASE, "restored": RESTORED}
PARTS = {
    "kept": Mark("pairs that are kept", draw.BLUE, hatch="//"),
    "evicted": Mark("pairs about to be evicted", draw.VERMILION, hatch="\\\\"),
    "sinks": Mark("sinks", draw.MUTED, hatch=""),
    "restore": Mark("earlier restore tokens", draw.GREEN, hatch=".."),
    "itself": Mark("itself", draw.ORANGE, hatch="xx"),
}
MOST = 12  # restore tokens shown one by one


def heading(told: Mapping, ratio: str) -> str:
    return f"{told['label']}, r = {ratio}"


def survivors(told: Mapping, ratio: str) -> Iterator[Block]:
    """By layer and position as lines, by kind of token as a table, by head as maps."""
    caches = told["figures"][ratio]["caches"]
    legend = [MARKS[name] for name in caches]
    panels = [Panel(partial(draw_layers, caches), "By layer"), Panel(partial(draw_positions, caches), "By position")]
    data = [
        {"cache": name, "by": by, "index": index, "share": share}
        for name, cache in caches.items()
        for by, key in (("layer", "share_per_layer"), ("twentieth", "kept_per_position"))
        for index, share in enumerate(cache[key])
    ]
    title = f"Where kept pairs lie: {heading(told, ratio)}"
    note = (
        f"Means over {told['documents']:,} contexts. By layer: its share of all held context pairs (dotted: an even "
        "split); by position: the share of pairs kept in every twentieth of the context."
    )
    yield Chart(slug(str(told["name"]), ratio), title, panels, title, data, note, legend)
    yield classes(told, ratio)
    heads = [
        Panel(
            partial(draw_heads, cache["kept_per_head"]),
            f"{MARKS[name].label}: by head",
            height=2.0 + 0.09 * layers(cache),
        )
        for name, cache in caches.items()
    ]
    rows = [
        {"cache": name, "layer": layer, "head": head, "kept": share}
        for name, cache in caches.items()
        for layer, shares in enumerate(cache["kept_per_head"])
        for head, share in enumerate(shares)
    ]
    title = f"Context tokens kept by each head: {heading(told, ratio)}"
    chart = Chart(
        slug(str(told["name"]), ratio, "heads"), title, heads, title, rows, "Percent of the context's tokens."
    )
    yield Details(title, [chart])


def layers(cache: Mapping) -> int:
    return len(cache["kept_per_head"])


def draw_layers(caches: Mapping, axes: Axes) -> None:
    for name, cache in caches.items():
        share = 100 * np.array(cache["share_per_layer"])
        draw.line(axes, MARKS[name], np.arange(len(share)), share)
    axes.axhline(100 / len(share), color=draw.MUTED, linestyle=":", linewidth=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="layer", ylabel="share of held pairs (%)")


def draw_positions(caches: Mapping, axes: Axes) -> None:
    for name, cache in caches.items():
        share = 100 * np.array(cache["kept_per_position"])
        middles = (np.arange(len(share)) + 0.5) * 100 / len(share)
        draw.line(axes, MARKS[name], middles, share)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 100)
    axes.set(xlabel="position in the context (%)", ylabel="pairs kept (%)")


def draw_heads(kept: list[list[float]], axes: Axes) -> None:
    """Percent, with the number in the cell where there is room."""
    share = 100 * np.array(kept)
    axes.grid(visible=False)
    image = axes.pcolormesh(share, cmap=draw.SEQUENTIAL, vmin=0, vmax=max(share.max(), 1e-9))
    axes.figure.colorbar(image, ax=axes, label="tokens kept (%)")
    if share.size <= 64:
        for (layer, head), value in np.ndenumerate(share):
            ink = "black" if value > share.max() / 2 else "white"
            axes.text(head + 0.5, layer + 0.5, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=8)
    axes.invert_yaxis()
    for axis, size in ((axes.xaxis, share.shape[1]), (axes.yaxis, share.shape[0])):
        step = -(-size // 8)
        axis.set_ticks(np.arange(0, size, step) + 0.5, [str(index) for index in range(0, size, step)])
    axes.set(xlabel="KV head", ylabel="layer")


def classes(told: Mapping, ratio: str) -> Block:
    """Kinds of tokens, and the overlap of base and restored."""
    figures = told["figures"][ratio]
    rows, data = [], []
    for name, cache in figures["caches"].items():
        for kind, share in cache["classes"].items():
            rows.append([MARKS[name].label, kind, *(percent(share[key]) for key in ("tokens", "kept", "held"))])
            data.append({"cache": name, "class": kind, **share})
    forgotten = ", ".join(
        f"{MARKS[name].label} {percent(cache['forgotten'])}" for name, cache in figures["caches"].items()
    )
    note = f"Tokens of the context that no head holds: {forgotten}."
    if "overlap" in figures:
        low, high = figures["overlap"]["jaccard_interval"]
        note += (
            f" Pairs kept by both over pairs kept by either: {figures['overlap']['jaccard']:.3f} "
            f"(95 % interval {low:.3f} to {high:.3f})."
        )
    head = ["cache", "kind of token", "of the context's tokens", "of their pairs kept", "of all held pairs"]
    title = f"Kinds of tokens that survive: {heading(told, ratio)}"
    return table(slug(str(told["name"]), ratio, "kinds"), title, head, rows, note, data, left=(0, 1))


def gaze(told: Mapping, ratio: str) -> Iterator[Block]:
    """Bars by restore token, and the tokens looked at most."""
    figures = told["figures"][ratio]
    masses = {part: np.array(figures[part]).mean(0) for part in PARTS}  # (n,), means over layers
    tokens = len(masses["kept"])
    seen, blind = (figures["kept_share"][key] for key in ("seen", "blind"))
    title = f"Attention of the restore pass: {heading(told, ratio)}"
    note = (
        f"Mean over layers, heads and {told['documents']:,} contexts. Of their attention on the context "
        f"{percent(seen)} falls on pairs that are kept; looking at all pairs alike would put {percent(blind)} there."
    )
    data = [
        {"restore_token": token, **{part: float(mass[token]) for part, mass in masses.items()}}
        for token in range(tokens)
    ]
    panel = Panel(partial(draw_bars, masses), height=1.5 + 0.26 * min(tokens, 24))
    yield Chart(slug(str(told["name"]), ratio), title, [panel], title, data, note, list(PARTS.values()))
    yield from seen_most(told, ratio)


def draw_bars(masses: Mapping[str, np.ndarray], axes: Axes) -> None:
    """One bar a restore token."""
    draw.bars(axes, {mark: 100 * masses[part] for part, mark in PARTS.items()})
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, 100)
    axes.set(xlabel="attention (%)", ylabel="restore token")


def seen_most(told: Mapping, ratio: str) -> Iterator[Block]:
    """Of some contexts, the tokens that each restore token attends to most."""
    for example in told["figures"][ratio]["examples"]:
        rows = [
            [token, "  ".join(f"{word['text']!r} {percent(word['weight'])}" for word in words)]
            for token, words in enumerate(example["tokens"][:MOST])
        ]
        data = [
            {"document": example["document"], "restore_token": token, **word}
            for token, words in enumerate(example["tokens"])
            for word in words
        ]
        title = f"Context {example['document']}: what restore tokens attend to most, {heading(told, ratio)}"
        name = slug(str(told["name"]), ratio, "context", str(example["document"]))
        head = ["restore token", "tokens of the context, with the share of its attention on the context"]
        yield Details(title, [table(name, title, head, rows, "", data, left=(0, 1))])
