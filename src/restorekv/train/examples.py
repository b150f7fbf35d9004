"""What a run trains on: contexts with their questions, from JSON lines, a mixture or the tiny
world, step by step.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import iterate_values
from restorekv.data.mixture import read_mixture, summarize_sources
from restorekv.errors import RestoreKVError, warn
from restorekv.model.prompt import (
    count_usable_positions,
    encode_text,
    get_default_between,
    make_context,
)
from restorekv.model.shape import get_backbone
from restorekv.restore.licenses import KNOWN, normalize_license
from restorekv.spec import split_specs
from restorekv.tiny.suite import draw_documents
from restorekv.train.config import TrainConfig
from restorekv.train.parallel import is_sharded

LINE_KEYS = (
    "context",
    "questions",
    "answers",
    "source",
    "license",
    "meta",
)  # meta: free for the user


@dataclass(frozen=True)
class Example:
    """A context, its questions, and what is known of their answers.

    A draft is a guess at the teacher's greedy answer; the teacher confirms it or writes its own, so
    drafts save time and never change the training data.
    """

    context: str
    questions: tuple[str, ...]
    drafts: tuple[str | None, ...]
    answer_ids: tuple[tuple[int, ...], ...] | None = None  # of answers that this very model wrote
    source: str | None = None
    license: str | None = None
    where: str = ""  # file and line or row, for messages


def count_sources(examples: Sequence[Example]) -> list[dict[str, object]]:
    """Return contexts and questions by source and license, None where unknown, for an adapter's
    record.
    """
    groups: dict[tuple, list[Example]] = {}
    for example in examples:
        groups.setdefault((example.source, example.license), []).append(example)
    rows = []
    for (source, license), group in groups.items():
        row = {"source": source, "license": license, "contexts": len(group)}
        row["examples"] = sum(len(example.questions) for example in group)
        if all(example.answer_ids is not None for example in group):
            row["answers"] = "written by this model when the data was built"
        rows.append(row)
    return rows


def hash_examples(examples: Sequence[Example]) -> str:
    """Return 16 hex digits of everything but where it was read from; checkpoints hold them."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(asdict(replace(example, where=""))).encode())
    return digest.hexdigest()[:16]


def make_tiny_examples(
    tokenizer: Tokenizer, count: int, seed: int, low: int, high: int
) -> list[Example]:
    """Return `count` documents of the tiny world, of the split that only the restore pass is
    trained on.
    """
    return [
        Example(
            document.text,
            tuple(q.text for q in document.questions),
            tuple(" " + q.target for q in document.questions),
            source="tiny world",
            license="apache-2.0",
            where=f"document {number} of the tiny world",
        )
        for number, document in enumerate(
            draw_documents(tokenizer, count, f"restore {seed}", seed, low, high)
        )
    ]


