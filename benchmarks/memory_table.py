"""The result of `python -m benchmarks memory` as tables in Markdown."""

import math
from collections.abc import Sequence
from itertools import pairwise

from benchmarks import operations
from restorekv.compression.context import size


def markdown(result: dict) -> str:
    """Memory, then seconds and exponents."""
    model, machine = result["model"], result["machine"]
    told = "a cache filled with random numbers" if result["filled"] else "a real prefill"
    text = (
        f"{result['evictor']}, r = {result['ratio']:g}, {told}; random weights, "
        f"{model['parameters'] / 1e6:,.0f} million parameters ({model['num_hidden_layers']} layers), {model['dtype']}, "
        f"{machine['threads']} threads on {machine['processor']}. Bytes above what was resident before"
        f"{streamed(result)}.\n\n"
    )
    for mode in {row["mode"]: None for row in result["rows"]}:
        rows = [row for row in result["rows"] if row["mode"] == mode]
        text += memory_table(mode, rows) + "\n" + seconds_table(mode, rows, result["growth"][mode])
        if mode == "plain" and "prefill" in result["growth"][mode] and result["evictor"] == "kvzip":
            text += counted(model, [row["tokens"] for row in rows])
        text += "\n"
    return text


def streamed(result: dict) -> str:
    """The size of a part, if any mode has parts."""
    there = any(row["mode"] == "streaming" for row in result["rows"])
    return f"; streamed {result['part']:,} tokens at a time" if there else ""


def memory_table(mode: str, rows: Sequence[dict]) -> str:
    """Of one mode: what must be there, what was, and what is over."""
    names = list({name: None for row in rows for name in row["phases"]})
    text = f"| {mode}: T | full cache | bound without workspace | {' peak | '.join(names)} peak |"
    text += " workspace | whole process |\n" + "|---" * (len(names) + 5) + "|\n"
    for row in rows:
        cells = [f"{row['tokens']:,}", size(row["full"]), size(bound(row))]
        cells += [size(row["phases"][name]["peak"]) if name in row["phases"] else "" for name in names]
        over = max(row["peak"] - bound(row), 0)
        text += f"| {' | '.join([*cells, size(over), size(row['before'] + row['peak'])])} |\n"
    return text


def bound(row: dict) -> int:
    """What a mode may hold besides its workspace."""
    each = {"plain": ("full", "layer"), "offload": ("layer", "layer", "kept"), "streaming": ("kept", "part")}
    return row["scores"] + sum(row[name] for name in each[row["mode"]])


def seconds_table(mode: str, rows: Sequence[dict], exponents: dict[str, list[float]]) -> str:
    """Of one mode: each phase's seconds and growth, and the share of the restore pass."""
    heads = " | ".join(f"T = {row['tokens']:,}" for row in rows)
    text = f"| {mode}: phase, s | {heads} | exponents |\n"
    text += "|---" * (len(rows) + 2) + "|\n"
    for name, grown in exponents.items():
        seconds = " | ".join(f"{row['phases'][name]['seconds']:.2f}" if name in row["phases"] else "" for row in rows)
        text += f"| {name} | {seconds} | {', '.join(f'{each:.2f}' for each in grown)} |\n"
    if "restore" in exponents:
        text += f"| restore pass, share of all | {' | '.join(map(restoring, rows))} | |\n"
    return text


def restoring(row: dict) -> str:
    """The share of the restore pass; nothing where it is no phase of its own."""
    seconds = {name: phase["seconds"] for name, phase in row["phases"].items()}
    return f"{seconds['restore'] / sum(seconds.values()):.2%}" if "restore" in seconds else ""


def counted(model: dict, lengths: Sequence[int]) -> str:
    """What prefill and scoring cannot do without, and how it grows; see operations.py."""
    text = ""
    for name, count in (("prefill", operations.prefill), ("score", operations.kvzip)):
        work = [count(model, tokens) for tokens in lengths]
        more = (late / early for early, late in pairwise(work))
        longer = (late / early for early, late in pairwise(lengths))
        grown = (math.log(a) / math.log(b) for a, b in zip(more, longer, strict=True))
        text += f"| {name}, TFLOP | {' | '.join(f'{each / 1e12:.2f}' for each in work)} | "
        text += f"{', '.join(f'{each:.2f}' for each in grown)} |\n"
    return text
