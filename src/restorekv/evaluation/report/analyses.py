"""What analyses found: attention by layer and its recovery, distances from the full cache, survivors, gaze."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from restorekv.errors import RestoreKVError
from restorekv.evaluation.analysis.run import RENAMED
from restorekv.evaluation.charts import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    NARROW,
    ORANGE,
    SKY,
    VERMILION,
    WIDE,
    Area,
    Axis,
    Bars,
    Chart,
    Line,
    Mark,
    Panel,
    bars,
    index_axis,
)  # fmt: skip
from restorekv.evaluation.report.conventions import flat, shown
from restorekv.evaluation.report.names import slug
from restorekv.evaluation.report.page import Block, Details, Points, Section
from restorekv.evaluation.survivors import heads_panel, layers_panel, positions_panel
from restorekv.evaluation.tables import ABSENT, Table, TableCell, between, number, percent, table

FOLDER = "analysis"
BASE = Mark("base alone", VERMILION, "o", dashed=True, hollow=True)
RESTORED = Mark("restored", BLUE, "o")
CACHES = {"full": Mark("full cache", INK, dashed=True), "base": BASE, "restored": RESTORED}
ALONE, WHOLE = Mark("restored: context alone", SKY, "s"), Mark("restored: context and restore cache", BLUE, "o")
RECOVERED = Mark("what restoring brings back", BLUE)
PARTS = ("context", "sinks", "restore", "question")  # of the attention
READ = {
    "kept": Mark("pairs that are kept", BLUE, hatch="//"),
    "evicted": Mark("pairs about to be evicted", VERMILION, hatch="\\\\"),
    "sinks": Mark("sinks", MUTED),
    "restore": Mark("earlier restore tokens", GREEN, hatch=".."),
    "itself": Mark("itself", ORANGE, hatch="xx"),
}
KLS = ("kl_profile", "kl_profile_backward", "kl_attention")
FEW = 12  # layers that a narrow chart has room for; restore tokens that are shown one by one
FLOOR = 0.001  # of layers_below
Analysis = Mapping[str, object]


def read(folder: Path) -> list[Analysis]:
    """Reads every file of a kind of result, by name."""
    analyses = []
    for path in sorted(folder.glob("*.json")):
        try:
            file = json.loads(path.read_text(encoding="utf-8"))
            analyses.append(
                {**file, "name": slug(path.stem), "conventions": file["conventions"], "label": file["label"]}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise RestoreKVError(f"{path} is no result of restorekv ({error}); remove it.") from error
    return analyses


def sections(folder: Path) -> list[Section]:
    """Returns one section for each kind of analysis that is there, the tightest ratio first."""
    files, sections = read(folder / FOLDER), []
    for kind, (title, intro, blocks_of) in KINDS.items():
        blocks: list[Block] = []
        for analysis in files:
            if RENAMED.get(analysis["analysis"], analysis["analysis"]) == kind:
                figures = analysis.get("figures")
                if not isinstance(figures, dict):
                    raise RestoreKVError(f"The analysis {analysis['label']} has no figures; make it again.")
                for ratio in sorted(figures, key=float):
                    heading, name = f"{analysis['label']}, r = {ratio}", slug(str(analysis["name"]), ratio)
                    blocks += blocks_of(analysis, figures[ratio], heading, name)
                blocks.append(explained(analysis))
        if blocks:
            sections.append(Section(title, intro, blocks))
    return sections


def explained(analysis: Analysis) -> Details:
    """Returns the file's own definitions and conventions."""
    conventions = [f"{key} {shown(value)}" for key, value in flat(analysis["conventions"]).items()]
    points = [f"{key}: {words}" for key, words in analysis["definitions"].items()]
    return Details(f"Definitions and conventions: {analysis['label']}", [Points(points), "; ".join(conventions) + "."])


