"""Draw what small caches keep of SmolLM2's answers, from the result of `recipes.smollm2.scores`.

    python -m recipes.smollm2.chart paper/results/smollm2-scores.json     # make charts

The script writes docs/charts/smollm2.svg, which the README shows, and the tables between marks of
the README, docs/choosing.md and docs/evaluation.md. The chart has a panel for each of PANELS: score
against the share of the full cache's memory that is held, chat prefix included, for an evictor
alone and with its restore adapter.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from recipes.pages import fill_page
from recipes.run import make_parser, run_recipe
from restorekv.evaluation.answers_kept import EVERY
from restorekv.evaluation.stats import MIN_FOR_RANKING, bootstrap_ratio
from restorekv.evaluation.tables import name_evictor
from restorekv.files import read_json, replace_file

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "charts" / "smollm2.svg"
# Results of other evictors, on some of the same texts.
OTHERS = (
    ROOT / "paper" / "results" / "smollm2-kvzip-plus.json",
    ROOT / "paper" / "results" / "smollm2-fast-65.json",
)
PAGE = ROOT / "docs" / "evaluation.md"
CHOOSING = ROOT / "docs" / "choosing.md"
README = ROOT / "README.md"
BEGIN = "<!-- made by `make charts` -->"
BEGIN_KEPT = "<!-- answers kept, made by `make charts` -->"
BEGIN_GENRES = "<!-- genres, made by `make charts` -->"
BEGIN_EVICTORS = "<!-- evictors, made by `make charts` -->"
BEGIN_KEPT_BY_EVICTORS = "<!-- answers that evictors keep, made by `make charts` -->"
END = "<!-- end -->"
END_KEPT = "<!-- end of answers kept -->"
END_GENRES = "<!-- end of genres -->"
END_EVICTORS = "<!-- end of evictors -->"
END_KEPT_BY_EVICTORS = "<!-- end of answers that evictors keep -->"
PANELS = ("RULER", "Factbook", "FairytaleQA", "Genres")
PANELS_BESIDE = 2
FEW_LOST = 10  # with fewer lost answers, the share that comes back is not shown

CHART_STYLE: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "none",
    "svg.hashsalt": "smollm2",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d5dae1",
    "axes.titlelocation": "left",
}
# Whether it is restored, its color and marker, and the side on which its intervals are drawn.
LINE_STYLES = ((False, "#d55e00", "s", -1), (True, "#0072b2", "o", 1))
Row = Mapping[str, Any]


def evictor_of(row: Row) -> str:
    """Return the name of a row's evictor, without settings."""
    return str(row["method"]).partition(":")[0]


def collect_titles(result: Mapping) -> dict[str, str]:
    """Return the title of each benchmark in the rows, by its spec."""
    known = {}
    for cell in result["facts"].values():
        title = cell["benchmark"]["title"]
        known[title.lower()] = title
    titles = {}
    for row in result["rows"]:
        name = row["benchmark"].partition(":")[0]
        titles[row["benchmark"]] = known.get(name, name)
    return titles


def find_full_cache(result: Mapping, benchmark: str) -> Row:
    """Return the row of the full cache."""
    return next(
        row for row in result["rows"] if row["benchmark"] == benchmark and row["method"] == "full"
    )


def find_small_caches(result: Mapping, benchmark: str, evictor: str, restored: bool) -> list[Row]:
    """Return an evictor's rows, the smallest cache first."""
    rows = [
        row
        for row in result["rows"]
        if row["benchmark"] == benchmark
        and row["restored"] == restored
        and evictor_of(row) == evictor
    ]
    return sorted(rows, key=lambda row: row["ratio"])


