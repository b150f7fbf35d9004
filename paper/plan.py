"""What experiments need, that is the cells that they share and the adapters that are missing, and
the scores of the cells that are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paper.experiment import Comparison, Place
from paper.scores import Scores
from paper.setting import Bench, Setting
from paper.study import Study
from paper.training import Training
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import SECONDS, Result
from restorekv.evaluation.stats import ScoredAnswer, find_tasks_without_loss
from restorekv.files import load_lines

Experiment = Comparison | Study
RunKey = tuple[str, str, float]  # a row, a benchmark of the paper, a ratio


@dataclass(frozen=True)
class Need:
    """A cell that an experiment needs for a row at a place, with the adapter of one seed."""

    row: str
    place: Place
    seed: int | None
    cell: Cell


def list_needs(experiment: Experiment, setting: Setting) -> list[Need]:
    """Return all needs with available adapters, in the order of the rows."""
    if isinstance(experiment, Study):
        return []
    return [
        Need(name, each, seed, cell)
        for name, row in experiment.rows.items()
        for seed, adapter in setting.locate_adapters(row).items()
        if seed is None or adapter is not None
        for place in experiment.places
        for each in place.each[:1]
        for cell in setting.cells(row, each, adapter)
    ]


def list_cells(experiments: Sequence[Experiment], setting: Setting) -> list[Cell]:
    """Return each cell once, in the experiments' order.

    Cells of the full cache are always included, because they decide which tasks count.
    """
    found: dict[Cell, None] = {}
    for experiment in experiments:
        found |= dict.fromkeys(need.cell for need in list_needs(experiment, setting))
        found |= dict.fromkeys(
            cell for key in list_benchmarks(experiment) for cell in setting.full(key)
        )
    return list(found)


def list_benchmarks(experiment: Experiment) -> list[str]:
    """Return the paper's benchmarks that a comparison asks; a study has none."""
    return (
        list(dict.fromkeys(place.benchmark for place in experiment.places))
        if isinstance(experiment, Comparison)
        else []
    )


def list_trainings(experiments: Sequence[Experiment], setting: Setting) -> list[Training]:
    """Return the trainings of missing adapters, each once, all of a seed before the next seed."""
    found: dict[str, Training] = {}
    for experiment in experiments:
        for row in experiment.rows.values() if isinstance(experiment, Comparison) else ():
            found |= {training.name: training for training in setting.list_wanted(row)}
    return sorted(found.values(), key=lambda training: training.seed)


def list_missing(experiment: Experiment, setting: Setting) -> Iterator[str]:
    """Yield the rows that cannot be measured for lack of an adapter, and which adapter that is."""
    if isinstance(experiment, Study):
        return
    for row in experiment.rows.values():
        places = setting.locate_adapters(row)
        if None not in places and not any(places.values()):
            names = ", ".join(training.name for training in setting.list_wanted(row)[:1])
            yield f"{row.label}: no adapter" + (f" ({names})" if names else "")


def list_unreachable(
    experiment: Experiment, setting: Setting, failed: Mapping[tuple[str, str], str]
) -> list[str]:
    """Return why evictors on benchmarks, or the study itself, could not be measured.

    The reasons are those in `failed` of `carry_out.Outcome`.
    """
    if isinstance(experiment, Study):
        return [failed[experiment.name, ""]] if (experiment.name, "") in failed else []
    told = [
        f"{bench.title}: {failed[spec, row.evictor]}"
        for bench in [setting.benches[name] for name in list_benchmarks(experiment)]
        for spec in bench.specs
        for row in experiment.rows.values()
        if (spec, row.evictor) in failed
    ]
    return list(dict.fromkeys(told))


def describe_seeds(experiment: Comparison, setting: Setting) -> str:
    """Say which training seeds each row has; "" if all rows have all seeds."""
    found = {
        row.label: [
            seed
            for seed, place in setting.locate_adapters(row).items()
            if seed is not None and place
        ]
        for row in experiment.rows.values()
        if isinstance(row.adapter, Mapping)
    }
    if not found or all(len(seeds) == len(setting.seeds) for seeds in found.values()):
        return ""
    groups: dict[tuple[int, ...], list[str]] = {}
    for label, seeds in found.items():
        groups.setdefault(tuple(seeds), []).append(label)
    told = "; ".join(
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds)) or 'none'}: "
        f"{', '.join(labels)}"
        for seeds, labels in groups.items()
    )
    return (
        f"Adapters at hand ({told}). Where a row has one seed its interval leaves out how seeds "
        "differ; "
        "--retrain makes the others."
    )


