"""Text to token ids through any chat template; no other module uses templates.

The template is rendered around a separator and split there, as kvpress does. What precedes the separator, with the
text, is the context that is compressed; what follows it closes the user's turn after every question.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError

SEPARATOR = "<restorekv-separator>"
BETWEEN = "\n\n"  # separates a question from the document, unless the tokenizer's config has another `between`


@dataclass(frozen=True)
class Context:
    """ids (1, S + T): template prefix of S tokens, then the text; suffix (1, P) and its text.

    `between` precedes every question.
    """

    ids: Tensor
    prefix: int
    suffix: Tensor
    suffix_text: str = field(default="", compare=False)
    between: str = field(default="", compare=False)

    @property
    def tokens(self) -> int:
        """T, the tokens of the text itself."""
        return self.ids.shape[-1] - self.prefix

    @property
    def positions(self) -> int:
        """S + T."""
        return self.ids.shape[-1]


def default_between(tokenizer: Tokenizer) -> str:
    """Returns what separates document and question: `between` of the tokenizer's config, or a blank line."""
    return str(tokenizer.init_kwargs.get("between", BETWEEN))


def make_context(tokenizer: Tokenizer, text: str, between: str = "") -> Context:
    """Tokenizes prefix and text together, so that tokens merge at the template's edge as they did in training.

    Nothing precedes a question unless `between` is given: benchmarks and training data word their questions fully.
    """
    if not isinstance(text, str):
        raise RestoreKVError(f"The context is text, not {type(text).__name__}.")
    if not text.strip():
        raise RestoreKVError("The context is empty; give a text with at least one word.")
    before, after = around(tokenizer)
    prefix = encode(tokenizer, before).shape[-1]
    ids = encode(tokenizer, before + text)
    if ids.shape[-1] <= prefix:
        raise RestoreKVError("The context has no tokens besides the chat template; give a longer text.")
    return Context(ids, prefix, encode(tokenizer, after), after, between)


def question_ids(
    tokenizer: Tokenizer, context: Context, question: str, answer_prefix: str = "", empty: bool = False
) -> Tensor:
    """Tokenizes `between`, the question, the template's suffix and the answer's first words as one text: (1, q).

    `empty` allows an empty question, for a context that ends with what is asked.
    """
    if not isinstance(question, str):
        raise RestoreKVError(f"A question is text, not {type(question).__name__}; give several to ask, as a list.")
    if not question.strip() and not empty:
        raise RestoreKVError("The question is empty; ask something.")
    return encode(tokenizer, context.between + question + context.suffix_text + answer_prefix)


def template_hash(tokenizer: Tokenizer) -> str:
    """Returns 16 hex digits of the template's text around the user's words."""
    return hashlib.sha256("\0".join(around(tokenizer)).encode()).hexdigest()[:16]


def around(tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns the template's text before and after the user's words; without a template, BOS and a newline."""
    if not tokenizer.chat_template:
        return tokenizer.bos_token or "", "\n"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": SEPARATOR}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # a template without thinking ignores it
    )
    before, separator, after = rendered.partition(SEPARATOR)
    if not separator:
        raise RestoreKVError("The tokenizer's chat template drops the user's words; use another tokenizer.")
    return before, after


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """Returns (1, length) int64 without any special tokens that the tokenizer would add itself."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return torch.tensor([ids], dtype=torch.long)
