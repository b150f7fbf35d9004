"""How the next token is chosen: greedily, or by transformers' own logits processors and a seed for
every row.

Every row of a batch has its own processors, ids and random generator, so that an answer does not
depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypedDict, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.arguments import explain_fields
from restorekv.errors import OptionError, RestoreKVError, warn
from restorekv.files import check_option
from restorekv.generation.constraint import Constraint, begins_with_space
from restorekv.generation.option_hints import ASK_ARGUMENTS, CALL_HINTS, CONFIG_HINTS
from restorekv.generation.repetition import RepetitionWatch
from restorekv.model.channels import ChannelReader
from restorekv.model.tokenize import TextStream
from restorekv.spec import suggest_argument

# Fields of transformers' GenerationConfig that are honored, and those that change no answer here.
HONORED_FIELDS = {
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_strings",
    "num_return_sequences",
}
IGNORED_FIELDS = {
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
    "max_length",
    "return_dict_in_generate",
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
}
# Values of other fields that change nothing, although transformers' own default is None.
NO_OP_VALUES: dict[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "length_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
}
# Fields of a model's own config that change its answers even when they are greedy. They are not
# used, and `warn_about_unused_options` says so.
UNUSED_MODEL_FIELDS = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "watermarking_config",
    "stop_strings",
)
MIN_TEMPERATURE = 0.01  # below it only the most likely token has a chance
# Type, further condition, and both in words.
CHECKS: dict[str, tuple[object, Callable[[Any], bool], str]] = {
    "temperature": (
        float,
        lambda x: x == 0 or MIN_TEMPERATURE <= x <= 100,
        f"0, or a number from {MIN_TEMPERATURE:g} to 100",
    ),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0, at most 1"),
    "top_k": (int, lambda x: x >= 0, "a number of tokens, 0 for all"),
    "min_p": (float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "repetition_penalty": (float, lambda x: 0 < x <= 100, "a number above 0, at most 100"),
    "seed": (int, lambda x: 0 <= x < 2**62, "a number of at least 0, below 2^62"),
    "samples": (int, lambda x: 1 <= x <= 10_000, "a number of at least 1"),
    "stop": (list[str] | tuple[str, ...], all, "one or more strings that are not empty"),
    "stop_repeats": (
        int,
        lambda x: x == 0 or 2 <= x <= 1000,
        "0, or a number of copies from 2 to 1000",
    ),
    "logprobs": (
        int | None,
        lambda x: x is None or 0 <= x <= 100,
        "a number of tokens from 0 to 100",
    ),
    "json_schema": (
        str | dict[str, Any] | None,
        lambda x: True,
        "a dict, JSON or a pydantic class",
    ),
    "regex": (str | None, lambda x: True, "a text"),
    "logit_bias": (
        dict[int, float] | None,
        lambda x: (
            x is None or all(type(token) is int and abs(bias) <= 100 for token, bias in x.items())
        ),
        "a dict from token ids to numbers from -100 to 100",
    ),
    "frequency_penalty": (float, lambda x: abs(x) <= 2, "a number from -2 to 2"),
    "presence_penalty": (float, lambda x: abs(x) <= 2, "a number from -2 to 2"),
    "processors": (
        list[LogitsProcessor] | tuple[LogitsProcessor, ...],
        lambda x: True,
        "a list of processors",
    ),
    "criteria": (
        list[StoppingCriteria] | tuple[StoppingCriteria, ...],
        lambda x: True,
        "a list of criteria",
    ),
}


class SamplingOptions(TypedDict, total=False):
    """The keyword options of `ask`, `ask_many` and conversations: the fields of `SamplingConfig`,
    and a `config` with the same fields, which options given by name override. (`samples` is not
    here, because it changes what is returned: it has its own overload.)
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_repeats: int | None
    logprobs: int | None
    json_schema: str | dict | type | None
    regex: str | None
    logit_bias: Mapping[int, float] | None
    frequency_penalty: float | None
    presence_penalty: float | None
    processors: Sequence[LogitsProcessor] | None
    criteria: Sequence[StoppingCriteria] | None
    max_tokens: int | None  # in place of max_new_tokens
    config: SamplingConfig | GenerationConfig | None


