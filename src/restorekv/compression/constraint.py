"""Answers that match a JSON schema or a regular expression: llguidance says which tokens may come next."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError

if TYPE_CHECKING:
    from llguidance import LLMatcher

VOCABULARIES: WeakKeyDictionary[Tokenizer, object] = WeakKeyDictionary()  # of llguidance, which take a second to make


class Constraint:
    """What one answer may continue with, token by token."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @classmethod
    def make(cls, tokenizer: Tokenizer, schema: str | dict | None, regex: str | None, stops: set[int]) -> Self | None:
        """Returns a constraint by a schema or an expression, None without either; refuses wrong ones."""
        if schema is None and regex is None:
            return None
        try:
            llguidance = import_module("llguidance")
            import_module("llguidance.hf")
        except ImportError:
            raise RestoreKVError(
                "json_schema and regex need llguidance; install it with: pip install 'restorekv[constrained]'"
            ) from None
        if not tokenizer.is_fast:
            raise RestoreKVError("json_schema and regex need a fast tokenizer; load the model with one.")
        if tokenizer not in VOCABULARIES:
            VOCABULARIES[tokenizer] = llguidance.hf.from_tokenizer(tokenizer, eos_token=sorted(stops) or None)
        kind, vocabulary = llguidance.LLMatcher, VOCABULARIES[tokenizer]
        try:
            text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
            # The space with which many tokenizers begin a word is not part of the answer.
            grammar = kind.grammar_from_regex(f" ?(?:{regex})") if text is None else kind.grammar_from_json_schema(text)
            wrong = kind.validate_grammar(grammar, vocabulary)
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            what = "regular expression" if regex is not None else "JSON schema"
            raise RestoreKVError(f"The {what} cannot be used: {' '.join(wrong.split())[:200]}")
        return cls(kind(vocabulary, grammar))

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.is_stopped()

    def allow(self, logits: Tensor) -> Tensor:
        """Returns logits (1, V) with -inf for every token that may not come next."""
        tokens = import_module("llguidance.torch")
        mask = tokens.allocate_token_bitmask(1, logits.shape[-1])
        tokens.fill_next_token_bitmask(self.matcher, mask)
        allowed = logits.clone()
        tokens.apply_token_bitmask_inplace(allowed, mask)
        return allowed

    def take(self, token: int) -> None:
        """Continues after a token."""
        if not self.matcher.consume_token(token) and (error := self.matcher.get_error()):
            raise RestoreKVError(f"The answer left its grammar: {error}")
