"""What a run trains on: contexts with their questions, from JSON lines, a mixture or the tiny
world. draw.py says which of them a step takes.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import iterate_values
from restorekv.data.mixture import read_mixture, summarize_sources
from restorekv.errors import RestoreKVError, warn
from restorekv.model.position_limits import count_usable_positions
from restorekv.model.prompt import encode_text, get_default_separator, make_context
from restorekv.model.shape import get_backbone
from restorekv.restore.licenses import KNOWN, normalize_license
from restorekv.tiny.suite import draw_documents
from restorekv.train.config import TrainConfig
from restorekv.train.parallel import is_sharded

LINE_KEYS = (
    "context",
    "questions",
    "answers",
    "source",
    "license",
    "id",  # this and the next key are the benchmark's `lines`, whose files can be trained on
    "task",
    "meta",  # free for the user
)


@dataclass(frozen=True)
class TrainingContext:
    """A context to train on, its questions, and what is known of their answers.

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


def count_sources(examples: Sequence[TrainingContext]) -> list[dict[str, object]]:
    """Return the numbers of contexts and questions by source and license (None if unknown), for an
    adapter's record.
    """
    groups: dict[tuple, list[TrainingContext]] = {}
    for example in examples:
        groups.setdefault((example.source, example.license), []).append(example)
    rows = []
    for (source, license), group in groups.items():
        row = {
            "source": source,
            "license": license,
            "contexts": len(group),
            "examples": sum(len(example.questions) for example in group),
        }
        # Recorded only if it is true of every example of the row.
        if all(example.answer_ids is not None for example in group):
            row["answers"] = "written by this model when the data was built"
        rows.append(row)
    return rows


def hash_examples(examples: Sequence[TrainingContext]) -> str:
    """Return 16 hex digits that identify the examples, whatever they were read from; checkpoints
    hold them.
    """
    digest = hashlib.sha256()
    for example in examples:
        # A different path or line number does not make different data.
        digest.update(json.dumps(asdict(replace(example, where=""))).encode())
    return digest.hexdigest()[:16]


def make_tiny_examples(
    tokenizer: Tokenizer, count: int, seed: int, low: int, high: int
) -> list[TrainingContext]:
    """Return documents of the tiny world, of the split that only the restore pass is trained on.

    Args:
        tokenizer: The tiny model's.
        count: How many documents.
        seed: Decides the documents.
        low: Fewest tokens of a document.
        high: Most tokens of a document.
    """
    examples = []
    drawn = draw_documents(tokenizer, count, f"restore {seed}", seed, low, high)
    for number, document in enumerate(drawn):
        examples.append(
            TrainingContext(
                context=document.text,
                questions=tuple(question.text for question in document.questions),
                drafts=tuple(" " + question.target for question in document.questions),
                source="tiny world",
                license="apache-2.0",
                where=f"document {number} of the tiny world",
            )
        )
    return examples


