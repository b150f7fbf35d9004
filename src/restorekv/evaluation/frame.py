"""A grid as one table: a row for every condition, method, ratio and part, seeds pooled.

A condition is a Cell that says only what is asked: where scores can be compared. A method is a Cell
that says only how caches are made. The rows are plain dicts, which terminals print; `make_frame`
returns them as a DataFrame, which writes CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from restorekv.errors import RestoreKVError, import_extra
from restorekv.evaluation import protocols
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import CELLS, Result, load_results
from restorekv.evaluation.rows import SeedPool, describe_controls
from restorekv.evaluation.tables import METHOD_NAMES, make_slug, name_evictor

if TYPE_CHECKING:
    from pandas import DataFrame

AUTO = "auto"  # the adapter that ships
FULL_CACHE = "full cache"
# kinds of parts
ALL = "all"
GROUP = "group"
TASK = "task"
ASKED = ("model", "dtype", "protocol", "benchmark", "max_context", "prefix_policy")
SIZES = ("tokens", "prefix", "pairs", "pairs_with_prefix", "bytes", "restore_tokens")
Row = Mapping[str, object]


class GridResults:
    """The cells of a run by condition, method and ratio: `pools[condition][method][ratio]`.

    The full cache is the method None at ratio 1. Its `left_out` tasks, which have nothing to lose,
    are left out of the means of every method of its condition.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        compressed = [result for result in results if result.cell.evictor != FULL]
        conditions = sorted({condition_of(result) for result in compressed}, key=repr)
        for result in results:
            if not any(belongs(result, condition) for condition in conditions):
                conditions.append(condition_of(result))  # a full cache alone
        self.pools = {condition: self._pool(condition) for condition in conditions}
        self.methods = sorted({method_of(result.cell) for result in compressed}, key=_rank_method)

    def _pool(self, condition: Cell) -> dict[Cell | None, dict[float, SeedPool]]:
        """Return the condition's pools, mild ratios first; of alike cells the first counts."""
        found: dict[tuple[Cell | None, float], dict[str, Result]] = {}
        for result in self.results:
            if belongs(result, condition):
                method = None if result.cell.evictor == FULL else method_of(result.cell)
                seeds = found.setdefault((method, result.cell.value), {})
                seeds.setdefault(result.identity["benchmark"]["spec"], result)
        full = SeedPool(tuple(found[None, 1.0].values())) if (None, 1.0) in found else None
        left_out = full.find_tasks_without_loss() if full and full.done else ()
        pools: dict[Cell | None, dict[float, SeedPool]] = {}
        for method, ratio in sorted(found, key=lambda key: -key[1]):
            seeds = found[method, ratio]
            pool = SeedPool(tuple(seeds[spec] for spec in sorted(seeds)), left_out)
            pools.setdefault(method, {})[ratio] = pool
        return pools

    def rows(self) -> list[dict[str, object]]:
        """Return a row for every pool and part, the full cache first, then `methods` in order."""
        rows = []
        for condition, pools in self.pools.items():
            full = pools.get(None, {}).get(1.0)
            for method in (None, *self.methods):
                for ratio, pool in pools.get(method, {}).items():
                    base = find_base(pools, method, ratio)
                    names = {
                        "condition": self.label_condition(condition),
                        "name": self.name_condition(condition),
                        **{field: getattr(condition, field) for field in ASKED},
                        "method": self.label_method(method) if method else FULL_CACHE,
                        "evictor": method.evictor if method else FULL,
                        "restored": bool(method and method.restored),
                        "ratio": ratio,
                    }
                    rows += [names | row for row in pool_rows(pool, base, full)]
        return rows

    def label_method(self, method: Cell) -> str:
        """Return KVzip or KVzip + RestoreKV, with the controls that are not at their defaults."""
        kin = [other for other in self.methods if other.evictor == method.evictor]
        plain = replace(method, on_small_budget="")
        adapters = {other.adapter for other in kin if other.restored}
        adapter = method.adapter
        if adapter is not None:
            named = adapter != AUTO and len(adapters) > 1
            adapter = f"adapter {shorten_path(adapter, adapters)}" if named else AUTO
        parts = [name_evictor(method.evictor) + " + RestoreKV" * method.restored]
        parts += filter(None, [describe_controls(replace(method, adapter=adapter))])
        rules = {each.on_small_budget for each in kin if replace(each, on_small_budget="") == plain}
        if len(rules) > 1:
            parts.append(f"{method.on_small_budget} where tight")
        return ", ".join(parts)

    def label_condition(self, condition: Cell) -> str:
        """Return the benchmark's title, and what else tells the condition from the others."""
        titles = {other: self.facts_of(other)["benchmark"]["title"] for other in self.pools}
        title = titles[condition]
        settings = condition.benchmark.partition(":")[2]
        if settings and len({other.benchmark for other in titles if titles[other] == title}) > 1:
            title += f" ({settings.replace(',', ', ')})"
        values = {field: {getattr(other, field) for other in self.pools} for field in ASKED}
        cut = f"cut at {condition.max_context:,}" if condition.max_context else "whole"
        words = {
            "model": shorten_path(condition.model, values["model"]),
            "protocol": f"{condition.protocol} protocol",
            "dtype": condition.dtype,
            "max_context": f"contexts {cut}",
        }
        labels = [title, *(text for field, text in words.items() if len(values[field]) > 1)]
        if condition.prefix_policy != protocols.make_protocol(condition.protocol).prefix_policy:
            labels.append(f"prefix {condition.prefix_policy}")
        return ", ".join(labels)

    def name_condition(self, condition: Cell) -> str:
        """Return a name for files and ids, unique in the run."""
        names: dict[str, int] = {}
        for other in self.pools:
            model = other.model.rstrip("/").rsplit("/", 1)[-1]
            name = make_slug(model, other.benchmark.partition(":")[0], other.protocol)[:100]
            names[name] = names.get(name, 0) + 1
            if other == condition:
                break
        return name if names[name] == 1 else f"{name}-{names[name]}"

    def facts_of(self, condition: Cell) -> dict:
        """Return what one of the condition's cells was made with."""
        by_ratio = next(iter(self.pools[condition].values()))
        return next(iter(by_ratio.values())).identity


