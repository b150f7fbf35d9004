"""The table of training data of the paper's appendix, for a mixture next to the paper's own
numbers.
"""

from collections.abc import Mapping

from rich.table import Table

from restorekv.data.mixture import MixtureContext

# Samples, mean and range of the context's tokens; the paper's table "RestoreKV training data
# statistics".
PAPER = {
    "longalpaca": (2488, 7306, 4961, 15237),
    "pg19": (2260, 3071, 3071, 3072),
    "flan": (1500, 898, 512, 9283),
    "total": (6248, 4236, 512, 15237),
}
FIGURES = ("samples", "mean", "shortest", "longest")
REPLACES = {"papers": "longalpaca"}  # a source and the one it replaces


def compute_figures(contexts: list[MixtureContext], manifest: dict) -> list[dict]:
    """Return a row per source and for the total: the number of samples (one per question), and mean
    and range of the context's tokens over the samples.

    `paper` holds the paper's own figures, or None if the mixture has no counterpart there.
    """
    published = {} if manifest.get("mixture") in ("passages", "corpus") else PAPER
    lengths: dict[str, list[int]] = {name: [] for name in manifest["sources"]}
    total: list[int] = []
    for context in contexts:
        # A question is a sample, so a context counts once for each of its questions.
        lengths[context.source] += [context.tokens] * len(context.questions)
    for tokens in lengths.values():
        total += tokens
    lengths["total"] = total
    accounts = {
        **manifest["sources"],
        "total": {"title": "Total", "licenses": manifest["licenses"]},
    }
    rows = []
    for name, tokens in lengths.items():
        paper = published.get(REPLACES.get(name, name))
        row = {
            "source": name,
            "title": accounts[name]["title"],
            "samples": len(tokens),
            "mean": sum(tokens) / len(tokens),
            "shortest": min(tokens),
            "longest": max(tokens),
            "licenses": accounts[name]["licenses"],
            "paper": paper and dict(zip(FIGURES, paper, strict=True)),
        }
        rows.append(row)
    return rows


def make_data_table(rows: list[dict], manifest: dict) -> Table:
    """Return the table of the appendix for a mixture, with the paper's figures in brackets."""
    caption = None
    if any(row["paper"] for row in rows):
        caption = "in brackets: the paper (Qwen3's tokenizer; its first row is LongAlpaca)"
    what = f"{manifest['mixture']} mixture, answers of {manifest['model']['name']}"
    table = Table(
        title=f"Training data ({what}): tokens of the context",
        caption=caption,
        title_justify="left",
    )
    for title in ("source", "samples", "mean", "range", "license"):
        table.add_column(title, justify="left" if title in ("source", "license") else "right")
    for row in rows:
        cells = list(_format_row(row))
        if row["paper"]:
            for index, figure in enumerate(_format_row(row["paper"])):
                cells[index] += f" ({figure})"
        licenses = [f"{name}: {count:,}" for name, count in row["licenses"].items()]
        style = "bold" if row["source"] == "total" else None
        table.add_row(row["title"], *cells, "\n".join(licenses), style=style)
    return table


def _format_row(row: Mapping) -> tuple[str, str, str]:
    return f"{row['samples']:,}", f"{row['mean']:,.0f}", f"{row['shortest']:,}-{row['longest']:,}"


def make_drops_table(manifest: dict) -> Table:
    """Return the table of how many rows and attempts were dropped for which reason."""
    table = Table(title="Left out", title_justify="left")
    for title in ("source", "what", "count"):
        table.add_column(title, justify="right" if title == "count" else "left")
    for source in manifest["sources"].values():
        for what, total in (("dropped", "rows"), ("dropped_attempts", "attempts")):
            for reason, count in source[what].items():
                table.add_row(
                    source["title"], f"{reason} ({total} in all: {source[total]:,})", f"{count:,}"
                )
    return table
