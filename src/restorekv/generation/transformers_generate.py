"""Answers by transformers' own `generate` over a compressed context: its inputs, and its options.

`generate` prefills the question into a fork of the cache and counts ids, so it needs an id for
every position that the cache has seen: those of text and question, and placeholders for positions
without a token of the text. An option that would count the placeholders is applied to the text
alone; one that would make transformers read a token twice is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import RestoreKVError
from restorekv.generation import decoding
from restorekv.generation.sampling import DEFAULT_MAX_NEW_TOKENS, FiniteLogits
from restorekv.model import attention
from restorekv.model.cache_argument import pass_cache_to_generate
from restorekv.model.position_limits import check_question_positions
from restorekv.model.prompt import Context, check_vocabulary, describe_type, encode_question
from restorekv.model.tokenize import get_padding_id

# Options of `generate` that come from the question and the compressed context.
INPUT_OPTIONS = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
)
# Options that let a draft write ahead (speculative decoding).
DRAFT_OPTIONS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
# Further options that would make transformers read other ids than those after the cache: drafts by
# the model's own layers, and a prompt that is tokenized again without its control tokens.
REREADING_OPTIONS = ("use_mtp", "token_healing")
# Options that end an answer; the second counts the prompt too.
LENGTH_OPTIONS = ("max_new_tokens", "max_length")
# Options that are numbers of something.
COUNT_OPTIONS = (*LENGTH_OPTIONS, "num_beams", "num_return_sequences")
# Options that are lists of functions.
LIST_OPTIONS = ("logits_processor", "stopping_criteria")
# Options that look at n-grams of all ids.
NGRAM_OPTIONS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")


@dataclass(frozen=True)
class GenerateOptions:
    """The checked options of one call of `generate`.

    transformers fills what the call leaves out from its `generation_config`, and what that leaves
    out from the model's.

    Args:
        given: The options of the call itself.
        config: Its `generation_config`, if it has one.
        model_config: The model's own, if it has one.
    """

    given: Mapping[str, Any]
    config: GenerationConfig | None
    model_config: GenerationConfig | None

    @classmethod
    def check(cls, options: Mapping[str, Any], model: PreTrainedModel) -> Self:
        """Return the options of a call; refuse those that make no sense over a compressed context.

        Args:
            options: As transformers' `generate` takes them.
            model: The model that answers.

        Raises:
            RestoreKVError: An option comes from the question itself, is of the wrong type or out
                of range, makes transformers read tokens twice, or asks for more than one text.
        """
        # None is the same as an option that is left out.
        given = {name: value for name, value in options.items() if value is not None}
        for name in INPUT_OPTIONS:
            if name in given:
                raise RestoreKVError(
                    f"generate makes {name} from the question itself; leave it out, or call "
                    "model.generate with `inputs` yourself."
                )
        config = given.get("generation_config")
        if config is not None and not isinstance(config, GenerationConfig):
            raise RestoreKVError(
                "generation_config is a GenerationConfig of transformers, not "
                f"{describe_type(config)}; pass GenerationConfig(...), or its options one by one."
            )
        for name in COUNT_OPTIONS:
            for count in (given.get(name), getattr(config, name, None)):
                if count is not None and (type(count) is not int or count < 1):
                    raise RestoreKVError(f"{name} must be a number of at least 1, not {count!r}.")
        for name in LIST_OPTIONS:
            functions = given.get(name)
            if functions is not None and not isinstance(functions, list | tuple):
                raise RestoreKVError(
                    f"{name} must be a list, not {describe_type(functions)}; pass {name}=[...]."
                )
        checked = cls(given, config, getattr(model, "generation_config", None))
        checked._refuse_rereading()
        checked._refuse_several_texts()
        return checked

    def find(self, name: str, default: Any) -> Any:
        """Return the value that transformers would use for an option; None counts as left out."""
        if name in self.given:
            return self.given[name]
        for config in (self.config, self.model_config):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return default

    def _refuse_rereading(self) -> None:
        configs = (self.config, self.model_config)
        for name in DRAFT_OPTIONS:
            if self.given.get(name) or any(getattr(config, name, None) for config in configs):
                raise RestoreKVError(
                    f"generate cannot use {name}, for which transformers would read the question "
                    "into the cache twice; leave it out."
                )
        for name in REREADING_OPTIONS:
            if self.find(name, False):
                raise RestoreKVError(
                    f"generate cannot use {name}, for which transformers would read other tokens "
                    f"than those that follow the cache; pass {name}=False."
                )

    def _refuse_several_texts(self) -> None:
        # Not the model's own config: it may ask for a dict because it was saved to return hidden
        # states.
        wants_dict = self.given.get("return_dict_in_generate")
        if wants_dict is None:
            wants_dict = getattr(self.config, "return_dict_in_generate", None)
        if self.find("num_return_sequences", 1) > 1 or wants_dict is True:
            raise RestoreKVError(
                "generate returns one text; for more, call model.generate with `inputs` yourself."
            )

    def has_limit(self) -> bool:
        """Return whether the call, or its config, limits the length of the answer."""
        if any(name in self.given for name in LENGTH_OPTIONS):
            return True
        if self.config is None:
            return False
        # Every config of older transformers has a max_length.
        usual = GenerationConfig()
        return any(
            getattr(self.config, name) not in (None, getattr(usual, name))
            for name in LENGTH_OPTIONS
        )

    def count_longest_answer(self, prompt_tokens: int) -> int:
        """Return how many tokens the answer may have after `prompt_tokens`, which include the text;
        0 or less if a `max_length` leaves no room.
        """
        if not self.has_limit():
            return DEFAULT_MAX_NEW_TOKENS
        # If both limits are given, transformers uses max_new_tokens.
        longest = self.find("max_new_tokens", None)
        if longest is not None:
            return longest
        return self.find("max_length", 0) - prompt_tokens

    def find_stop_ids(self, model: PreTrainedModel, tokenizer: Tokenizer) -> set[int]:
        """Return the ids that end the answer: those of the call, its config's or the model's."""
        for ids in (self.given.get("eos_token_id"), getattr(self.config, "eos_token_id", None)):
            if ids is not None:
                return decoding.collect_ids(ids)
        return decoding.get_stop_ids(model, tokenizer)

    def find_ngram_sizes(self) -> dict[str, int]:
        """Return the lengths of n-grams that must not come again, by the option's name."""
        sizes = {name: self.find(name, 0) for name in NGRAM_OPTIONS}
        return {name: size for name, size in sizes.items() if size}


