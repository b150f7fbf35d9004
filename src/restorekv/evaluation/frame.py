"""A grid as one table: a row for every condition, method, ratio and part of the benchmark.

A condition is what was asked: only within one can scores be compared. A method is how caches were
made. Both are Cells whose other fields are empty or have their defaults. Seeds are pooled. The rows
are plain dicts, which terminals print; `make_frame` returns them as a DataFrame, which writes CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from restorekv import tasks
from restorekv.errors import RestoreKVError, import_extra
from restorekv.evaluation import protocols
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import CELLS, Result, check_result, load_results
from restorekv.evaluation.rows import SeedPool, describe_controls
from restorekv.evaluation.tables import METHOD_NAMES, make_slug, name_evictor

if TYPE_CHECKING:
    from pandas import DataFrame

FULL_CACHE = "full cache"
FULL_METHOD = Cell(model="", benchmark="", evictor=FULL, ratio="")
# The kinds of parts that a row may be about.
ALL = "all"
GROUP = "group"
TASK = "task"
ASKED = ("model", "dtype", "protocol", "benchmark", "max_context", "prefix_policy")
SIZES = ("tokens", "prefix", "pairs", "pairs_with_prefix", "bytes", "restore_tokens")
Row = Mapping[str, Any]  # of columns of different types, by title


@dataclass(frozen=True)
class GridEntry:
    """One method at one ratio in one condition.

    Attributes:
        columns: What tells the entry from others, as its rows say it.
        pool: Its cells, one for each seed.
        base: The same without restoring, if that is done and was asked the same seeds.
        full: The full cache of the condition, asked the same seeds, if there is one.
    """

    columns: Row
    pool: SeedPool
    base: SeedPool | None
    full: SeedPool | None

    def list_rows(self) -> Iterator[Row]:
        """Yield a row for the whole benchmark and, if it is done, for each group and each task."""
        pool = self.pool
        answered, contexts = pool.progress
        stand_ins = pool.identity["benchmark"].get("stand_ins", ())
        common = {
            **self.columns,
            "done": pool.done,
            "seeds": len(pool.results),
            "answered": answered,
            "of": contexts,
        }
        whole = {
            **common,
            "kind": ALL,
            "part": "",
            "left_out": ", ".join(pool.left_out),
            "stand_ins": ", ".join(sorted(stand_ins)),
        }
        if pool.lines:
            whole |= {key: pool.average(key) for key in SIZES}
            whole["kept"] = pool.compute_kept_share()
            whole["kept_with_prefix"] = pool.compute_kept_share(with_prefix=True)
            if self.full and self.full.lines:
                whole["of_full"] = pool.average("bytes") / self.full.average("bytes")
        # A cell that runs has a row too, with its progress instead of scores.
        if not pool.done:
            yield whole
            return
        # An unfinished full cache is not a reference: its mean is over fewer contexts.
        full = None
        if self.full and self.full.done:
            full = self.full
        if self.base:
            # Context by context: only then is a gain that of the restore pass.
            same = pool.get_values("pairs") == self.base.get_values("pairs")
            whole["as_many_pairs"] = bool(same.all())
        whole |= pool.score_tasks(base=self.base, full=full) | pool.summarize_fidelity()
        yield whole | {f"metric {name}": value for name, value in pool.average_metrics().items()}
        single = {task: (task,) for task in pool.tasks}
        for kind, parts in ((GROUP, pool.task_groups), (TASK, single)):
            for part, members in parts.items():
                score = pool.score_tasks(members, self.base, full)
                yield {**common, "kind": kind, "part": part, **score}


class GridResults:
    """The cells of a run as `entries`: conditions in turn, the full cache first, then the highest
    ratios first.

    Tasks on which the full cache has nothing to lose are left out of the means of every method of
    its condition.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self.entries: list[GridEntry] = []
        # By condition, method and ratio, in the order in which tables show them.
        pools = _pool_seeds(results)
        titles = {
            condition: pool.identity["benchmark"]["title"]
            for (condition, _, _), pool in pools.items()
        }
        methods = _label_methods(list(dict.fromkeys(method for _, method, _ in pools)))
        conditions = _label_conditions(titles)
        order = list(titles)
        for (condition, method, ratio), pool in pools.items():
            columns = {
                "condition": conditions[condition],
                "name": f"{make_slug(titles[condition])}-{order.index(condition) + 1}",
                **{field: getattr(condition, field) for field in ASKED},
                "method": methods[method],
                "evictor": method.evictor,
                "restored": method.restored,
                "ratio": ratio,
            }
            base = None
            if method.restored:
                base = pools.get((condition, get_base(method), ratio))
            if base and not (base.done and base.specs == pool.specs):
                base = None
            # Other seeds of the full cache were asked other contexts.
            full = pools.get((condition, FULL_METHOD, 1.0))
            full = full and full.restrict(pool.specs)
            self.entries.append(GridEntry(columns, pool, base, full))

    def list_rows(self) -> list[Row]:
        """Return the rows of all entries."""
        return [row for entry in self.entries for row in entry.list_rows()]


