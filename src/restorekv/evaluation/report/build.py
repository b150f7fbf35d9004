"""The report of a run folder: a section for everything that is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.evaluation.report import accuracy, analyses, conventions, efficiency, kept, needle, scores
from restorekv.evaluation.report.names import Names, model_name, slug
from restorekv.evaluation.report.page import FILES, Section, check_folder, write
from restorekv.evaluation.report.runs import SortedResults, read, sort
from restorekv.evaluation.results import SUMMARY, Result
from restorekv.evaluation.tables import Table


def report(folder: Path, out: Path | None = None) -> Path:
    """Writes the page (to DIR/report by default) and returns its path.

    Raises RestoreKVError where there is nothing to report, for a mix-up, and for an `out` that holds something else.
    """
    if not folder.is_dir():
        raise RestoreKVError(f"There is no folder {folder}; give the one that `restorekv eval --out` wrote.")
    out = out or folder / "report"
    check_folder(out.resolve())
    others = sorted(path.name for path in out.iterdir() if path.name not in FILES) if out.is_dir() else []
    if others:  # the paper's page has files of its own there, which a report would take away
        raise RestoreKVError(
            f"{out} holds {others[0]}, which is no part of a report; choose another folder with --out."
        )
    run = read(folder)
    names = Names(run)
    sections = sections_of(folder, run, names)
    if not sections:
        raise RestoreKVError(f"{folder} holds no results to report; run `restorekv eval --out {folder}` first.")
    found = scores.pairs(run, names)
    summary = [f"Restoring at the same budget: {scores.count(found)}"] if found else []
    return write(out, title(run), sections, summary, subtitle(run, names))


def sections_of(folder: Path, run: SortedResults, names: Names) -> list[Section]:
    """Returns the sections in the order of the page."""
    measured = [accuracy.section, scores.section, scores.metrics, kept.fidelity, needle.section]
    sections = [section for make in measured for section in make(run, names)]
    sections += analyses.sections(folder) + efficiency.sections(folder)
    return sections + kept.section(run, names) + conventions.section(run, names)


def terminal(results: Sequence[Result]) -> list[Table]:
    """Returns what `restorekv eval` prints of its cells: scores, further metrics, fidelity and what caches held."""
    run = sort(results)
    names = Names(run)
    tables = []
    for condition in run.conditions:
        columns = scores.columns_of(run, condition, "")
        words = f"{model_name(condition.model)}, {names.benchmark(condition)}, {condition.protocol} protocol"
        tables += (
            [scores.of_columns(run, names, columns, f"{words}: scores", slug("scores", names.key(condition)))]
            if columns
            else []
        )
    for section in (*scores.metrics(run, names), *kept.fidelity(run, names)):
        tables += section.blocks
    return tables + [kept.of_condition(run, names, condition) for condition in run.conditions]


def title(run: SortedResults) -> str:
    """Says what was measured."""
    models = dict.fromkeys(model_name(each.model).replace("Bundled", "the bundled") for each in run.conditions)
    return f"Answers from compressed caches: {listed(models)}" if models else "Attention and cost of compressed caches"


def subtitle(run: SortedResults, names: Names) -> str:
    """Says which benchmarks and protocols, how much of it is done, and when it was measured."""
    if not run.results:
        return ""
    benchmarks = listed(dict.fromkeys(map(names.benchmark, run.conditions)))
    ways = list(dict.fromkeys(condition.protocol for condition in run.conditions))
    done = [result for result in run.results if result.done]
    words = (
        f"{benchmarks}; {listed(ways)} protocol{'s' * (len(ways) > 1)}; {len(done)} of {len(run.results)} cells done"
    )
    if done:
        last = datetime.fromtimestamp(max((result.folder / SUMMARY).stat().st_mtime for result in done))
        words += f", the last on {last.day} {last.strftime('%B %Y')}"
    return words + "."


def listed(words: Sequence[str]) -> str:
    """Returns "A, B and C"."""
    words = list(words)
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
