"""An evaluation as rich tables and as JSON rows."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from restorekv.evaluate import FULL, Evaluation

NAMES = {
    "kvzip": "KVzip",
    "kvzip+": "KVzip+",
    "contrastkv": "ContrastKV",
    "contrastkv-simple": "ContrastKV (simplified)",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "fastkvzip": "Fast KVzip",
    "am-fast": "AM-fast",
    "kvzap": "KVzap",
    "expected-attention": "Expected Attention",
    "keydiff": "KeyDiff",
    "knorm": "Knorm",
    "streaming": "StreamingLLM",
    "tova": "TOVA",
    "random": "Random",
}
RESTORED = {"kvzip": "RestoreKV", "kvzip+": "RestoreKV+"}


def name(evictor: str, restored: bool) -> str:
    """What the paper calls a method."""
    base = NAMES.get(evictor, evictor)
    return RESTORED.get(evictor, f"{base} + RestoreKV") if restored else base


def scores(result: Evaluation) -> Table:
    """Methods by ratios: score with its 95 % interval, restored rows with what they recover of the base's loss."""
    rows = {(row["evictor"], row["restored"], row["ratio"]): row for row in result.rows()}
    ratios = sorted({ratio for _, _, ratio in rows if ratio != 1.0}, reverse=True)
    full, documents = rows[FULL], result.conventions["documents"]
    table = Table(
        title=f"Bundled suite: score (95 % interval), {full['questions']} questions on {documents} documents",
        caption=f"full cache: {_score(full)}; last, where restored: share of the base's loss that came back",
    )
    table.add_column("method")
    for ratio in ratios:
        table.add_column(f"r = {ratio:g}", justify="right", no_wrap=True)
    for evictor, restored in dict.fromkeys(key[:2] for key in rows if key != FULL):
        cells = [_score(rows[evictor, restored, ratio]) for ratio in ratios]
        table.add_row(name(evictor, restored), *cells, style="bold" if restored else None, end_section=restored)
    return table


def _score(row: dict) -> str:
    text = f"{row['score']:.1f} ({row['low']:.0f}-{row['high']:.0f})"
    share = row.get("recovered")
    return text if share is None else f"{text}\n{share:+.0%}"


def held(result: Evaluation) -> Table:
    """Pairs and bytes a document's cache holds, on average."""
    rows = result.rows()
    table = Table(title="Held per document (mean): KV pairs in the budget, pairs with the chat prefix, bytes")
    for title in ("method", "r", "pairs", "with prefix", "bytes", "share of full"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for row in rows:
        table.add_row(
            name(row["evictor"], row["restored"]), f"{row['ratio']:g}", f"{row['pairs']:,.0f}",
            f"{row['pairs_with_prefix']:,.0f}", f"{row['bytes']:,.0f}", f"{row['bytes'] / rows[0]['bytes']:.1%}",
        )  # fmt: skip
    return table


def payload(result: Evaluation) -> dict:
    """For programs: rows, conventions, and every answer of every cell."""
    answers = [
        {"evictor": evictor, "restored": restored, "ratio": ratio, **asdict(answer)}
        for (evictor, restored, ratio), cell in result.cells.items()
        for answer in cell.answers
    ]
    return {"rows": result.rows(), "conventions": result.conventions, "answers": answers}
