"""Two cells of a grid, such as two evictors at one ratio, compared context by context.

The tables of `restorekv eval` show what restoring gains over the same evictor alone; this module
answers whether one evictor is better than another.
"""

from collections.abc import Sequence
from fractions import Fraction

from restorekv import tasks
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError, warn
from restorekv.evaluation.fidelity import summarize_fidelity, tally_divergence
from restorekv.evaluation.grid import FULL
from restorekv.evaluation.results import Result, check_result, list_answers
from restorekv.evaluation.reuse import digest_line
from restorekv.evaluation.stats import (
    Estimate,
    bootstrap_ratio,
    bootstrap_score,
    check_same_questions,
    compute_mean_score,
    drop_tasks,
    find_tasks_without_loss,
)

Lines = Sequence[dict]


def _field_equals(name: str, own: object, wanted: object) -> bool:
    """Return whether a cell's field has the wanted value; a ratio may also be given as a number."""
    if name == "ratio" and isinstance(wanted, int | float | Fraction):
        return isinstance(own, str) and parse_ratio(own) == parse_ratio(wanted)
    return own == wanted


def select_result(results: Sequence[Result], **fields: object) -> Result:
    """Return the one result with these fields in its cell, of those that `load_results` lists.

    >>> cells = load_results("runs/own")                                      # doctest: +SKIP
    >>> select_result(cells, evictor="kvzip", ratio="0.1", adapter=None)      # doctest: +SKIP

    Raises:
        RestoreKVError: A cell has no such field, no cell has these values, or several have them,
            for example because a run with a larger count extended the folder; the message names
            the fields in which they differ.
    """
    found = []
    for result in results:
        own = result.cell.to_dict()
        unknown = sorted(fields.keys() - own.keys())
        if unknown:
            raise RestoreKVError(f"A cell has no field {unknown[0]!r}; it has {', '.join(own)}.")
        if all(_field_equals(name, own[name], value) for name, value in fields.items()):
            found.append(result)
    asked = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    if not found:
        raise RestoreKVError(f"No cell has {asked}; `load_results` lists those that there are.")
    if len(found) > 1:
        differing = []
        for name in found[0].cell.to_dict():
            values = dict.fromkeys(str(getattr(each.cell, name)) for each in found)
            if len(values) > 1:
                differing.append(f"{name} ({', '.join(values)})")
        raise RestoreKVError(
            f"{len(found)} cells have {asked}; name one by {' and '.join(differing)}."
        )
    return found[0]


def compare_results(first: Result, second: Result, full: Result | None = None) -> dict[str, object]:
    """Return scores and divergences of two cells that were asked the same questions, and the
    paired differences, second minus first.

    Differences have 95 % intervals over contexts, which are None for fewer than six contexts.
    Contexts that only one of the cells has answered are left out, with a warning.

    Args:
        first: A cell from `load_results`.
        second: A different cell of the same benchmark and protocol.
        full: The full cache's cell, asked the same questions. Tasks on which it scores below 10
            are left out of scores, as in the tables.

    Returns:
        contexts and questions that both have answered; left_out, the tasks that scores leave out;
        score_first, score_second and score_gain with score_low and score_high, in points;
        kl_first, kl_second and kl_gain with kl_low and kl_high, in nats per answer token. A
        kl_gain below 0 means that the second is closer to the full cache.

    Raises:
        RestoreKVError: The cells share no context, were asked different contexts or questions, do
            not share the protocol and other settings, or are of two models, whose full caches
            answer differently; or `full` is not a cell of the full cache, or has not answered all
            that is compared.
    """
    for each in (first, second, *([full] if full is not None else [])):
        check_result(each)
    _check_comparable(first, second)
    one, other = _select_common_lines(first, second)
    if len(one) < max(len(first.lines), len(second.lines)):
        warn(
            f"{first.folder.name} has answered {len(first.lines)} contexts and "
            f"{second.folder.name} {len(second.lines)}; only the {len(one)} that both have "
            "answered are compared."
        )
    benchmark = tasks.make_benchmark(first.cell.benchmark)
    by_context = benchmark.averages_contexts(first.cell.protocol)
    for mine, theirs in zip(one, other, strict=True):
        if digest_line(mine) != digest_line(theirs):
            raise RestoreKVError(
                f"{first.folder.name} and {second.folder.name} were asked different questions or "
                f"about different texts (sample {mine['sample']}); compare cells of one benchmark."
            )
    answers = [list_answers((line["sample"], line) for line in lines) for lines in (one, other)]
    check_same_questions(answers)
    left_out: list[str] = []
    if full is not None:
        _check_full(full, first, one)
        left_out = find_tasks_without_loss(full.answers, by_context)
    counted = [drop_tasks(each, left_out) for each in answers]
    gain, low, high = bootstrap_score(counted[1], counted[0], by_context=by_context)
    divergence, kl_low, kl_high = _compare_divergence(one, other)
    return {
        "contexts": len(one),
        "questions": len(answers[0]),
        "left_out": left_out,
        "score_first": compute_mean_score(counted[0], by_context),
        "score_second": compute_mean_score(counted[1], by_context),
        "score_gain": gain,
        "score_low": low,
        "score_high": high,
        "kl_first": summarize_fidelity(one)["kl"],
        "kl_second": summarize_fidelity(other)["kl"],
        "kl_gain": divergence,
        "kl_low": kl_low,
        "kl_high": kl_high,
    }


