"""The report of a run folder: a section for everything that is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.evaluation.report import (
    accuracy,
    analyses,
    both_protocols,
    by_task,
    convention,
    efficiency,
    faithful,
    needle,
    paired,
)
from restorekv.evaluation.report.blocks import Section, at, number
from restorekv.evaluation.report.folder import FILES, check_folder, write
from restorekv.evaluation.report.names import Names, spoken
from restorekv.evaluation.report.paired import Pair
from restorekv.evaluation.report.runs import Run, read
from restorekv.evaluation.results import SUMMARY


def report(folder: Path, out: Path | None = None) -> Path:
    """Writes the page (to DIR/report by default) and returns its path.

    Raises RestoreKVError where there is nothing to report, for a mix-up, and for an `out` that holds something else.
    """
    if not folder.is_dir():
        raise RestoreKVError(f"There is no folder {folder}; give the one that `restorekv eval --out` wrote.")
    out = out or folder / "report"
    check_folder(out.resolve())
    refuse_others(out)
    run = read(folder)
    names = Names(run)
    made = sections(run, names)
    if not made:
        raise RestoreKVError(f"{folder} holds no results to report; run `restorekv eval --out {folder}` first.")
    return write(out, title(run, names), made, summary(run, names), subtitle(run, names))


def refuse_others(out: Path) -> None:
    """The paper's page has files of its own beside it; a report would take them away."""
    found = sorted(path.name for path in out.iterdir() if path.name not in FILES) if out.is_dir() else []
    if found:
        raise RestoreKVError(f"{out} holds {found[0]}, which is no part of a report; choose another folder with --out.")


def sections(run: Run, names: Names) -> list[Section]:
    """In the order of the page."""
    parts = [accuracy, paired, faithful, both_protocols, needle]
    found = [section for part in parts for section in part.section(run, names)]
    found += analyses.sections(run.folder) + efficiency.sections(run.folder)
    return found + by_task.section(run, names) + convention.section(run, names)


def title(run: Run, names: Names) -> str:
    """What was measured."""
    models = [
        spoken(name).replace("Bundled", "the bundled") for name in dict.fromkeys(place.model for place in run.places)
    ]
    return f"Answers from compressed caches: {listed(models)}" if models else "Attention and cost of compressed caches"


def subtitle(run: Run, names: Names) -> str:
    """Benchmarks and protocols, how much of it there is, and when it was measured."""
    if not run.results:
        return ""
    benchmarks = listed(list(dict.fromkeys(names.benchmark(place) for place in run.places)))
    ways = list(dict.fromkeys(place.protocol for place in run.places))
    done = [result for result in run.results if result.done]
    words = (
        f"{benchmarks}; {listed(ways)} protocol{'s' * (len(ways) > 1)}; {len(done)} of {len(run.results)} cells done"
    )
    if done:
        last = datetime.fromtimestamp(max((result.folder / SUMMARY).stat().st_mtime for result in done))
        words += f", the last on {last.day} {last.strftime('%B %Y')}"
    return words + "."


def summary(run: Run, names: Names) -> list[str]:
    """Two lines: how many pairs gain, and the first method at its tightest budget."""
    found = paired.pairs(run, names)
    if not found:
        return []
    return [f"Restoring at the same budget: {paired.count(found)}", headline(run, names, found)]


def headline(run: Run, names: Names, found: Sequence[Pair]) -> str:
    """In words: the tightest finished pair of the first method in the first place."""
    first = next(method for method in names.methods if any(pair.method == method for pair in found))
    mine = [pair for pair in found if pair.method == first]
    pair = min((pair for pair in mine if pair.place == mine[0].place), key=lambda pair: pair.ratio)
    told = pair.figures
    words = (
        f"{names.place(pair.place)} at {at(pair.ratio)}: {names.label(first.base)} scores "
        f"{number(told['score'] - told['gain'])}, restored {number(told['score'])} points "
        f"({number(told['gain'], sign=True)}, 95 % interval {number(told['gain_low'], sign=True)} to "
        f"{number(told['gain_high'], sign=True)})"
    )
    full = run.places[pair.place].full
    return words + (f"; the full cache {number(full.score()['score'])}." if full and full.done else ".")


def listed(words: Sequence[str]) -> str:
    """A, B and C."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
