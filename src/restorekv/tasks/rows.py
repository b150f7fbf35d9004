"""Reads the rows of benchmarks, from local files or from a dataset of the Hugging Face Hub, and
refuses other forms.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from restorekv.data.files import iterate_values, list_source_files, load_hub_dataset
from restorekv.errors import RestoreKVError, summarize_error
from restorekv.tasks.base import Question, Sample

Rows = Iterator[tuple[str, Any]]  # (location for messages, JSON value)


class FieldError(TypeError):
    """A field that a row lacks, that has a value of the wrong type, or that has the given fault."""

    def __init__(self, name: str, fault: str = "is missing or malformed") -> None:
        super().__init__(f"its field {name} {fault}")


def check_exists(where: str | Path) -> Path:
    """Return the path of a file or folder; raise RestoreKVError if there is none."""
    if not Path(where).exists():
        raise RestoreKVError(f"There is no file or folder {where}; check the path.")
    return Path(where)


def load_rows(where: str | Path) -> Rows:
    """Yield the rows of a file, or of all files below a folder in the order of their names."""
    for file in list_source_files(check_exists(where)):
        yield from load_file_rows(file)


def load_texts(where: str) -> list[str]:
    """Return the texts of a file, or of all files below a folder in the order of their names: plain
    ones, or the field `text` of JSON.
    """
    with check_form(
        f"{where} holds something other than texts or JSON with the field text",
        "give plain text, or JSON rows with a field 'text'",
    ):
        texts = [get_field(row, "text") for _, row in load_rows(where)]
    if not any(text.strip() for text in texts):
        raise RestoreKVError(f"{where} has no words; give texts.")
    return texts


def load_file_rows(file: Path) -> Rows:
    """Yield the rows of a file; one with an unknown ending is read as JSON."""
    return ((f"{file}, {location}", row) for location, row in iterate_values(file))


def load_hub_rows(
    name: str, subset: str | None, split: str, instead: str, revision: str | None = None
) -> Rows:
    """Yield the rows of one split, which the library `datasets` caches for runs without a network.

    Args:
        name: The id of the dataset on the hub.
        subset: The subset, or None if it has none.
        split: The split.
        instead: What to fetch instead and which setting to give, for the error.
        revision: The revision; None is the main branch.

    Raises:
        RestoreKVError: The split cannot be read.
    """
    try:
        dataset = load_hub_dataset(name, subset, split=split, revision=revision)
    except (
        Exception
    ) as error:  # unreachable, unknown, gated: the readers' errors share no base class
        raise explain_unreachable(f"{name} from the hub", error, instead) from error
    where = f"{name}, {subset}" if subset else name
    yield from ((f"{where}, row {number}", row) for number, row in enumerate(dataset, 1))


def explain_unreachable(what: str, error: Exception, instead: str) -> RestoreKVError:
    """Return the error for a failure of the Hub client: what cannot be read, why, and what to do
    instead.
    """
    return RestoreKVError(f"Cannot read {what} ({summarize_error(error)}); {instead}.")


@contextmanager
def check_form(problem: str, fix: str) -> Iterator[None]:
    """Turn the errors that reading a malformed row raises into one RestoreKVError: "`problem`;
    `fix`.".
    """
    try:
        yield
    except RestoreKVError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        detail = ""
        if isinstance(error, FieldError):
            detail = f" ({error})"
        raise RestoreKVError(f"{problem}{detail}; {fix}.") from error


def get_field(row: Any, name: str, kind: type | UnionType = str) -> Any:
    """Return `row[name]`; raise FieldError unless it is a `kind`."""
    if not isinstance(row, dict) or not isinstance(row.get(name), kind):
        raise FieldError(name)
    return row[name]


def get_texts(row: Any, name: str) -> list[str]:
    """Return the list of strings `row[name]`; raise FieldError if it is empty or something else."""
    if not get_field(row, name, list) or not all(isinstance(text, str) for text in row[name]):
        raise FieldError(name)
    return row[name]


def parse_kvpress_row(
    row: dict, name: str, task: str, answers: str, facts: Mapping[str, object] | None = None
) -> tuple[str, Question]:
    """Return (context, question) of a row in the format of kvpress's data sets.

    Args:
        row: The row.
        name: The id of the question.
        task: Its task.
        answers: The name of the field with the answers.
        facts: What else the metric needs.
    """
    # kvpress's columns; anything else is refused by name.
    context, text, prefix = (
        get_field(row, key) for key in ("context", "question", "answer_prefix")
    )
    limit = int(row["max_new_tokens"])
    return context, Question(
        name, task, text, tuple(get_texts(row, answers)), limit, prefix, facts or {}
    )


def group_by_context(questions: Iterable[tuple[str, Question]]) -> list[Sample]:
    """Return a sample per distinct context of (context, question) pairs, in the order of their
    first questions.
    """
    by_context: dict[str, list[Question]] = {}
    for context, question in questions:
        by_context.setdefault(context, []).append(question)
    return [Sample(group[0].id, context, tuple(group)) for context, group in by_context.items()]
