"""What analyses tell: attention by layer and its recovery, distances from the full cache, survivors, gaze."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from restorekv.errors import RestoreKVError
from restorekv.evaluation.analysis.run import RENAMED
from restorekv.evaluation.report import convention, draw, kept_charts
from restorekv.evaluation.report.blocks import (
    NARROW,
    WIDE,
    Block,
    Cell,
    Chart,
    Details,
    Mark,
    Panel,
    Points,
    Section,
    Table,
    number,
    percent,
    table,
)
from restorekv.evaluation.report.names import slug

FOLDER = "analysis"
CACHES = {
    "full": Mark("full cache", draw.INK, dashed=True),
    "base": Mark("base alone", draw.VERMILION, "o", dashed=True, hollow=True),
    "restored": Mark("restored: context alone", draw.SKY, "s"),
}
WHOLE = Mark("restored: context and restore cache", draw.BLUE, "o")
RECOVERED = Mark("what restoring brings back", draw.BLUE, band=True)
NAMES = {"full": "full cache", "base": "base alone", "restored": "restored"}
KLS = ("kl_profile", "kl_profile_backward", "kl_attention")
FEW = 12  # layers that a narrow chart has room for
FLOOR = 0.001  # of layers_below
Told = Mapping[str, object]


def read(folder: Path) -> list[Told]:
    """Every file of a kind of result, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            found.append({**told, "name": slug(path.stem), "conventions": told["conventions"], "label": told["label"]})
        except (ValueError, TypeError, KeyError) as error:
            raise RestoreKVError(f"{path} is no result of restorekv ({error}); remove it.") from error
    return found


def sections(folder: Path) -> list[Section]:
    """One for each kind of analysis that is there."""
    files = read(folder / FOLDER)
    found = []
    for kind, (title, intro, blocks_of) in KINDS.items():
        blocks: list[Block] = []
        for told in files:
            if RENAMED.get(told["analysis"], told["analysis"]) == kind:
                if not isinstance(told.get("figures"), dict):
                    raise RestoreKVError(f"The analysis {told['label']} has no figures; make it again.")
                blocks += [block for ratio in by_tightness(told) for block in blocks_of(told, ratio)]
                blocks.append(explained(told))
        if blocks:
            found.append(Section(title, intro, blocks))
    return found


def by_tightness(told: Told) -> list[str]:
    """Ratios as written in the file, the tightest first."""
    return sorted(told["figures"], key=float)


def explained(told: Told) -> Details:
    """The file's own definitions and conventions."""
    made = [f"{key} {convention.shown(value)}" for key, value in convention.flat(told["conventions"]).items()]
    points = [f"{key}: {words}" for key, words in told["definitions"].items()]
    return Details(f"Definitions and conventions: {told['label']}", [Points(points), "; ".join(made) + "."])


def heading(told: Told, ratio: str) -> str:
    """Which run it was."""
    made = told["conventions"]
    asked = f"{told['questions']:,} questions on {told['documents']:,} contexts" if "questions" in told else ""
    return f"{told['label']}, r = {ratio}" + (f" ({made.get('benchmark', 'bundled')}, {asked})" if asked else "")


def name_of(told: Told, ratio: str, *words: str) -> str:
    return slug(str(told["name"]), ratio, *words)


def attention(told: Told, ratio: str) -> Iterator[Block]:
    """The paper's mechanism figure, and averages over layers as a table."""
    caches = told["figures"][ratio]["caches"]
    title = f"Attention on the context by layer: {heading(told, ratio)}"
    legend = [CACHES[name] for name in caches] + ([WHOLE, RECOVERED] if "restored" in caches else [])
    data = [
        {"cache": name, "layer": layer, **{part: caches[name][part][layer] for part in PARTS}}
        for name in caches
        for layer in range(len(caches[name]["context"]))
    ]
    note = (
        "Mean attention mass of the last question token on context pairs that are no sinks, in percent of all its "
        "attention. Shaded: by how much context and restore cache together get more than the context of the base."
    )
    width = NARROW if len(caches["base"]["context"]) <= FEW else WIDE
    panel = Panel(partial(draw_layers, caches), width=width, height=3.3)
    alt = f"{title}: lines for {', '.join(NAMES[name] for name in caches)}"
    yield Chart(name_of(told, ratio, "layers"), title, [panel], alt, data, note, legend)
    yield averages(told, ratio)


PARTS = ("context", "sinks", "restore", "question")


