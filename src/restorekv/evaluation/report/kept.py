"""How far caches are from the full one, what they held, and how two protocols differ in that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from restorekv.compression.prepared import SINKS
from restorekv.evaluation import protocols
from restorekv.evaluation.fidelity import summarized
from restorekv.evaluation.report.names import Names, model_name, slug
from restorekv.evaluation.report.page import Block, Points, Section
from restorekv.evaluation.report.runs import Condition, SeedPool, SortedResults
from restorekv.evaluation.tables import ABSENT, Table, TableCell, at, between, number, percent, table

FIDELITY = (
    "How far a compressed cache's predictions are from the full cache's, whatever the references say: the mean "
    "KL(full || cache) in nats over the tokens of the full cache's own answers, and the share of answers that have the "
    "very text of the full cache's."
)
FIDELITY_NOTE = (
    "Below each divergence its 95 % interval (bootstrap over contexts), then the share of answers that are the same."
)
KEPT = (
    "The share of pairs is of those that compete for the budget, and with the chat prefix of all pairs of prefix and "
    "context."
)
BOTH = (
    "The same model, methods and ratios under the conventions of two projects. A ratio means different numbers of "
    "pairs in the two: compare scores within a protocol, and across them by the pairs held."
)


def fidelity(run: SortedResults, names: Names) -> list[Section]:
    """Returns a table for every condition whose finished cells recorded their fidelity."""
    blocks = []
    for condition, grid in run.conditions.items():
        figures = {
            (names.label(method), ratio): found
            for method in names.of(condition)
            for ratio, pool in grid.done(method).items()
            if (found := summarized(pool.lines))
        }
        if figures:
            ratios = sorted({ratio for _, ratio in figures}, reverse=True)
            rows = [
                [label, *(divergence(figures.get((label, ratio))) for ratio in ratios)]
                for label in map(names.label, names.of(condition))
            ]
            data = [{"method": label, "ratio": ratio, **found} for (label, ratio), found in figures.items()]
            name, title = slug("fidelity", names.key(condition)), f"{names.condition(condition)}: fidelity"
            blocks.append(table(name, title, ["method", *map(at, ratios)], rows, FIDELITY_NOTE, data))
    return [Section("Fidelity to the full cache", FIDELITY, blocks)] if blocks else []


def divergence(found: Mapping | None) -> TableCell:
    if found is None:
        return ABSENT
    same = f"{percent(found['same'] / 100, 0)} the same"
    return TableCell(number(found["kl"], 3), f"{between(found['kl_low'], found['kl_high'], 3)}; {same}")


def section(run: SortedResults, names: Names) -> list[Section]:
    """Returns a table of pairs and bytes for every condition, and what two protocols make of one ratio."""
    kept = [of_condition(run, names, each) for each in run.conditions if run.conditions[each].pools]
    both = [block for pair in twins(run) for block in compared(run, names, *pair)]
    sections = [Section("What the caches held", KEPT, kept)] if kept else []
    return sections + ([Section("Both protocols", BOTH, both)] if both else [])


def of_condition(run: SortedResults, names: Names, condition: Condition) -> Table:
    """Returns means over the contexts answered so far."""
    full, rows, data = run.conditions[condition].full, [], []
    for label, ratio, pool in names.pools(condition):
        done, of = pool.progress
        held = {key: pool.mean(key) for key in ("pairs", "pairs_with_prefix", "bytes", "restore_tokens")}
        shares = {"kept": pool.kept(), "kept_with_prefix": pool.kept(prefix=True)}
        shares["of_full"] = held["bytes"] / full.mean("bytes") if full and full.lines else None
        data.append({"method": label, "ratio": ratio, **held, **shares, "contexts": done})
        sizes = [
            TableCell(f"{size:,.0f}", percent(share, 2))
            for size, share in zip(held.values(), shares.values(), strict=False)
        ]
        contexts = f"{done:,}" if pool.done else f"{done} of {of}"
        rows.append([label, f"{ratio:g}", *sizes, number(held["restore_tokens"]), contexts])
    head = ["method", "r", "pairs", "pairs with prefix", "bytes", "restore tokens", "contexts"]
    note = "Means over contexts; below them what that is of the full cache's. Bytes count whatever a cache holds."
    title = f"{names.condition(condition)}: what the caches held"
    return table(slug("kept", names.key(condition)), title, head, rows, note, data)


def twins(run: SortedResults) -> Iterator[tuple[Condition, Condition]]:
    """Yields what ran under both protocols, each with its own prefix policy."""
    first, second = protocols.PROTOCOLS
    policies = {name: protocols.make(name).prefix_policy for name in (first, second)}
    for one in run.conditions:
        other = replace(one, protocol=second, prefix_policy=policies[second])
        if one.protocol == first and one.prefix_policy == policies[first] and other in run.conditions:
            yield one, other


def compared(run: SortedResults, names: Names, one: Condition, other: Condition) -> Iterator[Block]:
    """Yields a sentence for every ratio that is finished under both protocols, and the pairs held as a table."""
    grids = [run.conditions[condition] for condition in (one, other)]
    sentences, data = [], []
    for ratio in grids[0].ratios:
        pools = [[grid.at(method, ratio) for grid in grids] for method in names.of(one)]
        done = [pair for pair in pools if all(pool and pool.done for pool in pair)]
        if done:
            both = [sizes(*each) for each in zip((one, other), (ratio,) * 2, zip(*done, strict=True), strict=True)]
            sentences.append(difference(both))
            data += both
    if all(grid.full and grid.full.done for grid in grids):
        scores = [grid.full.score()["score"] for grid in grids]
        sentences.append(
            f"With nothing evicted the full cache scores {number(scores[0])} under {one.protocol} and "
            f"{number(scores[1])} under {other.protocol}: templates and stops alone make that difference."
        )
    rows = [
        [TableCell(at(row["ratio"]), row["protocol"]), *(f"{row[key]:,.0f}" for key in ("budget", "held", "context")),
         f"{row['prefix']:,.1f}", f"{row['tokens']:,.0f}", percent(row["real_ratio"], 2)]
        for row in data
    ]  # fmt: skip
    head = [
        TableCell("asked for", "protocol"), "pairs in the budget", "pairs held, prefix included",
        "of them context and restore cache", "prefix S (tokens)", "context T (tokens)", "real ratio",
    ]  # fmt: skip
    note = (
        "Means over contexts and methods. The real ratio is pairs held over all pairs of prefix and context, "
        "L H (S + T). What else differs between the protocols is below, under conventions."
    )
    title = f"{model_name(one.model)}, {names.benchmark(one)}: pairs held under both protocols"
    yield Points(sentences or ["No pair of cells is finished under both protocols yet."])
    if data:
        yield table(slug("protocol-pairs", names.key(one)), title, head, rows, note, data)


def sizes(condition: Condition, ratio: float, pools: Sequence[SeedPool]) -> dict[str, object]:
    """Returns what caches of a protocol held at a ratio, means over `pools` and their contexts.

    `context` are the pairs of context and restore cache; `held` counts the whole prefix.
    """
    shape = pools[0].facts["shape"]
    keys = ("pairs", "pairs_with_prefix", "prefix", "tokens")
    budget, held, prefix, tokens = (sum(pool.mean(key) for pool in pools) / len(pools) for key in keys)
    # Where the prefix counts, its columns after the pinned ones are the first to go (PreparedContext.competing).
    pinned = min(SINKS, prefix) if condition.prefix_policy == "counted" else 0
    return {
        "protocol": condition.protocol, "ratio": ratio, "budget": budget, "held": held,
        "context": budget - shape["layers"] * shape["heads"] * pinned, "prefix": prefix, "tokens": tokens,
        "real_ratio": sum(pool.kept(prefix=True) for pool in pools) / len(pools),
    }  # fmt: skip


def difference(both: Sequence[Mapping]) -> str:
    """Says how many pairs two protocols hold at one ratio, and how many of them are left for the context."""
    less, more = sorted(both, key=lambda row: row["held"])
    extra = more["held"] - less["held"]
    ahead, behind = sorted(both, key=lambda row: -row["context"])
    return (
        f"At {at(less['ratio'])}, {more['protocol']} holds {more['held']:,.0f} pairs and {less['protocol']} "
        f"{less['held']:,.0f}: {extra:,.0f} more ({percent(extra / less['held'])}). For context and restore cache that "
        f"leaves {ahead['context']:,.0f} under {ahead['protocol']} and {behind['context']:,.0f} under "
        f"{behind['protocol']} ({percent(ahead['context'] / behind['context'] - 1, sign=True)})."
    )