DEFAULT_MAX_NEW_TOKENS = 128


def take_limit(options: dict[str, Any], max_new_tokens: Any) -> Any:
    """Return the limit of an answer: `max_tokens` (OpenAI's name for it, which is removed from
    `options`), else `max_new_tokens`, or DEFAULT_MAX_NEW_TOKENS if both are None.
    """
    named = options.pop("max_tokens", None)
    if named is not None:
        return named
    if max_new_tokens is None:
        return DEFAULT_MAX_NEW_TOKENS
    return max_new_tokens


def _describe_class(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a pydantic class."""
    describe = getattr(kind, "model_json_schema", None)
    if describe is None:
        raise RestoreKVError(
            f"json_schema must be a dict, JSON or a pydantic class, not the class {kind.__name__}; "
            "derive it from pydantic.BaseModel."
        )
    return describe()


@explain_fields(CONFIG_HINTS, "SamplingConfig(temperature=0.7)")
@dataclass(frozen=True)
class SamplingConfig:
    """How answers are written: greedily, unless `temperature` is above 0.

    An option of None is the same as one that is left out. A logit bias and the penalties of
    frequency and presence come before all other processing; transformers' own options are applied
    in its order.

    Args:
        temperature: Divides the logits before a token is drawn; 0 takes the most likely token.
        top_p: Draw from the most likely tokens that have this probability together.
        top_k: Draw from this many of the most likely tokens; 0 for all.
        min_p: Draw from tokens with at least this share of the highest probability.
        repetition_penalty: Above 1, makes tokens of text, question and answer less likely.
        seed: Decides the random numbers. The answers to one question take seed, seed + 1 and so on.
        samples: How many answers to write to each question.
        stop: Strings before which an answer ends.
        stop_repeats: End an answer when its last tokens are one block at least this many times in a
            row, and at least 32 tokens in all; the text has the block once. 0 lets answers repeat
            themselves. So do `regex` and `json_schema`, which must match an answer as a whole.
        logprobs: Record the log-probability of every token, and of this many of the most likely
            ones in its place, before any processing. None records nothing.
        json_schema: Allow only JSON that matches this schema, and in its objects only properties
            that the schema names. A dict, JSON or a pydantic class, which is replaced by its
            schema. Needs the extra `constrained`, as does `regex`.
        regex: Allow only texts that match as a whole.
        logit_bias: Numbers to add to the logits, by token id.
        frequency_penalty: Subtracted from the logit of an id once for each time that it is in the
            answer already; below 0, makes repetition more likely.
        presence_penalty: The same, but subtracted only once, however often the id is there.
        processors: Further logits processors of transformers, which must keep no state.
        criteria: Stopping criteria of transformers, which must keep no state.

    Raises:
        RestoreKVError: An option has the wrong type or is out of range, or two exclude each other.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    samples: int = 1
    stop: str | Sequence[str] = ()
    stop_repeats: int = 0
    logprobs: int | None = None
    json_schema: str | dict | None = None
    regex: str | None = None
    logit_bias: Mapping[int, float] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    processors: Sequence[LogitsProcessor] = ()
    criteria: Sequence[StoppingCriteria] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is None:
                object.__setattr__(self, each.name, each.default)
        if isinstance(self.json_schema, type):  # a pydantic class; its schema is kept
            object.__setattr__(self, "json_schema", _describe_class(self.json_schema))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name, (kind, holds, wanted) in CHECKS.items():
            check_option(name, getattr(self, name), kind, wanted, holds)
        if self.regex is not None and self.json_schema is not None:
            raise RestoreKVError("regex is for answers without a json_schema; give one of them.")
        # Options that ask for nothing get their default values, which `plain` looks for.
        for name in ("stop", "processors", "criteria"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.logit_bias:
            object.__setattr__(self, "logit_bias", None)

    @classmethod
    def make(
        cls, config: SamplingConfig | GenerationConfig | None = None, **options: Any
    ) -> SamplingConfig:
        """Make a config from options, which override those of `config`; refuse unknown ones."""
        defaults = {each.name: each.default for each in fields(cls)}
        for name in options:
            if name not in defaults:
                hint = suggest_argument(name, [*defaults, *ASK_ARGUMENTS], CALL_HINTS)
                raise RestoreKVError(f"There is no option {name}; {hint}")
        # None leaves an option to the config, unless None is a value of it, as for json_schema.
        options = {
            name: value
            for name, value in options.items()
            if value is not None or defaults[name] is None
        }
        if isinstance(config, SamplingConfig):
            return replace(config, **options)
        given = {} if config is None else read_generation_config(config)
        return cls(**{**given, **options})

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is needed, so that no sampler has to be made."""
        return self == SamplingConfig(seed=self.seed, samples=self.samples)

    @property
    def keeps_leading_space(self) -> bool:
        """Whether white space at the start of an answer is part of what `regex` asks for."""
        return self.regex is not None and begins_with_space(self.regex)

    @property
    def copies(self) -> int:
        """How many copies of a block of tokens in a row end an answer; 0 for never."""
        matches_as_a_whole = self.regex is not None or self.json_schema is not None
        return 0 if matches_as_a_whole else self.stop_repeats

    def warpers(self) -> LogitsProcessorList:
        """Return transformers' processors, in the order in which its `generate` applies them."""
        chosen: list[LogitsProcessor] = []
        # Penalties apply to greedy answers too; the rest only shapes what is drawn from.
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        chosen += self.processors
        if not self.temperature:
            return LogitsProcessorList(chosen)
        if self.temperature != 1:
            chosen.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            chosen.append(MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(chosen)


GREEDY = SamplingConfig()


def read_generation_config(config: GenerationConfig) -> dict[str, object]:
    """Return the options that a GenerationConfig sets; refuse what this loop does not do.

    Which ids end an answer is up to the model's own config, and how long it may be up to
    max_new_tokens; `refuse_other_eos` in answers.py refuses a config that says otherwise.
    """
    if not isinstance(config, GenerationConfig):
        raise RestoreKVError(
            "config must be a SamplingConfig or transformers' GenerationConfig, not "
            f"{type(config).__name__}."
        )
    defaults = GenerationConfig().to_dict()
    own = config.to_dict()
    for name, value in sorted(own.items()):
        is_set = value != defaults.get(name) and asks_for_something(name, value)
        if is_set and name not in HONORED_FIELDS | IGNORED_FIELDS and not name.startswith("_"):
            fix = "use generate, transformers' own"
            if name == "max_new_tokens":
                fix = f"pass it to ask itself: ask(question, max_new_tokens={value!r})"
            raise RestoreKVError(f"ask takes no {name} from a GenerationConfig; {fix}.")
    options: dict[str, object] = {}
    # The values that transformers uses for options that the config leaves out.
    chance = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}
    if own.get("do_sample"):
        for name, default in chance.items():
            options[name] = default if own.get(name) is None else own[name]
    else:
        idle = [name for name, default in chance.items() if own.get(name) not in (None, default)]
        if idle:
            warn(
                f"The GenerationConfig sets {' and '.join(idle)} without do_sample=True, so the "
                "most likely token is always taken; set do_sample=True to sample."
            )
    our_names = {
        "repetition_penalty": "repetition_penalty",
        "stop_strings": "stop",
        "num_return_sequences": "samples",
    }
    for name, our_name in our_names.items():
        if own.get(name) is not None:
            options[our_name] = own[name]
    return options


def asks_for_something(name: str, value: object) -> bool:
    """Return whether the value of a GenerationConfig's field changes an answer."""
    # By identity: 0 equals False, but as an id or a number of seconds it asks for something.
    return value is not None and value is not False and value != NO_OP_VALUES.get(name)


NOT_FINITE = (
    "The model computes numbers that are not finite over this cache, so no answer can be chosen: "
    "its keys or values, or the model's weights, are damaged or too large; compress the context "
    "again, or load the model in float32."
)


def refuse_not_finite() -> NoReturn:
    """Raise the error for logits that are NaN or infinite, from which argmax and sampling would
    choose wrong tokens.
    """
    raise RestoreKVError(NOT_FINITE)


class FiniteLogits(LogitsProcessor):
    """Makes transformers' `generate` refuse logits that are not finite. Otherwise it would take the
    first token, or fail.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The largest of several numbers is NaN if one of them is.
        if not bool(scores.amax(-1).isfinite().all()):
            refuse_not_finite()
        return scores


@dataclass
class TokenSampler:
    """Chooses the tokens of one answer, and collects them.

    Args:
        sampling: How they are chosen.
        tokenizer: The model's tokenizer.
        ids: All ids (1, length) that the model has read; the answer is appended to them.
        seed: The seed of the random numbers.
        constraint: What the answer must match; None for anything.
        logprobs: The log-probability of every chosen token, if `sampling` asks for them.
        top: The likeliest ids in place of each token, with their log-probabilities.
        answer: The chosen ids.
        cancelled: Returns whether the client no longer waits for the answer; called after every
            token.
    """

    sampling: SamplingConfig
    tokenizer: Tokenizer
    ids: Tensor
    seed: int
    constraint: Constraint | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    cancelled: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.stream = TextStream(
            self.tokenizer,
            skip_special_tokens=False,
            continues=any_begins_with_space(self.sampling.stop),
        )
        self.channels = ChannelReader(self.tokenizer)
        self.ids_shown = 0  # ids of the answer that the stream or the channels have seen
        self.watch = RepetitionWatch(self.tokenizer, self.sampling.copies)
        check_bias(self.sampling.logit_bias, self.tokenizer)
        self.warpers = self.sampling.warpers()
        self.criteria = StoppingCriteriaList(self.sampling.criteria)

    def sample(self, logits: Tensor) -> int:
        """Return the next id; logits (V,) are the model's."""
        # On the CPU, so that the same numbers are drawn whatever device the model is on.
        logits = logits.detach().cpu().float()[None]
        if not math.isfinite(logits.max()):
            refuse_not_finite()
        allowed = self.constraint.allow(logits) if self.constraint else logits
        allowed = self.adjust(allowed)
        scores = self.warpers(self._long_ids, allowed.clone()) if self.warpers else allowed
        if self.warpers and not math.isfinite(scores.max()):
            raise RestoreKVError(
                "The logits processors leave no token to choose; change or leave out processors."
            )
        # A tie goes to the lowest id.
        if self.sampling.temperature:
            token = int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self.random))
        else:
            token = int(scores.max(-1).indices)
        if self.sampling.logprobs is not None:
            self.record(logits[0].log_softmax(-1), token, self.sampling.logprobs)
        if self.constraint:
            self.constraint.take(token)
        self.answer.append(token)
        self.ids = torch.cat([self.ids, torch.tensor([[token]])], -1)
        return token

    def adjust(self, logits: Tensor) -> Tensor:
        """Return logits (1, V) with the bias, and with the penalties for what is in the answer."""
        sampling = self.sampling
        frequency = sampling.frequency_penalty
        presence = sampling.presence_penalty
        if not (sampling.logit_bias or frequency or presence):
            return logits
        # Callers keep the logits, for log-probabilities.
        adjusted = logits.clone()
        for token, bias in (sampling.logit_bias or {}).items():
            if token >= logits.shape[-1]:
                raise OptionError(
                    f"logit_bias names the token {token}, an added one that the model has no "
                    "logits for; leave it out.",
                    "logit_bias",
                )
            adjusted[0, token] += bias
        if self.answer:
            counts = torch.bincount(torch.tensor(self.answer), minlength=logits.shape[-1]).to(
                logits.dtype
            )
            adjusted[0] -= frequency * counts + presence * (counts > 0)
        return adjusted

    def record(self, logprobs: Tensor, token: int, likeliest: int) -> None:
        self.logprobs.append(float(logprobs[token]))
        best = logprobs.topk(likeliest)
        self.top.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))

    @property
    def _long_ids(self) -> torch.LongTensor:
        # transformers' annotations name LongTensor, but to Python no tensor is one.
        return cast(torch.LongTensor, self.ids)

    @property
    def latest_logprobs(self) -> tuple[tuple[float, dict[int, float]], ...]:
        """The log-probability of the latest token, and the likeliest ids in its place with theirs;
        () if they were not asked for.
        """
        return ((self.logprobs[-1], self.top[-1]),) if self.logprobs else ()

    def ends(self) -> bool:
        """Return whether the answer ends here: by a stop string, a repetition, the criteria or the
        constraint, or because the client no longer waits.
        """
        if self.cancelled():
            return True
        if self.constraint and self.constraint.complete:
            return True
        if self.sampling.stop and find_first_stop(self.sampling.stop, self.text()) is not None:
            return True
        if self.count_repeated():
            return True
        return bool(self.criteria) and bool(self.criteria(self._long_ids, None).all())

    def count_repeated(self) -> int:
        """Return how many tokens at the end of the answer repeat what is before them; 0 if the
        options do not end an answer for that.
        """
        if not self.sampling.copies:
            return 0
        for token in self.answer[self.watch.count :]:
            self.watch.push(token)
        return self.watch.repeated

    def text(self) -> str:
        """Return what is shown of the answer, control tokens included."""
        for token in self.answer[self.ids_shown :]:
            if self.channels.push(token):
                self.stream.push(token)
        self.ids_shown = len(self.answer)
        return self.stream.get_text()


