"""Score SmolLM2's small caches on the benchmarks that ship, on as many texts as a comparison needs.

    python -m recipes.smollm2.scores FOLDER [--evictor kvzip] [--benchmark SPEC ...] [--workers 2]

Each evictor is asked alone and with its shipped adapter, at three ratios; FOLDER keeps every
answer, and another call continues or adds to it. `paper/results/smollm2-scores.json` gets a row for
every complete cell in FOLDER, and how many of the full cache's right answers each small cache
keeps. `make charts` draws the README's chart and the tables of the pages from it. All of BENCHMARKS
take more than five hours of one core, RULER one.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from restorekv.evaluation.answers_kept import list_kept_rows
from restorekv.evaluation.frame import GridResults
from restorekv.evaluation.grid import SHIPPED, Grid
from restorekv.evaluation.ray_pool import RayPool
from restorekv.evaluation.results import Result, load_results
from restorekv.evaluation.rows import make_payload
from restorekv.evaluation.run import GridProgress, LocalPool, WorkerPool, run_grid
from restorekv.files import write_json

RESULT = Path(__file__).parents[2] / "paper" / "results" / "smollm2-scores.json"
# Five texts of each of RULER's tasks, every validation story, every article, 40 of the others, two
# passages of each genre.
BENCHMARKS = (
    "ruler:length=1024,per_task=5",
    "fairytaleqa:length=1024,questions=4",
    "xquad:length=1024",
    "hotpotqa:count=40",
    "factbook:count=40",
    "genres",
)
RATIOS = ("0.3", "0.1", "0.05")
# As the shipped adapters were trained.
COMMON = {"prefix_policy": "free"}


def run_scores(
    folder: Path,
    evictors: Sequence[str],
    benchmarks: Sequence[str],
    pool: WorkerPool,
    ratios: Sequence[str] = RATIOS,
    model: str = "smollm2",
) -> list[Result]:
    """Answer what the folder lacks and return every cell's result."""
    grid = Grid(
        [model],
        [(evictor, SHIPPED) for evictor in evictors],
        benchmarks,
        ratios=ratios,
        common=COMMON,
    )
    start = time.monotonic()
    last = ""

    def report(progress: GridProgress) -> None:
        nonlocal last
        line = f"{progress.what}: {progress.done} of {progress.total}"
        if line != last:
            print(f"{time.monotonic() - start:.0f} s, {line}", flush=True)
            last = line

    return run_grid(grid.list_cells(), folder, pool, report)


def write_result(results: Sequence[Result], path: Path) -> None:
    """Write rows, conventions and answers kept, without the answers themselves."""
    payload = make_payload(results)
    del payload["answers"]
    payload["kept"] = list(list_kept_rows(GridResults(results)))
    payload["date"] = time.strftime("%Y-%m-%d")
    write_json(path, payload)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--evictor", nargs="+", default=["kvzip"])
    parser.add_argument("--benchmark", nargs="+", default=BENCHMARKS)
    parser.add_argument("--ratio", nargs="+", default=RATIOS)
    parser.add_argument("--workers", type=int, default=1, help="Processes of one thread each.")
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args(args)
    what = (given.folder, given.evictor, given.benchmark)
    if given.workers == 1:
        run_scores(*what, LocalPool(), given.ratio)
    else:
        with RayPool(given.workers) as pool:
            run_scores(*what, pool, given.ratio)
    # What earlier calls have answered counts too.
    write_result(load_results(given.folder), given.result)


if __name__ == "__main__":
    main()
