"""The appendix's table of training data, printed from a mixture beside the paper's own numbers."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from restorekv.data.mixture import MixtureContext

# Samples, mean and range of the context's tokens; the paper's table "RestoreKV training data statistics".
PAPER = {
    "longalpaca": (2488, 7306, 4961, 15237),
    "pg19": (2260, 3071, 3071, 3072),
    "flan": (1500, 898, 512, 9283),
    "total": (6248, 4236, 512, 15237),
}
FIGURES = ("samples", "mean", "shortest", "longest")
PLACE_OF = {"papers": "longalpaca"}  # what a source stands in for


def figures(found: list[MixtureContext], manifest: dict) -> list[dict]:
    """A row per source and the total: samples (a question each), and the context's tokens over the samples.

    `paper` holds the paper's own figures, or None where the mixture has no counterpart there.
    """
    known = {} if manifest.get("mixture") == "passages" else PAPER
    lengths = {name: [] for name in manifest["sources"]}
    for context in found:
        lengths[context.source] += [context.tokens] * len(context.questions)
    lengths["total"] = [tokens for part in lengths.values() for tokens in part]
    titles = {name: source["title"] for name, source in manifest["sources"].items()} | {"total": "Total"}
    licences = {name: source["licences"] for name, source in manifest["sources"].items()}
    return [
        {
            "source": name,
            "title": titles[name],
            "samples": len(tokens),
            "mean": sum(tokens) / len(tokens),
            "shortest": min(tokens),
            "longest": max(tokens),
            "licences": licences.get(name, manifest["licences"]),
            "paper": (numbers := known.get(PLACE_OF.get(name, name))) and dict(zip(FIGURES, numbers, strict=True)),
        }
        for name, tokens in lengths.items()
    ]


def data_table(rows: list[dict], manifest: dict) -> Table:
    """For a terminal."""
    model, beside = manifest["model"], any(row["paper"] for row in rows)
    table = Table(
        title=f"Training data ({manifest['mixture']} mixture, answers of {model['name']}): tokens of the context",
        caption="in brackets: the paper (Qwen3's tokenizer; its first row is LongAlpaca)" if beside else None,
        title_justify="left",
    )
    for title in ("source", "samples", "mean", "range", "licence"):
        table.add_column(title, justify="left" if title in ("source", "licence") else "right")
    for row in rows:
        own = told(row)
        paper = [f" ({each})" for each in told(row["paper"])] if row["paper"] else [""] * len(own)
        table.add_row(
            row["title"],
            *(f"{mine}{theirs}" for mine, theirs in zip(own, paper, strict=True)),
            "\n".join(f"{name}: {count:,}" for name, count in row["licences"].items()),
            style="bold" if row["source"] == "total" else None,
        )  # fmt: skip
    return table


def told(figures: Mapping) -> tuple[str, str, str]:
    """Samples, mean and range, as the table shows them."""
    return f"{figures['samples']:,}", f"{figures['mean']:,.0f}", f"{figures['shortest']:,}-{figures['longest']:,}"


def left_out(manifest: dict) -> Table:
    """What was dropped, by source and reason."""
    table = Table(title="Left out", title_justify="left")
    for title in ("source", "what", "count"):
        table.add_column(title, justify="right" if title == "count" else "left")
    for source in manifest["sources"].values():
        for what, kept in (("dropped", "rows"), ("dropped_attempts", "attempts")):
            for reason, count in source[what].items():
                table.add_row(source["title"], f"{reason} ({kept} in all: {source[kept]:,})", f"{count:,}")
    return table
