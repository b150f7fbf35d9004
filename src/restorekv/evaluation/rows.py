"""Figures of cells for files and programs: a cell's summary, and the rows of `eval --json`."""

from collections.abc import Sequence

from restorekv.evaluation.conditions import Method
from restorekv.evaluation.fidelity import FIGURES
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.pools import SeedPool, pool_seeds
from restorekv.evaluation.results import Result

# Keys that a row copies from the identity of its cell.
IDENTITY_COLUMNS = (
    "prefix_policy",
    "on_small_budget",
    "allocation",
    "restore_from",
    "offset",
    "fingerprint",
    "dtype",
    "device",
)
# Keys that a row copies from the summary of its cell.
SUMMARY_COLUMNS = ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix", "samples")


def summarize_cell(result: Result) -> dict:
    """Return a finished cell's figures: means over contexts of what its caches held, scores in
    points.
    """
    pool = SeedPool((result,))
    return {
        **pool.summarize(),
        "samples": len(pool.lines),
        **pool.average_sizes(("pairs", "pairs_with_prefix", "bytes")),
        "tasks": {task: pool.summarize([task]) for task in pool.tasks},
        "groups": {
            name: pool.score_tasks(task_names) for name, task_names in pool.task_groups.items()
        },
    }


def make_rows(results: Sequence[Result]) -> list[dict]:
    """Return a row for every finished cell, in their order; among identical cells the first is
    used. Scores are in points; pairs and bytes are means.
    """
    # A cell that still runs has no figures, and nothing is compared with it.
    done = [result for result in results if result.done]
    pools = {}
    # Every seed has its own rows, so seeds are not pooled.
    for own in group_by(done, lambda each: each.identity["benchmark"]["spec"]).values():
        pools |= {pool.results[0].cell: pool for pool in pool_seeds(own).values()}
    return [_make_row(pools[result.cell]) for result in done if result.cell in pools]


def _make_row(pool: SeedPool) -> dict:
    """Return a cell's figures, with its `gain` over the evictor alone.

    Means leave out the tasks on which the full cache scores below 10 (`left_out`); `tasks` holds
    every task, and fidelity is over all tasks.
    """
    (result,) = pool.results
    cell = result.cell
    identity = result.identity
    figures = result.summary
    score = pool.score_tasks()
    # Count the questions of all tasks, including those that means leave out.
    score["questions"] = figures["questions"]
    return {
        "model": cell.model,
        "benchmark": cell.benchmark,
        "protocol": cell.protocol,
        "evictor": cell.evictor,
        "method": identity["method"],
        "restored": cell.restored,
        "adapter": identity["adapter"] and identity["adapter"]["hash"],
        "label": Method.of_cell(cell).describe_settings(),
        "ratio": cell.ratio_value,
        "kv_dtype": cell.kv_dtype,
        "streaming_chunk": cell.streaming_chunk,
        "max_context": cell.max_context,
        **{key: identity[key] for key in IDENTITY_COLUMNS},
        **{key: figures[key] for key in SUMMARY_COLUMNS},
        **score,
        "metrics": pool.average_metrics(),
        **{key: figures[key] for key in FIGURES},
        "tasks": {task: each["score"] for task, each in figures["tasks"].items()},
        "left_out": list(pool.left_out),
        "groups": {
            name: pool.score_tasks(task_names) for name, task_names in pool.task_groups.items()
        },
    }


def make_payload(results: Sequence[Result]) -> dict:
    """Return the rows, the identities and every answer of the finished cells, for programs."""
    done = {result.cell.name: result for result in results if result.done}
    return {
        "rows": make_rows(results),
        # The file format's name for identities.
        "facts": {name: result.identity for name, result in done.items()},
        "answers": {name: result.lines for name, result in done.items()},
    }
