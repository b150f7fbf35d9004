"""The result of `python -m benchmarks memory` as tables in Markdown."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarks import operations
from restorekv.context import format_bytes
from restorekv.evaluation.tables import Table, format_ratio


def format_tables(result: dict) -> str:
    """Return a table of memory and one of seconds and exponents for every mode."""
    model = result["model"]
    machine = result["machine"]
    rows = result["rows"]
    source = "a cache filled with random numbers" if result["filled"] else "a real prefill"
    streamed = any(row["mode"] == "streaming" for row in rows)
    parts = f"; streamed {result['part']:,} tokens at a time" if streamed else ""
    text = (
        f"{result['evictor']}, {format_ratio(result['ratio'])}, {source}; random weights, "
        f"{model['parameters'] / 1e6:,.0f} million parameters ({model['num_hidden_layers']} "
        f"layers), {model['dtype']}, "
        f"{machine['threads']} threads on {machine['processor']}. Bytes above what was resident "
        f"before{parts}.\n"
    )
    for mode, growth in result["growth"].items():
        mine = [row for row in rows if row["mode"] == mode]
        counts = mode == "plain" and "prefill" in growth and result["evictor"] == "kvzip"
        for each in (
            _format_memory(mode, mine),
            format_seconds(mode, mine, growth, model if counts else None),
        ):
            text += f"\n{each.to_markdown()}\n"
    return text


def _format_memory(mode: str, rows: Sequence[dict]) -> Table:
    """Return a mode's table of memory: what it must hold, the peak of each phase, and what the
    highest peak has above the bound (its workspace).
    """
    names = list({name: None for row in rows for name in row["phases"]})
    head = [
        f"{mode}: T",
        "full cache",
        "bound without workspace",
        *(f"{name} peak" for name in names),
    ]
    lines = []
    for row in rows:
        peaks = [
            format_bytes(row["phases"][name]["peak"]) if name in row["phases"] else ""
            for name in names
        ]
        over = max(row["peak"] - compute_bound(row), 0)
        whole = row["before"] + row["peak"]
        lines.append(
            [
                f"{row['tokens']:,}",
                format_bytes(row["full"]),
                format_bytes(compute_bound(row)),
                *peaks,
                format_bytes(over),
                format_bytes(whole),
            ]
        )
    return Table(f"{mode}-memory", "Memory", [*head, "workspace", "whole process"], lines)


def compute_bound(row: Mapping) -> int:
    """Return the bytes that a mode may hold in addition to its workspace."""
    each = {
        "plain": ("full", "layer"),
        "offload": ("layer", "layer", "kept"),
        "streaming": ("kept", "part"),
    }
    return row["scores"] + sum(row[name] for name in each[row["mode"]])


def format_seconds(
    mode: str, rows: Sequence[dict], exponents: dict[str, list[float]], model: dict | None = None
) -> Table:
    """Return a mode's table of seconds: each phase's seconds and growth, the share of the restore
    pass and, with `model`, the operations of prefill and scoring.
    """
    lines = []
    for name, growth in exponents.items():
        seconds = [
            f"{row['phases'][name]['seconds']:.2f}" if name in row["phases"] else "" for row in rows
        ]
        lines.append([name, *seconds, _format_exponents(growth)])
    if "restore" in exponents:
        lines.append(["restore pass, share of all", *map(_format_restore_share, rows), ""])
    lengths = [row["tokens"] for row in rows]
    if model:
        for name, count in (
            ("prefill", operations.count_prefill),
            ("score", operations.count_kvzip),
        ):
            work = [count(model, tokens) for tokens in lengths]
            steps = zip(pairwise(work), pairwise(lengths), strict=True)
            growth = [
                math.log(more / less) / math.log(late / early)
                for (less, more), (early, late) in steps
            ]
            work_cells = [f"{each / 1e12:.2f}" for each in work]
            lines.append([f"{name}, TFLOP", *work_cells, _format_exponents(growth)])
    head = [f"{mode}: phase, s", *(f"T = {tokens:,}" for tokens in lengths), "exponents"]
    return Table(f"{mode}-seconds", "Seconds", head, lines)


def _format_exponents(exponents: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in exponents)


def _format_restore_share(row: dict) -> str:
    """Return the share of the restore pass, or "" if it is not a separate phase."""
    seconds = {name: phase["seconds"] for name, phase in row["phases"].items()}
    return f"{seconds['restore'] / sum(seconds.values()):.2%}" if "restore" in seconds else ""
