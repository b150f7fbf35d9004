"""Score SmolLM2's small caches on the benchmarks that ship, on as many texts as a comparison needs.

    python -m recipes.smollm2.scores FOLDER [--evictor kvzip] [--benchmark SPEC ...] [--workers 2]

Each evictor is asked alone and with its shipped adapter, at three ratios. FOLDER keeps every
answer, and another call continues or adds to it. `paper/results/smollm2-scores.json` gets a row for
every complete cell in FOLDER, how many of the full cache's right answers each small cache keeps,
and the divergence of each genre alone and restored. Figures of benchmarks that FOLDER lacks stay in
that file if they were measured with the same adapters, so benchmarks can be measured one after the
other. `make charts` makes the README's chart and the tables of the pages from it. All of BENCHMARKS
take about six hours of one core, of which RULER takes one.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.run import make_parser, run_recipe
from restorekv.evaluation.answers_kept import (
    AnswersByMethod,
    ContextAnswers,
    collect_answers,
    list_kept_rows,
)
from restorekv.evaluation.frame import GridResults
from restorekv.evaluation.grid import FULL, SHIPPED, Grid
from restorekv.evaluation.ray_pool import RayPool
from restorekv.evaluation.results import Result, load_results
from restorekv.evaluation.rows import make_payload
from restorekv.evaluation.run import GridProgress, LocalPool, WorkerPool, run_grid
from restorekv.files import read_json, write_json

RESULT = Path(__file__).parents[2] / "paper" / "results" / "smollm2-scores.json"
# Five texts of each of RULER's tasks, every validation story, every article with all questions,
# every question of HotpotQA, 40 sections of Factbook, two passages of each genre.
BENCHMARKS = (
    "ruler:length=1024,per_task=5",
    "fairytaleqa:length=1024,questions=4",
    "xquad:length=1024,questions=0",
    "hotpotqa:count=75",
    "factbook:count=40",
    "genres",
)
RATIOS = ("0.3", "0.1", "0.05")
# The prefix policy that the shipped adapters were trained with.
COMMON = {"prefix_policy": "free"}


def run_scores(
    folder: Path,
    evictors: Sequence[str],
    benchmarks: Sequence[str],
    pool: WorkerPool,
    ratios: Sequence[str] = RATIOS,
    model: str = "smollm2",
) -> list[Result]:
    """Run the cells of these evictors and benchmarks that the folder lacks; return all results."""
    grid = Grid(
        [model],
        [(evictor, SHIPPED) for evictor in evictors],
        benchmarks,
        ratios=ratios,
        common=COMMON,
    )
    return answer_grid(grid, folder, pool)


def answer_grid(grid: Grid, folder: Path, pool: WorkerPool) -> list[Result]:
    """Run the cells of a grid that the folder lacks, print the progress, and return all results."""
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
    """Write rows, conventions and the numbers of answers kept, without the answers themselves.

    Figures of other benchmarks stay in `path` if they were measured with the same adapters.
    """
    payload = make_payload(results)
    del payload["answers"]
    payload["genres"] = measure_genres(results)
    titles = list_titles(payload)
    counted: AnswersByMethod = {}
    for key, contexts in collect_answers(GridResults(results)).items():
        # Two settings of one benchmark share contexts, which count once.
        distinct = {}
        for each in contexts:
            distinct[each.context] = replace(each, text=find_title(each.text, titles))
        counted[key] = list(distinct.values())
    payload["kept"] = list(list_kept_rows(counted))
    payload["kept_by_context"] = {}
    for (method, ratio), contexts in counted.items():
        payload["kept_by_context"][f"{method} at {ratio:g}"] = [
            [each.text, each.tokens, each.right, each.kept] for each in contexts
        ]
    if path.exists():
        add_former(payload, read_json(path, str(path)))
    payload["date"] = time.strftime("%Y-%m-%d")
    write_json(path, payload)


def list_titles(payload: Mapping[str, Any]) -> set[str]:
    """Return the titles of a result's benchmarks."""
    return {fact["benchmark"]["title"] for fact in payload["facts"].values()}


