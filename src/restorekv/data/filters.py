"""What is dropped: contexts by length or as repeats, questions of a few characters, answers of a few tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.overlap import words
from restorekv.errors import RestoreKVError
from restorekv.model.prompt import Context, make_context

MARGIN = 64  # positions left for the wording of what is asked beside the longest question


def fault_of_question(question: str, config: BuildConfig) -> str | None:
    """Why a question is dropped, or None."""
    return "short question" if len(question) < config.question_characters else None


def fault_of_answer(text: str, tokens: int, config: BuildConfig) -> str | None:
    """Why an answer of so many tokens, the EOS apart, is dropped, or None."""
    return "short answer" if tokens < config.least_answer or not text.strip() else None


@dataclass
class Lengths:
    """Contexts of `shortest` to `longest` tokens, each text once."""

    tokenizer: Tokenizer
    shortest: int
    longest: int
    seen: set[str] = field(default_factory=set)

    def check(self, text: str) -> Context | str:
        """The tokenised context, or why it is dropped."""
        context = make_context(self.tokenizer, text)
        if context.tokens < self.shortest:
            return "too short"
        if context.tokens > self.longest:
            return "too long"
        mark = hashlib.sha256(" ".join(words(text)).encode()).hexdigest()
        if mark in self.seen:
            return "repeated"
        self.seen.add(mark)
        return context


def room(model: PreTrainedModel, tokenizer: Tokenizer, config: BuildConfig) -> int:
    """Most tokens of a context: `config.longest`, or fewer where the model has no positions for it and an answer."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not positions:
        return config.longest
    frame = make_context(tokenizer, "a")
    tail = frame.suffix.shape[-1] + config.question_tokens + max(config.answer_tokens, config.flan_answer_tokens)
    most = min(config.longest, positions - frame.prefix - tail - MARGIN)
    if most < 1:
        raise RestoreKVError(f"The model's {positions} positions are too few for such answers; ask for shorter ones.")
    return most