def generate_answer(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: Context,
    cache: RaggedCache,
    question: str,
    answer_prefix: str = "",
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the answer that transformers' `generate` writes over a fork of a cache.

    Args:
        model: The model that made the cache.
        tokenizer: Its tokenizer.
        context: The text that the question is about.
        cache: Its cache, which does not change.
        question: A question.
        answer_prefix: Text that the answer continues from, and that is not part of it.
        options: Those of `generate`. Without them the answer is greedy, of 128 tokens at most.

    Raises:
        RestoreKVError: An option cannot be used here, or the question has ids beyond the model's
            vocabulary or no room in its positions.
    """
    checked = GenerateOptions.check(options or {}, model)
    inputs = make_generate_inputs(tokenizer, context, cache, question, answer_prefix)
    inputs |= number_positions(model, inputs)
    input_ids = inputs["input_ids"]
    check_vocabulary(model, input_ids)
    attention.install_attention(model)
    # The ids span the context, so the question is what follows it.
    prompt_tokens = input_ids.shape[1]
    first = cache.get_seq_length()
    longest = checked.count_longest_answer(prompt_tokens)
    # This comes first: if the question is beyond the model's positions, a larger limit would not
    # help.
    check_question_positions(model, [first], [prompt_tokens - first], [max(longest, 1)])
    if longest < 1:
        raise RestoreKVError(
            f"max_length={checked.find('max_length', 0)} counts text and question, too, which have "
            f"{prompt_tokens:,} tokens; pass max_new_tokens, which limits the answer alone."
        )
    stop_ids = checked.find_stop_ids(model, tokenizer)
    arguments = _make_arguments(checked, tokenizer, stop_ids)
    sizes = checked.find_ngram_sizes()
    arguments |= dict.fromkeys(sizes, 0)  # which transformers would look for among placeholders
    processors = [
        *make_ngram_processors(sizes, input_ids, count_placeholders(context, cache)),
        *(checked.given.get("logits_processor") or ()),
        FiniteLogits(),
    ]
    arguments["logits_processor"] = LogitsProcessorList(processors)
    fork = cache.fork(checked.find("num_beams", 1))
    with torch.no_grad():
        # PreTrainedModel has `generate` only in its subclasses that write text.
        writer: Any = model
        result = writer.generate(
            **{name: tensor.to(model.device) for name, tensor in inputs.items()},
            **pass_cache_to_generate(fork),
            **arguments,
        )
    written = result[0, prompt_tokens:].tolist()
    return decoding.decode_answer(tokenizer, written, stop_ids).lstrip()


def _make_arguments(
    options: GenerateOptions, tokenizer: Tokenizer, stop_ids: set[int]
) -> dict[str, Any]:
    """Return the arguments of transformers' `generate`, without inputs and processors."""
    arguments: dict[str, Any] = {
        # Not an empty list: beam search would look for its first id.
        "eos_token_id": sorted(stop_ids) or None,
        "pad_token_id": get_padding_id(tokenizer),
    }
    # Greedy unless the call or its config says otherwise; transformers would ask the model's own
    # config.
    if getattr(options.config, "do_sample", None) is None:
        arguments["do_sample"] = False
    if not options.has_limit():
        # Without a limit transformers would write 20 tokens.
        arguments["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
    arguments |= options.given
    if arguments.get("stopping_criteria") is not None:
        arguments["stopping_criteria"] = StoppingCriteriaList(arguments["stopping_criteria"])
    if options.find("stop_strings", None):
        arguments.setdefault("tokenizer", tokenizer)  # transformers needs it to find them
    # Models are often saved with use_cache=False after training. Then transformers would read the
    # whole prompt into the cache again for every token.
    arguments["use_cache"] = True
    # It names a kind of cache to make, which transformers refuses if it is also given a cache.
    arguments["cache_implementation"] = None
    arguments["return_dict_in_generate"] = False
    return arguments


def make_generate_inputs(
    tokenizer: Tokenizer,
    context: Context,
    cache: RaggedCache,
    question: str,
    answer_prefix: str = "",
    plain: bool = False,
) -> dict[str, Tensor]:
    """Return inputs for model.generate(..., past_key_values=cache.fork()), or
    cache.to_dynamic_cache() if `plain`.

    Ids and mask span everything that the cache has seen: a placeholder for each restore token and
    each position that an offset skips, the context, and the question. With `plain` the cache has
    seen only what it holds: there is a placeholder for each pair of a head, and `position_ids`
    place the question where it would be after the whole text. The answer is
    result[:, input_ids.shape[1]:].

    The model does not read the ids of what the cache has seen, but transformers' penalties and its
    options for repeated or bad words do. So text and question follow each other as the full model
    would see them, and the placeholders repeat an id that is there in any case. With `plain`,
    penalties count only question and answer.
    """
    prompt_ids = encode_question(tokenizer, context, question, answer_prefix)
    if plain:
        # Every head holds the same number of pairs, so that of the first head is enough.
        held = cache.full_attention[0].bounds[1] + cache.restore_length
        first = cache.get_seq_length()
        ids = torch.cat([prompt_ids[:, :1].expand(-1, held), prompt_ids], -1)
        question_positions = torch.arange(first, first + prompt_ids.shape[1])
        positions = torch.cat([torch.arange(held), question_positions])[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    placeholders = context.ids[:, :1].expand(-1, count_placeholders(context, cache))
    ids = torch.cat([placeholders, context.ids, prompt_ids], -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def number_positions(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the `position_ids` of inputs from `make_generate_inputs` for models that also take
    images as Qwen2-VL does; nothing for other models.

    Without them, such a model moves the tokens after a cache by its rope_deltas, which the last
    prompt with an image has left in it.
    """
    if not any(hasattr(module, "rope_deltas") for module in model.modules()):
        return {}
    if "position_ids" in inputs:
        return {}
    return {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}


def count_placeholders(context: Context, cache: RaggedCache) -> int:
    """Return how many positions of a cache have no token of the text: those of restore tokens, and
    those that config.offset skips.
    """
    return cache.seen - context.num_tokens + cache.restore_length


class TextNGrams(NoRepeatNGramLogitsProcessor):
    """Forbids repeated n-grams in text, question and answer, and ignores the placeholders before
    them.
    """

    def __init__(self, size: int, placeholders: int) -> None:
        super().__init__(size)
        self.placeholders = placeholders

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        read: Any = input_ids[:, self.placeholders :]
        return super().__call__(read, scores)


def make_ngram_processors(
    sizes: Mapping[str, Any], input_ids: Tensor, placeholders: int
) -> list[LogitsProcessor]:
    """Return transformers' processors for its n-gram options, over ids without placeholders.

    Other options look at single ids, or only at the end, so that placeholders do not matter.

    Args:
        sizes: The lengths of n-grams by the option's name, of `NGRAM_OPTIONS`.
        input_ids: (1, N), from `make_generate_inputs`.
        placeholders: How many ids at the start are placeholders.
    """
    processors: list[LogitsProcessor] = []
    if "no_repeat_ngram_size" in sizes:
        processors.append(TextNGrams(sizes["no_repeat_ngram_size"], placeholders))
    if "encoder_no_repeat_ngram_size" in sizes:
        read: Any = input_ids[:, placeholders:]
        size = sizes["encoder_no_repeat_ngram_size"]
        processors.append(EncoderNoRepeatNGramLogitsProcessor(size, read))
    return processors