def draw_chart(result: Mapping, evictor: str, path: Path) -> None:
    """Write the chart of one evictor as an SVG on white, readable in light and dark themes."""
    titles = {
        benchmark: title for benchmark, title in collect_titles(result).items() if title in PANELS
    }
    with rc_context(CHART_STYLE):
        beside = min(PANELS_BESIDE, len(titles))
        lines = ceil(len(titles) / beside)
        size = (4.6 * beside, 3.5 * lines)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        panels = figure.subplots(lines, beside, squeeze=False).flatten()
        order = sorted(titles, key=lambda benchmark: PANELS.index(titles[benchmark]))
        for axes in panels[len(titles) :]:
            axes.set_axis_off()
        for axes, benchmark in zip(panels, order, strict=False):
            full = find_full_cache(result, benchmark)
            label = f"full cache, {format_megabytes(full)} MB"
            axes.axhline(full["score"], color="#1d2530", linestyle="--", label=label)
            for restored, color, marker, side in LINE_STYLES:
                rows = find_small_caches(result, benchmark, evictor, restored)
                shares = [100 * row["kept_with_prefix"] for row in rows]
                scores = [row["score"] for row in rows]
                suffix = "restored" if restored else "alone"
                label = f"{name_evictor(evictor)} {suffix}"
                axes.plot(shares, scores, color=color, marker=marker, label=label)
                # Shift the intervals a little, so that those of both lines do not overlap.
                places = [share + 0.06 * side for share in shares]
                lows = [row["low"] for row in rows]
                highs = [row["high"] for row in rows]
                axes.vlines(places, lows, highs, color=color, alpha=0.4)
            axes.set(ylim=(0, None), xlabel="memory held, % of the full cache", ylabel="score")
            axes.set_title(titles[benchmark])
            axes.legend(loc="lower right", frameon=False, fontsize=10)
        with replace_file(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})


def make_table(result: Mapping) -> str:
    """Return all figures as a Markdown table with a row for each benchmark, evictor and ratio."""
    lines = [
        "| benchmark | evictor | r | MB | score | restored | gain | KL | KL restored |",
        "|---" * 9 + "|",
    ]
    methods = [evictor_of(row) for row in result["rows"] if row["method"] != "full"]
    for benchmark, title in collect_titles(result).items():
        full = find_full_cache(result, benchmark)
        lines.append(
            format_line(
                describe_texts(title, full),
                "full cache",
                1,
                format_megabytes(full),
                format_score(full),
                "",
                "",
                0,
                "",
            )
        )
        for evictor in dict.fromkeys(methods):
            restored = {}
            for row in find_small_caches(result, benchmark, evictor, True):
                restored[row["ratio"]] = row
            for row in reversed(find_small_caches(result, benchmark, evictor, False)):
                partner = restored.get(row["ratio"])
                lines.append(
                    format_line(
                        "",
                        name_evictor(evictor),
                        row["ratio"],
                        format_megabytes(row),
                        format_score(row),
                        format_score(partner) if partner else "",
                        format_gain(partner) if partner else "",
                        format_divergence(row),
                        format_divergence(partner) if partner else "",
                    )
                )
    return "\n".join(lines)


def make_evictors_table(results: Sequence[Mapping]) -> str:
    """Return a Markdown table that compares several evictors on the same texts, ratio by ratio.

    Each result is that of one evictor. Benchmarks that only one result has are left out.
    """
    columns = ["texts", "r", "evictor", "score", "restored", "gain", "KL", "KL restored"]
    lines = [format_line(*columns), "|---" * len(columns) + "|"]
    titles: dict[str, str] = {}
    for result in results:
        titles |= collect_titles(result)
    for benchmark, title in titles.items():
        asked = [each for each in results if benchmark in collect_titles(each)]
        if len(asked) < 2:
            continue
        full = find_full_cache(asked[0], benchmark)
        for result in asked[1:]:
            other = find_full_cache(result, benchmark)
            if (full["samples"], full["score"]) != (other["samples"], other["score"]):
                raise ValueError(f"The full cache does not answer the same in {benchmark}.")
        begins = f"{title}, {full['samples']} texts"
        for ratio in sorted({row["ratio"] for row in asked[0]["rows"]} - {1}, reverse=True):
            for result in asked:
                line = list_evictor_cells(result, benchmark, ratio)
                lines.append(format_line(begins, ratio if result is asked[0] else "", *line))
                begins = ""
    return "\n".join(lines)


def list_evictor_cells(result: Mapping, benchmark: str, ratio: float) -> tuple[str, ...]:
    """Return the cells of one row of `make_evictors_table`, starting with the evictor's name."""
    rows = []
    for restored in (False, True):
        (row,) = [
            each
            for each in find_small_caches(result, benchmark, find_evictor(result), restored)
            if each["ratio"] == ratio
        ]
        rows.append(row)
    alone, restored_row = rows
    return (
        name_evictor(find_evictor(result)),
        format_score(alone),
        format_score(restored_row),
        format_gain(restored_row),
        f"{alone['kl']:.3f}",
        f"{restored_row['kl']:.3f}",
    )


