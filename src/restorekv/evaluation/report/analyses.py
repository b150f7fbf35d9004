"""What analyses found: attention by layer, distances from the full cache, survivors, what restore tokens attend to."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts
from restorekv.evaluation.charts import Axis, Chart, Mark, Panel
from restorekv.evaluation.report.kept import shown
from restorekv.evaluation.report.page import Block, Details, Points, Section
from restorekv.evaluation.results import flat
from restorekv.evaluation.survivors import heads_panel, layers_panel, positions_panel
from restorekv.evaluation.tables import ABSENT, Table, TableCell, between, number, percent, slug
from restorekv.files import read_json

FOLDER = "analysis"
BASE = Mark("base alone", charts.VERMILION, "o", dashed=True, hollow=True)
RESTORED = Mark("restored", charts.BLUE, "o")
CACHES = {"full": Mark("full cache", charts.INK, dashed=True), "base": BASE, "restored": RESTORED}
ALONE = Mark("restored: context alone", charts.SKY, "s")
WHOLE = Mark("restored: context and restore cache", charts.BLUE, "o")
RECOVERED = Mark("what restoring brings back", charts.BLUE)
PARTS = ("context", "sinks", "restore", "question")  # of the attention
READ = {
    "kept": Mark("pairs that are kept", charts.BLUE, hatch="//"),
    "evicted": Mark("pairs about to be evicted", charts.VERMILION, hatch="\\\\"),
    "sinks": Mark("sinks", charts.MUTED),
    "restore": Mark("earlier restore tokens", charts.GREEN, hatch=".."),
    "itself": Mark("itself", charts.ORANGE, hatch="xx"),
}
WHERE = {"first": "first answer token", "answer": "tokens of the answer"}
FEW = 12  # layers that a narrow chart has room for; restore tokens that are shown one by one
FLOOR = 0.001  # of layers_below
Analysis = Mapping[str, object]


def read(folder: Path) -> list[Analysis]:
    """Reads every file of a kind of result, by name."""
    analyses = []
    for path in sorted(folder.glob("*.json")):
        try:
            file = read_json(path, str(path))
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
            if analysis["analysis"] == kind:
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
    content = [charts.Line(marks[cache], layers, found["context"]) for cache, found in masses.items()]
    if "restored" in masses:
        whole = masses["restored"]["context"] + masses["restored"]["restore"]
        content += [charts.Line(WHOLE, layers, whole)]
        content += [charts.Area(RECOVERED, layers, masses["base"]["context"], whole)]
    width = charts.NARROW if len(layers) <= FEW else charts.WIDE
    x = charts.index_axis("layer", len(layers))
    panel = Panel(content, x, Axis("attention (%)", low=0), width=width, height=3.3)
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
    columns = {
        "cache": cache_label,
        "context": lambda row: TableCell(
            percent(row["average_context"], 2),
            f"{percent(row['context_low'], 2)} to {percent(row['context_high'], 2)}",
        ),
        "restore cache": lambda row: percent(row["average_restore"], 2),
        "sinks": lambda row: percent(row["average_sinks"], 2),
        "question": lambda row: percent(row["average_question"], 2),
        f"layers below {percent(FLOOR)} of context": lambda row: f"{row['layers_below']} of {len(layers)}",
        "KL(full || cache) of layers": lambda row: ranged(row, "kl_profile", 3),
        "KL(cache || full) of layers": lambda row: ranged(row, "kl_profile_backward", 3),
        "KL of attention in a layer": lambda row: ranged(row, "kl_attention", 3),
    }
    note = (
        "Shares of the last question token's attention, means over layers; KL in nats, of the context's mass as it is "
        "spread over layers and of the attention over retained columns (– where a layer has no mass, so that it is not "
        "defined); 95 % bootstrap intervals over contexts."
    )
    data = [{"cache": cache, **numbers(found)} for cache, found in caches.items()]
    yield Table.of(f"{name}-averages", f"Attention in numbers: {heading}", data, columns, note)


def numbers(figures: Analysis) -> dict[str, object]:
    """Returns the figures of one number or interval, by the names of their columns in the CSV file."""
    columns: dict[str, object] = {f"average_{part}": value for part, value in figures.get("average", {}).items()}
    for key, value in figures.items():
        if key.endswith("_interval"):
            columns |= zip((key.replace("_interval", end) for end in ("_low", "_high")), value, strict=True)
        elif isinstance(value, (int, float)):
            columns[key] = value
    return columns


def ranged(row: Mapping, key: str, digits: int) -> TableCell:
    """Returns a figure of `numbers` with its interval, or a dash."""
    if row.get(key) is None:
        return ABSENT
    return TableCell(number(row[key], digits), between(row[f"{key}_low"], row[f"{key}_high"], digits))


def cache_label(row: Mapping) -> str:
    return CACHES[row["cache"]].label


def divergence(analysis: Analysis, figures: Mapping, heading: str, name: str) -> Iterator[Block]:
    """Yields KL of the next-token distributions, as the paper's 7.3 to 3.8."""
    data = [
        {"where": where, "cache": cache, **numbers(found[where])}
        for where in WHERE
        for cache, found in figures["caches"].items()
    ]
    columns = {
        "where": lambda row: WHERE[row["where"]],
        "cache": cache_label,
        "KL(full || cache)": lambda row: ranged(row, "forward", 2),
        "KL(cache || full)": lambda row: ranged(row, "backward", 2),
        "mean of both": lambda row: ranged(row, "symmetric", 2),
        "same likeliest token": lambda row: percent(row["agreement"]),
    }
    note = "KL in nats, with 95 % bootstrap intervals over contexts; 0 is the full cache's own distribution."
    yield Table.of(name, f"Next-token distributions: {heading}", data, columns, note, left=(0, 1))


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
    data = [
        {"cache": cache, "class": kind, **share}
        for cache, found in caches.items()
        for kind, share in found["classes"].items()
    ]
    lost = ", ".join(f"{CACHES[cache].label} {percent(found['forgotten'])}" for cache, found in caches.items())
    note = f"Tokens of the context that no head holds: {lost}."
    if "overlap" in figures:
        overlap = ranged(numbers(figures["overlap"]), "jaccard", 3)
        note += f" Pairs kept by both over pairs kept by either: {overlap.text} (95 % interval {overlap.small})."
    columns = {
        "cache": cache_label,
        "kind of token": "class",
        "of the context's tokens": lambda row: percent(row["tokens"]),
        "of their pairs kept": lambda row: percent(row["kept"]),
        "of all held pairs": lambda row: percent(row["held"]),
    }
    yield Table.of(f"{name}-kinds", f"Kinds of tokens that survive: {heading}", data, columns, note, left=(0, 1))


def restore_attention(analysis: Analysis, figures: Mapping, heading: str, name: str) -> Iterator[Block]:
    """Yields bars by restore token, and the tokens that each attends to most."""
    masses = {part: np.mean(figures[part], axis=0) for part in READ}  # (n,), means over layers
    tokens = [str(token) for token in range(len(masses["kept"]))]
    panel = charts.bars(charts.Bars(tokens, {mark: 100 * masses[part] for part, mark in READ.items()}), "attention (%)")
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
        yield Details(title, [Table(slug(name, "context", document), title, head, rows, "", data, left=(0, 1))])


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
        restore_attention,
    ),
}
