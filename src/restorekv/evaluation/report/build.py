"""The report of a run folder: a section for everything that is there."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from restorekv.errors import RestoreKVError
from restorekv.evaluation.report import accuracy, analyses, kept, scores
from restorekv.evaluation.report.page import FILES, check_folder, write
from restorekv.evaluation.report.runs import Run, model_name, read
from restorekv.evaluation.results import SUMMARY, Result
from restorekv.evaluation.tables import Table, slug

COSTS = "What compressing cost stands in {}/efficiency; `python -m benchmarks efficiency --page --out {}` shows it."


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
    measured = [accuracy.section, scores.section, scores.metrics, kept.fidelity, accuracy.needles]
    sections = [section for make in measured for section in make(run)]
    sections += analyses.sections(folder) + kept.section(run) + kept.conventions(run)
    costs = (folder / "efficiency").is_dir()  # a checkout's benchmark wrote it
    if not sections:
        raise RestoreKVError(
            COSTS.format(folder, folder)
            if costs
            else f"{folder} holds no results to report; run `restorekv eval --out {folder}` first."
        )
    found = scores.pairs(run)
    summary = [f"Restoring at the same budget: {scores.count(found)}"] if found else []
    summary += [COSTS.format(folder, folder)] if costs else []
    return write(out, title(run), sections, summary, subtitle(run))


def terminal(results: Sequence[Result]) -> list[Table]:
    """Returns what `restorekv eval` prints of its cells: scores, further metrics, fidelity and what caches held."""
    run, tables = Run(results), []
    for condition in run.conditions:
        if columns := scores.columns_of(run, condition, ""):
            words = f"{model_name(condition.model)}, {run.benchmark(condition)}, {condition.protocol} protocol"
            tables.append(scores.of_columns(run, columns, f"{words}: scores", slug("scores", run.key(condition))))
    for section in (*scores.metrics(run), *kept.fidelity(run)):
        tables += section.blocks
    return tables + [kept.of_condition(run, condition) for condition in run.conditions]


def title(run: Run) -> str:
    """Says what was measured."""
    models = dict.fromkeys(model_name(each.model).replace("Tiny", "the tiny") for each in run.conditions)
    return f"Answers from compressed caches: {listed(models)}" if models else "Attention to compressed caches"


def subtitle(run: Run) -> str:
    """Says which benchmarks and protocols, how much of it is done, and when it was measured."""
    if not run.results:
        return ""
    benchmarks = listed(dict.fromkeys(map(run.benchmark, run.conditions)))
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
