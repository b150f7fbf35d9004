"""Warnings about uses of an adapter that differ from what its card records."""

from __future__ import annotations

from fractions import Fraction

from restorekv.errors import make_printable, warn
from restorekv.restore.adapter_file import AdapterCard
from restorekv.spec import split_specs


def warn_of_other_use(
    card: AdapterCard,
    evictor: str,
    allocation: str | None = None,
    restore_from: str | None = None,
    prefix_policy: str | None = None,
    separator: str | None = None,
) -> None:
    """Warn of a use that differs from the training: an adapter has learned to restore what one
    eviction loses.

    Args:
        card: The adapter's card.
        evictor: The spec of the evictor.
        allocation: Which pairs compete. None skips the comparison, here and below.
        restore_from: What the restore pass reads.
        prefix_policy: Whether the chat prefix counts.
        separator: The text between document and question.
    """
    if card.source is not None and "Qwen3" in card.source:
        warn(
            f"The authors of {card.source} do not state whether they trained it with YaRN, as "
            "their code does, or without it."
        )
    # kvpress counts the prefix, the authors' code does not.
    if card.source is not None and prefix_policy == "free":
        warn(
            f"{card.source} is used in kvpress with the chat prefix in the budget "
            "(prefix_policy='counted'); its authors do not state how it was trained."
        )
    # If it is not recorded what the adapter was trained for, nothing can be compared.
    if not card.evictor:
        return
    # An adapter may have been trained for several evictors, and measured with others.
    if evictor not in (*split_specs(card.evictor), *(card.also_for or ())):
        _warn_of_change("evictor", card.evictor, evictor)
    for what, trained, used in (
        ("allocation", card.allocation, allocation),
        ("restore pass over the cache", card.restore_from, restore_from),
        ("prefix policy", card.prefix_policy, prefix_policy),
        ("text between document and question", card.separator, separator),
    ):
        if trained is not None and used is not None and trained != used:
            _warn_of_change(what, trained, used)


def warn_of_unhelpful_ratio(card: AdapterCard, evictor: str, ratio: Fraction) -> None:
    """Warn of a ratio at which "auto" would restore nothing.

    Args:
        card: The adapter's card.
        evictor: The spec of the evictor, without the hash of a gate.
        ratio: The share of the pairs to hold.
    """
    if card.is_helpful_at(evictor, ratio):
        return
    lowest, highest = card.find_helpful_ratios(evictor)
    if ratio < Fraction(str(lowest)):
        border = f"was measured to help {make_printable(evictor)} from the ratio {lowest:g} on"
    elif card.helps_up_to is not None:
        border = f"was measured to help up to the ratio {highest:g}"
    else:
        border = f"was trained for ratios up to {highest:g}"
    warn(
        f"The adapter {border}, and is used at {float(ratio):g}; answers may be better without "
        "it (adapter=None)."
    )


def _warn_of_change(what: str, trained: str, used: str) -> None:
    """Warn that an adapter is not used as it was trained; an empty text is shown as ''."""
    before = make_printable(trained) or "''"
    now = make_printable(used) or "''"
    warn(f"The adapter was trained with the {what} {before}, not {now}; expect worse answers.")