def read_examples(path: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> list[Example]:
    """Read JSON lines, or the folder of a mixture that this very model has answered (`restorekv
    data build`).
    """
    if path.is_dir():
        return _read_mixture_examples(path, model, tokenizer)
    between = get_default_between(tokenizer)  # as `ask` puts it between document and question
    return [
        replace(each, questions=tuple(between + text for text in each.questions))
        for each in _read_line_examples(path)
    ]


def read_contexts(paths: Sequence[Path]) -> list[str]:
    """Read the distinct contexts of JSON lines and mixtures, whichever model answered them; warn
    of repeated ones.
    """
    texts = [
        each.context
        for path in paths
        for each in (read_mixture(path)[0] if path.is_dir() else _read_line_examples(path))
    ]
    distinct = list(dict.fromkeys(texts))
    if repeated := len(texts) - len(distinct):
        warn(f"{repeated} of {len(texts)} contexts repeat an earlier one; each counts once.")
    return distinct


def _read_mixture_examples(
    folder: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> list[Example]:
    contexts, manifest = read_mixture(folder, model, tokenizer)
    accounts = dict(zip(manifest["sources"], summarize_sources(manifest), strict=True))
    names = {
        name: f"{row['source']} ({row['dataset']}, {row.get('revision') or row['sha256'][:16]}, seed {row['seed']})"
        for name, row in accounts.items()
    }
    return [
        Example(
            each.context,
            each.questions,
            each.answers,
            each.answer_ids,
            names[each.source],
            each.license,
            f"{folder}, {each.source}, document {each.document}",
        )
        for each in contexts
    ]


def _read_line_examples(path: Path) -> list[Example]:
    """Read lines {"context", "questions"}, with "answers" (one each), "source" and "license" if
    known.
    """
    if not path.is_file():
        raise RestoreKVError(
            f"There is no training file {path}; give a JSON-lines file, a mixture or 'tiny'."
        )
    examples = [_parse_example(row, f"{path}, {place}") for place, row in iterate_values(path)]
    if not examples:
        raise RestoreKVError(
            f"The training file {path} has no examples; write one JSON object per line."
        )
    return examples


def _parse_example(row: Any, where: str) -> Example:
    if problem := _find_line_fault(row):
        raise RestoreKVError(f"{where} {problem}; fix the line.")
    license = row.get("license")
    if license is not None and (license := normalize_license(license)) not in KNOWN:
        raise RestoreKVError(
            f"{where} has the unknown license {license!r}; give a name as on the Hugging Face hub, or none for a text "
            "of your own."
        )
    drafts = tuple(row.get("answers") or [None] * len(row["questions"]))
    return Example(
        row["context"], tuple(row["questions"]), drafts, None, row.get("source"), license, where
    )


def _find_line_fault(row: object) -> str | None:
    """Return what is wrong with a line's object, or None."""
    if not isinstance(row, dict):
        return 'is not an object {"context": ..., "questions": [...]}'
    unknown = [key for key in row if key not in LINE_KEYS]
    if unknown:
        return f"has the unknown key {unknown[0]!r} (known: {', '.join(LINE_KEYS)})"
    if not _has_text(row.get("context")):
        return 'has no text in "context"'
    lists = ("questions", "answers") if row.get("answers") else ("questions",)
    if missing := [name for name in lists if not isinstance(row.get(name), list) or not row[name]]:
        return f'has no list in "{missing[0]}"'
    texts = {f'"{name}"': row[name] for name in LINE_KEYS[3:5] if row.get(name) is not None}
    texts |= {
        f'"{name}", number {number}': text
        for name in lists
        for number, text in enumerate(row[name], 1)
    }
    if empty := [place for place, text in texts.items() if not _has_text(text)]:
        return f"has no text in {empty[0]}"
    if len(lists) == 2 and len(row["answers"]) != len(row["questions"]):
        return f"has {len(row['questions'])} questions and {len(row['answers'])} answers"
    return None


def _has_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True)
class StepSample:
    """One context of one step: its index, the indices of its questions, the ratio, and how many
    restore tokens.

    `evictor` is the index of the evictor among those of the run.
    """

    index: int
    questions: tuple[int, ...]
    ratio: str
    restore_tokens: int
    evictor: int = 0


def draw_step_samples(
    config: TrainConfig, step: int, examples: list[Example], processes: int = 1
) -> list[StepSample]:
    """Return the samples of `step` for all processes, which seed and step alone decide; every
    epoch shuffles anew.

    The `config.draws` samples of a context follow each other and share its evictor.
    """
    rng = random.Random(f"step {config.seed} {step}")
    count = config.contexts * processes
    evictors = len(split_specs(config.evictor))
    samples = []
    for number in range(step * count, (step + 1) * count):
        epoch, place = divmod(number, len(examples))
        order = list(range(len(examples)))
        random.Random(f"order {config.seed} {epoch}").shuffle(order)
        asked = range(len(examples[order[place]].questions))
        drawn = []
        for _ in range(config.draws):
            questions = tuple(rng.sample(asked, min(config.questions, len(asked))))
            ratio = f"{_draw_ratio(config, rng):.6f}"
            tokens = (
                rng.randint(1, config.restore_tokens) if config.nested else config.restore_tokens
            )
            drawn.append((questions, ratio, tokens))
        evictor = rng.randrange(evictors) if evictors > 1 else 0
        samples += [StepSample(order[place], *each, evictor) for each in drawn]
    return samples


def select_own_samples(
    samples: Sequence[StepSample], draws: int, rank: int, processes: int
) -> list[StepSample]:
    """Return one process' share of a step: whole contexts, with all their draws."""
    contexts = [samples[first : first + draws] for first in range(0, len(samples), draws)]
    return [sample for context in contexts[rank::processes] for sample in context]


def _draw_ratio(config: TrainConfig, rng: random.Random) -> float:
    """Draw r ~ U(r_min, r_max), or uniformly in log r."""
    if config.ratio_law == "uniform":
        return rng.uniform(config.ratio_min, config.ratio_max)
    return math.exp(rng.uniform(math.log(config.ratio_min), math.log(config.ratio_max)))


def check_example_lengths(
    model: PreTrainedModel, tokenizer: Tokenizer, examples: list[Example], config: TrainConfig
) -> None:
    """Refuse contexts too long for the model or too short for one restore token; name the line
    they are from.

    Warns where fewer than n restore tokens fit into the lowest ratio. A backbone that is spread
    over processes needs a restore token at every ratio: without one there is no backward pass, and
    the others would wait for its shards.
    """
    limit = count_usable_positions(model)
    few = 0
    conventions = config.make_evictions()[0].config
    ratio = config.ratio_min if is_sharded(get_backbone(model)) else config.ratio_max
    for example in examples:
        context = make_context(tokenizer, example.context)
        asked = max(encode_text(tokenizer, question).shape[-1] for question in example.questions)
        answer = (
            max(map(len, example.answer_ids), default=0)
            if example.answer_ids
            else config.max_new_tokens
        )
        needed = (
            context.positions + config.restore_tokens + asked + context.suffix.shape[-1] + answer
        )
        if needed > limit:
            raise RestoreKVError(
                f"{example.where} needs {needed} positions for a context of {context.tokens} tokens, the longest "
                f"question and answer, and the model was made for {limit}; shorten it."
            )
        if not conventions.make_budget(ratio, context, 1, 1, config.restore_tokens).restore_tokens:
            raise RestoreKVError(
                f"{example.where} has {context.tokens} tokens: no restore token fits into r = {ratio:g} of "
                "them; leave it out."
            )
        fitting = conventions.make_budget(
            config.ratio_min, context, 1, 1, config.restore_tokens
        ).restore_tokens
        few += fitting < config.restore_tokens
    if few:
        warn(
            f"{few} of {len(examples)} contexts are too short for {config.restore_tokens} restore tokens "
            f"at r = {config.ratio_min:g}; they get fewer."
        )