def find_evictor(result: Mapping) -> str:
    """Return the one evictor of a result, without settings."""
    (evictor,) = {evictor_of(row) for row in result["rows"]} - {"full"}
    return evictor


def make_evictors_kept_table(results: Sequence[Mapping]) -> str:
    """Return a Markdown table of how many of the full cache's right answers other evictors keep.

    They are compared with the first result's restored cache, on the benchmarks that both have, with
    a row for each benchmark and one for all of them.
    """
    first = results[0]
    first_name = f"{name_evictor(find_evictor(first))} restored"
    known = collect_titles(first).values()
    columns = ["evictor, texts", "r", "right with the full cache", "alone", "restored"]
    lines = [format_line(*columns, first_name, "more"), "|---" * (len(columns) + 2) + "|"]
    for result in results[1:]:
        name = name_evictor(find_evictor(result))
        titles = [title for title in collect_titles(result).values() if title in known]
        parts = {title: [title] for title in titles}
        if len(titles) > 1:
            parts = {"all of them": titles, **parts}
        for part, names in parts.items():
            begins = f"{name}, {part}"
            for ratio in sorted({row["ratio"] for row in result["rows"]} - {1}, reverse=True):
                cells = compare_kept_answers(first, result, names, ratio)
                lines.append(format_line(begins, f"{ratio:g}", *cells))
                begins = ""
    return "\n".join(lines)


def compare_kept_answers(
    first: Mapping, result: Mapping, titles: Sequence[str], ratio: float
) -> tuple[str, ...]:
    """Return the cells of one row of `make_evictors_kept_table`, starting with the right answers.

    Args:
        first: The result with the restored caches to compare with.
        result: The result of the other evictor.
        titles: The benchmarks that count.
        ratio: The budget ratio.
    """
    _, of_first = list_kept_by_context(first, titles, ratio)
    alone, restored = list_kept_by_context(result, titles, ratio)
    known = [context[:3] for context in of_first]
    if [context[:3] for context in restored] != known:
        raise ValueError("The two evictors were not asked the same, or the full cache differs.")
    right = np.array([context[2] for context in restored], float)
    kept = np.array([context[3] for context in restored], float)
    kept_by_first = np.array([context[3] for context in of_first], float)
    more, low, high = bootstrap_ratio(kept - kept_by_first, right)
    interval = ""
    if low is not None and high is not None:
        interval = f", {format_points(low)} to {format_points(high)}"
    return (
        f"{right.sum():.0f}",
        f"{sum(context[3] for context in alone)}",
        f"{kept.sum():.0f}",
        f"{kept_by_first.sum():.0f}",
        f"{format_points(more)} %{interval}",
    )


def format_points(share: float) -> str:
    """Return a difference of shares in points, with its sign unless it rounds to zero."""
    text = f"{100 * share:+.0f}"
    return "0" if text in ("+0", "-0") else text


def list_kept_by_context(
    result: Mapping, titles: Sequence[str] | None, ratio: float
) -> list[list[Sequence[Any]]]:
    """Return the contexts of the benchmarks in `titles` (None means all): [alone, restored].

    Each context is its title, its tokens, how many answers are right with the full cache, and how
    many of these stay right. They are in the order of `titles`.
    """
    both = []
    # The method of the evictor alone comes first, then the restored one.
    for method in dict.fromkeys(row["method"] for row in result["kept"]):
        contexts = result["kept_by_context"][f"{method} at {ratio:g}"]
        if titles is not None:
            contexts = [each for title in titles for each in contexts if each[0] == title]
        both.append(contexts)
    return both


