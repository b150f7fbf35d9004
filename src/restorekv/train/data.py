"""What the trainer reads: contexts with their questions, from JSON lines, a mixture or the bundled world."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.mixture import read_mixture, record
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.model.load import longest
from restorekv.model.prompt import default_between, encode, make_context
from restorekv.model.shape import decoder
from restorekv.tiny.suite import documents
from restorekv.train.config import TrainConfig
from restorekv.train.example import Example
from restorekv.train.json_lines import from_lines
from restorekv.train.parallel import is_spread


def bundled_examples(tokenizer: Tokenizer, count: int, seed: int, low: int, high: int) -> list[Example]:
    """`count` documents of the bundled world from the split that only the restore pass is trained on."""
    made = documents(tokenizer, count, f"restore {seed}", seed, low, high)
    return [
        Example(
            doc.text, tuple(q.text for q in doc.questions), tuple(" " + q.target for q in doc.questions),
            source="bundled world", licence="apache-2.0", where=f"bundled document {number}",
        )
        for number, doc in enumerate(made)
    ]  # fmt: skip


def read_examples(path: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> list[Example]:
    """A file of JSON lines or the folder of a mixture that this very model has answered (`restorekv data build`)."""
    return from_mixture(path, model, tokenizer) if path.is_dir() else apart(from_lines(path), tokenizer)


def apart(examples: list[Example], tokenizer: Tokenizer) -> list[Example]:
    """Questions with what `ask` will put between document and question."""
    between = default_between(tokenizer)
    return [replace(each, questions=tuple(between + text for text in each.questions)) for each in examples]


def read_contexts(path: Path) -> list[str]:
    """The contexts alone, of a file of JSON lines or a mixture, whoever has answered it."""
    return [each.context for each in (read_mixture(path)[0] if path.is_dir() else from_lines(path))]


def from_mixture(folder: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> list[Example]:
    """Of a folder that `restorekv data build` wrote; its answers are the teacher's own and are taken as they are."""
    found, manifest = read_mixture(folder, model, tokenizer)
    named = dict(zip(manifest["sources"], record(manifest), strict=True))
    sources = {
        name: f"{row['source']} ({row['dataset']}, {row.get('revision') or row['sha256'][:16]}, seed {row['seed']})"
        for name, row in named.items()
    }
    return [
        Example(each.context, each.questions, each.answers, each.answer_ids, sources[each.source], each.licence,
                f"{folder}, {each.source}, document {each.document}")
        for each in found
    ]  # fmt: skip


def check_lengths(model: PreTrainedModel, tokenizer: Tokenizer, examples: list[Example], config: TrainConfig) -> None:
    """Refuses contexts that are too long for the model or too short for one restore token, by the line they are from.

    Warns where fewer than n restore tokens will fit into the lowest ratio drawn. A backbone spread over processes needs
    a restore token at every ratio: without one there is no backward pass, and the others would wait for its shards.
    """
    most, scant, conventions = longest(model.config), 0, config.eviction().conventions
    ratio = config.ratio_min if is_spread(decoder(model)) else config.ratio_max
    for example in examples:
        context = make_context(tokenizer, example.context)
        asked = max(encode(tokenizer, question).shape[-1] for question in example.questions)
        written = max(map(len, example.answer_ids), default=0) if example.answer_ids else config.max_new_tokens
        needed = context.positions + config.restore_tokens + asked + context.suffix.shape[-1] + written
        if needed > most:
            raise RestoreKVError(
                f"{example.where} needs {needed} positions for a context of {context.tokens} tokens, the longest "
                f"question and answer, and the model was made for {most}; shorten it."
            )
        if not conventions.budget(ratio, context, 1, 1, config.restore_tokens).restore_tokens:
            raise RestoreKVError(
                f"{example.where} has {context.tokens} tokens: no restore token fits into r = {ratio:g} of "
                "them; leave it out."
            )
        fitting = conventions.budget(config.ratio_min, context, 1, 1, config.restore_tokens).restore_tokens
        scant += fitting < config.restore_tokens
    if scant:
        told = f"{scant} of {len(examples)} contexts are too short for {config.restore_tokens} restore tokens"
        warnings.warn(f"{told} at r = {config.ratio_min:g}; they get fewer.", RestoreKVWarning, stacklevel=3)