def attention(analysis: Analysis, figures: Mapping, heading: str, name: str) -> Iterator[Block]:
    """Yields the paper's mechanism figure, and its averages over layers as a table."""
    caches = figures["caches"]
    layers = range(len(caches["base"]["context"]))
    masses = {cache: {part: 100 * np.array(found[part]) for part in PARTS} for cache, found in caches.items()}
    marks = CACHES | {"restored": ALONE}
    content: list[Line | Area] = [Line(marks[cache], layers, found["context"]) for cache, found in masses.items()]
    if "restored" in masses:
        whole = masses["restored"]["context"] + masses["restored"]["restore"]
        content += [Line(WHOLE, layers, whole), Area(RECOVERED, layers, masses["base"]["context"], whole)]
    width = NARROW if len(layers) <= FEW else WIDE
    panel = Panel(content, index_axis("layer", len(layers)), Axis("attention (%)", low=0), width=width, height=3.3)
    data = [
        {"cache": cache, "layer": layer, **{part: found[part][layer] for part in PARTS}}
        for cache, found in caches.items()
        for layer in layers
    ]
    note = (
        f"{analysis['documents']:,} contexts. Mean attention mass of the last question token on context pairs that are "
        "no sinks, in percent of all its attention. Shaded: by how much context and restore cache together get more "
        "than the context of the base."
    )
    title = f"Attention on the context by layer: {heading}"
    yield Chart(f"{name}-layers", title, [panel], f"{title}, a line for each cache", data, note)
    yield averages(caches, heading, name)


def averages(caches: Mapping[str, Analysis], heading: str, name: str) -> Table:
    """Returns masses averaged over layers, and how far the profile is from the full cache's."""
    rows = []
    for cache, found in caches.items():
        mean = found["average"]
        low, high = (percent(share, 2) for share in found["context_interval"])
        masses = [percent(mean[part], 2) for part in ("restore", "sinks", "question")]
        below = f"{found['layers_below']} of {len(found['context'])}"
        context = TableCell(percent(mean["context"], 2), f"{low} to {high}")
        rows.append([CACHES[cache].label, context, *masses, below, *(ranged(found, key, 3) for key in KLS)])
    head = [
        "cache", "context", "restore cache", "sinks", "question", f"layers below {percent(FLOOR)} of context",
        "KL(full || cache) of layers", "KL(cache || full) of layers", "KL of attention in a layer",
    ]  # fmt: skip
    note = (
        "Shares of the last question token's attention, means over layers; KL in nats, of the context's mass as it is "
        "spread over layers and of the attention over retained columns (– where a layer has no mass, so that it is not "
        "defined); 95 % bootstrap intervals over contexts."
    )
    data = [{"cache": cache, **single(found)} for cache, found in caches.items()]
    return table(f"{name}-averages", f"Attention in numbers: {heading}", head, rows, note, data)


def single(figures: Analysis) -> dict[str, object]:
    """Returns the figures of one number or interval, for the CSV file."""
    singles: dict[str, object] = {f"average_{part}": value for part, value in figures.get("average", {}).items()}
    for key, value in figures.items():
        if key.endswith("_interval"):
            singles |= {key.replace("_interval", "_low"): value[0], key.replace("_interval", "_high"): value[1]}
        elif isinstance(value, (int, float)):
            singles[key] = value
    return singles


def ranged(figures: Analysis, key: str, digits: int) -> TableCell:
    """Returns a figure with its interval, or a dash."""
    if figures.get(key) is None:
        return ABSENT
    return TableCell(number(figures[key], digits), between(*figures[f"{key}_interval"], digits))


def divergence(analysis: Analysis, figures: Mapping, heading: str, name: str) -> Iterator[Block]:
    """Yields KL of the next-token distributions, as the paper's 7.3 to 3.8."""
    rows, data = [], []
    for where, label in {"first": "first answer token", "answer": "tokens of the answer"}.items():
        for cache, found in figures["caches"].items():
            kls = [ranged(found[where], kind, 2) for kind in ("forward", "backward", "symmetric")]
            rows.append([label, CACHES[cache].label, *kls, percent(found[where]["agreement"])])
            data.append({"where": where, "cache": cache, **single(found[where])})
    head = ["where", "cache", "KL(full || cache)", "KL(cache || full)", "mean of both", "same likeliest token"]
    note = "KL in nats, with 95 % bootstrap intervals over contexts; 0 is the full cache's own distribution."
    yield table(name, f"Next-token distributions: {heading}", head, rows, note, data, left=(0, 1))


