"""How a benchmark is put to a model: what surrounds context and question, what the budget counts,
when answers end.

kvpress    the model's chat template; context and template prefix compete for the budget (four
           columns pinned); question, template suffix and answer prefix are one string; the first
           id never ends an answer; RoPE as configured (NVIDIA/kvpress 0.5.5, pipeline.py)
kvzip      the project's own templates with a task line, kept and not counted; pieces are tokenized
           one by one and questions begin "Q: "; the last id of an answer is dropped, whatever it
           is; chunks of 2,000 tokens, every prefix column a sink, a space after the prompt of
           later chunks; YaRN for Qwen3 (snu-mllab/KVzip 5d84729: data/wrapper.py,
           model/{load,template,wrapper}.py)
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.budget import PrefixPolicy
from restorekv.compression.compressor import Compressor
from restorekv.errors import RestoreKVError
from restorekv.model.prompt import (
    Context,
    encode_text,
    make_context,
    split_template,
)
from restorekv.tasks import Question

Method = TypeVar("Method", bound=Compressor)
NO_LIMIT = 10**9  # tokenizers without a limit report one far above this
TASK_LINE = (
    "Given the context, answer to the following question or request without explanation.\n\n"
)
SYSTEM = "You are a helpful assistant"
THINKING = "<think>\n\n</think>\n\n"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def get_context_limit(tokenizer: Tokenizer, max_ids: int = 0) -> int:
    """Return how many ids of a context are kept: `max_ids`, or, if that is 0, the limit of the
    tokenizer's config, at most NO_LIMIT.
    """
    return max_ids or min(tokenizer.model_max_length, NO_LIMIT)


class AskingProtocol(ABC):
    """One project's way to ask; `stops` says in words how an answer ends."""

    name: ClassVar[str]
    prefix_policy: ClassVar[PrefixPolicy]
    first_may_stop: ClassVar[bool]
    stops: ClassVar[str]

    def get_rope_changes(self, model_name: str) -> Mapping[str, object] | None:
        """Return what to change in the model's RoPE on loading, by the model's name."""
        return None

    def adapt_method(self, method: Method, prefix: int) -> Method:
        """Return the method with this protocol's settings instead of the defaults, for those that
        its spec does not set; `prefix` is the length S of the chat template's prefix.
        """
        return method

    def get_surroundings(self, model_name: str, tokenizer: Tokenizer) -> tuple[str, str]:
        """Return the text before the context and the text after a question: the model's own
        template.
        """
        return split_template(tokenizer)

    @abstractmethod
    def _make_uncut_context(self, model_name: str, tokenizer: Tokenizer, text: str) -> Context:
        """Return the context with its prefix and suffix, however long."""

    @abstractmethod
    def make_prompt(self, tokenizer: Tokenizer, context: Context, question: Question) -> Tensor:
        """Return the ids (1, q) that follow the context and end where the answer begins."""

    def trim_answer(self, ids: list[int]) -> list[int]:
        """Return the ids of an answer that belong to its text."""
        return ids

    def make_context(
        self, model_name: str, tokenizer: Tokenizer, text: str, max_ids: int = 0
    ) -> tuple[Context, int]:
        """Return a context of at most `max_ids` ids including its prefix (0: the tokenizer's
        limit), and how many ids were cut from its end.
        """
        # Cut after the template is around the text: its prefix counts toward the limit.
        whole = self._make_uncut_context(model_name, tokenizer, text)
        limit = get_context_limit(tokenizer, max_ids)
        if limit >= whole.num_tokens:
            return whole, 0
        if limit <= whole.prefix_length:
            raise RestoreKVError(
                f"A context of {limit} ids has no room for a text after the template's "
                f"{whole.prefix_length}; allow more."
            )
        return replace(whole, ids=whole.ids[:, :limit]), whole.num_tokens - limit

    def to_json(self, model_name: str, tokenizer: Tokenizer) -> dict[str, object]:
        """Return what results record about the protocol, for this model."""
        before, after = self.get_surroundings(model_name, tokenizer)
        changed = self.get_rope_changes(model_name)
        return {
            "name": self.name,
            "before": before,
            "after": after,
            "stops": self.stops,
            "rope": dict(changed) if changed else "the model's own",
            "cut": "the end of contexts that are too long",
        }