def make_frame(results: Sequence[Result]) -> DataFrame:
    """Return the rows of a grid, the results of `load_results`, as a DataFrame."""
    if not isinstance(results, list | tuple):
        raise RestoreKVError(
            f"make_frame takes the results of load_results, not {type(results).__name__}."
        )
    for each in results:
        check_result(each)
    return import_extra("pandas", "eval").DataFrame(GridResults(results).list_rows())


def load_grid(folder: Path) -> GridResults:
    """Load every cell of the folder, which may hold none. Raises RestoreKVError for a mix-up."""
    results = []
    if (folder / CELLS).is_dir():
        results = load_results(folder)
    # What shares a name must share weights and questions, or a mean would mix two experiments.
    first: dict[tuple[str, ...], tuple[str, Result]] = {}
    for result in results:
        cell = result.cell
        fingerprint = result.identity["fingerprint"]
        digest = result.identity["benchmark"]["digest"]
        adapter = (result.identity["adapter"] or {}).get("hash", "")
        for what, key, value in (
            ("models", (cell.model, cell.protocol), fingerprint),
            ("benchmark data", cell.question_set, digest),
            # Seeds of one method are pooled.
            (
                "adapters",
                (cell.model, cell.evictor, str(cell.adapter), str(cell.restore_tokens)),
                adapter,
            ),
        ):
            known, other = first.setdefault((what, *key), (value, result))
            if value != known:
                raise RestoreKVError(
                    f"{other.folder.name} and {result.folder.name} share a name but were made with "
                    f"different {what} ({known} and {value}); report them from separate folders."
                )
    return GridResults(results)


def _pool_seeds(results: Sequence[Result]) -> dict[tuple[Cell, Cell, float], SeedPool]:
    """Return results by condition, method and ratio; of alike cells the first counts."""
    # Conditions that need a full cache to compare with.
    compressed = {get_condition(each) for each in results if each.cell.evictor != FULL}
    seeds: dict[tuple[Cell, Cell, float], dict[str, Result]] = {}
    for result in results:
        own = get_condition(result)
        conditions = [own]
        if result.cell.evictor == FULL:
            # It holds every pair, so one full cache serves the conditions of all prefix policies.
            policies = {replace(own, prefix_policy=policy) for policy in ("counted", "free")}
            conditions = list(compressed & policies) or [own]
        for condition in conditions:
            key = condition, get_method(result.cell), result.cell.value
            seeds.setdefault(key, {}).setdefault(result.identity["benchmark"]["spec"], result)

    pools = {}
    for condition, method, ratio in sorted(seeds, key=_rank):
        pool = SeedPool(
            tuple(result for _, result in sorted(seeds[condition, method, ratio].items()))
        )
        if method == FULL_METHOD:
            # An unfinished full cache has not shown yet where there is nothing to lose.
            if pool.done:
                pool = replace(pool, left_out=pool.find_tasks_without_loss())
        # The order above puts a condition's full cache first, so it is here by now.
        elif full := pools.get((condition, FULL_METHOD, 1.0)):
            pool = replace(pool, left_out=full.left_out)
        pools[condition, method, ratio] = pool
    return pools