def survivors(analysis: Analysis, figures: Mapping, heading: str, name: str) -> Iterator[Block]:
    """Yields kept pairs by layer, position and head as charts, by kind of token as a table."""
    caches, title = figures["caches"], f"Where kept pairs lie: {heading}"
    layers, positions = (
        {CACHES[cache]: found[key] for cache, found in caches.items()}
        for key in ("share_per_layer", "kept_per_position")
    )
    heads = [heads_panel(f"{CACHES[cache].label}: by head", found["kept_per_head"]) for cache, found in caches.items()]
    data = [
        {"cache": cache, "by": by, "index": index, "share": share}
        for cache, found in caches.items()
        for by, key in (("layer", "share_per_layer"), ("twentieth", "kept_per_position"), ("head", "kept_per_head"))
        for index, share in enumerate(np.ravel(found[key]).tolist())
    ]
    note = (
        f"Means over {analysis['documents']:,} contexts. By layer: its share of all held context pairs; by position: "
        "the share of pairs kept in every twentieth of the context; by head: percent of the context's tokens."
    )
    yield Chart(name, title, [layers_panel(layers), positions_panel(positions), *heads], title, data, note)
    rows, data = [], []
    for cache, found in caches.items():
        for kind, share in found["classes"].items():
            rows.append([CACHES[cache].label, kind, *(percent(share[key]) for key in ("tokens", "kept", "held"))])
            data.append({"cache": cache, "class": kind, **share})
    lost = ", ".join(f"{CACHES[cache].label} {percent(found['forgotten'])}" for cache, found in caches.items())
    note = f"Tokens of the context that no head holds: {lost}."
    if "overlap" in figures:
        overlap = ranged(figures["overlap"], "jaccard", 3)
        note += f" Pairs kept by both over pairs kept by either: {overlap.text} (95 % interval {overlap.small})."
    head = ["cache", "kind of token", "of the context's tokens", "of their pairs kept", "of all held pairs"]
    title = f"Kinds of tokens that survive: {heading}"
    yield table(f"{name}-kinds", title, head, rows, note, data, left=(0, 1))


def gaze(analysis: Analysis, figures: Mapping, heading: str, name: str) -> Iterator[Block]:
    """Yields bars by restore token, and the tokens that each attends to most."""
    masses = {part: np.mean(figures[part], axis=0) for part in READ}  # (n,), means over layers
    tokens = [str(token) for token in range(len(masses["kept"]))]
    panel = bars(Bars(tokens, {mark: 100 * masses[part] for part, mark in READ.items()}), "attention (%)")
    title = f"Attention of the restore pass, by restore token: {heading}"
    seen, blind = (percent(figures["kept_share"][key]) for key in ("seen", "blind"))
    note = (
        f"Mean over layers, heads and {analysis['documents']:,} contexts. Of their attention on the context {seen} "
        f"falls on pairs that are kept; looking at all pairs alike would put {blind} there."
    )
    data = [
        {"restore_token": int(token), **{part: float(mass[int(token)]) for part, mass in masses.items()}}
        for token in tokens
    ]
    yield Chart(name, title, [panel], title, data, note)
    for example in figures["examples"]:
        rows = [
            [token, "  ".join(f"{word['text']!r} {percent(word['weight'])}" for word in words)]
            for token, words in enumerate(example["tokens"][:FEW])
        ]
        data = [{"restore_token": token, **word} for token, words in enumerate(example["tokens"]) for word in words]
        document = str(example["document"])
        title = f"Context {document}: what restore tokens attend to most, {heading}"
        head = ["restore token", "tokens of the context, with the share of its attention on the context"]
        yield Details(title, [table(slug(name, "context", document), title, head, rows, "", data, left=(0, 1))])


KINDS = {
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
        survivors,
    ),
    "restore_attention": (
        "Where restore tokens look",
        "The restore pass reads the full cache before eviction: how much of its attention falls on pairs that are kept "
        "and on pairs about to be evicted, and which tokens those are.",
        gaze,
    ),
}