def make_frame(results: Sequence[Result]) -> DataFrame:
    """Return the rows of a grid as a DataFrame."""
    return import_extra("pandas", "eval").DataFrame(GridResults(results).rows())


def load_grid(folder: Path) -> GridResults:
    """Load every cell of the folder, which may hold none. Raises RestoreKVError for a mix-up."""
    results = load_results(folder) if (folder / CELLS).is_dir() else []
    _check_alike(results, "fingerprint", "models", _model_key)
    _check_alike(results, "digest", "benchmark data", lambda result: result.cell.question_set)
    return GridResults(results)


def _model_key(result: Result) -> Hashable:
    return result.cell.model, result.cell.protocol


def _check_alike(
    results: Sequence[Result],
    fact: str,
    what: str,
    name: Callable[[Result], Hashable],
) -> None:
    """Raise RestoreKVError where cells of one name have different values of a fact."""
    first: dict[Hashable, Result] = {}
    for result in results:
        other = first.setdefault(name(result), result)
        values = [{**each.identity, **each.identity["benchmark"]}[fact] for each in (other, result)]
        if values[0] != values[1]:
            raise RestoreKVError(
                f"{other.folder.name} and {result.folder.name} share a name but were made with "
                f"different {what} ({fact} {values[0]} and {values[1]}); report them from "
                "separate folders."
            )