def _rank(key: tuple[Cell, Cell, float]) -> tuple:
    """Order a condition's methods: the full cache, then each evictor's base, restored, variants."""
    condition, method, ratio = key
    # The paper's order; an evictor that it does not name comes after them.
    evictors = (FULL, *METHOD_NAMES)
    name = method.evictor.partition(":")[0]
    place = evictors.index(name) if name in evictors else len(evictors)
    variant = (describe_controls(method), repr(method))
    return (repr(condition), place, method.evictor, method.restored, *variant, -ratio)


def get_condition(result: Result) -> Cell:
    """Return what was asked, and how the chat prefix counts: where scores can be compared."""
    cell = result.cell
    benchmark = tasks.make_benchmark(result.identity["benchmark"]["spec"])
    return Cell(
        model=cell.model,
        benchmark=replace(benchmark, seed=0).spec,
        evictor="",
        ratio="",
        protocol=cell.protocol,
        prefix_policy=cell.prefix_policy or protocols.make_protocol(cell.protocol).prefix_policy,
        max_context=cell.max_context,
        dtype=cell.dtype,
    )


def get_method(cell: Cell) -> Cell:
    """Return what a cell says of how caches are made; a base has nothing of the restore pass."""
    if cell.evictor == FULL:
        return FULL_METHOD
    # Everything that belongs to the question goes; what is left made the cache.
    asked = {field: getattr(FULL_METHOD, field) for field in (*ASKED, "ratio")}
    method = replace(cell, **asked)
    if method.restored:
        return method
    return replace(get_base(method), offset=cell.offset)


def get_base(method: Cell) -> Cell:
    """Return the same eviction with nothing restored."""
    return replace(method.base, on_small_budget="", offset=0)


def _label_methods(methods: Sequence[Cell]) -> dict[Cell, str]:
    """Return labels such as "KVzip + RestoreKV, n = 1": the controls that are not at defaults."""
    labels = {FULL_METHOD: FULL_CACHE}
    for method in methods:
        if method == FULL_METHOD:
            continue
        # A label names what tells a method from its kin, and nothing that all of them share.
        kin = [each for each in methods if get_base(each) == get_base(method) and each.restored]
        several = len({each.adapter for each in kin}) > 1
        name = name_evictor(method.evictor)
        if method.restored:
            name = f"{name} + RestoreKV"
        controls = describe_controls(method if several else replace(method, adapter="auto"))
        parts = [name, controls]
        if method.restored and len({each.on_small_budget for each in kin}) > 1:
            parts.append(f"{method.on_small_budget} where tight")
        labels[method] = ", ".join(filter(None, parts))
    return labels


def _label_conditions(titles: Mapping[Cell, str]) -> dict[Cell, str]:
    """Return the title of the benchmark, and what else tells a condition from the others."""
    labels = {}
    for condition, title in titles.items():
        settings = condition.benchmark.partition(":")[2].replace(",", ", ")
        same_title = {other.benchmark for other in titles if titles[other] == title}
        parts = [f"{title} ({settings})" if settings and len(same_title) > 1 else title]
        for field in ("model", "dtype", "protocol", "max_context"):
            value = getattr(condition, field)
            if value and len({getattr(other, field) for other in titles}) > 1:
                parts.append(f"{field.replace('_', ' ')} {value}")
        if condition.prefix_policy != protocols.make_protocol(condition.protocol).prefix_policy:
            parts.append(f"prefix policy {condition.prefix_policy}")
        labels[condition] = ", ".join(parts)
    return labels