def make_summary(result: Mapping, evictor: str) -> str:
    """Return a short table of one evictor: scores and divergence on every benchmark."""
    lines = [
        "| texts | r | full cache | KVzip | restored | KL, KVzip | KL, restored |",
        "|---" * 7 + "|",
    ]
    for benchmark, title in collect_titles(result).items():
        full = find_full_cache(result, benchmark)
        restored = {}
        for row in find_small_caches(result, benchmark, evictor, True):
            restored[row["ratio"]] = row
        alone = find_small_caches(result, benchmark, evictor, False)
        for row in reversed(alone):
            is_first = row is alone[-1]
            partner = restored.get(row["ratio"])
            lines.append(
                format_line(
                    describe_texts(title, full) if is_first else "",
                    row["ratio"],
                    format_score(full) if is_first else "",
                    format_score(row),
                    format_score(partner) if partner else "",
                    f"{row['kl']:.3f}",
                    f"{partner['kl']:.3f}" if partner else "",
                )
            )
    return "\n".join(lines)


def make_kept_table(result: Mapping) -> str:
    """Return a Markdown table of how many of the full cache's right answers small caches keep.

    It has rows for each kind of text. Kinds with fewer than ten right answers are only counted in
    the first rows, which are over all texts.
    """
    by_part = group_kept_rows(result)
    methods = list(dict.fromkeys(row["method"] for row in result["kept"]))
    columns = ["texts", "r", "right with the full cache", *methods, "lost ones back"]
    lines = [format_line(*columns), "|---" * len(columns) + "|"]
    for part, rows in by_part.items():
        for ratio in sorted({ratio for _, ratio in rows}, reverse=True):
            own = [rows.get((method, ratio)) for method in methods]
            right = next(row["right"] for row in own if row)
            cells = [f"{row['kept']} ({format_share(row)})" if row else "" for row in own]
            back = format_back(result, part, ratio)
            lines.append(format_line(part, f"{ratio:g}", right, *cells, back))
    return "\n".join(lines)


def format_back(result: Mapping, part: str, ratio: float) -> str:
    """Return the share of lost answers that restoring brings back, with its paired 95 % interval.

    Lost answers are those that the evictor alone loses; answers that only restoring loses are
    subtracted from those it brings back. The interval is over texts.
    """
    alone, restored = list_kept_by_context(result, None if part == EVERY else [part], ratio)
    lost = []
    gained = []
    # An entry is a text's title, its tokens, its right answers, and how many of them stay right.
    for (title, tokens, right, kept), other in zip(alone, restored, strict=True):
        if other[:3] != [title, tokens, right]:
            raise ValueError(f"{title} is not asked the same alone and restored.")
        lost.append(right - kept)
        gained.append(other[3] - kept)
    # A share of only a few answers means nothing.
    if sum(lost) < FEW_LOST:
        return ""
    share, low, high = bootstrap_ratio(np.array(gained, float), np.array(lost, float))
    if low is None or high is None:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.0f} %, {100 * low:.0f} to {100 * high:.0f}"


def make_kept_summary(result: Mapping, evictor: str) -> str:
    """Return the README's table of answers kept alone and restored, a row for each kind of text."""
    alone = name_evictor(evictor)
    restored = f"{alone} + RestoreKV"
    by_part = group_kept_rows(result)
    ratios = sorted({ratio for rows in by_part.values() for _, ratio in rows}, reverse=True)
    lines = [
        format_line("texts", "right with the full cache", *(f"r = {ratio:g}" for ratio in ratios)),
        "|---" * (2 + len(ratios)) + "|",
    ]
    for part, rows in by_part.items():
        cells = []
        for ratio in ratios:
            cells.append(f"{rows[alone, ratio]['kept']} / {rows[restored, ratio]['kept']}")
        lines.append(format_line(part, rows[alone, ratios[0]]["right"], *cells))
    return "\n".join(lines)


def group_kept_rows(result: Mapping) -> dict[str, dict[tuple[str, float], Row]]:
    """Return the rows of answers kept, by kind of text, then by method and ratio.

    Kinds of text on which the full cache has fewer than ten right answers are left out.
    """
    by_part: dict[str, dict[tuple[str, float], Row]] = {}
    for row in result["kept"]:
        if "tokens" not in row["part"] and row["right"] >= 10:
            title = row["part"].partition(", prefix policy")[0]
            by_part.setdefault(title, {})[row["method"], row["ratio"]] = row
    return by_part


