"""The result of `python -m benchmarks decode` as rich tables and sentences."""

from collections.abc import Iterator

from rich.table import Table

from benchmarks.compare import KVPRESS, OURS
from restorekv.compression.context import size


def tables(result: dict) -> Iterator[Table | str]:
    """Attention, whole steps, then a sentence each about memory, answers and the machine."""
    title = f"attention of a decode step, T = {result['tokens']:,}, milliseconds per layer (over ours)"
    yield table(title, result["rows"], "attention", ("rectangle", "full", "as rows"), roofline=True)
    yield table(
        "whole decode step, milliseconds (over ours)", result["rows"], "step", ("rectangle", "full"), roofline=False
    )
    held, model, machine = result["held"], result["model"], result["machine"]
    if held:
        yield (
            f"Memory held at r = {held['ratio']:g}: {size(held['bytes'])} by the process, {held['share']:.3f} of "
            f"{size(held['pairs'])} of pairs and {size(held['tail'])} of tail."
        )
    if result["answers"]:
        yield answers(result["answers"])
    yield (
        f"Random states and weights, {model['parameters'] / 1e6:,.0f} million parameters "
        f"({model['num_hidden_layers']} layers), {model['dtype']}, {machine['threads']} threads on "
        f"{machine['processor']}; copies at {result['bandwidth'] / 1e9:.1f} GB/s, tail of {result['tail']} columns."
    )
    if result["note"]:
        yield result["note"]


def table(title: str, rows: list[dict], what: str, rivals: tuple[str, ...], roofline: bool) -> Table:
    """Milliseconds by ratio and side, and in brackets each rival's time over ours."""
    made = Table(title=title, title_justify="left")
    for name in ("r", *(["roofline"] if roofline else []), "ours", *rivals):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        mine = row[what]["ours"]
        cells = [row["ratio"], *([row["roofline"] * 1000] if roofline else []), mine * 1000]
        times = [row[what].get(rival) for rival in rivals]  # the full cache stands for the rectangle of all pairs
        beside = ["" if took is None else f"{took * 1000:.4g} ({took / mine:.2f})" for took in times]
        made.add_row(*(f"{cell:.4g}" for cell in cells), *beside)
    return made


def answers(found: dict) -> str:
    """Both sides' tokens a second."""
    mine, theirs = found[OURS], found.get(KVPRESS, {})
    said = f"{found['asked']} questions to {found['read']:,} tokens at r = {found['ratio']:g}"
    said += f", {found['answer']} tokens each: {mine['rate']:.1f} tokens a second"
    if "rate" in theirs:
        return f"{said}, kvpress {theirs['rate']:.1f}, {mine['rate'] / theirs['rate']:.1f} times as many."
    return f"{said}; kvpress refused: {theirs['refused']}" if "refused" in theirs else f"{said}."
