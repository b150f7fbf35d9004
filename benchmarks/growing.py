"""The benchmark `growing`: contexts that are appended or composed, compared with contexts
compressed at once by their fidelity to the full cache and by time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.workload import check_novel, describe_machine, load_novel
from restorekv import tasks
from restorekv.compression.config import CompressionConfig
from restorekv.compression.growing import RESTORE_CHOICES, RestoreParts
from restorekv.context import CompressedContext
from restorekv.errors import BudgetError, RestoreKVError, RestoreKVWarning
from restorekv.evaluation.fidelity import FullAnswers
from restorekv.evaluation.stats import bootstrap_ratio
from restorekv.evaluation.tables import Table
from restorekv.generation.chat import Chat
from restorekv.generation.decoding import generate_ids
from restorekv.many_contexts import compose
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question
from restorekv.pipeline import compress
from restorekv.tasks.base import Sample

Make = Callable[[], CompressedContext]
ONCE = "at once"
ALONE = "at once, no adapter"
TURNS_FROM = 20_000  # the token of the novel at which the conversation's text begins


@dataclass(frozen=True)
class Options:
    """The options of `growing`, which the command's --help explains."""

    model: str
    benchmark: str
    evictor: str
    ratio: str
    parts: tuple[int, ...]
    restore: tuple[RestoreParts, ...] = RESTORE_CHOICES
    together: int = 0
    turns: int = 0

    def __post_init__(self) -> None:
        if min(self.parts, default=1) < 1:
            raise RestoreKVError(f"parts are at least 1, not {min(self.parts)}.")
        if self.together and self.parts:
            raise RestoreKVError("parts and together are not measured in one run; choose one.")
        for restore in self.restore:
            if restore not in RESTORE_CHOICES:
                raise RestoreKVError(
                    f"restore must be one of {', '.join(RESTORE_CHOICES)}, not {restore!r}."
                )


@dataclass(frozen=True)
class Text:
    """A text as token ids without the chat template, and the questions about it."""

    ids: list[int]
    sample: Sample


def run_growing(options: Options, tell: Callable[[str], None]) -> dict:
    """Compress every text in every way and compare the ways.

    With `together`, that many contexts form one text, and each of them is a part of it.
    """
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    rows: dict[str, list[dict]] = {}
    # A way that failed for a text is not compared: its figures would be of fewer texts.
    dropped: dict[str, dict] = {}
    found = list(_iterate_texts(options, tokenizer))
    if options.turns:
        _cut_conversation_text(tokenizer, options.turns)  # refuses too many before the first text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RestoreKVWarning)  # tasks word their questions whole
        for number, group in enumerate(found, 1):
            tell(f"text {number} of {len(found)}, {sum(len(text.ids) for text in group):,} tokens")
            for name, line in _compare_ways(model, tokenizer, options, group):
                if isinstance(line, str):
                    dropped.setdefault(name, {"texts": 0, "reason": line})["texts"] += 1
                else:
                    rows.setdefault(name, []).append(line)
    turns = {"turns": measure_conversation(model, tokenizer, options)} if options.turns else {}
    figures = {
        name: summarize_lines(lines, rows[ONCE])
        for name, lines in rows.items()
        if name not in dropped
    }
    return {
        "options": asdict(options),
        "machine": describe_machine(1),
        "texts": len(found),
        "rows": figures,
        "dropped": dropped,
        **turns,
    }


def _iterate_texts(options: Options, tokenizer: Tokenizer) -> Iterator[list[Text]]:
    """Yield groups of texts that are asked together: one, or `together` of them."""
    samples = tasks.make_benchmark(options.benchmark).choose_samples(tokenizer, "kvpress")
    size = options.together or 1
    if size > len(samples):
        raise RestoreKVError(
            f"{options.benchmark} has {len(samples)} texts, too few for {size} together."
        )
    for start in range(0, len(samples) - size + 1, size):
        yield [
            Text(tokenizer.encode(each.context, add_special_tokens=False), each)
            for each in samples[start : start + size]
        ]


def _compare_ways(
    model: PreTrainedModel, tokenizer: Tokenizer, options: Options, group: Sequence[Text]
) -> Iterator[tuple[str, dict | str]]:
    """Yield every way's name and its divergence, pairs and seconds for one group of texts, or the
    reason why it has none.
    """
    ids = [each for text in group for each in text.ids]
    full = compress(
        model, tokenizer, ids, ratio=1, adapter=None, config=CompressionConfig(separator="")
    )
    asked = [question for text in group for question in text.sample.questions]
    prompts = [
        encode_question(tokenizer, full.context, question.text, question.answer_prefix)[0]
        for question in asked
    ]
    limits = [question.max_new_tokens for question in asked]
    answers = generate_ids(model, tokenizer, full.cache, prompts, limits)
    reference = FullAnswers.from_answers(model, full.cache, prompts, answers)
    sizes = [len(answer) for answer in answers]
    del full
    for name, make in _list_ways(model, tokenizer, options, group, ids).items():
        start = time.perf_counter()
        try:
            small = make()
        except BudgetError as error:  # parts too short for their restore tokens
            yield name, str(error)
            continue
        seconds = time.perf_counter() - start
        divergences = reference.measure_divergences(model, small.cache)
        weighed = float(np.dot(divergences, sizes))
        yield (
            name,
            {
                "sum": weighed,
                "tokens": sum(sizes),
                "seconds": seconds,
                "pairs": small.manifest.pairs,
            },
        )


