"""A grid as one table: a row for every condition, method, ratio and part of the benchmark.

Seeds are pooled. The rows are plain dicts, which terminals print; `make_frame` returns them as a
DataFrame, which writes CSV and Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from restorekv.errors import RestoreKVError, import_extra
from restorekv.evaluation.conditions import label_conditions, label_methods
from restorekv.evaluation.pools import SeedPool, pool_seeds
from restorekv.evaluation.results import CELLS, Result, check_result, load_results
from restorekv.evaluation.tables import make_slug

if TYPE_CHECKING:
    from pandas import DataFrame

# What part of the benchmark a row covers: all of it, a group of tasks, or one task.
ALL = "all"
GROUP = "group"
TASK = "task"
ASKED = ("model", "dtype", "protocol", "benchmark", "max_context", "prefix_policy")
Row = Mapping[str, Any]  # of columns of different types, by title


@dataclass(frozen=True)
class GridEntry:
    """One method at one ratio in one condition: the pool of its cells, and the columns that
    identify them in every row.
    """

    columns: Row
    pool: SeedPool

    def list_rows(self) -> Iterator[Row]:
        """Yield a row for the whole benchmark and, once its cells are done, for each group and each
        task.
        """
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
            whole |= pool.average_sizes()
            full_bytes = pool.average_full_bytes()
            if full_bytes is not None:
                whole["of_full"] = whole["bytes"] / full_bytes
        # A cell that is still running has a row too, with its progress instead of scores.
        if not pool.done:
            yield whole
            return
        if pool.evictor_alone:
            # A gain is due to the restore pass alone only if both hold as many pairs in each
            # context.
            same = pool.get_values("pairs") == pool.evictor_alone.get_values("pairs")
            whole["as_many_pairs"] = bool(same.all())
        figures = pool.summarize()
        metrics = figures.pop("metrics", {})
        yield whole | figures | {f"metric {name}": value for name, value in metrics.items()}
        single = {task: (task,) for task in pool.tasks}
        for kind, parts in ((GROUP, pool.task_groups), (TASK, single)):
            for part, task_names in parts.items():
                yield {**common, "kind": kind, "part": part, **pool.score_tasks(task_names)}


class GridResults:
    """The cells of a run as `entries`, condition by condition: the full cache first, then method by
    method, each from its highest ratio to its lowest.

    Tasks on which the full cache has nothing to lose are left out of the means of every method of
    its condition. Raises RestoreKVError if a model, benchmark or adapter has the same name in two
    cells but is not the same.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        refuse_name_clashes(results)
        self.results = results
        self.entries: list[GridEntry] = []
        pools = pool_seeds(results)
        titles = {
            condition: pool.identity["benchmark"]["title"]
            for (condition, _, _), pool in pools.items()
        }
        methods = label_methods(list(dict.fromkeys(method for _, method, _ in pools)))
        conditions = label_conditions(titles)
        order = list(titles)
        for (condition, method, ratio), pool in pools.items():
            columns = {
                "condition": conditions[condition],
                "name": f"{make_slug(titles[condition])}-{order.index(condition) + 1}",
                **{name: getattr(condition, name) for name in ASKED},
                "method": methods[method],
                "evictor": method.evictor,
                "restored": method.restored,
                "ratio": ratio,
            }
            self.entries.append(GridEntry(columns, pool))

    def list_rows(self) -> list[Row]:
        """Return the rows of all entries."""
        return [row for entry in self.entries for row in entry.list_rows()]


def refuse_name_clashes(results: Sequence[Result]) -> None:
    """Refuse cells whose model, benchmark or adapter has one name but is not the same."""
    # Things with the same name must be the same, or a mean would mix two experiments.
    first: dict[tuple[str, ...], tuple[str, Result]] = {}
    for result in results:
        cell = result.cell
        identity = result.identity
        adapter = (identity["adapter"] or {}).get("hash", "")
        for what, names, value in (
            ("models", (cell.model, cell.protocol), identity["fingerprint"]),
            ("benchmark data", cell.question_set, identity["benchmark"]["digest"]),
            # Seeds of one method are pooled, so they must share the adapter. With the allocation,
            # because "auto" may choose a different adapter for each.
            (
                "adapters",
                (
                    cell.model,
                    cell.evictor,
                    cell.allocation,
                    str(cell.adapter),
                    str(cell.restore_tokens),
                ),
                adapter,
            ),
        ):
            known, other = first.setdefault((what, *names), (value, result))
            if value != known:
                raise RestoreKVError(
                    f"{other.folder} and {result.folder} share a name but were made with different "
                    f"{what} ({known} and {value}); report them apart."
                )


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
    """Load every cell of the folder, which may hold none.

    Raises RestoreKVError for cells that share names but not what they name (see `GridResults`).
    """
    results = []
    if (folder / CELLS).is_dir():
        results = load_results(folder)
    return GridResults(results)