class KvpressProtocol(AskingProtocol):
    """Tokenizes the context and its template as one text; the question, the template's suffix and
    the answer prefix as another.
    """

    name: ClassVar[str] = "kvpress"
    prefix_policy: ClassVar[PrefixPolicy] = "counted"
    first_may_stop: ClassVar[bool] = False
    stops: ClassVar[str] = "at an EOS id from the second id on, or at the limit"

    def _make_uncut_context(self, model_name: str, tokenizer: Tokenizer, text: str) -> Context:
        return make_context(tokenizer, text)

    def make_prompt(self, tokenizer: Tokenizer, context: Context, question: Question) -> Tensor:
        # Encoded as a separate text, so some tokenizers put a space before it.
        return encode_text(
            tokenizer, question.text, after=context.suffix_text, more=question.answer_prefix
        )


class KvzipProtocol(AskingProtocol):
    """Recognizes a model's family by its name; a model of another family is asked through its own
    template.

    An answer prefix, which KVzip's benchmarks do not have, follows the suffix as a separate piece.
    Questions whose facts say `bare` get no "Q: " (the lettered ones of RestoreKV's evaluation).
    """

    name: ClassVar[str] = "kvzip"
    prefix_policy: ClassVar[PrefixPolicy] = "free"
    first_may_stop: ClassVar[bool] = True
    stops: ClassVar[str] = "at an EOS id or at the limit; the last id is dropped"

    def get_rope_changes(self, model_name: str) -> Mapping[str, object] | None:
        return YARN if _find_family(model_name) == "qwen3" else None

    def adapt_method(self, method: Method, prefix: int) -> Method:
        """Return KVzip and its variants as their authors run them."""
        return method.as_published(prefix)

    def get_surroundings(self, model_name: str, tokenizer: Tokenizer) -> tuple[str, str]:
        kind = _find_family(model_name)
        if kind == "llama":
            before = (
                f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|>"
            )
            before += "<|start_header_id|>user<|end_header_id|>\n\n"
            return (
                before + TASK_LINE,
                "\n\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            )
        if kind:
            # KVzip's own words, with the thinking of Qwen3 closed.
            before = f"<|im_start|>system\n{SYSTEM}.<|im_end|>\n<|im_start|>user\n"
            after = "<|im_end|>\n<|im_start|>assistant\n" + (THINKING if kind == "qwen3" else "")
            return before + TASK_LINE, after
        return super().get_surroundings(model_name, tokenizer)

    def _make_uncut_context(self, model_name: str, tokenizer: Tokenizer, text: str) -> Context:
        before, after = self.get_surroundings(model_name, tokenizer)
        prefix = encode_text(tokenizer, before=before)
        article = encode_text(tokenizer, text)
        if not article.shape[-1]:
            raise RestoreKVError("The context is empty; give a text with at least one word.")
        return Context(
            torch.cat([prefix, article], -1),
            prefix.shape[-1],
            encode_text(tokenizer, after=after),
            after,
        )

    def make_prompt(self, tokenizer: Tokenizer, context: Context, question: Question) -> Tensor:
        text = f"Q: {question.text}"
        if question.facts.get("bare"):
            text = question.text
        # Each piece is tokenized alone, as KVzip does, so no token spans two of them.
        words = encode_text(tokenizer, "\n\n" + text.strip())
        return torch.cat(
            [words, context.suffix_ids, encode_text(tokenizer, question.answer_prefix)], -1
        )

    def trim_answer(self, ids: list[int]) -> list[int]:
        return ids[:-1]


PROTOCOLS: dict[str, AskingProtocol] = {"kvpress": KvpressProtocol(), "kvzip": KvzipProtocol()}


def make_protocol(name: str) -> AskingProtocol:
    """Return the protocol with this name; refuse an unknown name."""
    if name not in PROTOCOLS:
        raise RestoreKVError(f"There is no protocol {name!r}; use {' or '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def _find_family(model_name: str) -> str:
    """Return the family that decides which template KVzip's code uses (llama, qwen3, qwen or ""),
    by the last part of the name.
    """
    name = model_name.rstrip("/").rsplit("/", 1)[-1].lower()
    if "llama" in name:
        return "llama"
    if "qwen3-" in name:
        return "qwen3"
    return "qwen" if name.startswith("qwen") else ""