def pool_rows(
    pool: SeedPool,
    base: SeedPool | None,
    full: SeedPool | None,
) -> Iterator[dict[str, object]]:
    """Yield a row for the whole benchmark and, if the pool is done, for each group and task."""
    answered, contexts = pool.progress
    facts = {"done": pool.done, "seeds": len(pool.results), "answered": answered, "of": contexts}
    stand_ins = ", ".join(sorted(pool.identity["benchmark"].get("stand_ins", ())))
    sizes: dict[str, object] = {}
    if pool.lines:
        sizes = {key: pool.average(key) for key in SIZES}
        sizes |= {
            "kept": pool.compute_kept_share(),
            "kept_with_prefix": pool.compute_kept_share(prefix=True),
        }
        if full and full.lines:
            sizes["of_full"] = pool.average("bytes") / full.average("bytes")
    left_out = ", ".join(pool.left_out)
    texts = {"kind": ALL, "part": "", "left_out": left_out, "stand_ins": stand_ins}
    whole = {**facts, **texts, **sizes}
    if not pool.done:
        yield whole
        return
    full = full if full and full.done else None
    if base:
        whole["as_many_pairs"] = bool((pool.get_values("pairs") == base.get_values("pairs")).all())
    metrics = {f"metric {name}": value for name, value in pool.average_metrics().items()}
    yield whole | pool.score_tasks(base=base, full=full) | pool.summarize_fidelity() | metrics
    for kind, parts in ((GROUP, pool.task_groups), (TASK, {task: (task,) for task in pool.tasks})):
        for part, members in parts.items():
            yield {**facts, "kind": kind, "part": part, **pool.score_tasks(members, base, full)}


def find_base(
    pools: Mapping[Cell | None, Mapping[float, SeedPool]], method: Cell | None, ratio: float
) -> SeedPool | None:
    """Return the base of a restored pool, if it is done and was asked the same seeds."""
    if method is None or not method.restored:
        return None
    base = pools.get(base_of(method), {}).get(ratio)
    if base is None or not base.done:
        return None
    own = [result.identity["benchmark"]["spec"] for result in pools[method][ratio].results]
    theirs = [result.identity["benchmark"]["spec"] for result in base.results]
    return base if own == theirs else None


def method_of(cell: Cell) -> Cell:
    """Return what a cell says of how caches are made; a base has nothing of the restore pass."""
    plain = Cell(model="", benchmark="", evictor="", ratio="")
    asked = ("model", "benchmark", "ratio", "protocol", "prefix_policy", "max_context", "dtype")
    method = replace(cell, **{key: getattr(plain, key) for key in asked})
    return method if method.restored else replace(base_of(method), offset=cell.offset)


def base_of(method: Cell) -> Cell:
    """Return the same eviction with nothing restored."""
    return replace(method.base, on_small_budget="", offset=0)


def condition_of(result: Result) -> Cell:
    """Return what was asked, and how the chat prefix counts: where scores can be compared."""
    cell = result.cell
    return Cell(
        model=cell.model,
        benchmark=drop_seed(result.identity["benchmark"]["spec"]),
        evictor="",
        ratio="",
        protocol=cell.protocol,
        prefix_policy=cell.prefix_policy or protocols.make_protocol(cell.protocol).prefix_policy,
        max_context=cell.max_context,
        dtype=cell.dtype,
    )


def belongs(result: Result, condition: Cell) -> bool:
    """Tell whether a cell is of the condition; a full cache is of every prefix policy."""
    own = condition_of(result)
    if result.cell.evictor == FULL:
        own = replace(own, prefix_policy=condition.prefix_policy)
    return own == condition


def _rank_method(method: Cell) -> tuple:
    """Order methods: for each evictor the base alone, then restored, each plain before variants."""
    evictors = list(METHOD_NAMES)
    name = method.evictor.partition(":")[0]
    place = evictors.index(name) if name in evictors else len(evictors)
    return (place, method.evictor, method.restored, describe_controls(method), repr(method))


def drop_seed(spec: str) -> str:
    """Return a benchmark's spec without its seed."""
    name, _, rest = spec.partition(":")
    settings = ",".join(item for item in rest.split(",") if item and not item.startswith("seed="))
    return f"{name}:{settings}" if settings else name


def shorten_path(path: str, others: Collection[str | None]) -> str:
    """Return the last part of a path or hub id, or all of it where another ends alike."""
    last = path.rstrip("/").rsplit("/", 1)[-1]
    alike = [other for other in others if other and other.rstrip("/").rsplit("/", 1)[-1] == last]
    return path if len(alike) > 1 else last