def draw_layers(caches: Mapping[str, Told], axes: Axes) -> None:
    """Percent by layer; the area between the base and the restored cache's context and restore pairs is shaded."""
    layers = np.arange(len(caches["base"]["context"]))
    for name, cache in caches.items():
        draw.line(axes, CACHES[name], layers, 100 * np.array(cache["context"]), size=4)
    if "restored" in caches:
        low = 100 * np.array(caches["base"]["context"])
        high = 100 * (np.array(caches["restored"]["context"]) + np.array(caches["restored"]["restore"]))
        draw.line(axes, WHOLE, layers, high)
        shade = {"color": draw.BLUE, "alpha": 0.2, "linewidth": 0}
        axes.fill_between(layers, low, high, where=high >= low, interpolate=True, **shade)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="attention (%)")


def averages(told: Told, ratio: str) -> Table:
    """Masses averaged over layers, and how far the profile is from the full cache's."""
    caches = told["figures"][ratio]["caches"]
    rows = []
    for name, cache in caches.items():
        low, high = cache["context_interval"]
        mean = cache["average"]
        row = [
            NAMES[name], Cell(percent(mean["context"], 2), f"{percent(low, 2)} to {percent(high, 2)}"),
            *(percent(mean[part], 2) for part in ("restore", "sinks", "question")),
            f"{cache['layers_below']} of {len(cache['context'])}",
        ]  # fmt: skip
        rows.append([*row, *(ranged(cache, key) for key in KLS)])
    head = [
        "cache", "context", "restore cache", "sinks", "question", f"layers below {percent(FLOOR)} of context",
        "KL(full || cache) of layers", "KL(cache || full) of layers", "KL of attention in a layer",
    ]  # fmt: skip
    note = (
        "Shares of the last question token's attention, means over layers; KL in nats, of the context's mass as it is "
        "spread over layers and of the attention over retained columns (– where a layer has no mass, so that it is not "
        "defined); 95 % bootstrap intervals over contexts."
    )
    data = [{"cache": name, **flat(cache)} for name, cache in caches.items()]
    title = f"Attention in numbers: {heading(told, ratio)}"
    return table(name_of(told, ratio, "averages"), title, head, rows, note, data)


def flat(cache: Told) -> dict[str, object]:
    """Figures of one number or interval, for the CSV."""
    found: dict[str, object] = {f"average_{part}": value for part, value in cache["average"].items()}
    for key, value in cache.items():
        if key.endswith("_interval"):
            found |= {key.replace("_interval", "_low"): value[0], key.replace("_interval", "_high"): value[1]}
        elif isinstance(value, (int, float)):
            found[key] = value
    return found


def ranged(figures: Told, key: str, digits: int = 3) -> Cell:
    """A figure with its interval, or a dash."""
    if figures.get(key) is None:
        return Cell("–", tone="muted")
    low, high = figures[f"{key}_interval"]
    return Cell(number(figures[key], digits), f"{number(low, digits)} to {number(high, digits)}")


def divergence(told: Told, ratio: str) -> Iterator[Block]:
    """KL of the next-token distributions, as the paper's 7.3 to 3.8."""
    caches = told["figures"][ratio]["caches"]
    where = {"first": "first answer token", "answer": "tokens of the answer"}
    kinds = ("forward", "backward", "symmetric")
    rows, data = [], []
    for key, label in where.items():
        for name, cache in caches.items():
            figures = cache[key]
            kls = [ranged(figures, kind, 2) for kind in kinds]
            rows.append([label, NAMES[name], *kls, percent(figures["agreement"])])
            data.append({"where": key, "cache": name, **flat({"average": {}, **figures})})
    head = ["where", "cache", "KL(full || cache)", "KL(cache || full)", "mean of both", "same likeliest token"]
    title = f"Next-token distributions: {heading(told, ratio)}"
    note = "KL in nats, with 95 % bootstrap intervals over contexts; 0 is the full cache's own distribution."
    yield table(name_of(told, ratio), title, head, rows, note, data, left=(0, 1))


Blocks = Callable[[Told, str], Iterator[Block]]
KINDS: dict[str, tuple[str, str, Blocks]] = {
    "attention": (
        "Attention on the context",
        "Eviction takes away pairs that the last token of a question would attend to. The chart shows how much of its "
        "attention still reaches the context, layer by layer, and how much of the loss the restore cache brings back.",
        attention,
    ),
    "divergence": (
        "Distance from the full cache",
        "How far the model's next-token distribution is from what it would say with the whole cache; lower is better.",
        divergence,
    ),
    "survivors": (
        "What survives",
        "Which layers, positions and kinds of tokens the kept pairs belong to.",
        kept_charts.survivors,
    ),
    "restore_attention": (
        "Where restore tokens look",
        "The restore pass reads the full cache before eviction: how much of its attention falls on pairs that are kept "
        "and on pairs about to be evicted, and which tokens those are.",
        kept_charts.gaze,
    ),
}