def read_examples(
    path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> list[TrainingContext]:
    """Read JSON lines, or the folder of a mixture that this very model has answered (`restorekv
    data build`).
    """
    # A folder is a mixture, with answers that this very model gave; a file has questions only, or
    # drafts as well.
    if path.is_dir():
        return _read_mixture_examples(path, model, tokenizer)
    # The same separator that `ask` puts between document and question.
    separator = get_default_separator(tokenizer)
    examples = []
    for example in _read_line_examples(path):
        questions = tuple(separator + text for text in example.questions)
        examples.append(replace(example, questions=questions))
    return examples


def read_contexts(paths: Sequence[Path]) -> list[str]:
    """Read the distinct contexts of JSON lines and mixtures, whichever model answered them; warn
    of repeated ones.
    """
    texts = []
    for path in paths:
        contexts = read_mixture(path)[0] if path.is_dir() else _read_line_examples(path)
        texts += [each.context for each in contexts]
    distinct = list(dict.fromkeys(texts))
    repeated = len(texts) - len(distinct)
    if repeated:
        warn(f"{repeated} of {len(texts)} contexts repeat an earlier one; each counts once.")
    return distinct


def _read_mixture_examples(
    folder: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> list[TrainingContext]:
    """Read the contexts of a mixture with the answers that this very model gave."""
    contexts, manifest = read_mixture(folder, model, tokenizer)
    names = {}
    accounts = summarize_sources(manifest)
    for source, account in zip(manifest["sources"], accounts, strict=True):
        version = account.get("revision") or account["sha256"][:16]
        dataset = f"{account['dataset']}, {version}, seed {account['seed']}"
        names[source] = f"{account['source']} ({dataset})"
    examples = []
    for each in contexts:
        examples.append(
            TrainingContext(
                context=each.context,
                questions=each.questions,
                drafts=each.answers,
                answer_ids=each.answer_ids,
                source=names[each.source],
                license=each.license,
                where=f"{folder}, {each.source}, document {each.document}",
            )
        )
    return examples


def _read_line_examples(path: Path) -> list[TrainingContext]:
    """Read lines {"context", "questions"}, with "answers" (one each), "source" and "license" if
    known.
    """
    if not path.is_file():
        raise RestoreKVError(
            f"There is no training file {path}; give a JSON-lines file, a mixture or 'tiny'."
        )
    if path.suffix.lower() == ".txt":
        raise RestoreKVError(
            f"{path} is a plain text; training data are JSON lines "
            '{"context": "...", "questions": ["..."]}, or a folder that restorekv data build made.'
        )
    examples = [
        _parse_example(row, f"{path}, {location}") for location, row in iterate_values(path)
    ]
    if not examples:
        raise RestoreKVError(
            f"The training file {path} has no examples; write one JSON object per line."
        )
    return examples


def _parse_example(row: Any, where: str) -> TrainingContext:
    """Return the example of a line's object; refuse a wrong one."""
    # The form first, so that everything below can rely on it.
    problem = _find_line_fault(row)
    if problem:
        raise RestoreKVError(f"{where} {problem}; fix the line.")
    license = row.get("license")
    if license is not None:
        license = normalize_license(license)
        # A misspelled license would silently count as unknown and restrict the adapter.
        if license not in KNOWN:
            raise RestoreKVError(
                f"{where} has the unknown license {license!r}; give a name as on the Hugging Face "
                "hub, or none for a text of your own."
            )
    return TrainingContext(
        context=row["context"],
        questions=tuple(row["questions"]),
        drafts=tuple(map(_choose_draft, row.get("answers") or [None] * len(row["questions"]))),
        source=row.get("source"),
        license=license,
        where=where,
    )


def _choose_draft(answer: str | list[str] | None) -> str | None:
    """Return the text of an answer, or the first one of several, as a draft."""
    return answer[0] if isinstance(answer, list) else answer


def _find_line_fault(row: object) -> str | None:
    """Return what is wrong with a line's object, or None."""
    if not isinstance(row, dict):
        return 'is not an object {"context": ..., "questions": [...]}'
    for key in row:
        if key not in LINE_KEYS:
            return f"has the unknown key {key!r} (known: {', '.join(LINE_KEYS)})"
    if not _has_text(row.get("context")):
        return 'has no text in "context"'
    lists = ["questions"]
    if row.get("answers"):
        lists.append("answers")
    for name in lists:
        if not isinstance(row.get(name), list) or not row[name]:
            return f'has no list in "{name}"'
    for name in ("source", "license"):
        if row.get(name) is not None and not _has_text(row[name]):
            return f'has no text in "{name}"'
    for name in lists:
        is_answered = name == "answers"
        for number, text in enumerate(row[name], 1):
            if not (_is_answer(text) if is_answered else _has_text(text)):
                return f'has no text in "{name}", number {number}'
    if len(lists) == 2 and len(row["answers"]) != len(row["questions"]):
        return f"has {len(row['questions'])} questions and {len(row['answers'])} answers"
    return None


def _is_answer(value: object) -> bool:
    """Return whether a value is an answer: a text, a list of texts that are all right, or null if
    it is not known.
    """
    if isinstance(value, list):
        return bool(value) and all(map(_has_text, value))
    return value is None or _has_text(value)


def _has_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def keep_short_examples(
    tokenizer: Tokenizer, examples: Sequence[TrainingContext], longest: int
) -> list[TrainingContext]:
    """Return the examples whose context has at most `longest` tokens, in their order.

    Raises:
        RestoreKVError: All of them are longer.
    """
    lengths = [make_context(tokenizer, example.context).text_tokens for example in examples]
    short = [
        example for example, length in zip(examples, lengths, strict=True) if length <= longest
    ]
    if examples and not short:
        raise RestoreKVError(
            f"All {len(examples)} contexts have more than {longest} tokens, the shortest "
            f"{min(lengths)}; raise --longest-context."
        )
    return short


def _describe_faults(faults: list[str]) -> str:
    """Return what is wrong with the first of several contexts, and how many others have the same
    fault.
    """
    if len(faults) == 1:
        return faults[0]
    others = len(faults) - 1
    verb = "context is" if others == 1 else "contexts are"
    return f"{faults[0]} ({others:,} more {verb} like this)"


def check_example_lengths(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: list[TrainingContext],
    config: TrainConfig,
) -> None:
    """Refuse contexts too long for the model or too short for one restore token; name the line
    they are from.

    Warn if fewer than n restore tokens fit into the lowest ratio. If the backbone is spread over
    processes, a restore token must fit at every ratio: a process without one would have no backward
    pass, and the others would wait for its shards.
    """
    limit = count_usable_positions(model)
    few = 0
    long: list[str] = []  # a message for every context that is refused
    short: list[str] = []
    eviction_config = config.make_evictions()[0].config
    ratio = config.ratio_max
    if is_sharded(get_backbone(model)):
        ratio = config.ratio_min
    for example in examples:
        context = make_context(tokenizer, example.context)
        # The longest question and answer decide how many positions a context needs.
        asked = max(encode_text(tokenizer, question).shape[-1] for question in example.questions)
        answer = config.max_new_tokens
        if example.answer_ids:
            answer = max(map(len, example.answer_ids), default=0)
        tail = config.restore_tokens + asked + context.suffix_ids.shape[-1] + answer
        needed = context.num_tokens + tail
        if needed > limit:
            long.append(
                f"{example.where} needs {needed} positions for a context of {context.text_tokens} "
                "tokens, the longest question and answer, and the model was made for "
                f"{limit}"
            )
            continue
        # One layer and one head are enough: how many restore tokens fit does not depend on L and H.
        budget = eviction_config.make_budget(ratio, context, 1, 1, config.restore_tokens)
        if not budget.restore_tokens:
            tokens = "1 token" if context.text_tokens == 1 else f"{context.text_tokens} tokens"
            short.append(
                f"{example.where} has {tokens}: no restore token fits into r = {ratio:g} of them"
            )
            continue
        tightest = eviction_config.make_budget(
            config.ratio_min, context, 1, 1, config.restore_tokens
        )
        if tightest.restore_tokens < config.restore_tokens:
            few += 1
    # All are counted before the first is reported, so that they can be fixed at once.
    if long:
        raise RestoreKVError(
            f"{_describe_faults(long)}; shorten or leave out such texts (--longest-context)."
        )
    if short:
        raise RestoreKVError(f"{_describe_faults(short)}; leave out such texts.")
    if few:
        warn(
            f"{few} of {len(examples)} contexts are too short for {config.restore_tokens} restore "
            f"tokens at r = {config.ratio_min:g}; they get fewer."
        )
