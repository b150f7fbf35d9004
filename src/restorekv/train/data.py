"""What the trainer reads: contexts with their questions, from JSON lines, a mixture or the bundled world."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.bundled.suite import documents
from restorekv.data.mixture import read_mixture
from restorekv.errors import RestoreKVError
from restorekv.licences import RUNG, identifier
from restorekv.prompt import make_context


@dataclass(frozen=True)
class Example:
    """A context and what is asked about it.

    A draft is a guess at the teacher's greedy answer; it is used where the teacher confirms it and replaced by the
    teacher's own words where not, so drafts save time and never change the training data.
    """

    context: str
    questions: tuple[str, ...]
    drafts: tuple[str | None, ...]
    answer_ids: tuple[tuple[int, ...], ...] | None = None  # of answers that this very model wrote
    source: str | None = None
    licence: str | None = None
    where: str = ""  # file and line or row, for messages


def bundled_examples(tokenizer: Tokenizer, count: int, seed: int, low: int, high: int) -> list[Example]:
    """`count` documents of the bundled world from the split that only the restore pass is trained on."""
    made = documents(tokenizer, count, f"restore {seed}", seed, low, high)
    return [
        Example(
            doc.text, tuple(q.text for q in doc.questions), tuple(" " + q.target for q in doc.questions),
            source="bundled world", licence="apache-2.0",
        )
        for doc in made
    ]  # fmt: skip


def read_examples(path: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> list[Example]:
    """A file of JSON lines or the folder of a mixture that this very model has answered (`restorekv data build`).

    A line is `{"context": text, "questions": [text, ...]}`, with "answers" (one text a question), "source" and
    "licence" if they are known. Raises RestoreKVError that names the line of what cannot be trained on.
    """
    examples = from_mixture(path, model, tokenizer) if path.is_dir() else from_lines(path)
    most = model.config.get_text_config().max_position_embeddings
    for example in examples:
        tokens = make_context(tokenizer, example.context).positions
        if tokens > most:
            raise RestoreKVError(
                f"{example.where} has a context of {tokens} tokens, and the model was made for {most}; shorten it."
            )
    return examples


def from_mixture(folder: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> list[Example]:
    """Of a folder that `restorekv data build` wrote; its answers are the teacher's own and are taken as they are."""
    found, _ = read_mixture(folder, model, tokenizer)
    return [
        Example(each.context, each.questions, each.answers, each.answer_ids, each.source, each.licence,
                f"{folder}, {each.source}, document {each.document}")
        for each in found
    ]  # fmt: skip


def from_lines(path: Path) -> list[Example]:
    """Of JSON lines."""
    if not path.is_file():
        raise RestoreKVError(f"There is no training file {path}; give a JSON-lines file, a mixture or 'bundled'.")
    examples = []
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            examples.append(_example(line, f"{path}, line {number}"))
    if not examples:
        raise RestoreKVError(f"The training file {path} has no examples; write one JSON object a line.")
    return examples


def sources(examples: list[Example]) -> list[dict[str, object]]:
    """For the records: contexts and questions by source and licence; None where nobody has said it."""
    found: dict[tuple, list[Example]] = {}
    for example in examples:
        found.setdefault((example.source, example.licence), []).append(example)
    return [
        {"source": source, "licence": licence, "contexts": len(own), "examples": sum(len(x.questions) for x in own)}
        for (source, licence), own in found.items()
    ]


def lines(path: Path) -> list[str]:
    """Of a UTF-8 file; U+2028 and its like do not end a line of JSON."""
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RestoreKVError(f"The training file {path} is not UTF-8 text; convert it first.") from error


def _example(line: str, where: str) -> Example:
    try:
        row = json.loads(line)
        context, questions = row["context"], tuple(row["questions"])
        source, licence = row.get("source"), row.get("licence")
        drafts = tuple(row.get("answers") or [None] * len(questions))
        texts = [context, *questions, *(text for text in (*drafts, source, licence) if text is not None)]
        paired = isinstance(row["questions"], list) and len(drafts) == len(questions) > 0
        well_formed = paired and all(isinstance(text, str) and text.strip() for text in texts)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        form = '{"context": text, "questions": [text, ...]}, with as many "answers" or none, and no text empty'
        raise RestoreKVError(f"{where} is not of the form {form}; mend the line.")
    if licence is not None and (licence := identifier(licence)) not in RUNG:
        raise RestoreKVError(
            f"{where} has the licence {licence!r}, which is not known here; give a name as on the Hugging Face hub, "
            "or none for a text of your own."
        )
    return Example(context, questions, drafts, None, source, licence, where)
