"""How far caches are from the full one, what they held, how two protocols differ in that, and how all was made."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from restorekv.compression.prepared import SINKS
from restorekv.evaluation import protocols
from restorekv.evaluation.report.page import Details, Section
from restorekv.evaluation.report.runs import Condition, Run, model_name
from restorekv.evaluation.results import flat
from restorekv.evaluation.rows import SeedPool
from restorekv.evaluation.tables import ABSENT, Table, TableCell, at, between, number, percent, slug

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


def fidelity(run: Run) -> list[Section]:
    """Returns a table for every condition whose finished cells recorded their fidelity."""
    blocks = []
    for condition, grid in run.conditions.items():
        data = [
            {"method": run.label(method), "ratio": ratio, **found}
            for method in run.of(condition)
            for ratio, pool in grid.done(method).items()
            if (found := pool.fidelity())
        ]
        if data:
            shown = {(row["method"], row["ratio"]): divergence(row) for row in data}
            ratios = sorted({row["ratio"] for row in data}, reverse=True)
            labels = map(run.label, run.of(condition))
            rows = [[label, *(shown.get((label, ratio), ABSENT) for ratio in ratios)] for label in labels]
            name, title = slug("fidelity", run.key(condition)), f"{run.condition(condition)}: fidelity"
            blocks.append(Table(name, title, ["method", *map(at, ratios)], rows, FIDELITY_NOTE, data))
    return [Section("Fidelity to the full cache", FIDELITY, blocks)] if blocks else []


def divergence(row: Mapping) -> TableCell:
    same = f"{percent(row['same'] / 100, 0)} the same"
    return TableCell(number(row["kl"], 3), f"{between(row['kl_low'], row['kl_high'], 3)}; {same}")


def section(run: Run) -> list[Section]:
    """Returns a table of pairs and bytes for every condition, and what two protocols make of one ratio."""
    held = [of_condition(run, each) for each in run.conditions if run.conditions[each].pools]
    both = [block for pair in twins(run) if (block := compared(run, *pair))]
    sections = [Section("What the caches held", KEPT, held)] if held else []
    return sections + ([Section("Both protocols", BOTH, both)] if both else [])


def of_condition(run: Run, condition: Condition) -> Table:
    """Returns means over the contexts answered so far."""
    full, data, contexts = run.conditions[condition].full, [], {}
    for label, ratio, pool in run.pools(condition):
        done, of = pool.progress
        contexts[label, ratio] = f"{done:,}" if pool.done else f"{done} of {of}"
        data.append({
            "method": label, "ratio": ratio,
            **{key: pool.mean(key) for key in ("pairs", "pairs_with_prefix", "bytes", "restore_tokens")},
            "kept": pool.kept(), "kept_with_prefix": pool.kept(prefix=True),
            "of_full": pool.mean("bytes") / full.mean("bytes") if full and full.lines else None, "contexts": done,
        })  # fmt: skip
    columns = {
        "method": "method",
        "r": lambda row: f"{row['ratio']:g}",
        "pairs": lambda row: TableCell(f"{row['pairs']:,.0f}", percent(row["kept"], 2)),
        "pairs with prefix": lambda row: TableCell(
            f"{row['pairs_with_prefix']:,.0f}", percent(row["kept_with_prefix"], 2)
        ),
        "bytes": lambda row: TableCell(f"{row['bytes']:,.0f}", percent(row["of_full"], 2)),
        "restore tokens": lambda row: number(row["restore_tokens"]),
        "contexts": lambda row: contexts[row["method"], row["ratio"]],
    }
    note = "Means over contexts; below them what that is of the full cache's. Bytes count whatever a cache holds."
    title = f"{run.condition(condition)}: what the caches held"
    return Table.of(slug("kept", run.key(condition)), title, data, columns, note)


def twins(run: Run) -> Iterator[tuple[Condition, Condition]]:
    """Yields what ran under both protocols, each with its own prefix policy."""
    own = [each for each in run.conditions if each.prefix_policy == protocols.make(each.protocol).prefix_policy]
    for one, other in combinations(own, 2):
        same = replace(one, protocol=other.protocol, prefix_policy=other.prefix_policy) == other
        if same and one.protocol != other.protocol:
            yield one, other


def compared(run: Run, one: Condition, other: Condition) -> Table | None:
    """Returns the pairs held at every ratio that is finished under both protocols."""
    grids, data = [run.conditions[condition] for condition in (one, other)], []
    for ratio in grids[0].ratios:
        pools = [[grid.at(method, ratio) for grid in grids] for method in run.of(one)]
        done = [pair for pair in pools if all(pool and pool.done for pool in pair)]
        data += [sizes(*each, ratio) for each in zip((one, other), zip(*done, strict=True), strict=True) if done]
    columns = {
        "asked for": lambda row: TableCell(at(row["ratio"]), row["protocol"]),
        "pairs in the budget": lambda row: f"{row['budget']:,.0f}",
        "pairs held, prefix included": lambda row: f"{row['held']:,.0f}",
        "of them context and restore cache": lambda row: f"{row['context']:,.0f}",
        "prefix S (tokens)": lambda row: f"{row['prefix']:,.1f}",
        "context T (tokens)": lambda row: f"{row['tokens']:,.0f}",
        "real ratio": lambda row: percent(row["real_ratio"], 2),
    }
    note = (
        "Means over contexts and methods. The real ratio is pairs held over all pairs of prefix and context, "
        "L H (S + T). What else differs between the protocols is below, under conventions."
    )
    title = f"{model_name(one.model)}, {run.benchmark(one)}: pairs held under both protocols"
    return Table.of(slug("protocol-pairs", run.key(one)), title, data, columns, note) if data else None


def sizes(condition: Condition, pools: tuple[SeedPool, ...], ratio: float) -> dict[str, object]:
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


def conventions(run: Run) -> list[Section]:
    """Returns what all cells were made with: what is common, what differs by condition, and all of it as CSV."""
    if not run.results:
        return []
    data = [{"cell": result.folder.name, **flat(result.facts)} for result in run.results]
    keys = list(dict.fromkeys(key for facts in data for key in facts if key != "cell"))
    common = [key for key in keys if len(values(data, key)) == 1]
    differing = [key for key in keys if key not in common]
    intro = f"{len(data)} cells share {len(common)} conventions and versions and differ in {len(differing)}."
    versions = ", ".join(key.partition(".")[2] for key in differing if key.startswith("versions."))
    intro += f" They were not all made with the same versions of {versions}." if versions else ""
    title, rows = "The same in all cells", [[key, *values(data, key)] for key in common]
    blocks = [Details(title, [Table("conventions", title, ["convention", "value"], rows, "", data, left=(0, 1))])]
    if differing:
        grids = run.conditions.values()
        facts = [[flat(result.facts) for pool in grid.pools for result in pool.results] for grid in grids]
        rows = [[key, *("; ".join(values(each, key)) for each in facts)] for key in differing]
        head = ["convention", *map(run.condition, run.conditions)]
        title, note = "Where cells differ", "Several values: they differ between the condition's cells."
        blocks.append(Details(title, [Table("differences", title, head, rows, note, left=range(len(head)))]))
    return [Section("Conventions and versions", intro, blocks)]


def values(cells: Iterable[Mapping], key: str) -> list[str]:
    """Returns what the cells say of a convention, each value once."""
    return list(dict.fromkeys(shown(facts.get(key)) for facts in cells))


def shown(value: object) -> str:
    """Returns a value on one line, in which line breaks and spaces at the ends stay visible."""
    if value is None:
        return "–"
    plain = isinstance(value, str) and value and value == value.strip() and "\n" not in value
    return value if plain else json.dumps(value, ensure_ascii=False)