def check_bias(bias: Mapping[int, float] | None, tokenizer: Tokenizer) -> None:
    """Refuse ids that no token has."""
    strange = [token for token in bias or () if not 0 <= token < len(tokenizer)]
    if strange:
        raise OptionError(
            f"logit_bias names the token {strange[0]}, and this model's run from 0 to "
            f"{len(tokenizer) - 1}; give those.",
            "logit_bias",
        )


def make_samplers(
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
    read: Iterable[Tensor],
    seeds: Sequence[int],
    stop_ids: set[int],
    always: bool = False,
) -> list[TokenSampler] | None:
    """Return a sampler for each row of a batch, or None if the likeliest token is all that is
    needed.

    Args:
        sampling: How tokens are chosen.
        tokenizer: The model's tokenizer.
        read: The ids (1, length) that the model has read before each row's answer.
        seeds: The seed of each row's random numbers.
        stop_ids: The EOS ids, which a constraint allows when its text is complete.
        always: Return samplers even if the likeliest token is all that is needed.
    """
    if sampling.plain and not always:
        return None
    samplers = []
    for ids, seed in zip(read, seeds, strict=True):
        constraint = Constraint.make(tokenizer, sampling.json_schema, sampling.regex, stop_ids)
        samplers.append(TokenSampler(sampling, tokenizer, ids.cpu(), seed, constraint))
    return samplers


def find_first_stop(stop: Sequence[str], text: str) -> int | None:
    """Return where the first of the strings starts in a text, or None if there is none."""
    return min((start for each in stop if (start := text.find(each)) >= 0), default=None)


def any_begins_with_space(stop: Sequence[str]) -> bool:
    """Return whether a stop string begins with a space. It is sought in the text with its first
    space, which tokenizers such as Llama 2's drop if they decode an answer by itself.
    """
    return any(each.startswith(" ") for each in stop)
