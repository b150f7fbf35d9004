"""How long a text, a question and an answer may be: a model's positions, and what is refused, cut
or warned of beyond them.

There are two limits. The config says how many positions the model was made for (rope.py): answers
beyond them are bad, and YaRN raises their number. The probe finds up to which position the package
computes what the model computes (support.py): nothing may go beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig, PreTrainedModel

from restorekv.errors import (
    CUT_END,
    STRETCH_ROPE,
    RestoreKVError,
    TextTooLongError,
    check_choice,
    warn,
)
from restorekv.model.prompt import Context, check_vocabulary
from restorekv.model.rope import (
    NO_LIMIT,
    count_positions,
    count_unstretched_positions,
    explain_unstretchable,
)
from restorekv.model.support import get_support, refuse_beyond_exact

# For restore tokens, a question and its answer after the longest context.
RESERVED_POSITIONS = 256
ON_LONG_TEXT = ("refuse", "cut")  # what happens to a longer context
QUESTION_AND_CONTEXT = "The context with the question"  # needs positions, for messages


@dataclass(frozen=True)
class PositionLimit:
    """How many positions a model was made for, for code that does not have the model itself, such
    as that for vLLM.

    Args:
        positions: The positions of its RoPE as it is now.
        unstretched: The positions that the factor of a YaRN multiplies.
        can_stretch: Whether there is a RoPE that a YaRN stretches.
    """

    positions: int = NO_LIMIT
    unstretched: int = NO_LIMIT
    can_stretch: bool = True

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> PositionLimit:
        """Return the limit of a model with this config."""
        return cls(
            positions=count_positions(config),
            unstretched=count_unstretched_positions(config),
            can_stretch=explain_unstretchable(config) is None,
        )


def fit_context(
    model: PreTrainedModel, context: Context, on_long_text: str = "refuse", offset: int = 0
) -> tuple[Context, int]:
    """Return the context and how many tokens of its end were cut.

    RESERVED_POSITIONS of the model's positions stay free after it.

    Args:
        model: The model that will answer, whose vocabulary has to hold the context's ids.
        context: What it is asked about.
        on_long_text: "cut" or, to raise TextTooLongError instead of cutting, "refuse".
        offset: How many positions the question is moved by.
    """
    check_choice("on_long_text", on_long_text, ON_LONG_TEXT)
    check_vocabulary(model, context.ids)
    check_vocabulary(model, context.suffix_ids)
    limit = count_usable_positions(model)
    # Room for restore tokens and a question, but of a short model no more than a quarter of its
    # positions.
    reserved = min(RESERVED_POSITIONS, limit // 4)
    suffix_length = context.suffix_ids.shape[-1]
    room = limit - reserved - offset - context.prefix_length - suffix_length
    over = context.text_tokens - room
    if over <= 0:
        return context, 0
    if room < 1:
        raise RestoreKVError(
            f"The model's {limit:,} positions have no room for a text; use a shorter system text "
            "or a smaller offset."
        )
    if on_long_text == "refuse":
        needed = context.num_tokens + suffix_length + offset + RESERVED_POSITIONS
        raise TextTooLongError(
            _explain_long_text(model, context.text_tokens, limit, room, needed),
            tokens=context.text_tokens,
            positions=limit,
            room=room,
        )
    return replace(context, ids=context.ids[:, : context.prefix_length + room]), over


def _explain_long_text(
    model: PreTrainedModel, tokens: int, limit: int, room: int, needed: int
) -> str:
    """Return the message for a text that is too long.

    Args:
        model: The model that would read it.
        tokens: How many tokens the text has.
        limit: The positions that can be used.
        room: How many tokens the text may have.
        needed: The positions that the text would need, with all that follows it.
    """
    if limit < count_positions(model.config):
        return (
            f"The context has {tokens:,} tokens, and there is room for {room:,} and a question, "
            f"because {get_support(model).beyond}; shorten it, cut its end ({CUT_END}) or use "
            "another model."
        )
    # The factor of a YaRN multiplies the positions that the model had before any stretching.
    factor = math.ceil(needed / count_unstretched_positions(model.config))
    other_fix = f"stretch the model's RoPE ({STRETCH_ROPE.format(factor)})"
    if explain_unstretchable(model.config) is not None:
        other_fix = "use another model"
    return (
        f"The context has {tokens:,} tokens, and the model's {limit:,} positions have room for "
        f"{room:,} and a question; shorten it, cut its end ({CUT_END}) or {other_fix}."
    )


def count_usable_positions(model: PreTrainedModel) -> int:
    """Return how many positions the model was made for, as far as they are exact (support.py)."""
    return min(count_positions(model.config), get_support(model).positions)


def check_positions(model: PreTrainedModel, positions: int, what: str) -> None:
    """Refuse what needs more positions than are exact (support.py), and warn of what needs more
    than the model was made for.
    """
    refuse_beyond_exact(model, positions, what)
    limit = count_positions(model.config)
    if positions > limit:
        warn(
            f"{what} reaches beyond the model's {limit:,} positions; "
            "expect bad answers, or shorten it."
        )


def refuse_beyond_positions(
    model: PreTrainedModel, positions: int, what: str, fix: str = "take less text"
) -> None:
    """Refuse a text that reaches beyond the positions that the model was made for.

    Args:
        model: The model that would read it.
        positions: How many it needs.
        what: What needs them, for the message.
        fix: What to do about it, besides stretching RoPE.
    """
    refuse_beyond_exact(model, positions, what)
    refuse_beyond_limit(PositionLimit.from_config(model.config), positions, what, fix)


def refuse_beyond_limit(limit: PositionLimit, positions: int, what: str, fix: str) -> None:
    """Refuse what reaches beyond a model's positions, for code that knows only its limit.

    Args:
        limit: The model's.
        positions: How many are needed.
        what: What needs them, for the message.
        fix: What to do about it, besides stretching RoPE.
    """
    if positions > limit.positions:
        factor = math.ceil(positions / limit.unstretched)
        other_fix = f"with the model's RoPE stretched ({STRETCH_ROPE.format(factor)})"
        if not limit.can_stretch:
            other_fix = "with another model"
        raise TextTooLongError(
            f"{what} needs {positions:,} positions, and the model has {limit.positions:,}; {fix}, "
            f"or compress all of it {other_fix}."
        )


def refuse_long_question(limit: PositionLimit, first: int, question: int) -> None:
    """Refuse a question that ends beyond a model's positions.

    In every engine, positions are those of the whole text: evicted tokens count, and placeholders
    that replace a document in a prompt do not.

    Args:
        limit: The model's.
        first: The position of the question's first token (`Manifest.positions`, or the
            `get_seq_length` of a `RaggedCache`).
        question: How many tokens the question has, with the template around it.
    """
    refuse_beyond_limit(limit, first + question, QUESTION_AND_CONTEXT, "ask less")


def check_question_positions(
    model: PreTrainedModel, firsts: Sequence[int], questions: Sequence[int], limits: Sequence[int]
) -> None:
    """Refuse questions that end beyond the model's positions, and warn of answers that may.

    Both are refused if they need more positions than are exact (support.py).

    Args:
        model: The model that answers.
        firsts: The position of the first token of every question.
        questions: How many tokens every question has, with the template around it.
        limits: How many tokens every answer may have.
    """
    # Both checks look at the whole model, so they run once, for what reaches furthest.
    furthest_question = 0
    furthest_answer = 0
    limit = PositionLimit.from_config(model.config)
    for first, question, longest in zip(firsts, questions, limits, strict=True):
        # A context that is itself beyond the positions was warned of when it was prepared.
        if first <= limit.positions:
            furthest_question = max(furthest_question, first + question)
        furthest_answer = max(furthest_answer, first + question + longest)
    refuse_beyond_exact(model, furthest_question, QUESTION_AND_CONTEXT)
    refuse_long_question(limit, 0, furthest_question)
    check_positions(model, furthest_answer, "A question with the longest answer allowed")