def find_title(label: str, titles: Collection[str]) -> str:
    """Return the benchmark's title in a label that may also have settings and the prefix policy.

    A label of something else is returned unchanged.
    """
    found = [each for each in titles if f"{label}, ".startswith((f"{each}, ", f"{each} ("))]
    return max(found, key=len, default=label)


def measure_genres(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return the mean divergence of every genre's answers, under keys such as "kvzip
    alone at 0.1".
    """
    genres = {}
    for result in results:
        cell = result.cell
        if not result.done or cell.evictor == FULL or not cell.benchmark.startswith("genres"):
            continue
        divergences: dict[str, list[float]] = {}
        for line in result.lines:
            for answer in line["answers"]:
                divergences.setdefault(answer["task"], []).append(answer["kl"])
        how = "restored" if cell.adapter else "alone"
        genres[f"{cell.evictor} {how} at {cell.ratio}"] = {
            genre: fmean(own) for genre, own in sorted(divergences.items())
        }
    return genres


def add_former(payload: dict[str, Any], former: Mapping[str, Any]) -> None:
    """Add a former result's figures of the benchmarks that `payload` lacks, to all of its parts.

    Nothing is added if they are of another adapter or model.
    """
    evictors = [{row["evictor"] for row in each["rows"]} - {FULL} for each in (payload, former)]
    if evictors[0] != evictors[1]:
        raise SystemExit(
            f"The result so far is of {', '.join(sorted(evictors[1]))}, not of "
            f"{', '.join(sorted(evictors[0]))}; give --result another file."
        )
    # Compare only the facts that decide answers; versions of libraries may differ.
    if list_makers(payload["facts"]) != list_makers(former["facts"]):
        print("The former result was measured with other adapters; nothing of it stays.")
        return
    if "kept_by_context" not in former:
        print("The former result does not say which texts it counted; nothing of it stays.")
        return
    # A benchmark with other settings, such as more questions, replaces the former one.
    here = {find_name(row) for row in payload["rows"]}
    kept_rows = [row for row in former["rows"] if find_name(row) not in here]
    names = list_titles(payload)
    titles = names | list_titles(former)
    added = {
        name: fact
        for name, fact in former["facts"].items()
        if fact["benchmark"]["title"] not in names
    }
    payload["rows"] = kept_rows + payload["rows"]
    payload["facts"] = added | payload["facts"]
    payload["genres"] = former["genres"] | payload["genres"]
    by_context = former["kept_by_context"]
    counted: AnswersByMethod = {}
    for key in dict.fromkeys((*by_context, *payload["kept_by_context"])):
        method, _, ratio = key.rpartition(" at ")
        stay = []
        for text, *figures in by_context.get(key, []):
            title = find_title(text, titles)
            if title not in names:
                stay.append([title, *figures])
        own = stay + payload["kept_by_context"].get(key, [])
        payload["kept_by_context"][key] = own
        counted[method, float(ratio)] = [
            ContextAnswers(place, *each) for place, each in enumerate(own)
        ]
    payload["kept"] = list(list_kept_rows(counted))


def find_name(row: Mapping[str, Any]) -> str:
    """Return the name of a row's benchmark, without settings."""
    return row["benchmark"].partition(":")[0]


def list_makers(facts: Mapping[str, Mapping]) -> set[str]:
    """Return what decides the answers of a result's small caches, except evictor and ratio: model,
    dtype and adapter.
    """
    makers = set()
    for fact in facts.values():
        if fact["adapter"]:
            makers.add(json.dumps([fact["fingerprint"], fact["dtype"], fact["adapter"]]))
    return makers


def main(args: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
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
    # Load the whole folder, so that answers of earlier calls count too.
    write_result(load_results(given.folder), given.result)


if __name__ == "__main__":
    run_recipe(main)