def _check_comparable(first: Result, second: Result) -> None:
    """Refuse cells that were not asked and made the same way, or are of two models."""
    names = f"{first.folder.name} and {second.folder.name}"
    own, other = (
        {
            "protocol": each.cell.protocol,
            "max_context": each.cell.max_context,
            "dtype": each.identity["dtype"],
            "prefix_policy": each.identity["prefix_policy"],
            "RoPE": each.identity.get("rope"),
            "chat template": _get_template(each),
        }
        for each in (first, second)
    )
    if FULL in (first.cell.evictor, second.cell.evictor):
        del own["prefix_policy"]  # the full cache holds everything, whatever the policy
    for name, value in own.items():
        if value != other[name]:
            raise RestoreKVError(
                f"{names} were not made with the same {name} ({value} and {other[name]}); compare "
                "cells that share it."
            )
    if first.identity["fingerprint"] != second.identity["fingerprint"]:
        raise RestoreKVError(f"{names} are of two models; compare cells of one.")


def _get_template(result: Result) -> tuple[object, object]:
    """Return the text before the contexts and after the questions of a cell."""
    protocol = result.identity.get("protocol", {})
    return protocol.get("before"), protocol.get("after")


def _check_full(full: Result, compared: Result, lines: Lines) -> None:
    """Refuse `full` if it is not the full cache's cell for `compared`, or has not answered all of
    `lines`: it would then decide wrongly which tasks are left out.
    """
    name = full.folder.name
    if full.cell.evictor != FULL:
        raise RestoreKVError(
            f"{name} is not of the full cache, which says what is left out; give the cell with "
            f"evictor={FULL!r}."
        )
    _check_comparable(full, compared)
    answered = {digest_line(line) for line in full.lines}
    if any(digest_line(line) not in answered for line in lines):
        raise RestoreKVError(
            f"{name} has not answered all questions that are compared; give the full cache's cell "
            "of the same benchmark, and let its run end."
        )


def _select_common_lines(first: Result, second: Result) -> tuple[list[dict], list[dict]]:
    """Return the contexts that two cells have both answered, in the order of the first.

    Raises:
        RestoreKVError: There are none.
    """
    of_first = {line["sample"]: line for line in first.lines}
    of_second = {line["sample"]: line for line in second.lines}
    samples = [sample for sample in of_first if sample in of_second]
    if not samples:
        raise RestoreKVError(
            f"{first.folder} and {second.folder} share no context; let both runs end."
        )
    return [of_first[sample] for sample in samples], [of_second[sample] for sample in samples]


def _compare_divergence(first: Lines, second: Lines) -> Estimate:
    """Return how much further the second's answers are from the full cache than the first's, in
    nats per answer token, with a paired 95 % interval over the contexts, which are the same.
    """
    # Each side is divided by its own tokens: rounding may make one of two full caches end an answer
    # sooner.
    reference = tally_divergence([line["answers"] for line in first])
    sums, tokens = tally_divergence([line["answers"] for line in second])
    return bootstrap_ratio(sums, tokens, reference)