def collect_scores(
    experiment: Comparison, setting: Setting, results: Mapping[Cell, Result]
) -> Scores:
    """Return the scores from the cells that are done.

    Tasks on which the full cache scores below 10 are left out of every mean.
    """
    used = list_benchmarks(experiment)
    runs = {
        spot: {seed: _load_answers(found) for seed, found in by_seed.items()}
        for spot, by_seed in find_measured(experiment, setting, results).items()
    }
    sets = list(dict.fromkeys(setting.benches[key].specs for key in used))
    full_answers = {key: _load_full_answers(key, setting, results) for key in used}
    out = {
        key: _find_tasks_without_loss(setting.benches[key], answers)
        for key, answers in full_answers.items()
    }
    made = Scores(
        runs,
        {
            (key, part): _list_counted_tasks(of, full_answers[key], out[key])
            for key in used
            for part, of in setting.benches[key].parts.items()
        },
        frozenset(key for key in used if setting.benches[key].by_context),
        {key: sets.index(setting.benches[key].specs) for key in used},
        out,
    )
    made.check()
    return made


def find_measured(
    experiment: Comparison, setting: Setting, results: Mapping[Cell, Result]
) -> dict[RunKey, dict[int | None, list[Result]]]:
    """Return the finished results of every row, benchmark and ratio, by seed in ascending order.

    A seed has a result for each of the benchmark's specs; seeds that lack one are left out.
    """
    wanted: dict[RunKey, dict[int | None, list[Cell]]] = {}
    for need in list_needs(experiment, setting):
        held = wanted.setdefault((need.row, need.place.benchmark, need.place.ratio), {}).setdefault(
            need.seed, []
        )
        held += [need.cell] if need.cell not in held else []
    done = {cell for cell, result in results.items() if result.done}
    found = {
        spot: {
            seed: [results[cell] for cell in by_seed[seed]]
            for seed in sorted(by_seed, key=str)
            if done.issuperset(by_seed[seed])
        }
        for spot, by_seed in wanted.items()
    }
    return {spot: by_seed for spot, by_seed in found.items() if by_seed}


def _load_answers(found: Sequence[Result]) -> list[ScoredAnswer]:
    """Return the answers of one result, or of several as if they were one benchmark.

    The names of contexts of several get their benchmark as a prefix, so that they stay distinct.
    """
    if len(found) == 1:
        return found[0].answers
    return [
        replace(answer, context=f"{result.cell.benchmark}: {answer.context}")
        for result in found
        for answer in result.answers
    ]


def _load_full_answers(
    key: str, setting: Setting, results: Mapping[Cell, Result]
) -> list[ScoredAnswer]:
    """Return the full cache's answers to everything that replaces a benchmark of the paper; none if
    some are missing.
    """
    found = [results[cell] for cell in setting.full(key) if cell in results and results[cell].done]
    return _load_answers(found) if len(found) == len(setting.benches[key].specs) else []


def _find_tasks_without_loss(bench: Bench, full: Sequence[ScoredAnswer]) -> list[str]:
    """Return the benchmark's tasks on which the full cache, which gave these answers, scores below
    10.
    """
    below = find_tasks_without_loss(full, bench.by_context) if full else []
    named = bench.all_tasks
    return [task for task in below if not named or task in named]


def _list_counted_tasks(
    tasks: tuple[str, ...], full: Sequence[ScoredAnswer], out: Sequence[str]
) -> tuple[str, ...]:
    """Return the tasks of a part (all if `tasks` is empty) that count in its mean.

    Those in `out` do not count, unless that leaves none: then all do.
    """
    if not out:
        return tasks
    every = dict.fromkeys(answer.task for answer in full)
    return (
        tuple(task for task in every if task not in out and (not tasks or task in tasks)) or tasks
    )


def collect_seconds(
    experiment: Comparison, setting: Setting, results: Mapping[Cell, Result]
) -> dict[str, dict[str, float]]:
    """Return the seconds to make a cache at the tightest ratio, by row that the experiment times
    and by sample.

    Cells that share a preparation record its seconds only once: the first cell those of prefill and
    scoring, the first restored cell those of the restore pass. Here they count for all of them.
    """
    told = {}
    tight = min(place.ratio for place in experiment.places)
    for name in experiment.seconds:
        mine = [
            n.cell
            for n in list_needs(experiment, setting)
            if n.row == name and n.place.ratio == tight
        ]
        if not mine or mine[0] not in results or not results[mine[0]].done:
            continue
        shared = [
            result for cell, result in results.items() if cell.preparation == mine[0].preparation
        ]
        alike = [result for result in shared if result.cell.adapter == mine[0].adapter]
        phases = (
            _sum_phase(shared, "prefill"),
            _sum_phase(shared, "score"),
            _sum_phase(alike, "restore"),
        )
        own = _sum_phase([results[mine[0]]], "evict")
        told[name] = {
            sample: took + sum(each.get(sample, 0) for each in phases)
            for sample, took in own.items()
        }
    return told


def _sum_phase(found: Sequence[Result], name: str) -> dict[str, float]:
    """Return the longest time of a phase that any of the cells recorded, by sample.

    There can be several, because a run that is started again prepares again.
    """
    longest: dict[str, float] = {}
    for result in found:
        for line in load_lines(result.folder / SECONDS):
            if name in line:
                longest[line["sample"]] = max(longest.get(line["sample"], 0), line[name])
    return longest