def _list_ways(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    options: Options,
    group: Sequence[Text],
    ids: list[int],
) -> Mapping[str, Make]:
    """Return the ways by name, each a function that makes a small cache of `ids`."""

    def once(part: Sequence[int] | Tensor = ids, adapter: str | None = "auto") -> CompressedContext:
        return compress(
            model,
            tokenizer,
            part,
            evictor=options.evictor,
            ratio=options.ratio,
            adapter=adapter,
            config=CompressionConfig(on_small_budget="fewer", separator=""),
        )

    def appended(count: int, restore: RestoreParts) -> CompressedContext:
        edges = [len(ids) * number // count for number in range(count + 1)]
        first, *later = (ids[start:end] for start, end in pairwise(edges))
        small = once(first, None if restore == "none" else "auto")
        for part in later:
            small = small.append(part, restore=restore)
        return small

    every: dict[str, Make] = {ONCE: once, ALONE: lambda: once(adapter=None)}
    if options.together:
        every["composed"] = lambda: compose([once(text.ids) for text in group])
        every["composed, no adapter"] = lambda: compose([once(text.ids, None) for text in group])
    for count in options.parts:
        for restore in options.restore:
            every[f"{count} parts, {restore}"] = lambda count=count, restore=restore: appended(
                count, restore
            )
    return every


def _cut_conversation_text(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Return the ids of the part of a novel that the conversation is about."""
    novel = tokenizer.encode(load_novel(), add_special_tokens=False)
    check_novel(len(novel), TURNS_FROM + tokens, f"turns about {tokens:,} of them")
    return novel[TURNS_FROM : TURNS_FROM + tokens]


def measure_conversation(
    model: PreTrainedModel, tokenizer: Tokenizer, options: Options
) -> dict[str, float]:
    """Return seconds to the first token of an answer in a conversation about `turns` tokens.

    The first figure is that of the full cache, prefill included; then come the turns of a
    conversation over a small cache. The last figure is the number of prompt tokens of turn 2.
    """
    ids = _cut_conversation_text(tokenizer, options.turns)
    questions = ["Who is speaking?", "Where are they?", "What happens in the end?"]

    def first(chat: Chat, question: str) -> float:
        chat.ask(question, 8)
        return chat.turns[-1].seconds[0]

    start = time.perf_counter()
    whole = compress(model, tokenizer, ids, ratio=1, adapter=None)
    read = time.perf_counter() - start
    small = compress(model, tokenizer, ids, evictor=options.evictor, ratio=options.ratio)
    figures = {"whole, first turn": read + first(whole.chat(), questions[0])}
    chat = small.chat()
    for number, question in enumerate(questions, 1):
        figures[f"small, turn {number}"] = first(chat, question)
    return {**figures, "tokens of turn 2": float(len(chat.turns[1].prompt_ids))}


def summarize_lines(lines: Sequence[dict], reference: Sequence[dict]) -> dict[str, float | None]:
    """Return KL per token with its interval, seconds and pairs of one way.

    KL and seconds are also given as multiples of those of compressing at once (`reference`).
    """
    sums = np.array([line["sum"] for line in lines], dtype=float)
    tokens = np.array([line["tokens"] for line in lines], dtype=float)
    kl, low, high = bootstrap_ratio(sums, tokens)
    seconds = sum(line["seconds"] for line in lines)
    base = sum(line["seconds"] for line in reference)
    own = sum(line["sum"] for line in reference) / tokens.sum()
    return {
        "kl": kl,
        "kl_low": low,
        "kl_high": high,
        "kl_times": kl / own,
        "seconds": seconds,
        "seconds_times": seconds / base,
        "pairs": sum(line["pairs"] for line in lines),
    }


def format_divergence(row: dict) -> str:
    """Return KL with its interval; there is no interval if there are too few texts."""
    if row["kl_low"] is None:
        return f"{row['kl']:.3f}"
    return f"{row['kl']:.3f} [{row['kl_low']:.3f}, {row['kl_high']:.3f}]"


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table, then sentences on the conversation, the texts and the machine."""
    options = result["options"]
    lines = [
        [
            name,
            format_divergence(row),
            f"{row['kl_times']:.2f}",
            f"{row['seconds_times']:.2f}",
            f"{row['pairs']:,}",
        ]
        for name, row in result["rows"].items()
    ]
    for name, refusal in result.get("dropped", {}).items():
        cause = f"refused by {refusal['texts']} of {result['texts']} texts: {refusal['reason']}"
        lines.append([name, cause, "", "", ""])
    head = ["way", "KL to the full cache", "times at once", "seconds, times at once", "pairs"]
    yield Table(
        "growing",
        f"{options['evictor']} at r = {options['ratio']}, {options['benchmark']}",
        head,
        lines,
    )
    for name, value in result.get("turns", {}).items():
        yield (
            f"{name}: {value:.0f}"
            if "tokens" in name
            else f"{name}: {value:.3f} s to the first token"
        )
    yield f"{options['model']}, {result['texts']} texts, {result['machine']['processor']}."
