"""The result of `python -m benchmarks compare` as tables and sentences."""

from collections.abc import Callable, Iterator

from benchmarks import operations
from benchmarks.compare import KVPRESS, OURS
from restorekv.context import format_bytes
from restorekv.evaluation.tables import Table, format_ratio


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield one table for each T, then the sentences."""
    sides = {(row["tokens"], row["side"]): row for row in result["rows"]}
    lengths = sorted({tokens for tokens, _ in sides})
    for tokens in lengths:
        yield _make_table(tokens, sides[tokens, OURS], sides.get((tokens, KVPRESS)), result)
    model = result["model"]
    machine = result["machine"]
    yield (
        f"Random weights, {model['parameters'] / 1e6:,.0f} million parameters "
        f"({model['num_hidden_layers']} layers), "
        f"{model['dtype']}, {machine['threads']} threads on {machine['processor']}."
    )
    for tokens, ratios in result["ratios"].items():
        known = ", ".join(
            f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None
        )
        yield f"T = {int(tokens):,}, {format_ratio(result['ratio'])}, ours / kvpress: {known}."
    for tokens in lengths:
        yield _describe_floor(tokens, sides[tokens, OURS], sides.get((tokens, KVPRESS)), model)
    if result["note"]:
        yield result["note"]


def _make_table(tokens: int, ours: dict, kvpress: dict | None, result: dict) -> Table:
    """Return a table of one T with a row for each quantity and a column for each side."""
    r = format_ratio(result["ratio"])
    sides = {"ours": ours} | ({f"kvpress {result['kvpress']}": kvpress} if kvpress else {})
    rows = [[name, *map(show, sides.values())] for name, show in _list_quantities(r).items()]
    return Table("compare", f"T = {tokens:,} tokens, KVzip, {r}", ["", *sides], rows)


def _describe_floor(tokens: int, ours: dict, kvpress: dict | None, model: dict) -> str:
    """Say how long compression would take if the matrix products of scoring ran as fast as the
    prefill's.
    """
    first = operations.count_prefill(model, tokens)
    scoring = operations.count_kvzip(model, tokens)
    seconds = ours["seconds"]
    share = scoring / first
    least = seconds["prefill"] * (1 + share)
    against = f", {least / kvpress['seconds']['total']:.2f} of kvpress's time" if kvpress else ""
    return (
        f"T = {tokens:,}: scoring is {scoring / 1e12:.2f} TFLOP, {share:.2f} times the prefill's "
        f"{first / 1e12:.2f}, "
        f"and took {seconds['score'] / seconds['prefill']:.2f} times its time; at the prefill's "
        "rate all of it takes "
        f"{least:.1f} s{against}."
    )


def _list_quantities(r: str) -> dict[str, Callable[[dict], str]]:
    """Return the rows of the table: each quantity's name, and how to format it for a side."""
    return {
        "prefill, s": lambda side: f"{side['seconds']['prefill']:.2f}",
        "scoring, s": lambda side: f"{side['seconds']['score']:.2f}",
        "eviction, s": lambda side: f"{side['seconds']['evict']:.2f}",
        "restore pass, s": _format_restore,
        "compress, all of it, s": lambda side: f"{side['seconds']['total']:.2f}",
        "peak memory above weights": lambda side: (
            "unknown" if side["peak"] is None else format_bytes(side["peak"])
        ),
        f"pairs held, {r}": lambda side: (
            f"{side['held']['pairs']:,} of {side['held']['pairs_full']:,}"
        ),
        f"bytes held, {r}": lambda side: format_bytes(side["held"]["bytes"]),
        "bytes held, r = 1": lambda side: format_bytes(side["held"]["bytes_full"]),
        f"question, {r}, ms": lambda side: _format_milliseconds(side["small"], "question"),
        "question, r = 1, ms": lambda side: _format_milliseconds(side["full"], "question"),
        f"token, {r}, ms": lambda side: _format_milliseconds(side["small"], "token"),
        "token, r = 1, ms": lambda side: _format_milliseconds(side["full"], "token"),
    }


def _format_restore(side: dict) -> str:
    """Return the restore pass's seconds, and their share of the whole compression."""
    seconds = side["seconds"]
    return (
        f"{seconds['restore']:.2f} ({seconds['restore'] / seconds['total']:.1%})"
        if "restore" in seconds
        else "none"
    )


def _format_milliseconds(decoding: dict, what: str) -> str:
    """Return the milliseconds of a question or token, or kvpress's reason for refusing it."""
    return f"{decoding[what] * 1000:.1f}" if what in decoding else f"refused: {decoding['refused']}"