def make_genres_table(result: Mapping, evictor: str) -> str:
    """Return a Markdown table of how much restoring reduces the divergence of each genre: median
    and extremes over genres.
    """
    lines = [
        "| r | genres | KL, mean | KL restored | cut, median | least | most |",
        "|---" * 7 + "|",
    ]
    for name, alone in result["genres"].items():
        method, _, ratio = name.partition(" alone at ")
        if method != evictor or not ratio:
            continue
        restored = result["genres"][f"{evictor} restored at {ratio}"]
        cuts = sorted((1 - restored[genre] / alone[genre], genre) for genre in alone)
        lines.append(
            format_line(
                ratio,
                len(cuts),
                f"{fmean(alone.values()):.3f}",
                f"{fmean(restored.values()):.3f}",
                f"{100 * median(cut for cut, _ in cuts):.0f} %",
                format_cut(*cuts[0]),
                format_cut(*cuts[-1]),
            )
        )
    return "\n".join(lines)


def format_cut(cut: float, genre: str) -> str:
    return f"{100 * cut:.0f} % ({genre.replace('_', ' ')})"


def describe_texts(title: str, full: Row) -> str:
    """Say how many texts a benchmark has, and how many of its tasks count in its score."""
    texts = f"{title}, {full['samples']} texts"
    if full["samples"] < MIN_FOR_RANKING:
        texts = f"{texts} (a glimpse)"
    if not full["left_out"]:
        return texts
    tasks = len(full["tasks"])
    if tasks == len(full["left_out"]):
        return f"{texts}; the full cache scores below 10"
    return f"{texts}; scores: {tasks - len(full['left_out'])} of {tasks} tasks"


def format_share(row: Row) -> str:
    """Return the share of answers kept, with its 95 % interval over texts if it is known."""
    if row.get("low") is None:
        return f"{100 * row['share']:.0f} %"
    return f"{100 * row['share']:.0f} %, {100 * row['low']:.0f} to {100 * row['high']:.0f}"


def format_line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def format_megabytes(row: Row) -> str:
    return f"{row['bytes'] / 1e6:.1f}"


def format_score(row: Row) -> str:
    return f"{row['score']:.1f}"


def format_gain(row: Row) -> str:
    """Return the gain over the evictor alone, with its paired 95 % interval."""
    if row["gain_low"] is None:
        return f"{row['gain']:+.1f}"
    return f"{row['gain']:+.1f} ({row['gain_low']:+.1f} to {row['gain_high']:+.1f})"


def format_divergence(row: Row) -> str:
    """Return KL with its 95 % interval."""
    if row["kl_low"] is None:
        return f"{row['kl']:.3f}"
    return f"{row['kl']:.3f} ({row['kl_low']:.3f} to {row['kl_high']:.3f})"


def main(args: Sequence[str] | None = None) -> None:
    """Draw the chart and fill the tables of the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("result", type=Path, help="What `restorekv eval --json` wrote.")
    parser.add_argument(
        "--evictor", default="kvzip", help="The evictor of the chart; the table has all."
    )
    parser.add_argument(
        "--other", nargs="*", type=Path, default=OTHERS, help="Results of other evictors."
    )
    parser.add_argument("--chart", type=Path, default=CHART)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--choosing", type=Path, default=CHOOSING)
    parser.add_argument("--readme", type=Path, default=README)
    given = parser.parse_args(args)
    result = read_json(given.result, str(given.result))
    draw_chart(result, given.evictor, given.chart)
    fill_page(given.page, BEGIN, END, make_table(result))
    fill_page(given.page, BEGIN_KEPT, END_KEPT, make_kept_table(result))
    fill_page(given.page, BEGIN_GENRES, END_GENRES, make_genres_table(result, given.evictor))
    others = [read_json(path, str(path)) for path in given.other]
    results = [result, *others]
    fill_page(given.page, BEGIN_EVICTORS, END_EVICTORS, make_evictors_table(results))
    kept_by_evictors = make_evictors_kept_table(results)
    fill_page(given.page, BEGIN_KEPT_BY_EVICTORS, END_KEPT_BY_EVICTORS, kept_by_evictors)
    fill_page(given.choosing, BEGIN, END, make_summary(result, given.evictor))
    kept = make_kept_summary(result, given.evictor)
    for page in (given.choosing, given.readme):
        fill_page(page, BEGIN_KEPT, END_KEPT, kept)


if __name__ == "__main__":
    run_recipe(main)
