"""The appendix's table of training data, made from a mixture next to the paper's own numbers."""

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
    """Return a row per source and the total: samples (one per question), and the context's tokens
    over the samples.

    `paper` holds the paper's own figures, or None where the mixture has no counterpart there.
    """
    published = {} if manifest.get("mixture") == "passages" else PAPER
    lengths = {name: [] for name in manifest["sources"]}
    for context in contexts:
        lengths[context.source] += [context.tokens] * len(context.questions)
    lengths["total"] = [tokens for part in lengths.values() for tokens in part]
    accounts = {
        **manifest["sources"],
        "total": {"title": "Total", "licenses": manifest["licenses"]},
    }
    return [
        {
            "source": name,
            "title": accounts[name]["title"],
            "samples": len(tokens),
            "mean": sum(tokens) / len(tokens),
            "shortest": min(tokens),
            "longest": max(tokens),
            "licenses": accounts[name]["licenses"],
            "paper": (row := published.get(REPLACES.get(name, name)))
            and dict(zip(FIGURES, row, strict=True)),
        }
        for name, tokens in lengths.items()
    ]


def make_data_table(rows: list[dict], manifest: dict) -> Table:
    model = manifest["model"]
    published = any(row["paper"] for row in rows)
    table = Table(
        title=f"Training data ({manifest['mixture']} mixture, answers of {model['name']}): tokens of the context",
        caption="in brackets: the paper (Qwen3's tokenizer; its first row is LongAlpaca)"
        if published
        else None,
        title_justify="left",
    )
    for title in ("source", "samples", "mean", "range", "license"):
        table.add_column(title, justify="left" if title in ("source", "license") else "right")
    for row in rows:
        own = _format_row(row)
        paper = (
            [f" ({each})" for each in _format_row(row["paper"])]
            if row["paper"]
            else [""] * len(own)
        )
        table.add_row(
            row["title"],
            *(f"{mine}{theirs}" for mine, theirs in zip(own, paper, strict=True)),
            "\n".join(f"{name}: {count:,}" for name, count in row["licenses"].items()),
            style="bold" if row["source"] == "total" else None,
        )
    return table


def _format_row(row: Mapping) -> tuple[str, str, str]:
    return f"{row['samples']:,}", f"{row['mean']:,.0f}", f"{row['shortest']:,}-{row['longest']:,}"


def make_drops_table(manifest: dict) -> Table:
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
