"""The result of `python -m benchmarks decode` as tables and sentences."""

from collections.abc import Iterator

from benchmarks.compare import KVPRESS, OURS
from restorekv.context import format_bytes
from restorekv.evaluation.tables import Table, format_ratio


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the tables of attention and of whole steps, then sentences on memory, answers and the
    machine.
    """
    title = (
        f"attention of a decode step, T = {result['tokens']:,}, milliseconds per layer (over ours)"
    )
    yield _make_times_table(
        title, result["rows"], "attention", ("rectangle", "full", "as rows"), roofline=True
    )
    title = "whole decode step, milliseconds (over ours)"
    yield _make_times_table(title, result["rows"], "step", ("rectangle", "full"), roofline=False)
    held = result["held"]
    model = result["model"]
    machine = result["machine"]
    if held:
        yield (
            f"Memory held at {format_ratio(held['ratio'])}: {format_bytes(held['bytes'])} by the "
            "process, "
            f"{held['share']:.3f} of {format_bytes(held['pairs'])} of pairs and "
            f"{format_bytes(held['tail'])} of tail."
        )
    if result["answers"]:
        yield describe_answers(result["answers"])
    yield (
        f"Random states and weights, {model['parameters'] / 1e6:,.0f} million parameters "
        f"({model['num_hidden_layers']} layers), {model['dtype']}, {machine['threads']} threads on "
        f"{machine['processor']}; copies at {result['bandwidth'] / 1e9:.1f} GB/s, tail of "
        f"{result['tail']} columns."
    )
    if result["note"]:
        yield result["note"]


def _make_times_table(
    title: str, rows: list[dict], what: str, rivals: tuple[str, ...], roofline: bool
) -> Table:
    """Return milliseconds by ratio and side, and in brackets each rival's time over ours."""
    lines = []
    for row in rows:
        ours = row[what]["ours"]
        own = [row["ratio"], *([row["roofline"] * 1000] if roofline else []), ours * 1000]
        # At r = 1 there is no rectangle: it would be the full cache.
        others = [row[what].get(rival) for rival in rivals]
        beside = [
            "" if took is None else f"{took * 1000:.4g} ({took / ours:.2f})" for took in others
        ]
        lines.append([*(f"{value:.4g}" for value in own), *beside])
    return Table(
        what, title, ["r", *(["roofline"] if roofline else []), "ours", *rivals], lines, left=()
    )


def describe_answers(measured: dict) -> str:
    """Say how many tokens a second each side answers."""
    ours = measured[OURS]
    kvpress = measured.get(KVPRESS, {})
    ratio = format_ratio(measured["ratio"])
    words = f"{measured['asked']} questions to {measured['read']:,} tokens at {ratio}"
    words += f", {measured['answer']} tokens each: {ours['rate']:.1f} tokens a second"
    if "rate" in kvpress:
        times = ours["rate"] / kvpress["rate"]
        return f"{words}, kvpress {kvpress['rate']:.1f}, {times:.1f} times as many."
    return (
        f"{words}; kvpress refused: {kvpress['refused']}" if "refused" in kvpress else f"{words}."
    )
